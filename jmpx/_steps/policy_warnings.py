"""Warnings of a gradient function whose policy does not do what it says."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jmpx._adapters.applying import Application, code_of
from jmpx._base.contexts import casts_noted
from jmpx._base.dtypes import dtype_name
from jmpx._base.leaves import is_floating_dtype
from jmpx._base.messages import user_stacklevel
from jmpx._jaxprs.core import inner_jaxprs, trace
from jmpx._policies.frameworks import imported_adapters
from jmpx._policies.maps import PolicyMap
from jmpx._scales.kinds import DynamicLossScale, LossScale, NoOpLossScale


def warn_of_reduce(policy_map: PolicyMap) -> None:
    """Warns of a dtype of sums over devices, for a gradient function that sums over none."""
    reduce_dtype = policy_map.default.reduce_dtype
    if reduce_dtype is not None:
        _warn(
            f"reduce={dtype_name(reduce_dtype)} of the gradient function's policy reduces nothing "
            "without a mean over devices: give over=jmpx.Over(...) with the axis of jax.shard_map "
            "or jax.pmap, under jax.jit alone batch=jmpx.Batch(sharding=...) with that of the "
            "batch, or leave reduce out."
        )


def warn_of_no_scale(policy_map: PolicyMap | None, scaling: LossScale) -> None:
    """Warns if gradients are computed in float16 without a loss scale."""
    if policy_map is None or type(scaling) is not NoOpLossScale:
        return
    rules = () if policy_map.way == "arguments" else policy_map.rules
    if jnp.float16 in {policy_map.default.compute_dtype, *(rule.compute for rule in rules)}:
        _warn(
            "The gradient function computes in float16 without a loss scale, so that gradients "
            "below 2**-24 become 0: give it jmpx.DynamicLossScale() and carry that from step to "
            "step, compute in bfloat16, or write jmpx.StaticLossScale(1) if it is meant so."
        )


@contextlib.contextmanager
def scale_needed(
    application: Application,
    scaling: LossScale,
    func: Callable[..., Any],
    run: Callable[[list[jax.Array]], Any],
    params: list[jax.Array],
) -> Iterator[None]:
    """Runs a pass in float32 with a dynamic loss scale, and warns if nothing casts in it.

    Only where neither jmpx nor a framework casts, the pass is traced once more, to look for casts
    by hand; no more for a function where there are any.

    Args:
        application: what the gradient function does by its policy.
        scaling: the loss scale.
        func: the function that the user differentiates.
        run: the pass.
        params: its arguments.
    """
    policy = application.arguments_policy
    in_float32 = policy is not None and policy.compute_dtype == jnp.float32
    if not isinstance(scaling, DynamicLossScale) or not in_float32:
        yield
        return
    with contextlib.ExitStack() as stack:
        casts = stack.enter_context(casts_noted())
        for adapter in imported_adapters():
            stack.enter_context(adapter.noted_casts())
        yield
    code, is_float32 = code_of(func), False
    if casts or code in _casting_by_hand:
        return
    with contextlib.suppress(Exception):  # A function may run once only, or not with tracers.
        is_float32 = not _holds_few_bits(trace(run, (params,), {}).jaxpr.jaxpr)
    if not is_float32:
        _casting_by_hand.add(code)
    else:
        _warn(
            "The gradient function has a dynamic loss scale, and nothing in it runs in float16: "
            "its policy is float32, and nothing inside casts: give it a policy that computes in "
            "float16, such as policy='c=f16', or jmpx.NoOpLossScale()."
        )


# The code of functions that cast by hand, as far as `scale_needed` could tell.
_casting_by_hand: set[object] = set()


def _holds_few_bits(jaxpr: Any) -> bool:
    """Whether a jaxpr has a floating array of 16 bits or fewer."""
    variables = [
        *jaxpr.invars,
        *jaxpr.constvars,
        *(var for eqn in jaxpr.eqns for var in eqn.outvars),
    ]
    dtypes = {var.aval.dtype for var in variables if hasattr(var.aval, "dtype")}
    return any(is_floating_dtype(dtype) and dtype.itemsize < 4 for dtype in dtypes) or any(
        _holds_few_bits(getattr(inner, "jaxpr", inner))
        for eqn in jaxpr.eqns
        for inner in inner_jaxprs(eqn.params)
    )


def _warn(message: str) -> None:
    """Warns at the line of the user that calls or makes the gradient function."""
    warnings.warn(message, stacklevel=user_stacklevel("jax"))
