"""Counts which collectives a program runs, in which dtypes, and how many bytes they send.

`jmpx.inspect.compiled` reads them. Under jit, JAX writes no collectives: XLA's partitioner
inserts them, and `partitioned` returns what it made. A CPU's final program does not show them:
XLA:CPU widens 16-bit collectives later.
"""

import contextlib
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

import jmpx

Collective = Any  # an item of `jmpx.inspect.Compiled.collectives`


def mib(found: Iterable[Collective]) -> float:
    """Returns the MiB that a device sends."""
    return sum(one.sent for one in found) / 2**20


def table(found: Iterable[Collective]) -> dict[str, float]:
    """Returns the MiB that a device sends by kind and dtype, without those of scalars."""
    arrays = [one for one in found if not one.is_scalar]
    names = sorted({f"{one.kind} {one.dtype}" for one in arrays})
    return {n: mib(one for one in arrays if f"{one.kind} {one.dtype}" == n) for n in names}


def read(program: Any) -> tuple[Collective, ...]:
    """Returns the collectives of a lowered program, or of the text of a module of HLO.

    Raises:
        ValueError: if it cannot tell how often a loop runs.
    """
    found = jmpx.inspect.compiled(program).collectives
    for one in found:
        if one.in_while:
            raise ValueError(f"Cannot tell how often the loop around an {one.kind} runs.")
    return found


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Makes JAX compile rather than load from its cache, which holds what no pass has written."""
    config: Any = jax.config  # Any, because JAX does not annotate its settings
    cached = config.jax_enable_compilation_cache
    config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        config.update("jax_enable_compilation_cache", cached)
        compilation_cache.reset_cache()


def partitioned(lowered: Any, **options: Any) -> tuple[str, Any]:
    """Compiles a program; returns the HLO that XLA's partitioner made of it, and the program.

    Args:
        lowered: what `jax.jit(...).lower` returns.
        options: further options of XLA.
    """
    with tempfile.TemporaryDirectory() as folder, compiling():
        options |= {"xla_dump_to": folder, "xla_dump_hlo_pass_re": "spmd"}
        compiled = lowered.compile(compiler_options=options)
        (path,) = Path(folder).glob("*.after_spmd-partitioning.*")
        return path.read_text(), compiled
