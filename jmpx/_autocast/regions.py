"""Regions: what the rules of a policy map say about a scope, and about primitives in it.

The rules of a policy map (`jmpx.Rule`) are called policy rules in this package, because each
primitive has a rule, too: see `rules.py`.
"""

from typing import NamedTuple

import numpy as np

from jmpx._autocast.value import FLOAT32
from jmpx._marks import is_own_name, module_of, without_marks
from jmpx._policy_map import PolicyMap, Rule as PolicyRule
from jmpx._scopes import FULL_PRECISION


class Used(NamedTuple):
    """What an evaluation met; the warnings of policy rules that matched nothing read it.

    Args:
        rules: policy rules that matched a scope or a primitive.
        scopes: scopes of equations, and the scopes around these.
        operations: names of primitives.
    """

    rules: set[PolicyRule]
    scopes: set[str]
    operations: set[str]

    def add(self, inner: "Used") -> None:
        """Adds what the evaluation of an inner jaxpr met."""
        self.rules.update(inner.rules)
        self.scopes.update(inner.scopes)
        self.operations.update(inner.operations)


class Region(NamedTuple):
    """What holds at a scope.

    Args:
        dtype: the compute dtype.
        rank: the position in the policy map of the rule that says so; -1 for the default.
        yields: whether results that are computed in float32 here yield to 16 bits outside.
        is_fixed: whether `jmpx.full_precision` marks the scope: no policy rule changes it.
    """

    dtype: np.dtype
    rank: int
    yields: bool
    is_fixed: bool = False

    @property
    def is_full(self) -> bool:
        """Whether equations run in the dtypes in which they were traced."""
        return self.dtype.itemsize >= 4


_FIXED = Region(FLOAT32, -1, yields=False, is_fixed=True)


class Regions:
    """The regions of one evaluation under a policy map.

    Args:
        policy_map: the policy map.
        used: where scopes and matching rules are noted.
    """

    def __init__(self, policy_map: PolicyMap, used: Used) -> None:
        self._policy_map = policy_map
        self._used = used
        self._regions: dict[str, Region] = {}
        self._overrides: dict[str, list[tuple[int, PolicyRule]]] = {}
        for rank, rule in enumerate(policy_map.rules):
            if rule.is_operation and rule.compute is not None:
                name = rule.selector.removeprefix("op.")
                self._overrides.setdefault(name, []).append((rank, rule))

    def region(self, scope: str) -> Region:
        """Returns the region of a scope; the policy rules of outer scopes go first."""
        if scope not in self._regions:
            self._regions[scope] = self._region(scope)
            self._used.scopes.add(scope)
        return self._regions[scope]

    def _region(self, scope: str) -> Region:
        outer, _, name = scope.rpartition("/")
        if not scope:
            return Region(np.dtype(self._policy_map.default.compute_dtype), -1, yields=True)
        region = self.region(outer)
        if region.is_fixed or name == FULL_PRECISION:
            return _FIXED
        level = [scope]
        if _is_one_module(outer, scope):  # a rule may match the mark or the name: the last one wins
            level.append(outer)
            region = self.region(outer.rpartition("/")[0])
        for rank, rule in enumerate(self._policy_map.rules):
            if any(_matches(rule, each) for each in level):
                self._used.rules.add(rule)
                dtype = region.dtype if rule.compute is None else np.dtype(rule.compute)
                region = Region(dtype, rank, yields=rule.output is None)
        return region

    def override(self, name: str, region: Region) -> np.dtype | None:
        """Returns the dtype that a policy rule gives to a primitive (`op.exp: f32`).

        Args:
            name: the name of the primitive.
            region: the region of the equation: a later policy rule for the scope wins.

        Returns:
            The dtype; None without such a rule.
        """
        if name not in self._overrides:
            return None
        self._used.rules.update(rule for _, rule in self._overrides[name])
        rank, rule = self._overrides[name][-1]
        if region.is_fixed or rank <= region.rank:
            return None
        return np.dtype(rule.compute)


def _matches(rule: PolicyRule, scope: str) -> bool:
    """Whether a policy rule is about the last name of a scope, which may mark a module."""
    module = module_of(scope)
    return rule.matches_scope(without_marks(scope)) if module is None else rule.matches(*module)


def _is_one_module(outer: str, scope: str) -> bool:
    """Whether the last two names of a scope are the mark and the name of one module."""
    for mark, name in ((outer, scope), (scope, outer)):
        module = module_of(mark)
        if module is not None and module_of(name) is None:
            return is_own_name(module, name.rpartition("/")[2])
    return False
