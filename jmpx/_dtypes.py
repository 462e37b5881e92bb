"""The names of the floating dtypes: text in, JAX scalar types out."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# A dtype as users give it: "bf16", np.dtype("float32"), np.float32, jnp.float32.
DTypeLike = Any

# Canonical name -> the other names it answers to. ``half`` is missing on purpose:
# which dtype it means depends on the backend (see `half_dtype`).
_ALIASES = {
    "float16": ("f16", "fp16"),
    "bfloat16": ("bf16",),
    "float32": ("f32", "fp32", "full"),
    "float64": ("f64", "fp64"),
    **{name: () for name in sorted(vars(jnp)) if name.startswith("float8_")},
}
_SCALAR_TYPES = {name: getattr(jnp, name) for name in _ALIASES}
_CANONICAL = {alias: name for name, aliases in _ALIASES.items() for alias in (name, *aliases)}


def dtype_names() -> list[str]:
    """Returns every accepted dtype name, canonical and short, `half` included."""
    return [*_CANONICAL, "half"]


def describe_dtypes() -> str:
    """Returns the accepted names as they are listed in error messages."""
    short = [f"{name} ({', '.join(alias)})" for name, alias in _ALIASES.items() if alias]
    return ", ".join([*short, "half", "float8_*"])


def half_dtype() -> Any:
    """Returns the half precision dtype of the current backend.

    Asks JAX for its local devices, which starts the backend; in a program that calls
    `jax.distributed.initialize`, call it afterwards. Follows JMP's `half_dtype`.

    Returns:
        `jnp.bfloat16` on TPU, `jnp.float16` everywhere else.

    Example:
        >>> import jax.numpy as jnp
        >>> import jmpx
        >>> jmpx.half_dtype() in (jnp.float16, jnp.bfloat16)
        True
    """
    return jnp.bfloat16 if jax.local_devices()[0].platform == "tpu" else jnp.float16


def parse_dtype(name: str) -> Any:
    """Returns the JAX scalar type called `name`; white space and case do not count.

    Raises:
        KeyError: if no dtype has that name.
    """
    name = name.strip().lower()
    return half_dtype() if name == "half" else _SCALAR_TYPES[_CANONICAL[name]]


def as_dtype(dtype: DTypeLike) -> Any:
    """Returns `dtype` as JAX's scalar type, such as `jnp.float32`.

    Raises:
        TypeError: if `dtype` is not a dtype at all.
        ValueError: if it is a dtype, but not a floating one that JAX has.
    """
    expected = (
        "expected a floating dtype such as jnp.bfloat16, np.dtype('float32') or one of the names "
        f"{describe_dtypes()}."
    )
    if isinstance(dtype, str):
        name = dtype
    elif dtype is None or dtype is float:  # NumPy reads both as float64.
        raise TypeError(f"Unknown dtype {dtype!r}: {expected}")
    else:
        try:
            name = np.dtype(dtype).name
        except TypeError:
            raise TypeError(f"Unknown dtype {dtype!r}: {expected}") from None
    try:
        return parse_dtype(name)
    except KeyError:
        raise ValueError(f"Unknown dtype {name!r}: {expected}") from None


def dtype_name(dtype: DTypeLike) -> str:
    """Returns the canonical name, such as `'bfloat16'`."""
    return np.dtype(dtype).name


def check_enabled(dtype: DTypeLike) -> None:
    """Refuses float64 while JAX would silently turn it into float32.

    Raises:
        ValueError: if `dtype` is float64 and 64-bit types are disabled.
    """
    x64: bool = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
    if np.dtype(dtype) == np.float64 and not x64:
        raise ValueError(
            "Cannot cast to float64 while JAX's 64-bit types are disabled, which would silently "
            "give float32: call jax.config.update('jax_enable_x64', True) at startup, or use "
            "float32."
        )


def _is_for_storage(dtype: DTypeLike) -> bool:
    """Whether nothing can compute in a dtype: without scales, 8 bits hold no gradient."""
    return np.dtype(dtype).itemsize < 2


def computable(dtype: DTypeLike) -> Any:
    """Returns the dtype in which statistics of what is stored in `dtype` are computed."""
    return jnp.float32 if _is_for_storage(dtype) else dtype


def check_computes(dtype: DTypeLike) -> None:
    """Refuses to compute in a dtype that is for storage alone, and in a disabled float64.

    Raises:
        ValueError: if `dtype` has 8 bits, or is float64 while 64-bit types are disabled.
    """
    if _is_for_storage(dtype):
        name = dtype_name(dtype)
        raise ValueError(
            f"Cannot compute in {name}, where gradients would be 0 or NaN: {name} is a dtype to "
            f"store in, as params={name} or output={name}; compute in bfloat16, float16 or "
            "float32, as compute=bfloat16."
        )
    check_enabled(dtype)
