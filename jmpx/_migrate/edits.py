"""Rewrites the source of one module, with comments above what it is not sure of."""

import ast
import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import libcst as cst
import libcst.matchers as m
from libcst.codemod import CodemodContext
from libcst.codemod.visitors import RemoveImportsVisitor
from libcst.helpers import get_full_name_for_node
from libcst.metadata import (
    GlobalScope,
    MetadataWrapper,
    ParentNodeProvider,
    PositionProvider,
    Scope,
)

from jmpx._migrate import moves
from jmpx._migrate.definitions import Definitions
from jmpx._migrate.names import DYNAMIC_SCALE, Facts, Uses, names_in

COMMENT = "# jmpx migrate: "
_GRADIENT_FUNCTIONS = ("jmpx.filter_grad", "jmpx.filter_value_and_grad")
_MODULES = ("haiku.mixed_precision", DYNAMIC_SCALE)  # whose names are in jmpx now
_CLASS = f"{DYNAMIC_SCALE}.DynamicScale"
_OTHER_CLASS = "jmpx.DynamicLossScale has other arguments and attributes than DynamicScale"
_WRITE_CLASS = "write jmpx.DynamicLossScale for DynamicScale"
_WRITE_STEP = (
    "write (loss, dynamic_scale, finite, grads) = jmpx.filter_value_and_grad(loss_fn, "
    'dynamic_scale, policy="full")(params)'
)
_VALUE_AND_GRAD = m.Call(m.Attribute(attr=m.Name("value_and_grad")))
_FOUR = m.Assign([m.AssignTarget(m.Tuple([m.Element()] * 4))])


@dataclasses.dataclass(frozen=True)
class Migrated:
    """A migrated source.

    Args:
        text: the new source; the old one where there is nothing to do.
        edits: how many names, imports and calls were rewritten.
        marks: the line and the words of each comment that says what is left to do.
    """

    text: str
    edits: int
    marks: tuple[tuple[int, str], ...]


def migrate_source(text: str) -> Migrated:
    """Rewrites the source of a module.

    Raises:
        SyntaxError: if it is not Python.
        ValueError: if libcst does not give back the text that it has read.
    """
    mark = "\ufeff" if text.startswith("\ufeff") else ""  # the byte order mark
    end = "\r" if "\r" in text and "\n" not in text else "\n"  # libcst drops some of these
    text = text.removeprefix(mark).replace(end, "\n")
    ast.parse(text)  # libcst, which is not in Python, crashes where this raises RecursionError
    new, edits = _rewritten(text)
    if edits.marks:
        new, edits = _rewritten(_with_comments(text, edits.marks))
    text = new
    lines = ((line, each.strip()) for line, each in enumerate(_lines(text), 1))
    marks = ((line, each.removeprefix(COMMENT)) for line, each in lines if each.startswith(COMMENT))
    return Migrated(mark + text.replace("\n", end), edits.count, tuple(marks))


def _rewritten(text: str) -> tuple[str, "_Edits"]:
    module = cst.parse_module(text)
    if module.code != text:
        raise ValueError("libcst does not read it to the end.")
    wrapper = MetadataWrapper(module)
    uses = Uses()
    wrapper.visit(uses)
    edits = _Edits(uses.facts())
    tree = wrapper.visit(edits)
    if edits.needs_jmpx:
        tree = _with_import(tree)
    if edits.unused:
        context = CodemodContext()
        for package, name, alias in edits.unused:
            if (alias or name).partition(".")[0] not in edits.commented:
                RemoveImportsVisitor.remove_unused_import(context, package, name, alias)
        tree = RemoveImportsVisitor(context).transform_module(tree)
    return tree.code, edits


