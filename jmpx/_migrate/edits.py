"""The edits of imports, and the rewriting of one module, with comments where it is not sure."""

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
from libcst.metadata import GlobalScope, MetadataWrapper

from jmpx._migrate.names import (
    CLASS,
    OTHER_CLASS,
    Facts,
    Marks,
    Uses,
    first_word,
    names_in,
)
from jmpx._migrate.scales import Scales

_WRITE_CLASS = "write jmpx.DynamicLossScale for DynamicScale"


class Imports(Marks):
    """Rewrites imports, with their comments."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self.unused: list[tuple[str, str, str | None]] = []
        self.commented: set[str] = set()  # names of imports with comments, which stay
        self._foreign = facts.foreign
        self._told: set[str] = set()  # of these packages, those that are marked

    def leave_Import(self, original_node: cst.Import, updated_node: cst.Import) -> cst.Import:
        """Renames modules."""
        for each in original_node.names:
            self._mark_foreign(first_word(each.name), original_node)
        names = [self._module(each) for each in updated_node.names]
        return updated_node.with_changes(names=names)

    def _mark_foreign(self, package: str, node: cst.CSTNode) -> None:
        """Marks the first import of a package that has other names than jmpx."""
        known, others = self._foreign.get(package, ([], []))
        if known and package not in self._told:
            self._told.add(package)
            has = "is" if len(others) == 1 else "are"
            unknown = f"{', '.join(others)} {has} not in jmpx, so {package} stays here"
            self.mark(node, f"is this the library with {', '.join(known)}? {unknown}")

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
        if (package := module.partition(".")[0]) in self._foreign:
            self._mark_foreign(package, original_node)
            return updated_node
        if isinstance(updated_node.names, cst.ImportStar):
            if module in ("jmp", "mpx", *self.moved):
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
        new = self.new_name(old)
        if old == CLASS and not self._facts.scales:
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
                    first_word(each.asname.name if each.asname else each.name) for each in found
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

    def _leave_unused(self, node: cst.Attribute, module: str) -> None:
        """Notes an import whose name may be used no more, unless a string has the name."""
        package, _, name = module.rpartition(".")
        local = get_full_name_for_node(node.value) or ""
        root = first_word(node)
        scopes = [each.scope for each in self.bindings(node, root)]
        if root not in self._facts.strings and all(isinstance(s, GlobalScope) for s in scopes):
            self.unused.append((package, name, local if local != name else None))


def _comments(nodes: Sequence[cst.CSTNode]) -> list[cst.Comment]:
    found = [each for node in nodes for each in m.findall(node, m.Comment())]
    return [cst.ensure_type(each, cst.Comment) for each in found]


def _as(name: str) -> cst.AsName:
    return cst.AsName(cst.Name(name))


# The rewriting of one module.


COMMENT = "# jmpx migrate: "


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
                if alias.asname is None and first_word(alias.name) == "jmpx":
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


class _Edits(Imports, Scales):
    """Makes the edits that are certain, and collects marks."""

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
        if old in self.moved and not isinstance(parent, cst.Attribute):
            self.mark(node, f"the names of {old} are in jmpx now")
        if old != CLASS or isinstance(parent, cst.Call) and parent.func is node:
            return
        if isinstance(parent, cst.Arg):
            call = self.parent(parent)
            if isinstance(call, cst.Call) and m.matches(call.func, m.Name("isinstance")):
                return
        if not any(isinstance(each, cst.Annotation) for each in self.above(node)):
            self.mark(node, OTHER_CLASS)

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> Any:
        """Rewrites dotted names, such as `hk.mixed_precision.set_policy`."""
        for old in self.imports(original_node):
            self._handed_on(old, original_node)
        old = self.imported(original_node)
        if old is None:
            for each in self.imports(original_node):
                self._two_bindings(each, original_node)
            return self._of_a_scale(original_node, updated_node)
        new = self.new_name(old)
        if new is None or old.startswith(("jmp.", "mpx.")):
            return updated_node  # the import and the name of the module are rewritten
        if self._facts.taken or old == CLASS and not self._facts.scales:
            self.mark(original_node, f"write {new} for {old}")
            return updated_node
        self.needs_jmpx = True
        self._leave_unused(original_node, old.rpartition(".")[0])
        self.count += 1
        return cst.parse_expression(new)

    def _two_bindings(self, old: str, node: cst.Attribute) -> None:
        """Marks a name that may be of an import, and may be another one."""
        new = self.new_name(old)
        if new and not old.startswith(("jmp.", "mpx.")):
            self.mark(node, f"write {new} for {old}")

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> Any:
        """Rewrites arguments."""
        if original_node in self._scaled:
            return self._gradient_of_scaled(updated_node)
        old = self.imported(original_node.func) or ""
        if old == CLASS and self._facts.scales:
            return self._dynamic_loss_scale(original_node, updated_node)
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
            if olds & self.moved or name in olds & {"jmp"} and self._looked_up(node):
                self.mark(node, f"this string names {name}: is it the module that moved to jmpx?")

    def _looked_up(self, node: cst.CSTNode) -> bool:
        """Whether a string is an argument or a key: of `sys.modules`, perhaps."""
        return isinstance(self.parent(node), cst.Arg | cst.Index)
