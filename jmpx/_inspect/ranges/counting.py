"""Runs a program in float32, and counts the numbers that its equations compute.

Counts read the bits of float32 numbers as integers, because a processor may take subnormal numbers
for zero.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmpx._base.axes import as_whole
from jmpx._base.trees import is_floating_dtype
from jmpx._inspect.compiled import Compiled
from jmpx._inspect.programs import Program
from jmpx._inspect.ranges.formats import BINS, CUTS, LOWEST, MANTISSA_BITS, PARTS
from jmpx._inspect.ranges.plan import Plan
from jmpx._inspect.running import run_widened, widened
from jmpx._inspect.watched import Site, Trips, evaluate, sites
from jmpx._jaxprs.marks import Array

_FEW = 2000  # equations that count, of a program that compiles sooner as a whole
_MOST = 1 << 24  # numbers that wait to be counted
_ZERO, _INFINITE, _NAN, _MASKED = range(BINS, BINS + 4)  # the bins after those of numbers
_SIZE = BINS + 4
_INFINITY = 0x7F800000
_NEAR = 1 << 14  # a masked number is a mask plus a score that is smaller by 2**9 or more


def counted(program: Program, plan: Plan) -> np.ndarray:
    """Runs a program once in float32, and returns the count in each bin of each row of the plan.

    A program is compiled as a whole, unless it is large. Then one equation runs after the other, as
    JAX does outside of `jax.jit`, and only its loops and branches are compiled: the equations of
    layers that are written out are the same, and XLA would compile the counts of each anew.
    """

    def run(constant: Callable[[Array], Array], arrays: list[Array]) -> Array:
        state = _State(plan, jnp.zeros((len(plan.table), _SIZE, 2), jnp.uint32))
        wide, constants = list(map(widened, arrays)), lambda array: widened(constant(array))
        ended = evaluate(program.jaxpr, wide, _watch, state, run=run_widened, constant=constants)[1]
        return ended.updated().totals

    arrays = list(program.arrays)
    if len(plan.rows) > _FEW:
        return as_integers(run(lambda array: array, arrays))
    rows = tuple(plan.rows.get(site.key) for site in sites(program.jaxpr))
    compiled = Compiled(program.jaxpr)
    return as_integers(compiled.run(run, (arrays,), "ranges", len(plan.table), rows, plan.masks))


@jax.tree_util.register_pytree_node_class
class _State:
    """What was counted so far, and the arrays that wait to be counted.

    XLA takes long to compile counts of each single array. So while JAX traces, arrays wait until
    there are many, or until the state enters or leaves a loop, which flattens it.
    """

    def __init__(self, plan: Plan, totals: Array) -> None:
        self.plan, self.totals = plan, totals  # the latter are sums of `add_counts`, by row
        self.waiting: list[tuple[int, Array]] = []  # the positions of rows, and arrays

    def updated(self) -> "_State":
        """Returns the state with all arrays counted."""
        if not self.waiting:
            return self
        positions, arrays = zip(*self.waiting, strict=True)
        rows, row_of = np.unique(positions, return_inverse=True)
        whole, row_of = list(map(as_whole, arrays)), row_of.astype(np.int32)
        counts = _counts(whole, row_of, size=len(rows), masks=self.plan.masks)
        return _State(self.plan, _added(self.totals, rows.astype(np.int32), counts))

    def tree_flatten(self) -> tuple[tuple[Array], Plan]:
        return (self.updated().totals,), self.plan

    @classmethod
    def tree_unflatten(cls, plan: Plan, tables: Sequence[Array]) -> "_State":
        return cls(plan, *tables)


def _watch(
    state: _State, site: Site, operands: list[Array], results: list[Array], trips: Trips
) -> _State:
    """Counts the results of an equation, or lets them wait."""
    row = state.plan.rows.get(site.key)
    if row is None:
        return state
    state.waiting += [(row, array) for array in results if is_floating_dtype(array.dtype)]
    is_traced = any(isinstance(array, jax.core.Tracer) for _, array in state.waiting)
    is_full = sum(array.size for _, array in state.waiting) > _MOST
    return state if is_traced and not is_full else state.updated()


@functools.partial(jax.jit, static_argnames=("size", "masks"))
def _counts(
    arrays: Sequence[Array], row_of: np.ndarray, *, size: int, masks: tuple[float, ...]
) -> Array:
    """Returns the count in each bin of some rows, given the row of each array."""
    bits = list(map(magnitudes, arrays))
    if len(bits) == 1:
        return count(bins_of(bits[0], masks), row_of[0], size)
    parts = [jnp.full(array.shape, i, np.uint16) for i, array in enumerate(arrays)]
    return count(bins_of(_joined(bits), masks), row_of[_joined(parts)], size)


def _joined(arrays: Sequence[Array]) -> Array:
    joined = jnp.concatenate([jnp.reshape(array, -1) for array in arrays])
    # Without the barrier, XLA compiles what reads the numbers once for each array.
    return lax.optimization_barrier(joined)


def count(bins: Array, rows: Array, size: int) -> Array:
    """Returns how many numbers are in each bin of each row, given the bin and row of each."""
    counts = jnp.zeros((size, _SIZE), jnp.uint32)
    return counts.at[rows, bins].add(np.uint32(1), mode="promise_in_bounds")


@jax.jit
def _added(totals: Array, rows: np.ndarray, counts: Array) -> Array:
    return totals.at[rows].set(add_counts(totals[rows], counts))


def add_counts(total: Array, counts: Array) -> Array:
    """Adds counts to a sum of shape (..., 2), the low and the high 32 bits, as JAX lacks 64."""
    low = total[..., 0] + counts
    high = total[..., 1] + (low < counts).astype(jnp.uint32)
    return jnp.stack([low, high], -1)


def as_integers(total: Array) -> np.ndarray:
    """Returns the sums of `add_counts` as integers of 64 bits."""
    pairs = np.asarray(total).astype(np.int64)
    return pairs[..., 0] + (pairs[..., 1] << 32)


def magnitudes(array: Array) -> Array:
    """Returns the bits of the magnitudes of numbers in float32, which are ordered as these are."""
    bits = lax.bitcast_convert_type(lax.convert_element_type(array, jnp.float32), jnp.uint32)
    return bits & np.uint32(0x7FFFFFFF)


def bins_of(bits: Array, masks: Sequence[float] = ()) -> Array:
    """Returns the bin of each magnitude, in 16 bits."""
    exponent, mantissa = bits >> MANTISSA_BITS, bits & np.uint32((1 << MANTISSA_BITS) - 1)
    is_subnormal = exponent == 0
    zeros = lax.clz(mantissa)  # the leading zeros of a subnormal number say its exponent
    normalized = (mantissa << (zeros - np.uint32(31 - MANTISSA_BITS))) & np.uint32(
        (1 << MANTISSA_BITS) - 1
    )
    mantissa = jnp.where(is_subnormal, normalized, mantissa)
    above = jnp.where(is_subnormal, np.uint32(31) - zeros, exponent + np.uint32(-127 - LOWEST))
    part = sum((mantissa >= np.uint32(cut)).astype(jnp.uint32) for cut in CUTS)
    bins = above * np.uint32(PARTS) + part
    bins = jnp.where(_is_mask(bits, masks), np.uint32(_MASKED), bins) if masks else bins
    bins = jnp.where(bits == 0, np.uint32(_ZERO), bins)
    bins = jnp.where(bits == _INFINITY, np.uint32(_INFINITE), bins)
    bins = jnp.where(bits > _INFINITY, np.uint32(_NAN), bins)
    return bins.astype(jnp.uint16)


def _is_mask(bits: Array, masks: Sequence[float]) -> Array:
    """Whether magnitudes are those of masks, such as 1e9, up to the scores added."""
    found = jnp.zeros(bits.shape, bool)
    for mask in masks:
        low = max(int(np.float32(mask).view(np.uint32)) - _NEAR, 0)
        found |= bits - np.uint32(low) <= np.uint32(2 * _NEAR)  # below `low`, it wraps around
    return found
