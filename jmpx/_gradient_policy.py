"""What the policy of a gradient function does, and warnings where it does not do what it says."""

import contextlib
import functools
import inspect
import os
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from jmpx._contexts import casts_watched, parameters_cast
from jmpx._dtypes import DTypeLike, dtype_name
from jmpx._frameworks import imported_adapters
from jmpx._jaxpr import Jaxpr, evaluate, inner_jaxprs, trace
from jmpx._leaves import PyTree, is_floating
from jmpx._mappings import is_mapping
from jmpx._matmul import is_algorithm
from jmpx._policy import Policy
from jmpx._policy_map import PolicyMap, PolicyMapLike, get_policy_map
from jmpx._policy_strings import KEYS, get_policy, without_last_semicolon
from jmpx._tree import AxisName

R = TypeVar("R")
_HALF = re.compile(r"\bhalf\b", re.IGNORECASE)


class Precision(NamedTuple):
    """What a gradient function does by its policy.

    Attributes:
        cast: casts arguments.
        matmul: the algorithm of products; None leaves it to what surrounds the call.
        reduce_dtype: the dtype in which gradients are summed over devices; None means their own.
        policy_map: the policy map, if the policy is one. Adapters and autocast cast by it, in the
            differentiated function.
    """

    cast: Callable[[PyTree], PyTree] = lambda tree: tree
    matmul: str | None = None
    reduce_dtype: DTypeLike | None = None
    policy_map: PolicyMap | None = None

    @classmethod
    def of(cls, policy: Policy | PolicyMap) -> "Precision":
        """Returns what a policy or a policy map has a gradient function do."""
        if isinstance(policy, PolicyMap):
            return cls(reduce_dtype=policy.default.reduce_dtype, policy_map=policy)
        matmul = None if _is_ignored(policy) else policy.matmul_precision
        return cls(policy.cast_to_compute, matmul, policy.reduce_dtype)


def precision_finder(
    policy: PolicyMapLike | None,
    use_mixed_precision: bool,
    axis_name: AxisName | None,
) -> Callable[[], Precision]:
    """Checks a policy now, and returns a function that returns what it has to be done.

    The gradient function calls that when it is called itself: only then may `half` ask JAX for its
    backend, which starts it.
    """
    given: Any = "half" if policy is None else policy
    if isinstance(given, str) and _HALF.search(given):
        try:
            checked = _parse(_HALF.sub("float16", given))
        except ValueError:
            checked = _parse(given)  # raises the same error, which shows the user's own string
    else:
        given = checked = _parse(given)
    if not use_mixed_precision:
        return Precision
    _warn_of_unused_fields(checked, axis_name)
    return lambda: Precision.of(_parse(given))


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


def _is_ignored(policy: Policy) -> bool:
    """Whether a policy has a dot algorithm, but computes in 16 bits.

    The algorithm is for products of float32. Those of 16 bits would take it, too, and multiply in
    another way.
    """
    return is_algorithm(policy.matmul_precision) and np.dtype(policy.compute_dtype).itemsize < 4


def _warn_of_unused_fields(policy: Policy | PolicyMap, axis_name: AxisName | None) -> None:
    default = policy.default if isinstance(policy, PolicyMap) else policy
    if default.reduce_dtype is not None and axis_name is None:
        _warn(
            f"reduce={dtype_name(default.reduce_dtype)} of the gradient function's policy reduces "
            "nothing without an axis_name: give the name of the axis of jax.shard_map or jax.pmap "
            "as axis_name, or leave reduce out; under jax.jit alone XLA writes the collectives, "
            "whose dtype jmpx does not set."
        )
    if isinstance(policy, Policy) and _is_ignored(policy):
        _warn(
            f"matmul={policy.matmul_precision} of the gradient function's policy is not set, as "
            f"products in {dtype_name(policy.compute_dtype)} would take that algorithm, too: "
            "compute in float32, or write a word such as matmul=highest, which products of 16 "
            "bits ignore."
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
            "first argument uncast by uncast_argnums=0."
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


# The files that are on the stack between the warning and the user's call.
_INTERNAL = (
    os.path.dirname(__file__) + os.sep,
    os.path.dirname(jax.__file__) + os.sep,
    contextlib.__file__,
)


def _warn(message: str) -> None:
    """Warns at the line of the user that calls or makes the gradient function."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_INTERNAL):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
