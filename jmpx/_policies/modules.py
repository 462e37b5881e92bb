"""The modules of a function under autocast: autocast asks their adapters to mark their calls."""

import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias, TypeVar

from jmpx._base.stateful import apply
from jmpx._jaxprs.marks import Module, is_marking, marking
from jmpx._policies.frameworks import imported_adapters
from jmpx._policies.maps import PolicyMap, Rule

R = TypeVar("R")

# The arguments of a call are `Any`, because a function under autocast may take anything.
_Call: TypeAlias = tuple[Callable[..., R], tuple[Any, ...], dict[str, Any]]

# How JAX's errors of two trees that differ begin, from JAX 0.10 on and in JAX 0.7.
_DIFFERENT_TREES = ("pytree structure error", "Custom node type mismatch")


@contextlib.contextmanager
def marked_calls(rules: Iterable[Rule]) -> Iterator[None]:
    """Has the modules that are called in the context mark their calls, if a rule is for modules."""
    with contextlib.nullcontext() if all(rule.is_operation for rule in rules) else _all_marked():
        yield


@contextlib.contextmanager
def _all_marked() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for adapter in () if is_marking() else imported_adapters():
            stack.enter_context(adapter.marked_calls())
        stack.enter_context(marking())
        yield


class Marks:
    """The modules that the class names and globs of a policy map could match in a function's call.

    Args:
        policy_map: the policy map.

    Attributes:
        rules: the rules for modules.
        seen: the modules that were found.
    """

    def __init__(self, policy_map: PolicyMap) -> None:
        self.rules = [rule for rule in policy_map.rules if not rule.is_operation]
        self.seen: set[Module] = set()

    def matches(self, cls: type, path: str) -> bool:
        """Tells whether a rule matches a module, and notes the module."""
        self.seen.add(Module(cls, path))
        return any(rule.matches(cls, path) for rule in self.rules)

    def call(self, fn: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Calls a function, for autocast to trace; modules that a rule matches mark their calls."""
        if not self.rules:
            return fn(*args, **kwargs)
        return call_marked(self.matches, fn, args, kwargs)


def call_marked(
    matches: Callable[[type, str], bool],
    fn: Callable[..., R],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> R:
    """Calls a function, which is traced, so that modules mark their calls.

    Args:
        matches: whether the calls of a module of this class and path are to be marked, of those
            that are found in the function and its arguments. The others are marked in any case.
        fn: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """
    made = (adapter.marker(matches) for adapter in imported_adapters())
    markers = [marker for marker in made if marker is not None]
    for marker in markers:
        fn, args, kwargs = calling(marker.mark, (fn, args, kwargs))
    with contextlib.ExitStack() as stack:
        for marker in markers:
            stack.callback(marker.unmark, None)
        stack.enter_context(_all_marked())
        try:
            result = fn(*args, **kwargs)
        except ValueError as error:
            note_classes(error, [cls for each in markers for cls in each.made.values()], _JOINED)
            raise
    for marker in markers:
        result = marker.unmark(result)
    return result


_JOINED = (
    "jmpx gives the modules in arguments ({names}) subclasses while it traces, so that rules can "
    "select them: where the function joins such a part of a model with another part, as "
    "equinox.combine does, pass both parts as arguments."
)


def note_classes(error: ValueError, classes: Iterable[type], note: str) -> None:
    """Adds a note to JAX's error of two trees that differ in the class of a module.

    Args:
        error: the error.
        classes: the classes of the modules in whose place instances of subclasses are.
        note: the note, with `{names}` in place of the names of the classes in the error.
    """
    text = str(error)
    if not text.startswith(_DIFFERENT_TREES):
        return
    names = ", ".join(sorted({cls.__name__ for cls in classes if repr(cls) in text}))
    if names:
        error.add_note(note.format(names=names))


def calling(change: Callable[[Any], Any], call: _Call[R]) -> _Call[R]:
    """Changes a function and its arguments; of a method, the object to which it is bound.

    Args:
        change: returns a pytree with its modules changed.
        call: the function, its positional and its keyword arguments.
    """
    fn, args, kwargs = call
    if fn is apply:
        return calling(change, (args[0], args[1:], kwargs))
    if isinstance(fn, functools.partial):
        return calling(change, (fn.func, (*fn.args, *args), {**fn.keywords, **kwargs}))
    owner, name = getattr(fn, "__self__", None), getattr(fn, "__name__", "")
    if not isinstance(fn, types.MethodType) or getattr(owner, name, None) != fn:
        return change(call)
    owner, args, kwargs = change((owner, args, kwargs))
    return getattr(owner, name), args, kwargs
