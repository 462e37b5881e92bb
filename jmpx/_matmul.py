"""The algorithm of matrix products and convolutions: its names, and the context that sets it.

A float32 product multiplies in bfloat16 on a TPU, and in TF32 on newer GPUs, unless it is told
otherwise. The names are those of `jax.default_matmul_precision`: six words that say how precise a
product is to be, and dot algorithms, which say in which dtypes it multiplies and sums.
"""

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax import lax

_WORDS = ("default", "high", "highest", "bfloat16", "tensorfloat32", "float32")
_ALGORITHMS = tuple(name for name in lax.DotAlgorithmPreset.__members__ if name != "DEFAULT")


def matmul_names() -> list[str]:
    """Returns the names of the words and of the dot algorithms, as JAX spells them."""
    return [*_WORDS, *_ALGORITHMS]


def describe_matmuls() -> str:
    """Returns the list of accepted names for error messages."""
    return f"{', '.join(_WORDS)}, or a dot algorithm such as BF16_BF16_F32_X3"


def parse_matmul(name: str) -> str:
    """Returns a name as JAX spells it, ignoring case and surrounding white space.

    Raises:
        KeyError: if `jax.default_matmul_precision` does not take it.
    """
    name = name.strip()
    for spelled in (name.lower(), name.upper()):
        try:
            with jax.default_matmul_precision(spelled):
                return spelled
        except ValueError:
            pass
    raise KeyError(name)


def as_matmul(precision: str | None) -> str | None:
    """Returns the name of an algorithm of products, as JAX spells it; None for None.

    Raises:
        TypeError: if `precision` is not a name.
        ValueError: if it is an unknown name.
    """
    if precision is None:
        return None
    expected = f"expected one of {describe_matmuls()}, as jax.default_matmul_precision takes them."
    if not isinstance(precision, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"Unknown algorithm {precision!r} of matrix products: {expected}")
    try:
        return parse_matmul(precision)
    except KeyError:
        raise ValueError(
            f"Unknown algorithm {precision!r} of matrix products: {expected}"
        ) from None


def is_algorithm(matmul: str | None) -> bool:
    """Whether a name is a dot algorithm, which JAX ignores for convolutions."""
    return matmul is not None and matmul not in _WORDS


def matmul_precision(matmul: str | None) -> AbstractContextManager[Any]:
    """Returns the context in which products without `precision=` use an algorithm.

    Args:
        matmul: the name of the algorithm as JAX spells it; None changes nothing.
    """
    return contextlib.nullcontext() if matmul is None else jax.default_matmul_precision(matmul)
