"""Reads from a program which collectives it runs, in which dtypes, and how many bytes.

`read_stablehlo` reads what JAX writes, `read_hlo` what XLA writes between its passes and after
them: the readers are those of `jmpx.inspect.collectives`. Under jit, JAX writes no collectives:
XLA's partitioner inserts them, and `partitioned` returns what it made. A CPU's final program does
not tell: XLA:CPU widens 16-bit collectives later.
"""

import collections
import contextlib
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from jmpx._inspect.collectives import hlo, stablehlo
from jmpx._inspect.collectives.data import Collective


def mib(found: Iterable[Collective]) -> float:
    """Returns the MiB that a device sends."""
    return sum(one.sent for one in found) / 2**20


def table(found: Iterable[Collective]) -> dict[str, float]:
    """Returns the MiB that a device sends by kind and dtype, without those of scalars."""
    groups: dict[str, list[Collective]] = collections.defaultdict(list)
    for one in found:
        if not one.is_scalar:
            groups[f"{one.kind} {one.dtype}"].append(one)
    return {name: mib(groups[name]) for name in sorted(groups)}


def read_stablehlo(lowered: Any) -> list[Collective]:
    """Returns the collectives of what `jax.jit(...).lower` returns."""
    return counted(stablehlo.read_stablehlo(lowered.compiler_ir("stablehlo")).collectives)


def read_hlo(text: str) -> list[Collective]:
    """Returns the collectives of the text of a module of HLO."""
    return counted(hlo.read_hlo(text).collectives)


def counted(found: list[Collective]) -> list[Collective]:
    """Returns collectives if it is known how often they run.

    Raises:
        ValueError: if it cannot tell how often a loop runs.
    """
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
