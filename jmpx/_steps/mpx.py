"""MPX's words, casts and defaults: `import jmpx.mpx as mpx` is all that its users change.

MPX (arXiv 2507.03312) computes in float16 unless it is told otherwise, and its loss scale stays
within float16. What jmpx mends of it: gradients are unscaled by the scale that the backward pass
used, the loss is scaled in float32, and casts reach NumPy arrays and float64, too.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeVar, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jmpx._adapters.function_casts import (
    cast_function as cast_function,
    force_full_precision as _force_full_precision,
)
from jmpx._base.casts import (
    cast_to_full as cast_to_float32,
    cast_to_full as cast_to_full_precision,
    cast_tree as cast_tree,
)
from jmpx._base.dtypes import DTypeLike, as_dtype
from jmpx._base.leaves import PyTree
from jmpx._base.trees import all_finite as all_finite, select_tree as select_tree
from jmpx._scales.arguments import LARGEST_FLOAT16
from jmpx._scales.dynamic import DynamicLossScale, register_pytree
from jmpx._scales.kinds import LossScale
from jmpx._steps.differentiation import Options
from jmpx._steps.gradient import (
    AuxT,
    GradientOptions,
    P,
    ScalingT,
    gradients_of,
    value_and_gradients_of,
    with_options_spelled,
)
from jmpx._steps.optimizer import optimizer_update as optimizer_update
from jmpx._steps.results import Gradients, GradientsAndAux, ValueAndGradients

T = TypeVar("T")
R = TypeVar("R")

__all__ = (
    "BFLOAT16_MAX",
    "DynamicLossScaling",
    "FLOAT16_MAX",
    "HALF_PRECISION_DATATYPE",
    "all_finite",
    "calculate_scaled_grad",
    "cast_function",
    "cast_to_bfloat16",
    "cast_to_float16",
    "cast_to_float32",
    "cast_to_full_precision",
    "cast_to_half_precision",
    "cast_tree",
    "filter_grad",
    "filter_value_and_grad",
    "force_full_precision",
    "half_precision_datatype",
    "optimizer_update",
    "scaled",
    "select_tree",
    "set_half_precision_datatype",
)

FLOAT16_MAX, BFLOAT16_MAX = np.float32(LARGEST_FLOAT16), np.float32(255 * 2.0**120)
HALF_PRECISION_DATATYPE: type[Any] = jnp.float16  # the default
_half: type[Any] = HALF_PRECISION_DATATYPE


def half_precision_datatype() -> type[Any]:
    """Returns the dtype of half precision: float16, or what `set_half_precision_datatype` set."""
    return _half


def set_half_precision_datatype(datatype: DTypeLike) -> None:
    """Sets the dtype of half precision for the functions of `jmpx.mpx` that are called from now on.

    Args:
        datatype: float16 or bfloat16. What `jax.jit` has compiled before keeps the dtype that was
            set then.

    Raises:
        TypeError: if it is no dtype.
        ValueError: if it is another dtype.

    Example:
        >>> import jax.numpy as jnp
        >>> import jmpx.mpx as mpx
        >>> mpx.set_half_precision_datatype("bfloat16")
        >>> mpx.cast_to_half_precision(jnp.ones(2)).dtype.name
        'bfloat16'
        >>> mpx.set_half_precision_datatype(mpx.HALF_PRECISION_DATATYPE)
    """
    global _half
    name = np.dtype(as_dtype(datatype)).name
    if name not in ("float16", "bfloat16"):
        raise ValueError(
            f"Expected float16 or bfloat16 as half precision, got {name}: jmpx.mpx.cast_tree and "
            "jmpx.mpx.cast_function take other dtypes."
        )
    _half = jnp.float16 if name == "float16" else jnp.bfloat16


def cast_to_float16(tree: T) -> T:
    """Casts the floating leaves of a pytree to float16; values above 65504 become inf.

    Example:
        >>> import numpy as np
        >>> import jmpx.mpx as mpx
        >>> mpx.cast_to_float16(np.ones(2, np.float32)).dtype.name
        'float16'
    """
    return cast_tree(tree, jnp.float16)


def cast_to_bfloat16(tree: T) -> T:
    """Casts the floating leaves of a pytree to bfloat16.

    Example:
        >>> import numpy as np
        >>> import jmpx.mpx as mpx
        >>> mpx.cast_to_bfloat16(np.ones(2, np.float32)).dtype.name
        'bfloat16'
    """
    return cast_tree(tree, jnp.bfloat16)


def cast_to_half_precision(tree: T) -> T:
    """Casts the floating leaves of a pytree to `half_precision_datatype()`."""
    return cast_tree(tree, _half)


def force_full_precision(
    func: Callable[P, R], return_dtype: DTypeLike = "float16"
) -> Callable[P, R]:
    """Makes a function run in float32 and return float16, as `jmpx.force_full_precision` does.

    That one returns the dtype of the arguments if no other is given, and is the better default.

    Args:
        func: any callable of pytrees.
        return_dtype: what the floating leaves of the result are cast to.

    Returns:
        A function with the signature of `func`.

    Raises:
        TypeError: as `jmpx.force_full_precision`.
        ValueError: as `jmpx.force_full_precision`.

    Example:
        >>> import jax.numpy as jnp
        >>> import jmpx.mpx as mpx
        >>> mpx.force_full_precision(jnp.mean)(jnp.full(4096, 100, jnp.float16))
        Array(100., dtype=float16)
    """
    return _force_full_precision(func, return_dtype)


class DynamicLossScaling(DynamicLossScale):
    """A `jmpx.DynamicLossScale` by MPX's name and arguments (arXiv 2507.03312, section 3.3).

    It never grows beyond 65504, float16's largest number. Neither does MPX's, so that a run takes
    the same steps with both. A `jmpx.DynamicLossScale` grows beyond that.

    Args:
        loss_scaling: the factor to begin with.
        min_loss_scaling: the scale never falls below this number.
        factor: what the scale is multiplied by when it grows, and divided by when it shrinks.
        period: finite steps from one growth to the next.
        counter: finite steps since the scale last changed; None means 0.
        **others: arguments of `jmpx.DynamicLossScale`.

    Raises:
        TypeError: as `jmpx.DynamicLossScale`.
        ValueError: as `jmpx.DynamicLossScale`.

    Example:
        >>> import jax.numpy as jnp
        >>> import jmpx.mpx as mpx
        >>> scaling = mpx.DynamicLossScaling(jnp.float32(2**15), jnp.float32(1), period=1)
        >>> float(scaling.scale(jnp.float16(2)))
        65536.0
        >>> float(scaling.adjust(True).loss_scaling)
        65504.0
    """

    __module__ = "jmpx.mpx"

    def __init__(
        self,
        loss_scaling: Any = 2**15,
        min_loss_scaling: Any = 1.0,
        factor: float = 2,
        period: int = 2000,
        counter: Any = None,
        **others: Any,
    ) -> None:
        given = {"loss_scale": loss_scaling, "min_loss_scale": min_loss_scaling}
        given |= {"max_loss_scale": LARGEST_FLOAT16} | others
        counter = 0 if counter is None else counter
        super().__init__(factor=factor, period=period, counter=counter, **given)

    @property
    def loss_scaling(self) -> Any:
        """The factor, `.loss_scale` of jmpx's loss scales."""
        return self.loss_scale

    @property
    def min_loss_scaling(self) -> float:
        """The number below which the scale never falls."""
        return self.min_loss_scale


