"""Dtypes in which programs compute, and the algorithms of their matrix products."""

import contextlib
import functools
import threading
from collections.abc import Generator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike as DTypeLike  # includes strings, such as the names below

from jmpx._base.messages import describe

# JAX does not annotate its devices:
# pyright: reportUnknownMemberType=false

# `jnp.bfloat16`, `jnp.float32` and so on. JAX has no public type for them.
ScalarType: TypeAlias = type[Any]

# Canonical name -> its short names. `half` is not listed: it depends on the backend.
_ALIASES: dict[str, tuple[str, ...]] = {
    "float16": ("f16", "fp16"),
    "bfloat16": ("bf16",),
    "float32": ("f32", "fp32", "full"),
    "float64": ("f64", "fp64"),
    **{name: () for name in sorted(vars(jnp)) if name.startswith("float8_")},
}
_CANONICAL = {alias: name for name, aliases in _ALIASES.items() for alias in (name, *aliases)}

_TF32 = "TF32 is an algorithm of float32 products, so write compute=float32,matmul=tensorfloat32"
_EIGHT_BITS = (
    "store in 8 bits by params=float8_e4m3fn or params=float8_e5m2, and multiply in 8 bits by "
    "matmul=fp8 in a rule, as '*/mlp/*: matmul=fp8'"
)
_BITS = "{0}-true stores the parameters in {0} bits, too, and {0}-mixed keeps them in float32"
_INTEGER = (
    "expected a floating dtype, because integers have no gradient: to quantize, use a library for "
    "that, such as Qwix"
)
# Words that are often taken for names of dtypes -> what to write instead.
_NO_DTYPES = {
    **dict.fromkeys(("tf32", "tensorfloat32"), _TF32),
    **dict.fromkeys(("fp8", "f8", "float8", "e4m3", "e5m2"), _EIGHT_BITS),
    **dict.fromkeys(("int8", "int4", "i8", "i4", "uint8", "uint4", "s8", "u8"), _INTEGER),
    "16": _BITS.format("16"),
    **dict.fromkeys(("float", "single", "true"), "write float32"),
    "double": "write float64",
    "32": "write 32-true or float32",
    "64": "write 64-true or float64",
    "o0": "level O0 of NVIDIA's Apex is float32",
    "o1": "level O1 of NVIDIA's Apex is jmpx.autocast(f, 'compute=float16')",
    "o2": "level O2 of NVIDIA's Apex is 16-mixed",
    "o3": "level O3 of NVIDIA's Apex is 16-true",
}


def no_dtype(name: str) -> str | None:
    """Returns what to write instead of a word that is often taken for a dtype; None for others."""
    return _NO_DTYPES.get(name.strip().lower())


def dtype_names() -> list[str]:
    """Returns every accepted dtype name, canonical and short, `half` included."""
    return [*_CANONICAL, "half"]


@functools.cache
def describe_dtypes() -> str:
    """Returns the list of accepted names for error messages."""
    short = [f"{name} ({', '.join(alias)})" for name, alias in _ALIASES.items() if alias]
    return ", ".join([*short, "half", "float8_*"])


def half_dtype() -> ScalarType:
    """Returns the half precision dtype of the current backend.

    This starts the backend, because it asks JAX for the local devices: a program that calls
    `jax.distributed.initialize` must do so first. Follows JMP's `half_dtype`.

    Returns:
        `jnp.bfloat16` on TPU, `jnp.float16` everywhere else.

    Example:
        >>> import jax.numpy as jnp, jmpx
        >>> jmpx.half_dtype() in (jnp.float16, jnp.bfloat16)
        True
    """
    return jnp.bfloat16 if jax.local_devices()[0].platform == "tpu" else jnp.float16


def parse_dtype(name: str) -> ScalarType:
    """Returns the JAX scalar type of a name in any case; a KeyError if there is none."""
    name = name.strip().lower()
    return half_dtype() if name == "half" else getattr(jnp, _CANONICAL[name])


def is_dtype(value: object) -> TypeGuard[DTypeLike]:
    """Whether a value is a dtype itself, rather than a name of one.

    Dtypes are `np.dtype`s, scalar types of NumPy and JAX, and Python's numeric types.
    """
    if not isinstance(value, type):
        return isinstance(value, np.dtype)
    cls: type[Any] = value
    is_number = issubclass(cls, np.generic | int | float | complex)
    return is_number or isinstance(getattr(cls, "dtype", None), np.dtype)


def as_dtype(dtype: DTypeLike | None, place: str = "") -> ScalarType:
    """Returns a dtype, or the dtype of a name, as JAX's scalar type, such as `jnp.float32`.

    The error for anything else tells the place, such as ` at policy.compute`.
    """
    expected = (
        "expected a floating dtype such as jnp.bfloat16, np.dtype('float32') or one of the names "
        f"{describe_dtypes()}."
    )
    if isinstance(dtype, str):
        name = dtype
    elif dtype is None or dtype is float:  # NumPy would read both as float64
        raise TypeError(f"Unknown dtype {dtype!r}{place}: {expected}")
    else:
        try:
            name = np.dtype(dtype).name
        except (TypeError, ValueError):
            raise TypeError(f"Unknown dtype {describe(dtype)}{place}: {expected}") from None
    try:
        return parse_dtype(name)
    except KeyError:
        reason = no_dtype(name)
        reason = expected if reason is None else f"{reason}."
        if "=" in name:
            reason = "write a dtype alone, or jmpx.get_policy(...).cast_to_compute(tree)."
        raise ValueError(f"Unknown dtype {name!r}{place}: {reason}") from None


