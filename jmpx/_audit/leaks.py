"""Findings: float32 where a step means to compute in 16 bits."""

from collections.abc import Iterator

from jmpx._audit.graph import Graph
from jmpx._audit.options import Options
from jmpx._audit.report import Finding


def leaks(graph: Graph, options: Options) -> Iterator[Finding]:
    """Yields the findings about float32 that leaks into a step of 16 bits."""
    yield from ()
