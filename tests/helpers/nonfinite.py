"""What is found by `jmpx.inspect.first_nonfinite`, and the line that a test marks by `# HERE`."""

import inspect

import jax.numpy as jnp

import jmpx
from helpers import F16, F32

HALF = jnp.ones(3, F16)


def total(x):
    return x.astype(F32).sum()


def find(fn, *args):
    """Returns what is found, which has to be something."""
    found = jmpx.inspect.first_nonfinite(fn)(*args)
    assert found is not None
    return found


def line_of(found):
    assert found.place is not None
    return found.place.line


def marked_line(function):
    lines, start = inspect.getsourcelines(function)
    (offset,) = (i for i, line in enumerate(lines) if "# HERE" in line)
    return start + offset