def dtype_name(dtype: DTypeLike) -> str:
    """Returns the canonical name, such as `'bfloat16'`."""
    return np.dtype(dtype).name


def check_enabled(dtype: DTypeLike) -> None:
    """Refuses float64 while 64-bit types are disabled, when JAX would silently use float32."""
    config: Any = jax.config  # JAX adds its attributes at run time
    if np.dtype(dtype) == np.float64 and not config.jax_enable_x64:
        raise ValueError(
            "Cannot cast to float64 while JAX's 64-bit types are disabled, which would silently "
            "give float32: call jax.config.update('jax_enable_x64', True) at startup, or use "
            "float32."
        )


def _is_for_storage(dtype: DTypeLike) -> bool:
    """Whether a dtype is only for storage: a gradient in 8 bits would be 0 or NaN."""
    return np.dtype(dtype).itemsize < 2


def computable(dtype: DTypeLike) -> DTypeLike:
    """Returns the dtype to compute in for arrays stored in `dtype`: float32 for 8 bits."""
    return jnp.float32 if _is_for_storage(dtype) else dtype


def check_computes(dtype: DTypeLike) -> None:
    """Refuses dtypes to compute in that have 8 bits, and float64 while it is disabled."""
    if _is_for_storage(dtype):
        name = dtype_name(dtype)
        raise ValueError(
            f"Cannot compute in {name}, where gradients would be 0 or NaN: {name} is a dtype to "
            f"store in, as params={name} or output={name}; compute in bfloat16, float16 or "
            "float32, as compute=bfloat16, and multiply in 8 bits by a rule, as '*/mlp/*: "
            "matmul=fp8'."
        )
    check_enabled(dtype)


def check_reduces(dtype: DTypeLike, place: str = "") -> None:
    """Refuses dtypes of 8 bits for sums: a sum over a few devices would be NaN."""
    if _is_for_storage(dtype):
        raise ValueError(
            f"Cannot reduce in {dtype_name(dtype)}{place}, where sums over devices would be NaN: "
            "write reduce=float32, reduce=bfloat16 or reduce=float16."
        )


def check_product(dtype: DTypeLike, place: str = "") -> None:
    """Refuses all dtypes but float32 for the results of products of 16-bit operands."""
    if dtype_name(dtype) != "float32":
        raise ValueError(
            f"Cannot hand out {dtype_name(dtype)} from products{place}: those of 16-bit operands "
            "are summed in float32, so write product=float32, or compute= for another dtype."
        )


# The algorithm of matrix products and convolutions: its names, and the context that sets it.
#
# By default, a float32 product multiplies in bfloat16 on a TPU, and in TF32 on newer GPUs. The
# names are those of `jax.default_matmul_precision`: six words for the precision of a product, and
# dot algorithms, which say in which dtypes it multiplies and sums.


_WORDS = ("default", "high", "highest", "bfloat16", "tensorfloat32", "float32")
# Those of 8 bits have no scales; see `EightBits`.
_ALGORITHMS = tuple(
    name for name in lax.DotAlgorithmPreset.__members__ if name != "DEFAULT" and "F8_" not in name
)

# The dot algorithms that multiply 16-bit operands and return float32, by the operands' dtype.
SUMMED_IN_FLOAT32 = {"bfloat16": "BF16_BF16_F32", "float16": "F16_F16_F32"}


def matmul_names() -> list[str]:
    """Returns the names of the words and of the dot algorithms, as JAX spells them."""
    return [*_WORDS, *_ALGORITHMS]


def describe_matmuls() -> str:
    """Returns the list of accepted names for error messages."""
    return f"{', '.join(_WORDS)}, or a dot algorithm such as BF16_BF16_F32_X3"


def parse_matmul(name: str, place: str = "", in_rule: bool = False) -> str:
    """Returns a name in any case as JAX spells it; a KeyError if JAX does not take it.

    Raises:
        ValueError: for products in 8 bits, unless a rule says so in the words of jmpx.
    """
    name = name.strip()
    bits = eight_bits(name)
    if bits is not None and in_rule:
        return bits.name
    if bits is not None:
        raise ValueError(
            f"Cannot multiply in {bits.name}{place} for a whole model, whose embeddings, heads and "
            "routers need more digits: write a rule for the layers that are to multiply in 8 bits, "
            f"as '*/mlp/*: matmul={bits.name}'."
        )
    if "F8_" in name.upper():
        raise ValueError(
            f"Cannot multiply by the algorithm {name.upper()}{place}, which rounds to 8 bits "
            "without a scale, where gradients would be 0 or NaN: write matmul=fp8 in a rule, as "
            "'*/mlp/*: matmul=fp8'."
        )
    for spelled in (name.lower(), name.upper()):
        try:
            with jax.default_matmul_precision(spelled):
                return spelled
        except ValueError:
            pass
    raise KeyError(name)