register_pytree(DynamicLossScaling)


def scaled(
    func: Callable[..., Any], scaling: LossScale, has_aux: bool = False
) -> Callable[..., Any]:
    """Makes a function that returns the scaled loss of `func`, in float32.

    Args:
        func: a function that returns a loss, any pytree, or with `has_aux` the pair `(loss, aux)`.
        scaling: the loss scale.
        has_aux: whether `func` returns `(loss, aux)`, of which `aux` is left as it is.

    Returns:
        A function with the signature of `func`.

    Example:
        >>> import jax.numpy as jnp
        >>> import jmpx.mpx as mpx
        >>> mpx.scaled(jnp.sum, mpx.DynamicLossScaling(8.0))(jnp.ones(2))
        Array(16., dtype=float32)
    """

    @functools.wraps(func, updated=())
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not has_aux:
            return scaling.scale(func(*args, **kwargs))
        value, aux = func(*args, **kwargs)
        return scaling.scale(value), aux

    return wrapper


def calculate_scaled_grad(
    func: Callable[..., Any],
    scaling: LossScale,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
) -> Callable[..., tuple[Any, PyTree]]:
    """Makes a function that computes a scaled loss and its scaled gradients, in half precision.

    `filter_value_and_grad` also unscales them, in float32, and tells whether they are finite.

    Args:
        func: as of `filter_value_and_grad`.
        scaling: the loss scale.
        has_aux: whether `func` returns `(loss, aux)`.
        use_mixed_precision: if False, nothing is cast or scaled.

    Returns:
        A function that returns `(value, grads)`, with `has_aux` `((value, aux), grads)`.

    Raises:
        TypeError: as `jmpx.filter_value_and_grad`.
        ValueError: as `jmpx.filter_value_and_grad`.

    Example:
        >>> import jax.numpy as jnp
        >>> import jmpx.mpx as mpx
        >>> value, grads = mpx.calculate_scaled_grad(jnp.sum, mpx.DynamicLossScaling(8.0))(
        ...     jnp.ones(2)
        ... )
        >>> float(value), grads
        (16.0, Array([8., 8.], dtype=float16))
    """
    run = scaled(func, scaling, has_aux) if use_mixed_precision else func
    plain = filter_value_and_grad(run, scaling, has_aux, use_mixed_precision=False)

    def gradient(*args: Any, **kwargs: Any) -> tuple[Any, PyTree]:
        if use_mixed_precision:
            args, kwargs = cast_to_half_precision((args, kwargs))
        result = plain(*args, **kwargs)
        return result.value, result.grads

    return gradient


