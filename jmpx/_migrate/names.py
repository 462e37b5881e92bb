"""The names in a module: the import to which each is bound, its new name, and its uses."""

import ast
import collections
import dataclasses
import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import libcst as cst
from libcst.helpers import get_full_name_for_node
from libcst.metadata import (
    ExpressionContext,
    ExpressionContextProvider,
    FunctionScope,
    GlobalScope,
    ParentNodeProvider,
    PositionProvider,
    QualifiedNameProvider,
    QualifiedNameSource,
    Scope,
    ScopeProvider,
)
from libcst.metadata.scope_provider import BaseAssignment, ImportAssignment

MODULES = ("haiku.mixed_precision", "flax.training.dynamic_scale")  # whose names are in jmpx now
CLASS = f"{MODULES[1]}.DynamicScale"
OTHER_CLASS = "jmpx.DynamicLossScale has other arguments and attributes than DynamicScale"
_JMP = """
    DynamicLossScale LossScale NoOpLossScale Policy StaticLossScale all_finite cast_to_full
    cast_to_half get_policy half_dtype select_tree
""".split()
_HAIKU = "clear_policy current_policy push_policy set_policy".split()
_MOVED = {
    **{f"jmp.{name}": f"jmpx.{name}" for name in _JMP},
    **{f"haiku.mixed_precision.{name}": f"jmpx.{name}" for name in _HAIKU},
    "haiku.mixed_precision.get_policy": "jmpx.policy_of",
    CLASS: "jmpx.DynamicLossScale",
}
# Arguments of Flax's DynamicScale, and their names here.
DYNAMIC_SCALE = {
    "backoff_factor": "backoff_factor",
    "fin_steps": "counter",
    "growth_factor": "factor",
    "growth_interval": "period",
    "minimum_scale": "min_loss_scale",
    "scale": "loss_scale",
}


def new_name(old: str) -> str | None:
    """Returns the dotted name that takes the place of `old`; None if that stays, or is unknown."""
    module, _, name = old.rpartition(".")
    if module == "mpx" and name in importlib.import_module("jmpx.mpx").__all__:
        return f"jmpx.{old}"
    return _MOVED.get(old)


