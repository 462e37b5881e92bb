"""Casts around functions: which arguments they leave, and what must not be set inside."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import NamedTuple, ParamSpec, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from jmpx._base.dtypes import DTypeLike, as_dtype, dtype_name
from jmpx._base.matmul import matmul_region
from jmpx._base.messages import check_runs_at_once, describe
from jmpx._base.stateful import (
    Arguments,
    Changes,
    Keywords,
    Leaf,
    PureFunction,
    apply,
    call,
    skip_kept,
)
from jmpx._base.trees import PyTree, cast_tree, holds, is_floating
from jmpx._jaxprs.gathers import summed_in_float32
from jmpx._jaxprs.marks import full_precision
from jmpx._jaxprs.passed_on import without_passed_on


def refuse_set(
    pure: PureFunction, state: list[Leaf], args: Arguments, kwargs: Keywords, changes: Changes
) -> Changes:
    """Returns what a call on cast arguments has changed, in which no parameter is a rounding.

    Raises:
        ValueError: if the function has set a parameter that it was given rounded.
    """
    given, stored = pure.given(state, args, kwargs), changes.record.leaves

    def rounded() -> list[int]:
        new = changes.new_parameters().values()
        pairs = ((place, given[place], stored[place]) for place in new)
        return [
            n for n, low, leaf in pairs if is_floating(leaf) and not holds(low.dtype, leaf.dtype)
        ]

    if rounded():
        changes = without_passed_on(
            lambda pure, state, args, kwargs: pure(state, *args, **kwargs),
            *(pure, state, args, kwargs, changes),
        )
    for place in rounded():
        dtypes = dtype_name(given[place].dtype), dtype_name(stored[place].dtype)
        raise ValueError(
            f"Cannot set a parameter of shape {given[place].shape} inside of a function whose "
            f"arguments are cast, where it is a copy in {dtypes[0]} of the one stored in "
            f"{dtypes[1]}: set it outside of the function, or apply the policy with by=operations."
        )
    return changes


# Given of a function that are not cast: `uncast=`, their positions and names.


Given: TypeAlias = tuple[tuple[PyTree, ...], dict[str, PyTree]]
UncastLike: TypeAlias = int | str | Sequence[int | str]  # positions and names, one or several


class UncastArguments(NamedTuple):
    """The arguments that a function gets as they are, while its others are cast."""

    given: tuple[int | str, ...]  # by the user, positions and names
    positional: tuple[str, ...] = ()  # the arguments that the function takes by position, in order
    named: tuple[str, ...] = ()  # all arguments of the function
    has_state: bool = False  # whether the last one given is that of `state_argnum`

    @classmethod
    def of(
        cls, func: Callable[..., PyTree], uncast: UncastLike, state_argnum: int | None = None
    ) -> "UncastArguments":
        """Checks the positions and the names, and reads the signature of the function."""
        given: tuple[PyTree, ...] = (uncast,)
        if isinstance(uncast, Iterable) and not isinstance(uncast, str | bytes):
            given = tuple(uncast)
        if any(isinstance(each, bool) or not isinstance(each, Integral | str) for each in given):
            raise TypeError(
                "Expected uncast to be the position or the name of an argument, or several of "
                f"both, got {describe(uncast)}: write uncast=2, uncast='targets' or "
                "uncast=(0, 'targets')."
            )
        given = given if state_argnum is None else (*given, state_argnum)
        try:
            parameters = inspect.signature(func).parameters.values() if given else ()
        except (TypeError, ValueError):  # of a function that is not written in Python
            parameters = ()
        named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        positional = tuple(p.name for p in named if p.kind != p.KEYWORD_ONLY)
        names = tuple(p.name for p in named)
        return cls(given, positional, names, has_state=state_argnum is not None)

    def leaves(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> list[PyTree]:
        """Returns the floating leaves of these arguments in a call, but for model state."""
        own = self._replace(given=self.given[:-1]) if self.has_state else self
        found = {**dict(enumerate(args)), **kwargs}
        trees = [found[place] for place in own._places(len(args), kwargs) if place in found]
        return [leaf for leaf in jax.tree.leaves(trees) if is_floating(leaf)]

    def check(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> None:
        """Refuses a call that has not all of these arguments."""
        self._places(len(args), kwargs)

    def exempt(
        self,
        change: Callable[[Given], Given],
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
    ) -> Given:
        """Changes the arguments of a call except these."""
        places = self._places(len(args), kwargs)
        others = tuple(None if i in places else arg for i, arg in enumerate(args))
        new_args, new_kwargs = change(
            (others, {name: value for name, value in kwargs.items() if name not in places})
        )
        new_args = tuple(args[i] if i in places else arg for i, arg in enumerate(new_args))
        return new_args, {**kwargs, **new_kwargs}

    def _places(self, count: int, kwargs: Iterable[str]) -> set[int | str]:
        """Returns where these arguments are in a call: positions, and names of all others."""
        names = {*self.named, *kwargs}
        places: dict[int | str, int | str] = {name: name for name in names}
        places.update(enumerate(self.positional))
        before = enumerate(self.positional[:count])
        places |= {name: i for i, name in before if name not in kwargs}
        places |= {i: i % count for i in range(-count, count)}
        unknown = [each for each in self.given if each not in places]
        if unknown:
            raise ValueError(
                f"Cannot leave argument {unknown[0]!r} uncast, as uncast says, in a call with "
                f"{count} positional arguments: count from 0, or give one of {sorted(names)}."
            )
        return {places[each] for each in self.given}


# Casts around a function: of the arguments that it takes, and of the result that it returns.


P = ParamSpec("P")
R = TypeVar("R")


def cast_function(
    func: Callable[P, R], dtype: DTypeLike, return_dtype: DTypeLike | None = None
) -> Callable[P, R]:
    """Makes a function run on arguments of one dtype and return another.

    Follows MPX's `cast_function` (arXiv 2507.03312). A callable that is itself a pytree, such as an
    Equinox module, is cast, too.

    Args:
        func: any callable of pytrees.
        dtype: what the floating leaves of all arguments are cast to.
        return_dtype: what those of the result are cast to; None means `dtype`.

    Returns:
        A function with the signature of `func`.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if a dtype is not a floating one.

    Example:
        >>> import jax.numpy as jnp, jmpx
        >>> f = jmpx.mpx.cast_function(lambda x: {"y": 2 * x}, jnp.bfloat16, jnp.float32)
        >>> f(jnp.ones(3))["y"].dtype.name
        'float32'
    """
    inside = as_dtype(dtype)
    return _recast(func, inside, inside if return_dtype is None else as_dtype(return_dtype))


def force_full_precision(
    func: Callable[P, R], return_dtype: DTypeLike | None = None
) -> Callable[P, R]:
    """Makes a function run in float32, for arguments of any floating dtype.

    Follows MPX's `force_full_precision` (arXiv 2507.03312). Use it for sums, means, norms, softmax
    and other functions that overflow or lose digits in 16 bits. Works as a decorator. A callable
    that is a pytree is cast, too.

    Args:
        func: any callable of pytrees.
        return_dtype: what the floating leaves of the result are cast to; None means the widest
            dtype of the floating arguments, if there are any.

    Returns:
        A function with the signature of `func`.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if `return_dtype` is not a floating dtype.

    Example:
        >>> import jax, jax.numpy as jnp, jmpx
        >>> x = jnp.full(4096, 100, jnp.float16)  # sums to 409600, beyond float16
        >>> mean = jmpx.force_full_precision(lambda x: x.sum() / x.size)
        >>> mean(x)
        Array(100., dtype=float16)
    """
    return _recast(func, jnp.float32, None if return_dtype is None else as_dtype(return_dtype))


def _recast(func: Callable[P, R], inside: DTypeLike, outside: DTypeLike | None) -> Callable[P, R]:
    """Casts the arguments of a function and its result; None means the widest of the arguments."""
    if not callable(func):
        raise TypeError(f"Expected a function to wrap, got {func!r}: pass the callable itself.")
    check_runs_at_once(func)

    def recast(
        pure: PureFunction, state: list[Leaf], args: Arguments, kwargs: Keywords
    ) -> tuple[PyTree, Changes]:
        return_dtype = _widest_floating((args[1:], kwargs)) if outside is None else outside
        args, kwargs = skip_kept(lambda tree: cast_tree(tree, inside))((args, kwargs))
        scope = full_precision() if inside is jnp.float32 else contextlib.nullcontext()
        with scope, matmul_region(None, inside), summed_in_float32():
            result, updates = pure(state, *args, **kwargs)
            updates = refuse_set(pure, state, args, kwargs, updates)
        return result if return_dtype is None else cast_tree(result, return_dtype), updates

    @functools.wraps(func, updated=())  # A module's __dict__ would be its parameters.
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        return call(recast, apply, (func, *args), kwargs)

    return wrapper


def _widest_floating(tree: PyTree) -> DTypeLike | None:
    """Returns the widest dtype of the floating leaves, or None if there are none."""
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(tree) if is_floating(leaf)}
    width = max((dtype.itemsize for dtype in dtypes), default=0)
    widest = [dtype for dtype in dtypes if dtype.itemsize == width]
    # Neither of float16 and bfloat16 holds the other's numbers.
    return jnp.float32 if len(widest) > 1 else next(iter(widest), None)
