"""Rewrites the source of one module, with comments above what it is not sure of."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import libcst as cst
import libcst.matchers as m
from libcst.codemod import CodemodContext
from libcst.codemod.visitors import AddImportsVisitor, RemoveImportsVisitor
from libcst.helpers import get_full_name_for_node
from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider

from jmpx._migrate import moves
from jmpx._migrate.names import Names, Uses

COMMENT = "# jmpx migrate: "
_GRADIENT_FUNCTIONS = ("jmpx.filter_grad", "jmpx.filter_value_and_grad")
_NUMBERS = {"fin_steps": "counter", "scale": "loss_scale"}  # attributes of Flax's DynamicScale
_WRITE_STEP = (
    "write (loss, dynamic_scale, finite, grads) = jmpx.filter_value_and_grad(loss_fn, "
    'dynamic_scale, policy="full")(params)'
)
_VALUE_AND_GRAD = m.Call(m.Attribute(attr=m.Name("value_and_grad")))
_FOUR = m.Assign([m.AssignTarget(m.Tuple([m.DoNotCare()] * 4))])


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
        libcst.ParserSyntaxError: if it is not Python.
    """
    _, edits = _rewritten(text)
    text, edits = _rewritten(_with_comments(text, edits.marks))
    lines = ((line, each.strip()) for line, each in enumerate(_lines(text), 1))
    marks = ((line, each.removeprefix(COMMENT)) for line, each in lines if each.startswith(COMMENT))
    return Migrated(text, edits.count, tuple(marks))


def _rewritten(text: str) -> tuple[str, "_Edits"]:
    wrapper = MetadataWrapper(cst.parse_module(text))
    uses = Uses()
    wrapper.visit(uses)
    edits = _Edits(uses.foreign())
    tree = wrapper.visit(edits)
    if edits.needs_jmpx:
        context = CodemodContext()
        AddImportsVisitor.add_needed_import(context, "jmpx")
        tree = AddImportsVisitor(context).transform_module(tree)
    if edits.unused:
        context = CodemodContext()
        for module, name, alias in edits.unused:
            RemoveImportsVisitor.remove_unused_import(context, module, name, alias)
        tree = RemoveImportsVisitor(context).transform_module(tree)
    return tree.code, edits


def _lines(text: str) -> list[str]:
    """Returns the lines of a program, with their ends: a form feed ends none."""
    return re.findall(r".*\n|.+", text)


def _with_comments(text: str, marks: Sequence[tuple[int, str]]) -> str:
    """Returns the text with a comment above each marked line, unless it is there already."""
    lines = _lines(text)
    for line, words in sorted(set(marks), reverse=True):
        code = lines[line - 1]
        indent = code[: len(code) - len(code.lstrip())]
        end = "\r\n" if code.endswith("\r\n") else "\n"
        comment = f"{indent}{COMMENT}{words}{end}"
        above = lines[: line - 1]
        while above and above[-1] != comment and COMMENT in above[-1]:
            above.pop()  # another mark of the same line
        if not above or above[-1] != comment:
            lines.insert(line - 1, comment)
    return "".join(lines)