class Names(cst.CSTTransformer):
    """Knows to which import a name is bound."""

    METADATA_DEPENDENCIES = (
        ExpressionContextProvider,
        ParentNodeProvider,
        PositionProvider,
        QualifiedNameProvider,
        ScopeProvider,
    )

    def imports(self, node: cst.CSTNode) -> set[str]:
        """Returns the dotted names of all imports to which a name or attribute may be bound."""
        names = self.get_metadata(QualifiedNameProvider, node, frozenset())
        return {each.name for each in names if each.source is QualifiedNameSource.IMPORT}

    def imported(self, node: cst.CSTNode) -> str | None:
        """Returns the dotted name of an imported name or attribute; None for any other node.

        A name with a second binding, as `jmp = None` after an `except`, is another node.
        """
        names = self.get_metadata(QualifiedNameProvider, node, frozenset())
        found = self.imports(node)
        if len(names) != 1 or not found:
            return None
        root = _root(node)
        bindings = self.bindings(root, root.value) if root else []
        return found.pop() if all(isinstance(a, ImportAssignment) for a in bindings) else None

    def is_word(self, node: cst.Name) -> bool:
        """Whether a name is only the word of an attribute or of an argument."""
        parent = self.get_metadata(ParentNodeProvider, node)
        if isinstance(parent, cst.Attribute):
            return parent.value is not node
        return isinstance(parent, cst.Arg) and parent.keyword is node

    def is_use(self, node: cst.Name) -> bool:
        """Whether a name is looked up."""
        context = self.get_metadata(ExpressionContextProvider, node, None)
        return context is ExpressionContext.LOAD and not self.is_word(node)

    def scope(self, node: cst.CSTNode) -> Scope | None:
        """Returns the scope of a node."""
        return self.get_metadata(ScopeProvider, node, None)

    def bindings(self, node: cst.CSTNode, name: str) -> list[BaseAssignment]:
        """Returns the bindings of a name, as it is seen from a node."""
        scope = self.scope(node)
        return [] if scope is None else [*scope[name]]

    def above(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yields the nodes around a node, from the inside."""
        while (parent := self.get_metadata(ParentNodeProvider, node, None)) is not None:
            yield parent
            node = parent

    def visit_Import(self, node: cst.Import) -> bool:
        """Leaves the names of imports to `leave_Import`."""
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        """Leaves them to `leave_ImportFrom`."""
        return False


@dataclasses.dataclass(frozen=True)
class Facts:
    """Facts about the names of a whole module.

    Args:
        foreign: packages called `jmp` or `mpx` that are others, or of which private parts are used,
            with the names that jmpx has and those that it has not.
        renames: whether all uses of `jmp` are known, so that they can be renamed.
        taken: whether `jmpx` has another meaning somewhere, so that no use of it can be added.
        flax: whether Flax is imported.
        scales: whether Flax's DynamicScale is imported, and each use of it is known.
        uncertain: whether Flax's DynamicScale is imported, and some use of it is not known.
        words: those that a DynamicScale is assigned to: `ds` of `self.ds = DynamicScale()`.
        strings: the names within strings that are Python, such as annotations.
        names: all names that are not words of attributes, arguments or imports, by their text.
        assigns: all assignments.
    """

    foreign: dict[str, tuple[list[str], list[str]]]
    renames: bool
    taken: bool
    flax: bool
    scales: bool
    uncertain: bool
    words: set[str]
    strings: frozenset[str]
    names: dict[str, list[cst.Name]]
    assigns: list[cst.Assign]


class Uses(Names):
    """Collects the facts.

    A name that JMP or MPX does not have makes the package foreign.
    """

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[str, set[str]] = {"jmp": set(), "mpx": set()}
        self._odd = self._taken = self._flax = self._scales = self._unsure = False
        self._words: set[str] = set()
        self._strings: set[str] = set()
        self._all: dict[str, list[cst.Name]] = collections.defaultdict(list)
        self._assigns: list[cst.Assign] = []

    def facts(self) -> Facts:
        """Returns the facts."""
        foreign: dict[str, tuple[list[str], list[str]]] = {}
        for package, names in self._names.items():
            known = {name for name in names if new_name(name)}
            if known != names:
                foreign[package] = sorted(known), sorted(names - known)
        renames = not (self._odd or self._taken or "jmp" in self._strings)
        uncertain = self._scales and (self._unsure or self._taken)
        scales = self._scales and not uncertain
        return Facts(
            foreign,
            renames,
            self._taken,
            self._flax,
            scales,
            uncertain,
            self._words,
            frozenset(self._strings),
            self._all,
            self._assigns,
        )

    def _use(self, name: str | None) -> None:
        package, _, word = (name or "").partition(".")
        if package in self._names and word and not word.startswith("__"):
            self._names[package].add(f"{package}.{word.partition('.')[0]}")

    def _bind(self, alias: cst.ImportAlias, module: str, node: cst.CSTNode) -> None:
        """Looks at the name that an import binds; `module` is empty for `import`."""
        name = get_full_name_for_node(alias.name) or ""
        bound = alias.evaluated_alias or name.partition(".")[0]
        plain = not (module or alias.asname) and isinstance(self.scope(alias), GlobalScope)
        self._odd |= bound == "jmp" and not (plain and name == "jmp")
        self._taken |= bound == "jmpx" and not plain
        whole = f"{module}.{name}" if module else name
        self._flax |= whole.partition(".")[0] == "flax"
        if _within(whole, MODULES[1]):
            self._scales = True
            self._unsure |= not self._only_imports(self.scope(alias), bound)

    def _only_imports(self, scope: Scope | None, name: str) -> bool:
        return scope is not None and all(
            isinstance(each, ImportAssignment) and each.scope is scope for each in scope[name]
        )

    def visit_Import(self, node: cst.Import) -> bool:
        """Looks at imports of modules inside of a package."""
        for each in node.names:
            self._use(get_full_name_for_node(each.name))
            self._bind(each, "", node)
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        """Looks at names that are imported."""
        module = get_full_name_for_node(node.module) if node.module else None
        if isinstance(node.names, cst.ImportStar):
            return False
        for each in node.names:
            if module and not node.relative:
                self._use(f"{module}.{get_full_name_for_node(each.name)}")
            self._bind(each, "." if node.relative or not module else module, node)
        return False

    def visit_Attribute(self, node: cst.Attribute) -> None:
        """Looks at attributes; of `jmp.Policy.cast` at `jmp.Policy`."""
        for name in self.imports(node):
            if name.count(".") == 1:
                self._use(name)
            if _within(name, MODULES[1]):
                self._scales = True
                self._unsure |= self.imported(node) is None
        self._given(node)

    def _given(self, node: cst.Name | cst.Attribute) -> None:
        """Collects the words to which a statement with a DynamicScale assigns it."""
        if CLASS not in self.imports(node):
            return
        for each in self.above(node):
            targets: list[cst.CSTNode | None] = []
            if isinstance(each, cst.Assign):
                targets = [target.target for target in each.targets]
            elif isinstance(each, cst.AnnAssign | cst.NamedExpr):
                targets = [each.target]
            elif isinstance(each, cst.Arg):
                targets = [each.keyword]
            elif isinstance(each, cst.Param):
                targets = [each.name]
            names = [get_full_name_for_node(target) or "" for target in targets if target]
            self._words |= {name.rpartition(".")[2] for name in names}

    def visit_Name(self, node: cst.Name) -> None:
        """Looks at each `jmp` that is not an import of it, and each `jmpx` that is not one."""
        if self.is_word(node):
            return
        self._all[node.value].append(node)
        self._given(node)
        if node.value not in ("jmp", "jmpx"):
            return
        parent = self.get_metadata(ParentNodeProvider, node)
        # To libcst, a name that a `case` binds is no assignment.
        is_case = isinstance(parent, cst.MatchAs | cst.MatchStar | cst.MatchMapping)
        plain = not is_case and self.is_use(node) and self.imported(node) == node.value
        if node.value == "jmpx":
            self._taken |= not plain
        elif is_case:
            self._odd = True
        elif not plain and not isinstance(parent, cst.Param):
            bound = [each.scope for each in self.bindings(node, "jmp")]
            self._odd |= not bound or any(isinstance(each, GlobalScope) for each in bound)

    def visit_Assign(self, node: cst.Assign) -> None:
        """Collects assignments."""
        self._assigns.append(node)

    def visit_SimpleString(self, node: cst.SimpleString) -> None:
        """Looks at the names within a string."""
        self._strings |= names_in(node)

    def visit_ConcatenatedString(self, node: cst.ConcatenatedString) -> None:
        """Looks at the names within a string of several parts."""
        self._strings |= names_in(node)


def names_in(node: cst.SimpleString | cst.ConcatenatedString) -> set[str]:
    """Returns the names that a string has if it is an expression: an annotation, or one name."""
    text = node.evaluated_value
    if not isinstance(text, str) or len(text) > 500:
        return set()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    return {each.id for each in ast.walk(tree) if isinstance(each, ast.Name)}


def _root(node: cst.CSTNode) -> cst.Name | None:
    while isinstance(node, cst.Attribute):
        node = node.value
    return node if isinstance(node, cst.Name) else None


def _within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


# The uses of a variable that each of its definitions reaches.


_Assigns = dict[cst.CSTNode, cst.Assign]
_BLOCKS = (cst.Module, cst.IndentedBlock, cst.SimpleStatementLine, cst.SimpleStatementSuite)
_REPEATS = (cst.For, cst.While, cst.Try, cst.TryStar)  # a part may run after any other part


class Definitions(Names):
    """Knows the uses of a definition such as `grad_fn = ...`, if each of them is certain."""

    def __init__(self, names: dict[str, list[cst.Name]]) -> None:
        super().__init__()
        self._names = names

    def uses_of(self, name: str, scope: Scope) -> dict[cst.Assign, list[cst.Name]]:
        """Returns the uses of each definition of a name; empty if one of them is not certain.

        A use is certain after a definition in the same block or in one around it, if no other
        definition may run in between. A function inside may use a name with one definition.
        """
        names = [each for each in self._names.get(name, ()) if self._binds(each, scope)]
        targets: dict[cst.Name, cst.Assign] = {}
        for each in names:
            assign = self._assign(each)
            if assign is not None:
                targets[each] = assign
        found: dict[cst.Assign, list[cst.Name]] = {assign: [] for assign in targets.values()}
        known = isinstance(scope, FunctionScope | GlobalScope) and len(targets) == len(
            {*scope[name]}
        )
        if not known or any(self.scope(each) is not scope for each in targets):
            return {}
        around = {node: a for a in found for node in (a, *self.above(a))}
        for each in names:
            if each in targets:
                continue
            if not self.is_use(each):
                return {}
            inside = self.scope(each) is scope
            only = next(iter(found)) if len(found) == 1 and not inside else None
            definition = self._before(each, around) if inside else only
            if definition is None:
                return {}
            found[definition].append(each)
        return found

    def _binds(self, name: cst.Name, scope: Scope) -> bool:
        own = self.scope(name)
        return own is None or any(a.scope is scope for a in self.bindings(name, name.value))

    def _assign(self, name: cst.Name) -> cst.Assign | None:
        """Returns the assignment whose only target is a name."""
        above = self.above(name)
        target, assign = next(above), next(above, None)
        if isinstance(target, cst.AssignTarget) and isinstance(assign, cst.Assign):
            return assign if len(assign.targets) == 1 else None
        return None

    def _before(self, use: cst.CSTNode, around: _Assigns) -> cst.Assign | None:
        """Returns the definition that reaches a use for certain."""
        node: Any = use
        for parent in self.above(use):
            if isinstance(parent, _BLOCKS):
                earlier = parent.body[: [*parent.body].index(node)]
                near = [each for each in earlier if each in around]
                if near:
                    return self._direct(near[-1])
            if isinstance(parent, cst.FunctionDef | cst.Lambda | cst.ClassDef):
                return None
            if isinstance(parent, _REPEATS) and parent in around:
                return None
            node = parent
        return None

    def _direct(self, node: cst.CSTNode) -> cst.Assign | None:
        """Returns the last assignment of a simple statement; None for one with blocks inside."""
        if isinstance(node, cst.SimpleStatementLine):
            found = [each for each in node.body if isinstance(each, cst.Assign)]
            return found[-1] if len(node.body) == 1 else None
        return node if isinstance(node, cst.Assign) else None

    def parent(self, node: cst.CSTNode) -> cst.CSTNode:
        """Returns the node around a node."""
        return next(self.above(node))


class Marks(Definitions):
    """Collects marks: lines, and what to write there."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts.names)
        self.count = 0
        self.marks: list[tuple[int, str]] = []
        self.needs_jmpx = False
        # Where the import of JMP stays, its policies are given to Haiku, whose names stay, too.
        self.moved = set(MODULES[1:] if "jmp" in facts.foreign else MODULES)
        self._facts = facts

    def new_name(self, old: str) -> str | None:
        """Returns the dotted name that takes the place of `old` in this file, if any does."""
        stays = old.rpartition(".")[0] in set(MODULES) - self.moved
        return None if stays else new_name(old)

    def mark(self, node: cst.CSTNode, words: str) -> None:
        """Notes what is left to do, at the statement of a node."""
        statement: Any = node
        while not isinstance(statement, cst.BaseStatement):
            statement = self.get_metadata(ParentNodeProvider, statement)
        place: Any = self.get_metadata(PositionProvider, statement)
        self.marks.append((place.start.line, words))


def first_word(node: cst.CSTNode) -> str:
    return (get_full_name_for_node(node) or "").partition(".")[0]