def _with_import(tree: cst.Module) -> cst.Module:
    """Returns a module with `import jmpx` among its first imports."""
    body = [*tree.body]
    end = 1 if tree.get_docstring() is not None else 0
    while end < len(body) and _is_import(body[end]):
        end += 1
    for line in body[:end]:
        for each in m.findall(line, m.Import()):
            for alias in cst.ensure_type(each, cst.Import).names:
                if alias.asname is None and _first(alias.name) == "jmpx":
                    return tree
    new: Any = cst.parse_statement("import jmpx\n")
    rest, header = body[end:], [*tree.header]
    if rest and end and not rest[0].leading_lines:
        rest[0] = rest[0].with_changes(leading_lines=[cst.EmptyLine(indent=False)])
    while not end and header and header[-1].comment and COMMENT in f"{header[-1].comment.value} ":
        above = [header.pop(), *rest[0].leading_lines]  # a comment of the first statement
        rest[0] = rest[0].with_changes(leading_lines=above)
    return tree.with_changes(header=header, body=[*body[:end], new, *rest])


def _is_import(node: cst.CSTNode) -> bool:
    """Whether a statement has only imports, or one of `__future__`, which comes first."""
    imports = m.Import() | m.ImportFrom()
    first = m.SimpleStatementLine([m.ImportFrom(m.Name("__future__")), m.ZeroOrMore()])
    return m.matches(node, m.SimpleStatementLine([imports, m.ZeroOrMore(imports)]) | first)


def _first(node: cst.CSTNode) -> str:
    return (get_full_name_for_node(node) or "").partition(".")[0]


