"""Parameters of NNX that a function hands out as new arrays, although it does not change them.

`nnx.jit`, `nnx.remat` and `nnx.shard_map` return each variable that they are given, in a new array,
which looks like one that the function has set.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jmpx._base.stateful import Arguments, Changes, Keywords, Leaf, PureFunction
from jmpx._base.trees import PyTree, cast_like, holds
from jmpx._jaxprs.core import Array, Atom, Equation, Jaxpr, enclosing_bodies, trace
from jmpx._jaxprs.equations import IDENTITIES, PLACEMENTS
from jmpx._jaxprs.inner import Inner, inner_of, walk

State: TypeAlias = list[Leaf]
Run: TypeAlias = Callable[[PureFunction, State, Arguments, Keywords], tuple[PyTree, Changes]]


def without_passed_on(
    run: Run, pure: PureFunction, state: State, args: Arguments, kwargs: Keywords, changes: Changes
) -> Changes:
    """Returns what a call has changed, without parameters that come out as it was given them.

    These stay the stored arrays, of which those that the call was given may be roundings.

    Args:
        run: the function that was called with `pure`, `state`, `args` and `kwargs`.
        pure: a pure function of the state of NNX objects.
        state: that state.
        args: positional arguments.
        kwargs: keyword arguments.
        changes: what the call has changed.
    """
    places = changes.new_parameters()
    if not places:
        return changes
    given = pure.given(state, args, kwargs)
    # A function that runs eagerly may branch on its numbers, so that it cannot be traced. One that
    # is traced has no numbers yet; to compare them in the program would cost time in each step.
    with contextlib.suppress(jax.errors.TracerBoolConversionError):  # under an eager `jax.vmap`
        if {*enclosing_bodies()} <= {"derivative"}:
            pairs = ((place, changes.arrays[index]) for index, place in places.items())
            return changes.without({p for p, array in pairs if _are_equal(given[p], array)})
    stored = {id(given[place]): changes.record.leaves[place].dtype for place in places.values()}
    traced = trace(
        lambda *call: run(pure, *call), (state, args, kwargs), {}, lambda leaf: id(leaf) in stored
    )
    operands = [_Given.of(array, stored[id(array)]) for array in traced.arrays]
    _, found = traced.rebuild(_followed(traced.jaxpr, operands))
    pairs = ((place, found.arrays[index]) for index, place in found.new_parameters().items())
    return changes.without({p for p, follows in pairs if _is_whole(follows, given[p])})


def _are_equal(old: Array, new: Array) -> bool:
    return bool(jnp.array_equal(cast_like(old, new), new, equal_nan=True))


class _Given(NamedTuple):
    """Stands for an array that holds the numbers of a given one."""

    identity: int  # of the given array
    dtype: np.dtype  # the narrowest one that is known to hold its numbers
    parts: tuple[tuple[int, str], ...] = ()  # the loops and maps that read a part of it each time

    @classmethod
    def of(cls, array: Array, stored: np.dtype) -> "_Given":
        return cls(id(array), stored if holds(array.dtype, stored) else array.dtype)


_Followed: TypeAlias = _Given | None  # None has other numbers


def _is_whole(followed: _Followed, leaf: Leaf) -> bool:
    return followed is not None and followed.identity == id(leaf) and not followed.parts


def _followed(jaxpr: Jaxpr, operands: Sequence[_Followed]) -> list[_Followed]:
    """Returns which of the given arrays the results of a jaxpr are."""
    return walk(jaxpr, operands, _step, _of_constant)


def _of_constant(var: Atom, const: object) -> _Followed:
    return None


def _step(eqn: Equation, inputs: list[_Followed]) -> Sequence[_Followed]:
    inner, name = inner_of(eqn), eqn.primitive.name
    if inner is None:
        if name == "convert_element_type" and inputs[0] is not None:
            return [inputs[0] if holds(eqn.params["new_dtype"], inputs[0].dtype) else None]
        return inputs if name in IDENTITIES | PLACEMENTS else [None] * len(eqn.outvars)
    if inner.kind in ("scan", "while"):
        return _of_loop(eqn, inner, inputs)
    if inner.kind == "shard_map":
        operands = list(map(_part, inputs, _specs(eqn, "in")))
        return list(map(_joined, _followed(inner.jaxprs[0], operands), _specs(eqn, "out")))
    branches = [_followed(jaxpr, inputs[inner.first :]) for jaxpr in inner.jaxprs]
    return [each[0] if len({*each}) == 1 else None for each in zip(*branches, strict=True)]


def _of_loop(eqn: Equation, inner: Inner, inputs: list[_Followed]) -> Sequence[_Followed]:
    consts, carry, sliced = inner.split(inputs)
    slices = [_part(each, (id(eqn), "")) for each in sliced]
    while True:  # until each trip hands the next what it was handed
        results = _followed(inner.jaxprs[0], [*consts, *carry, *slices])
        after, stacked = results[: inner.carry], results[inner.carry :]
        kept = [old if old == new else None for old, new in zip(carry, after, strict=True)]
        if kept == carry:
            return [*carry, *(_joined(each, (id(eqn), "")) for each in stacked)]
        carry = kept


def _specs(eqn: Equation, end: str) -> list[tuple[int, str]]:
    """Returns how a shard_map splits each of its operands (`in`) or of its results (`out`)."""
    params = eqn.params
    specs = params[f"{end}_specs" if f"{end}_specs" in params else f"{end}_names"]
    return [(id(eqn), str(spec)) for spec in specs]


def _part(given: _Followed, part: tuple[int, str]) -> _Followed:
    return None if given is None else given._replace(parts=(*given.parts, part))


def _joined(given: _Followed, part: tuple[int, str]) -> _Followed:
    """Returns the whole of a part that a loop or a map hands out where it was handed it."""
    if given is None or given.parts[-1:] != (part,):
        return None
    return given._replace(parts=given.parts[:-1])
