"""Runs a program, at several loss scales if it has one, and describes the origin that it finds."""

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from jmpx._base.leaves import PyTree
from jmpx._inspect.first_nonfinite.causes import Cause, cause_of_event, in_float32
from jmpx._inspect.first_nonfinite.flow import Flow
from jmpx._inspect.first_nonfinite.numbers import is_inexact, numbers_of
from jmpx._inspect.first_nonfinite.remedies import rules_for
from jmpx._inspect.first_nonfinite.report import FirstNonfinite
from jmpx._inspect.first_nonfinite.scales import Scale, scale_of
from jmpx._inspect.first_nonfinite.search import HAND_ON, Event, Search
from jmpx._inspect.graph import Graph, Node, Value
from jmpx._inspect.programs import Program
from jmpx._inspect.running import is_narrow, run_widened, widened
from jmpx._jaxprs.core import Array, operation_name
from jmpx._jaxprs.places import Place, place_of
from jmpx._policies.map_strings import parse_rule
from jmpx._policies.places import where

# What identifies an operation: its name, place and path, and whether it is in the backward pass.
_Key: TypeAlias = tuple[str, Place | None, str, bool]
_OR_SCALE = (
    "; or lower the loss scale if there is one: a jmpx.DynamicLossScale among the arguments shows "
    "by how much"
)


class _Run(NamedTuple):
    """A run, and the origin of the first infinity or NaN that reaches a result of it."""

    search: Search
    arrays: Sequence[Array]
    flow: Flow
    found: Event | Value | None


