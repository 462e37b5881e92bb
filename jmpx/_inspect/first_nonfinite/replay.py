"""Runs a program, at several loss scales if it has one, and describes the origin that it finds."""

from typing import NamedTuple, TypeAlias

import jax
import numpy as np

from jmpx._inspect.first_nonfinite.causes import Cause, cause_of_event, in_float32
from jmpx._inspect.first_nonfinite.flow import Flow
from jmpx._inspect.first_nonfinite.remedies import rules_for
from jmpx._inspect.first_nonfinite.report import FirstNonfinite, numbers_of
from jmpx._inspect.first_nonfinite.search import HAND_ON, Event, Search, is_inexact
from jmpx._inspect.graph import Graph, Node, Value
from jmpx._inspect.programs import Program
from jmpx._inspect.running import is_narrow, run_widened, scale_text, widened
from jmpx._inspect.where import where
from jmpx._jaxprs.core import operation_name
from jmpx._jaxprs.equations import Place, place_of
from jmpx._policies.map_strings import parse_rule
from jmpx._scales.kinds import DynamicLossScale

# What identifies an operation: its name, place and path, and whether it is in the backward pass.
_Key: TypeAlias = tuple[str, Place | None, str, bool]
_OR_SCALE = (
    " Or lower the loss scale if there is one: a jmpx.DynamicLossScale among the arguments shows "
    "by how much."
)


class _Scale(NamedTuple):
    """The loss scale of a step."""

    number: float  # the scale
    floor: float  # the smallest one that it can be
    indices: tuple[int, ...]  # the inputs of the program that hold it


def _scale_of(program: Program) -> _Scale | None:
    """Returns the dynamic loss scale among the arguments; None without one that is unique."""
    is_scale = lambda leaf: isinstance(leaf, DynamicLossScale)  # noqa: E731
    call = program.call
    leaves = jax.tree.leaves((call.fn, call.args, call.kwargs), is_leaf=is_scale)
    found = [leaf for leaf in leaves if is_scale(leaf) and np.ndim(leaf.loss_scale) == 0]
    ids = {id(scale.loss_scale) for scale in found}
    indices = tuple(i for i, array in enumerate(program.arrays) if id(array) in ids)
    numbers = {float(scale.loss_scale) for scale in found}
    if found and not indices:  # beside an NNX module, arguments are copied; names stay
        named = enumerate(zip(program.names, program.arrays, strict=True))
        is_named = lambda name, array: name.endswith(".loss_scale") and not np.ndim(array)  # noqa: E731
        indices = tuple(i for i, each in named if is_named(*each) and float(each[1]) in numbers)
    if len(numbers) != 1 or not indices:
        return None
    return _Scale(numbers.pop(), max(scale.min_loss_scale for scale in found), indices)


