"""Advice and rules on trial: what they do to the error of a program that runs on its arguments.

The program runs in float32 and rounds where it writes 16 bits. With the edit that advice tells, it
also rounds what JAX's promotion would leave in 16 bits then, forward and backward. That may be more
than the edit would change: no trace shows a cast to float32 of what is in float32 already.
"""

import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jmpx._base.trees import is_floating_dtype, is_traceable
from jmpx._inspect.audit.report import Finding
from jmpx._inspect.audit.step import Streams, UntriedFinding
from jmpx._inspect.audit.values import MOVES_AND_CASTS, reaches_end
from jmpx._inspect.blame.runs import Edit, Point, Points, Runs
from jmpx._inspect.graph import Graph, Node, Value
from jmpx._inspect.programs import Program
from jmpx._inspect.running import CompileCache, relative_error, with_arrays
from jmpx._inspect.text import bytes_text, error_text
from jmpx._inspect.watched import SiteKey
from jmpx._jaxprs.core import Array
from jmpx._jaxprs.inner import is_outer
from jmpx._policies.map_strings import parse_rule
from jmpx._policies.maps import Rule

_MOST = 256 * 2**20  # bytes of shapes that are filled
_RISE = 1.5  # an edit may not raise the error further


class Trial:
    """A program that runs as written, with the edits that groups of findings advise, and by rules.

    `reason` says why nothing can be tried, and is empty if it can.
    """

    def __init__(self, graph: Graph, groups: Sequence[Sequence[UntriedFinding]]) -> None:
        program, self._half, self.reason = graph.program, graph.half_dtype, ""
        self._program, self._arrays = program, _filled(program)
        edits = [[node for found in group for node in found.edited] for group in groups]
        self._under, streams = dict[Rule, float](), Streams(graph)  # the errors under rules
        runs = self._runs(program, [dict(_points(graph, streams, edit)) for edit in edits])
        count = len(runs.points.order)

        def results(*rounding: int) -> list[Array]:
            mask = np.zeros(count + len(edits), bool)
            mask[list(rounding)] = True
            return runs.results(self._arrays, mask)

        try:
            self._exact = results()
            if not all(np.isfinite(array).all() for array in self._exact):
                raise ValueError("the results in float32 are not finite")
            self.before = self._error(results(*range(count)))
            self._after = {
                number: self._error(results(*range(count), count + number))
                for number, nodes in enumerate(edits)
                if nodes
            }
        except (NotImplementedError, TypeError, ValueError) as error:
            self.reason = " ".join(str(error).split()).removesuffix(".")

    def _runs(self, program: Program, edits: Sequence[Edit] = ()) -> Runs:
        """Returns the runs of a program; of a loss, the results are it and its gradient."""
        indices = [i for i, a in enumerate(program.jaxpr.out_avals) if is_floating_dtype(a.dtype)]
        if program.is_differentiated:
            indices = [0, *indices[-program.gradients :]]
        compiled = CompileCache(program.jaxpr, is_shared=False)
        return Runs(Points(program.jaxpr, edits), tuple(indices), (), compiled, relative_error)

    def _error(self, results: list[Array]) -> float:
        """Returns the error of results: of the loss or of its gradient, whichever is larger."""
        first = 1 if self._program.is_differentiated else len(results)
        parts = slice(first), slice(first, None)
        errors = [relative_error(results[part], self._exact[part]) for part in parts]
        return max(errors) if np.isfinite(errors).all() else math.inf

    def _passes(self, after: float) -> bool:
        """Whether an error is one that the rounding of the program itself explains."""
        # The parameters that a step returns are mostly those that it was given, without an error.
        is_step = self._program.has_backward and not self._program.is_differentiated
        least = 0.0 if is_step else 2 * float(jnp.finfo(self._half).eps)
        return after <= max(_RISE * self.before, least)

    def refused(self, rule: Rule) -> str:
        """Returns why a rule, under which the program was traced, is not proposed; or nothing."""
        if self.reason:
            return ""
        if rule not in self._under:
            runs = self._runs(self._program.with_rules(rule))
            self._under[rule] = self._error(runs.results(self._arrays))
        before, after = map(error_text, (self.before, self._under[rule]))
        is_refused = not self._passes(self._under[rule])
        return f"raises the error from {before} to {after}" if is_refused else ""

    def told(self, finding: Finding, number: int) -> Finding:
        """Returns a finding with the errors without and with its rule, or else its edit."""
        if self.reason or not (finding.rule or number in self._after):
            return finding
        edit = self._after.get(number, 0.0)
        after = self._under[parse_rule(finding.rule)] if finding.rule else edit
        told = finding._replace(before=self.before, after=after)
        if self._passes(edit):
            return told
        if finding.rule:
            return told._replace(advice="")
        advice = f"keep it in float32: {self._half} was tried, and raises the error"
        return told._replace(severity="low", advice=advice)


