"""Functions that have their own backward pass."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from jmpx._autocast.binding import bind_arrays, cast_operands, run_as_traced
from jmpx._autocast.products import gives_algorithm, with_algorithms
from jmpx._autocast.rules import Context, register
from jmpx._autocast.value import FLOAT32, Array, Value
from jmpx._jaxprs import core
from jmpx._jaxprs.core import Equation
from jmpx._jaxprs.scopes import FULL_PRECISION
from jmpx._policies.modules import marked_calls


@register("custom_vjp_call", everywhere=True)
def custom_vjp(context: Context, equation: Equation, values: list[Value]) -> list[Value]:
    """Runs a function and its backward pass in float32, for which the user wrote both.

    The pass is a Python function of residuals, in dtypes that only the user knows. If its products
    have an algorithm, JAX gets another function, which traces both passes and evaluates them.
    """
    if not gives_algorithm(context, equation):
        return run_as_traced(context, equation, values, is_weak=True)
    params = with_algorithms(context, equation)
    # JAX calls the passes later: they must not keep the values alive.
    interpreter, scope = context.interpreter.fresh(), f"{context.scope}/{FULL_PRECISION}".strip("/")

    def evaluate(fn: Any, *args: Any) -> Any:
        with marked_calls(interpreter.regions.policy_map.rules):
            traced = core.trace(fn, args, {})
        operands = [Value(array, is_weak=False) for array in traced.arrays]
        results = interpreter.evaluate(traced.jaxpr, operands, scope)
        return traced.rebuild([result.array for result in results])

    @jax.custom_vjp
    def call(*arrays: Array) -> list[Array]:
        return bind_arrays(equation, arrays, **params)

    def forward(*primals: CustomVJPPrimal) -> Any:
        arrays = [primal.value for primal in primals]
        varied = [p.perturbed and jnp.issubdtype(p.value.dtype, jnp.inexact) for p in primals]

        def pullback_of(arrays: list[Array]) -> Any:
            def run(given: list[Any]) -> list[Array]:
                pairs = zip(given, arrays, strict=True)
                return bind_arrays(equation, [a if g is None else g for g, a in pairs])

            given = [a if is_varied else None for a, is_varied in zip(arrays, varied, strict=True)]
            return jax.vjp(run, given)

        return evaluate(pullback_of, arrays)

    def backward(pullback: Any, cotangents: Any) -> Any:
        cotangents = [_instantiated(cotangent) for cotangent in cotangents]
        (slopes,) = evaluate(lambda pull, cts: pull(cts), pullback, cotangents)
        return tuple(slopes)  # None where an operand does not vary

    call.defvjp(forward, backward, symbolic_zeros=True)
    arrays = call(*cast_operands(equation, values, FLOAT32))
    tangent = any(value.tangent for value in values)
    return [Value(array, is_weak=True, tangent=tangent) for array in arrays]


def _instantiated(cotangent: Any) -> Any:
    """Returns a cotangent as an array; JAX marks those that are zero."""
    if not isinstance(cotangent, SymbolicZero):
        return cotangent
    aval: Any = cotangent.aval
    return (np if aval.dtype == jax.dtypes.float0 else jnp).zeros(aval.shape, aval.dtype)
