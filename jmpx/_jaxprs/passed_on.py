"""Finds parameters of NNX that a function returns as new arrays, although it did not change them.

`nnx.jit`, `nnx.remat` and `nnx.shard_map` return each variable in a new array, as if the function
had set it.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jmpx._base.stateful import Arguments, Changes, Keywords, Leaf, PureFunction
from jmpx._base.trees import PyTree, cast_like, holds
from jmpx._jaxprs.core import Array, Equation, Jaxpr, enclosing_bodies, trace
from jmpx._jaxprs.equations import IDENTITIES, PLACEMENTS
from jmpx._jaxprs.inner import Inner, inner_of, walk

State: TypeAlias = list[Leaf]
Run: TypeAlias = Callable[[PureFunction, State, Arguments, Keywords], tuple[PyTree, Changes]]


def without_passed_on(
    run: Run, pure: PureFunction, state: State, args: Arguments, kwargs: Keywords, changes: Changes
) -> Changes:
    """Returns the changes of a call without the parameters that it returned unchanged.

    Those keep their stored arrays, because the call may have been given rounded ones.

    Args:
        run: the function that was called with `pure`, `state`, `args` and `kwargs`.
        pure: a pure function of the state of NNX objects.
        state: that state.
        args: positional arguments.
        kwargs: keyword arguments.
        changes: the changes of the call.
    """
    places = changes.new_parameters()
    if not places:
        return changes
    given = pure.given(state, args, kwargs)
    # An eager function may branch on its numbers, so it cannot be traced: its numbers are compared.
    # A traced function has no numbers yet, and comparing in the program would slow each step.
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
    """Stands for an array with the numbers of a given array."""

    identity: int  # of the given array
    dtype: np.dtype  # the narrowest dtype that is known to hold its numbers
    parts: tuple[tuple[int, str], ...] = ()  # the loops and maps that split it, outermost first

    @classmethod
    def of(cls, array: Array, stored: np.dtype) -> "_Given":
        return cls(id(array), stored if holds(array.dtype, stored) else array.dtype)


_Followed: TypeAlias = _Given | None  # None for other numbers


def _is_whole(followed: _Followed, leaf: Leaf) -> bool:
    return followed is not None and followed.identity == id(leaf) and not followed.parts


def _followed(jaxpr: Jaxpr, operands: Sequence[_Followed]) -> list[_Followed]:
    """Returns which given arrays the results of a jaxpr are."""
    return walk(jaxpr, operands, _step, lambda var, const: None)


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
    while True:  # until what is left of the carry stays the same in a trip
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
    """Returns the whole array, if a loop or a map returns the parts that it was given."""
    if given is None or given.parts[-1:] != (part,):
        return None
    return given._replace(parts=given.parts[:-1])
