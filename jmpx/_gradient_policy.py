"""What the policy of a gradient function does, and warnings where it does not do what it says."""

import contextlib
import functools
import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jmpx._contexts import casts_noted, casts_watched, parameters_cast
from jmpx._dtypes import DTypeLike, dtype_name
from jmpx._frameworks import imported_adapters
from jmpx._jaxpr import Jaxpr, evaluate, inner_jaxprs, trace
from jmpx._leaves import PyTree, is_floating, is_floating_dtype
from jmpx._loss_scale import DynamicLossScale, LossScale, NoOpLossScale
from jmpx._mappings import is_list, is_mapping
from jmpx._matmul import is_algorithm, matmul_region
from jmpx._messages import user_stacklevel
from jmpx._policy import Policy
from jmpx._policy_map import PolicyMap, PolicyMapLike, get_policy_map
from jmpx._policy_strings import KEYS, get_policy, without_last_semicolon

R = TypeVar("R")
_HALF = re.compile(r"\bhalf\b", re.IGNORECASE)


class Precision(NamedTuple):
    """What a gradient function does by its policy.

    Attributes:
        cast: casts arguments.
        compute_dtype: the dtype that they are cast to; None if they are not.
        matmul: the algorithm of products; None leaves it to what surrounds the call.
        reduce_dtype: the dtype in which gradients are summed over devices; None means their own.
        policy_map: the policy map, if the policy is one. Adapters and autocast cast by it, in the
            differentiated function.
    """

    cast: Callable[[PyTree], PyTree] = lambda tree: tree
    compute_dtype: DTypeLike | None = None
    matmul: str | None = None
    reduce_dtype: DTypeLike | None = None
    policy_map: PolicyMap | None = None

    @classmethod
    def of(cls, policy: Policy | PolicyMap) -> "Precision":
        """Returns what a policy or a policy map has a gradient function do."""
        if isinstance(policy, PolicyMap):
            return cls(reduce_dtype=policy.default.reduce_dtype, policy_map=policy)
        return cls(
            policy.cast_to_compute,
            policy.compute_dtype,
            policy.matmul_precision,
            policy.reduce_dtype,
        )

    def products(self) -> AbstractContextManager[Any]:
        """Returns the context in which products use the algorithm."""
        if self.compute_dtype is None:
            return contextlib.nullcontext()
        return matmul_region(self.matmul, self.compute_dtype)


def precision_finder(
    policy: PolicyMapLike | None,
    use_mixed_precision: bool,
    averages: bool,
) -> Callable[[], Precision]:
    """Checks a policy now, and returns a function that returns what it has to be done.

    The gradient function calls that when it is called itself: only then may `half` ask JAX for its
    backend, which starts it.
    """
    given: Any = "half" if policy is None else policy
    try:
        checked = _parse(_with_float16(given))
    except (TypeError, ValueError):
        checked = _parse(given)  # raises the same error, which shows what the user wrote
    if not (isinstance(given, str) or is_mapping(given)) or _with_float16(given) == given:
        given = checked
    if not use_mixed_precision:
        return Precision
    if not averages:
        _warn_of_reduce(checked)
    return lambda: Precision.of(_parse(given))


def _with_float16(policy: Any, depth: int = 4) -> Any:
    """Returns a string, or a mapping of strings, with float16 in place of `half`.

    Args:
        policy: the string or the mapping; anything else is returned as it is.
        depth: how deep a mapping is read; one of a policy map has rules in a list.
    """
    if isinstance(policy, str):
        return _HALF.sub("float16", policy)
    if depth and is_mapping(policy):
        return {key: _with_float16(value, depth - 1) for key, value in dict(policy).items()}
    if depth and is_list(policy):
        return [_with_float16(value, depth - 1) for value in policy]
    return policy


def _parse(policy: Any) -> Policy | PolicyMap:
    """Returns the policy map of what has rules, and the policy of what has none."""
    if isinstance(policy, PolicyMap) or (isinstance(policy, str) and _has_rules(policy)):
        return get_policy_map(policy)
    if is_mapping(policy):
        policy_map = get_policy_map(policy)
        return policy_map if policy_map.rules else policy_map.default
    return get_policy(policy)


def _has_rules(text: str) -> bool:
    """Whether a string has rules; `c: bf16` alone has none, and `get_policy` says what it means."""
    part = without_last_semicolon(text)
    selector, colon, _ = part.partition(":")
    return bool(colon) and (";" in part or selector.strip().lower() not in KEYS)


def _warn_of_reduce(policy: Policy | PolicyMap) -> None:
    default = policy.default if isinstance(policy, PolicyMap) else policy
    if default.reduce_dtype is not None:
        _warn(
            f"reduce={dtype_name(default.reduce_dtype)} of the gradient function's policy reduces "
            "nothing without a mean over devices: give over=jmpx.Over(...) with the axis of "
            "jax.shard_map or jax.pmap, under jax.jit alone batch=jmpx.Batch(sharding=...) with "
            "that of the batch, or leave reduce out."
        )


