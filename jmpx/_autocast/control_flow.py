"""Rules of primitives that carry jaxprs: loops, branches, calls and custom derivatives."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.core
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero, zero_from_primal

from jmpx._autocast.binding import bind_arrays, product_dtypes, run_as_traced
from jmpx._autocast.rules import Operation, Retracing, is_float32, register
from jmpx._autocast.value import FLOAT32, Array, Traits, Value, join
from jmpx._jaxprs import core
from jmpx._jaxprs.core import Atom, Equation, Jaxpr
from jmpx._jaxprs.inner import CALLS, CHECKPOINT
from jmpx._policies.registry import marked_calls

# Parameters of a jitted function that hold something for each of its operands.
_OF_OPERANDS = ("in_shardings", "in_layouts", "donated_invars")
Tangent: TypeAlias = Any  # an array or a symbolic zero


@register(*CALLS, everywhere=True)
def function_call(operation: Operation) -> list[Value]:
    """Retraces the function of a call, such as a jitted one or a checkpoint."""
    params, values = operation.equation.params, operation.values
    key = "jaxpr" if "jaxpr" in params else "call_jaxpr"
    jaxpr, scope = params[key], operation.scope
    if key == "jaxpr" and core.looks_for_nans([value.array for value in values]):
        # Run one by one, so that JAX finds the equation that makes a NaN.
        return operation.interpreter.evaluate(jaxpr, values, scope, operation.ends)
    if operation.equation.primitive.name == CHECKPOINT:
        jaxpr, scope = operation.interpreter.alike(jaxpr, scope)
    operation = operation._replace(scope=scope)
    retraced = operation.retrace(jaxpr, values, has_rounded=True)
    inner, arrays = retraced.jaxpr, [value.array for value in values]
    if not isinstance(inner, type(jaxpr)):
        if inner.consts:  # jax.checkpoint wants an open jaxpr, which has no constants
            return run_as_traced(operation, is_weak=True)
        inner = inner.jaxpr
    # The function gets pending values in both dtypes, and casts none again: a checkpoint saves in
    # float32 only what something in it reads in float32.
    pending = [i for i, value in enumerate(values) if value.pending]
    of_operands = {key: params[key] for key in _OF_OPERANDS if pending and key in params}
    more = {key: (*each, *(each[i] for i in pending)) for key, each in of_operands.items()}
    arrays += [value.to(value.pending) for value in values if value.pending]
    results = bind_arrays(operation.equation, arrays, **{key: inner}, **more)
    return list(map(Value.of, results, retraced.results))


def _rebind(operation: Operation, results: Sequence[Traits], **params: object) -> list[Value]:
    """Runs an operation with retraced jaxprs, given the traits of its results."""
    arrays = [value.array for value in operation.values]
    return list(map(Value.of, bind_arrays(operation.equation, arrays, **params), results))


def _carry(operation: Operation, start: int, end: int | None = None) -> list[Value]:
    """Returns a loop's carry, not weak: a float32 sum of bfloat16 terms stays float32."""
    dtype = FLOAT32 if operation.override is None else operation.override
    pairs = zip(operation.equation.invars[start:end], operation.values[start:end], strict=True)
    return [
        Value(v.to_finite(dtype), is_weak=False, tangent=v.tangent)
        if is_float32(atom)
        else Value(v.array, v.is_weak)
        for atom, v in pairs
    ]


def _slices(operation: Operation, start: int) -> list[Value]:
    """Returns the operands from `start` on, of which each turn of a scan reads a slice.

    An operand that only products read, such as stacked weights, is cast as a whole: the backward
    pass collects the 16-bit cotangents of its slices and casts them once.
    """
    jaxpr, atoms = operation.equation.params["jaxpr"], operation.equation.invars
    dtypes = product_dtypes(jaxpr, operation.scope, operation.interpreter.regions)
    triples = zip(atoms[start:], operation.values[start:], dtypes[start:], strict=True)
    return [
        Value(value.to(dtype), value.is_weak, value.tangent)
        if dtype is not None and is_float32(atom)
        else value
        for atom, value, dtype in triples
    ]


@register("scan", everywhere=True)
def scan(operation: Operation) -> list[Value]:
    """Retraces the body of a scan, which returns its carry in the dtypes that it got."""
    equation, values = operation.equation, operation.values
    num_consts, num_carry = core.scan_counts(equation)
    end = num_consts + num_carry
    carry = _carry(operation, num_consts, end)
    operands = [*values[:num_consts], *carry, *_slices(operation, end)]
    dtypes = [value.dtype for value in carry]
    is_single = equation.params["length"] == 1
    jaxpr, rounds = equation.params["jaxpr"], not is_single  # stacked results stay in memory
    retraced = operation.retrace(jaxpr, operands, dtypes, num_consts, rounds=rounds)
    # The body casts constants, so that the backward pass sums their cotangents in float32.
    for i, atom in enumerate(equation.invars[:num_consts]):
        if is_float32(atom):
            operands[i] = Value(values[i].to(FLOAT32), values[i].is_weak)
    scanned = operation._replace(values=operands)
    carried = retraced.results[:num_carry]
    traits = [Traits(each.dtype, is_weak=False, tangent=each.tangent) for each in carried]
    for each in retraced.results[num_carry:]:  # one number in each turn may be many in all
        stacked = each._replace(uniform=False, number=None, statistic=0)
        traits.append(each if is_single else stacked)
    return _rebind(scanned, traits, jaxpr=retraced.jaxpr)


