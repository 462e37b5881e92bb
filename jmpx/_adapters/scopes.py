"""The state of an active policy map: the policy of each module, and rules that matched nothing."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import jax
import numpy as np

from jmpx._adapters.boundaries import FieldCensus
from jmpx._base.contexts import Context, Hook, entered, is_held, opened, refuse_other_tasks
from jmpx._base.dtypes import SUMMED_IN_FLOAT32, DTypeLike, matmul_of
from jmpx._base.messages import user_stacklevel
from jmpx._base.trees import PyTree, is_view
from jmpx._jaxprs.marks import Module
from jmpx._policies.frameworks import Creation, is_convolution
from jmpx._policies.map_strings import get_policy_map
from jmpx._policies.maps import PolicyMap, PolicyMapLike, Rule, with_trial_rules
from jmpx._policies.policy import Policy
from jmpx._policies.registry import policy_of
from jmpx._policies.unused import warn_unused


class ModuleRecord(NamedTuple):
    """A module that a scope met."""

    module: Module
    boundary: Policy | None  # None if its calls do not cast
    surrounding: Policy | None  # None for the outermost call


@dataclasses.dataclass(eq=False)  # two open pools of equal maps differ
class Pool:
    """Modules met by the scopes of one policy map that began in one context of `pooled`."""

    name: str  # the function that applies the map, as the user calls it
    policy_map: PolicyMap | None
    seen: set[Module] = dataclasses.field(default_factory=set)
    census: FieldCensus = dataclasses.field(default_factory=FieldCensus)

    @classmethod
    def open_for(cls, name: str, policy_map: PolicyMap | None) -> "Pool":
        """Returns the outermost open pool of an equal map, a new one if there is none."""
        pools = (pool for pool in opened(cls) if pool.policy_map == policy_map)
        return next(pools, cls(name, policy_map))

    def warn(self, stacklevel: int) -> None:
        """Warns of rules and fields, unless a context of `pooled` is open and will warn later."""
        if self.policy_map is not None and not is_held(self):
            warn_unused(self.policy_map, self.seen, stacklevel + 1)
            self.census.warn(self.policy_map, self.name, stacklevel + 1)


class PolicyScope:
    """The state of one active policy map: of contexts of equal maps, or of one view that is made.

    Args:
        name: the function that begins the scope, as the user calls it.
        policy_map: what `for_modules` returns.
    """

    def __init__(self, name: str, policy_map: PolicyMap | None) -> None:
        self.name = name
        self.policy_map = policy_map
        self.pool = Pool.open_for(name, policy_map)
        self.census = self.pool.census
        self.met: dict[ModuleRecord, None] = {}  # in the order of first calls, in `listening`
        self.tell_listeners()

    def tell_listeners(self) -> None:
        """Adds the scope to those that the open contexts of `listening` collect."""
        self._listeners = opened(_Listener)
        for listener in self._listeners:
            if self not in listener:
                listener.append(self)

    def give_back(self) -> None:
        """Gives back what the scope has replaced; it ends in the thread in which it began."""

    def policies_of(
        self, cls: type, path: str, surrounding: Policy | None
    ) -> tuple[Policy | None, Policy | None]:
        """Returns the policy that is given to a module itself, and its boundary policy.

        The map's default is the boundary policy of the outermost call alone.
        """
        refuse_other_tasks(f"cast a {cls.__name__}")
        self.pool.seen.add(Module(cls, path))
        own = self.explicit_policy(cls, path, surrounding)
        boundary = own
        if own is None and surrounding is None and self.policy_map is not None:
            boundary = self.policy_map.default
        if boundary is not None and is_held(self):  # the scope of a view is not held
            *_, innermost = opened((_Island, PolicyScope))
            if isinstance(innermost, _Island):
                innermost.check(cls, boundary.compute_dtype, self.policy_map)
        return own, boundary

    def explicit_policy(self, cls: type, path: str, surrounding: Policy | None) -> Policy | None:
        """Returns the policy that a rule or else the class gives to a module, None without one."""
        default = None if self.policy_map is None else self.policy_map.default
        rule = None if self.policy_map is None else self.policy_map.rule_for(cls, path)
        self._refuse_convolution(cls, path, rule, surrounding)
        if rule is not None and default is not None:
            return rule.resolve(default, surrounding)
        policy = policy_of(cls)
        matmul = matmul_of(default if surrounding is None else surrounding)
        if policy is None or matmul is None or matmul_of(policy) is not None:
            return policy
        if not isinstance(policy, Policy):  # pyright: ignore[reportUnnecessaryIsInstance]
            # A policy of JMP, which Haiku's registry may hold.
            policy = Policy(policy.param_dtype, policy.compute_dtype, policy.output_dtype)
        return dataclasses.replace(policy, matmul_precision=matmul)  # inherited, as by a rule

    def _refuse_convolution(
        self, cls: type, path: str, rule: Rule | None, surrounding: Policy | None
    ) -> None:
        """Refuses a convolution that a rule with `product` selects, itself or around it."""
        rules = () if self.policy_map is None else self.policy_map.rules
        if rule is None and matmul_of(surrounding) in SUMMED_IN_FLOAT32.values():
            rule = next((each for each in rules if each.product is not None), None)
        if rule is not None and rule.product is not None and is_convolution(cls):
            raise rule.convolution_error(f"{cls.__name__} at {path!r}")

    def record_module(
        self, cls: type, path: str, boundary: Policy | None, surrounding: Policy | None
    ) -> None:
        """Records the policies of a module, if any context of `listening` is open."""
        if self._listeners:
            self.met[ModuleRecord(Module(cls, path), boundary, surrounding)] = None


S = TypeVar("S", bound=PolicyScope)


@contextlib.contextmanager
def in_policy_scope(
    kind: type[S], name: str, policy_map: PolicyMap | None, hook: Hook
) -> Iterator[S]:
    """Opens a scope, or goes on with the innermost one of its kind if it follows an equal map."""
    innermost = opened(kind)[-1:]
    if innermost and innermost[0].policy_map == policy_map:
        scope = innermost[0]
        scope.tell_listeners()
    else:
        scope = kind(name, policy_map)
    # A key of JAX's caches: equal policy maps share traces, whichever scope it is.
    with entered(Context(name, scope, (scope.policy_map,), hook, scope.give_back)):
        yield scope


def for_modules(policy_map: PolicyMapLike, name: str) -> PolicyMap:
    """Returns the policy map that adapters follow; a ValueError if it is for another way."""
    return with_trial_rules(get_policy_map(policy_map).applied_by("modules", name), name)


@contextlib.contextmanager
def pooled(policy_map: PolicyMap | None, name: str) -> Iterator[None]:
    """Has the scopes of all frameworks under one policy map warn together, at the end."""
    pool = Pool.open_for(name, policy_map)
    with entered(Context(name, pool)):
        yield
    pool.warn(user_stacklevel("jax", "flax", "haiku", "equinox"))


class _Island(NamedTuple):
    """A function that runs under a policy map by arguments or by operations."""

    policy_map: PolicyMap

    def check(self, cls: type, dtype: DTypeLike, policy_map: PolicyMap | None) -> None:
        """Refuses a module that casts to another dtype, by a policy map around the function."""
        if np.dtype(dtype) == np.dtype(self.policy_map.default.compute_dtype):
            return
        raise ValueError(
            f"Cannot apply policy map {str(self.policy_map)!r} by {self.policy_map.way} to a "
            f"{cls.__name__} that casts by policy map {str(policy_map or '')!r} around the call: "
            "give the part a rule in that policy map, or by=modules in its own."
        )


@contextlib.contextmanager
def island(policy_map: PolicyMap, given: PyTree) -> Iterator[None]:
    """Runs a function, by arguments or by operations, where modules around it may cast.

    Raises:
        ValueError: if a module in it, or a view among what it is given, casts to another dtype.
    """
    here = _Island(policy_map)
    for view in filter(is_view, jax.tree.leaves(given, is_leaf=is_view)):
        around: PyTree = type(view).__jmpx_view__
        if around is not None:
            here.check(type(view), around.default.compute_dtype, around)
    with entered(Context("jmpx.apply_policy", here)):
        yield


class _Listener(list[PolicyScope]):
    """The scopes that began in a context of `listening`."""


@contextlib.contextmanager
def listening() -> Iterator[list[PolicyScope]]:
    """Collects the scopes that begin while the context lasts; each records what it meets."""
    listener = _Listener()
    # The key is new each time, so that JAX traces a jitted function again and its modules run.
    with entered(Context("listening", listener, key=object())):
        yield listener


def active_creation(scopes: type[PolicyScope]) -> Creation | None:
    """Returns the innermost `Creation`; None without one, or while scopes of a kind are open."""
    return None if opened(scopes) else next(reversed(opened(Creation)), None)


def inherited_policy(surrounding: Policy) -> Policy:
    """Returns the policy of a boundary whose result has the surrounding compute dtype."""
    return surrounding.with_output_dtype(surrounding.compute_dtype)
