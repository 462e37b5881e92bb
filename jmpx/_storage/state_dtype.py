"""Optimizer state in a dtype of its own, whatever that of the parameters."""

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmpx._base.casts import cast_tree
from jmpx._base.dtypes import DTypeLike, ScalarType, as_dtype, check_enabled, dtype_name
from jmpx._base.leaves import PyTree, is_array, is_floating
from jmpx._storage.rounding import stochastic_round
from jmpx._storage.transformations import check_seed, step_key, widen, with_extra_args

if TYPE_CHECKING:
    import optax

_STREAM = 1  # of keys; low_precision_params has 0


class StateDtypeState(NamedTuple):
    """The state of `with_state_dtype`.

    Attributes:
        inner_state: the state of the wrapped optimizer, its arrays in the dtype asked for.
        count: how many updates there were: an int32 array of shape ().

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import jmpx
        >>> optimizer = jmpx.optim.with_state_dtype(optax.sgd(0.1, momentum=0.9), jnp.bfloat16)
        >>> state = optimizer.init({"w": jnp.ones(2)})
        >>> isinstance(state, jmpx.types.StateDtypeState)
        True
        >>> state.inner_state[0].trace["w"].dtype.name
        'bfloat16'
    """

    __module__ = "jmpx.types"

    inner_state: PyTree
    count: jax.Array


def with_state_dtype(
    optimizer: "optax.GradientTransformation | optax.MultiSteps", dtype: DTypeLike, *, seed: int = 0
) -> "optax.GradientTransformationExtraArgs":
    """Keeps the state of an optimizer in a dtype of its own: float32, or bfloat16 to save memory.

    Optax makes state in the dtype of the parameters, and so the moments of bfloat16 parameters
    stall: after 4,000 equal gradients g, the second moment of Adam is 0.25 to 0.5 g**2, by g,
    rather than 0.982 g**2. With this, the optimizer gets parameters, gradients and state in
    float32, and its updates are float32; only between the steps its state is in `dtype`.

    bfloat16 is rounded by chance, as by `jmpx.optim.stochastic_round`, so that moments are right on
    average. Rounded to the nearest, a second moment at b2=0.999 ends at 0.33 times the right one
    for gradients that are all 0.3, and at 1.97 times for normal ones. By chance, it has an error of
    4 % (standard deviation, normal gradients), and a first moment one of 0.5 % at b1=0.9. Where the
    first one alone is to be short, `optax.adam(mu_dtype=...)` does.

    Args:
        optimizer: an optax gradient transformation, or an `optax.MultiSteps`.
        dtype: float32, bfloat16, or float64 where JAX's 64-bit types are enabled.
        seed: of the rounding.

    Returns:
        An optax gradient transformation. Its state is a `StateDtypeState`, whose floating arrays
        are in `dtype`, except those of shape (), such as hyperparameters. Other arguments of
        `update` are handed on.

    Raises:
        TypeError: if `optimizer` is not an optax gradient transformation, `dtype` is not a dtype,
            or `seed` is not a whole number.
        ValueError: if `dtype` is none of those above, or `seed` does not fit in 32 bits.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import jmpx
        >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
        >>> optimizer = jmpx.optim.with_state_dtype(optax.sgd(0.1, momentum=0.9), jnp.float32)
        >>> state = optimizer.init(params)
        >>> updates, state = optimizer.update(params, state, params)
        >>> updates["w"].dtype.name, state.inner_state[0].trace["w"].dtype.name
        ('float32', 'float32')
    """
    import optax

    inner = with_extra_args(optimizer)
    stored = _StateDtype(inner, _check_dtype(dtype), check_seed(seed))
    return optax.GradientTransformationExtraArgs(stored.init, stored.update)


def _check_dtype(dtype: DTypeLike) -> ScalarType:
    dtype = as_dtype(dtype, " of optimizer state")
    check_enabled(dtype)
    name = dtype_name(dtype)
    if name not in ("bfloat16", "float32", "float64"):
        raise ValueError(
            f"Cannot keep optimizer state in {name}, where squares of small gradients are 0: give "
            "jnp.bfloat16 or jnp.float32."
        )
    return dtype


@dataclasses.dataclass(frozen=True)
class _StateDtype:
    """The two functions of `with_state_dtype`, and its arguments."""

    inner: "optax.GradientTransformationExtraArgs"
    dtype: ScalarType
    seed: int

    def init(self, params: PyTree) -> StateDtypeState:
        state = self.inner.init(widen(params))
        return StateDtypeState(jax.tree.map(self._cast, state), jnp.zeros((), jnp.int32))

    def update(
        self, updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: PyTree
    ) -> tuple[PyTree, StateDtypeState]:
        new_updates, new = self.inner.update(
            widen(updates), widen(state.inner_state), widen(params), **extra_args
        )
        key = step_key(self.seed, _STREAM, state.count)
        leaves, structure = jax.tree.flatten(new)
        stored = (
            self._round(leaf, jax.random.fold_in(key, place)) for place, leaf in enumerate(leaves)
        )
        return new_updates, StateDtypeState(structure.unflatten(stored), state.count + 1)

    def _cast(self, leaf: PyTree) -> PyTree:
        return cast_tree(leaf, self.dtype) if _is_stored(leaf) else leaf

    def _round(self, leaf: PyTree, key: jax.Array) -> PyTree:
        """Returns a leaf of the new state as it is stored: right on average in a narrow dtype."""
        if not _is_stored(leaf) or np.dtype(self.dtype).itemsize >= 4:
            return self._cast(leaf)
        return stochastic_round(cast_tree(leaf, jnp.float32), self.dtype, key)


def _is_stored(leaf: object) -> bool:
    """Whether a leaf takes memory worth saving. Optax keeps hyperparameters in shape ()."""
    return is_array(leaf) and is_floating(leaf) and leaf.ndim > 0
