"""One use of a policy map: which policy each module has, and which rules have matched nothing."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import jax

from jmpx._adapters.dtype_fields import FieldCensus
from jmpx._base.contexts import Context, Hook, entered, is_held, opened, refuse_other_tasks
from jmpx._base.matmul import matmul_of
from jmpx._base.messages import user_stacklevel
from jmpx._jaxprs.marks import Module
from jmpx._policies.added_rules import in_force
from jmpx._policies.map_strings import get_policy_map
from jmpx._policies.maps import PolicyMap, PolicyMapLike, warn_unused
from jmpx._policies.policy import Policy
from jmpx._policies.registry import policy_of
from jmpx._policies.rules import Rule


class ModuleRecord(NamedTuple):
    """A module that a scope met, or an array of a view that has a rule of its own."""

    module: Module
    boundary: Policy | None  # None if its calls do not cast
    surrounding: Policy | None  # None for the outermost call
    rule: Rule | None = None  # of an array; None for a module


@dataclasses.dataclass(eq=False)  # an open pool is told from another one of an equal map
class Pool:
    """What the scopes of one policy map have met that began in one context of `pooled`."""

    name: str  # the function that applies the map, as the user calls it
    policy_map: PolicyMap | None
    seen: set[Module] = dataclasses.field(default_factory=set)
    arrays: set[str] = dataclasses.field(default_factory=set)  # the paths of those in views
    census: FieldCensus = dataclasses.field(default_factory=FieldCensus)

    @classmethod
    def open_for(cls, name: str, policy_map: PolicyMap | None) -> "Pool":
        """Returns the outermost open pool of an equal map, a new one if there is none."""
        pools = (pool for pool in opened(cls) if pool.policy_map == policy_map)
        return next(pools, cls(name, policy_map))

    def warn(self, stacklevel: int) -> None:
        """Warns of rules and fields, but not in a context of `pooled`, which warns at its end."""
        if self.policy_map is not None and not is_held(self):
            warn_unused(self.policy_map, self.seen, stacklevel + 1, arrays=self.arrays)
            self.census.warn(self.policy_map, self.name, stacklevel + 1)


class PolicyScope:
    """One use of a policy map: contexts of an equal map in each other, or one making of a view.

    Args:
        name: the function that begins the scope, as the user calls it.
        policy_map: all that `jmpx.get_policy_map` takes; None for the policies of classes alone.

    Attributes:
        pool: the pool in which the scope began; one of its own outside of all.
        census: the parameters that `dtype` fields keep from the policy map.
        paths: the paths of the modules that were met.
        ruled: the paths of the floating arrays of a view that have rules of their own.
        met: the modules with their policies, in the order of their first calls; empty outside of
            `listening`.
    """

    def __init__(self, name: str, policy_map: PolicyMapLike | None) -> None:
        self.name = name
        self.policy_map = _for_modules(policy_map, name)
        self.pool = Pool.open_for(name, self.policy_map)
        self.census = self.pool.census
        self.paths: set[str] = set()
        self.ruled: set[str] = set()
        self.met: dict[ModuleRecord, None] = {}
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
        self.paths.add(path)
        own = self.explicit_policy(cls, path, surrounding)
        if own is None and surrounding is None and self.policy_map is not None:
            return None, self.policy_map.default
        return own, own

    def explicit_policy(self, cls: type, path: str, surrounding: Policy | None) -> Policy | None:
        """Returns the policy that a rule or else the class gives to a module, None without one."""
        default = None if self.policy_map is None else self.policy_map.default
        rule = None if self.policy_map is None else self.policy_map.rule_for(cls, path)
        if rule is not None and default is not None:
            return rule.resolve(default, surrounding)
        policy = policy_of(cls)
        matmul = matmul_of(default if surrounding is None else surrounding)
        if policy is None or matmul is None or matmul_of(policy) is not None:
            return policy
        if not isinstance(policy, Policy):  # pyright: ignore[reportUnnecessaryIsInstance]
            # One of JMP, which Haiku's registry may hold.
            policy = Policy(policy.param_dtype, policy.compute_dtype, policy.output_dtype)
        return dataclasses.replace(policy, matmul_precision=matmul)  # inherited, as by a rule

    def array_policy(self, path: str, surrounding: Policy | None) -> Policy | None:
        """Returns the policy that a rule gives to a floating array in a view, None without one.

        A glob that matches a module around the array is a rule for modules.
        """
        self.pool.arrays.add(path)
        if self.policy_map is None:
            return None
        ends = [end for end, letter in enumerate(path) if letter == "/"]
        around = [outer for outer in ("", *(path[:end] for end in ends)) if outer in self.paths]
        for rule in reversed(self.policy_map.rules):
            matches = rule.is_path and rule.matches(object, path)
            if matches and not any(rule.matches(object, outer) for outer in around):
                self.ruled.add(path)
                policy = rule.resolve(self.policy_map.default, surrounding)
                self.record_module(jax.Array, path, policy, surrounding, rule)
                return policy
        return None

    def record_module(
        self,
        cls: type,
        path: str,
        boundary: Policy | None,
        surrounding: Policy | None,
        rule: Rule | None = None,
    ) -> None:
        """Records the policies of a module or an array, if any context of `listening` is open."""
        if self._listeners:
            self.met[ModuleRecord(Module(cls, path), boundary, surrounding, rule)] = None


S = TypeVar("S", bound=PolicyScope)


@contextlib.contextmanager
def in_policy_scope(
    kind: type[S], name: str, policy_map: PolicyMapLike | None, hook: Hook
) -> Iterator[S]:
    """Opens a scope, or goes on with the innermost one of its kind if it follows an equal map."""
    innermost = opened(kind)[-1:]
    if innermost and innermost[0].policy_map == _for_modules(policy_map, name):
        scope = innermost[0]
        scope.tell_listeners()
    else:
        scope = kind(name, policy_map)
    # JAX's caches tell policy maps apart, and not scopes of an equal one.
    with entered(Context(name, scope, (scope.policy_map,), hook, scope.give_back)):
        yield scope


def _for_modules(policy_map: PolicyMapLike | None, name: str) -> PolicyMap | None:
    """Returns the policy map that an adapter follows; refuses one for another way."""
    if policy_map is None:
        return None
    return in_force(get_policy_map(policy_map).applied_by("modules", name), name)


@contextlib.contextmanager
def pooled(policy_map: PolicyMapLike | None, name: str) -> Iterator[PolicyMap | None]:
    """Has the scopes of all frameworks under one policy map warn together, at the end.

    Yields the policy map to give to the adapters, None for the policies of classes alone.
    """
    pool = Pool.open_for(name, _for_modules(policy_map, name))
    with entered(Context(name, pool)):
        yield None if policy_map is None else get_policy_map(policy_map).applied_by("modules", name)
    pool.warn(user_stacklevel("jax", "flax", "haiku", "equinox"))


class _Wrapper(NamedTuple):
    """A running call of a module that wraps one of another framework."""

    policy: Policy
    policy_map: PolicyMap | None


def wrapping(
    policy: Policy, policy_map: PolicyMap | None
) -> contextlib.AbstractContextManager[None]:
    """Hands a policy on to the modules of another framework that run under the same policy map."""
    return entered(Context("wrapping", _Wrapper(policy, policy_map)))


def wrapper_policy(policy_map: PolicyMap | None) -> Policy | None:
    """Returns the policy that `wrapping` hands on to scopes of a policy map, None without one."""
    wrappers = [each for each in opened(_Wrapper) if each.policy_map == policy_map]
    return wrappers[-1].policy if wrappers else None


class _Listener(list[PolicyScope]):
    """The scopes that began in a context of `listening`."""


@contextlib.contextmanager
def listening() -> Iterator[list[PolicyScope]]:
    """Collects the scopes that begin while the context lasts; each records what it meets."""
    listener = _Listener()
    # The key is new each time, so that JAX traces a jitted function again and its modules run.
    with entered(Context("listening", listener, key=object())):
        yield listener


class Creation(NamedTuple):
    """How `init` creates parameters where no module has a policy; see `Adapter.created`."""

    policy: Policy
    are_cast: bool


def creating(
    creation: Creation, framework: str, hook: Hook
) -> contextlib.AbstractContextManager[None]:
    """Puts a `Creation` in force in a framework while the context lasts."""
    return entered(Context(f"jmpx.apply_policy in {framework}", creation, creation, hook))


def creation_in_force(scopes: type[PolicyScope]) -> Creation | None:
    """Returns the innermost `Creation`; None without one, or inside of a scope of a kind."""
    return None if opened(scopes) else next(reversed(opened(Creation)), None)


def inherited_policy(surrounding: Policy) -> Policy:
    """Returns the policy of a boundary whose result comes in the dtype of its surroundings."""
    return surrounding.with_output_dtype(surrounding.compute_dtype)
