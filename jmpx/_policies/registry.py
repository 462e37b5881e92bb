"""Policies of classes, per thread; how modules under autocast mark their calls."""

import contextlib
import dataclasses
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TypeAlias, TypeVar

import numpy as np

from jmpx._base.contexts import (
    AUTOCAST,
    MARKED,
    Context,
    catch_up,
    entered,
    fact,
    note_cast,
    opened,
    set_fact,
)
from jmpx._base.dtypes import dtype_name, matmul_of, matmul_region
from jmpx._base.messages import describe, user_stacklevel
from jmpx._base.trees import PyTree
from jmpx._jaxprs.marks import Module, full_precision, in_module, is_marking, marking, selecting
from jmpx._policies.frameworks import (
    ClassPolicies,
    Proxies,
    adapters_of,
    call_with_proxies,
    imported_adapters,
)
from jmpx._policies.maps import PolicyMap
from jmpx._policies.policy import Policy, PolicyLike
from jmpx._policies.strings import get_policy

# A class is stored by its name, which survives a reload of its module. Classes that are made in
# functions share one name, so these are stored by the class itself.
_Key: TypeAlias = type | tuple[str, str]

# Traced bodies whose results may have any dtype. JAX compares the dtypes of all others: with the
# carry of a loop, with the other branches, with the inputs of a backward pass.
_FREE_BODIES = frozenset({"checkpoint / remat", "shard_map", "pmap"})


class _Registry(threading.local):
    """The policies of one thread."""

    def __init__(self) -> None:
        # The policies that jmpx attached, also to a framework's store: part of JAX's cache keys.
        self.policies: dict[_Key, Policy] = {}
        self.running: list[Policy | None] = []  # of the running methods, the innermost last
        self.bodies = 0  # how many bodies were being traced when the outermost method began


_registry = _Registry()


def _key(cls: type) -> _Key:
    return cls if "<locals>" in cls.__qualname__ else (cls.__module__, cls.__qualname__)


def _store_of(cls: type) -> ClassPolicies | None:
    """Returns the store of the framework that a class descends from; None if jmpx stores it."""
    if not isinstance(cls, type):
        raise TypeError(
            f"Expected a class to attach a policy to, got {describe(cls)}: pass the class itself, "
            "such as hk.Linear, as the first argument."
        )
    stores = (adapter.class_policies for adapter in adapters_of(cls))
    return next((store for store in stores if store is not None), None)


def _to_policy(policy: PolicyLike) -> Policy:
    if policy is None:
        raise TypeError("Expected a policy or a policy string, got None: call jmpx.clear_policy.")
    policy = get_policy(policy)
    if policy.reduce_dtype is not None:
        name = dtype_name(policy.reduce_dtype)
        warnings.warn(
            f"reduce={name} of a class policy reduces nothing: it is for sums of gradients over "
            "devices, so give it to the gradient function's policy=.",
            stacklevel=user_stacklevel(),
        )
    return policy


def _attach(cls: type, policy: Policy | None, cached: Policy | None) -> None:
    """Attaches a policy to a class, or detaches it where the policy is None.

    A framework's own store gets `policy`, and `_Registry.policies` gets `cached`. They differ if
    the framework's store has a policy that jmpx did not set.
    """
    catch_up()
    store = _store_of(cls)
    if store is not None and policy is None:
        store.clear(cls)
    elif store is not None and policy is not None:
        store.set(cls, policy)
    _registry.policies.pop(_key(cls), None)
    if cached is not None:
        _registry.policies[_key(cls)] = cached
    set_fact("policies of classes", frozenset(_registry.policies.items()) or None)


def set_policy(cls: type, policy: PolicyLike) -> None:
    """Attaches a policy to a class, for all its instances in this thread.

    For a Haiku module class this is the same act as `hk.mixed_precision.set_policy`. The policy of
    a Linen, NNX or Equinox module class casts under `jmpx.flax.policies`, in a view that
    `with_policies` makes, and under autocast, each time as it is when that begins. Any other class
    may ask for its policy: `policy_of(type(self))`. A jitted function is traced anew when it is
    called under other policies of jmpx than before.

    Args:
        cls: the class; subclasses do not inherit its policy, as in Haiku.
        policy: a policy, or anything else that `get_policy` takes. A bare dtype is a complete
            policy: under `"bf16"`, Haiku and Linen create parameters in bfloat16.

    Raises:
        TypeError: if `cls` is not a class, or `get_policy` does not take `policy`.
        ValueError: if `policy` is not a policy string.

    Warns:
        UserWarning: if the policy sets `reduce`, which a class policy has no use for; if it sets
            `matmul` for a Haiku class outside of jmpx's contexts.

    Example:
        >>> import haiku as hk, jmpx
        >>> jmpx.set_policy(hk.Linear, "c=bf16,o=f32")
        >>> hk.mixed_precision.get_policy(hk.Linear) == jmpx.get_policy("c=bf16,o=f32")
        True
        >>> jmpx.clear_policy(hk.Linear)
    """
    _store_of(cls)  # its error comes first
    policy = _to_policy(policy)
    _attach(cls, policy, policy)


