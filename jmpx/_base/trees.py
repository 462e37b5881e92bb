"""Pytrees: tests of leaves, casts, `all_finite`, `select_tree`, and export."""

import contextlib
import functools
import itertools
import json
from collections.abc import Callable, Hashable, Sequence
from numbers import Integral
from typing import Any, TypeAlias, TypeGuard, TypeVar

import jax
import jax.core
import jax.export
import jax.numpy as jnp
import numpy as np

from jmpx._base.dtypes import DTypeLike, as_dtype, check_enabled, half_dtype

PyTree: TypeAlias = Any  # JAX has no public type of pytrees.
ArrayLeaf: TypeAlias = jax.Array | np.ndarray | np.generic

ARRAYS = (jax.Array, np.ndarray, np.generic)
NUMBERS = (bool, int, float, complex)


def is_none(node: object) -> bool:
    """Whether `node` is None; as `is_leaf=`, it makes None a leaf of pytrees."""
    return node is None


def is_array(leaf: object) -> TypeGuard[ArrayLeaf]:
    """Whether `leaf` is a JAX array, a tracer, a NumPy array or a NumPy scalar."""
    return isinstance(leaf, ARRAYS)


def is_floating(leaf: object) -> bool:
    """Whether `leaf` is an array or a `jax.ShapeDtypeStruct` of a real floating dtype.

    Casts change only these leaves. A NumPy scalar such as `np.float32(1)` is one; a Python number
    is not, because it has no dtype: in JAX it takes the dtype of the other operand.
    """
    return isinstance(leaf, (*ARRAYS, jax.ShapeDtypeStruct)) and is_floating_dtype(leaf.dtype)


@functools.cache
def is_floating_dtype(dtype: np.dtype) -> bool:
    """Whether `dtype` is a real floating dtype: bfloat16 and float8 are, complex64 is not."""
    return jnp.issubdtype(dtype, jnp.floating)


def is_inexact_array(leaf: object) -> TypeGuard[jax.Array | np.ndarray | np.number]:
    """Whether `leaf` is an array that JAX can differentiate: floating or complex."""
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def is_traceable(leaf: object) -> TypeGuard[jax.Array | np.ndarray | np.number | np.bool_]:
    """Whether `leaf` is an array that JAX can hold.

    JAX cannot hold NumPy's text, dates, objects and long doubles, nor float0, the dtype of the
    gradients of integers.
    """
    return isinstance(leaf, jax.Array) or (
        is_array(leaf)
        and leaf.dtype.type not in (np.longdouble, np.clongdouble, np.timedelta64)
        and any(jnp.issubdtype(leaf.dtype, kind) for kind in (jnp.number, jnp.bool_))
    )


def can_replace(new: PyTree, old: PyTree) -> bool:
    """Whether a loop that carries the leaf `old` can carry `new` next.

    An array may change its numbers, but not its shape or dtype; any other leaf must be the same.
    """
    if is_traceable(new) and is_traceable(old):
        return (new.shape, new.dtype) == (old.shape, old.dtype)
    return new is old or (type(new) is type(old) and np.array_equal(new, old))


def is_view(node: object) -> bool:
    """Whether `node` is a view of a module; adapters mark the classes of views."""
    return hasattr(type(node), "__jmpx_view__")


def spell(leaf: object) -> str:
    """Returns the text of a leaf in error messages, such as `float32[2, 3]` for an array."""
    return f"{leaf.dtype}{list(leaf.shape)}" if is_array(leaf) else repr(leaf)


