"""Edits of imports."""

from collections.abc import Sequence
from typing import Any

import libcst as cst
import libcst.matchers as m
from libcst.helpers import get_full_name_for_node
from libcst.metadata import GlobalScope

from jmpx._migrate.names import CLASS, MODULES, Facts, Marks, first_word, new_name

_WRITE_CLASS = "write jmpx.DynamicLossScale for DynamicScale"


class Imports(Marks):
    """Rewrites imports, with their comments."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self.unused: list[tuple[str, str, str | None]] = []
        self.commented: set[str] = set()  # names of imports with comments, which stay
        self._foreign = facts.foreign

    def leave_Import(self, original_node: cst.Import, updated_node: cst.Import) -> cst.Import:
        """Renames modules."""
        for each in original_node.names:
            if known := self._foreign.get(first_word(each.name)):
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
            if module in ("jmp", "mpx", *MODULES):
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
        new = new_name(old)
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
