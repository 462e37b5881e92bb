"""Pytrees as a whole: whether all of one is finite, and a selection between two by a flag."""

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import TypeAlias, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jmpx._base.casts import at_least_float32
from jmpx._base.leaves import (
    ARRAYS,
    NUMBERS,
    PyTree,
    is_array,
    is_floating,
    is_inexact_array,
    is_traceable,
    spell,
)

T = TypeVar("T")
Flag: TypeAlias = bool | np.bool_ | np.ndarray | jax.Array  # a bool of shape (), traced or not
AxisName: TypeAlias = Hashable | Sequence[Hashable]  # one mapped axis, or several


def all_finite(tree: PyTree, axis_name: AxisName | None = None) -> jax.Array:
    """Tells whether a pytree holds neither an infinity nor a NaN.

    Args:
        tree: any pytree. Floating and complex arrays and Python floats are checked; every
            other leaf counts as finite.
        axis_name: the name (or names) of a mapped axis, of `jax.pmap`, `jax.vmap` or
            `jax.shard_map`: the result then holds for all of the axis together.

    Returns:
        A bool array of shape (). It is True for a tree with nothing to check.

    Example:
        >>> import jax.numpy as jnp, jmpx
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
    # XLA turns a reduction of bools into a chain of ands and clones the chain into every fusion
    # that reads the result, so that a train step grows with the square of the number of leaves.
    # XLA does not do so with integers that are compared to 0.
    finite = (jnp.stack(flags).astype(jnp.int32) > 0).all() if flags else jnp.array(True)
    return finite if axis_name is None else holds_on_all(finite, axis_name)


def holds_on_all(flag: jax.Array, axis_name: AxisName) -> jax.Array:
    """Whether a flag is true on every device of a mapped axis, or of several."""
    return jax.lax.pmin(flag.astype(jnp.int32), axis_name) == 1


def _is_finite(leaf: PyTree) -> jax.Array | np.bool_:
    if is_array(leaf) and not is_traceable(leaf):
        return np.isfinite(leaf).all()
    if not is_floating(leaf):
        return jnp.isfinite(leaf).all()
    array = at_least_float32(jnp.asarray(leaf))
    return jax.lax.reduce_and(jax.lax.is_finite(array), range(array.ndim))  # quick to trace


def as_flag(value: object, name: str) -> jax.Array:
    """Returns a Python, NumPy or traced bool as a bool array of shape ().

    Raises:
        TypeError: if `value` is anything else.
    """
    if isinstance(value, bool):
        return jnp.asarray(value)
    if is_array(value) and value.dtype == jnp.bool_ and value.ndim == 0:
        return jnp.asarray(value)
    if is_array(value):
        got = spell(value)
    else:  # A tree may be large, so that its type has to do.
        got = repr(value) if isinstance(value, NUMBERS) else f"a {type(value).__name__}"
    raise TypeError(
        f"Expected {name} to be a scalar bool, got {got}: reduce it first, as jmpx.all_finite does."
    )


def select_tree(pred: Flag, a: T, b: T) -> T:
    """Picks one of two pytrees of the same structure, leaf by leaf.

    Follows JMP's `select_tree`. Arrays (PRNG keys too) are selected on the device, so that `pred`
    may be traced. Numbers that differ are selected as arrays. NumPy arrays that JAX cannot hold,
    such as text and dates, need a `pred` that is not traced. Every other leaf, such as a function
    or a string, is taken from `a`.

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
        >>> import jax.numpy as jnp, jmpx
        >>> new, old = {"w": jnp.ones(2), "act": print}, {"w": jnp.zeros(2), "act": print}
        >>> jmpx.select_tree(jnp.array(False), new, old)["w"]
        Array([0., 0.], dtype=float32)
    """
    flag, leaves = as_flag(pred, "pred"), itertools.count()

    def select(x: PyTree, y: PyTree) -> PyTree:
        index = next(leaves)  # The paths of all leaves take longer than the selection.
        return _select_leaf(pred, flag, lambda: _path_of_leaf(a, index), x, y)

    return jax.tree.map(select, a, b)


def _path_of_leaf(tree: PyTree, index: int) -> str:
    return jax.tree_util.keystr(jax.tree_util.tree_leaves_with_path(tree)[index][0])


def _select_leaf(
    pred: Flag, flag: jax.Array, path: Callable[[], str], a: PyTree, b: PyTree
) -> PyTree:
    if a is b or not isinstance(a, ARRAYS + NUMBERS):
        return a
    if not is_array(a) and not is_array(b) and a == b:
        return a  # A setting, such as a dropout rate, stays a Python number.
    if any(is_array(leaf) and not is_traceable(leaf) for leaf in (a, b)):
        return _select_outside_jax(pred, path, a, b)
    if not (isinstance(a, jax.Array) and isinstance(b, jax.Array)):
        a = jnp.asarray(a, None if is_array(a) or not is_array(b) else b.dtype)
        b = jnp.asarray(b, None if is_array(b) else a.dtype)
    if a.shape != b.shape or a.dtype != b.dtype:
        raise TypeError(
            f"Cannot select between {spell(a)} and {spell(b)} at "
            f"tree{path()}: make both trees of the same shapes and dtypes."
        )
    return jax.lax.select(flag, a, b)


def _select_outside_jax(pred: Flag, path: Callable[[], str], a: PyTree, b: PyTree) -> PyTree:
    """Selects between two leaves if JAX cannot hold one of them, such as text or a date."""
    if not isinstance(pred, jax.core.Tracer):
        return a if pred else b
    got = [spell(leaf) for leaf in (a, b)]
    if got[0] == got[1] and a.tobytes() == b.tobytes():
        return a
    raise TypeError(
        f"Cannot select by a traced flag between {got[0]} and {got[1]} at "
        f"tree{path()}, which differ and which JAX cannot hold: select them "
        "outside of jax.jit, or leave them out of the trees."
    )