def is_int(value: object) -> TypeGuard[int]:
    """Whether `value` is an integer of Python or NumPy, and not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


# Casts of pytrees: floating leaves change their dtype, all other leaves pass untouched.


T = TypeVar("T")
FloatingT = TypeVar("FloatingT", bound=ArrayLeaf | jax.ShapeDtypeStruct)


def at_least_float32(leaf: FloatingT) -> FloatingT:
    """Returns a floating leaf of 8 or 16 bits in float32, and a wider one as it is."""
    return _cast_leaf(leaf, np.dtype(np.float32)) if leaf.dtype.itemsize < 4 else leaf


def _cast_leaf(leaf: PyTree, dtype: np.dtype) -> PyTree:
    if not is_floating(leaf) or leaf.dtype == dtype:
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(dtype=dtype, weak_type=False)
    if isinstance(leaf, jax.core.Tracer):
        return leaf.astype(dtype)
    if isinstance(leaf, jax.Array):
        # While tracing, cast closed-over arrays at once instead of staging a cast.
        with jax.ensure_compile_time_eval():
            return leaf.astype(dtype)
    with np.errstate(all="ignore"):  # As in JAX, 1e6 silently becomes inf in float16.
        return leaf.astype(dtype)


def cast_tree(tree: T, dtype: DTypeLike) -> T:
    """Casts the floating leaves of a pytree.

    Follows JMP and MPX (arXiv 2507.03312, section 3.1). JAX arrays, NumPy arrays and scalars,
    tracers and `jax.ShapeDtypeStruct` of floating dtype are cast. Integers, bools, complex
    numbers, PRNG keys, Python scalars, strings, functions and None pass untouched.

    Args:
        tree: any pytree.
        dtype: the dtype to cast to: a name, a `np.dtype` or a scalar type.

    Returns:
        The same tree, its floating leaves of the same shapes in `dtype`. A leaf that already is in
        `dtype` is returned as the same object.

    Raises:
        TypeError: if `dtype` is not a dtype.
        ValueError: if `dtype` is not a floating dtype, or is float64 while JAX's 64-bit types are
            disabled.

    Example:
        >>> import jax.numpy as jnp, jmpx
        >>> tree = jmpx.cast_tree({"w": jnp.ones(2), "step": jnp.arange(2)}, jnp.bfloat16)
        >>> tree["w"].dtype.name, tree["step"].dtype.name
        ('bfloat16', 'int32')
    """
    dtype = as_dtype(dtype)
    check_enabled(dtype)
    numpy_dtype = np.dtype(dtype)
    return jax.tree.map(lambda leaf: _cast_leaf(leaf, numpy_dtype), tree)


def cast_like(new: T, old: PyTree) -> T:
    """Returns `new` in the dtype of the leaf `old` that it replaces, if both are floating."""
    return cast_tree(new, old.dtype) if is_floating(old) else new


def holds(wide: np.dtype, narrow: np.dtype) -> bool:
    """Whether `wide` represents every number of `narrow`; only floating dtypes hold others."""
    if wide == narrow or not all(jnp.issubdtype(each, jnp.floating) for each in (wide, narrow)):
        return wide == narrow
    new, old = jnp.finfo(wide), jnp.finfo(narrow)
    return (
        new.nmant >= old.nmant
        and float(new.max) >= float(old.max)
        and float(new.smallest_subnormal) <= float(old.smallest_subnormal)
    )


def cast_except(cast: Callable[[PyTree], PyTree], tree: T, passes: Callable[[object], bool]) -> T:
    """Casts a pytree, except for the nodes for which `passes` is true."""
    nodes, treedef = jax.tree.flatten(tree, is_leaf=passes)
    if not any(map(passes, nodes)):
        return cast(tree)
    others = treedef.unflatten([None if passes(node) else node for node in nodes])
    pairs = zip(nodes, treedef.flatten_up_to(cast(others)), strict=True)
    return treedef.unflatten([node if passes(node) else new for node, new in pairs])


def cast_to_full(tree: T) -> T:
    """Casts the floating leaves of a pytree to float32; see `cast_tree`. JMP's name.

    Args:
        tree: any pytree.

    Returns:
        The same tree, its floating leaves in float32.

    Example:
        >>> import numpy as np, jmpx
        >>> jmpx.cast_to_full(np.ones(2, np.float16)).dtype.name
        'float32'
    """
    return cast_tree(tree, jnp.float32)


def cast_to_half(tree: T) -> T:
    """Casts the floating leaves of a pytree to `half_dtype()`; see `cast_tree`. JMP's name.

    Args:
        tree: any pytree.

    Returns:
        The same tree, its floating leaves in bfloat16 on TPU, in float16 elsewhere.

    Example:
        >>> import numpy as np, jmpx
        >>> jmpx.cast_to_half(np.ones(2, np.float32)).dtype == jmpx.half_dtype()
        True
    """
    return cast_tree(tree, half_dtype())


# Whole pytrees: whether all leaves are finite, and the selection of one of two by a flag.


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
    # that reads the result, so that a train step grows with the square of the number of leaves. It
    # does not do so with integers that are compared to 0.
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
    # The type alone of others, because a tree may be large.
    got = spell(value) if isinstance(value, ARRAYS + NUMBERS) else f"a {type(value).__name__}"
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
        # The path is for errors alone: to find all paths takes longer than to select.
        return _select_leaf(pred, flag, functools.partial(_path_of_leaf, a, next(leaves)), x, y)

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


# Export: lets `jax.export` serialize classes of pytrees, as arguments and results of a step.


ClassT = TypeVar("ClassT", bound=type)
Configuration = Any  # a node's data other than its children


def serialized(
    cls: ClassT,
    write: Callable[[Configuration], object] = lambda configuration: configuration,
    read: Callable[[Any], Configuration] = lambda value: value,
) -> ClassT:
    """Lets `jax.export` serialize a class of pytrees, its configuration as JSON."""
    name = f"{cls.__module__}.{cls.__qualname__}"
    with contextlib.suppress(ValueError):  # A registration from before a module's reload stays.
        if hasattr(cls, "_fields"):
            return jax.export.register_namedtuple_serialization(cls, serialized_name=name)
        jax.export.register_pytree_node_serialization(
            cls,
            serialized_name=name,
            serialize_auxdata=lambda configuration: json.dumps(write(configuration)).encode(),
            deserialize_auxdata=lambda data: read(json.loads(data)),
        )
    return cls
