"""The algorithm of matrix products and convolutions: its names, and the context that sets it.

By default, a float32 product multiplies in bfloat16 on a TPU, and in TF32 on newer GPUs. The names
are those of `jax.default_matmul_precision`: six words for the precision of a product, and dot
algorithms, which say in which dtypes it multiplies and sums.
"""

import contextlib
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

_WORDS = ("default", "high", "highest", "bfloat16", "tensorfloat32", "float32")
_ALGORITHMS = tuple(name for name in lax.DotAlgorithmPreset.__members__ if name != "DEFAULT")

# The dot algorithms that multiply 16-bit operands and return float32, by the operands' dtype.
SUMMED_IN_FLOAT32 = {"bfloat16": "BF16_BF16_F32", "float16": "F16_F16_F32"}


def matmul_names() -> list[str]:
    """Returns the names of the words and of the dot algorithms, as JAX spells them."""
    return [*_WORDS, *_ALGORITHMS]


def describe_matmuls() -> str:
    """Returns the list of accepted names for error messages."""
    return f"{', '.join(_WORDS)}, or a dot algorithm such as BF16_BF16_F32_X3"


def parse_matmul(name: str) -> str:
    """Returns a name in any case as JAX spells it; a KeyError if JAX does not take it."""
    name = name.strip()
    for spelled in (name.lower(), name.upper()):
        try:
            with jax.default_matmul_precision(spelled):
                return spelled
        except ValueError:
            pass
    raise KeyError(name)


def as_matmul(precision: str | None) -> str | None:
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
        return parse_matmul(precision)
    except KeyError:
        raise ValueError(unknown) from None


def is_algorithm(matmul: str | None) -> bool:
    """Whether a name is a dot algorithm, which JAX ignores for convolutions."""
    return matmul is not None and matmul not in _WORDS


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
def _region(held: _Held | None, setting: str) -> Iterator[None]:
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