def clear_policy(cls: type) -> None:
    """Detaches the policy of a class; a class without one is left as it is.

    Raises:
        TypeError: if `cls` is not a class.

    Example:
        >>> import haiku as hk, jmpx
        >>> jmpx.set_policy(hk.Linear, "bf16")
        >>> jmpx.clear_policy(hk.Linear)
        >>> jmpx.policy_of(hk.Linear) is None
        True
    """
    _attach(cls, None, None)


def policy_of(cls: type) -> Policy | None:
    """Returns the policy that is attached to a class itself, not to its bases; None if it has none.

    For a Haiku module class it is the answer of `hk.mixed_precision.get_policy`.

    Raises:
        TypeError: if `cls` is not a class.

    Example:
        >>> import jmpx
        >>> class Block: ...
        >>> jmpx.set_policy(Block, "c=bf16")
        >>> str(jmpx.policy_of(Block))
        'params=float32,compute=bfloat16,output=bfloat16'
        >>> jmpx.clear_policy(Block)
    """
    catch_up()
    store = _store_of(cls)
    return _registry.policies.get(_key(cls)) if store is None else store.get(cls)


def any_class_has_a_policy() -> bool:
    """Whether jmpx has attached a policy to any class in this thread."""
    catch_up()
    return bool(_registry.policies)


@dataclasses.dataclass(eq=False)
class _Push:
    """A context of `push_policy`: a class, and its policies at entry, as `_attach` takes them."""

    cls: type
    policy: Policy | None
    cached: Policy | None

    def undo(self) -> None:
        """Restores the policy at entry: in the class, or in the next push that is still open."""
        pushes = opened(_Push)
        after = pushes[pushes.index(self) + 1 :]
        later = [push for push in after if _key(push.cls) == _key(self.cls)]
        if later:
            later[0].policy, later[0].cached = self.policy, self.cached
        else:
            _attach(self.cls, self.policy, self.cached)


@contextlib.contextmanager
def push_policy(cls: type, policy: PolicyLike) -> Iterator[None]:
    """Attaches a policy to a class while the context lasts; also a decorator.

    When the context ends, the class has the policy again that it had before. Of the tasks of an
    event loop, only one at a time can be in a context: leave it before each `await`.

    Args:
        cls: the class.
        policy: a policy, or anything else that `get_policy` takes; see `set_policy`.

    Yields:
        None.

    Raises:
        TypeError: as `set_policy`.
        ValueError: as `set_policy`; for Haiku, if the call stands inside a method of the same
            class; if another task of the thread is in a context of jmpx at entry, or runs a module
            while this context lasts.

    Warns:
        UserWarning: if the policy sets `reduce`, which a class policy has no use for.

    Example:
        >>> import haiku as hk, jmpx
        >>> with jmpx.push_policy(hk.Linear, "c=bf16"):
        ...     str(jmpx.policy_of(hk.Linear))
        'params=float32,compute=bfloat16,output=bfloat16'
        >>> jmpx.policy_of(hk.Linear) is None
        True
    """
    store, policy = _store_of(cls), _to_policy(policy)
    if store is not None:
        store.check_push(cls, policy)
    hook = None if store is None else store.interception
    push = _Push(cls, policy_of(cls), _registry.policies.get(_key(cls)))
    with entered(Context("jmpx.push_policy", push, hook=hook, undo=push.undo)):
        _attach(cls, policy, policy)
        yield


@contextlib.contextmanager
def running(policy: Policy | None, by: str) -> Iterator[None]:
    """Makes a policy, or None, the current one while a method runs.

    `by` is the function of the adapter that casts, as the user calls it.
    """
    if policy is not None:
        note_cast(by, policy.compute_dtype)
    outer = _registry.running[-1] if _registry.running else None
    if not _registry.running:
        _registry.bodies = len(_enclosing_bodies())
    _registry.running.append(policy)
    try:
        computes = contextlib.nullcontext() if policy is None else computing(policy, outer)
        with computes, _gathers(policy):
            yield
    finally:
        _registry.running.pop()


@contextlib.contextmanager
def computing(policy: Policy, outer: Policy | None = None) -> Iterator[None]:
    """Runs code under a policy: its algorithm of products, and no autocast if it is in float32.

    An algorithm that the `outer` policy has, too, is inherited, so that it does not override a
    `jax.default_matmul_precision` that the user's code sets in between.
    """
    matmul = matmul_of(policy)
    is_inherited = outer is not None and matmul_of(outer) == matmul
    is_wide = np.dtype(policy.compute_dtype).itemsize >= 4
    is_island = is_wide and fact(AUTOCAST) is not None
    with (
        matmul_region(None if is_inherited else matmul, policy.compute_dtype),
        full_precision() if is_island else contextlib.nullcontext(),
    ):
        yield


