"""The parts of a program that one rule of a policy map puts into float32."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jmpx._autocast.regions import matches_scope
from jmpx._inspect.audit.alike import pattern
from jmpx._inspect.graph import Graph, Node
from jmpx._jaxprs.marks import module_of
from jmpx._policies.maps import PolicyMap
from jmpx._policies.places import selector, where
from jmpx._policies.rules import Rule

MOST = 24  # islands; with more, layers that are alike are one
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


def find_islands(graph: Graph, nodes: Sequence[Node], policy_map: PolicyMap) -> list[Island]:
    """Returns the islands of a program, operations last.

    Modules and scopes are told apart as finely as few names can: by their paths, by paths without
    numbers, or by classes and names. What is outside of all of them, or in the outermost module,
    whose rule would be for the whole model, is of its operations, if rules for these hold.

    Args:
        graph: the program.
        nodes: the node of each site that rounds.
        policy_map: the policy map under which it was traced.
    """
    by_operations = policy_map.way == "operations"
    outermost = graph.outermost()

    def named(name: Callable[[str], str | None], scope: str) -> str | None:
        module = where(scope).module
        if module in outermost or (module is None and not by_operations):
            return None
        return name(scope)

    names = list[str | None]()
    for name in (selector, _alike, _broad):
        names = [named(name, node.scope) for node in nodes]
        if len(set(names) - {None}) <= MOST:
            break
    found = [
        Island(name, _selected(Rule(name), nodes, by_operations), _numbers(names, name))
        for name in dict.fromkeys(filter(None, names))
    ]
    if by_operations:
        outside = [
            node.name if name is None and node.name != _CAST else None
            for name, node in zip(names, nodes, strict=True)
        ]
        for name in dict.fromkeys(filter(None, outside)):
            sites = np.array([node.name == name for node in nodes])
            found.append(Island(f"op.{name}", sites, _numbers(outside, name)))
    return found


def _numbers(names: Sequence[str | None], name: str) -> tuple[int, ...]:
    return tuple(number for number, each in enumerate(names) if each == name)


def _alike(scope: str) -> str | None:
    """Returns the selector of a scope and of those whose paths differ in numbers alone."""
    select = selector(scope)
    return select and pattern(select)


def _broad(scope: str) -> str | None:
    """Returns the class of a scope's module, or the last name of a scope outside of modules."""
    module, select = where(scope).module, _alike(scope)
    if select is None or module is not None:
        return select if module is None else module.cls.__name__
    return f"*/{select.rpartition('/')[2]}"


def _selected(rule: Rule, nodes: Sequence[Node], by_operations: bool) -> np.ndarray:
    """Returns which sites a rule is about, those in modules and scopes inside of it included."""
    known: dict[str, bool] = {"": False}

    def is_selected(scope: str) -> bool:
        if scope not in known:
            is_place = by_operations or module_of(scope) is not None
            around = is_selected(scope.rpartition("/")[0])
            known[scope] = around or (is_place and matches_scope(rule, scope))
        return known[scope]

    return np.array([is_selected(node.scope) for node in nodes], bool)
