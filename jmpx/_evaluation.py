"""Autocast's second run: a jaxpr, one equation after the other, in the dtypes of the rules.

`_operations.py` holds the rules of operations; a policy map adds those of scopes, and overrides.
"""

import functools
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmpx import _jaxpr
from jmpx._operations import FEEDS, HIGHER_ORDER, KINDS, Kind, operation_name
from jmpx._policy_map import PolicyMap, Rule
from jmpx._scopes import is_marking, is_own_name, module_of, without_marks
from jmpx._tree import FULL_PRECISION
from jmpx._values import FLOAT32, Value, join

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
    """A jaxpr in other dtypes: itself, the dtypes and weakness of its results, and its run."""

    jaxpr: Any
    results: list[tuple[Any, bool]]
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
            env[var] = Value(const, weak=True)

        def read(atom: Any) -> Value:
            if _jaxpr.is_literal(atom):
                return Value(np.asarray(atom.val, atom.aval.dtype), weak=True)
            return env[atom]

        feeds = _readers(jaxpr)
        for eqn, last in zip(jaxpr.eqns, _jaxpr.last_uses(jaxpr), strict=True):
            equation = _Equation(self, eqn, list(map(read, eqn.invars)), scope, feeds)
            env.update(zip(eqn.outvars, equation.run(), strict=True))
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
            values: what stands for its operands; only dtypes and weakness count.
            scope: the scope around it.
            result_dtypes: the dtypes of its first results; of the others, what comes.
            wide: how many of the first operands come in the traced dtypes, to be cast inside.
        """
        kinds = tuple((value.dtype, value.weak) for value in values)
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
        results: list[tuple[Any, bool]] = []

        def on_arrays(*arrays: Any) -> list[Any]:
            inputs = [Value(a, weak) for a, (_, weak) in zip(arrays, kinds, strict=True)]
            for i in range(wide):
                inputs[i] = Value(inputs[i].to(kinds[i][0]), inputs[i].weak)
            outputs = run.evaluate(jaxpr, inputs, scope)
            for i, dtype in enumerate(result_dtypes):
                outputs[i] = Value(outputs[i].to(dtype), outputs[i].weak)
            results[:] = [(output.dtype, output.weak) for output in outputs]
            return [output.array for output in outputs]

        avals = [
            var.aval if i < wide else _jaxpr.retype(var.aval, dtype)
            for i, (var, (dtype, _)) in enumerate(zip(jaxpr.invars, kinds, strict=True))
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


def _traced_rule(eqn: Any) -> Any:
    """Returns the derivative rule of a custom_jvp equation, as a jaxpr in the traced dtypes.

    It takes the primals, and the tangents of those that have one, and returns the same.
    """
    avals = [atom.aval for atom in eqn.invars]

    def rule(primals: Any, given: Any) -> Any:
        tangents = tuple(_with_float0(given, avals))
        results, tangents = jax.jvp(lambda *a: _jaxpr.bind(eqn, a), primals, tangents)
        return results, [
            t for t, var in zip(tangents, eqn.outvars, strict=True) if _varies(var.aval)
        ]

    return jax.make_jaxpr(rule)(tuple(avals), [aval for aval in avals if _varies(aval)])


def _varies(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def _with_float0(tangents: Iterable[Any], avals: Iterable[Any]) -> list[Any]:
    """Returns a tangent for each aval; integers have one without values."""
    given = iter(tangents)
    return [
        next(given) if _varies(aval) else np.zeros(aval.shape, jax.dtypes.float0) for aval in avals
    ]


def _readers(jaxpr: Any) -> dict[Any, set[str]]:
    """Returns for each variable that FEEDS is about the names of the operations that read it."""
    readers: dict[Any, set[str]] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in FEEDS:
            readers[eqn.outvars[0]] = set()
        for atom in eqn.invars:
            if not _jaxpr.is_literal(atom) and atom in readers:
                readers[atom].add(eqn.primitive.name)
    return readers


class _Equation:
    """One equation of the second run, and how each kind of operation runs it.

    Args:
        context: the run that it is part of.
        eqn: the equation as it was traced.
        values: its operands.
        scope: the scope around the jaxpr that it is part of.
        readers: which operations read its results, as far as that matters.
    """

    def __init__(
        self, context: Run, eqn: Any, values: list[Value], scope: str, readers: dict[Any, set[str]]
    ) -> None:
        self.context = context
        self.eqn = eqn
        self.values = values
        self.name = operation_name(eqn.primitive.name)
        inner = _jaxpr.scope_of(eqn)
        self.scope = f"{scope}/{inner}" if scope and inner else scope or inner
        self.region = context.region(self.scope)
        self.override = context.override(self.name, self.region)
        self.readers = readers

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
        results = [Value(r, weak) for r in _jaxpr.bind(self.eqn, operands, **params)]
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

    def _operands(self, dtype: Any, saturate: bool = False) -> list[Any]:
        """Returns the operands, those that were float32 in `dtype`."""
        pairs = zip(self.eqn.invars, self.values, strict=True)
        return [
            v.to(dtype, saturate and v.weak) if _is_float32(atom) else v.array for atom, v in pairs
        ]

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
        if not self.float32_values or self._feeds_full():
            return self.full()
        return self.bind(self._operands(self._promoted(), saturate=True), self.weak)

    def internal(self) -> list[Value]:
        results = self.full()
        if len(results) == len(self.values):  # a sum over devices of several at once
            pairs = zip(results, self.values, strict=True)
            return [Value(r.to(v.dtype), v.weak) for r, v in pairs]
        return self._rounded(results, self._promoted()) if self.float32_values else results

    def _rounded(self, results: list[Value], dtype: Any) -> list[Value]:
        pairs = zip(results, self.eqn.outvars, strict=True)
        return [Value(r.to(dtype), r.weak) if _is_float32(var) else r for r, var in pairs]

    def each(self) -> list[Value]:
        results = _jaxpr.bind(self.eqn, [value.array for value in self.values])
        return [Value(r, v.weak) for r, v in zip(results, self.values, strict=True)]

    def _promoted(self) -> np.dtype:
        return join([(value.dtype, value.weak) for value in self.float32_values])[0]

    def _feeds_full(self) -> bool:
        name = self.name
        if name not in FEEDS or FEEDS[name].isdisjoint(self.readers[self.eqn.outvars[0]]):
            return False
        return name != "mul" or self.eqn.invars[0] is self.eqn.invars[1]

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
        return self.bind(self._operands(dtype), weak=False, **self._preferred(dtype))

    def _preferred(self, dtype: np.dtype) -> dict[str, Any]:
        """Returns the parameter of products that holds the dtype of the result, if it is there."""
        key = "preferred_element_type"
        return {key: dtype} if self.eqn.params.get(key) == FLOAT32 else {}

    # Operations that carry functions.

    def call(self) -> list[Value]:
        key = "jaxpr" if "jaxpr" in self.eqn.params else "call_jaxpr"
        jaxpr = self.eqn.params[key]
        retraced = self.context.retrace(jaxpr, self.values, self.scope)
        if isinstance(retraced.jaxpr, type(jaxpr)):
            return self._rebind(retraced.results, **{key: retraced.jaxpr})
        if retraced.jaxpr.consts:  # the open jaxpr that jax.checkpoint wants has no place for them
            return self.as_traced(weak=True)
        return self._rebind(retraced.results, **{key: retraced.jaxpr.jaxpr})

    def _rebind(self, results: Any, values: Any = None, **params: Any) -> list[Value]:
        arrays = [value.array for value in (self.values if values is None else values)]
        bound = _jaxpr.bind(self.eqn, arrays, **params)
        return [Value(r, weak) for r, (_, weak) in zip(bound, results, strict=True)]

    def _carried(self, operands: slice) -> list[Value]:
        """Returns a loop's carry: in the traced dtypes, unless a rule says otherwise.

        It is strong: a float32 sum of bfloat16 terms stays float32.
        """
        dtype = FLOAT32 if self.override is None else self.override
        pairs = zip(self.values[operands], self.eqn.invars[operands], strict=True)
        return [Value(v.to(dtype), False) if _is_float32(a) else v for v, a in pairs]

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
        values[:consts] = [Value(array, value.weak) for array, value in wide]
        results = self._rebind(retraced.results, values, jaxpr=retraced.jaxpr)
        return [Value(r.array, r.weak and i >= carry) for i, r in enumerate(results)]

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
        results = [(dtype, False) for dtype in dtypes]
        values = [*cond_consts, *body_consts, *carry]
        return self._rebind(results, values, cond_jaxpr=cond.jaxpr, body_jaxpr=body.jaxpr)

    def cond(self) -> list[Value]:
        values = self.values[1:]
        retrace = functools.partial(self.context.retrace, values=values, scope=self.scope)
        jaxprs = self.eqn.params["branches"]
        branches = [retrace(jaxpr).results for jaxpr in jaxprs]
        results = [join(column) for column in zip(*branches, strict=True)]
        dtypes = [dtype for dtype, _ in results]
        branches = [retrace(jaxpr, result_dtypes=dtypes) for jaxpr in jaxprs]
        return self._rebind(results, branches=tuple(branch.jaxpr for branch in branches))

    def custom_jvp(self) -> list[Value]:
        """Rebuilds a custom rule: the user's, traced as it was written, then run as all is."""
        eqn, scope, policy_map = self.eqn, self.scope, self.context.policy_map
        retraced = self.context.retrace(eqn.params["call_jaxpr"], self.values, scope)
        weak = [value.weak for value in self.values]  # the rule outlives the values themselves

        @jax.custom_jvp
        def call(*arrays: Any) -> list[Any]:
            return jax.core.eval_jaxpr(retraced.jaxpr.jaxpr, retraced.jaxpr.consts, *arrays)

        @call.defjvp
        def jvp(primals: Any, tangents: Any) -> Any:
            inputs = [Value(p, w) for p, w in zip(primals, weak, strict=True)]
            pairs = zip(tangents, weak, strict=True)
            inputs += [Value(t, w) for t, w in pairs if t.dtype != jax.dtypes.float0]
            results = Run(policy_map).evaluate(_traced_rule(eqn), inputs, scope)
            dtypes = [dtype for dtype, _ in retraced.results]
            avals = [var.aval for var in eqn.outvars]
            dtypes += [d for d, aval in zip(dtypes, avals, strict=True) if _varies(aval)]
            arrays = [result.to(d) for result, d in zip(results, dtypes, strict=True)]
            return arrays[: len(avals)], _with_float0(arrays[len(avals) :], avals)

        arrays = call(*(value.array for value in self.values))
        return [Value(a, w) for a, (_, w) in zip(arrays, retraced.results, strict=True)]

    def custom_vjp(self) -> list[Value]:
        """Runs a function with a backward pass of its own in float32, as it was written."""
        return self.as_traced(weak=True)

    def shard_map(self) -> list[Value]:
        params, run, scope = self.eqn.params, self.context, self.scope
        weak: list[bool] = []

        def body(*arrays: Any) -> list[Any]:
            inputs = [Value(a, v.weak) for a, v in zip(arrays, self.values, strict=True)]
            outputs = run.evaluate(params["jaxpr"], inputs, scope)
            weak[:] = [output.weak for output in outputs]
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
        return [Value(a, w) for a, w in zip(arrays, weak, strict=True)]


_KINDS = {
    Kind.LOW: _Equation.low,
    Kind.FULL: _Equation.full,
    Kind.PROMOTE: _Equation.promote,
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
