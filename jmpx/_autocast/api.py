"""Autocast as users call it."""

import functools
from collections.abc import Callable
from typing import Any, Literal, TypedDict, TypeVar, Unpack, overload

from jmpx._autocast.saving import get_saving
from jmpx._autocast.wrapped import applied
from jmpx._base.dtypes import DTypeLike, as_dtype, is_dtype
from jmpx._policies.map_strings import get_policy_map
from jmpx._policies.maps import PolicyMapLike

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Options(TypedDict, total=False):
    """The options of `autocast`."""

    output: DTypeLike | None
    save: Literal["products"] | None


@overload
def autocast(
    fn: _Function, policy: PolicyMapLike = ..., **options: Unpack[_Options]
) -> _Function: ...


@overload
def autocast(
    fn: None = None, policy: PolicyMapLike = ..., **options: Unpack[_Options]
) -> Callable[[_Function], _Function]: ...


def autocast(
    fn: Callable[..., Any] | None = None,
    policy: PolicyMapLike = "compute=bf16",
    *,
    output: DTypeLike | None = "traced",
    save: Literal["products"] | None = None,
) -> Callable[..., Any]:
    """Makes a function run in mixed precision, operation by operation, as `torch.autocast` does.

    Matrix products and convolutions that were traced in float32 run in the compute dtype, what
    needs range or digits in float32, and all else in the widest dtype of its operands, for which
    inputs, parameters and constants do not count beside the results of products. It all happens
    while JAX traces: put `jax.jit` around the train step. See docs/autocast.md.

    Apply it to the model, `transformed.apply` or `module.apply`, and compute the loss from the
    float32 output; for a whole loss, write `by=operations` in the policy of `apply_policy` or of a
    gradient function. Inside of autocast of the same policies, this is a plain call.

    Args:
        fn: any callable of pytrees, modules of Equinox and NNX included; None to decorate with
            arguments.
        policy: a policy map, or anything else that `get_policy_map` takes; only its compute dtypes
            and its algorithms of products (`matmul`) count. Selectors are classes and paths of
            modules, scopes of `jax.named_scope`, and operations (`op.exp`).
        output: "traced" gives results the dtypes that they have without autocast, None leaves them
            as they come, and a dtype casts the floating ones.
        save: what the backward pass keeps: None leaves that to JAX; "products" keeps what weight
            products and convolutions made, and computes the rest again.

    Returns:
        A function with the signature of `fn`; a `jmpx.types.Autocast` that holds `fn` if it is
        itself a pytree, such as a module.

    Raises:
        TypeError: if an argument is of a wrong type.
        ValueError: if an argument has no such value, or, when called, if `fn` changes an NNX module
            that it closes over, or a compute dtype has 8 bits.

    Warns:
        UserWarning: when called, of rules, algorithms and `save` without effect, and of products
            that stay in float32 although the policy gives them 16 bits.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import jmpx
        >>> @jmpx.autocast(policy="compute=bf16; op.tanh: f32", output=None)
        ... def f(w, b, x):
        ...     h = x @ w + b
        ...     return h, jnp.tanh(h), jnp.exp(h)
        >>> [y.dtype.name for y in f(jnp.ones((3, 2)), jnp.ones(2), jnp.ones((4, 3)))]
        ['bfloat16', 'float32', 'float32']
    """
    if fn is None:
        return functools.partial(autocast, policy=policy, output=output, save=save)
    if not callable(fn) or is_dtype(fn):
        raise TypeError(
            f"Expected a function to run under autocast, got {fn!r}: write jmpx.autocast(f, policy)"
            " or decorate the function with @jmpx.autocast(policy=...)."
        )
    policy_map = get_policy_map(policy)
    saving = get_saving(save or policy_map.save)
    if output is not None and output != "traced":
        output = as_dtype(output)
    return applied(fn, policy_map.applied_by("operations", "jmpx.autocast"), output, saving)
