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

from jmpx._base.casts import at_least_float32
from jmpx._base.dtypes import DTypeLike
from jmpx._base.leaves import is_floating_dtype
from jmpx._devices.exchanges import Evaluate
from jmpx._devices.reduction import mean_in
from jmpx._jaxprs import core
from jmpx._jaxprs.core import Array, Atom, Aval, Equation, Jaxpr
from jmpx._jaxprs.inner import walk
from jmpx._jaxprs.moves import RESHAPES, ROUNDINGS

# Primitives whose one jaxpr reads their operands as they are.
_CALLS = frozenset({"call", "closed_call", "jit", "remat2"})
# Primitives that may come before the loop: their results hold each number of their operands.
_MOVES = RESHAPES | {"copy", "slice", "split", "concatenate", "stack"}


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def averaged(array: jax.Array, axis: Hashable, dtype: DTypeLike | None) -> jax.Array:
    """Returns an array, whose gradient is averaged over a mapped axis, summed in a dtype."""
    return array


def _forward(array: jax.Array, axis: Hashable, dtype: DTypeLike | None) -> tuple[jax.Array, None]:
    return array, None


def _backward(
    axis: Hashable, dtype: DTypeLike | None, residuals: None, grad: jax.Array
) -> list[jax.Array]:
    return mean_in(dtype, [grad], axis)


averaged.defvjp(_forward, _backward)


def with_layer_means(
    jaxpr: Jaxpr, axis: Hashable, dtype: DTypeLike | None
) -> tuple[Evaluate, list[bool]]:
    """Returns what evaluates a jaxpr with means in its loops, and which operands these are of.

    The gradient of an operand of which a scan reads a slice in each turn, through casts and moves,
    is averaged over a mapped axis in that turn, as the gradient of the slice, and summed in a
    dtype. Casts move into the loop, so that they do not round the mean.
    """
    chosen = [
        is_read and _is_wide(var.aval)
        for is_read, var in zip(_read_by_loops(jaxpr), jaxpr.invars, strict=True)
    ]
    mean = functools.partial(averaged, axis=axis, dtype=dtype)

    def run(arrays: Sequence[jax.Array]) -> list[jax.Array]:
        if not any(chosen):
            return core.evaluate(jaxpr, arrays)
        values = [_Layers(x, mean) if c else x for x, c in zip(arrays, chosen, strict=True)]
        return _evaluate(jaxpr, values)

    return run, chosen


def _is_wide(aval: Aval) -> bool:
    """Whether means keep the dtype of an array: those of 16 bits are computed in float32."""
    return is_floating_dtype(aval.dtype) and at_least_float32(aval).dtype == aval.dtype


@dataclasses.dataclass(frozen=True)
class _Layers:
    """A parameter of all layers, or in a loop that of one, before its casts."""

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


def _value(value: _Value) -> Array:
    return value.value if isinstance(value, _Layers) else value


def _evaluate(jaxpr: Jaxpr, values: Sequence[_Value]) -> list[Array]:
    def step(eqn: Equation, operands: list[_Value]) -> Sequence[_Value]:
        with core.at_source_of(eqn):
            return _step(eqn, operands)

    def constant(atom: Atom, value: object) -> object:
        return np.asarray(value, atom.aval.dtype) if core.is_literal(atom) else value

    return list(map(_value, walk(jaxpr, values, step, constant)))


def _step(eqn: Equation, operands: list[_Value]) -> Sequence[_Value]:
    layers = [operand for operand in operands if isinstance(operand, _Layers)]
    if len(layers) == len(operands) and _is_move(eqn) and len(set(map(_dtypes, layers))) == 1:
        arrays = core.bind(eqn, [each.array for each in layers])
        return [dataclasses.replace(layers[0], array=array) for array in arrays]
    if layers and eqn.primitive.name in ROUNDINGS:
        return [dataclasses.replace(layers[0], casts=(*layers[0].casts, eqn))]
    are_read = _sliced(eqn)
    if not any(r and isinstance(o, _Layers) for r, o in zip(are_read, operands, strict=True)):
        return core.bind(eqn, list(map(_value, operands)))
    given = [o if r else _value(o) for r, o in zip(are_read, operands, strict=True)]
    return _run_inner(eqn, given)


def _is_move(eqn: Equation) -> bool:
    """Whether an equation moves numbers, and repeats none."""
    atoms = eqn.invars, eqn.outvars
    before, after = (sum(atom.aval.size for atom in each) for each in atoms)
    return eqn.primitive.name in _MOVES and after <= before


def _dtypes(layers: _Layers) -> tuple[np.dtype, ...]:
    """Returns the dtypes that an array goes through: arrays are joined before equal casts."""
    return (layers.array.dtype, *(cast.outvars[0].aval.dtype for cast in layers.casts))


def _run_inner(eqn: Equation, operands: list[_Value]) -> list[Array]:
    """Runs the jaxpr of a scan or of a call, whose operands may be wider than they were."""
    key = "jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"
    jaxpr, in_loop = eqn.params[key], eqn.primitive.name == "scan"
    are_read = _read_by_loops(jaxpr) if in_loop else [True] * len(operands)

    def on_arrays(*arrays: Array) -> list[Array]:
        values: list[_Value] = list(arrays)
        for i, (operand, array) in enumerate(zip(operands, arrays, strict=True)):
            if isinstance(operand, _Layers):
                part = dataclasses.replace(operand, array=array, in_loop=operand.in_loop or in_loop)
                values[i] = part if are_read[i] else part.value
        return _evaluate(jaxpr, values)

    arrays = [o.array if isinstance(o, _Layers) else o for o in operands]
    avals = [
        core.with_dtype(var.aval, array.dtype) if isinstance(operand, _Layers) else var.aval
        for var, operand, array in zip(jaxpr.invars, operands, arrays, strict=True)
    ]
    new = jax.make_jaxpr(on_arrays)(*avals)
    return core.bind(eqn, arrays, **{key: new if isinstance(new, type(jaxpr)) else new.jaxpr})


def _read_by_loops(jaxpr: Jaxpr) -> list[bool]:
    """Returns for each operand whether a scan reads slices of it, or of a part of it."""
    found: set[Atom] = set()
    for eqn in reversed(jaxpr.eqns):
        if eqn.primitive.name in ROUNDINGS or _is_move(eqn):
            are_read = [not found.isdisjoint(eqn.outvars)] * len(eqn.invars)
        else:
            are_read = _sliced(eqn)
        pairs = zip(eqn.invars, are_read, strict=True)
        found.update(atom for atom, is_read in pairs if is_read and not core.is_literal(atom))
    return [var in found for var in jaxpr.invars]


def _sliced(eqn: Equation) -> list[bool]:
    """Returns for each operand of an equation whether a scan in it reads its slices."""
    if eqn.primitive.name == "scan":
        first = sum(core.scan_counts(eqn))
        return [i >= first for i in range(len(eqn.invars))]
    if eqn.primitive.name in _CALLS:
        (jaxpr,) = core.inner_jaxprs(eqn.params)
        return _read_by_loops(jaxpr)
    return [False] * len(eqn.invars)
