"""To which imports the names of a module are bound."""

import libcst as cst
import libcst.matchers as m
from libcst.helpers import get_full_name_for_node
from libcst.metadata import (
    ParentNodeProvider,
    PositionProvider,
    QualifiedNameProvider,
    QualifiedNameSource,
)

from jmpx._migrate import moves


class Names(m.MatcherDecoratableTransformer):
    """Knows to which import a name is bound."""

    METADATA_DEPENDENCIES = (ParentNodeProvider, PositionProvider, QualifiedNameProvider)

    def imported(self, node: cst.CSTNode) -> str | None:
        """Returns the dotted name of an imported name or attribute; None for any other node."""
        names = self.get_metadata(QualifiedNameProvider, node, frozenset())
        if len(names) != 1:
            return None
        (name,) = names
        return name.name if name.source is QualifiedNameSource.IMPORT else None

    def is_use(self, node: cst.Name) -> bool:
        """Whether a name is looked up: not the word of an attribute, an argument or an import."""
        parent = self.get_metadata(ParentNodeProvider, node)
        if isinstance(parent, cst.Attribute):
            return parent.value is node
        if isinstance(parent, cst.Arg):
            return parent.keyword is not node
        return not isinstance(parent, cst.Param | cst.ImportAlias | cst.AsName)

    def visit_Import(self, node: cst.Import) -> bool:
        """Leaves the names of imports to `leave_Import`."""
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        """Leaves them to `leave_SimpleStatementLine`."""
        return False


class Uses(Names):
    """Collects which names of `jmp` and `mpx` a module uses, as other packages are called so, too.

    A name that JMP or MPX does not have makes the package foreign.
    """

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[str, set[str]] = {"jmp": set(), "mpx": set()}

    def foreign(self) -> dict[str, list[str]]:
        """Returns the foreign packages, with the names that JMP or MPX does have."""
        known = {
            package: sorted(name for name in names if moves.new_name(name))
            for package, names in self._names.items()
        }
        return {
            package: known[package]
            for package, names in self._names.items()
            if len(known[package]) < len(names)
        }

    def _use(self, name: str | None) -> None:
        package, _, word = (name or "").partition(".")
        if package in self._names and word and not word.startswith("__"):
            self._names[package].add(f"{package}.{word}")

    def visit_Import(self, node: cst.Import) -> bool:
        """Looks at imports of modules inside of a package."""
        for each in node.names:
            self._use(get_full_name_for_node(each.name))
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        """Looks at names that are imported."""
        module = get_full_name_for_node(node.module) if node.module and not node.relative else None
        if module and not isinstance(node.names, cst.ImportStar):
            for each in node.names:
                self._use(f"{module}.{get_full_name_for_node(each.name)}")
        return False

    def visit_Attribute(self, node: cst.Attribute) -> None:
        """Looks at attributes; of `jmp.Policy.cast` at `jmp.Policy`."""
        name = self.imported(node)
        if name is not None and name.count(".") == 1:
            self._use(name)
