"""A program that is run, at several loss scales if it has one, and what is found in words."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jmpx._inspect.first_nonfinite.causes import Cause, cause_of_event, in_float32
from jmpx._inspect.first_nonfinite.flow import Flow
from jmpx._inspect.first_nonfinite.numbers import NAN, is_inexact, is_narrow, numbers_of, worst_of
from jmpx._inspect.first_nonfinite.remedies import rules_for
from jmpx._inspect.first_nonfinite.report import FirstNonfinite
from jmpx._inspect.first_nonfinite.scales import Scale, is_scaling, run_unscaled, scale_of
from jmpx._inspect.first_nonfinite.search import HAND_ON, Event, Search
from jmpx._inspect.graph import Graph, Node, Value
from jmpx._inspect.programs import Program
from jmpx._inspect.widening import run_widened, widened
from jmpx._jaxprs.core import operation_name
from jmpx._jaxprs.places import place_of
from jmpx._jaxprs.watched import Site
from jmpx._policies.places import where
from jmpx._policies.rules import parse_rule


class _Run(NamedTuple):
    """What a run found."""

    search: Search
    arrays: Sequence[Any]
    flow: Flow
    found: Event | Value | None


class Replay:
    """A program that is run to find its first infinity or NaN.

    Args:
        program: the program.
        tree: the function and its arguments.
    """

    def __init__(self, program: Program, tree: Any) -> None:
        self.program, self.graph, self.tree = program, Graph(program), tree
        self.search = Search(program.jaxpr)
        self.scale = scale_of(tree, program.arrays, self.search.sites)

    def run(self, search: Search, arrays: Sequence[Any]) -> _Run:
        """Runs the program once, and follows what went through it."""
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
        # It is there at the floor of the scale, too, so that what mends that one is told.
        return self.describe(lower, scale.floor)

    def at_scale(self, scale: Scale, number: float) -> _Run:
        """Runs the program at another loss scale; at 1, if the scale is part of the program."""
        if scale.indices:
            return self.run(self.search, scale.put(self.program.arrays, number))
        return self.run(Search(self.program.jaxpr, run_unscaled), self.program.arrays)

    def cause_of_scale(self, scale: Scale) -> Cause:
        """Returns the cause if all is finite at the floor of the loss scale."""
        if not scale.indices:
            return Cause(
                f"The loss scale {scale.number:g} alone makes it overflow: at 1, all is finite",
                "Pass a dynamic one to the step, which finds the scale that the gradients bear",
                "dynamic",
            )
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
        """Returns what a run found as the user sees it."""
        if isinstance(run.found, Value):
            return self.given(run.found, run.arrays, scale)
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
            cause = self.or_scale(cause, site)
        seen = [numbers_of(x) for x in results if is_inexact(x)]
        return FirstNonfinite(
            kind="inf" if any(each.infs for each in seen) else "NaN",
            operation=operation_name(eqn.primitive.name),
            given="",
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

        If there is none, it has the one under which something else is found, that reads other
        numbers than those of the node.
        """
        rules = rules_for(self.graph, node)
        moving = ""
        for rule in rules:
            found = self.under(rule, scale)
            if found == ():
                return cause.with_rule(rule, is_tried=True)
            moving = moving or ("" if found is None or self.key(node) in found else rule)
        return cause.with_rule(moving, is_tried=bool(rules))

    def under(self, rule: str, scale: float | None) -> tuple[object, ...] | None:
        """Replays the program with a rule at the end of its policy maps.

        Returns:
            What tells the operation apart that is found, and the one that made its operand; nothing
            if all is finite. None if the program cannot be traced so, or something else is found.
        """
        try:
            program = self.program.with_rules(parse_rule(rule, rule, 0))
        except Exception:  # such as the carry of a user's loop, which would change its dtype
            return None
        other = Replay(program, self.tree)
        run = other.run(other.search, program.arrays)
        if other.scale is not None and scale is not None and scale != other.scale.number:
            run = other.at_scale(other.scale, scale)
        node = run.flow.node(run.found.site) if isinstance(run.found, Event) else None
        if node is None:
            return () if run.found is None else None
        maker = _source(node)
        return other.key(node), None if maker.node is None else other.key(maker.node)

    def key(self, node: Node) -> tuple[Any, ...]:
        """Returns what tells a node apart from others, in this program and with a rule."""
        return node.name, self.graph.place(node), self.graph.path(node), node.is_backward

    def cause_in_16_bits(self, run: _Run, cause: Cause) -> Cause:
        """Returns the cause of what is finite if the whole program computes in float32."""
        values = (value for node in self.graph.nodes for value in node.results)
        if not any(is_inexact(value) and is_narrow(value.dtype) for value in values):
            return cause
        wide = Search(self.program.jaxpr, run_widened, widened)
        if self.run(wide, list(map(widened, run.arrays))).found is not None:
            return cause
        reason = f"{cause.reason}, because of numbers that 16 bits lost before"
        return in_float32(reason, "all is finite")

    def or_scale(self, cause: Cause, site: Site) -> Cause:
        """Returns a cause that also tells of a loss scale that no argument holds."""
        is_unknown = self.scale is None and site.is_backward
        if not is_unknown or not any(is_scaling(each.equation) for each in self.search.sites):
            return cause
        hint = "; or lower the loss scale: pass it as an argument, and it is told to how much"
        return cause._replace(remedy=cause.remedy + hint)

    def given(self, value: Value, arrays: Sequence[Any], scale: float | None) -> FirstNonfinite:
        """Describes an argument or a constant that is not finite."""
        is_input = value.kind == "input"
        array = arrays[value.index] if is_input else np.asarray(value.constant, value.dtype)
        reader = value.readers[0] if value.readers and not is_input else None
        return FirstNonfinite(
            kind="NaN" if worst_of(array) == NAN else "inf",
            operation="",
            given=self.program.names[value.index] if is_input else "a constant",
            place=None if reader is None else self.graph.place(reader),
            scope="" if reader is None else self.graph.path(reader),
            policy="",
            is_backward=False,
            trips=(),
            operands=(),
            results=(numbers_of(array),),
            loss_scale=scale,
            is_at_floor=self.scale is not None and scale == self.scale.floor,
            cause="The function was given it, and no rule mends it: look for what made it.",
            rule="",
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
