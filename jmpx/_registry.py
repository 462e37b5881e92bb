"""The registry: which policy belongs to which class.

A class of a framework that has an adapter is kept by that adapter, which for Haiku means in
Haiku's own registry; all other classes are kept here. Both are per thread.
"""

import contextlib
import importlib
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from jmpx._policy import Policy, get_policy
from jmpx._policy_map import PolicyMap

# Root package of a framework -> its adapter, imported when a class of the framework is met.
_ADAPTERS = {"haiku": "jmpx.haiku"}


class _Registry(threading.local):
    """The policies of classes that no adapter keeps, one registry per thread."""

    def __init__(self) -> None:
        self.policies: dict[type | tuple[str, str], Policy] = {}


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


def set_policy(cls: type, policy: Policy | str) -> None:
    """Attaches a policy to a class, for all its instances in this thread.

    For a Haiku module class this is the same act as `hk.mixed_precision.set_policy`: its inputs and
    parameters are cast to the compute dtype, its results to the output dtype. The policies of
    other classes are there for their code to ask for, by `policy_of(type(self))`.

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
    adapter, policy = _adapter(cls), _to_policy(policy)
    if adapter is not None:
        adapter.set_policy(cls, policy)
    else:
        _registry.policies[_key(cls)] = policy


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
    adapter = _adapter(cls)
    if adapter is not None:
        adapter.clear_policy(cls)
    else:
        _registry.policies.pop(_key(cls), None)


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
    """
    rule = None if policy_map is None else policy_map.rule_for(cls, path)
    if policy_map is not None and rule is not None:
        return rule.resolve(policy_map.default, surrounding)
    policy = policy_of(cls)
    if policy is None and policy_map is not None and surrounding is None:
        return policy_map.default
    return policy


@contextlib.contextmanager
def push_policy(cls: type, policy: Policy | str) -> Iterator[None]:
    """Attaches a policy to a class while the context lasts; also a decorator.

    Contexts may be nested. At the end of each the class has again the policy that it had before,
    also after an exception.

    Args:
        cls: the class.
        policy: a policy or a policy string.

    Yields:
        None.

    Raises:
        TypeError: if `cls` is not a class, or `policy` is neither a policy nor a string.
        ValueError: if `policy` is not a policy string; for Haiku, if the call stands inside a
            method of the same class.

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
        with adapter.push_policy(cls, policy):
            yield
        return
    before = policy_of(cls)
    set_policy(cls, policy)
    try:
        yield
    finally:
        if before is None:
            clear_policy(cls)
        else:
            set_policy(cls, before)


def current_policy() -> Policy | None:
    """Returns the policy that the running module's method is called under.

    Returns:
        The policy of the innermost running Haiku module that has one; None outside of such modules.

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
    policies = (adapter.current_policy() for adapter in _imported_adapters())
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