@contextlib.contextmanager
def casts_checked(
    precision: Precision, func: Callable[..., Any], before: PyTree, after: PyTree
) -> Iterator[None]:
    """Runs the differentiated function, and warns if too much or too little casts inside of it.

    Args:
        precision: what the gradient function does.
        func: the function.
        before: its first argument, as it was given to the gradient function.
        after: its first argument, cast.
    """
    if precision.policy_map is None:
        with parameters_cast(_are_rounded(before, after)) as casts:
            yield
        _warn_of_casts(" and ".join(casts))
        return
    with contextlib.ExitStack() as stack:
        casts = stack.enter_context(casts_watched((precision.policy_map, _code_of(func))))
        for adapter in imported_adapters():
            stack.enter_context(adapter.noted_casts())
        yield
    if not casts:
        _warn(
            f"The gradient function casts nothing by the policy map {str(precision.policy_map)!r}, "
            "which is for what runs inside of it, and nothing there casts either: open the map by "
            "policies, with_policies or jmpx.autocast inside of the function, or give the "
            "gradient function a policy without rules, which casts its arguments."
        )


def warn_of_no_scale(precision: Precision, scaling: LossScale) -> None:
    """Warns if gradients are computed in float16 without a loss scale."""
    policy_map, dtypes = precision.policy_map, {precision.compute_dtype}
    if policy_map is not None:
        dtypes = {policy_map.default.compute_dtype, *(rule.compute for rule in policy_map.rules)}
    if type(scaling) is NoOpLossScale and jnp.float16 in dtypes:
        _warn(
            "The gradient function computes in float16 without a loss scale, so that gradients "
            "below 2**-24 become 0: give it jmpx.DynamicLossScale() and carry that from step to "
            "step, compute in bfloat16, or write jmpx.StaticLossScale(1) if it is meant so."
        )


@contextlib.contextmanager
def scale_needed(
    precision: Precision,
    scaling: LossScale,
    func: Callable[..., Any],
    run: Callable[[list[jax.Array]], Any],
    params: list[jax.Array],
) -> Iterator[None]:
    """Runs a pass in float32 with a dynamic loss scale, and warns if nothing casts in it.

    Only where neither jmpx nor a framework casts, the pass is traced once more, to look for casts
    by hand; no more for a function where there are any.

    Args:
        precision: what the gradient function does.
        scaling: the loss scale.
        func: the function that the user differentiates.
        run: the pass.
        params: its arguments.
    """
    in_float32 = precision.policy_map is None and precision.compute_dtype == jnp.float32
    if type(scaling) is not DynamicLossScale or not in_float32:
        yield
        return
    with contextlib.ExitStack() as stack:
        casts = stack.enter_context(casts_noted())
        for adapter in imported_adapters():
            stack.enter_context(adapter.noted_casts())
        yield
    code, is_float32 = _code_of(func), False
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


def _code_of(func: Callable[..., Any]) -> object:
    """Returns what functions that are made anew for each call have in common."""
    func = inspect.unwrap(func)
    while isinstance(func, functools.partial):
        func = inspect.unwrap(func.func)
    return getattr(func, "__code__", type(func))


def _are_rounded(before: PyTree, after: PyTree) -> bool:
    """Whether a cast has rounded any floating leaf: to fewer bits than it had, 16 or 8."""
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=False)
    return any(
        is_floating(new) and new.dtype.itemsize < min(4, old.dtype.itemsize)
        for old, new in pairs
        if is_floating(old)
    )


def _warn_of_casts(names: str) -> None:
    """Warns if something has cast parameters inside of a function that was given rounded ones.

    Args:
        names: the names of the functions that have cast; without any, there is no warning.
    """
    if names:
        _warn(
            f"The gradient function has cast its arguments to 16 bits before {names} inside of it "
            "casts them again, so that parts which are to run in float32 get rounded parameters: "
            'pass policy="full" or the policy map itself to the gradient function, or leave its '
            "first argument uncast by uncast=0."
        )


def warning_of_convolutions(
    func: Callable[[list[jax.Array]], R], params: list[jax.Array], matmul: str | None
) -> Callable[[list[jax.Array]], R]:
    """Traces a function once, and warns if it has convolutions under a dot algorithm.

    Args:
        func: the function; its result may hold any leaves.
        params: the arrays to trace it with.
        matmul: the algorithm of products; nothing is traced unless it is a dot algorithm.

    Returns:
        A function that does the same without another call of `func`.
    """
    if matmul is None or not is_algorithm(matmul):
        return func
    traced = trace(func, (params,), {})
    if _holds_convolution(traced.jaxpr, jax.lax.DotAlgorithmPreset[matmul]):
        _warn(
            f"matmul={matmul} of the gradient function's policy is a dot algorithm, which JAX "
            "ignores for the convolutions inside of the function: write a word such as "
            "matmul=highest, or give them a precision= of their own."
        )
    return lambda params: traced.rebuild(evaluate(traced.jaxpr, params))


def _holds_convolution(jaxpr: Jaxpr, algorithm: jax.lax.DotAlgorithmPreset) -> bool:
    """Whether a jaxpr has a convolution with this algorithm."""
    return any(
        (eqn.primitive.name == "conv_general_dilated" and eqn.params["precision"] == algorithm)
        or any(_holds_convolution(inner, algorithm) for inner in inner_jaxprs(eqn.params))
        for eqn in jaxpr.eqns
    )


def _warn(message: str) -> None:
    """Warns at the line of the user that calls or makes the gradient function."""
    warnings.warn(message, stacklevel=user_stacklevel("jax"))