@overload
def filter_value_and_grad(
    func: Callable[P, ArrayLike],
    scaling: ScalingT,
    has_aux: Literal[False] = False,
    use_mixed_precision: bool = True,
    **options: Unpack[GradientOptions],
) -> Callable[P, ValueAndGradients[jax.Array, ScalingT]]: ...


@overload
def filter_value_and_grad(
    func: Callable[P, tuple[ArrayLike, AuxT]],
    scaling: ScalingT,
    has_aux: Literal[True],
    use_mixed_precision: bool = True,
    **options: Unpack[GradientOptions],
) -> Callable[P, ValueAndGradients[tuple[jax.Array, AuxT], ScalingT]]: ...


@with_options_spelled
def filter_value_and_grad(
    func: Callable[..., Any],
    scaling: LossScale,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
    **options: Any,
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
        **options: those of `jmpx.filter_value_and_grad`; without a policy, the arguments are cast
            to `half_precision_datatype()`, as it is at the call.

    Returns:
        A function that returns `(value, scaling, grads_finite, grads)`, a `ValueAndGradients`.

    Raises:
        TypeError: as `jmpx.filter_value_and_grad`.
        ValueError: as `jmpx.filter_value_and_grad`.

    Example:
        >>> import jax.numpy as jnp
        >>> import jmpx
        >>> import jmpx.mpx as mpx
        >>> loss_fn = lambda w: ((w + 2.0**-12) ** 2).sum()
        >>> for mixed in True, False:
        ...     grad_fn = mpx.filter_value_and_grad(loss_fn, jmpx.StaticLossScale(8), False, mixed)
        ...     bool(grad_fn(jnp.ones(1)).grads[0] == 2)
        True
        False
    """
    given = func, scaling, has_aux, use_mixed_precision
    return _in_half(value_and_gradients_of, given, dict(options))


@overload
def filter_grad(
    func: Callable[P, ArrayLike],
    scaling: ScalingT,
    has_aux: Literal[False] = False,
    use_mixed_precision: bool = True,
    **options: Unpack[GradientOptions],
) -> Callable[P, Gradients[ScalingT]]: ...


@overload
def filter_grad(
    func: Callable[P, tuple[ArrayLike, AuxT]],
    scaling: ScalingT,
    has_aux: Literal[True],
    use_mixed_precision: bool = True,
    **options: Unpack[GradientOptions],
) -> Callable[P, GradientsAndAux[ScalingT, AuxT]]: ...


@with_options_spelled
def filter_grad(
    func: Callable[..., Any],
    scaling: LossScale,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
    **options: Any,
) -> Callable[..., Gradients[Any] | GradientsAndAux[Any, Any]]:
    """Makes a function that computes gradients, as MPX's of this name.

    It is `jmpx.filter_grad` with MPX's fourth argument.

    Args:
        func: as of `filter_value_and_grad`.
        scaling: the loss scale.
        has_aux: whether `func` returns `(loss, aux)`.
        use_mixed_precision: as of `filter_value_and_grad`.
        **options: as of `filter_value_and_grad`.

    Returns:
        A function that returns `(scaling, grads_finite, grads)` or, with `has_aux`,
        `(scaling, grads_finite, grads, aux)`: a `Gradients` or a `GradientsAndAux`.

    Raises:
        TypeError: as `jmpx.filter_grad`.
        ValueError: as `jmpx.filter_grad`.

    Example:
        >>> import jax.numpy as jnp
        >>> import jmpx
        >>> import jmpx.mpx as mpx
        >>> grad_fn = mpx.filter_grad(jnp.sum, jmpx.StaticLossScale(8), use_mixed_precision=False)
        >>> grad_fn(jnp.ones(2)).grads
        Array([1., 1.], dtype=float32)
    """
    given = func, scaling, has_aux, use_mixed_precision
    return _in_half(gradients_of, given, dict(options))


def _in_half(
    made_of: Callable[[Options], Callable[..., R]], given: Any, options: dict[str, Any]
) -> Callable[..., R]:
    """Makes a gradient function; without a policy, its half precision is that of each call."""
    if options.get("policy") is not None:
        return made_of(Options.of(*given, **options))

    def make() -> Callable[..., R]:
        return made_of(Options.of(*given, **options | {"policy": np.dtype(_half).name}))

    @functools.wraps(make(), updated=())
    def wrapper(*args: Any, **kwargs: Any) -> R:
        return make()(*args, **kwargs)

    return wrapper
