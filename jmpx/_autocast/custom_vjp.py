"""Functions that have their own backward pass."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from jmpx._autocast.binding import bind_arrays, run_as_traced
from jmpx._autocast.products import gives_algorithm, with_algorithms
from jmpx._autocast.rules import Operation, register
from jmpx._autocast.value import FLOAT32, Array, Value
from jmpx._base.leaves import PyTree
from jmpx._base.stateful import Function
from jmpx._jaxprs import core
from jmpx._jaxprs.scopes import FULL_PRECISION
from jmpx._jaxprs.types import Aval
from jmpx._policies.modules import marked_calls


@register("custom_vjp_call", everywhere=True)
def custom_vjp(operation: Operation) -> list[Value]:
    """Runs a function and its backward pass in float32, for which the user wrote both.

    The pass is a Python function of residuals, in dtypes that only the user knows. If its products
    have an algorithm, JAX gets another function, which traces both passes and evaluates them.
    """
    if not gives_algorithm(operation):
        return run_as_traced(operation, is_weak=True)
    equation, params = operation.equation, with_algorithms(operation)
    # JAX calls the passes later: they must not keep the values alive.
    interpreter = operation.interpreter.fresh()
    scope = f"{operation.scope}/{FULL_PRECISION}".strip("/")

    def evaluate(fn: Function, *args: PyTree) -> PyTree:
        with marked_calls(interpreter.regions.policy_map.rules):
            traced = core.trace(fn, args, {})
        operands = [Value(array, is_weak=False) for array in traced.arrays]
        results = interpreter.evaluate(traced.jaxpr, operands, scope)
        return traced.rebuild([result.array for result in results])

    @jax.custom_vjp
    def call(*arrays: Array) -> list[Array]:
        return bind_arrays(equation, arrays, **params)

    def forward(*primals: CustomVJPPrimal) -> PyTree:
        arrays = [primal.value for primal in primals]
        varied = [p.perturbed and jnp.issubdtype(p.value.dtype, jnp.inexact) for p in primals]

        def pullback_of(arrays: list[Array]) -> PyTree:
            def run(given: list[Array | None]) -> list[Array]:
                pairs = zip(given, arrays, strict=True)
                return bind_arrays(equation, [a if g is None else g for g, a in pairs])

            pairs = zip(arrays, varied, strict=True)
            return jax.vjp(run, [array if is_varied else None for array, is_varied in pairs])

        return evaluate(pullback_of, arrays)

    def backward(pullback: PyTree, cotangents: PyTree) -> tuple[PyTree, ...]:
        cotangents = [_instantiated(cotangent) for cotangent in cotangents]
        (slopes,) = evaluate(lambda pull, cts: pull(cts), pullback, cotangents)
        return tuple(slopes)  # None where an operand does not vary

    call.defvjp(forward, backward, symbolic_zeros=True)
    arrays = call(*operation.arrays(FLOAT32))
    return [Value(array, is_weak=True, tangent=operation.is_tangent) for array in arrays]


def _instantiated(cotangent: Array | SymbolicZero) -> Array:
    """Returns a cotangent as an array; JAX marks those that are zero."""
    if not isinstance(cotangent, SymbolicZero):
        return cotangent
    aval: Aval = cotangent.aval
    return (np if aval.dtype == jax.dtypes.float0 else jnp).zeros(aval.shape, aval.dtype)
