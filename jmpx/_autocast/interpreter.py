"""Evaluates a jaxpr, each equation by its rule; rounds the float32 results of a norm."""

import copy
import dataclasses
import itertools
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jmpx._autocast import eight_bits
from jmpx._autocast.binding import number_dtypes, result_dtypes, run_as_traced, run_overridden
from jmpx._autocast.kinds import full, keep, low, saturating
from jmpx._autocast.layers import OnValues, find_layers, key_of, repeated, said_of, shared, token
from jmpx._autocast.neighbours import NOTHING, SUMS, Ends, Neighbours, find_neighbours, has_norms
from jmpx._autocast.rules import Operation, Retraced, Retracing, is_float32, lookup
from jmpx._autocast.value import BFLOAT16, FLOAT32, LOW, Array, Regions, Traits, Value
from jmpx._autocast.warned import note_products
from jmpx._base.contexts import INSPECTED, fact
from jmpx._jaxprs import core
from jmpx._jaxprs.core import Atom, Equation, Jaxpr, operation_name
from jmpx._jaxprs.equations import IDENTITIES, JOINS, PICKS, PLACEMENTS, RESHAPES, note_source
from jmpx._jaxprs.inner import CHECKPOINT, Piece, any_holds, kind, once_per_jaxpr, scopes_around
from jmpx._jaxprs.marks import FULL_PRECISION, WHY, is_marking, policy_mark, split_policy
from jmpx._policies.maps import PolicyMap
from jmpx._policies.registry import any_class_has_a_policy

# Where a norm ends: statistics, and results that are pending until an equation reads them.


_SCALING = frozenset("sub mul div".split())
_AFFINE = frozenset("add sub mul div neg add_any".split())
# Results of these on statistics are statistics. Logarithms are left out: a softmax subtracts one,
# which must not be rounded.
_OF_STATISTICS = frozenset(
    """
    add sub mul div neg add_any max min clamp abs sqrt rsqrt square integer_pow pow select_n
    psum psum_invariant convert_element_type
    """.split()
)
_OF_STATISTICS |= RESHAPES | PICKS | JOINS | IDENTITIES | PLACEMENTS
_KNOWN = _AFFINE | SUMS | _OF_STATISTICS
# Results of these have the numbers of their operand in its order; all of them, if sizes are equal.
_SHAPES = (RESHAPES | PICKS) - {"transpose", "rev"}
# These read a pending operand in float32: products, roots and choices of the largest numbers.
_WIDE = frozenset(
    "dot_general get swap sqrt cbrt reduce_max reduce_min top_k approx_top_k sort".split()
)


def read_pending(operation: Operation) -> Operation:
    """Returns an operation whose pending operands are rounded, unless it reads them in float32."""
    operation = _with_running_statistics(operation)
    if not any(value.pending for value in operation.values):
        return operation
    return operation._replace(
        values=[
            Value(value.to(value.pending), is_weak=False, tangent=value.tangent)
            if value.pending and not _reads_float32(operation, i)
            else value
            for i, value in enumerate(operation.values)
        ]
    )


def note_pending(operation: Operation, results: Sequence[Value]) -> None:
    """Notes which results of an operation are pending, and which are statistics."""
    name, values = operation.name, operation.values
    if name not in _KNOWN or not _is_default(operation):
        return
    first = results[0]
    if first.dtype != FLOAT32 or first.is_weak:
        return
    dtype = values[0].pending if _keeps_all(operation) else _affine_dtype(operation)
    if dtype is not None:
        first.pending = dtype
    elif name in SUMS and first.array.size < values[0].array.size:
        first.statistic = first.array.size
    elif name in _OF_STATISTICS:
        floats = operation.float32_values
        if all(value.statistic or value.is_weak for value in floats):
            for result in results:
                result.statistic = max((value.statistic for value in floats), default=0)


def _is_default(operation: Operation) -> bool:
    """Whether no policy rule gives the operation float32, or its primitive any dtype."""
    return not operation.region.is_full and operation.override is None


def _keeps_all(operation: Operation) -> bool:
    """Whether the result holds all numbers of its operand, in their order."""
    if operation.name not in _SHAPES:
        return False
    return operation.result.aval.size == operation.values[0].array.size


