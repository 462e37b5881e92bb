"""Which uses of a variable each of its definitions reaches."""

from typing import Any

import libcst as cst
from libcst.metadata import FunctionScope, GlobalScope, Scope

from jmpx._migrate.names import Names

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

        Certain is a use behind a definition in the same block or in one around it, with no other
        definition that may run in between. A function inside may use a name with one definition.
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