@register("while", everywhere=True)
def while_loop(operation: Operation) -> list[Value]:
    """Retraces a while loop, whose body returns its carry in the dtypes that it got."""
    params = operation.equation.params
    in_cond, start = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    consts, carry = operation.values[:start], _carry(operation, start)
    dtypes = [value.dtype for value in carry]
    operands = [*consts[:in_cond], *carry]
    how = Retracing(operation.scope)
    cond = operation.interpreter.retrace(params["cond_jaxpr"], operands, how)
    body = operation.retrace(params["body_jaxpr"], [*consts[in_cond:], *carry], dtypes)
    results = [Traits(dtype, is_weak=False) for dtype in dtypes]
    looped = operation._replace(values=[*consts, *carry])
    return _rebind(looped, results, cond_jaxpr=cond.jaxpr, body_jaxpr=body.jaxpr)


@register("cond", everywhere=True)
def cond(operation: Operation) -> list[Value]:
    """Retraces the branches twice: to see which dtypes they return, and to return the same."""
    jaxprs, values = operation.equation.params["branches"], operation.values[1:]
    columns = zip(*(operation.retrace(jaxpr, values).results for jaxpr in jaxprs), strict=True)
    results = [join(column) for column in columns]
    dtypes = [traits.dtype for traits in results]
    branches = tuple(operation.retrace(jaxpr, values, dtypes).jaxpr for jaxpr in jaxprs)
    return _rebind(operation, results, branches=branches)


@register("shard_map", everywhere=True)
def shard_map(operation: Operation) -> list[Value]:
    """Maps the evaluation of the function over the same mesh, with the same specifications."""
    params, values, ends = operation.equation.params, operation.values, operation.ends
    results: list[Traits] = []

    def body(*arrays: Array) -> list[Array]:
        inputs = list(map(Value.of, arrays, [value.traits for value in values]))
        interpreter = operation.interpreter
        outputs = interpreter.evaluate(params["jaxpr"], inputs, operation.scope, ends)
        # A result that is uniform on each device may differ from device to device.
        results[:] = [output.traits._replace(uniform=False) for output in outputs]
        return [output.array for output in outputs]

    mapped = jax.shard_map(
        body,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=list(params["out_specs"]),
        axis_names=core.manual_axes(operation.equation),
        check_vma=params["check_vma"],
    )
    return list(map(Value.of, mapped(*(value.array for value in values)), results))


@register("custom_jvp_call", everywhere=True)
def custom_jvp(operation: Operation) -> list[Value]:
    """Retraces a function that has its own derivative rule, and evaluates the traced rule."""
    equation, values = operation.equation, operation.values
    retraced = operation.retrace(equation.params["call_jaxpr"], values)
    # JAX calls the derivative rule later: it must not keep the values alive.
    traits = [value.traits for value in values]
    interpreter, scope, ends = operation.interpreter.fresh(), operation.scope, operation.ends
    symbolic_zeros = bool(equation.params.get("symbolic_zeros"))

    @jax.custom_jvp
    def call(*arrays: Array) -> list[Array]:
        return jax.core.eval_jaxpr(retraced.jaxpr.jaxpr, retraced.jaxpr.consts, *arrays)

    def jvp(
        primals: Sequence[Array], tangents: Sequence[Tangent]
    ) -> tuple[list[Array], list[Tangent]]:
        varied = [i for i, tangent in enumerate(tangents) if _has_tangent(tangent)]
        with marked_calls(interpreter.regions.policy_map):
            rule = _trace_rule(equation, varied)
        inputs = list(map(Value.of, primals, traits))
        inputs += [Value(tangents[i], traits[i].is_weak, tangent=True) for i in varied]
        outputs = interpreter.evaluate(rule, inputs, scope, ends)
        pairs = zip(outputs, retraced.results, strict=False)
        results = [output.to_finite(result.dtype) for output, result in pairs]
        new = dict(zip(_inexact(equation.outvars), outputs[len(results) :], strict=True))
        if symbolic_zeros:  # a tangent is zero if no given one contributes to it
            found = core.reached(rule, rule.jaxpr.invars[len(traits) :])
            pairs = zip(new, rule.jaxpr.outvars[len(results) :], strict=True)
            new = {i: new[i] for i, atom in pairs if not core.is_literal(atom) and atom in found}
        return results, [
            new[i].to(result.dtype) if i in new else zero_from_primal(result, symbolic_zeros)
            for i, result in enumerate(results)
        ]

    call.defjvp(jvp, symbolic_zeros=symbolic_zeros)
    return list(map(Value.of, call(*(value.array for value in values)), retraced.results))


def _trace_rule(equation: Equation, varied: Sequence[int]) -> Jaxpr:
    """Returns the derivative rule of a custom_jvp equation, as a jaxpr in the traced dtypes.

    It takes the operands and the tangents of those that vary, and returns results and tangents.
    """
    avals = [atom.aval for atom in equation.invars]

    def rule(primals: Sequence[Array], tangents: Sequence[Array]) -> object:
        def call(*given: Array) -> list[Array]:
            operands = list(primals)
            for i, operand in zip(varied, given, strict=True):
                operands[i] = operand
            return bind_arrays(equation, operands)

        results, tangents = jax.jvp(call, tuple(primals[i] for i in varied), tuple(tangents))
        return results, [tangents[i] for i in _inexact(equation.outvars)]

    return jax.make_jaxpr(rule)(avals, [avals[i] for i in varied])


def _inexact(atoms: Sequence[Atom]) -> list[int]:
    """Returns the indices of operands or results that have tangents: integers have none."""
    return [i for i, atom in enumerate(atoms) if jnp.issubdtype(atom.aval.dtype, jnp.inexact)]


def _has_tangent(tangent: Tangent) -> bool:
    """Whether a tangent has values: those of integers and symbolic zeros have none."""
    return not isinstance(tangent, SymbolicZero) and tangent.dtype != jax.dtypes.float0
