"""The public function `jmpx.inspect.first_nonfinite(fn)(*args)`: causes, rules and replays."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Never

import jax
import jax.numpy as jnp
import numpy as np

from jmpx._base.contexts import RUN
from jmpx._base.trees import PyTree
from jmpx._inspect.first_nonfinite.report import FirstNonfinite, Trip, numbers_of
from jmpx._inspect.first_nonfinite.search import HAND_ON, Event, Flow, Search, is_inexact
from jmpx._inspect.graph import Graph, Node, Value, before
from jmpx._inspect.programs import Program, name_of, traced_program
from jmpx._inspect.running import (
    is_low,
    is_narrow,
    progress,
    run_widened,
    scale_text,
    widened,
    with_arrays,
)
from jmpx._inspect.text import refuse_arguments
from jmpx._jaxprs.core import Array, operation_name
from jmpx._jaxprs.equations import place_of
from jmpx._policies.map_strings import parse_rule
from jmpx._scales.kinds import DynamicLossScale


def first_nonfinite(
    fn: Callable[..., object], *args: Never
) -> Callable[..., FirstNonfinite | None]:
    """Finds the operation that makes the first infinity or NaN, and the rule that fixes it.

    It runs the function once, equation by equation in one compiled program, and checks each
    result. Then it follows infinities and NaNs from the results back to their origin, through
    loops, jitted functions and the backward pass. An infinity that reaches no result is not
    reported: exp(-inf) of a mask is 0, and `jnp.where` may drop a log(0). A rule is reported only
    if the infinity is gone when the function runs with it; at most six are tried. Compiled
    programs are kept for a while, without arrays, for a step that does the same.

    `jax_debug_nans` stops at each overflow, even at those that a dynamic loss scale expects. This
    replays a step that was skipped: see `docs/nonfinite.md`.

    Args:
        fn: a loss, which is differentiated in its first argument: it returns a floating scalar, or
            a tuple that begins with one. Or a step that computes its own gradients: gradients
            that it checks, as `jmpx.all_finite` does, count as results. Any other function runs as
            it is. Nothing is printed, and the modules among its arguments stay as they are.
        *args: none: the function that is returned takes the arguments of `fn`.

    Returns:
        A function of the arguments of `fn` that returns a `jmpx.inspect.FirstNonfinite`, which
        prints the operation, its line, module, operands and fix; or None if all results are
        finite.

    Raises:
        TypeError: if the arguments of `fn` are given beside it; when called, if `fn` is not
            callable, or an argument is a shape or traced.
        ValueError: when called, if `fn` is a loss whose first argument holds no floating array.

    Example:
        >>> import jax.numpy as jnp
        >>> import jmpx
        >>> def loss_fn(params, x):
        ...     logits = x @ params["w"]
        ...     return jnp.exp(logits).mean()
        >>> loss_fn = jmpx.autocast(loss_fn, "c=f16; op.exp: f16")
        >>> params = {"w": jnp.ones((2, 3))}
        >>> found = jmpx.inspect.first_nonfinite(loss_fn)(params, 6 * jnp.ones((4, 2)))
        >>> found.operation, found.place.function, found.rule
        ('exp', 'loss_fn', 'op.exp: f32')
        >>> print(found.results[0], found.results[0].infs)
        float16[4,3], 12 inf 12
    """
    refuse_arguments("first_nonfinite", args)

    @functools.wraps(fn, updated=(), assigned=("__name__", "__qualname__", "__module__"))
    def run(*args: PyTree, **kwargs: PyTree) -> FirstNonfinite | None:
        with progress(f"looking for the first infinity or NaN of {name_of(fn)}", None):
            return found_in(traced_program(fn, args, kwargs, purpose=RUN))

    return run


def found_in(program: Program) -> FirstNonfinite | None:
    """Returns what `first_nonfinite` finds in a program."""
    program = with_arrays(program, "jmpx.inspect.first_nonfinite")
    with jax.debug_nans(False), jax.debug_infs(False):  # They would raise during the search.
        return Replay(program).find()


# --- Why an operation makes an infinity or a NaN ---


class Cause(NamedTuple):
    """Why a number is not finite, in sentences without their full stops."""

    reason: str
    remedy: str
    in_code: str = ""  # the cast to write, if float32 fixes it

    def text(self, rule: str, is_tried: bool) -> str:
        """Returns both sentences, given the rule that fixed it, or whether any were tried."""
        how = _ANYWHERE if rule.startswith("op.") else ""
        if self.in_code and not rule:
            how = f"{', but no rule mends it' if is_tried else ''}: {self.in_code}"
        return f"{self.reason}. {self.remedy}{how}."


_ANYWHERE = (
    ": by operations, the rule is for all such operations; to select this one, name its line by "
    "jax.named_scope"
)
_UNCAST = "keep it in float32, or write jnp.finfo(x.dtype).min if it is a mask"
_GUARD = (
    "No dtype of its own mends it: clip what it reads, or add a small number, one that the dtype "
    "holds (1e-8 is zero in float16: write 1e-4), before it; jnp.where after it is too late"
)
_SCALE_DOWN = (
    "No rule mends it: make what it reads smaller, by a norm or a smaller learning rate; of what "
    "exp reads, subtract the largest number first, as jax.nn.softmax does"
)
# operation -> whether an operand is out of range, and what the operation does then
_OUT_OF_RANGE = {
    "div": (lambda x: x == 0, "divides by zero"),
    "integer_pow": (lambda x: x == 0, "divides by zero"),
    "log": (lambda x: x <= 0, "reads zero or less"),
    "log1p": (lambda x: x <= -1, "reads -1 or less"),
    "pow": (lambda x: x <= 0, "raises zero or less to a power"),
    "rsqrt": (lambda x: x <= 0, "reads zero or less"),
    "sqrt": (lambda x: x < 0, "reads less than zero"),
}


def cause_of_event(event: Event, operands: Sequence[Array], results: Sequence[Array]) -> Cause:
    """Returns why an equation made an infinity or a NaN; operands such as random keys are None."""
    name = operation_name(event.site.equation.primitive.name)
    if not event.is_made:
        return Cause(
            "It makes a NaN of intentional infinities, as in a row that a mask of -inf masks as a "
            "whole",
            "No dtype mends it: mask by jnp.finfo(x.dtype).min, or leave a number in each row",
        )
    largest = _largest_in_float32(event, operands)
    if largest is None:
        return _of_numbers(name, operands, results)
    dtypes = (x.dtype for x in (*results, *operands) if is_inexact(x))
    limits = jnp.finfo(next(filter(is_narrow, dtypes)))
    beyond = f"beyond {limits.dtype}, whose largest number is {float(limits.max):g}"
    reason = f"It gives up to {largest:.4g}, {beyond}"
    return in_float32(reason, _UNCAST) if name == "convert_element_type" else in_float32(reason)


def in_float32(reason: str, in_code: str = "cast what it reads with .astype(jnp.float32)") -> Cause:
    """Returns the cause of an infinity or a NaN that float32 fixes."""
    return Cause(reason, "In float32 it is finite", in_code)


def _largest_in_float32(event: Event, operands: Sequence[Array]) -> float | None:
    """Returns the largest magnitude of the results in float32; None if float32 does not help."""
    eqn = event.site.equation
    if not any(map(is_low, (*eqn.invars, *eqn.outvars))) or any(x is None for x in operands):
        return None
    try:
        results = run_widened(eqn, list(map(widened, operands)))
    except NameError:  # JAX's error for an axis that is mapped only inside of the program
        return None
    found = [numbers_of(result) for result in results if is_inexact(result)]
    if any(each.is_broken for each in found):
        return None
    return max((each.largest or 0.0 for each in found), default=None)


def _of_numbers(name: str, operands: Sequence[Array], results: Sequence[Array]) -> Cause:
    """Returns the cause of an infinity or a NaN that float32 does not fix."""
    result = next(np.asarray(x) for x in results if is_inexact(x) and numbers_of(x).is_broken)
    is_bad, what = _OUT_OF_RANGE.get(name, (np.isnan, ""))
    operand = np.asarray(operands[name == "div"])
    if what and not np.iscomplexobj(operand) and (is_bad(operand) & ~np.isfinite(result)).any():
        return Cause(f"It {what}, here or in a derivative", _GUARD)
    if np.isnan(result).any():
        return Cause("It makes a NaN of finite numbers", _GUARD)
    beyond = f"{result.dtype}'s largest number, {jnp.finfo(result.dtype).max:.3g}"
    return Cause(f"It gives more than {beyond}", _SCALE_DOWN)


# --- Rules that may fix it ---

_MOST = 6  # how many rules are tried; for each the program is compiled once more
_FARTHEST = 32  # how many operations before it are searched


def rules_for(graph: Graph, node: Node) -> list[str]:
    """Returns rules for a node and for the nodes before it, the nearest first.

    There are none unless a function of the program took a policy map.
    """
    program = graph.program
    if not program.mapped_by:
        return []
    behind = Graph.back(node.results[:1], lambda each: each.operands, _FARTHEST)
    narrow = (n for n in behind if any(is_narrow(v.dtype) for v in (*n.operands, *n.results)))
    rules = (text for each in narrow for text in _of_node(each, program.uses_autocast))
    found = [text for text in dict.fromkeys(rules) if not graph.selects_all(parse_rule(text))]
    return found[:_MOST]


def _of_node(node: Node, is_autocast: bool) -> Iterator[str]:
    select, module = node.selector, node.module
    if select is not None and (module is not None or is_autocast):
        yield f"{select}: f32"
        # Without `o=`, the module returns the output dtype of the map, which may overflow.
        if module is not None and not is_autocast and not node.is_backward:
            yield f"{select}: c=f32,o=f32"
    # Rules for operations act on operations of the forward pass that autocast computes.
    is_computed = node.name not in HAND_ON | {"convert_element_type"} and not node.is_structure
    if is_autocast and is_computed and not node.is_backward:
        yield f"op.{node.name}: f32"


# --- Replays: at several loss scales, and with rules ---

_OR_SCALE = (
    " Or lower the loss scale if there is one: a jmpx.DynamicLossScale among the arguments shows "
    "by how much."
)


class _Scale(NamedTuple):
    """The loss scale of a step."""

    number: float  # the largest of a stack
    floor: float  # its minimum
    indices: tuple[int, ...]  # the inputs of the program that hold it


def _scale_of(program: Program) -> _Scale | None:
    """Returns the dynamic loss scale among the arguments; None without one that is unique."""
    is_scale = lambda leaf: isinstance(leaf, DynamicLossScale)  # noqa: E731
    call = program.call
    leaves = jax.tree.leaves((call.fn, call.args, call.kwargs), is_leaf=is_scale)
    found = [leaf for leaf in leaves if is_scale(leaf) and np.size(leaf.loss_scale)]
    numbers = {float(np.max(scale.loss_scale)) for scale in found}
    named = [i for i, name in enumerate(program.names) if name.endswith(".loss_scale")]
    indices = tuple(i for i in named if float(np.max(program.arrays[i], initial=0)) in numbers)
    if len(numbers) != 1 or not indices:
        return None
    floor = max(float(np.max(scale.min_loss_scale)) for scale in found)
    return _Scale(numbers.pop(), floor, indices)


class Replay:
    """A program that is run to find its first infinity or NaN."""

    def __init__(self, program: Program) -> None:
        self.program, self.graph = program, Graph(program)
        self.search, self.scale = Search(program.jaxpr), _scale_of(program)

    def run(self, number: float | None = None) -> Flow:
        """Runs the program once, with this number as the loss scale if it has one."""
        arrays = list(self.program.arrays)
        for i in self.scale.indices if self.scale and number is not None else ():
            arrays[i] = np.full(arrays[i].shape, number, arrays[i].dtype)
        return Flow(self.graph, self.search, arrays)

    def find(self) -> FirstNonfinite | None:
        """Returns the report; None if all results are finite."""
        scale, flow = self.scale, self.run()
        if scale is None or scale.number <= scale.floor or flow.found is None:
            return self.describe(flow, scale and scale.number)
        lower = self.run(scale.floor)
        if lower.found is not None:  # No scale fixes it: the report is about this run.
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
        if flow.found is None:
            return None
        if isinstance(flow.found, Event):
            report = self.made(flow, flow.found, scale, cause, rule)
        else:
            report = self.given(flow, flow.found)
        is_at_floor = self.scale is not None and scale == self.scale.floor
        return dataclasses.replace(report, loss_scale=scale, is_at_floor=is_at_floor)

    def made(
        self, flow: Flow, event: Event, scale: float | None, cause: Cause | None, rule: str
    ) -> FirstNonfinite:
        """Describes an operation that made an infinity or a NaN."""
        node = self.graph.by_key[event.site.key]
        operands, results = flow.search.operands_of(event, flow.arrays)
        rules: list[str] = []
        if cause is None:
            cause = cause_of_event(event, operands, results)
            if event.is_made and not cause.in_code:
                cause = self.cause_in_16_bits(flow, cause)
            if cause.in_code:
                rules = rules_for(self.graph, node)
                rule = self.first_that_fixes(rules, node, scale)
        text = cause.text(rule, bool(rules))
        may_scale = self.scale is None and node.is_backward and cause.in_code
        seen = [numbers_of(x) for x in results if is_inexact(x)]
        return FirstNonfinite(
            kind="inf" if any(each.infs for each in seen) else "NaN",
            operation=node.name,
            place=node.place,
            scope=node.path,
            policy=self.graph.policy(node),
            is_backward=node.is_backward,
            trips=tuple(map(Trip, event.trips, map(place_of, event.site.loops))),
            operands=tuple(numbers_of(x) for x in operands if is_inexact(x)),
            results=tuple(seen),
            cause=text + (_OR_SCALE if may_scale else ""),
            rule=rule,
        )

    def first_that_fixes(self, rules: list[str], node: Node, scale: float | None) -> str:
        """Returns the first rule under which all results are finite.

        Else it is the first one under which another operation is found; empty if there is none.
        A rule for all operations of a name is no better than one that mends a module or a scope.
        """
        moving = ""
        for rule in rules:
            if moving and rule.startswith("op."):
                break
            try:
                program = self.program.with_rules(parse_rule(rule))
            except (AssertionError, TypeError, ValueError):  # as of a loop whose carry would change
                continue
            flow = Replay(program).run(scale)
            if flow.found is None:
                return rule
            if not moving and self.is_elsewhere(node, flow):
                moving = rule
        return moving

    def is_elsewhere(self, node: Node, flow: Flow) -> bool:
        """Whether a replay finds another operation, which does not read results of the node."""
        if not isinstance(flow.found, Event):
            return False
        other = flow.graph.by_key[flow.found.site.key]
        source = before((other.operands or other.results)[0], HAND_ON)
        found = [_identity(each) for each in (other, source.node) if each is not None]
        return _identity(node) not in found

    def cause_in_16_bits(self, flow: Flow, cause: Cause) -> Cause:
        """Returns the cause if all is finite once the whole program computes in float32."""
        values = (value for node in self.graph.nodes for value in node.results)
        if not any(is_narrow(value.dtype) for value in values):
            return cause
        wide = Search(self.program.jaxpr, run_widened, widened)
        if Flow(self.graph, wide, list(map(widened, flow.arrays))).found is not None:
            return cause
        return in_float32(f"{cause.reason}, because of numbers that 16 bits lost before")

    def given(self, flow: Flow, value: Value) -> FirstNonfinite:
        """Describes an argument or a constant that is not finite."""
        is_input, numbers = value.kind == "input", numbers_of(flow.array(value))
        reader = value.readers[0] if value.readers and not is_input else None
        return FirstNonfinite(
            kind="NaN" if numbers.nans else "inf",
            given=self.program.names[value.index] if is_input else "a constant",
            place=None if reader is None else reader.place,
            scope="" if reader is None else reader.path,
            results=(numbers,),
            cause="The function was given it, and no rule mends it: look where it was made.",
        )


def _identity(node: Node) -> tuple[object, ...]:
    """Returns properties of a node that are the same in a trace of the program with a rule."""
    return node.name, node.place, node.path, node.is_backward
