"""Autocast's second run: a jaxpr, one equation after the other, in the dtypes of the rules.

`_operations.py` holds the rules of operations; a policy map adds those of scopes, and overrides.
"""

import functools
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero, zero_from_primal

from jmpx import _jaxpr
from jmpx._marks import is_marking, is_own_name, module_of, without_marks
from jmpx._operations import (
    CHOICES,
    COPIES,
    ELEMENTWISE,
    FEEDS,
    HIGHER_ORDER,
    KINDS,
    Kind,
    operation_name,
)
from jmpx._policy_map import PolicyMap, Rule
from jmpx._scopes import FULL_PRECISION
from jmpx._values import FLOAT32, Traits, Value, join, saturated

RESTORE = "jmpx.restore"  # the scope of the casts that give results their traced dtypes back
_MARKED = sys.maxsize  # the rank of a `full_precision` region: no rule overrides it


def _is_float32(atom: Any) -> bool:
    """Whether an operand or a result was float32 when traced: all else keeps its dtype."""
    return getattr(atom.aval, "dtype", None) == FLOAT32


def _is_floating(atom: Any) -> bool:
    return hasattr(atom.aval, "dtype") and jnp.issubdtype(atom.aval.dtype, jnp.floating)


class _Region(NamedTuple):
    """What holds at a scope.

    Args:
        dtype: the compute dtype.
        rank: the position of the rule that says so; -1 for the default.
        yields: whether what is computed in float32 here yields to 16 bits outside.
    """

    dtype: np.dtype
    rank: int
    yields: bool

    @property
    def is_full(self) -> bool:
        """Whether the region runs as it was traced."""
        return self.dtype.itemsize >= 4


class _Retraced(NamedTuple):
    """A jaxpr in other dtypes: itself, the traits of its results, and its run."""

    jaxpr: Any
    results: list[Traits]
    run: "Run"


# What was retraced: jaxpr -> (dtypes of operands, scope, policy map ...) -> in other dtypes. JAX
# returns the same jaxpr for the same jitted function, and compiles a new one anew.
_retraced: weakref.WeakKeyDictionary[Any, dict[Any, _Retraced]] = weakref.WeakKeyDictionary()


