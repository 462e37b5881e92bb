"""What a gradient function is given: its policy, and arguments to differentiate or not to cast."""

import dataclasses
import inspect
import os
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp

from jmpx._leaves import PyTree, is_floating, is_inexact_array
from jmpx._policy import Policy
from jmpx._policy_strings import get_policy
from jmpx._tree import AxisName

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


_HALF = re.compile(r"\bhalf\b", re.IGNORECASE)


def check_arguments(func: object, scaling: object) -> None:
    """Refuses anything but a function and a loss scale.

    Raises:
        TypeError: if one of them is something else.
    """
    if not callable(func):
        raise TypeError(
            f"Expected a function to differentiate, got {func!r}: pass the callable itself."
        )
    if not all(hasattr(scaling, name) for name in ("scale", "unscale", "adjust")):
        raise TypeError(
            f"Expected a loss scale as the second argument, got {scaling!r}: pass for example "
            "jmpx.NoOpLossScale() or jmpx.DynamicLossScale()."
        )


def policy_finder(policy: Policy | str | None) -> Callable[[], Policy]:
    """Checks a policy now, and returns a function that returns it.

    The gradient function calls that when it is called itself: only then may `half` ask JAX for its
    backend, which starts it.
    """
    if policy is None:
        policy = "half"
    if not isinstance(policy, str) or not _HALF.search(policy):
        policy = get_policy(policy)
    else:
        try:
            get_policy(_HALF.sub("float16", policy))
        except ValueError:
            get_policy(policy)  # raises the same error, which shows the user's own string
    return lambda: get_policy(policy)


