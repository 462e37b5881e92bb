"""Evaluates a jaxpr, one equation after the other, each by the rule of its primitive."""

import contextlib
import copy
import itertools
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jmpx._autocast import pending
from jmpx._autocast.binding import run_as_traced, run_overridden
from jmpx._autocast.cuts import Role
from jmpx._autocast.layers import repeated, token
from jmpx._autocast.neighbours import NOTHING, Ends, Neighbours, find_neighbours, has_norms
from jmpx._autocast.pieces import Piece, find_layers, find_pieces, key_of, scopes_around
from jmpx._autocast.reads import number_dtypes, result_dtypes
from jmpx._autocast.regions import Regions
from jmpx._autocast.residuals import keeps_residuals
from jmpx._autocast.rules import InnerPlace, Operation, Retraced, lookup
from jmpx._autocast.saving import IN_PIECE, SAVED, OnValues, Saving, checkpoint, shared
from jmpx._autocast.value import Array, Traits, Value
from jmpx._autocast.warned import note_products
from jmpx._jaxprs import core
from jmpx._jaxprs.core import Atom, Equation, Jaxpr, operation_name
from jmpx._jaxprs.inner import holds, once_per_jaxpr
from jmpx._jaxprs.marks import is_marking, policy_mark, split_policy
from jmpx._jaxprs.places import note_source, place_of
from jmpx._jaxprs.scopes import FULL_PRECISION
from jmpx._policies.maps import PolicyMap


class _Frame(NamedTuple):
    """The evaluation of one jaxpr: the scope around it, its neighbours, and values by variables."""

    scope: str
    neighbours: Neighbours
    env: dict[Atom, Value]
    named: Collection[Atom] = ()  # results that a checkpoint saves by their name
    depth: int = 0  # how many of the scopes of each equation are around its operations already
    has_norms: bool = False  # whether there may be statistics or pending values; see `pending.py`
    repeated: Collection[Hashable] | None = None  # see `layers.repeated`; None: all may repeat

    def read(self, atom: Atom) -> Value:
        """Returns the value of an operand."""
        if core.is_literal(atom):
            return Value.of_constant(np.asarray(atom.val, atom.aval.dtype))
        return self.env[atom]


class Interpreter:
    """Evaluates jaxprs under a policy map; `used` tells what it has met. See also `Regions`."""

    def __init__(
        self, policy_map: PolicyMap, surrounding: str | None = None, saving: Saving | None = None
    ) -> None:
        self.saving = saving
        self.regions = Regions(policy_map, surrounding)
        self.used = self.regions.used
        self._checkpoints: dict[Hashable, OnValues] = {}  # by the keys of pieces

    def fresh(self) -> "Interpreter":
        """Returns an interpreter of the same policy map that has met nothing yet."""
        return Interpreter(self.regions.policy_map, self.regions.surrounding, self.saving)

    def _that_saves(self, saving: Saving | None) -> "Interpreter":
        """Returns an interpreter that notes what it meets here, and saves something else."""
        interpreter = copy.copy(self)
        interpreter.saving = saving
        if saving in (None, IN_PIECE):  # a piece has none inside, and must not keep itself alive
            interpreter._checkpoints = {}
        return interpreter

    def evaluate(
        self, jaxpr: Jaxpr, values: Sequence[Value], scope: str, ends: Ends = NOTHING
    ) -> list[Value]:
        """Runs a jaxpr, closed or open, in a scope; returns its results, of which `ends` tells."""
        env = dict(zip(jaxpr.invars, values, strict=True))
        for var, const in zip(jaxpr.constvars, core.consts_of(jaxpr), strict=False):
            env[var] = Value.of_constant(const)
            env[var].data = ends.has_data and env[var].array.size > 1

        read = number_dtypes(jaxpr, scope, self.regions, ends.read)
        is_norm = any(value.pending or value.statistic for value in values) or has_norms(jaxpr)
        is_plain, is_traced = core.looks_for_nans([v.array for v in values]), core.is_traced()
        often = repeated(jaxpr) if is_traced else None
        frame = _Frame(scope, find_neighbours(jaxpr, ends, read), env, (), 0, is_norm, often)
        pieces = [] if is_plain else self._pieces(jaxpr, is_traced)
        if not pieces:
            one_by_one = self._that_saves(None) if is_plain else self
            one_by_one._run(frame, jaxpr.eqns, core.last_uses(jaxpr))
        for piece in pieces:
            self._run_piece(frame, piece)
            for var in piece.last:
                env.pop(var, None)
        return [frame.read(atom) for atom in jaxpr.outvars]

    def _pieces(self, jaxpr: Jaxpr, is_traced: bool) -> list[Piece]:
        """Returns the pieces that a jaxpr runs in, if it does not run one by one."""
        if self.saving is None:  # eager operations would run in other programs, fused
            return find_layers(jaxpr) if is_traced else []
        return [] if self.saving == IN_PIECE else find_pieces(jaxpr, self.saving)

    def _run(
        self,
        frame: _Frame,
        equations: Sequence[Equation],
        last_uses: Iterable[Sequence[Atom]] | None = None,
    ) -> None:
        """Runs equations, and forgets after each the variables that nothing reads any more."""
        for equation, last in zip(equations, last_uses or itertools.repeat(()), strict=False):
            try:
                operation = self._operation(equation, frame)
                note_products(operation)
                results = _run(operation, frame.depth)
            except Exception as error:
                note_source(error, equation)
                raise
            if frame.has_norms:
                pending.note(operation, results)
            for result in results:
                result.data |= result.is_weak and any(v.data for v in operation.values)
            if equation.outvars and equation.outvars[0] in frame.named:
                results[0].array = checkpoint_name(results[0].array, SAVED)
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
        return pending.read(operation) if frame.has_norms else operation

    def _run_piece(self, frame: _Frame, piece: Piece) -> None:
        """Runs a piece; if products in it are saved or it repeats, as a function of its own."""
        if piece.role in (Role.PRODUCT, Role.ALIKE):
            self._run_shared(frame, piece)
            return
        if piece.role is Role.LEFT:
            self.used.left.add(place_of(piece.equations[0]))
        inside = piece.inside if piece.role is Role.INSIDE else None
        self._that_saves(inside)._run(frame, piece.equations)

    def _run_shared(self, frame: _Frame, piece: Piece) -> None:
        """Runs a piece as a function, as that of one that is alike if there is."""
        around, values = scopes_around(piece), [frame.env[var] for var in piece.inputs]
        inside = self._that_saves(None if self.saving is None else IN_PIECE)
        bare = frame._replace(env={}, named=piece.named, depth=len(around))

        def run(values: Sequence[Value]) -> list[Value]:
            inner = dict(zip(piece.inputs, values, strict=True))
            inside._run(bare._replace(env=inner), piece.equations)
            return [inner[var] for var in piece.outputs]

        last = set(piece.last)
        is_read = tuple(var not in last for var in piece.inputs)
        place = frame.scope, len(around), frame.neighbours, self.regions
        for value in values if self.saving else ():
            if value.pending:  # if nothing in the piece reads it in float32, that is not saved
                value.to(value.pending)
        key = self.saving, is_read, key_of(piece, values, *place)
        call = shared(run, values, is_read, checkpoint(self.saving) if self.saving else jax.jit)
        with contextlib.suppress(TypeError):  # a parameter of an equation has no hash
            call = self._checkpoints.setdefault(key, call)
        with core.within_scopes(around):
            frame.env.update(zip(piece.outputs, call(values), strict=True))

    def retrace(self, jaxpr: Jaxpr, values: Sequence[Value], place: InnerPlace) -> Retraced:
        """Traces the evaluation of a jaxpr, once for the same operands, place and policy map.

        Of the operands, only their traits count.
        """
        traits = tuple(value.traits for value in values)
        around = self.regions.policy_map, self.regions.surrounding, self.saving
        retraced = _retraced(jaxpr, traits, place, is_marking(), *around)
        self.used.add(retraced.used)
        return retraced