def _gathers(policy: Policy | None) -> AbstractContextManager[object]:
    """Returns the context that sums the gradients of gathers in float32 under a 16-bit policy."""
    if policy is None or np.dtype(policy.compute_dtype).itemsize >= 4:
        return contextlib.nullcontext()
    from jmpx._jaxprs.gathers import summed_in_float32  # here, as below

    return summed_in_float32()


def _enclosing_bodies() -> list[str | None]:
    from jmpx._jaxprs.core import enclosing_bodies  # here, so that the import of jmpx stays light

    return enclosing_bodies()


def is_outermost() -> bool:
    """Whether no casting method of a module is running, so that the next one is the outermost."""
    return not _registry.running


def in_loop() -> bool:
    """Whether a loop, a branch or a derivative of JAX is traced inside of the outermost method.

    If no method is running, as for a part of a view that is called by itself, any loop counts.
    """
    bodies = _enclosing_bodies()
    if not _registry.running:
        return not {*_FREE_BODIES, "jit", "derivative"}.issuperset(bodies)  # as in a train step
    # JAX may reuse the trace of a jitted function in a loop for a call outside, and vice versa, so
    # an inner jit counts as a loop.
    return not _FREE_BODIES.issuperset(bodies[: max(len(bodies) - _registry.bodies, 0)])


def current_policy() -> Policy | None:
    """Returns the policy of the innermost running method of a module; None outside of all.

    In a function that is jitted by itself and that several modules call, it is the policy of the
    call for which the function was traced.

    Example:
        >>> import haiku as hk, jax, jax.numpy as jnp, jmpx
        >>> class Block(hk.Module):
        ...     def __call__(self, x):
        ...         print(jmpx.current_policy())
        ...         return x
        >>> with jmpx.push_policy(Block, "c=bf16"):
        ...     _ = hk.transform(lambda x: Block()(x)).apply({}, None, jnp.ones(2))
        params=float32,compute=bfloat16,output=bfloat16
        >>> jmpx.current_policy() is None
        True
    """
    by_frameworks = (adapter.current_policy() for adapter in imported_adapters())
    policies = (*_registry.running[-1:], *by_frameworks)
    return next((policy for policy in policies if policy is not None), None)


# Calls of modules: autocast has the adapters mark them, or puts proxies in place of the modules.


R = TypeVar("R")


def marked_call(cls: type, path: str) -> AbstractContextManager[object]:
    """Returns the context of a call of a module's method under autocast: its mark."""
    return in_module(cls, path, policy_of(cls))


@contextlib.contextmanager
def marked_calls(policy_map: PolicyMap | None) -> Iterator[None]:
    """Makes modules mark their calls in the context, if a rule or a class policy is for modules.

    Without a policy map they always do.
    """
    is_for_modules = policy_map is None or _is_for_modules(policy_map)
    with contextlib.ExitStack() as stack:
        for adapter in () if is_marking() else imported_adapters():
            # A framework's own functions may set class policies, which jmpx does not see.
            if is_for_modules or adapter.class_policies is not None:
                stack.enter_context(adapter.marked_calls())
        if is_for_modules:
            stack.enter_context(marking())
        rules = policy_map if is_for_modules else None
        stack.enter_context(selecting(rules and functools.partial(_selects, rules)))
        yield


def _is_for_modules(policy_map: PolicyMap) -> bool:
    """Whether a rule of a policy map is for modules, or any class has a policy."""
    return any_class_has_a_policy() or not all(rule.is_operation for rule in policy_map.rules)


def _selects(policy_map: PolicyMap, cls: type, path: str) -> bool:
    """Whether a rule of a policy map or a class policy is for a module."""
    return policy_map.rule_for(cls, path) is not None or policy_of(cls) is not None


def marking_calls(policy_map: PolicyMap, seen: set[Module]) -> Callable[..., PyTree]:
    """Returns what autocast traces: it calls a function whose modules mark their calls.

    `seen` gets the modules that class names and globs of the policy map could match.
    """

    def matches(cls: type, path: str) -> bool:
        seen.add(Module(cls, path))
        return bool(fact(MARKED)) or _selects(policy_map, cls, path)

    def call(fn: Callable[..., R], *args: PyTree, **kwargs: PyTree) -> R:
        if fact(MARKED) or _is_for_modules(policy_map):
            return call_marked(policy_map, matches, fn, args, kwargs)
        with marked_calls(policy_map):
            return fn(*args, **kwargs)

    return call


def call_marked(
    policy_map: PolicyMap | None,
    matches: Callable[[type, str], bool],
    fn: Callable[..., R],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
) -> R:
    """Calls a traced function so that modules mark their calls.

    Modules in the function and in its arguments do so if their class and path match, modules that
    are made inside always. See also `marked_calls`.
    """
    with marked_calls(policy_map):
        return call_with_proxies(markers(matches), fn, args, kwargs)


def markers(matches: Callable[[type, str], bool]) -> list[Proxies]:
    """Returns proxies with which modules mark their calls if their class and path match."""
    return [*filter(None, (adapter.marker(matches) for adapter in imported_adapters()))]