class _Edits(Names):
    """Makes the edits that are certain, and collects marks: lines, and what to write there."""

    def __init__(self, foreign: dict[str, list[str]]) -> None:
        super().__init__()
        self.count = 0
        self.marks: list[tuple[int, str]] = []
        self.needs_jmpx = False
        self.unused: list[tuple[str, str | None, str | None]] = []
        self._foreign = foreign
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
            if known := self._foreign.get(get_full_name_for_node(each.name) or ""):
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
            return alias.with_changes(name=cst.Name("jmpx"))
        as_name = alias.asname or cst.AsName(cst.Name("mpx"))
        return alias.with_changes(name=cst.parse_expression("jmpx.mpx"), asname=as_name)

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> Any:
        """Splits `from ... import ...` by the modules where its names are now."""
        statement = updated_node.body[0]
        if len(updated_node.body) != 1 or not isinstance(statement, cst.ImportFrom):
            return updated_node
        module = get_full_name_for_node(statement.module) if statement.module else None
        if module is None or statement.relative or module in self._foreign:
            return updated_node
        if isinstance(statement.names, cst.ImportStar):
            if module in ("jmp", "mpx"):
                self.mark(original_node, "import the names that are used from jmpx, instead of *")
            return updated_node
        moved: dict[str, list[cst.ImportAlias]] = {}
        for alias in statement.names:
            name = get_full_name_for_node(alias.name) or ""
            new = moves.new_name(f"{module}.{name}")
            place, _, new_word = (new or f"{module}.{name}").rpartition(".")
            if new is None and (words := moves.unknown(f"{module}.{name}")):
                self.mark(original_node, words)
            as_name = alias.asname
            if as_name is None and new_word != name:
                as_name = cst.AsName(cst.Name(name))
            self.count += new is not None
            moved.setdefault(place, []).append(
                cst.ImportAlias(cst.Name(new_word), as_name, cst.MaybeSentinel.DEFAULT)
            )
        if list(moved) == [module]:
            return updated_node
        lines = [self._line(place, names, updated_node) for place, names in moved.items()]
        lines[1:] = [line.with_changes(leading_lines=()) for line in lines[1:]]
        return cst.FlattenSentinel(lines)

    def _line(self, place: str, names: list[cst.ImportAlias], like: cst.SimpleStatementLine) -> Any:
        module: Any = cst.parse_expression(place)
        return like.with_changes(body=[cst.ImportFrom(module=module, names=names)])

    # Names

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.Name:
        """Renames `jmp` where it is the module."""
        if original_node.value != "jmp" or "jmp" in self._foreign:
            return updated_node
        if not self.is_use(original_node) or self.imported(original_node) != "jmp":
            return updated_node
        self.count += 1
        return updated_node.with_changes(value="jmpx")

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> Any:
        """Rewrites dotted names, such as `jmpx.audit` and `hk.mixed_precision.set_policy`."""
        old = self.imported(original_node)
        if old is None:
            return self._number(original_node, updated_node)
        new = moves.new_name(old)
        if new is None:
            if words := moves.unknown(old):
                self.mark(original_node, words)
            return updated_node
        if old.startswith(("jmp.", "mpx.")):
            return updated_node  # the import and the name of the module are rewritten
        self.count += 1
        root = "jmpx"
        if old.startswith("jmpx."):
            root = (get_full_name_for_node(original_node) or "").partition(".")[0]
        else:
            self.needs_jmpx = True
            package, _, module = old.rpartition(".")[0].rpartition(".")
            local = get_full_name_for_node(original_node.value)
            self.unused.append((package, module, local if local != module else None))
        return cst.parse_expression(root + new.removeprefix("jmpx"))

    def _number(self, original: cst.Attribute, updated: cst.Attribute) -> cst.Attribute:
        """Renames the numbers of a DynamicScale: its `scale` is a method of a jmpx loss scale."""
        new = _NUMBERS.get(original.attr.value)
        if new is None or not _is_dynamic_scale(original.value):
            return updated
        parent = self.get_metadata(ParentNodeProvider, original)
        if isinstance(parent, cst.Call) and parent.func is original:
            return updated
        self.count += 1
        return updated.with_changes(attr=cst.Name(new))

    # Calls

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> Any:
        """Rewrites arguments."""
        if original_node in self._scaled:
            return self._gradient_of_scaled(updated_node)
        if m.matches(original_node, _VALUE_AND_GRAD):
            receiver = cst.ensure_type(original_node.func, cst.Attribute).value
            if _is_dynamic_scale(receiver):
                self.mark(original_node, _WRITE_STEP)
            return updated_node
        old = self.imported(original_node.func) or ""
        if old.endswith("dynamic_scale.DynamicScale"):
            return self._dynamic_loss_scale(original_node, updated_node)
        if old.startswith("jmpx."):
            return self._call_of_0_2(old.rpartition(".")[2], original_node, updated_node)
        return updated_node

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

    def _call_of_0_2(self, function: str, original: cst.Call, updated: cst.Call) -> cst.Call:
        """Gathers the arguments of gradient functions, and marks arguments that are gone."""
        gathered: dict[str, list[cst.Arg]] = {}
        args: list[cst.Arg] = []
        for each in updated.args:
            name = each.keyword.value if each.keyword else ""
            if words := moves.GONE.get((function, name)):
                self.mark(original, words)
            if f"jmpx.{function}" in _GRADIENT_FUNCTIONS and name in moves.GRADIENT:
                new, inner = moves.GRADIENT[name]
                gathered.setdefault(new, []).append(_argument(inner, each.value))
            else:
                args.append(each)
        if len(gathered.get("uncast", ())) > 1:
            self.mark(original, "write uncast=(...) for uncast_argnums and uncast_argnames")
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
            root = (get_full_name_for_node(function) or "").partition(".")[0]
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
        """Looks at the statements of a module."""
        self._find_scaled(node)

    def visit_IndentedBlock(self, node: cst.IndentedBlock) -> None:
        """Looks at the statements of a block."""
        self._find_scaled(node)

    def _find_scaled(self, node: cst.Module | cst.IndentedBlock) -> None:
        """Finds the calls whose results are unpacked at once, or in a statement that follows."""
        made: dict[str, cst.Call] = {}
        for line in node.body:
            for each in line.body if isinstance(line, cst.SimpleStatementLine) else ():
                if not isinstance(each, cst.Assign):
                    continue
                target, value = each.targets[0].target, each.value
                if isinstance(target, cst.Name) and self._is_scaled(value):
                    made[target.value] = cst.ensure_type(value, cst.Call)
                elif m.matches(each, _FOUR) and isinstance(value, cst.Call):
                    call: Any = value.func
                    call = made.get(call.value) if isinstance(call, cst.Name) else call
                    if call is not None and self._is_scaled(call):
                        self._scaled.add(call)
                        self._swapped.add(each)

    def _is_scaled(self, node: cst.CSTNode) -> bool:
        """Whether a node is `dynamic_scale.value_and_grad(...)` with arguments that are known."""
        if not m.matches(node, _VALUE_AND_GRAD):
            return False
        call = cst.ensure_type(node, cst.Call)
        names = [each.keyword.value if each.keyword else "fun" for each in call.args]
        known = names[:1] == ["fun"] and {*names[1:]} <= {"axis_name", "has_aux"}
        return known and _is_dynamic_scale(cst.ensure_type(call.func, cst.Attribute).value)

    def _gradient_of_scaled(self, call: cst.Call) -> cst.Call:
        self.count += 1
        self.needs_jmpx = True
        scale = cst.ensure_type(call.func, cst.Attribute).value
        args = [call.args[0], cst.Arg(scale)]
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


def _is_dynamic_scale(node: cst.CSTNode) -> bool:
    """Whether an expression such as `state.dynamic_scale` is called one."""
    return "dynamic_scale" in (get_full_name_for_node(node) or "").rpartition(".")[2]


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
