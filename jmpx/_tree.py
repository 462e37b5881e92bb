"""Whole pytrees at once: cast, check, select.

Everything here acts on *floating leaves* and hands every other leaf on untouched;
`is_floating` is the one place that says which leaves those are.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jmpx._dtypes import DTypeLike, as_dtype, check_enabled, half_dtype

T = TypeVar("T")

_ARRAYS = (jax.Array, np.ndarray, np.generic)
_NUMBERS = (bool, int, float, complex)

# Outside of a trace, this many leaves of one shape and up to this size are cast 16 in a call. The
# larger ones take longer to cast than to call, and the fewer ones than to compile for 16.
_MANY, _SMALL, _CHUNK = 64, 2**18, 16

FULL_PRECISION = "jmpx.full_precision"  # the name of the scopes that autocast leaves in float32


def is_array(leaf: Any) -> bool:
    """Whether `leaf` is a JAX array, a tracer, a NumPy array or a NumPy scalar."""
    return isinstance(leaf, _ARRAYS)


def is_floating(leaf: Any) -> bool:
    """Whether `leaf` is an array (or a `jax.ShapeDtypeStruct`) of real floating dtype.

    Python scalars are not: they have no dtype, and JAX lets them follow that of their
    surroundings. NumPy scalars such as `np.float32(1)` do have one, and are.
    """
    return isinstance(leaf, (*_ARRAYS, jax.ShapeDtypeStruct)) and _is_floating_dtype(leaf.dtype)


@functools.cache
def _is_floating_dtype(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def is_inexact_array(leaf: Any) -> bool:
    """Whether `leaf` is an array that can be differentiated: floating or complex."""
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def is_traceable(leaf: Any) -> bool:
    """Whether `leaf` is an array that JAX can hold.

    It cannot hold NumPy's text, dates, objects, long doubles and float0, the cotangent of integers.
    """
    return isinstance(leaf, jax.Array) or (
        is_array(leaf)
        and leaf.dtype.type not in (np.longdouble, np.clongdouble, np.timedelta64)
        and any(jnp.issubdtype(leaf.dtype, kind) for kind in (jnp.number, jnp.bool_))
    )


def is_view(node: Any) -> bool:
    """Whether an adapter made this node as a view of a module; adapters mark the classes."""
    return hasattr(type(node), "__jmpx_view__")


def widen(leaf: Any) -> Any:
    """Returns a floating leaf in at least float32: 8 and 16-bit ones become float32."""
    return _cast_leaf(leaf, np.dtype(np.float32)) if leaf.dtype.itemsize < 4 else leaf


def _cast_leaf(leaf: Any, dtype: np.dtype) -> Any:
    if not is_floating(leaf) or leaf.dtype == dtype:
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(dtype=dtype, weak_type=False)
    if isinstance(leaf, jax.Array):
        return leaf.astype(dtype)
    with np.errstate(all="ignore"):  # float16 turns 1e6 into inf, in NumPy as in JAX.
        return leaf.astype(dtype)


@functools.partial(jax.jit, static_argnums=1, inline=True)  # under tracing, casts and no calls
def _cast_together(leaves: list[jax.Array], dtype: np.dtype) -> list[jax.Array]:
    return [leaf.astype(dtype) for leaf in leaves]


def _cast_leaves(leaves: list[Any], dtype: np.dtype) -> list[Any]:
    """Casts the floating leaves; JAX arrays that are no tracers in few calls, if they are many."""
    casts, groups = list(leaves), {}
    for place, leaf in enumerate(leaves):
        if getattr(leaf, "dtype", None) == dtype:
            continue
        if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
            casts[place] = _cast_leaf(leaf, dtype)
        elif _is_floating_dtype(leaf.dtype):
            # Of one shape, so that few functions are compiled. Of one sharding and commitment, so
            # that these stay: one committed argument commits all results to its devices.
            alike = leaf.shape, leaf.dtype, leaf.sharding, leaf.committed
            groups.setdefault(alike, []).append(place)
    # Here and now, once, also for constants of a function that is being traced.
    with jax.ensure_compile_time_eval() if groups else contextlib.nullcontext():
        for places in groups.values():
            for chunk in _chunks(places, leaves[places[0]].size):
                results = _cast_together([leaves[place] for place in chunk], dtype)
                for place, result in zip(chunk, results, strict=True):
                    casts[place] = result
    return casts


def _chunks(places: list[int], size: int) -> Iterator[list[int]]:
    """Parts of one length, the last of which overlaps: each length is compiled by itself."""
    length = _CHUNK if len(places) >= _MANY and size <= _SMALL else 1
    for start in range(0, len(places), length):
        start = min(start, len(places) - length)
        yield places[start : start + length]


def cast_tree(tree: T, dtype: DTypeLike) -> T:
    """Casts the floating leaves of a pytree.

    Follows JMP and MPX (arXiv 2507.03312, section 3.1). JAX arrays, NumPy arrays and scalars,
    tracers and `jax.ShapeDtypeStruct` of floating dtype are cast. Integers, bools, complex
    numbers, PRNG keys, Python scalars, strings, functions and None pass untouched.

    Args:
        tree: any pytree.
        dtype: the dtype to cast to: a name, a `np.dtype` or a scalar type.

    Returns:
        The same tree, its floating leaves of the same shapes in `dtype`. A leaf that is in
        `dtype` already is returned as the same object.

    Raises:
        TypeError: if `dtype` is not a dtype.
        ValueError: if `dtype` is not a floating dtype, or is float64 while JAX's 64-bit types are
            disabled.

    Example:
        >>> import jax.numpy as jnp
        >>> import jmpx
        >>> tree = jmpx.cast_tree({"w": jnp.ones(2), "step": jnp.arange(2)}, jnp.bfloat16)
        >>> tree["w"].dtype.name, tree["step"].dtype.name
        ('bfloat16', 'int32')
    """
    dtype = as_dtype(dtype)
    check_enabled(dtype)
    dtype = np.dtype(dtype)
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(_cast_leaves(leaves, dtype))


def cast_like(new: T, old: Any) -> T:
    """Returns a leaf in the dtype of the one that it replaces, if both are floating."""
    return cast_tree(new, old.dtype) if is_floating(old) else new


def cast_to_float32(tree: T) -> T:
    """Casts the floating leaves of a pytree to float32; see `cast_tree`.

    Args:
        tree: any pytree.

    Returns:
        The same tree, its floating leaves in float32.

    Example:
        >>> import numpy as np
        >>> import jmpx
        >>> jmpx.cast_to_float32(np.ones(2, np.float16)).dtype.name
        'float32'
    """
    return cast_tree(tree, jnp.float32)


def cast_to_float16(tree: T) -> T:
    """Casts the floating leaves of a pytree to float16; see `cast_tree`.

    Args:
        tree: any pytree.

    Returns:
        The same tree, its floating leaves in float16 (values above 65504 become inf).

    Example:
        >>> import numpy as np
        >>> import jmpx
        >>> jmpx.cast_to_float16(np.ones(2, np.float32)).dtype.name
        'float16'
    """
    return cast_tree(tree, jnp.float16)


def cast_to_bfloat16(tree: T) -> T:
    """Casts the floating leaves of a pytree to bfloat16; see `cast_tree`.

    Args:
        tree: any pytree.

    Returns:
        The same tree, its floating leaves in bfloat16.

    Example:
        >>> import numpy as np
        >>> import jmpx
        >>> jmpx.cast_to_bfloat16(np.ones(2, np.float32)).dtype.name
        'bfloat16'
    """
    return cast_tree(tree, jnp.bfloat16)


def cast_to_half(tree: T) -> T:
    """Casts the floating leaves of a pytree to `half_dtype()`; see `cast_tree`.

    JMP's name; MPX calls it `cast_to_half_precision`. Both are here.

    Args:
        tree: any pytree.

    Returns:
        The same tree, its floating leaves in bfloat16 on TPU, in float16 elsewhere.

    Example:
        >>> import numpy as np
        >>> import jmpx
        >>> jmpx.cast_to_half(np.ones(2, np.float32)).dtype == jmpx.half_dtype()
        True
    """
    return cast_tree(tree, half_dtype())


cast_to_full = cast_to_float32  # JMP's name.
cast_to_full_precision = cast_to_float32  # MPX's name.
cast_to_half_precision = cast_to_half  # MPX's name.


def _widest_floating(tree: Any) -> Any:
    """Returns the widest dtype of the floating leaves; None without any.

    Of two that are equally wide, such as float16 and bfloat16, neither holds the other: float32.
    """
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(tree) if is_floating(leaf)}
    if not dtypes:
        return None
    width = max(dtype.itemsize for dtype in dtypes)
    widest = [dtype for dtype in dtypes if dtype.itemsize == width]
    return widest[0] if len(widest) == 1 else jnp.float32


def cast_function(
    func: Callable[..., Any], dtype: DTypeLike, return_dtype: DTypeLike | None = None
) -> Callable[..., Any]:
    """Makes a function run on arguments of one dtype and return another.

    Follows MPX's `cast_function` (arXiv 2507.03312, section 3.2), for results of any pytree.
    A callable that is itself a pytree, such as an Equinox module, is cast too, so that its
    parameters agree with its inputs.

    Args:
        func: any callable of pytrees.
        dtype: what the floating leaves of all arguments are cast to.
        return_dtype: what the floating leaves of the result are cast to; None means `dtype`.

    Returns:
        A function with the signature of `func`.

    Raises:
        TypeError: if `func` is not callable or a dtype is not one.
        ValueError: if a dtype is not a floating one.

    Example:
        >>> import jax.numpy as jnp
        >>> import jmpx
        >>> f = jmpx.cast_function(lambda x: {"y": 2 * x}, jnp.bfloat16, jnp.float32)
        >>> f(jnp.ones(3))["y"].dtype.name
        'float32'
    """
    inside = as_dtype(dtype)
    outside = inside if return_dtype is None else as_dtype(return_dtype)
    return _recast(func, inside, lambda inputs: outside)


def force_full_precision(
    func: Callable[..., Any], return_dtype: DTypeLike | None = None
) -> Callable[..., Any]:
    """Makes a function run in float32, whatever dtype it is called with.

    Follows MPX's `force_full_precision` (arXiv 2507.03312, section 3.2): for sums, means, norms,
    softmax and whatever else overflows or loses digits in 16 bits. Works as a decorator. As in
    `cast_function`, a callable that is a pytree is cast too.

    Args:
        func: any callable of pytrees.
        return_dtype: what the floating leaves of the result are cast to. None gives back the
            dtype that came in: that of the floating arguments, the wider one where they differ;
            without any floating argument the result stays as it is.

    Returns:
        A function with the signature of `func`.

    Raises:
        TypeError: if `func` is not callable or `return_dtype` is not a dtype.
        ValueError: if `return_dtype` is not a floating dtype.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import jmpx
        >>> x = jnp.full(4096, 100, jnp.float16)  # sums to 409600, beyond float16
        >>> mean = jmpx.force_full_precision(lambda x: x.sum() / x.size)
        >>> mean(x)
        Array(100., dtype=float16)
    """
    if return_dtype is None:
        return _recast(func, jnp.float32, _widest_floating)
    outside = as_dtype(return_dtype)
    return _recast(func, jnp.float32, lambda inputs: outside)


def _recast(
    func: Callable[..., Any], inside: Any, outside: Callable[[Any], Any]
) -> Callable[..., Any]:
    """Wraps `func`: arguments to dtype `inside`, results to dtype `outside(arguments)`."""
    if not callable(func):
        raise TypeError(f"Expected a function to wrap, got {func!r}: pass the callable itself.")
    from jmpx._stateful import apply, call, sparing  # here, so that `import jmpx` stays light

    def recast(pure: Any, state: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return_dtype = outside((args[1:], kwargs))
        args, kwargs = sparing(lambda tree: cast_tree(tree, inside))((args, kwargs))
        with full_precision() if inside is jnp.float32 else contextlib.nullcontext():
            result, updates = pure(state, *args, **kwargs)
        return result if return_dtype is None else cast_tree(result, return_dtype), updates

    @functools.wraps(func, updated=())  # not the __dict__: a module's would be its parameters
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return call(recast, apply, (func, *args), kwargs)

    return wrapper


def full_precision(func: Callable[..., Any] | None = None) -> Any:
    """Marks code that `jmpx.autocast` leaves as it was traced: in float32.

    A context manager, `with jmpx.full_precision():`, and a decorator, `@jmpx.full_precision`. It
    casts nothing by itself; outside of autocast it only names a scope. It holds through `jit`,
    loops and gradients, and no rule overrides it; what it calls under an autocast of its own runs
    as that one says. See `force_full_precision` for a function that
    casts its arguments.

    Args:
        func: any callable; None for a context manager.

    Returns:
        A function with the signature of `func`, or a context manager.

    Raises:
        TypeError: if `func` is not callable.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import jmpx
        >>> @jmpx.autocast
        ... def f(x):
        ...     with jmpx.full_precision():
        ...         return x @ x
        >>> x = jnp.full((1, 1), 1 + 2**-12)  # bfloat16 would make 1 of it
        >>> bool(f(x) > 1)
        True
    """
    scope = jax.named_scope(FULL_PRECISION)
    if func is None:
        return scope
    if not callable(func):
        raise TypeError(f"Expected a function to wrap, got {func!r}: pass the callable itself.")

    @functools.wraps(func, updated=())
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(FULL_PRECISION):
            return func(*args, **kwargs)

    return wrapper


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
        got = repr(value) if isinstance(value, _NUMBERS) else f"a {type(value).__name__}"
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
    if a is b or not isinstance(a, _ARRAYS + _NUMBERS):
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