@dataclasses.dataclass(frozen=True)
class Uncast:
    """The arguments that a gradient function does not cast.

    Args:
        numbers: the positions that the user gave.
        names: the names that the user gave.
        positional: the names of the arguments that the function takes by position, in order.
        known: the names of all arguments of the function.
    """

    numbers: tuple[int, ...]
    names: tuple[str, ...]
    positional: tuple[str, ...] = ()
    known: tuple[str, ...] = ()

    @classmethod
    def of(cls, func: Callable[..., Any], argnums: object, argnames: object) -> "Uncast":
        """Checks the positions and the names, and reads the signature of the function."""
        numbers = _as_tuple(argnums, Integral, "Expected uncast_argnums to be an int or several")
        names = _as_tuple(argnames, str, "Expected uncast_argnames to be a string or several")
        try:
            parameters = inspect.signature(func).parameters.values() if numbers or names else ()
        except (TypeError, ValueError):  # of a function that is not written in Python
            parameters = ()
        by_position = [
            p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        known = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        return cls(
            numbers, names, *(tuple(p.name for p in group) for group in (by_position, known))
        )

    def exempt(self, cast: Callable[[Arguments], Arguments]) -> Callable[..., Arguments]:
        """Returns a function `(args, kwargs)` that casts the arguments of a call except these."""

        def cast_others(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
            numbers, names = self._find(args, kwargs)
            uncast = {number: args[number] for number in numbers}
            uncast_by_name = {name: kwargs[name] for name in names}
            args = tuple(None if i in uncast else arg for i, arg in enumerate(args))
            args, kwargs = cast((args, {k: v for k, v in kwargs.items() if k not in names}))
            args = tuple(uncast.get(i, arg) for i, arg in enumerate(args))
            return args, {**kwargs, **uncast_by_name}

        return cast_others

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[set[int], set[str]]:
        """Finds these arguments in a call; returns the positions of some, the names of others."""
        numbers: set[int] = set()
        names = set(self.names)
        for number in self.numbers:
            if -len(args) <= number < len(args):
                numbers.add(number % len(args))
            elif 0 <= number < len(self.positional):
                names.add(self.positional[number])
            else:
                raise ValueError(
                    f"Cannot leave argument {number} uncast, as uncast_argnums says, in a call "
                    f"with {len(args)} positional arguments: count from 0, or name it in "
                    "uncast_argnames."
                )
        for name in names - kwargs.keys():
            if name in self.positional[: len(args)]:
                numbers.add(self.positional.index(name))
            elif name not in self.known:
                raise ValueError(
                    f"Cannot leave argument {name!r} uncast, as uncast_argnames says, which is "
                    "neither passed nor an argument of the function: expected one of "
                    f"{sorted({*self.known, *kwargs})}."
                )
        return numbers, names & kwargs.keys()


def _as_tuple(value: Any, kind: type, expected: str) -> tuple[Any, ...]:
    several = isinstance(value, Iterable) and not isinstance(value, str)
    values = tuple(value) if several else (value,)
    if any(not isinstance(value, kind) or isinstance(value, bool) for value in values):
        raise TypeError(f"{expected}, got {value!r}: say which arguments are not to be cast.")
    return values


def partition(args: Sequence[PyTree]) -> tuple[list[jax.Array], Callable[..., PyTree]]:
    """Takes the differentiable arrays out of the first argument.

    Returns:
        The arrays, and a function `merge(arrays, others)` that puts such a list back. By default
        the other leaves are those of the argument; with `others=None` they are None.
    """
    if not args:
        raise TypeError(
            "Expected the parameters to differentiate as the first positional argument, got none: "
            "pass them by position."
        )
    leaves, treedef = jax.tree.flatten(args[0])
    indices = [index for index, leaf in enumerate(leaves) if is_inexact_array(leaf)]

    def merge(arrays: Sequence[Any], others: Sequence[Any] | None = leaves) -> PyTree:
        merged: list[Any] = [None] * len(leaves) if others is None else list(others)
        for index, array in zip(indices, arrays, strict=True):
            merged[index] = array
        return treedef.unflatten(merged)

    # JAX arrays have the dtype of their gradient. NumPy's float64 becomes float32 without x64.
    return [jnp.asarray(leaves[index]) for index in indices], merge


def paths_of(tree: PyTree) -> list[str]:
    """Returns the paths of the differentiable arrays of a pytree, for error messages."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [
        jax.tree_util.keystr(path) or "array" for path, leaf in leaves if is_inexact_array(leaf)
    ]


def make_varying(arrays: list[jax.Array], axis_name: AxisName) -> list[jax.Array]:
    """Returns the same arrays, but as arrays that may differ along the axis.

    Under `jax.shard_map`, JAX sums the gradient of a parameter that does not vary over the axis as
    soon as it has it, in 16 bits. The gradient of a varying parameter is left to the caller, who
    sums it in float32. A selection by the axis index makes the parameter varying on every version
    of JAX (`lax.pvary` on 0.7 and `lax.pcast` on 0.10 do so explicitly), compiles to nothing, and
    changes nothing under `jax.pmap` and `jax.vmap`.
    """
    here = jax.lax.axis_index(axis_name) >= 0
    return [jax.lax.select(here, array, array) for array in arrays]


def are_rounded(before: PyTree, after: PyTree) -> bool:
    """Whether a cast has rounded any floating leaf: to fewer bits than it had, 16 or 8."""
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=False)
    return any(
        is_floating(new) and new.dtype.itemsize < min(4, old.dtype.itemsize)
        for old, new in pairs
        if is_floating(old)
    )


def warn_of_casts(names: Iterable[str]) -> None:
    """Warns if something has cast parameters inside of a function that was given rounded ones.

    Args:
        names: the names of the functions that have cast; without any, there is no warning.
    """
    casts = " and ".join(names)
    if not casts:
        return
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_INTERNAL):
        level, frame = level + 1, frame.f_back
    warnings.warn(
        f"The gradient function has cast its arguments to 16 bits before {casts} inside of it "
        "casts them again, so that parts which are to run in float32 get rounded parameters: pass "
        'policy="full" to the gradient function, or leave its first argument uncast by '
        "uncast_argnums=0.",
        stacklevel=level,
    )


# The files of jmpx and JAX, which are on the stack between the warning and the user's call.
_INTERNAL = (os.path.dirname(__file__) + os.sep, os.path.dirname(jax.__file__) + os.sep)