class Run:
    """One evaluation of a function under a policy map.

    Args:
        policy_map: the policies of scopes and operations.
    """

    def __init__(self, policy_map: PolicyMap) -> None:
        self.policy_map = policy_map
        self.used: set[Rule] = set()
        self.scopes: dict[str, _Region] = {}
        self.operations: set[str] = set()
        self.overrides: dict[str, list[tuple[int, Rule]]] = {}
        for rank, rule in enumerate(policy_map.rules):
            if rule.is_operation and rule.compute is not None:
                self.overrides.setdefault(rule.selector.removeprefix("op."), []).append(
                    (rank, rule)
                )

    def region(self, scope: str) -> _Region:
        """Returns what holds at a scope, by the rules of its parts from the outermost in."""
        if scope not in self.scopes:
            self.scopes[scope] = self._region(scope)
        return self.scopes[scope]

    def _region(self, scope: str) -> _Region:
        outer, _, name = scope.rpartition("/")
        if not scope:
            return _Region(np.dtype(self.policy_map.default.compute_dtype), -1, True)
        region = self.region(outer)
        if name == FULL_PRECISION or region.rank == _MARKED:
            return _Region(FLOAT32, _MARKED, False)
        level = [scope]
        if _is_one_module(outer, scope):  # the last rule that matches it wins, by mark or by scope
            level.append(outer)
            region = self.region(outer.rpartition("/")[0])
        for rank, rule in enumerate(self.policy_map.rules):
            if any(_matches(rule, one) for one in level):
                self.used.add(rule)
                dtype = region.dtype if rule.compute is None else np.dtype(rule.compute)
                region = _Region(dtype, rank, rule.output is None)
        return region

    def override(self, name: str, region: _Region) -> np.dtype | None:
        """Returns the dtype that a rule gives to an operation; the last rule that matches wins."""
        if name not in self.overrides:
            return None
        self.used.update(rule for _, rule in self.overrides[name])
        rank, rule = self.overrides[name][-1]
        return np.dtype(rule.compute) if rank > region.rank else None

    def evaluate(self, jaxpr: Any, values: Sequence[Value], scope: str) -> list[Value]:
        """Runs a jaxpr on values, and returns its results."""
        env = dict(zip(jaxpr.invars, values, strict=True))
        for var, const in zip(jaxpr.constvars, _jaxpr.consts_of(jaxpr), strict=False):
            env[var] = Value.of_constant(const)

        def read(atom: Any) -> Value:
            if _jaxpr.is_literal(atom):
                return Value.of_constant(np.asarray(atom.val, atom.aval.dtype))
            return env[atom]

        surroundings = _surroundings(jaxpr)
        for eqn, last in zip(jaxpr.eqns, _jaxpr.last_uses(jaxpr), strict=True):
            equation = _Equation(self, eqn, list(map(read, eqn.invars)), scope, surroundings)
            try:
                results = equation.run()
            except Exception as error:
                _jaxpr.note_place(error, eqn)
                raise
            env.update(zip(eqn.outvars, results, strict=True))
            for var in last:
                del env[var]
        return list(map(read, jaxpr.outvars))

    def retrace(
        self,
        jaxpr: Any,
        values: Sequence[Any],
        scope: str,
        result_dtypes: Sequence[Any] = (),
        wide: int = 0,
    ) -> _Retraced:
        """Makes a jaxpr of the evaluation of a jaxpr.

        Args:
            jaxpr: the jaxpr, closed or open.
            values: what stands for its operands; only their traits count.
            scope: the scope around it.
            result_dtypes: the dtypes of its first results; of the others, what comes.
            wide: how many of the first operands come in the traced dtypes, to be cast inside.
        """
        kinds = tuple(value.traits for value in values)
        key = (kinds, scope, tuple(result_dtypes), wide, self.policy_map, is_marking())
        known = _retraced.setdefault(jaxpr, {})
        if key not in known:
            known[key] = self._retrace(jaxpr, kinds, scope, result_dtypes, wide)
        self.note(known[key].run)
        return known[key]

    def note(self, inner: "Run") -> None:
        """Takes over what an inner run met: of what nothing matched, warnings name what is near."""
        self.used |= inner.used
        self.scopes |= inner.scopes
        self.operations |= inner.operations

    def _retrace(
        self, jaxpr: Any, kinds: Any, scope: str, result_dtypes: Any, wide: int
    ) -> _Retraced:
        run = Run(self.policy_map)
        results: list[Traits] = []

        def on_arrays(*arrays: Any) -> list[Any]:
            inputs = [Value.of(a, traits) for a, traits in zip(arrays, kinds, strict=True)]
            for i in range(wide):
                inputs[i] = Value.of(inputs[i].to(kinds[i].dtype), kinds[i])
            outputs = run.evaluate(jaxpr, inputs, scope)
            for i, dtype in enumerate(result_dtypes):
                outputs[i] = Value.of(outputs[i].placed(dtype), outputs[i].traits)
            results[:] = [output.traits for output in outputs]
            return [output.array for output in outputs]

        avals = [
            var.aval if i < wide else _jaxpr.retype(var.aval, traits.dtype)
            for i, (var, traits) in enumerate(zip(jaxpr.invars, kinds, strict=True))
        ]
        return _Retraced(jax.make_jaxpr(on_arrays)(*avals), results, run)


def _matches(rule: Rule, scope: str) -> bool:
    """Whether a rule is about the innermost name of a scope, which may be the mark of a module."""
    module = module_of(scope)
    return rule.matches_scope(without_marks(scope)) if module is None else rule.matches(*module)


def _is_one_module(outer: str, scope: str) -> bool:
    """Whether the last two names of a scope are a module's mark and its name, in either order."""
    for mark, name in ((outer, scope), (scope, outer)):
        module = module_of(mark)
        if module is not None and module_of(name) is None:
            return is_own_name(module, name.rpartition("/")[2])
    return False


def _is_precise(params: Mapping[str, Any]) -> bool:
    """Whether the user asked a product for more precision than the default."""
    precision = params.get("precision")
    asked = precision if isinstance(precision, tuple) else (precision,)
    return any(p not in (None, lax.Precision.DEFAULT) for p in asked)


def _is_product(eqn: Any) -> bool:
    """Whether the equation sums products: an outer product, as of positions, does not."""
    if eqn.primitive.name != "dot_general":
        return True
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return any(eqn.invars[0].aval.shape[axis] != 1 for axis in contracted)


