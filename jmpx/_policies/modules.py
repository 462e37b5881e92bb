"""The modules of a function under autocast: autocast asks their adapters to mark their calls."""

import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias, TypeVar

from jmpx._base.leaves import PyTree
from jmpx._base.stateful import apply
from jmpx._jaxprs.marks import Module, in_module, is_marking, marking, selecting
from jmpx._policies.frameworks import Proxies, imported_adapters
from jmpx._policies.maps import PolicyMap
from jmpx._policies.registry import any_class_has_a_policy, policy_of

R = TypeVar("R")

# A function, with its positional and its keyword arguments.
_Call: TypeAlias = tuple[Callable[..., R], tuple[PyTree, ...], dict[str, PyTree]]
_Change: TypeAlias = Callable[[PyTree], PyTree]

# How JAX's errors of two trees that differ begin, from JAX 0.10 on and in JAX 0.7.
_DIFFERENT_TREES = ("pytree structure error", "Custom node type mismatch")


def marked_call(cls: type, path: str) -> AbstractContextManager[object]:
    """Returns the context of a call of a module's method under autocast: its mark."""
    return in_module(cls, path, policy_of(cls))


@contextlib.contextmanager
def marked_calls(policy_map: PolicyMap | None) -> Iterator[None]:
    """Has the modules that are called in the context mark their calls, if a policy is for modules.

    Without a policy map they do in any case.
    """
    is_for_modules = policy_map is None or _is_for_modules(policy_map)
    with contextlib.ExitStack() as stack:
        for adapter in () if is_marking() else imported_adapters():
            # The functions of a framework itself may set policies of its classes.
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
    """Whether a rule of a policy map, or the policy of its class, is for a module."""
    return policy_map.rule_for(cls, path) is not None or policy_of(cls) is not None


def marking_calls(policy_map: PolicyMap, seen: set[Module]) -> Callable[..., PyTree]:
    """Returns what calls a function for autocast to trace, in which the modules mark their calls.

    `seen` gets the modules that the class names and globs of the policy map could match.
    """

    def matches(cls: type, path: str) -> bool:
        seen.add(Module(cls, path))
        return _selects(policy_map, cls, path)

    def call(fn: Callable[..., R], *args: PyTree, **kwargs: PyTree) -> R:
        if _is_for_modules(policy_map):
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
    """Calls a function, which is traced, so that modules mark their calls.

    Of the modules that are found in the function and its arguments, those of which the class and
    the path match mark their calls. The others do in any case. See also `marked_calls`.
    """
    made = (adapter.marker(matches) for adapter in imported_adapters())
    markers = [marker for marker in made if marker is not None]
    with marked_calls(policy_map):
        return call_with_proxies(markers, fn, args, kwargs)


def call_with_proxies(
    proxies: Sequence[Proxies],
    fn: Callable[..., R],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    exempt: Callable[..., PyTree] = lambda change, *arguments: change(arguments),
) -> R:
    """Calls a function with proxies, of each framework, in place of the modules in it.

    `exempt` changes its arguments, `args` and `kwargs`, but leaves some of them as they are.
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
    """Adds a note to JAX's error of two trees that differ in the class of a replaced module."""
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