def _affine_dtype(operation: Operation) -> np.dtype | None:
    """Returns the dtype in which the result of a step of a norm is pending, None for another.

    One operand is the array that is normalized, in 16 bits or pending. The others are weak, or
    statistics.
    """
    name, values, neighbours = operation.name, operation.values, operation.neighbours
    if name not in _AFFINE or not all(map(is_float32, operation.equation.invars)):
        return None
    if neighbours.multiplied is None or operation.result not in neighbours.multiplied:
        return None
    dtypes = [value.pending or (None if value.is_weak else value.dtype) for value in values]
    active = [i for i, dtype in enumerate(dtypes) if dtype == BFLOAT16]
    if len(active) != 1 or (name == "div" and active != [0]):
        return None
    (array,), size = (values[i] for i in active), operation.result.aval.size
    others = [value for value in values if value is not array]
    if not all(value.is_weak or 0 < value.statistic < size for value in others):
        return None
    is_step = array.pending or any(not value.is_weak for value in others)
    return BFLOAT16 if is_step else None


def _reads_float32(operation: Operation, i: int) -> bool:
    """Whether an operation reads a pending operand as float32."""
    name, equation, neighbours = operation.name, operation.equation, operation.neighbours
    entry = lookup(equation)
    if name == "custom_jvp_call":
        return any_holds(equation.params["call_jaxpr"], _begins_in_float32)
    if name == "scan" and i >= sum(core.scan_counts(equation)):
        return equation.params["length"] == 1
    if entry is None or entry.everywhere:
        return True
    if not _is_default(operation) or entry.rule in (full, keep, low) or name in _WIDE:
        return True
    is_wide = any(
        value.dtype == FLOAT32 and not value.is_weak and not value.pending
        for value in operation.float32_values
    )
    if is_wide or operation.result in neighbours.choices:  # a choice rounds as the maximum did
        return is_wide
    return (
        not any(var in (neighbours.multiplied or ()) for var in equation.outvars)
        or not is_float32(operation.result)
        or _keeps_all(operation)
        or _affine_dtype(operation) is not None
        or operation.result in neighbours.statistics
        or (name == "mul" and operation.result in neighbours.summed)
        or (name == "div" and i == 1)
        or (entry.rule is saturating and operation.is_exposed)
    )


def _begins_in_float32(equation: Equation) -> bool:
    """Whether a function with this equation may read a pending operand in float32."""
    entry = lookup(equation)
    is_wide = entry is None or entry.rule in (full, keep)
    return is_wide or operation_name(equation.primitive.name) in _AFFINE


def _with_running_statistics(operation: Operation) -> Operation:
    """Returns a step of a norm in which running statistics are not weak, as those of a batch.

    They are inputs, which are weak, and would be rounded to the dtype of the array.
    """
    normalized, equation = operation.neighbours.normalized, operation.equation
    if not normalized or operation.name not in _SCALING or not _is_default(operation):
        return operation
    # The mean in `(x - mean) * root`, and the scale and the root in `x * scale * root`.
    atoms = equation.outvars if operation.name == "sub" else (*equation.invars, *equation.outvars)
    if not any(not core.is_literal(atom) and atom in normalized for atom in atoms):
        return operation
    if not any(value.dtype in LOW or value.pending for value in operation.values):
        return operation
    return operation._replace(
        values=[
            dataclasses.replace(value, is_weak=False, data=False, source=None, statistic=1)
            if value.dtype == FLOAT32 and value.is_weak and value.array.size > 1
            else value
            for value in operation.values
        ]
    )


# The evaluation of a jaxpr, one equation after the other.


class _Frame(NamedTuple):
    """The evaluation of one jaxpr: the scope around it, its neighbours, and values by variables."""

    scope: str
    neighbours: Neighbours
    env: dict[Atom, Value]
    depth: int = 0  # how many of the scopes of each equation are around its operations already
    has_norms: bool = False  # whether there may be statistics or pending values; see `read_pending`
    repeated: Collection[Hashable] | None = None  # see `layers.repeated`; None: all may repeat

    def read(self, atom: Atom) -> Value:
        """Returns the value of an operand."""
        if core.is_literal(atom):
            return Value.of_constant(np.asarray(atom.val, atom.aval.dtype))
        return self.env[atom]


