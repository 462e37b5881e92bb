"""Runs a program in float32, and measures the numbers that its equations compute."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jmpx._base.axes import as_whole
from jmpx._base.leaves import is_floating_dtype
from jmpx._inspect.graph import Graph, Node
from jmpx._inspect.ranges import statistics
from jmpx._inspect.ranges.sources import is_counted, is_gradient, masks
from jmpx._inspect.widening import run_widened, widened
from jmpx._jaxprs.core import Jaxpr
from jmpx._jaxprs.watched import Site, evaluate

_FEW = 150  # equations that are measured, of a program that is compiled as a whole
_MOST = 1 << 24  # numbers that wait to be measured
Key = tuple[int, ...]  # the ids of the equations around an equation, and its own


class Row(NamedTuple):
    """A row of the table of counts: a scope, forward or backward.

    Args:
        scope: the path of the module, and the named scopes inside of it.
        selector: a selector of policy rules for it, or None.
        is_gradient: whether it is the backward pass.
    """

    scope: str
    selector: str | None
    is_gradient: bool


class Plan:
    """What is measured of a program.

    Args:
        graph: the program.
        extremes_only: whether nothing is counted.

    Attributes:
        nodes: the nodes that are measured; there are extremes of each.
        rows: the row of each of these nodes in the table of counts, by its position in `table`.
        table: the rows.
        masks: see `Ranges.masks`.
        extremes_only: whether nothing is counted.
    """

    def __init__(self, graph: Graph, extremes_only: bool) -> None:
        self.extremes_only = extremes_only
        self.masks = masks(graph)
        self.nodes = [node for node in graph.nodes if _is_measured(graph, node)]
        found: dict[Row, int] = {}
        self.rows = []
        for node in self.nodes:
            row = Row(graph.path(node), graph.selector(node), is_gradient(node))
            self.rows.append(found.setdefault(row, len(found)))
        self.table = list(found)
        self.positions = {_key(node): i for i, node in enumerate(self.nodes)}

    def position(self, site: Site) -> int | None:
        """Returns the position of an equation in `nodes`; None if it is not measured."""
        return self.positions.get((*map(id, site.around), id(site.equation)))


def _is_measured(graph: Graph, node: Node) -> bool:
    """Whether a node is counted, and is no single number outside of modules and scopes.

    The loss, a loss scale and the numbers of an optimizer are float32 whatever the policy says.
    """
    is_single = all(value.shape == () for value in node.results)
    return is_counted(node) and not (is_single and graph.selector(node) is None)


def _key(node: Node) -> Key:
    ids = []
    each: Node | None = node
    while each is not None:
        ids.append(id(each.eqn))
        each = each.around
    return tuple(reversed(ids))


class Measured(NamedTuple):
    """What was measured, as NumPy arrays.

    Args:
        extremes: the bits of the extremes of each node, of shape (nodes, 2).
        counts: the count in each bin of each row; None if nothing was counted.
        entered: the bits of the extremes of each argument, of shape (arguments, 2).
    """

    extremes: np.ndarray
    counts: np.ndarray | None
    entered: np.ndarray


def measure(jaxpr: Jaxpr, arrays: Sequence[Any], plan: Plan) -> Measured:
    """Runs a program once in float32.

    A small program is compiled as a whole. Any other runs one equation after the other, as JAX does
    outside of `jax.jit`, and only its loops and branches are compiled, because XLA would take
    minutes for all measurements of a model whose layers are written out.

    Args:
        jaxpr: the program.
        arrays: its arguments.
        plan: what is measured.
    """

    def run(arrays: list[Any]) -> tuple[_State, list[Any]]:
        wide = list(map(widened, arrays))
        floating = [array for array in wide if is_floating_dtype(array.dtype)]
        state = _State.empty(plan)
        _, state = evaluate(jaxpr, wide, _watcher(plan), state, run=run_widened, constant=widened)
        return state, [_extremes(as_whole(array), plan.masks) for array in floating]

    run = jax.jit(run) if len(plan.nodes) <= _FEW else run
    state, found = run(list(arrays))
    extremes, totals = (np.asarray(array) for array in jax.tree.leaves(state))
    entered = np.zeros((len(arrays), 2), np.uint32)
    indices = [i for i, array in enumerate(arrays) if is_floating_dtype(array.dtype)]
    for index, each in zip(indices, found, strict=True):
        entered[index] = np.asarray(each)
    counts = None if plan.extremes_only else statistics.as_integers(totals)
    return Measured(extremes, counts, entered)


@functools.partial(jax.jit, static_argnums=1)
def _extremes(array: Any, masks: tuple[float, ...]) -> Any:
    return statistics.extremes(statistics.magnitudes(array), masks)


def _watcher(plan: Plan) -> Callable[..., "_State"]:
    """Returns the function that measures what an equation computed."""

    def watch(
        state: _State, site: Site, operands: list[Any], results: list[Any], trips: Any
    ) -> _State:
        position = plan.position(site)
        if position is not None:
            state.waiting += [
                (position, result) for result in results if is_floating_dtype(result.dtype)
            ]
            is_traced = any(isinstance(array, jax.core.Tracer) for _, array in state.waiting)
            if not is_traced or sum(array.size for _, array in state.waiting) > _MOST:
                return state.updated()
        return state

    return watch


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

    def __init__(self, plan: Plan, extremes: Any, totals: Any) -> None:
        self.plan, self.extremes, self.totals = plan, extremes, totals
        self.waiting: list[tuple[int, Any]] = []  # the positions of nodes, and arrays

    @classmethod
    def empty(cls, plan: Plan) -> "_State":
        rows = 0 if plan.extremes_only else len(plan.table)
        totals = jnp.zeros((rows, statistics.SIZE, 2), jnp.uint32)
        return cls(plan, jnp.array(statistics.no_extremes((len(plan.nodes),))), totals)

    def updated(self) -> "_State":
        """Returns the state with all arrays measured."""
        if not self.waiting:
            return self
        positions, arrays = zip(*self.waiting, strict=True)
        rows = [self.plan.rows[position] for position in positions]
        unique = sorted(set(rows))
        tables = _update(
            self.extremes,
            self.totals,
            list(map(as_whole, arrays)),
            nodes=np.asarray(positions, np.int32),
            rows=np.asarray(unique, np.int32),
            row_of=np.asarray([unique.index(row) for row in rows], np.int32),
            masks=self.plan.masks,
            extremes_only=self.plan.extremes_only,
        )
        return _State(self.plan, *tables)

    def tree_flatten(self) -> tuple[tuple[Any, Any], Plan]:
        state = self.updated()
        return (state.extremes, state.totals), self.plan

    @classmethod
    def tree_unflatten(cls, plan: Plan, tables: Sequence[Any]) -> "_State":
        return cls(plan, *tables)


@functools.partial(jax.jit, static_argnames=("masks", "extremes_only"))
def _update(
    extremes: Any,
    totals: Any,
    arrays: Sequence[Any],
    *,
    nodes: Any,
    rows: Any,
    row_of: Any,
    masks: tuple[float, ...],
    extremes_only: bool,
) -> tuple[Any, Any]:
    """Measures arrays, and returns the new tables.

    Args:
        extremes: the extremes of each node.
        totals: the sums of the counts of each row.
        arrays: the arrays.
        nodes: the position of the node of each array.
        rows: the positions of the rows that count these arrays, each once.
        row_of: the index in `rows` of each array.
        masks: see `Ranges.masks`.
        extremes_only: whether nothing is counted.
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
    if not extremes_only:
        bins = statistics.bins_of(bits, masks)
        counts = statistics.count(bins, row_of[parts], len(rows))
        totals = totals.at[rows].set(statistics.add_counts(totals[rows], counts))
    return extremes, totals


def _joined(arrays: Sequence[Any]) -> Any:
    """Returns the numbers of all arrays as one array, in which XLA has to write them out.

    Otherwise it would compile what reads the numbers once for each array.
    """
    joined = jnp.concatenate([jnp.reshape(array, -1) for array in arrays])
    return jax.lax.optimization_barrier(joined)