def _lines(text: str) -> list[str]:
    """Returns the lines of a program, with their ends: a form feed ends none."""
    return re.findall(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+", text)


def _with_comments(text: str, marks: Sequence[tuple[int, str]]) -> str:
    """Returns the text with a comment above each marked line, unless it is there already."""
    lines = _lines(text)
    for line, words in sorted(set(marks), reverse=True):
        code = lines[line - 1]
        indent = code[: len(code) - len(code.lstrip())]
        end = code[len(code.rstrip("\r\n")) :] or "\n"
        comment = f"{indent}{COMMENT}{words}{end}"
        above = lines[: line - 1]
        while above and above[-1] != comment and COMMENT in above[-1]:
            above.pop()  # another mark of the same line
        if not above or above[-1] != comment:
            lines.insert(line - 1, comment)
    return "".join(lines)


class _Edits(Definitions):
    """Makes the edits that are certain, and collects marks: lines, and what to write there."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts.names)
        self.count = 0
        self.marks: list[tuple[int, str]] = []
        self.needs_jmpx = False
        self.unused: list[tuple[str, str, str | None]] = []
        self._facts = facts
        self._foreign = facts.foreign
        self.commented: set[str] = set()  # names of imports with comments, which stay
        self._scaled: set[cst.CSTNode] = set()  # calls of DynamicScale.value_and_grad, to rewrite
        self._swapped: set[cst.CSTNode] = set()  # assignments of their four results

    def mark(self, node: cst.CSTNode, words: str) -> None:
        """Notes what is left to do, at the statement of a node."""
        statement: Any = node
        while not isinstance(statement, cst.BaseStatement):
            statement = self.get_metadata(ParentNodeProvider, statement)
        place: Any = self.get_metadata(PositionProvider, statement)
        self.marks.append((place.start.line, words))

    # Imports

    def leave_Import(self, original_node: cst.Import, updated_node: cst.Import) -> cst.Import:
        """Renames modules."""
        for each in original_node.names:
            if known := self._foreign.get(_first(each.name)):
                words = f"is this the library with {', '.join(known)}? Other names are used, too"
                self.mark(original_node, words)
        names = [self._module(each) for each in updated_node.names]
        return updated_node.with_changes(names=names)

    def _module(self, alias: cst.ImportAlias) -> cst.ImportAlias:
        name = get_full_name_for_node(alias.name)
        if name in self._foreign or name not in ("jmp", "mpx"):
            return alias
        self.count += 1
        if name == "jmp":
            as_name = alias.asname or (None if self._facts.renames else _as("jmp"))
            return alias.with_changes(name=cst.Name("jmpx"), asname=as_name)
        as_name = alias.asname or _as("mpx")
        return alias.with_changes(name=cst.parse_expression("jmpx.mpx"), asname=as_name)

    def leave_ImportFrom(
        self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom
    ) -> cst.ImportFrom | cst.FlattenSentinel[cst.ImportFrom]:
        """Splits `from ... import ...` by the modules where its names are now."""
        module = get_full_name_for_node(original_node.module) if original_node.module else None
        if module is None or original_node.relative:
            return updated_node
        if module in self._foreign:
            if known := self._foreign[module]:
                words = f"is this the library with {', '.join(known)}? Other names are used, too"
                self.mark(original_node, words)
            return updated_node
        if isinstance(updated_node.names, cst.ImportStar):
            if module in ("jmp", "mpx", *_MODULES):
                self.mark(original_node, "import the names that are used from jmpx, instead of *")
            return updated_node
        moved: dict[str, list[cst.ImportAlias]] = {}
        before = self.count
        for alias in updated_node.names:
            place, new = self._new_alias(module, alias, original_node)
            moved.setdefault(place, []).append(new)
        if list(moved) == [module]:
            return updated_node.with_changes(names=moved[module])
        if len(moved) == 1:  # with its parentheses and comments
            ((place, names),) = moved.items()
            return updated_node.with_changes(module=cst.parse_expression(place), names=names)
        parent = self.parent(original_node)
        if _comments([original_node]) and not isinstance(parent, cst.SimpleStatementLine):
            self.mark(original_node, f"import these names from {' and '.join(moved)}")
            self.count = before
            return updated_node
        plain = [
            [each.with_changes(comma=cst.MaybeSentinel.DEFAULT) for each in names]
            for names in moved.values()
        ]
        modules: list[Any] = [cst.parse_expression(place) for place in moved]
        return cst.FlattenSentinel(map(cst.ImportFrom, modules, plain))

    def _new_alias(
        self, module: str, alias: cst.ImportAlias, node: cst.ImportFrom
    ) -> tuple[str, cst.ImportAlias]:
        """Returns the module where a name is now, and the import of it there."""
        name = get_full_name_for_node(alias.name) or ""
        old = f"{module}.{name}"
        new = moves.new_name(old)
        if new is None and (words := moves.unknown(old)):
            self.mark(node, words)
        if old == _CLASS and not self._facts.scales:
            self.mark(node, _WRITE_CLASS)
            new = None
        if new is None:
            return module, alias
        self.count += 1
        place, _, word = new.rpartition(".")
        as_name = alias.asname or (_as(name) if word != name else None)
        return place, alias.with_changes(name=cst.Name(word), asname=as_name)

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> Any:
        """Gives each of the imports that were one its own line, with the comments above."""
        imports = [
            each for each in original_node.body if isinstance(each, cst.Import | cst.ImportFrom)
        ]
        if not imports:
            return updated_node
        if m.findall(original_node, m.Comment()):
            for names in (each.names for each in imports):
                found = [] if isinstance(names, cst.ImportStar) else names
                self.commented |= {
                    _first(each.asname.name if each.asname else each.name) for each in found
                }
        if len(updated_node.body) == len(original_node.body):
            return updated_node
        above = [cst.EmptyLine(comment=each) for each in _comments(original_node.body)]
        first = [*updated_node.leading_lines, *above]
        if len(original_node.body) > 1:
            return updated_node.with_changes(leading_lines=first)
        (one, *more) = [updated_node.with_changes(body=[each]) for each in updated_node.body]
        more = [line.with_changes(leading_lines=()) for line in more]
        return cst.FlattenSentinel([one.with_changes(leading_lines=first), *more])

    # Names

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.Name:
        """Renames `jmp` where it is the module."""
        if not self.is_use(original_node):
            return updated_node
        for old in self.imports(original_node):
            self._handed_on(old, original_node)
        if original_node.value != "jmp" or "jmp" in self._foreign or not self._facts.renames:
            return updated_node
        if self.imported(original_node) != "jmp":
            return updated_node
        self.count += 1
        return updated_node.with_changes(value="jmpx")

    def _handed_on(self, old: str, node: cst.Name | cst.Attribute) -> None:
        """Marks a module or a DynamicScale that is used in other ways than by its names."""
        parent = self.parent(node)
        if old in _MODULES and not isinstance(parent, cst.Attribute):
            self.mark(node, f"the names of {old} are in jmpx now")
        if old != _CLASS or isinstance(parent, cst.Call) and parent.func is node:
            return
        if isinstance(parent, cst.Arg):
            call = self.parent(parent)
            if isinstance(call, cst.Call) and m.matches(call.func, m.Name("isinstance")):
                return
        if not any(isinstance(each, cst.Annotation) for each in self.above(node)):
            self.mark(node, _OTHER_CLASS)

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> Any:
        """Rewrites dotted names, such as `jmpx.audit` and `hk.mixed_precision.set_policy`."""
        for old in self.imports(original_node):
            self._handed_on(old, original_node)
        old = self.imported(original_node)
        if old is None:
            for each in self.imports(original_node):
                self._two_bindings(each, original_node)
            return self._of_a_scale(original_node, updated_node)
        new = moves.new_name(old)
        if new is None:
            if words := moves.unknown(old):
                self.mark(original_node, words)
            return updated_node
        if old.startswith(("jmp.", "mpx.")):
            return updated_node  # the import and the name of the module are rewritten
        root = "jmpx"
        if old.startswith("jmpx."):
            root = _first(original_node)
        elif self._facts.taken or old == _CLASS and not self._facts.scales:
            self.mark(original_node, f"write {new} for {old}")
            return updated_node
        else:
            self.needs_jmpx = True
            self._leave_unused(original_node, old.rpartition(".")[0])
        self.count += 1
        return cst.parse_expression(root + new.removeprefix("jmpx"))

    def _two_bindings(self, old: str, node: cst.Attribute) -> None:
        """Marks a name that may be of an import, and may be another one."""
        new = moves.new_name(old)
        if new and not old.startswith(("jmp.", "mpx.")):
            self.mark(node, f"write {new} for {old}")

    def _leave_unused(self, node: cst.Attribute, module: str) -> None:
        """Notes an import whose name may be used no more, unless a string has the name."""
        package, _, name = module.rpartition(".")
        local = get_full_name_for_node(node.value) or ""
        root = _first(node)
        scopes = [each.scope for each in self.bindings(node, root)]
        if root not in self._facts.strings and all(isinstance(s, GlobalScope) for s in scopes):
            self.unused.append((package, name, local if local != name else None))

    # Flax's DynamicScale

    def _is_scale(self, node: cst.CSTNode) -> bool | None:
        """Whether an expression is a DynamicScale; None if it may be one, or may be another thing.

        Without an import of Flax's DynamicScale, what is called `dynamic_scale` may be one.
        """
        if self.imports(node):
            return False
        certain = True if self._facts.scales else None
        word = (get_full_name_for_node(node) or "").rpartition(".")[2]
        named = "dynamic_scale" in word
        perhaps = None if named or word in self._facts.words else False
        if not isinstance(node, cst.Name):
            return certain if named else perhaps
        kinds = {self._kind(each) for each in self.bindings(node, node.value)}
        if False in kinds or not kinds - {None}:
            return None if True in kinds else perhaps
        return certain

    def _kind(self, binding: Any) -> bool | None:
        """Whether a binding is one to a DynamicScale; None if it does not matter."""
        node = getattr(binding, "node", None)
        if isinstance(node, cst.Param):
            kind = node.annotation and self.imported(node.annotation.annotation)
            return kind == _CLASS or "dynamic_scale" in node.name.value
        if not isinstance(node, cst.Name):
            return False
        parent, above = (*self.above(node),)[:2]
        if isinstance(above, cst.Tuple) and m.matches(parent, m.Element()):
            first = above.elements[0] is parent
            assign = self.parent(self.parent(above))
            if first and m.matches(assign, _FOUR) and isinstance(assign, cst.Assign):
                return True if assign in self._swapped else self._of_gradients(assign.value)
            return False
        made = above if isinstance(parent, cst.AssignTarget) else parent
        if isinstance(made, cst.Assign | cst.AnnAssign | cst.NamedExpr) and made.value is not None:
            return self._makes_scale(made.value)
        return False

    def _of_gradients(self, call: cst.BaseExpression) -> bool | None:
        """Returns None for a call of what some `value_and_grad` returned."""
        if not isinstance(call, cst.Call):
            return False
        if m.matches(call.func, _VALUE_AND_GRAD):
            return None
        if not isinstance(call.func, cst.Name):
            return False
        bindings = self.bindings(call.func, call.func.value)
        nodes = [getattr(each, "node", None) for each in bindings]
        assigns = [self._assign(each) for each in nodes if isinstance(each, cst.Name)]
        found = any(each and m.matches(each.value, _VALUE_AND_GRAD) for each in assigns)
        return None if found else False

    def _makes_scale(self, value: cst.BaseExpression) -> bool | None:
        if isinstance(value, cst.IfExp):
            kinds = {self._makes_scale(value.body), self._makes_scale(value.orelse)}
            return False if False in kinds else True if True in kinds else None
        if m.matches(value, m.Name("None")):
            return None
        if isinstance(value, cst.Call):
            return self.imported(value.func) == _CLASS
        name = get_full_name_for_node(value) or ""
        return isinstance(value, cst.Name | cst.Attribute) and "dynamic_scale" in name

    def _of_a_scale(self, original: cst.Attribute, updated: cst.Attribute) -> cst.Attribute:
        """Renames the numbers of a DynamicScale: its `scale` is a method of a jmpx loss scale."""
        word, parent = original.attr.value, self.parent(original)
        called = isinstance(parent, cst.Call) and parent.func is original
        kind = self._is_scale(original.value)
        known = self._facts.scales or self._facts.uncertain
        if word == "value_and_grad":
            free = isinstance(original.value, cst.Name) and not self.bindings(
                original.value, original.value.value
            )
            other = free or not known or self.imports(original.value)
            if parent not in self._scaled and (kind is not False or not other):
                self.mark(original, _WRITE_STEP)
            return updated
        if word == "replace" and called and kind is not False and known:
            self.mark(original, _OTHER_CLASS)
        new = moves.DYNAMIC_SCALE.get(word)
        if called or new in (None, word) or kind is False:
            return updated
        if kind is None:
            if self._facts.flax:
                self.mark(original, f"write {new} for {word} if this is a jmpx.DynamicLossScale")
            return updated
        self.count += 1
        return updated.with_changes(attr=cst.Name(new or word))

    # Calls

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> Any:
        """Rewrites arguments."""
        if original_node in self._scaled:
            return self._gradient_of_scaled(updated_node)
        old = self.imported(original_node.func) or ""
        if old == _CLASS and self._facts.scales:
            return self._dynamic_loss_scale(original_node, updated_node)
        if old.startswith("jmpx.") and not old.startswith("jmpx.mpx."):
            return self._call_of_0_2(old, original_node, updated_node)
        return updated_node

    def leave_SimpleString(
        self, original_node: cst.SimpleString, updated_node: cst.SimpleString
    ) -> cst.SimpleString:
        """Marks a string such as `"lib.DynamicScale"`."""
        self._string(original_node)
        return updated_node

    def leave_ConcatenatedString(
        self, original_node: cst.ConcatenatedString, updated_node: cst.ConcatenatedString
    ) -> cst.ConcatenatedString:
        """Marks a string of several parts."""
        self._string(original_node)
        return updated_node

    def _string(self, node: cst.SimpleString | cst.ConcatenatedString) -> None:
        """Marks the names of modules that moved, within a string; `jmp` is still one there."""
        for name in names_in(node):
            bound = self.bindings(node, name)
            olds = {old.name for each in bound for old in each.get_qualified_names_for(name)}
            if olds & {*_MODULES} or name in olds & {"jmp"} and self._looked_up(node):
                self.mark(node, f"this string names {name}: is it the module that moved to jmpx?")

    def _looked_up(self, node: cst.CSTNode) -> bool:
        """Whether a string is an argument or a key: of `sys.modules`, perhaps."""
        return isinstance(self.parent(node), cst.Arg | cst.Index)

    def _dynamic_loss_scale(self, original: cst.Call, updated: cst.Call) -> cst.Call:
        """Renames the arguments of a DynamicScale, which begins at 65536."""
        given = [each.keyword.value if each.keyword else None for each in updated.args]
        if not all(name in moves.DYNAMIC_SCALE for name in given):
            self.mark(original, "write the arguments of jmpx.DynamicLossScale by name")
            return updated
        args = [
            each.with_changes(keyword=cst.Name(moves.DYNAMIC_SCALE[each.keyword.value]))
            for each in updated.args
            if each.keyword
        ]
        if "scale" not in given:
            args.insert(0, cst.Arg(cst.parse_expression("2.0**16")))
        return updated.with_changes(args=args)

    def _call_of_0_2(self, old: str, original: cst.Call, updated: cst.Call) -> cst.Call:
        """Gathers the arguments of gradient functions, and marks arguments that are gone."""
        function = old.rpartition(".")[2]
        gathered: dict[str, list[cst.Arg]] = {}
        args: list[cst.Arg] = []
        for each in updated.args:
            name = each.keyword.value if each.keyword else ""
            if words := moves.GONE.get((function, name)):
                self.mark(original, words)
            if old in _GRADIENT_FUNCTIONS and name in moves.GRADIENT:
                new, inner = moves.GRADIENT[name]
                gathered.setdefault(new, []).append(_argument(inner, each.value))
            else:
                args.append(each)
        if len(gathered.get("uncast", ())) > 1:
            self.mark(original, "write uncast=(...) for uncast_argnums and uncast_argnames")
            return updated
        if self._facts.taken and gathered and not isinstance(original.func, cst.Attribute):
            self.mark(original, f"write {' and '.join(f'{new}=' for new in gathered)} of jmpx")
            return updated
        for new, inner in gathered.items():
            value = inner[0].value if new == "uncast" else self._group(new, inner, original.func)
            args.append(_argument(new, value))
        self.count += bool(gathered)
        return _with_args(updated, args) if gathered else updated

    def _group(
        self, new: str, inner: list[cst.Arg], function: cst.CSTNode | None = None
    ) -> cst.BaseExpression:
        """Returns `jmpx.Over(...)`, whose axis comes first without a name, or `jmpx.Batch(...)`.

        Of `m.filter_grad`, a function of `import jmpx as m`, it is `m.Over(...)`.
        """
        root = "jmpx"
        if isinstance(function, cst.Attribute):
            root = _first(function)
        else:
            self.needs_jmpx = True
        inner = sorted(inner, key=lambda each: not _named(each, "axis_name"))
        args = [
            _argument("", each.value) if _named(each, "axis_name") else _plain(each)
            for each in inner
        ]
        return cst.Call(cst.parse_expression(f"{root}.{new.title()}"), args)

    # Flax's DynamicScale.value_and_grad, whose four results have another order

    def visit_Module(self, node: cst.Module) -> None:
        """Finds the calls of which each use is unpacked into four, at once or by a name."""
        if not self._facts.scales:
            return
        definitions: set[tuple[str, Scope]] = set()
        for assign in self._facts.assigns:
            target, scope = assign.targets[0].target, self.scope(assign)
            if isinstance(target, cst.Name) and scope and self._is_scaled(assign.value):
                definitions.add((target.value, scope))
            elif self._is_scaled(call := _function(assign.value)) and call and self._swaps(assign):
                self._scaled.add(call)
                self._swapped.add(assign)
        for name, scope in definitions:
            uses = {} if name in self._facts.strings else self.uses_of(name, scope)
            for definition, names in uses.items():
                unpacked = [self._unpacked(each) for each in names]
                if unpacked and all(unpacked) and self._is_scaled(definition.value):
                    self._scaled.add(definition.value)
                    self._swapped.update(each for each in unpacked if each)

    def _unpacked(self, name: cst.Name) -> cst.Assign | None:
        """Returns the assignment that unpacks the four results of a function, if it is one."""
        call, assign = (*self.above(name),)[:2]
        if (
            isinstance(assign, cst.Assign)
            and self._swaps(assign)
            and _function(assign.value) is name
        ):
            return assign if assign.value is call else None
        return None

    def _swaps(self, assign: cst.Assign) -> bool:
        """Whether the targets are four, and may be assigned to in another order."""
        if not m.matches(assign, _FOUR):
            return False
        four = cst.ensure_type(assign.targets[0].target, cst.Tuple)
        bound, read = [], set[str]()
        for each in four.elements:
            names, others = _targets(each.value)
            bound.append(names)
            read |= others
            if m.findall(each.value, m.Call() | m.NamedExpr() | m.StarredElement()):
                return False
        scale, finite, value, grads = bound
        if not any(map(self.is_use, self._names.get("_", ()))):
            value = value - {"_"}  # which is read nowhere
        both = value & (scale | finite)
        return not (both or read & (scale | finite | value | grads))

    def _is_scaled(self, node: cst.CSTNode | None) -> bool:
        """Whether a node is `dynamic_scale.value_and_grad(...)` with arguments that are known."""
        if node is None or not m.matches(node, _VALUE_AND_GRAD):
            return False
        call = cst.ensure_type(node, cst.Call)
        names = [each.keyword.value if each.keyword else each.star or "fun" for each in call.args]
        known = names[:1] == ["fun"] and {*names[1:]} <= {"axis_name", "has_aux"}
        return known and self._is_scale(cst.ensure_type(call.func, cst.Attribute).value) is True

    def _gradient_of_scaled(self, call: cst.Call) -> cst.Call:
        self.count += 1
        self.needs_jmpx = True
        scale = cst.ensure_type(call.func, cst.Attribute).value
        args = [
            call.args[0].with_changes(keyword=None, equal=cst.MaybeSentinel.DEFAULT),
            cst.Arg(scale),
        ]
        for each in call.args[1:]:
            if _named(each, "axis_name"):
                args.append(_argument("over", self._group("over", [each])))
            else:
                args.append(each)
        args.append(_argument("policy", cst.SimpleString('"full"')))
        function = cst.parse_expression("jmpx.filter_value_and_grad")
        return _with_args(call, args).with_changes(func=function)

    def leave_Assign(self, original_node: cst.Assign, updated_node: cst.Assign) -> cst.Assign:
        """Puts the four results into jmpx's order."""
        if original_node not in self._swapped:
            return updated_node
        (target,) = updated_node.targets
        four = cst.ensure_type(target.target, cst.Tuple)
        scale, finite, value, grads = (each.value for each in four.elements)
        elements = [
            old.with_changes(value=new)
            for old, new in zip(four.elements, (value, scale, finite, grads), strict=True)
        ]
        target = target.with_changes(target=four.with_changes(elements=elements))
        return updated_node.with_changes(targets=[target])


def _comments(nodes: Sequence[cst.CSTNode]) -> list[cst.Comment]:
    found = [each for node in nodes for each in m.findall(node, m.Comment())]
    return [cst.ensure_type(each, cst.Comment) for each in found]


def _function(node: cst.BaseExpression) -> cst.BaseExpression | None:
    return node.func if isinstance(node, cst.Call) else None


def _targets(node: cst.BaseExpression) -> tuple[set[str], set[str]]:
    """Returns the names that a target binds, and those that it reads: of `a[i]` both."""
    if isinstance(node, cst.Name):
        return {node.value}, set()
    if isinstance(node, cst.Tuple | cst.List):
        parts = [_targets(each.value) for each in node.elements]
        return set().union(*(p[0] for p in parts)), set().union(*(p[1] for p in parts))
    return set(), {cst.ensure_type(each, cst.Name).value for each in m.findall(node, m.Name())}


def _as(name: str) -> cst.AsName:
    return cst.AsName(cst.Name(name))


def _named(argument: cst.Arg, name: str) -> bool:
    return argument.keyword is not None and argument.keyword.value == name


def _argument(name: str, value: cst.BaseExpression) -> cst.Arg:
    """Returns `name=value`, or `value` without a name."""
    if not name:
        return cst.Arg(value)
    equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    return cst.Arg(value, cst.Name(name), equal)


def _plain(argument: cst.Arg) -> cst.Arg:
    """Returns an argument without the line break and the comma behind it."""
    empty = cst.SimpleWhitespace("")
    return argument.with_changes(comma=cst.MaybeSentinel.DEFAULT, whitespace_after_arg=empty)


def _with_args(call: cst.Call, args: list[cst.Arg]) -> cst.Call:
    """Returns a call with other arguments, whose last one ends as the last one did."""
    end = call.args[-1]
    args = [_plain(each) if each is end else each for each in args]
    args[-1] = args[-1].with_changes(comma=end.comma, whitespace_after_arg=end.whitespace_after_arg)
    return call.with_changes(args=args)