def _traced_rule(eqn: Any, places: Sequence[int]) -> Any:
    """Returns the derivative rule of a custom_jvp equation, as a jaxpr in the traced dtypes.

    It takes the operands and the tangents of some, and returns the results and the tangents of
    those that are no integers.

    Args:
        eqn: the equation.
        places: which operands have tangents; the others have symbolic zeros.
    """
    avals = [atom.aval for atom in eqn.invars]

    def rule(primals: Any, tangents: Any) -> Any:
        def call(*varied: Any) -> list[Any]:
            operands = list(primals)
            for place, operand in zip(places, varied, strict=True):
                operands[place] = operand
            return _jaxpr.bind(eqn, operands)

        results, tangents = jax.jvp(call, tuple(primals[i] for i in places), tuple(tangents))
        return results, [tangents[i] for i in _varying(eqn.outvars)]

    return jax.make_jaxpr(rule)(avals, [avals[i] for i in places])


def _varying(atoms: Sequence[Any]) -> list[int]:
    """Returns which operands or results have tangents: those that are no integers."""
    return [i for i, atom in enumerate(atoms) if jnp.issubdtype(atom.aval.dtype, jnp.inexact)]


def _has_tangent(tangent: Any) -> bool:
    """Whether a tangent has values: those of integers and symbolic zeros have none."""
    return not isinstance(tangent, SymbolicZero) and tangent.dtype != jax.dtypes.float0


class _Surroundings(NamedTuple):
    """Results of a jaxpr whose dtype depends on the equations around their own.

    Args:
        statistics: part of a statistic in float32, as FEEDS says.
        slopes: `n * x` next to `x**n`, its derivative, which may overflow where the power does.
        choices: comparisons of a number with the maximum of it and others, as the derivative of a
            maximum makes them. The maximum was rounded, and so has the number to be.
    """

    statistics: set[Any]
    slopes: set[Any]
    choices: set[Any]


def _surroundings(jaxpr: Any) -> _Surroundings:
    found = _Surroundings(set(), set(), set())
    feeding: dict[Any, str] = {}
    powers: set[tuple[Any, Any]] = set()
    origins: dict[Any, Any] = {}  # of copies and parts
    chosen: dict[Any, set[Any]] = {}
    for eqn in jaxpr.eqns:
        name, result = operation_name(eqn.primitive.name), next(iter(eqn.outvars), None)
        atoms = [atom for atom in eqn.invars if not _jaxpr.is_literal(atom)]
        numbers = [atom.val for atom in eqn.invars if _jaxpr.is_literal(atom)]
        sources = [origins.get(atom, atom) for atom in atoms]
        found.statistics.update(a for a in atoms if name in FEEDS.get(feeding.get(a, ""), ()))
        if name in FEEDS and (name != "mul" or eqn.invars[0] is eqn.invars[1]):
            feeding[result] = name
        if name in ("square", "integer_pow"):
            powers.update((atom, eqn.params.get("y", 2)) for atom in atoms)
        elif name == "mul" and len(numbers) == 1:
            if (atoms[0], np.asarray(numbers[0]).item()) in powers:
                found.slopes.add(result)
        elif name in CHOICES:
            chosen[result] = set(sources)
        elif (name in COPIES or name == "gather") and atoms:
            origins[result] = sources[0]
        elif name == "eq" and any(a in chosen.get(b, ()) for a in sources for b in sources):
            found.choices.add(result)
    return found


_PLACING = frozenset({Kind.PLACE, Kind.UPDATE})