class Interpreter:
    """Evaluates jaxprs under a policy map; `used` has what it met. See also `Regions`."""

    def __init__(self, policy_map: PolicyMap, surrounding: str | None = None) -> None:
        self.regions = Regions(policy_map, surrounding)
        self.used = self.regions.used
        self._shared: dict[Hashable, OnValues] = {}  # by the keys of pieces
        self._alike: dict[Hashable, tuple[Jaxpr, str]] = {}  # by the keys of jaxprs and scopes

    def fresh(self) -> "Interpreter":
        """Returns an interpreter of the same policy map that has met nothing yet."""
        return Interpreter(self.regions.policy_map, self.regions.surrounding)

    def evaluate(
        self, jaxpr: Jaxpr, values: Sequence[Value], scope: str, ends: Ends = NOTHING
    ) -> list[Value]:
        """Runs a jaxpr, closed or open, in a scope; `ends` says how its results are used."""
        env = dict(zip(jaxpr.invars, values, strict=True))
        for var, const in zip(jaxpr.constvars, core.consts_of(jaxpr), strict=False):
            env[var] = Value.of_constant(const)
            env[var].data = ends.has_data and env[var].array.size > 1

        read = number_dtypes(jaxpr, scope, self.regions, ends.read)
        is_norm = any(value.pending or value.statistic for value in values) or has_norms(jaxpr)
        is_plain, is_traced = core.looks_for_nans([v.array for v in values]), core.is_traced()
        often = repeated(jaxpr) if is_traced else None
        frame = _Frame(scope, find_neighbours(jaxpr, ends, read), env, 0, is_norm, often)
        # Not if eager: a jitted piece would fuse operations that run one by one without autocast.
        pieces = find_layers(jaxpr) if is_traced and not is_plain else []
        if not pieces:
            self._run(frame, jaxpr.eqns, core.last_uses(jaxpr))
        for repeats, piece in pieces:
            if repeats:
                self._run_shared(frame, piece)
            else:
                self._run(frame, piece.equations)
            for var in piece.last:
                env.pop(var, None)
        return [frame.read(atom) for atom in jaxpr.outvars]

    def _run(
        self,
        frame: _Frame,
        equations: Sequence[Equation],
        last_uses: Iterable[Sequence[Atom]] | None = None,
    ) -> None:
        """Runs equations, and forgets after each the variables whose last use it was."""
        for equation, last in zip(equations, last_uses or itertools.repeat(()), strict=False):
            try:
                operation = self._operation(equation, frame)
                note_products(operation)
                results = _run(operation, frame.depth)
            except Exception as error:
                note_source(error, equation)
                raise
            if frame.has_norms:
                note_pending(operation, results)
            for result in results:
                result.data |= result.is_weak and any(v.data for v in operation.values)
            frame.env.update(zip(equation.outvars, results, strict=True))
            for var in last:
                del frame.env[var]

    def _operation(self, equation: Equation, frame: _Frame) -> Operation:
        name = operation_name(equation.primitive.name)
        scope, _ = split_policy(core.scope_within(frame.scope, equation))
        values = [frame.read(atom) for atom in equation.invars]
        if frame.neighbours.is_last(equation):
            values = [value.kept() for value in values]
        region = self.regions.region(scope)
        override = self.regions.override(name, region)
        self.used.operations.add(name)
        neighbours = frame.neighbours
        read = tuple(result_dtypes(equation, neighbours.read, scope, self.regions))
        is_single = frame.repeated is not None and token(equation) not in frame.repeated
        around = scope, region, override
        operation = Operation(equation, values, self, *around, neighbours, read, is_single)
        return read_pending(operation) if frame.has_norms else operation

    def _run_shared(self, frame: _Frame, piece: Piece) -> None:
        """Runs a piece as a jitted function; reuses the function of an equal piece."""
        around, values = scopes_around(piece), [frame.env[var] for var in piece.inputs]
        inside = copy.copy(self)
        inside._shared, inside._alike = {}, {}  # a piece must not keep itself alive
        bare = frame._replace(env={}, depth=len(around))

        def run(values: Sequence[Value]) -> list[Value]:
            inner = dict(zip(piece.inputs, values, strict=True))
            inside._run(bare._replace(env=inner), piece.equations)
            return [inner[var] for var in piece.outputs]

        last = set(piece.last)
        is_read = tuple(var not in last for var in piece.inputs)
        place = frame.scope, len(around), frame.neighbours, self.regions
        key, call = (is_read, key_of(piece, values, *place)), shared(run, values, is_read)
        call = self._shared.setdefault(key, call)
        with core.within_scopes(around):
            frame.env.update(zip(piece.outputs, call(values), strict=True))

    def alike(self, jaxpr: Jaxpr, scope: str) -> tuple[Jaxpr, str]:
        """Returns the first jaxpr and scope given here that do the same.

        Checkpoints around equal layers that are written out have jaxprs of their own.
        """
        said: Hashable = self.regions.region(scope)
        if self.regions.policy_map.rules or any_class_has_a_policy():
            said = tuple(said_of(jaxpr.eqns, scope, self.regions))
        return self._alike.setdefault((kind(jaxpr), said), (jaxpr, scope))

    def retrace(self, jaxpr: Jaxpr, values: Sequence[Value], how: Retracing) -> Retraced:
        """Traces the evaluation of a jaxpr, once for the same traits, manner and policy map."""
        traits = tuple(value.traits for value in values)
        around = self.regions.policy_map, self.regions.surrounding
        seen = is_marking(), fact(INSPECTED)
        retraced = _retraced(jaxpr, traits, how, seen, *around)
        self.used.add(retraced.used)
        return retraced


