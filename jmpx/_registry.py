"""The registry: which policy belongs to which class.

A class of a framework that has an adapter is kept by that adapter, which for Haiku means in
Haiku's own registry; all other classes are kept here. Both are per thread. JAX's caches know what
is set from here, so that a jitted function is traced anew under other policies.
"""

import contextlib
import dataclasses
import importlib
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from jmpx._contexts import Context, entered, note_cast, opened_here, refuse_other_tasks, set_fact
from jmpx._policy import Policy, get_policy
from jmpx._policy_map import PolicyMap

# Root package of a framework -> its adapter, imported when a class of the framework is met.
_ADAPTERS = {"haiku": "jmpx.haiku"}


class _Registry(threading.local):
    """What is set in one thread.

    Attributes:
        policies: the policies that were attached here; of a class that an adapter keeps, a note of
            it, for JAX's caches. A local class lives on as long as its policy, and in JAX's caches.
        running: the policies of the methods that run, the innermost last.
    """

    def __init__(self) -> None:
        self.policies: dict[type | tuple[str, str], Policy] = {}
        self.running: list[Policy | None] = []


_registry = _Registry()


def _key(cls: type) -> type | tuple[str, str]:
    """Returns what a class is kept by: its name, which survives a reload of its module.

    Classes made in functions share one name between them, so they are kept by themselves.
    """
    return cls if "<locals>" in cls.__qualname__ else (cls.__module__, cls.__qualname__)


def _adapter(cls: type) -> ModuleType | None:
    """Returns the adapter of the framework that `cls` descends from, None without one."""
    if not isinstance(cls, type):
        raise TypeError(
            f"Expected a class to attach a policy to, got {cls!r}: pass the class itself, such as "
            "hk.Linear."
        )
    roots = (base.__module__.partition(".")[0] for base in cls.__mro__)
    name = next((_ADAPTERS[root] for root in roots if root in _ADAPTERS), None)
    return None if name is None else importlib.import_module(name)


def _to_policy(policy: Policy | str) -> Policy:
    if policy is None:
        raise TypeError("Expected a policy or a policy string, got None: call jmpx.clear_policy.")
    return get_policy(policy)


def _attach(cls: type, policy: Policy | None, noted: Policy | None) -> None:
    """Gives a class a policy or, with None, takes it away, and tells JAX's caches what is noted."""
    adapter = _adapter(cls)
    if adapter is not None and policy is None:
        adapter.clear_policy(cls)
    elif adapter is not None:
        adapter.set_policy(cls, policy)
    _registry.policies.pop(_key(cls), None)
    if noted is not None:
        _registry.policies[_key(cls)] = noted
    set_fact("policies of classes", frozenset(_registry.policies.items()) or None)


def set_policy(cls: type, policy: Policy | str) -> None:
    """Attaches a policy to a class, for all its instances in this thread.

    For a Haiku module class this is the same act as `hk.mixed_precision.set_policy`: its inputs and
    parameters are cast to the compute dtype, its results to the output dtype. The policies of
    other classes are there for their code to ask for, by `policy_of(type(self))`.

    A jitted function is traced anew when it is called under other policies than before. That holds
    for policies set by jmpx alone: JAX does not see what `hk.mixed_precision` sets by itself.

    Args:
        cls: the class; subclasses do not inherit its policy, as in Haiku.
        policy: a policy, or a policy string, which is a complete policy: `"full"` is float32 for
            parameters, computation and output.

    Raises:
        TypeError: if `cls` is not a class, or `policy` is neither a policy nor a string.
        ValueError: if `policy` is not a policy string.

    Example:
        >>> import haiku as hk
        >>> import jmpx
        >>> jmpx.set_policy(hk.Linear, "c=bf16,o=f32")
        >>> hk.mixed_precision.get_policy(hk.Linear) == jmpx.get_policy("c=bf16,o=f32")
        True
        >>> jmpx.clear_policy(hk.Linear)
    """
    _adapter(cls)  # refuses what is no class, first
    policy = _to_policy(policy)
    _attach(cls, policy, policy)


def clear_policy(cls: type) -> None:
    """Detaches the policy of a class; a class without one is left as it is.

    Args:
        cls: the class.

    Raises:
        TypeError: if `cls` is not a class.

    Example:
        >>> import haiku as hk
        >>> import jmpx
        >>> jmpx.set_policy(hk.Linear, "bf16")
        >>> jmpx.clear_policy(hk.Linear)
        >>> jmpx.policy_of(hk.Linear) is None
        True
    """
    _attach(cls, None, None)