class _Equation:
    """One equation of the second run, and how each kind of operation runs it.

    Args:
        context: the run that it is part of.
        eqn: the equation as it was traced.
        values: its operands.
        scope: the scope around the jaxpr that it is part of.
        surroundings: what the equations around it make of it.
    """

    def __init__(
        self,
        context: Run,
        eqn: Any,
        values: list[Value],
        scope: str,
        surroundings: _Surroundings,
    ) -> None:
        self.context = context
        self.eqn = eqn
        self.values = values
        self.name = operation_name(eqn.primitive.name)
        inner = _jaxpr.scope_of(eqn)
        self.scope = f"{scope}/{inner}" if scope and inner else scope or inner
        self.region = context.region(self.scope)
        self.override = context.override(self.name, self.region)
        self.surroundings = surroundings

    @property
    def float32_values(self) -> list[Value]:
        """The operands that were float32 when traced."""
        pairs = zip(self.eqn.invars, self.values, strict=True)
        return [value for atom, value in pairs if _is_float32(atom)]

    @property
    def weak(self) -> bool:
        """Whether nothing of low precision is upstream of the results."""
        pairs = zip(self.eqn.invars, self.values, strict=True)
        return all(value.weak and _is_float32(a) for a, value in pairs if _is_floating(a))

    @property
    def tangent(self) -> bool:
        """Whether the results are made of a tangent."""
        return any(value.tangent for value in self.values)

    def run(self) -> list[Value]:
        """Runs the equation."""
        self.context.operations.add(self.name)
        dtype = self.region.dtype if self.override is None else self.override
        # An autocast around this one is to leave in float32 what this one does.
        with _jaxpr.in_place_of(self.eqn, *([FULL_PRECISION] if dtype.itemsize >= 4 else [])):
            return self._run()

    def _run(self) -> list[Value]:
        if self.region.rank == _MARKED:
            return self.as_traced(weak=False)
        if self.name in _HIGHER_ORDER:
            return _HIGHER_ORDER[self.name](self)
        if self.name == "convert_element_type":
            return self.convert()
        if self.override is not None:
            return self.overridden(self.override)
        if self.region.is_full:
            return self.as_traced(weak=self.region.yields)
        if self.name not in KINDS:
            return self.as_traced(weak=True)  # unknown: it yields, whatever it was
        return _KINDS[KINDS[self.name]](self)

    def bind(self, operands: Sequence[Any], weak: bool, **params: Any) -> list[Value]:
        """Runs the equation on `operands`; nothing comes out wider than it was traced."""
        arrays = _jaxpr.bind(self.eqn, operands, **params)
        results = [Value(array, weak, self.tangent) for array in arrays]
        if self.name in COPIES:
            results[0].constant = self.values[0].constant
        if self.name in COPIES or self.name in ELEMENTWISE:
            results[0].uniform |= all(value.uniform for value in self.values)
            wide = [v for v in self.values if v.dtype == FLOAT32 and not v.weak]
            results[0].power = bool(wide) and all(value.power for value in wide)
        for result, var in zip(results, self.eqn.outvars, strict=True):
            if _is_float32(var) and result.dtype.itemsize > 4:
                result.array = result.to(FLOAT32)
        return results

    def as_traced(self, weak: bool) -> list[Value]:
        """Runs the equation in the dtypes that were traced."""
        return self.bind(self._traced_operands(), weak)

    def _traced_operands(self) -> list[Any]:
        pairs = zip(self.eqn.invars, self.values, strict=True)
        return [v.to(FLOAT32) if _is_float32(atom) else v.array for atom, v in pairs]

    def _operands(self, dtype: Any) -> list[Any]:
        """Returns the operands, those that were float32 in `dtype`."""
        cast = Value.placed if KINDS.get(self.name) in _PLACING else Value.to
        pairs = zip(self.eqn.invars, self.values, strict=True)
        return [cast(v, dtype) if _is_float32(atom) else v.array for atom, v in pairs]

    # The kinds of operations.

    def full(self) -> list[Value]:
        return self.as_traced(self.weak)

    def keep(self) -> list[Value]:
        stateful = self.eqn.primitive.name in ("get", "swap")  # may accumulate: as a loop's carry
        return self.as_traced(self.weak and not stateful)

    def low(self) -> list[Value]:
        dtype, params = self.region.dtype, self.eqn.params
        if _is_precise(params):
            return self.as_traced(weak=False)
        if not _is_product(self.eqn):
            return self.promote()
        dtypes = {atom.aval.dtype for atom in self.eqn.invars if _is_floating(atom)}
        if FLOAT32 not in dtypes or not dtypes <= {FLOAT32, dtype}:
            return self.full()
        return self.bind(self._operands(dtype), weak=False, **self._preferred(dtype))

    def promote(self) -> list[Value]:
        if not self.float32_values or self._is_in(self.surroundings.statistics):
            return self.full()
        dtype = self._promoted()
        return self.bind(self._operands(dtype), self.weak, **self._filled(dtype))

    def compare(self) -> list[Value]:
        same = len({value.dtype for value in self.float32_values}) == 1
        return self.promote() if same or self._is_in(self.surroundings.choices) else self.full()

    def scale(self) -> list[Value]:
        if not self.float32_values or self._is_in(self.surroundings.statistics):
            return self.full()
        if self._is_in(self.surroundings.slopes):
            return self.power()
        dtype = self._promoted()
        unfit = [value for value in self.float32_values if not value.fits(dtype)]
        if self.name == "mul":  # parameters are factors: in float32 they would cost memory
            unfit = [value for value in unfit if value.uniform or value.constant is not None]
        if not unfit:
            return self.promote()
        if all(value.constant is not None for value in unfit):
            return self._rounded(self.full(), dtype)
        return self._recomputed(dtype)

    def _recomputed(self, dtype: Any) -> list[Value]:
        """Runs the equation in float32, and keeps nothing of that for the backward pass."""
        eqn = self.eqn  # JAX caches what it traced: it must not hold the values themselves

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def run(*arrays: Any) -> list[Any]:
            operands = [lax.convert_element_type(array, FLOAT32) for array in arrays]
            results = _jaxpr.bind(eqn, operands)
            return [lax.convert_element_type(result, dtype) for result in results]

        arrays = run(*(value.array for value in self.values))
        return [Value(array, self.weak, self.tangent) for array in arrays]

    def power(self) -> list[Value]:
        statistic = self._is_in(self.surroundings.statistics)
        if statistic or not self.float32_values or self._promoted() != np.float16:
            return self.promote()
        results = self._recomputed(FLOAT32)
        for result in results:
            result.power = True
        return results

    def bounded(self) -> list[Value]:
        dtype = self.region.dtype
        if all(value.power for value in self.values):
            return self.bind(self._operands(dtype), self.weak)
        return self.promote()

    def internal(self) -> list[Value]:
        results = self.full()
        if len(results) == len(self.values):  # a sum over devices of several at once
            pairs = zip(results, self.values, strict=True)
            return [Value(r.to(v.dtype), v.weak, v.tangent) for r, v in pairs]
        return self._rounded(results, self._promoted()) if self.float32_values else results

    def update(self) -> list[Value]:
        if not self.float32_values:
            return self.full()
        dtype = self._promoted()
        placed = [Value(operand, True) for operand in self._operands(dtype)]
        pairs = zip(self.eqn.invars, placed, strict=True)
        operands = [v.to(FLOAT32) if _is_float32(atom) else v.array for atom, v in pairs]
        return self._rounded(self.bind(operands, self.weak), dtype)

    def _rounded(self, results: list[Value], dtype: Any) -> list[Value]:
        pairs = zip(results, self.eqn.outvars, strict=True)
        return [
            Value(r.to(dtype), r.weak, r.tangent) if _is_float32(var) else r for r, var in pairs
        ]

    def each(self) -> list[Value]:
        results = _jaxpr.bind(self.eqn, [value.array for value in self.values])
        return [Value.of(r, v.traits) for r, v in zip(results, self.values, strict=True)]

    def _promoted(self) -> np.dtype:
        return join([value.traits for value in self.float32_values]).dtype

    def _filled(self, dtype: np.dtype) -> dict[str, Any]:
        """Returns the parameter of gathers that holds the number for what is out of bounds."""
        fill = self.eqn.params.get("fill_value")
        if fill is None or not self.float32_values:
            return {}
        return {"fill_value": saturated(fill, dtype)[()]}

    def _is_in(self, results: set[Any]) -> bool:
        return self.eqn.outvars[0] in results

    def convert(self) -> list[Value]:
        """Runs a cast: those that the user wrote are obeyed, as far as they left a trace."""
        (value,), (atom,) = self.values, self.eqn.invars
        new = self.eqn.params["new_dtype"]
        if new != FLOAT32:
            return self.bind([value.array], value.weak)
        restored = self.scope.endswith(RESTORE)  # by an autocast within this one
        if _is_float32(atom) or (restored and not self.region.is_full):
            return [value]
        is_float = jnp.issubdtype(atom.aval.dtype, jnp.floating)
        return self.bind([value.array], weak=not is_float)

    def overridden(self, dtype: np.dtype) -> list[Value]:
        """Runs an operation in the dtype that a rule gives it."""
        if _jaxpr.holds_jaxpr(self.eqn.params):  # a function of float32 scalars
            return self._rounded(self.as_traced(weak=False), dtype)
        params = self._preferred(dtype) | self._filled(dtype)
        return self.bind(self._operands(dtype), weak=False, **params)

    def _preferred(self, dtype: np.dtype) -> dict[str, Any]:
        """Returns the parameter of products that holds the dtype of the result, if it is there."""
        key = "preferred_element_type"
        return {key: dtype} if self.eqn.params.get(key) == FLOAT32 else {}

    # Operations that carry functions.

    def call(self) -> list[Value]:
        key = "jaxpr" if "jaxpr" in self.eqn.params else "call_jaxpr"
        jaxpr = self.eqn.params[key]
        if key == "jaxpr" and _jaxpr.looks_for_nans([value.array for value in self.values]):
            return self.context.evaluate(jaxpr, self.values, self.scope)  # to find the operation
        retraced = self.context.retrace(jaxpr, self.values, self.scope)
        if isinstance(retraced.jaxpr, type(jaxpr)):
            return self._rebind(retraced.results, **{key: retraced.jaxpr})
        if retraced.jaxpr.consts:  # the open jaxpr that jax.checkpoint wants has no place for them
            return self.as_traced(weak=True)
        return self._rebind(retraced.results, **{key: retraced.jaxpr.jaxpr})

    def _rebind(self, results: Any, values: Any = None, **params: Any) -> list[Value]:
        arrays = [value.array for value in (self.values if values is None else values)]
        bound = _jaxpr.bind(self.eqn, arrays, **params)
        return [Value.of(r, traits) for r, traits in zip(bound, results, strict=True)]

    def _carried(self, operands: slice) -> list[Value]:
        """Returns a loop's carry: in the traced dtypes, unless a rule says otherwise.

        It is strong: a float32 sum of bfloat16 terms stays float32.
        """
        dtype = FLOAT32 if self.override is None else self.override
        pairs = zip(self.values[operands], self.eqn.invars[operands], strict=True)
        return [
            Value(v.placed(dtype), False, v.tangent) if _is_float32(a) else Value(v.array, v.weak)
            for v, a in pairs
        ]

    def scan(self) -> list[Value]:
        consts, carry = _jaxpr.scan_counts(self.eqn)
        values = list(self.values)
        carried = slice(consts, consts + carry)
        values[carried] = self._carried(carried)
        dtypes = [value.dtype for value in values[carried]]
        retraced = self.context.retrace(
            self.eqn.params["jaxpr"], values, self.scope, dtypes, consts
        )
        # Constants go in in float32: the backward pass sums their cotangents over all steps.
        wide = zip(self._traced_operands()[:consts], values, strict=False)
        values[:consts] = [Value.of(array, value.traits) for array, value in wide]
        results = self._rebind(retraced.results, values, jaxpr=retraced.jaxpr)
        return [Value(r.array, r.weak and i >= carry, r.tangent) for i, r in enumerate(results)]

    def while_loop(self) -> list[Value]:
        params = self.eqn.params
        in_cond, in_body = params["cond_nconsts"], params["body_nconsts"]
        start = in_cond + in_body
        carry = self._carried(slice(start, None))
        cond_consts, body_consts = self.values[:in_cond], self.values[in_cond:start]
        dtypes = [value.dtype for value in carry]
        retrace = functools.partial(self.context.retrace, scope=self.scope)
        cond = retrace(params["cond_jaxpr"], [*cond_consts, *carry])
        body = retrace(params["body_jaxpr"], [*body_consts, *carry], result_dtypes=dtypes)
        results = [Traits(dtype, False) for dtype in dtypes]
        values = [*cond_consts, *body_consts, *carry]
        return self._rebind(results, values, cond_jaxpr=cond.jaxpr, body_jaxpr=body.jaxpr)

    def cond(self) -> list[Value]:
        values = self.values[1:]
        retrace = functools.partial(self.context.retrace, values=values, scope=self.scope)
        jaxprs = self.eqn.params["branches"]
        branches = [retrace(jaxpr).results for jaxpr in jaxprs]
        results = [join(column) for column in zip(*branches, strict=True)]
        dtypes = [traits.dtype for traits in results]
        branches = [retrace(jaxpr, result_dtypes=dtypes) for jaxpr in jaxprs]
        return self._rebind(results, branches=tuple(branch.jaxpr for branch in branches))

    def custom_jvp(self) -> list[Value]:
        """Rebuilds a custom rule: the user's, traced as it was written, then run as all is."""
        eqn, scope, policy_map = self.eqn, self.scope, self.context.policy_map
        retraced = self.context.retrace(eqn.params["call_jaxpr"], self.values, scope)
        # The rule outlives the values themselves.
        traits = [value.traits for value in self.values]
        symbolic_zeros = bool(eqn.params.get("symbolic_zeros"))

        @jax.custom_jvp
        def call(*arrays: Any) -> list[Any]:
            return jax.core.eval_jaxpr(retraced.jaxpr.jaxpr, retraced.jaxpr.consts, *arrays)

        def jvp(primals: Any, tangents: Any) -> Any:
            places = [i for i, tangent in enumerate(tangents) if _has_tangent(tangent)]
            rule = _traced_rule(eqn, places)
            inputs = [Value.of(p, t) for p, t in zip(primals, traits, strict=True)]
            inputs += [Value(tangents[i], traits[i].weak, tangent=True) for i in places]
            values = Run(policy_map).evaluate(rule, inputs, scope)
            pairs = zip(values, retraced.results, strict=False)
            results = [value.placed(result.dtype) for value, result in pairs]
            given = dict(zip(_varying(eqn.outvars), values[len(results) :], strict=True))
            if symbolic_zeros:  # what depends linearly on no tangent is zero
                read = _jaxpr.depends(rule.jaxpr, rule.jaxpr.invars[len(traits) :])[len(results) :]
                given = {i: given[i] for i, is_read in zip(given, read, strict=True) if is_read}
            return results, [
                given[i].to(result.dtype)
                if i in given
                else zero_from_primal(result, symbolic_zeros)
                for i, result in enumerate(results)
            ]

        call.defjvp(jvp, symbolic_zeros=symbolic_zeros)
        arrays = call(*(value.array for value in self.values))
        return [Value.of(a, traits) for a, traits in zip(arrays, retraced.results, strict=True)]

    def custom_vjp(self) -> list[Value]:
        """Runs a function with a backward pass of its own in float32, as it was written."""
        return self.as_traced(weak=True)

    def shard_map(self) -> list[Value]:
        params, run, scope = self.eqn.params, self.context, self.scope
        results: list[Traits] = []

        def body(*arrays: Any) -> list[Any]:
            inputs = [Value.of(a, v.traits) for a, v in zip(arrays, self.values, strict=True)]
            outputs = run.evaluate(params["jaxpr"], inputs, scope)
            # What is the same number on each device need not be so on all.
            results[:] = [output.traits._replace(uniform=False) for output in outputs]
            return [output.array for output in outputs]

        mapped = jax.shard_map(
            body,
            mesh=params["mesh"],
            in_specs=tuple(params["in_specs"]),
            out_specs=list(params["out_specs"]),
            axis_names=_jaxpr.manual_axes(self.eqn),
            check_vma=params["check_vma"],
        )
        arrays = mapped(*(value.array for value in self.values))
        return [Value.of(a, traits) for a, traits in zip(arrays, results, strict=True)]


_KINDS = {
    Kind.LOW: _Equation.low,
    Kind.FULL: _Equation.full,
    Kind.COMPARE: _Equation.compare,
    Kind.PROMOTE: _Equation.promote,
    Kind.PLACE: _Equation.promote,
    Kind.SCALE: _Equation.scale,
    Kind.POWER: _Equation.power,
    Kind.BOUNDED: _Equation.bounded,
    Kind.UPDATE: _Equation.update,
    Kind.INTERNAL: _Equation.internal,
    Kind.EACH: _Equation.each,
    Kind.KEEP: _Equation.keep,
}

_HIGHER_ORDER = {
    **dict.fromkeys(HIGHER_ORDER, _Equation.call),
    "cond": _Equation.cond,
    "custom_jvp_call": _Equation.custom_jvp,
    "custom_vjp_call": _Equation.custom_vjp,
    "scan": _Equation.scan,
    "shard_map": _Equation.shard_map,
    "while": _Equation.while_loop,
}