# The calls of one jitted function share a jaxpr: retraced once, it is compiled once.
@once_per_jaxpr
def _retraced(
    jaxpr: Jaxpr, traits: Sequence[Traits], how: Retracing, seen: Hashable, *around: Any
) -> Retraced:
    del seen  # a key of the cache: a tool sees another program, with marks
    interpreter, num_uncast = Interpreter(*around), how.num_uncast
    results: list[Traits] = []

    def on_arrays(*arrays: Array) -> list[Array]:
        inputs = [Value.of(array, each) for array, each in zip(arrays, traits, strict=False)]
        if how.has_rounded:
            pairs = zip((v for v in inputs if v.pending), arrays[len(traits) :], strict=True)
            for value, array in pairs:
                value.casts[array.dtype, False] = array
        for i in range(num_uncast):
            inputs[i] = Value.of(inputs[i].to(traits[i].dtype), traits[i])
        outputs = interpreter.evaluate(jaxpr, inputs, how.scope, how.ends)
        for i, dtype in enumerate(how.result_dtypes):
            outputs[i] = Value.of(outputs[i].to_finite(dtype), outputs[i].traits)
        if how.rounds:
            outputs = [
                Value(v.to(v.pending), False, v.tangent) if v.pending else v for v in outputs
            ]
        results[:] = [output.traits for output in outputs]
        return [output.array for output in outputs]

    avals = [
        var.aval if i < num_uncast else core.with_dtype(var.aval, each.dtype)
        for i, (var, each) in enumerate(zip(jaxpr.invars, traits, strict=True))
    ]
    if how.has_rounded:
        pairs = zip(avals, traits, strict=True)
        avals += [core.with_dtype(aval, each.pending) for aval, each in pairs if each.pending]
    return Retraced(jax.make_jaxpr(on_arrays)(*avals), results, interpreter.used)


def _run(operation: Operation, depth: int) -> list[Value]:
    """Runs an operation in its scopes and at its line of the user's code."""
    # An autocast around this one must not cast down operations that this one runs in float32.
    scopes = [FULL_PRECISION] if operation.dtype.itemsize >= 4 else []
    equation, region = operation.equation, operation.region
    # The equations inside a checkpoint are marked where they are evaluated.
    is_around = equation.primitive.name == CHECKPOINT and not region.is_fixed
    if is_marking() and not is_around and not split_policy(core.scope_of(equation))[1]:
        why = eight_bits.why_not(operation)
        scopes.append(policy_mark(f"{region.policy}{WHY}{why}" if why else region.policy))
    with core.at_source_of(equation, *scopes, depth=depth):
        return _apply_rule(operation)


def _apply_rule(operation: Operation) -> list[Value]:
    """Runs an operation. Order: everywhere rule, fixed region, override, float32 region, rule."""
    entry, region = lookup(operation.equation), operation.region
    if entry is not None and entry.everywhere and not region.is_fixed:
        return entry.rule(operation)
    if region.is_fixed:
        return run_as_traced(operation, is_weak=False)
    if operation.override is not None:
        return run_overridden(operation, operation.override)
    if region.is_full:
        return run_as_traced(operation, is_weak=region.is_weak)
    return run_as_traced(operation, is_weak=True) if entry is None else entry.rule(operation)