def policy_of(cls: type) -> Policy | None:
    """Returns the policy that is attached to a class.

    Args:
        cls: the class; a policy of its base classes does not count.

    Returns:
        The policy, or None if it has none. For a Haiku module class, the answer of
        `hk.mixed_precision.get_policy`.

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
    adapter = _adapter(cls)
    return _registry.policies.get(_key(cls)) if adapter is None else adapter.policy_of(cls)


def policy_for(
    policy_map: PolicyMap | None, cls: type, path: str, surrounding: Policy | None
) -> Policy | None:
    """Returns the policy at whose boundary a call casts; for adapters.

    A rule of the map goes before the policy of the class, and that before the map's default, which
    is the outermost call's alone.

    Args:
        policy_map: the policy map, None for one without rules or default.
        cls: the class of the called module.
        path: the path of the called module.
        surrounding: the policy of the call around this one; None for the outermost call.

    Returns:
        The policy, None for a call that runs as part of what surrounds it.

    Raises:
        ValueError: if another task of this thread is in a context of jmpx.
    """
    refuse_other_tasks(f"cast a {cls.__name__}")
    rule = None if policy_map is None else policy_map.rule_for(cls, path)
    if policy_map is not None and rule is not None:
        return rule.resolve(policy_map.default, surrounding)
    policy = policy_of(cls)
    if policy is None and policy_map is not None and surrounding is None:
        return policy_map.default
    return policy


@dataclasses.dataclass(eq=False)
class _Push:
    """A context of `push_policy`, and what its class had when it was entered."""

    cls: type
    before: Policy | None
    noted: Policy | None

    def undo(self) -> None:
        """Gives back what was before: to the class or, out of order, to the next push of it."""
        pushes = opened_here(_PUSH, self)
        later = [push for push in pushes[pushes.index(self) + 1 :] if push.is_of(self.cls)]
        if later:
            later[0].before, later[0].noted = self.before, self.noted
        else:
            _attach(self.cls, self.before, self.noted)

    def is_of(self, cls: type) -> bool:
        return _key(self.cls) == _key(cls)


_PUSH = "jmpx.push_policy"


@contextlib.contextmanager
def push_policy(cls: type, policy: Policy | str) -> Iterator[None]:
    """Attaches a policy to a class while the context lasts; also a decorator.

    Contexts may be nested. At the end of each the class has again the policy that it had before,
    also after an exception, and when contexts end in another order than that of their nesting, as
    those of generators may. Of the tasks of an event loop, one at a time can be in a context: leave
    it before each `await`. Code that is compiled already cannot be told apart: it runs in another
    task as in the one that holds the context. Of this, `hk.mixed_precision.push_policy` does
    nothing by itself.

    Args:
        cls: the class.
        policy: a policy or a policy string.

    Yields:
        None.

    Raises:
        TypeError: if `cls` is not a class, or `policy` is neither a policy nor a string.
        ValueError: if `policy` is not a policy string; for Haiku, if the call stands inside a
            method of the same class; if another task of the thread is in a context of jmpx, at
            entry or, while this one lasts, when that task runs a module.

    Example:
        >>> import haiku as hk
        >>> import jmpx
        >>> with jmpx.push_policy(hk.Linear, "c=bf16"):
        ...     str(jmpx.policy_of(hk.Linear))
        'params=float32,compute=bfloat16,output=bfloat16'
        >>> jmpx.policy_of(hk.Linear) is None
        True
    """
    adapter, policy = _adapter(cls), _to_policy(policy)
    if adapter is not None:
        adapter.refuse_push(cls, policy)
    install = None if adapter is None else adapter.interception
    push = _Push(cls, policy_of(cls), _registry.policies.get(_key(cls)))
    with entered(Context(_PUSH, push, install=install)):
        _attach(cls, policy, policy)
        try:
            yield
        finally:
            push.undo()


@contextlib.contextmanager
def running(policy: Policy | None, by: str) -> Iterator[None]:
    """Runs a method under a policy, which `current_policy` answers; for adapters.

    Args:
        policy: the policy, None for a method that runs without one.
        by: the function of the adapter that casts, as the user calls it.
    """
    if policy is not None:
        note_cast(by)
    _registry.running.append(policy)
    try:
        yield
    finally:
        _registry.running.pop()


def current_policy() -> Policy | None:
    """Returns the policy that the running module's method is called under.

    Returns:
        The policy of the innermost running method of a Haiku, Linen, NNX or Equinox module that has
        one; None outside of such methods. A function that is jitted of its own and called by
        several modules has the answer of the call that it was traced for.

    Example:
        >>> import haiku as hk, jax, jax.numpy as jnp
        >>> import jmpx
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
    adapters = (adapter.current_policy() for adapter in _imported_adapters())
    policies = (*_registry.running[-1:], *adapters)
    return next((policy for policy in policies if policy is not None), None)


@contextlib.contextmanager
def refuse_creation() -> Iterator[None]:
    """Refuses to create parameters while the context lasts: see `jmpx.haiku.refuse_creation`."""
    with contextlib.ExitStack() as stack:
        for adapter in _imported_adapters():
            stack.enter_context(adapter.refuse_creation())
        yield


def _imported_adapters() -> Iterator[Any]:
    for root, adapter in _ADAPTERS.items():
        if sys.modules.get(root) is not None:  # one that was never imported runs no module
            yield importlib.import_module(adapter)
