"""The ranges as users call them: `jmpx.ranges(fn)(*args)`."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from jmpx._audit.graph import build
from jmpx._programs import Program, traced_program
from jmpx._ranges.collecting import collected
from jmpx._ranges.measuring import Plan, measure
from jmpx._ranges.report import Ranges


def ranges(fn: Callable[..., Any], *, extremes_only: bool = False) -> Callable[..., Ranges]:
    """TODO."""

    @functools.wraps(fn, updated=())
    def call(*args: Any, **kwargs: Any) -> Ranges:
        program = traced_program(fn, args, kwargs)
        _refuse_shapes(program)
        graph = build(program)
        plan = Plan(graph, extremes_only)
        return collected(graph, plan, measure(program.jaxpr, program.arrays, plan))

    return call


def _refuse_shapes(program: Program) -> None:
    for array, name in zip(program.arrays, program.names, strict=True):
        if isinstance(array, jax.ShapeDtypeStruct):
            raise ValueError(
                f"Expected arrays, got the shape {array.dtype}{list(array.shape)} alone as {name}: "
                "jmpx.ranges runs the function, so give real numbers, or use jmpx.audit, to which "
                "shapes suffice."
            )