# --- The arguments ---


def _filled(program: Program) -> list[Array]:
    """Returns the inputs, with random numbers for floating shapes in the first argument.

    They are weights, scaled by their rows. No random numbers stand for data.
    """
    shapes = {i: a for i, a in enumerate(program.arrays) if isinstance(a, jax.ShapeDtypeStruct)}
    size = sum(shape.size * shape.dtype.itemsize for shape in shapes.values())
    if size > _MOST:
        raise ValueError(
            f"Expected arrays, got shapes of {bytes_text(size)}: run=True fills at most "
            f"{bytes_text(_MOST)} with random numbers, so pass arrays, or fewer layers."
        )
    leaves = jax.tree.leaves((program.call.fn, program.call.args[:1]))
    first = sum(is_traceable(x) or isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
    rng, arrays = np.random.default_rng(0), list(program.arrays)
    for index, shape in shapes.items():
        if index >= first or not is_floating_dtype(shape.dtype):
            raise ValueError(
                f"Expected an array as {program.names[index]}, got a shape of {shape.dtype}: "
                "run=True fills floating shapes of the first argument alone with random numbers."
            )
        numbers = rng.standard_normal(shape.shape, np.float32)
        if numbers.ndim > 1:
            numbers /= math.sqrt(numbers.shape[-2])
        arrays[index] = numbers.astype(program.jaxpr.in_avals[index].dtype)
    with_arrays(dataclasses.replace(program, arrays=arrays), "jmpx.inspect.audit with run=True")
    return arrays


# --- The edits ---


def _is_wide(value: Value) -> bool:
    """Whether JAX's promotion returns float32 because of an operand."""
    while value.is_wide and value.node is not None and value.node.name in MOVES_AND_CASTS:
        value = value.node.operands[0]
    return value.is_wide and value.number is None


def before_products(graph: Graph) -> set[Node]:
    """Returns the nodes of which the products of the forward pass are computed."""
    nodes = (each for each in graph.nodes if each.is_product and not each.is_backward)
    operands = [value for each in nodes if not is_outer(each.eqn) for value in each.operands]
    return set(Graph.back(operands, lambda node: node.operands))


def _points(
    graph: Graph, streams: Streams, edited: Collection[Node]
) -> Iterator[tuple[SiteKey, list[Point]]]:
    """Yields the points that round if nodes read 16 bits, and so on.

    What reaches no product is the loss, which is for the user to have in float32.
    """
    edited, narrow = set(edited), set[Value]()
    inner = before_products(graph)
    for node in streams.forward if edited else ():
        given = node.first_operands
        is_reached = any(value in narrow for value in given) and not streams.is_asked(node)
        is_narrow = is_reached and not any(_is_wide(v) and v not in narrow for v in given)
        is_narrow |= node in edited
        if is_narrow and (node in inner or not reaches_end(node)):
            narrow.update(value for value in node.results if value.is_wide)
    keys = {(each.path, each.place) for each in edited}
    keys |= {(value.node.path, value.node.place) for value in narrow if value.node is not None}
    half = np.dtype(graph.half_dtype)
    for node in graph.nodes if edited else ():
        is_backward = node.is_backward and (node.path, node.place) in keys
        is_read = node in edited or (is_backward and node.is_product)
        found = [(True, i) for i, v in enumerate(node.operands) if is_read and v.is_wide]
        results = enumerate(node.results)
        found += [(False, i) for i, v in results if v in narrow or (is_backward and v.is_wide)]
        if found and not node.is_structure:
            yield node.key, [Point(*each, half, (), (), False) for each in found]
