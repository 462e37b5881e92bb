"""Regions: what the rules of a policy map say about a scope, and about primitives in it."""

from typing import NamedTuple

import numpy as np

from jmpx._autocast.value import FLOAT32
from jmpx._base.dtypes import check_computes
from jmpx._base.leaves import PyTree
from jmpx._base.matmul import matmul_of
from jmpx._jaxprs.core import Equation
from jmpx._jaxprs.marks import class_policy_of, is_own_name, module_of, without_marks
from jmpx._jaxprs.scopes import FULL_PRECISION
from jmpx._policies.maps import PolicyMap, Rule as PolicyRule


class Algorithm(NamedTuple):
    """The algorithm of float32 products, and the position in the policy map of the rule for it."""

    name: str  # as `jax.default_matmul_precision` takes it
    rank: int  # -1 for the default, -2 for what surrounds the call


class Used:
    """What an evaluation met; the warnings of policy rules without effect read it."""

    def __init__(self) -> None:
        self.rules = set[PolicyRule]()  # that matched a scope or a primitive
        self.scopes = set[str]()  # of equations, and the scopes around these
        self.operations = set[str]()  # names of primitives
        self.algorithms = set[Algorithm]()  # of float32 products, even if they have one already
        # Why products keep their dtypes which should run in 16 bits, "" for those that run so.
        self.kept = set[str]()
        self.wide = set[Equation]()  # whose products should have 16 bits, and cannot

    def add(self, inner: "Used") -> None:
        """Adds what the evaluation of an inner jaxpr met."""
        for name, met in vars(inner).items():
            getattr(self, name).update(met)


class Region(NamedTuple):
    """What holds at a scope."""

    dtype: np.dtype  # in which it computes
    rank: int  # the position in the policy map of the rule that says so; -1 for the default
    is_weak: bool  # whether results that are computed in float32 here are weak outside
    is_fixed: bool = False  # by `jmpx.full_precision`: no policy rule changes the dtype
    algorithm: Algorithm | None = None  # of float32 products; None leaves them to JAX

    @property
    def is_full(self) -> bool:
        """Whether equations run in the dtypes in which they were traced."""
        return self.dtype.itemsize >= 4

    @property
    def policy(self) -> str:
        """What holds here, as a policy is written."""
        algorithm = "" if self.algorithm is None else f",matmul={self.algorithm.name}"
        return f"compute={self.dtype.name}{algorithm}"

    def changed(self, rule: PolicyRule, rank: int, around: Algorithm | None) -> "Region":
        """Returns the region that a policy rule makes of this one."""
        algorithm = around if rule.matmul is None else Algorithm(rule.matmul, rank)
        says_only_that = rule.matmul is not None and rule.compute is None and rule.output is None
        if self.is_fixed or says_only_that:
            return self._replace(algorithm=algorithm)
        dtype = self.dtype if rule.compute is None else np.dtype(rule.compute)
        is_weak = rule.output is None or np.dtype(rule.output).itemsize < 4
        return Region(dtype, rank, is_weak=is_weak, algorithm=algorithm)


