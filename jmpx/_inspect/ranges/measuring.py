"""Runs a program in float32, and measures the numbers that its equations compute."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jmpx._base.axes import as_whole
from jmpx._base.leaves import is_floating_dtype
from jmpx._inspect.programs import Program
from jmpx._inspect.ranges import statistics
from jmpx._inspect.ranges.plan import Plan
from jmpx._inspect.widening import run_widened, widened
from jmpx._jaxprs.types import Array
from jmpx._jaxprs.watched import Site, Trips, evaluate

_FEW = 150  # equations that are measured, of a program that is compiled as a whole
_MOST = 1 << 24  # numbers that wait to be measured


class Measured(NamedTuple):
    """What was measured, as NumPy arrays."""

    extremes: np.ndarray  # the bits of the extremes of each node, of shape (nodes, 2)
    counts: np.ndarray  # the count in each bin of each row
    entered: list[int]  # the bits of the largest magnitude of each argument


def measure(program: Program, plan: Plan) -> Measured:
    """Runs a program once in float32.

    A small program is compiled as a whole. Any other runs one equation after the other, as JAX does
    outside of `jax.jit`, and only its loops and branches are compiled, because XLA would take
    minutes for all measurements of a model whose layers are written out.
    """

    def run(arrays: list[Array]) -> tuple[_State, list[Array]]:
        wide = list(map(widened, arrays))
        state = _State.empty(plan)
        _, state = evaluate(program.jaxpr, wide, _watch, state, run=run_widened, constant=widened)
        return state, [_largest(array, plan.masks) for array in wide]

    run = jax.jit(run) if len(plan.nodes) <= _FEW else run
    state, entered = run(list(program.arrays))
    extremes, totals = (np.asarray(array) for array in jax.tree.leaves(state))
    return Measured(extremes, statistics.as_integers(totals), list(map(int, entered)))


def _largest(array: Array, masks: tuple[float, ...]) -> Array:
    return _extremes(as_whole(array), masks)[0] if is_floating_dtype(array.dtype) else 0


@functools.partial(jax.jit, static_argnums=1)
def _extremes(array: Array, masks: tuple[float, ...]) -> Array:
    return statistics.extremes(statistics.magnitudes(array), masks)


@jax.tree_util.register_pytree_node_class
class _State:
    """What was measured so far: two tables, and the arrays that wait to be measured.

    XLA takes long to compile measurements of each single array. So while JAX traces, arrays wait
    until there are many, or until the state enters or leaves a loop, which flattens it.

    Args:
        plan: what is measured.
        extremes: the extremes of each node.
        totals: the sums of the counts of each row, as `statistics.add_counts` makes them.
    """

    def __init__(self, plan: Plan, extremes: Array, totals: Array) -> None:
        self.plan, self.extremes, self.totals = plan, extremes, totals
        self.waiting: list[tuple[int, Array]] = []  # the positions of nodes, and arrays

    @classmethod
    def empty(cls, plan: Plan) -> "_State":
        totals = jnp.zeros((len(plan.table), statistics.SIZE, 2), jnp.uint32)
        return cls(plan, jnp.array(statistics.no_extremes((len(plan.nodes),))), totals)

    def updated(self) -> "_State":
        """Returns the state with all arrays measured."""
        if not self.waiting:
            return self
        positions, arrays = zip(*self.waiting, strict=True)
        rows, row_of = np.unique([self.plan.rows[p] for p in positions], return_inverse=True)
        tables = _update(
            self.extremes,
            self.totals,
            list(map(as_whole, arrays)),
            nodes=np.asarray(positions, np.int32),
            rows=rows.astype(np.int32),
            row_of=row_of.astype(np.int32),
            masks=self.plan.masks,
        )
        return _State(self.plan, *tables)

    def tree_flatten(self) -> tuple[tuple[Array, Array], Plan]:
        state = self.updated()
        return (state.extremes, state.totals), self.plan

    @classmethod
    def tree_unflatten(cls, plan: Plan, tables: Sequence[Array]) -> "_State":
        return cls(plan, *tables)


def _watch(
    state: _State, site: Site, operands: list[Array], results: list[Array], trips: Trips
) -> _State:
    """Measures the results of an equation, or lets them wait."""
    position = state.plan.position(site)
    if position is None:
        return state
    state.waiting += [(position, array) for array in results if is_floating_dtype(array.dtype)]
    is_traced = any(isinstance(array, jax.core.Tracer) for _, array in state.waiting)
    is_full = sum(array.size for _, array in state.waiting) > _MOST
    return state if is_traced and not is_full else state.updated()


@functools.partial(jax.jit, static_argnames="masks")
def _update(
    extremes: Array,
    totals: Array,
    arrays: Sequence[Array],
    *,
    nodes: np.ndarray,
    rows: np.ndarray,
    row_of: np.ndarray,
    masks: tuple[float, ...],
) -> tuple[Array, Array]:
    """Measures arrays, and returns the new tables.

    Args:
        extremes: the extremes of each node.
        totals: the sums of the counts of each row.
        arrays: the arrays.
        nodes: the position of the node of each array.
        rows: the positions of the rows that count these arrays, each once.
        row_of: the index in `rows` of each array.
        masks: see `Plan`.
    """
    if len(arrays) == 1:
        bits, parts = statistics.magnitudes(arrays[0]), np.uint16(0)
        found = statistics.extremes(bits, masks)[None]
    else:
        bits = _joined([statistics.magnitudes(array) for array in arrays])
        parts = _joined([jnp.full(array.shape, i, np.uint16) for i, array in enumerate(arrays)])
        found = statistics.extremes_of_parts(bits, masks, parts, len(arrays))
    largest = extremes[:, 0].at[nodes].max(found[:, 0])
    extremes = jnp.stack([largest, extremes[:, 1].at[nodes].min(found[:, 1])], -1)
    counts = statistics.count(statistics.bins_of(bits, masks), row_of[parts], len(rows))
    return extremes, totals.at[rows].set(statistics.add_counts(totals[rows], counts))


def _joined(arrays: Sequence[Array]) -> Array:
    """Returns the numbers of all arrays as one array, in which XLA has to write them out.

    Otherwise it would compile what reads the numbers once for each array.
    """
    joined = jnp.concatenate([jnp.reshape(array, -1) for array in arrays])
    return jax.lax.optimization_barrier(joined)
