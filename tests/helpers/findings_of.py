"""Findings of an audit, and the lines on which they are to be found."""

import inspect
from typing import Any

import jax

import jmpx


def shape(*sizes, dtype: Any = "float32"):
    return jax.ShapeDtypeStruct(sizes, dtype)


def found(fn, *args, names=None, platform=None) -> list[Any]:
    """The findings in a function's step, of some names or of all; the worst first."""
    findings = jmpx.inspect.audit(fn, platform=platform)(*args).findings
    return [each for each in findings if names is None or each.name in names]


def line_of(fn, mark="<-"):
    """The line of a function that ends with a comment, which it has once; a lambda's own line."""
    if fn.__name__ == "<lambda>":
        return fn.__code__.co_firstlineno
    lines, start = inspect.getsourcelines(inspect.unwrap(fn))
    (line,) = [i for i, text in enumerate(lines, start) if text.rstrip().endswith(f"# {mark}")]
    return line
