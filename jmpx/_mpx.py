"""The gradient functions as MPX has them, which can be told to use no mixed precision."""

from collections.abc import Callable
from typing import Any, Unpack

from jmpx._differentiation import Options
from jmpx._gradient import GradientOptions, gradients_of, value_and_gradients_of
from jmpx._gradient_results import Gradients, GradientsAndAux, ValueAndGradients
from jmpx._loss_scale import LossScale


def filter_value_and_grad(
    func: Callable[..., Any],
    scaling: LossScale,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
    **options: Unpack[GradientOptions],
) -> Callable[..., ValueAndGradients[Any, Any]]:
    """Makes a function that computes a loss and its gradients, as MPX's of this name.

    It is `jmpx.filter_value_and_grad` with MPX's fourth argument (arXiv 2507.03312, section 3.4).

    Args:
        func: a function of pytrees that returns a loss, or `(loss, aux)`.
        scaling: the loss scale.
        has_aux: whether `func` returns `(loss, aux)`.
        use_mixed_precision: if False, nothing is cast, scaled or checked, no field of the policy
            counts, and the gradient is the plain one, averaged in its own dtype, and cast to
            `grad_dtype` at the end.
        **options: those of `jmpx.filter_value_and_grad`.

    Returns:
        A function that returns `(value, scaling, grads_finite, grads)`, a `ValueAndGradients`.

    Raises:
        TypeError: as `jmpx.filter_value_and_grad`.
        ValueError: as `jmpx.filter_value_and_grad`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmpx import _mpx as mpx, StaticLossScale
        >>> loss_fn = lambda w: ((w + 2.0**-12) ** 2).sum()
        >>> for mixed in True, False:
        ...     grad_fn = mpx.filter_value_and_grad(loss_fn, StaticLossScale(8), False, mixed)
        ...     bool(grad_fn(jnp.ones(1)).grads[0] == 2)
        True
        False
    """
    made = Options.of(func, scaling, has_aux, use_mixed_precision, **options)
    return value_and_gradients_of(made)


def filter_grad(
    func: Callable[..., Any],
    scaling: LossScale,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
    **options: Unpack[GradientOptions],
) -> Callable[..., Gradients[Any] | GradientsAndAux[Any, Any]]:
    """Makes a function that computes gradients, as MPX's of this name.

    It is `jmpx.filter_grad` with MPX's fourth argument.

    Args:
        func: as of `filter_value_and_grad`.
        scaling: the loss scale.
        has_aux: whether `func` returns `(loss, aux)`.
        use_mixed_precision: as of `filter_value_and_grad`.
        **options: those of `jmpx.filter_grad`.

    Returns:
        A function that returns `(scaling, grads_finite, grads)` or, with `has_aux`,
        `(scaling, grads_finite, grads, aux)`: a `Gradients` or a `GradientsAndAux`.

    Raises:
        TypeError: as `jmpx.filter_grad`.
        ValueError: as `jmpx.filter_grad`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmpx import _mpx as mpx, StaticLossScale
        >>> grad_fn = mpx.filter_grad(jnp.sum, StaticLossScale(8), use_mixed_precision=False)
        >>> grad_fn(jnp.ones(2)).grads
        Array([1., 1.], dtype=float32)
    """
    return gradients_of(Options.of(func, scaling, has_aux, use_mixed_precision, **options))