# A function that was jitted once has one jaxpr; retraced once, it is compiled once.
@once_per_jaxpr
def _retraced(
    jaxpr: Jaxpr, traits: Sequence[Traits], place: InnerPlace, has_marks: bool, *around: Any
) -> Retraced:
    del has_marks  # JAX's traces differ by it
    interpreter, num_uncast = Interpreter(*around), place.num_uncast
    results: list[Traits] = []

    def on_arrays(*arrays: Array) -> list[Array]:
        inputs = [Value.of(array, each) for array, each in zip(arrays, traits, strict=False)]
        if place.has_rounded:
            pairs = zip((v for v in inputs if v.pending), arrays[len(traits) :], strict=True)
            for value, array in pairs:
                value.casts[array.dtype, False] = array
        for i in range(num_uncast):
            inputs[i] = Value.of(inputs[i].to(traits[i].dtype), traits[i])
        outputs = interpreter.evaluate(jaxpr, inputs, place.scope, place.ends)
        for i, dtype in enumerate(place.result_dtypes):
            outputs[i] = Value.of(outputs[i].to_finite(dtype), outputs[i].traits)
        if place.rounds:
            outputs = [
                Value(v.to(v.pending), False, v.tangent) if v.pending else v for v in outputs
            ]
        results[:] = [output.traits for output in outputs]
        return [output.array for output in outputs]

    avals = [
        var.aval if i < num_uncast else core.with_dtype(var.aval, each.dtype)
        for i, (var, each) in enumerate(zip(jaxpr.invars, traits, strict=True))
    ]
    if place.has_rounded:
        pairs = zip(avals, traits, strict=True)
        avals += [core.with_dtype(aval, each.pending) for aval, each in pairs if each.pending]
    return Retraced(jax.make_jaxpr(on_arrays)(*avals), results, interpreter.used)


def _run(operation: Operation, depth: int) -> list[Value]:
    """Runs an operation in its scopes and at its line of the user's code."""
    # An autocast around this one must leave in float32 what this one runs in float32.
    scopes = [FULL_PRECISION] if operation.dtype.itemsize >= 4 else []
    if is_marking() and not split_policy(core.scope_of(operation.equation))[1]:
        scopes.append(policy_mark(operation.region.policy))
    with core.at_source_of(operation.equation, *scopes, depth=depth):
        return _apply_rule(operation)


def _apply_rule(operation: Operation) -> list[Value]:
    """Runs an operation by the first that applies; `jmpx.full_precision` marks a fixed region."""
    entry, region = lookup(operation.equation), operation.region
    if entry is not None and entry.everywhere:
        is_saved = (
            operation.in_piece and region.is_fixed and holds(operation.equation, keeps_residuals)
        )
        if is_saved or not region.is_fixed:
            return entry.rule(operation)
    if region.is_fixed:
        return run_as_traced(operation, is_weak=False)
    if operation.override is not None:
        return run_overridden(operation, operation.override)
    if region.is_full:
        return run_as_traced(operation, is_weak=region.is_weak)
    return run_as_traced(operation, is_weak=True) if entry is None else entry.rule(operation)
