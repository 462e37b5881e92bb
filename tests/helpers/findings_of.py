"""Findings of an audit, and the lines of a test file on which they are to be found."""

import pathlib
from typing import Any

from jmpx._inspect.audit.trying import tried
from jmpx._inspect.graph import Graph
from jmpx._inspect.programs import traced_program


def found(names, fn, *args, platform=None) -> list[Any]:
    """The findings of some names in a function's step, the worst first."""
    graph = Graph(traced_program(fn, args))
    return [each for each in tried(graph, platform) if each.name in names]


def line_of(file, mark):
    """The line of a file that ends with a comment, which has to be there once."""
    lines = pathlib.Path(file).read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"  # {mark}")]
    return number