class Replay:
    """A program that is run to find its first infinity or NaN."""

    def __init__(self, program: Program) -> None:
        self.program, self.graph = program, Graph(program)
        self.search, self.scale = Search(program.jaxpr), _scale_of(program)

    def run(self, number: float | None = None) -> Flow:
        """Runs the program once, with this number as the loss scale if it has one."""
        arrays = list(self.program.arrays)
        for i in self.scale.indices if self.scale and number is not None else ():
            arrays[i] = np.asarray(number, arrays[i].dtype)
        return Flow(self.graph, self.search, arrays)

    def find(self) -> FirstNonfinite | None:
        """Returns the first one; None if all results are finite."""
        scale, flow = self.scale, self.run()
        if scale is None or scale.number <= scale.floor or flow.found is None:
            return self.describe(flow, scale and scale.number)
        lower = self.run(scale.floor)
        if lower.found is not None:
            # It is there at the floor of the scale, too: the report is about that run.
            return self.describe(lower, scale.floor)
        number = max(scale.number / 2, scale.floor)
        while number > scale.floor and self.run(number).found is not None:
            number = max(number / 2, scale.floor)
        cause = Cause(
            f"The loss scale {scale.number:g} alone makes it overflow: at {number:g} all is finite",
            "Skip the step, and the scale lowers itself; to begin lower, take the rule",
        )
        return self.describe(flow, scale.number, cause, scale_text(number))

    def describe(
        self, flow: Flow, scale: float | None, cause: Cause | None = None, rule: str = ""
    ) -> FirstNonfinite | None:
        """Returns the report about a run, whose cause may be known."""
        if isinstance(flow.found, Event):
            return self.made(flow, flow.found, scale, cause, rule)
        return None if flow.found is None else self.given(flow, flow.found, scale)

    def made(
        self, flow: Flow, event: Event, scale: float | None, cause: Cause | None, rule: str
    ) -> FirstNonfinite:
        """Describes an operation that made an infinity or a NaN."""
        site, eqn, node = event.site, event.site.equation, flow.node(event.site)
        operands, results = flow.search.operands_of(event, flow.arrays)
        rules: list[str] = []
        if cause is None:
            cause = cause_of_event(event, operands, results)
            if event.is_made and not cause.in_code:
                cause = self.cause_in_16_bits(flow, cause)
            if cause.in_code and node is not None:
                rules = rules_for(self.graph, node)
                rule = self.first_that_mends(rules, node, scale)
        text = cause.text(rule, bool(rules))
        may_scale = self.scale is None and site.is_backward and cause.in_code
        seen = [numbers_of(x) for x in results if is_inexact(x)]
        return FirstNonfinite(
            kind="inf" if any(each.infs for each in seen) else "NaN",
            operation=operation_name(eqn.primitive.name),
            place=place_of(eqn) if node is None else self.graph.place(node),
            scope=where(site.scope).path,
            policy="" if node is None else self.graph.policy(node),
            is_backward=site.is_backward,
            trips=tuple(zip(event.trips, map(place_of, site.loops), strict=True)),
            operands=tuple(numbers_of(x) for x in operands if is_inexact(x)),
            results=tuple(seen),
            loss_scale=scale,
            is_at_floor=self.is_at_floor(scale),
            cause=text + (_OR_SCALE if may_scale else ""),
            rule=rule,
        )

    def is_at_floor(self, scale: float | None) -> bool:
        """Whether this is the floor of the loss scale."""
        return self.scale is not None and scale == self.scale.floor

    def first_that_mends(self, rules: list[str], node: Node, scale: float | None) -> str:
        """Returns the first rule under which all is finite, else what the node makes; or none."""
        moving = ""
        for rule in rules:
            flow = self.under(rule, scale)
            if flow is not None and flow.found is None:
                return rule
            if flow is not None and not moving and self.is_elsewhere(node, flow):
                moving = rule
        return moving

    def under(self, rule: str, scale: float | None) -> Flow | None:
        """Replays the program with a rule at the end of its policy maps; None if it cannot run."""
        try:
            program = self.program.with_rules(parse_rule(rule))
        except (AssertionError, TypeError, ValueError):  # such as a loop whose carry would change
            return None
        return Replay(program).run(scale)

    def is_elsewhere(self, node: Node, flow: Flow) -> bool:
        """Whether a replay finds another operation, which does not read what the node makes."""
        other = flow.node(flow.found.site) if isinstance(flow.found, Event) else None
        if other is None:
            return False
        found = (other, _source(other).node)
        keys = [_key(flow.graph, each) for each in found if each is not None]
        return _key(self.graph, node) not in keys

    def cause_in_16_bits(self, flow: Flow, cause: Cause) -> Cause:
        """Returns the cause if all is finite once the whole program computes in float32."""
        values = (value for node in self.graph.nodes for value in node.results)
        if not any(is_narrow(value.dtype) for value in values):
            return cause
        wide = Search(self.program.jaxpr, run_widened, widened)
        if Flow(self.graph, wide, list(map(widened, flow.arrays))).found is not None:
            return cause
        return in_float32(f"{cause.reason}, because of numbers that 16 bits lost before")

    def given(self, flow: Flow, value: Value, scale: float | None) -> FirstNonfinite:
        """Describes an argument or a constant that is not finite."""
        is_input, numbers = value.kind == "input", numbers_of(flow.array(value))
        reader = value.readers[0] if value.readers and not is_input else None
        return FirstNonfinite(
            kind="NaN" if numbers.nans else "inf",
            given=self.program.names[value.index] if is_input else "a constant",
            place=None if reader is None else self.graph.place(reader),
            scope="" if reader is None else self.graph.path(reader),
            results=(numbers,),
            loss_scale=scale,
            is_at_floor=self.is_at_floor(scale),
            cause="The function was given it, and no rule mends it: look where it was made.",
        )


def _key(graph: Graph, node: Node) -> _Key:
    """Returns what identifies a node, in this program and in the same one with a rule."""
    return node.name, graph.place(node), graph.path(node), node.is_backward


def _source(node: Node) -> Value:
    """Returns the first operand of a node as it was computed; the node itself if it has none."""
    value = (node.operands or node.results)[0]
    while value.node is not None and value.node.name in HAND_ON:
        value = value.node.operands[0]
    return value