def as_matmul(precision: str | None, in_rule: bool = False) -> str | None:
    """Returns the name of an algorithm of products, as JAX spells it; None for None."""
    if precision is None:
        return None
    unknown = (
        f"Unknown algorithm {precision!r} of matrix products: expected one of "
        f"{describe_matmuls()}, as jax.default_matmul_precision takes them."
    )
    if not isinstance(precision, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(unknown)
    try:
        return parse_matmul(precision, in_rule=in_rule)
    except KeyError:
        raise ValueError(unknown) from None


def is_algorithm(matmul: str | None) -> bool:
    """Whether a name is a dot algorithm, which JAX ignores for convolutions."""
    return matmul is not None and matmul not in _WORDS


class EightBits(NamedTuple):
    """Products of operands that are rounded to 8 bits, as the `matmul` of a rule says."""

    name: str  # in one spelling, such as `fp8+attention+emulate`
    blocks: bool  # `mxfp8`: a scale for each 32 numbers; else `fp8`: one for each array
    attention: bool  # `+attention`: batched products of two activations, too
    emulate: bool  # `+emulate`: the same numbers on hardware without units for them


@functools.cache
def eight_bits(matmul: str | None) -> EightBits | None:
    """Returns the meaning of a name such as `fp8` or `MXFP8 + emulate`; None for other names."""
    word, *more = "".join((matmul or "").lower().split()).split("+")
    if word not in ("fp8", "mxfp8") or not {*more} <= {"attention", "emulate"}:
        return None
    name = "+".join([word, *sorted({*more})])
    return EightBits(name, word == "mxfp8", "attention" in more, "emulate" in more)


def matmul_of(policy: object) -> str | None:
    """Returns the algorithm of a policy; a policy of JMP, as Haiku may hold one, has none."""
    return getattr(policy, "matmul_precision", None)


class _Held(NamedTuple):
    """The dot algorithm of the innermost region of jmpx."""

    algorithm: str
    outside: str  # JAX's setting without it
    active: bool  # whether the region computes in float32, so that it uses the algorithm


class _Thread(threading.local):
    """The settings of the innermost region of jmpx in one thread."""

    held: _Held | None = None  # its dot algorithm; None for a word
    setting: str | None = None  # JAX's setting in it; None outside of all regions


_thread = _Thread()
# Any, because JAX annotates neither its user contexts nor its settings.
_config: Any = jax.config
# The keys of JAX's caches contain its own setting; this adds the algorithm for regions inside.
_held_key: Any = jax.make_user_context(None)


def matmul_region(matmul: str | None, dtype: DTypeLike) -> AbstractContextManager[None]:
    """Returns the context of a region: code that computes in one dtype, with one algorithm.

    A word such as `highest` applies to all products, and changes nothing for products in 16 bits.
    For a dot algorithm, JAX casts the operands of every product to the dtypes of the algorithm,
    float64 ones too. So it is active only in regions that compute in float32. Regions inside of
    another one inherit it, even if the outer one does not compute in float32.

    Args:
        matmul: the name of the algorithm as JAX spells it; None inherits the surrounding region's,
            unless the user's code has set another one since.
        dtype: the dtype in which the region computes.
    """
    held, now = _thread.held, _config.jax_default_matmul_precision
    if matmul is None:
        if held is None or now != _thread.setting:
            return contextlib.nullcontext()
        matmul = held.algorithm
    if not is_algorithm(matmul):
        return _region(None, matmul)
    # Named even if JAX has no setting: without a name, JAX would look up the setting again when it
    # transposes a product, which may be in a region of the algorithm.
    outside = now or "default"
    if held is not None and now == _thread.setting:
        outside = held.outside
    active = np.dtype(dtype) == jnp.float32
    return _region(_Held(matmul, outside, active), matmul if active else outside)


def matmul_precision(matmul: str | None) -> AbstractContextManager[None]:
    """Returns the context of code in float32 with an algorithm; None changes nothing."""
    return contextlib.nullcontext() if matmul is None else matmul_region(matmul, jnp.float32)


@contextlib.contextmanager
def _region(held: _Held | None, setting: str) -> Generator[None, None, None]:
    """Holds an algorithm while the context lasts, and sets JAX's default."""
    before = _thread.held, _thread.setting
    _thread.held, _thread.setting = held, setting
    try:
        with _held_key(held), jax.default_matmul_precision(setting):
            yield
    finally:
        _thread.held, _thread.setting = before


def region_setting() -> str | None:
    """Returns JAX's setting if a region of jmpx made it; None if the user did, or nobody."""
    setting = _thread.setting
    return setting if _config.jax_default_matmul_precision == setting else None