class Replay:
    """A program that is run to find its first infinity or NaN.

    Args:
        program: the program.
        tree: the function and its arguments.
    """

    def __init__(self, program: Program, tree: PyTree) -> None:
        self.program, self.graph, self.tree = program, Graph(program), tree
        self.search = Search(program.jaxpr)
        self.scale = scale_of(tree, program.arrays)

    def run(self, search: Search, arrays: Sequence[Array]) -> _Run:
        """Runs the program once, and follows the numbers through it."""
        flow = Flow(self.graph, search, search.look(arrays), arrays)
        return _Run(search, arrays, flow, flow.origin())

    def find(self) -> FirstNonfinite | None:
        """Returns the first one; None if all results are finite."""
        scale, first = self.scale, self.run(self.search, self.program.arrays)
        if first.found is None:
            return None
        if scale is None:
            return self.describe(first, None)
        if scale.number <= scale.floor:
            return self.describe(first, scale.number)
        lower = self.at_scale(scale, scale.floor)
        if lower.found is None:
            return self.describe(first, scale.number, self.cause_of_scale(scale))
        # It is there at the floor of the scale, too: the report is about that run.
        return self.describe(lower, scale.floor)

    def at_scale(self, scale: Scale, number: float) -> _Run:
        """Runs the program at another loss scale."""
        return self.run(self.search, scale.put(self.program.arrays, number))

    def cause_of_scale(self, scale: Scale) -> Cause:
        """Returns the cause if all is finite at the floor of the loss scale."""
        low, high = scale.floor, scale.number
        while high > 2 * low:
            middle = 2.0 ** ((math.log2(low) + math.log2(high)) // 2)
            middle = middle if low < middle < high else (low * high) ** 0.5
            is_finite = self.at_scale(scale, middle).found is None
            low, high = (middle, high) if is_finite else (low, middle)
        return Cause(
            f"The loss scale {scale.number:g} alone makes it overflow: at {low:g}, all is finite",
            "Skip the step, and the scale lowers itself; to begin lower, take the rule",
            f"dynamic,init={low:g}",
        )

    def describe(
        self, run: _Run, scale: float | None, cause: Cause | None = None
    ) -> FirstNonfinite | None:
        """Returns the report about a run."""
        if isinstance(run.found, Value):
            return self.given(run.found, run.flow.array(run.found), scale)
        return None if run.found is None else self.made(run, run.found, scale, cause)

    def made(
        self, run: _Run, event: Event, scale: float | None, cause: Cause | None
    ) -> FirstNonfinite:
        """Describes an operation that made an infinity or a NaN."""
        site, eqn = event.site, event.site.equation
        node = run.flow.node(site)
        operands, results = run.search.operands_of(event, run.arrays)
        policy = "" if node is None else self.graph.policy(node)
        if cause is None:
            cause = cause_of_event(event, operands, results, _maker(node))
            if event.is_made and not cause.is_of_dtype:
                cause = self.cause_in_16_bits(run, cause)
            if cause.is_of_dtype and node is not None:
                cause = self.with_rule(cause, node, scale)
            if self.scale is None and site.is_backward and cause.is_of_dtype:
                cause = cause._replace(remedy=cause.remedy + _OR_SCALE)
        seen = [numbers_of(x) for x in results if is_inexact(x)]
        return FirstNonfinite(
            kind="inf" if any(each.infs for each in seen) else "NaN",
            operation=operation_name(eqn.primitive.name),
            place=place_of(eqn) if node is None else self.graph.place(node),
            scope=where(site.scope).path,
            policy=policy,
            is_backward=site.is_backward,
            trips=tuple(zip(event.trips, map(place_of, site.loops), strict=True)),
            operands=tuple(numbers_of(x) for x in operands if is_inexact(x)),
            results=tuple(seen),
            loss_scale=scale,
            is_at_floor=self.scale is not None and scale == self.scale.floor,
            cause=str(cause),
            rule=cause.rule,
        )

    def with_rule(self, cause: Cause, node: Node, scale: float | None) -> Cause:
        """Returns a cause with the rule under which all is finite.

        Else it has the first rule under which another operation, on other numbers, is found.
        """
        rules, moving = rules_for(self.graph, node), ""
        for rule in rules:
            found = self.under(rule, scale)
            if found == []:
                return cause.with_rule(rule, is_tried=True)
            if found and self.key(node) not in found:
                moving = moving or rule
        return cause.with_rule(moving, is_tried=bool(rules))

    def under(self, rule: str, scale: float | None) -> list[_Key] | None:
        """Replays the program with a rule at the end of its policy maps.

        Returns:
            The keys of the operation that is found, and of the one that made its operand; none if
            all is finite. None if the program cannot run so, or something else is found.
        """
        try:
            program = self.program.with_rules(parse_rule(rule))
        except (AssertionError, TypeError, ValueError):  # such as a loop whose carry would change
            return None
        other = Replay(program, self.tree)
        run = other.run(other.search, program.arrays)
        if other.scale is not None and scale is not None and scale != other.scale.number:
            run = other.at_scale(other.scale, scale)
        if run.found is None:
            return []
        node = run.flow.node(run.found.site) if isinstance(run.found, Event) else None
        if node is None:
            return None
        maker = _source(node).node
        return [other.key(each) for each in (node, maker) if each is not None]

    def key(self, node: Node) -> _Key:
        """Returns what identifies a node, in this program and in the same one with a rule."""
        return node.name, self.graph.place(node), self.graph.path(node), node.is_backward

    def cause_in_16_bits(self, run: _Run, cause: Cause) -> Cause:
        """Returns the cause if all is finite once the whole program computes in float32."""
        values = (value for node in self.graph.nodes for value in node.results)
        if not any(is_narrow(value.dtype) for value in values):
            return cause
        wide = Search(self.program.jaxpr, run_widened, widened)
        if self.run(wide, list(map(widened, run.arrays))).found is not None:
            return cause
        reason = f"{cause.reason}, because of numbers that 16 bits lost before"
        return in_float32(reason, "all is finite")

    def given(self, value: Value, array: Array, scale: float | None) -> FirstNonfinite:
        """Describes an argument or a constant that is not finite."""
        is_input, numbers = value.kind == "input", numbers_of(array)
        reader = value.readers[0] if value.readers and not is_input else None
        return FirstNonfinite(
            kind="NaN" if numbers.nans else "inf",
            given=self.program.names[value.index] if is_input else "a constant",
            place=None if reader is None else self.graph.place(reader),
            scope="" if reader is None else self.graph.path(reader),
            results=(numbers,),
            loss_scale=scale,
            is_at_floor=self.scale is not None and scale == self.scale.floor,
            cause="The function was given it, and no rule mends it: look where it was made.",
        )


def _source(node: Node) -> Value:
    """Returns the first operand of a node as it was computed; the node itself if it has none."""
    value = (node.operands or node.results)[0]
    while value.node is not None and value.node.name in HAND_ON:
        value = value.node.operands[0]
    return value


def _maker(node: Node | None) -> str:
    """Returns the operation that made the first operand of a node, or `const` or `literal`."""
    if node is None or not node.operands:
        return ""
    value = _source(node)
    if value.node is not None:
        return "" if value.node.is_structure else value.node.name
    return "" if value.kind == "input" else value.kind
