"""What leaves the modules and scopes of a program: its numbers in float32, and as it is written."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmpx._base.trees import is_floating_dtype
from jmpx._inspect.emulate import FORMATS, Rounding
from jmpx._inspect.graph import Graph, Node
from jmpx._inspect.programs import Program
from jmpx._inspect.running import key_of, run_widened, widened
from jmpx._inspect.watched import Site, Trips, evaluate
from jmpx._jaxprs.equations import Place
from jmpx._jaxprs.marks import Array, Jaxpr

RESULT = "result"  # the scope of what the function returns
_Numbers = dict[tuple[int, ...], list[Array]]  # what was kept, by the keys of sites


class Output(NamedTuple):
    """What leaves a scope. An output of a loop has an axis for the turns before the others."""

    scope: str  # the path of a module, and the named scopes in it
    is_backward: bool  # whether a backward pass computes it
    place: Place | None  # the line that computes it
    dtype: str  # in which the program computes it
    wide: np.ndarray  # in float32
    written: np.ndarray  # as it is written, in float32, too


class _Kept(NamedTuple):
    """A result of a node that leaves scopes."""

    node: Node
    index: int  # of the result
    scopes: tuple[str, ...]


def outputs_of(program: Program) -> list[Output]:
    """Runs a program in float32 and as it is written; returns what leaves its scopes, in order."""
    graph = Graph(program)
    kept = list(_leaving(graph))
    arrays, rounding = list(program.arrays), Rounding(FORMATS)
    wide = _run(program.jaxpr, kept, [*map(widened, arrays)], run_widened, widened)
    rounded = [*map(rounding.rounded, arrays)]
    written = _run(program.jaxpr, kept, rounded, rounding.equation, lambda array: array)
    found = list[Output]()
    numbers = zip(kept, wide.kept, written.kept, strict=True)
    for (node, index, scopes), in_float32, as_written in numbers:
        both = _in_float32(in_float32), _in_float32(as_written)
        dtype, place = node.results[index].dtype.name, graph.place(node)
        found += [Output(scope, node.is_backward, place, dtype, *both) for scope in scopes]
    for value, *both in zip(graph.outputs, wide.results, written.results, strict=True):
        if is_floating_dtype(value.dtype):
            place = None if value.node is None else graph.place(value.node)
            numbers = map(_in_float32, both)
            found.append(Output(RESULT, False, place, value.dtype.name, *numbers))
    return found


def _leaving(graph: Graph) -> Iterator[_Kept]:
    """Yields the floating results of nodes that are read, or returned, outside of their scopes."""
    paths = {graph.path(node) for node in graph.nodes}  # others are containers, such as a list
    for node in graph.nodes:
        if node.is_structure or node.in_while:
            continue
        around = [path for path in _around(graph.path(node)) if path in paths]
        for index, value in enumerate(node.results):
            if not around or not is_floating_dtype(value.dtype):
                continue
            readers = [_around(graph.path(reader)) for reader in value.readers]
            readers += [[]] if value.is_output else []
            scopes = tuple(s for s in around if any(s not in each for each in readers))
            if scopes:
                yield _Kept(node, index, scopes)


def _around(path: str) -> list[str]:
    """Returns a path and those around it, the innermost first."""
    parts = path.split("/") if path else []
    return ["/".join(parts[:end]) for end in range(len(parts), 0, -1)]


class _Ran(NamedTuple):
    """The numbers of one run."""

    kept: list[Array]
    results: list[Array]


def _run(
    jaxpr: Jaxpr,
    kept: list[_Kept],
    arrays: list[Array],
    run: Callable[..., list[Array]],
    constant: Callable[[Array], Array],
) -> _Ran:
    """Runs a program, and returns what is to be kept, and its results."""
    indices: dict[tuple[int, ...], list[int]] = {}
    for node, index, _ in kept:
        indices.setdefault(key_of(node), []).append(index)

    def watch(
        state: _Numbers, site: Site, operands: list[Array], results: list[Array], trips: Trips
    ) -> _Numbers:
        if site.key not in indices:
            return state
        new = [results[index] for index in indices[site.key]]
        if trips:
            new = [old.at[trips].set(x) for old, x in zip(state[site.key], new, strict=True)]
        return {**state, site.key: new}

    @jax.jit
    def run_all(arrays: list[Array]) -> tuple[list[Array], _Numbers]:
        empty: _Numbers = {key: [] for key in indices}
        for node, index, _ in kept:
            value = node.results[index]
            dtype = np.float32 if run is run_widened and value.dtype.itemsize < 4 else value.dtype
            empty[key_of(node)].append(jnp.zeros((*_lengths(node), *value.shape), dtype))
        return evaluate(jaxpr, arrays, watch, empty, run=run, constant=constant, by_site=True)

    results, numbers = run_all(arrays)
    taken = {key: iter(arrays) for key, arrays in numbers.items()}
    return _Ran([next(taken[key_of(node)]) for node, _, _ in kept], results)


def _lengths(node: Node) -> tuple[int, ...]:
    """Returns the lengths of the scans around a node, the outermost first."""
    lengths, around = list[int](), node.around
    while around is not None:
        if around.eqn.primitive.name == "scan":
            lengths.append(around.eqn.params["length"])
        around = around.around
    return tuple(reversed(lengths))


def _in_float32(array: Array) -> np.ndarray:
    return np.asarray(widened(jnp.asarray(array)))
