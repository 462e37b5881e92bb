"""Means of the gradients of stacked layers, taken inside of the loop that goes through the layers.

A `jax.lax.scan` over layers returns their gradients stacked. After it, a mean over devices has to
wait until each device holds the gradients of all layers. Inside of it, the mean of each layer comes
first, and what is stacked may be split over the devices as the parameters are.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence

import jax
import numpy as np

from jmpx._base.dtypes import DTypeLike
from jmpx._base.leaves import is_floating_dtype
from jmpx._devices.exchanges import Evaluate
from jmpx._devices.reduction import mean_in
from jmpx._jaxprs import core
from jmpx._jaxprs.core import Array, Atom, Equation, Jaxpr
from jmpx._jaxprs.inner import CALLS, walk
from jmpx._jaxprs.moves import RESHAPES, ROUNDINGS
from jmpx._jaxprs.types import Params

# Primitives that may come before the loop: their results hold each number of their operands once.
_MOVES = RESHAPES | {"copy", "slice", "split", "concatenate", "stack"}


@dataclasses.dataclass(frozen=True)
class _Layers:
    """A parameter of all layers, or in a loop that of one, before the casts that it goes through.

    They wait for the loop: a mean that a cast in front of it rounded would have lost its bits.
    """

    array: Array
    mean: Callable[[Array], Array]  # identity, whose backward pass takes the mean
    casts: tuple[Equation, ...] = ()
    in_loop: bool = False

    @functools.cached_property
    def value(self) -> Array:
        """The cast array, as anything but a loop over its slices reads it."""
        array = self.mean(self.array) if self.in_loop else self.array
        for cast in self.casts:
            (array,) = core.bind(cast, [array])
        return array


_Value = Array | _Layers


def with_layer_means(
    jaxpr: Jaxpr, axis: Hashable, dtype: DTypeLike | None
) -> tuple[Evaluate, list[bool]]:
    """Returns what evaluates a jaxpr with means in its loops, and which operands these are of.

    The gradient of an operand of which a scan reads a slice in each turn, through casts and moves,
    is averaged over a mapped axis in that turn, as the gradient of the slice, and summed in a
    dtype. That of an array in 16 bits is left, because it comes back in 16 bits.
    """

    @jax.custom_vjp
    def mean(array: jax.Array) -> jax.Array:
        return array

    mean.defvjp(lambda array: (array, None), lambda _, grad: (*mean_in(dtype, [grad], axis),))
    dtypes = [var.aval.dtype for var in jaxpr.invars]
    are_wide = [is_floating_dtype(each) and each.itemsize >= 4 for each in dtypes]
    chosen = [a and b for a, b in zip(_read_by_loops(jaxpr), are_wide, strict=True)]
    if not any(chosen):
        return functools.partial(core.evaluate, jaxpr), chosen

    def run(arrays: Sequence[jax.Array]) -> list[jax.Array]:
        pairs = zip(arrays, chosen, strict=True)
        return _evaluate(jaxpr, [_Layers(x, mean) if is_read else x for x, is_read in pairs])

    return run, chosen


def _evaluate(jaxpr: Jaxpr, values: Sequence[_Value]) -> list[Array]:
    def step(eqn: Equation, operands: list[_Value]) -> Sequence[_Value]:
        with core.at_source_of(eqn):
            return _run(eqn, operands)

    def constant(atom: Atom, value: object) -> object:
        return np.asarray(value, atom.aval.dtype) if core.is_literal(atom) else value

    return list(map(_value, walk(jaxpr, values, step, constant)))


def _value(value: _Value) -> Array:
    return value.value if isinstance(value, _Layers) else value


def _run(eqn: Equation, operands: list[_Value]) -> Sequence[_Value]:
    layers = [operand for operand in operands if isinstance(operand, _Layers)]
    if layers and eqn.primitive.name in ROUNDINGS:
        return [dataclasses.replace(layers[0], casts=(*layers[0].casts, eqn))]
    if len(layers) == len(operands) and _is_move(eqn) and len(set(map(_dtypes, layers))) == 1:
        arrays = core.bind(eqn, [each.array for each in layers])
        return [dataclasses.replace(layers[0], array=array) for array in arrays]
    pairs = list(zip(operands, _sliced(eqn), strict=True))
    if any(isinstance(operand, _Layers) and is_read for operand, is_read in pairs):
        return _run_inner(eqn, [o if is_read else _value(o) for o, is_read in pairs])
    return core.bind(eqn, list(map(_value, operands)))


def _is_move(eqn: Equation) -> bool:
    sizes = (sum(atom.aval.size for atom in atoms) for atoms in (eqn.outvars, eqn.invars))
    return eqn.primitive.name in _MOVES and next(sizes) <= next(sizes)


def _dtypes(layers: _Layers) -> tuple[np.dtype, ...]:
    return (layers.array.dtype, *(cast.outvars[0].aval.dtype for cast in layers.casts))


def _run_inner(eqn: Equation, operands: list[_Value]) -> list[Array]:
    """Runs a scan or a call, whose jaxpr gets the operands that wait for their casts."""
    key = "jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"
    jaxpr, is_loop = eqn.params[key], eqn.primitive.name == "scan"
    go_on = _read_by_loops(jaxpr)  # to a loop in this loop

    def one(operand: _Value, array: Array, goes_on: bool) -> _Value:
        if not isinstance(operand, _Layers):
            return array
        part = dataclasses.replace(operand, array=array, in_loop=operand.in_loop or is_loop)
        return part if goes_on else part.value

    def on_arrays(*inputs: Array) -> list[Array]:
        return _evaluate(jaxpr, list(map(one, operands, inputs, go_on)))

    arrays = [o.array if isinstance(o, _Layers) else o for o in operands]
    pairs = zip(jaxpr.invars, arrays, strict=True)
    avals = [core.with_dtype(var.aval, array.dtype) for var, array in pairs]
    new: Jaxpr = jax.make_jaxpr(on_arrays)(*avals)
    if not isinstance(new, type(jaxpr)):  # jax.checkpoint wants an open jaxpr, without constants
        if new.consts:
            return core.bind(eqn, list(map(_value, operands)))
        new = new.jaxpr
    params: Params = {key: new}
    return core.bind(eqn, arrays, **params)


def _read_by_loops(jaxpr: Jaxpr) -> list[bool]:
    """Returns for each operand whether a scan reads slices of it, or of a part of it."""
    found: set[Atom] = set()
    for eqn in reversed(jaxpr.eqns):
        are_read = _sliced(eqn)
        if eqn.primitive.name in ROUNDINGS or _is_move(eqn):
            are_read = [not found.isdisjoint(eqn.outvars)] * len(eqn.invars)
        pairs = zip(eqn.invars, are_read, strict=True)
        found.update(atom for atom, is_read in pairs if is_read and not core.is_literal(atom))
    return [var in found for var in jaxpr.invars]


def _sliced(eqn: Equation) -> list[bool]:
    """Returns for each operand of an equation whether a scan in it reads its slices."""
    if eqn.primitive.name == "scan":
        first = sum(core.scan_counts(eqn))
        return [i >= first for i in range(len(eqn.invars))]
    if eqn.primitive.name in CALLS:
        return _read_by_loops(*core.inner_jaxprs(eqn.params))
    return [False] * len(eqn.invars)