class Regions:
    """The regions of one evaluation under a policy map."""

    def __init__(self, policy_map: PolicyMap, surrounding: str | None = None) -> None:
        self.policy_map = policy_map
        # The algorithm that jmpx has set around the call; the default of the policy map goes first.
        self.surrounding = surrounding
        self.used = Used()  # what was met so far
        given = (rule.product or rule.matmul for rule in policy_map.rules)
        names = (surrounding, policy_map.default.matmul_precision, *given)
        self.give_algorithms = any(name is not None for name in names)
        ranked = (policy_map.default.matmul_precision, -1), (surrounding, -2)
        algorithms = (Algorithm(name, rank) for name, rank in ranked if name is not None)
        dtype = np.dtype(policy_map.default.compute_dtype)
        outermost = Region(dtype, -1, is_weak=True, algorithm=next(algorithms, None))
        self._regions = {"": outermost}  # by scopes
        self._overrides: dict[str, list[tuple[int, PolicyRule]]] = {}
        for rank, rule in enumerate(policy_map.rules):
            if rule.is_operation and (rule.compute is not None or rule.matmul is not None):
                name = rule.selector.removeprefix("op.")
                self._overrides.setdefault(name, []).append((rank, rule))

    def region(self, scope: str) -> Region:
        """Returns the region of a scope; the policy rules of outer scopes go first."""
        if scope not in self._regions:
            self._regions[scope] = self._region(scope)
            self.used.scopes.add(scope)
        return self._regions[scope]

    def _region(self, scope: str) -> Region:
        outer, _, name = scope.rpartition("/")
        region = self.region(outer)
        if name == FULL_PRECISION:
            return Region(FLOAT32, -1, False, is_fixed=True, algorithm=region.algorithm)
        level = [scope]
        if _is_one_module(outer, scope):  # a rule may match the mark or the name: the last one wins
            level.append(outer)
            region = self.region(outer.rpartition("/")[0])
        around, dtypes = region.algorithm, (region.dtype, self.policy_map.default.compute_dtype)
        for policy in filter(None, map(class_policy_of, level)):
            region = region.changed(self._rule_of_class(policy), -1, around)
        for rank, rule in enumerate(self.policy_map.rules):
            if region.is_fixed and not self.give_algorithms:
                break  # no rule can change it
            if any(matches_scope(rule, each) for each in level):
                spelled_out = rule.spelled_out(*dtypes)
                region = region.changed(spelled_out, rank, around)
                if not region.is_fixed or spelled_out.matmul is not None:
                    self.used.rules.add(rule)
        return region

    def _rule_of_class(self, policy: PyTree) -> PolicyRule:
        """Returns the policy of a class as a rule, which those of the policy map override."""
        check_computes(policy.compute_dtype)
        matmul = matmul_of(policy)
        self.give_algorithms |= matmul is not None
        return PolicyRule("*", None, policy.compute_dtype, policy.output_dtype, matmul=matmul)

    def note(self, algorithm: Algorithm) -> None:
        """Notes the algorithm of a product, and the policy rule that gives it."""
        self.used.algorithms.add(algorithm)
        rule = self.rule_of(algorithm)
        if rule is not None:
            self.used.rules.add(rule)

    def rule_of(self, algorithm: Algorithm) -> PolicyRule | None:
        """Returns the policy rule that gives an algorithm, None for the default or the call."""
        return self.policy_map.rules[algorithm.rank] if algorithm.rank >= 0 else None

    def override(self, name: str, region: Region) -> np.dtype | None:
        """Returns the dtype of a policy rule for a primitive, if no later rule is for its scope."""
        if name not in self._overrides:
            return None
        self.used.rules.update(rule for _, rule in self._overrides[name])
        ranked = [(rank, rule) for rank, rule in self._overrides[name] if rule.compute is not None]
        if not ranked or region.is_fixed or ranked[-1][0] <= region.rank:
            return None
        return np.dtype(ranked[-1][1].compute)

    def algorithm(self, name: str, region: Region) -> Algorithm | None:
        """Returns the algorithm of a float32 product: that of the later rule, None for JAX's."""
        found = region.algorithm
        for rank, rule in self._overrides.get(name, ()):
            if rule.matmul is not None and (found is None or rank > found.rank):
                found = Algorithm(rule.matmul, rank)
        return found


def matches_scope(rule: PolicyRule, scope: str) -> bool:
    """Whether a policy rule is about the last name of a scope, which may mark a module."""
    module = module_of(scope)
    if module is not None:
        return rule.matches(*module)
    # Users write a scope in a rule without the names that jmpx enters.
    names = (name for name in without_marks(scope).split("/") if name != FULL_PRECISION)
    return rule.matches_scope("/".join(names))


def _is_one_module(outer: str, scope: str) -> bool:
    """Whether the last two names of a scope are the mark and the name of one module."""
    for mark, name in ((outer, scope), (scope, outer)):
        module = module_of(mark)
        if module is not None and module_of(name) is None:
            return is_own_name(module, name.rpartition("/")[2])
    return False
