"""Optimizer state in a dtype of its own, whatever that of the parameters."""

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmpx._base.casts import cast_tree
from jmpx._base.dtypes import DTypeLike, as_dtype, check_enabled, dtype_name
from jmpx._base.exported import serialized
from jmpx._base.leaves import PyTree, is_array, is_floating
from jmpx._jaxprs import core
from jmpx._jaxprs.inner import depends
from jmpx._storage.rounding import stochastic_round
from jmpx._storage.transformations import step_key, widen, with_extra_args

if TYPE_CHECKING:
    import optax


@serialized
class StateDtypeState(NamedTuple):
    """The state of `with_state_dtype`.

    Attributes:
        inner_state: the state of the wrapped optimizer, its arrays in the dtype asked for.
        count: how many updates there were: an int32 array of shape ().
    """

    __module__ = "jmpx.types"

    inner_state: PyTree
    count: jax.Array


def with_state_dtype(
    optimizer: "optax.GradientTransformation | optax.MultiSteps", dtype: DTypeLike, *, seed: int = 0
) -> "optax.GradientTransformationExtraArgs":
    """Keeps the state of an optimizer in a dtype of its own: float32, or bfloat16 to save memory.

    Optax makes state in the dtype of the parameters, and so the moments of bfloat16 parameters
    stall. With this, the optimizer gets parameters, gradients and state in float32, and its updates
    are float32; only between the steps its state is in `dtype`. bfloat16 is rounded by chance, as
    by `jmpx.optim.stochastic_round`, so that moments are right on average; the page on storage has
    their errors. Where the first one alone is to be short, `optax.adam(mu_dtype=...)` does.

    State that `init` makes of the parameters' numbers stays float32, such as the copies from which
    `optax.contrib.mechanize`, `prodigy` and `schedule_free` measure how far the parameters went:
    the difference would be that of two roundings. Zeros in their shapes are no such state.

    Args:
        optimizer: an optax gradient transformation, or an `optax.MultiSteps`.
        dtype: float32, bfloat16, or float64 where JAX's 64-bit types are enabled.
        seed: of the rounding.

    Returns:
        An optax gradient transformation. Its state is a `StateDtypeState`, whose floating arrays
        are in `dtype`, except copies of parameters and arrays of shape (), such as
        hyperparameters. Other arguments of `update` are handed on.

    Raises:
        TypeError: if `optimizer` is not an optax gradient transformation.
        ValueError: if `dtype` is none of those above.

    Example:
        >>> import jax.numpy as jnp, optax, jmpx
        >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
        >>> optimizer = jmpx.optim.with_state_dtype(optax.sgd(0.1, momentum=0.9), jnp.float32)
        >>> state = optimizer.init(params)
        >>> updates, state = optimizer.update(params, state, params)
        >>> updates["w"].dtype.name, state.inner_state[0].trace["w"].dtype.name
        ('float32', 'float32')
    """
    import optax

    inner, stored = with_extra_args(optimizer), as_dtype(dtype, " of optimizer state")
    check_enabled(stored)
    name = dtype_name(stored)
    if name not in ("bfloat16", "float32", "float64"):
        raise ValueError(
            f"Cannot keep optimizer state in {name}, where squares of small gradients are 0: give "
            "jnp.bfloat16 or jnp.float32."
        )

    def init(params: PyTree) -> PyTree:
        wide = widen(params)
        traced = core.trace(inner.init, (wide,), {})
        is_copy = traced.rebuild(depends(traced.jaxpr, [True] * len(traced.arrays)))
        state = jax.tree.map(
            lambda leaf, flag: _stored(leaf, jnp.float32 if flag is True else stored),
            inner.init(wide),
            is_copy,
        )
        return StateDtypeState(state, jnp.zeros((), jnp.int32))

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: PyTree
    ) -> tuple[PyTree, PyTree]:
        new_updates, new = inner.update(
            widen(updates), widen(state.inner_state), widen(params), **extra_args
        )
        key = step_key(seed, _STATE_STREAM, state.count)
        leaves, structure = jax.tree.flatten(new)
        before = jax.tree.leaves(state.inner_state)
        dtypes = [leaf.dtype if is_array(leaf) else stored for leaf in before]
        if jax.tree.structure(state.inner_state) != structure:
            dtypes = [stored] * len(leaves)
        leaves = [
            _stored(leaf, dtype, jax.random.fold_in(key, place))
            for place, (leaf, dtype) in enumerate(zip(leaves, dtypes, strict=True))
        ]
        return new_updates, StateDtypeState(structure.unflatten(leaves), state.count + 1)

    return optax.GradientTransformationExtraArgs(init, update)


def _stored(leaf: PyTree, dtype: DTypeLike, key: jax.Array | None = None) -> PyTree:
    """Returns a leaf of the state as it is stored, in a narrow dtype rounded by chance with a key.

    Leaves of shape (), such as hyperparameters, stay as they are: they take no memory.
    """
    if not (is_array(leaf) and is_floating(leaf) and leaf.ndim > 0):
        return leaf
    if key is None or np.dtype(dtype).itemsize >= 4:
        return cast_tree(leaf, dtype)
    return stochastic_round(cast_tree(leaf, jnp.float32), dtype, key)
