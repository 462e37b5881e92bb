"""The parts of a program that one rule of a policy map puts into float32."""

import dataclasses
import re
from collections.abc import Callable, Sequence

import numpy as np

from jmpx._autocast.value import matches_scope
from jmpx._inspect.graph import Graph, Node
from jmpx._inspect.where import selector, where
from jmpx._jaxprs.marks import module_of
from jmpx._policies.maps import PolicyMap, Rule

MOST = 24  # islands; with more, layers that are alike are one
_OWN = 0.5  # of its share, what is not in islands inside of an island
_CAST = "convert_element_type"  # no rule changes what only casts


@dataclasses.dataclass(frozen=True, eq=False)
class Island:
    """What a rule with a selector would put into float32.

    Attributes:
        selector: the selector: a class, a glob of paths or scopes, or an operation.
        sites: booleans of shape (sites,), in the order of the program's points: what it selects.
        own: the numbers of the sites that no other island has for its own.
    """

    selector: str
    sites: np.ndarray
    own: tuple[int, ...]

    @property
    def is_operation(self) -> bool:
        """Whether it is all that one operation computes, wherever it stands."""
        return self.selector.startswith("op.")


class Sites:
    """The sites of a program that round, and which of them a rule is about.

    Args:
        graph: the program.
        nodes: the node of each site.
        policy_map: the policy map under which it was traced.
    """

    def __init__(self, graph: Graph, nodes: Sequence[Node], policy_map: PolicyMap) -> None:
        self.nodes, self.outermost = nodes, graph.outermost()
        self.by_operations = policy_map.way == "operations"

    def islands(self) -> list[Island]:
        """Returns the islands, operations last.

        Modules and scopes are told apart as finely as few names can: by their paths, by paths
        without numbers, or by classes and names. What is outside of all of them, or in the
        outermost module, whose rule would be for the whole model, is of its operations, if rules
        for these hold.
        """
        names = list[str | None]()
        for name in (selector, _alike, _broad):
            names = [self._named(name, node.scope) for node in self.nodes]
            if len(set(names) - {None}) <= MOST:
                break
        found = [
            Island(name, self.selected(name), _numbers(names, name))
            for name in dict.fromkeys(filter(None, names))
        ]
        if self.by_operations:
            pairs = zip(names, self.nodes, strict=True)
            outside = [None if name or node.name == _CAST else node.name for name, node in pairs]
            for name in dict.fromkeys(node.name for node in self.nodes if node.name != _CAST):
                sites = np.array([node.name == name for node in self.nodes])
                found.append(Island(f"op.{name}", sites, _numbers(outside, name)))
        return found

    def selected(self, select: str) -> np.ndarray:
        """Returns which sites a rule for a module or scope is about, with what is inside of it."""
        rule, known = Rule(select), {"": False}

        def is_selected(scope: str) -> bool:
            if scope not in known:
                is_place = self.by_operations or module_of(scope) is not None
                around = is_selected(scope.rpartition("/")[0])
                known[scope] = around or (is_place and matches_scope(rule, scope))
            return known[scope]

        return np.array([is_selected(node.scope) for node in self.nodes], bool)

    def shortened(self, selectors: Sequence[str]) -> list[str]:
        """Returns fewer selectors of modules and scopes that select the same, if there are such."""
        kept = list(selectors)
        wider = [self._named(name, node.scope) for name in (_alike, _broad) for node in self.nodes]
        for wide in dict.fromkeys(filter(None, wider)):
            sites = self.selected(wide)
            parts = {each: self.selected(each) for each in kept}
            inside = [each for each, part in parts.items() if part.any() and (part <= sites).all()]
            if len(inside) > 1 and not (sites & ~np.any([parts[each] for each in inside], 0)).any():
                kept[kept.index(inside[0])] = wide
                kept = [each for each in kept if each not in inside]
        return kept

    def _named(self, name: Callable[[str], str | None], scope: str) -> str | None:
        module = where(scope).module
        if module in self.outermost or (module is None and not self.by_operations):
            return None
        return name(scope)


def worthwhile(islands: Sequence[Island], costs: np.ndarray) -> list[Island]:
    """Returns the islands without those of which most is in islands inside of them.

    Args:
        islands: the islands.
        costs: shape (sites,): what each site has of the squared error.
    """

    def is_worthwhile(island: Island) -> bool:
        own, whole = costs[list(island.own)].sum(), costs[island.sites].sum()
        return island.is_operation or own >= _OWN * whole

    return [island for island in islands if is_worthwhile(island)]


def _numbers(names: Sequence[str | None], name: str) -> tuple[int, ...]:
    return tuple(number for number, each in enumerate(names) if each == name)


def _alike(scope: str) -> str | None:
    """Returns the selector of a scope and of those whose paths differ in numbers alone."""
    select = selector(scope)
    return select and pattern(select)


def pattern(path: str) -> str:
    """Returns a path with `*` for the number at the end of each name: `conv2_d_1` has one."""
    return re.sub(r"\d+(?=/|$)", "*", path)


def _broad(scope: str) -> str | None:
    """Returns the class of a scope's module, or the last name of a scope outside of modules."""
    module, select = where(scope).module, _alike(scope)
    if select is None or module is not None:
        return select if module is None else module.cls.__name__
    return f"*/{select.rpartition('/')[2]}"
