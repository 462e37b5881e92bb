"""The modules of a function under autocast: autocast asks their adapters to mark their calls."""

import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias, TypeVar

from jmpx._base.leaves import PyTree
from jmpx._base.stateful import apply
from jmpx._jaxprs.marks import Module, is_marking, marking
from jmpx._policies.frameworks import Proxies, imported_adapters
from jmpx._policies.maps import PolicyMap, Rule

R = TypeVar("R")

# A function, with its positional and its keyword arguments.
_Call: TypeAlias = tuple[Callable[..., R], tuple[PyTree, ...], dict[str, PyTree]]
_Change: TypeAlias = Callable[[PyTree], PyTree]

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

    def call(self, fn: Callable[..., R], *args: PyTree, **kwargs: PyTree) -> R:
        """Calls a function, for autocast to trace; modules that a rule matches mark their calls."""
        if not self.rules:
            return fn(*args, **kwargs)
        return call_marked(self.matches, fn, args, kwargs)


def call_marked(
    matches: Callable[[type, str], bool],
    fn: Callable[..., R],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
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
    with _all_marked():
        return call_with_proxies(markers, fn, args, kwargs)


def call_with_proxies(
    proxies: Sequence[Proxies],
    fn: Callable[..., R],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    exempt: Callable[..., PyTree] = lambda change, *arguments: change(arguments),
) -> R:
    """Calls a function with proxies in place of the modules in it and its arguments.

    Args:
        proxies: what makes the proxies, of each framework.
        fn: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.
        exempt: changes `args` and `kwargs`, but leaves some of them as they are.
    """
    if fn is apply:
        fn, args = args[0], args[1:]
    own: _Call[R] = (fn, (), {})
    with contextlib.ExitStack() as stack:
        for each in proxies:
            stack.callback(each.restore, None)
            args, kwargs = exempt(each.replace, args, kwargs)
            own = _replaced(each.replace, *own)
        fn, before, keywords = own
        try:
            result = fn(*before, *args, **{**keywords, **kwargs})
        except ValueError as error:
            _note_classes(error, [cls for each in proxies for cls in each.made.values()])
            raise
        for each in proxies:
            result = each.restore(result)
    return result


def _note_classes(error: ValueError, classes: Iterable[type]) -> None:
    """Adds a note to JAX's error of two trees that differ in the class of a module.

    Args:
        error: the error.
        classes: the classes of the modules in whose place proxies are.
    """
    text = str(error)
    if not text.startswith(_DIFFERENT_TREES):
        return
    names = ", ".join(sorted({cls.__name__ for cls in classes if repr(cls) in text}))
    if names:
        error.add_note(
            f"jmpx gives the modules in arguments ({names}) subclasses, so that rules can select "
            "them: where the function joins a part of a model with a part from outside, as "
            "equinox.combine does, pass both parts as arguments, or join them before the call and "
            "pass the whole model."
        )


def _replaced(
    change: _Change, fn: Callable[..., R], args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
) -> _Call[R]:
    """Changes a function, and the arguments that it is called with before others.

    Of a method, that is the object to which it is bound; of a partial, its function and arguments.
    """
    if isinstance(fn, functools.partial):
        return _replaced(change, fn.func, (*fn.args, *args), {**fn.keywords, **kwargs})
    owner, name = getattr(fn, "__self__", None), getattr(fn, "__name__", "")
    if not isinstance(fn, types.MethodType) or getattr(owner, name, None) != fn:
        return change((fn, args, kwargs))
    owner, args, kwargs = change((owner, args, kwargs))
    return getattr(owner, name), args, kwargs
