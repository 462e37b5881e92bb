"""The modules of a function under autocast: where they are, and what marks their calls."""

import contextlib
import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from jmpx._marks import Module, is_marking, marking
from jmpx._policy_map import PolicyMap

# Root package of a framework -> its adapter, imported when the framework has been.
# `marked_calls()` marks the calls of modules that the framework itself reports.
_CALLS = {"haiku": "jmpx.haiku", "flax": "jmpx.flax"}
# `Marker(matches)` has those modules of a pytree mark their calls that a rule matches.
_TREES = {"equinox": "jmpx.equinox", "flax": "jmpx.flax"}


class Marks:
    """What the class selectors and globs of a policy map could match in one call of a function.

    Args:
        policy_map: the policy map.
    """

    def __init__(self, policy_map: PolicyMap) -> None:
        self.rules = [rule for rule in policy_map.rules if not rule.is_operation]
        self.seen: set[Module] = set()

    def matches(self, cls: type, path: str) -> bool:
        """Tells whether a rule is about a module, and notes that the module is there."""
        self.seen.add(Module(cls, path))
        return any(rule.matches(cls, path) for rule in self.rules)

    def call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a function, for autocast to trace; the calls of modules are marked."""
        if not self.rules:
            return fn(*args, **kwargs)
        markers = [adapter.Marker(self.matches) for adapter in _imported(_TREES)]
        for marker in markers:
            fn, args, kwargs = _on_owner(marker.mark, fn, args, kwargs)
        with contextlib.ExitStack() as stack:
            for marker in markers:
                stack.callback(marker.unmark, None)
            for adapter in () if is_marking() else _imported(_CALLS):
                stack.enter_context(adapter.marked_calls())
            stack.enter_context(marking())
            result = fn(*args, **kwargs)
        for marker in markers:
            result = marker.unmark(result)
        return result


def _on_owner(mark: Callable[[Any], Any], fn: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """Marks a function and its arguments; of a method, the object that it is bound to."""
    if isinstance(fn, functools.partial):
        return _on_owner(mark, fn.func, (*fn.args, *args), {**fn.keywords, **kwargs})
    owner, name = getattr(fn, "__self__", None), getattr(fn, "__name__", "")
    if not isinstance(fn, types.MethodType) or getattr(owner, name, None) != fn:
        return mark((fn, args, kwargs))
    owner, args, kwargs = mark((owner, args, kwargs))
    return getattr(owner, name), args, kwargs


def _imported(adapters: dict[str, str]) -> Iterator[Any]:
    for root, adapter in adapters.items():
        if sys.modules.get(root) is not None:  # one that was never imported runs no module
            yield importlib.import_module(adapter)
