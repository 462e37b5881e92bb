"""Calls of functions with proxies in place of modules, in arguments and in what they close over."""

import contextlib
import functools
import itertools
import operator
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias, TypeVar

import jax

from jmpx._base.trees import PyTree
from jmpx._jaxprs.equations import is_of_library
from jmpx._policies.frameworks import Proxies

R = TypeVar("R")

# A function, with its positional and its keyword arguments.
_Call: TypeAlias = tuple[Callable[..., R], tuple[PyTree, ...], dict[str, PyTree]]
_Change: TypeAlias = Callable[[PyTree], PyTree]

# JAX's errors about two trees that differ begin so, since JAX 0.10 and in JAX 0.7.
_DIFFERENT_TREES = ("pytree structure error", "Custom node type mismatch")


def call_with_proxies(
    proxies: Sequence[Proxies],
    fn: Callable[..., R],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    exempt: Callable[..., PyTree] = lambda change, *arguments: change(arguments),
) -> R:
    """Calls a function with the proxies of each framework in place of its modules.

    If it fails as it joins a part of a model with a part that it closes over, it is called again
    with proxies in that part, too. `exempt` applies a change to `args` and `kwargs`, but may leave
    some arguments as they are.
    """
    from jmpx._base.stateful import apply  # here, so that the import of jmpx stays light

    if fn is apply:
        fn, args = args[0], args[1:]
    own: _Call[R] = (fn, (), {})
    with contextlib.ExitStack() as stack:
        for each in proxies:
            stack.callback(each.restore, None)
            args, kwargs = exempt(each.replace, args, kwargs)
            own = _replaced(each.replace, *own)
        fn, before, keywords = own
        result = _called(fn, (*before, *args), {**keywords, **kwargs}, proxies)
        for each in proxies:
            result = each.restore(result)
    return result


def _called(
    fn: Callable[..., R],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    proxies: Sequence[Proxies],
    is_again: bool = False,
) -> R:
    """Calls a function with proxies in its arguments; see `call_with_proxies`."""
    try:
        return fn(*args, **kwargs)
    except ValueError as error:
        joined = {each: classes for each in proxies if (classes := _joined(error, each.made))}
        closing = fn
        for each in (each for each in joined if each.copies and not is_again):
            closing = _closing_over(closing, each.replace, {})
        if joined and closing is fn:
            names = ", ".join(sorted({cls.__name__ for cls in set().union(*joined.values())}))
            error.add_note(
                f"jmpx gives the modules in arguments ({names}) subclasses, so that rules can "
                "select them: where the function joins a part of a model with a part from outside, "
                "as equinox.combine does, pass both parts as arguments, or join them before the "
                "call and pass the whole model."
            )
        if closing is fn:
            raise
    return _called(closing, args, kwargs, proxies, is_again=True)


def _joined(error: ValueError, made: Mapping[type, type]) -> set[type]:
    """Returns the classes of which JAX has not joined a replaced module with another one."""
    text, found = str(error), set[type]()
    if not text.startswith(_DIFFERENT_TREES):
        return found
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    # JAX's text names both types only if no other leaf, such as an activation, comes first.
    for frame in itertools.takewhile(lambda f: is_of_library(f.f_code.co_filename), frames[::-1]):
        jax.tree.leaves(
            [*frame.f_locals.values()], is_leaf=lambda node: bool(found.add(type(node)))
        )
    return {old for new, old in made.items() if {new, old} <= found or text.count(repr(old)) > 1}


def _replaced(
    change: _Change, fn: Callable[..., R], args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
) -> _Call[R]:
    """Applies a change to a function and to its first arguments.

    For a method, to the object that it is bound to; for a partial, to its function and arguments.
    """
    if isinstance(fn, functools.partial):
        return _replaced(change, fn.func, (*fn.args, *args), {**fn.keywords, **kwargs})
    owner, name = getattr(fn, "__self__", None), getattr(fn, "__name__", "")
    if not isinstance(fn, types.MethodType) or getattr(owner, name, None) != fn:
        return change((fn, args, kwargs))
    owner, args, kwargs = change((owner, args, kwargs))
    return getattr(owner, name), args, kwargs


def _closing_over(value: PyTree, change: _Change, known: dict[int, PyTree]) -> PyTree:
    """Applies a change to what a function closes over, and to the globals that it names.

    Follows the functions among them; `known` has those that were met. Other values are changed
    themselves. What has nothing to change stays the same object.
    """
    if not isinstance(value, types.FunctionType):
        return change(value)
    if id(value) in known:
        return known[id(value)]
    known[id(value)] = value  # where a function calls itself
    named = () if is_of_library(value.__code__.co_filename) else _names(value.__code__)
    read = {name: value.__globals__[name] for name in named if name in value.__globals__}
    new = {name: _closing_over(old, change, known) for name, old in read.items()}
    new = {name: each for name, each in new.items() if each is not read[name]}

    def changed(cell: types.CellType) -> types.CellType:
        if cell == types.CellType():  # empty so far
            return cell
        inside = _closing_over(cell.cell_contents, change, known)
        return cell if inside is cell.cell_contents else types.CellType(inside)

    old_cells = value.__closure__ or ()
    cells = tuple(map(changed, old_cells))
    defaults = change(value.__defaults__)
    olds, news = (value.__defaults__, *old_cells), (defaults, *cells)
    if new or any(map(operator.is_not, news, olds)):
        around = {**value.__globals__, **new} if new else value.__globals__
        function = types.FunctionType(value.__code__, around, None, defaults, cells)
        function.__kwdefaults__ = value.__kwdefaults__
        known[id(value)] = functools.update_wrapper(function, value)
    return known[id(value)]


def _names(code: types.CodeType) -> Iterator[str]:
    """Yields the names of globals and attributes in a function, and in those that it defines."""
    yield from code.co_names
    for inner in filter(lambda each: isinstance(each, types.CodeType), code.co_consts):
        yield from _names(inner)
