"""Whole pytrees at once: whether all is finite, and which of two."""

import functools
from typing import Any, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jmpx._casts import widen
from jmpx._leaves import ARRAYS, NUMBERS, is_array, is_floating, is_inexact_array, is_traceable

T = TypeVar("T")


def all_finite(tree: Any, axis_name: Any = None) -> jax.Array:
    """Tells whether a pytree holds neither an infinity nor a NaN.

    Args:
        tree: any pytree. Floating and complex arrays and Python floats are checked; every
            other leaf is finite by nature.
        axis_name: the name (or names) of a mapped axis, of `jax.pmap`, `jax.vmap` or
            `jax.shard_map`: the answer is then for all of the axis together.

    Returns:
        A bool array of shape (): True for a tree without such leaves.

    Example:
        >>> import jax.numpy as jnp
        >>> import jmpx
        >>> jmpx.all_finite({"a": jnp.ones(3), "n": 1, "f": print})
        Array(True, dtype=bool)
        >>> jmpx.all_finite([jnp.ones(3), jnp.array([0, jnp.nan])])
        Array(False, dtype=bool)
    """
    flags = [
        _is_finite(leaf)
        for leaf in jax.tree.leaves(tree)
        if is_inexact_array(leaf) or isinstance(leaf, float | complex)
    ]
    # Of stacked flags alone, XLA makes a chain of ands and clones it into every fusion that uses
    # the answer: a train step would grow with the square of the number of leaves. As numbers that
    # are compared it leaves them together.
    finite = (jnp.stack(flags).astype(jnp.int32) > 0).all() if flags else jnp.array(True)
    if axis_name is None:
        return finite
    return jax.lax.pmin(finite.astype(jnp.int32), axis_name) == 1


def _is_finite(leaf: Any) -> Any:
    if is_array(leaf) and not is_traceable(leaf):
        return np.isfinite(leaf).all()
    return jnp.isfinite(widen(leaf) if is_floating(leaf) else leaf).all()


def as_flag(value: Any, name: str) -> jax.Array:
    """Returns a Python, NumPy or traced bool as a bool array of shape ().

    Raises:
        TypeError: if `value` is anything else.
    """
    if isinstance(value, bool):
        return jnp.asarray(value)
    if is_array(value) and value.dtype == jnp.bool_ and value.ndim == 0:
        return jnp.asarray(value)
    if is_array(value):
        got = f"{value.dtype}{list(value.shape)}"
    else:  # of a whole tree, the type alone
        got = repr(value) if isinstance(value, NUMBERS) else f"a {type(value).__name__}"
    raise TypeError(
        f"Expected {name} to be a scalar bool, got {got}: reduce it first, as jmpx.all_finite does."
    )


def select_tree(pred: Any, a: T, b: T) -> T:
    """Picks one of two pytrees of the same structure, leaf by leaf.

    Follows JMP's `select_tree`. Arrays (PRNG keys too) are selected on the device, so that `pred`
    may be traced; numbers that differ are selected as arrays; NumPy arrays that JAX cannot hold,
    such as text and dates, are selected by a `pred` that is not traced; every other leaf, such as a
    function or a string, is kept from `a`.

    Args:
        pred: a bool of shape (), traced or not.
        a: the tree for True.
        b: the tree for False: the same structure, shapes and dtypes.

    Returns:
        The picked tree.

    Raises:
        TypeError: if `pred` is not a scalar bool, if two leaves differ in shape or dtype, or if
            `pred` is traced and two arrays differ that JAX cannot hold.

    Example:
        >>> import jax.numpy as jnp
        >>> import jmpx
        >>> new, old = {"w": jnp.ones(2), "act": print}, {"w": jnp.zeros(2), "act": print}
        >>> jmpx.select_tree(jnp.array(False), new, old)["w"]
        Array([0., 0.], dtype=float32)
    """
    select = functools.partial(_select_leaf, pred, as_flag(pred, "pred"))
    return jax.tree_util.tree_map_with_path(select, a, b)


def _select_leaf(pred: Any, flag: jax.Array, path: Any, a: Any, b: Any) -> Any:
    if a is b or not isinstance(a, ARRAYS + NUMBERS):
        return a
    if not is_array(a) and not is_array(b) and a == b:
        return a  # a setting, such as a dropout rate: it stays the Python number that it is
    if any(is_array(leaf) and not is_traceable(leaf) for leaf in (a, b)):
        return _select_outside_jax(pred, path, a, b)
    a = jnp.asarray(a, None if is_array(a) or not is_array(b) else b.dtype)
    b = jnp.asarray(b, None if is_array(b) else a.dtype)
    if a.shape != b.shape or a.dtype != b.dtype:
        raise TypeError(
            f"Cannot select between {a.dtype}{list(a.shape)} and {b.dtype}{list(b.shape)} at "
            f"tree{jax.tree_util.keystr(path)}: make both trees of the same shapes and dtypes."
        )
    return jax.lax.select(flag, a, b)


def _select_outside_jax(pred: Any, path: Any, a: Any, b: Any) -> Any:
    """Selects between leaves of which one is text, a date or another thing that JAX cannot hold."""
    if not isinstance(pred, jax.core.Tracer):
        return a if pred else b
    got = [f"{leaf.dtype}{list(leaf.shape)}" if is_array(leaf) else repr(leaf) for leaf in (a, b)]
    if got[0] == got[1] and a.tobytes() == b.tobytes():
        return a
    raise TypeError(
        f"Cannot select by a traced flag between {got[0]} and {got[1]} at "
        f"tree{jax.tree_util.keystr(path)}, which differ and which JAX cannot hold: select them "
        "outside of jax.jit, or leave them out of the trees."
    )
