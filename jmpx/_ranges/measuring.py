"""Runs a program in float32, and measures the numbers that its equations compute."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmpx._audit.graph import Graph, Node
from jmpx._jaxpr import Jaxpr
from jmpx._leaves import is_floating_dtype
from jmpx._ranges import statistics
from jmpx._ranges.sources import is_counted, is_gradient, masks
from jmpx._ranges.widening import run_widened, widened
from jmpx._watched import Site, evaluate

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
        self.nodes = [node for node in graph.nodes if is_counted(node)]
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

    It runs one equation after the other, as JAX does outside of `jax.jit`; only loops and branches
    are compiled as a whole. A program that is compiled with all measurements in it would take
    minutes to compile where the layers of a model are written out.

    Args:
        jaxpr: the program.
        arrays: its arguments.
        plan: what is measured.
    """

    def watch(
        state: _State, site: Site, operands: list[Any], results: list[Any], trips: Any
    ) -> _State:
        position = plan.position(site)
        if position is None:
            return state
        for result in results:
            if is_floating_dtype(result.dtype):
                found, counts = _measured(result, plan.masks, plan.extremes_only)
                state.add(position, found, plan.rows[position], counts)
        return state

    wide = list(map(widened, arrays))
    state = _State.empty(len(plan.nodes), 0 if plan.extremes_only else len(plan.table))
    _, state = evaluate(jaxpr, wide, watch, state, run=run_widened, constant=widened)
    extremes, totals = (np.asarray(array) for array in jax.tree.leaves(state))
    entered = [
        np.asarray(_measured(array, plan.masks, True)[0])
        if is_floating_dtype(array.dtype)
        else np.asarray(statistics.no_extremes())
        for array in wide
    ]
    counts = None if plan.extremes_only else statistics.as_integers(totals)
    return Measured(extremes, counts, np.reshape(entered, (-1, 2)).astype(np.uint32))


def _measured(array: Any, masks: tuple[float, ...], extremes_only: bool) -> Any:
    return _measured_jitted(jnp.reshape(array, -1), masks, extremes_only)


def _measure_array(array: Any, masks: tuple[float, ...], extremes_only: bool) -> tuple[Any, Any]:
    bits = statistics.magnitudes(array)
    counts = None if extremes_only else statistics.histogram(bits, masks)
    return statistics.extremes(bits, masks), counts


_measured_jitted = jax.jit(_measure_array, static_argnums=(1, 2))
_add_counts = jax.jit(statistics.add_counts)


@jax.tree_util.register_pytree_node_class
class _State:
    """What was measured so far: two tables, and what is not in them yet.

    A table that is updated by every equation takes XLA long to compile. So measurements wait, and
    go into the tables together where the state enters or leaves a loop, which flattens it.

    Args:
        extremes: the extremes of each node.
        totals: the sums of the counts of each row, as `statistics.add_counts` makes them.
    """

    def __init__(self, extremes: Any, totals: Any) -> None:
        self.extremes, self.totals = extremes, totals
        self.found: dict[int, Any] = {}  # by node
        self.counts: dict[int, Any] = {}  # by row

    @classmethod
    def empty(cls, nodes: int, rows: int) -> "_State":
        totals = jnp.zeros((rows, statistics.SIZE, 2), jnp.uint32)
        return cls(statistics.no_extremes((nodes,)), totals)

    def add(self, node: int, extremes: Any, row: int, counts: Any) -> None:
        """Adds what was measured of an array.

        Args:
            node: the position of the node that computed it.
            extremes: its extremes.
            row: the position of the row that counts it.
            counts: the count in each bin, or None.
        """
        known = self.found.get(node)
        self.found[node] = extremes if known is None else statistics.merge_extremes(known, extremes)
        if counts is not None:
            total = self.counts.get(row)
            if total is None:
                total = jnp.zeros((statistics.SIZE, 2), jnp.uint32)
            self.counts[row] = _add_counts(total, counts)

    def tree_flatten(self) -> tuple[tuple[Any, Any], None]:
        extremes, totals = self.extremes, self.totals
        if self.found:
            nodes = np.asarray(list(self.found))
            new = statistics.merge_extremes(extremes[nodes], jnp.stack(list(self.found.values())))
            extremes = extremes.at[nodes].set(new)
        if self.counts:
            rows = np.asarray(list(self.counts))
            new = statistics.add_totals(totals[rows], jnp.stack(list(self.counts.values())))
            totals = totals.at[rows].set(new)
        return (extremes, totals), None

    @classmethod
    def tree_unflatten(cls, _: None, leaves: Sequence[Any]) -> "_State":
        return cls(*leaves)
