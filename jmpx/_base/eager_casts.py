"""Casts outside of a trace: many small arrays share a call."""

import functools
from collections.abc import Hashable, Iterator, Sequence

import jax
import jax.core
import numpy as np

# Batching pays only for many small arrays; otherwise dispatch is negligible or compiling dominates.
_MANY_ARRAYS, _SMALL_SIZE, _CHUNK_LENGTH = 64, 2**18, 16


def is_concrete(leaf: object) -> bool:
    """Whether `leaf` is a JAX array that holds numbers, rather than a tracer."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)


def cast_concrete(arrays: Sequence[jax.Array], dtype: np.dtype) -> list[jax.Array]:
    """Casts concrete arrays. Each of them keeps its sharding, and whether it is committed."""
    # Arrays of one shape share a call, so that few functions are compiled. They also share their
    # sharding and commitment, because one committed argument would commit all results.
    groups: dict[Hashable, list[int]] = {}
    for index, array in enumerate(arrays):
        kind = array.shape, array.dtype, array.sharding, array.committed
        groups.setdefault(kind, []).append(index)
    casts = list(arrays)
    # While tracing, cast closed-over arrays at once instead of staging a cast.
    with jax.ensure_compile_time_eval():
        for indices in groups.values():
            for chunk in _chunks(indices, arrays[indices[0]].size):
                results = _cast_together([arrays[index] for index in chunk], dtype)
                for index, result in zip(chunk, results, strict=True):
                    casts[index] = result
    return casts


@functools.partial(jax.jit, static_argnums=1)
def _cast_together(arrays: list[jax.Array], dtype: np.dtype) -> list[jax.Array]:
    return [array.astype(dtype) for array in arrays]


def _chunks(indices: list[int], size: int) -> Iterator[list[int]]:
    """Yields chunks of one length, as each length is compiled apart; the last one may overlap."""
    length = _CHUNK_LENGTH if len(indices) >= _MANY_ARRAYS and size <= _SMALL_SIZE else 1
    for start in range(0, len(indices), length):
        start = min(start, len(indices) - length)
        yield indices[start : start + length]
