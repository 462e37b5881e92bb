"""The report on the first infinity or NaN, and the numbers of arrays in it."""

import dataclasses
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jmpx._inspect.reports import Report
from jmpx._jaxprs.equations import Place
from jmpx._jaxprs.marks import Array

_WIDTH = 79
_INDENT = 11


class Numbers(NamedTuple):
    """The numbers of an array.

    Attributes:
        dtype: the name of its dtype.
        shape: its shape.
        smallest: the smallest magnitude of its finite numbers; None if it has none.
        largest: the largest magnitude of its finite numbers.
        nans: how many NaNs it holds.
        infs: how many infinities it holds.
    """

    dtype: str
    shape: tuple[int, ...]
    smallest: float | None
    largest: float | None
    nans: int
    infs: int

    @property
    def is_broken(self) -> bool:
        """Whether it holds a NaN or an infinity."""
        return self.nans + self.infs > 0

    def __str__(self) -> str:
        """Returns for example `float16[2,3], magnitudes 0.5 to 300, 1 inf`."""
        parts = [f"{self.dtype}[{','.join(map(str, self.shape))}]"]
        if self.smallest is not None and self.largest is not None:
            low, high = f"{self.smallest:.4g}", f"{self.largest:.4g}"
            magnitudes = f"magnitudes {low} to {high}"
            parts.append(magnitudes if low != high else f"magnitude {low}")
        parts += [f"{self.infs} inf"] if self.infs else []
        parts += [f"{self.nans} NaN"] if self.nans else []
        return ", ".join(parts)


def numbers_of(array: Array) -> Numbers:
    """Returns the numbers of an array."""
    x = np.asarray(array)
    wide = x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)
    finite = np.abs(wide[np.isfinite(wide)])
    ends = (float(finite.min()), float(finite.max())) if finite.size else (None, None)
    nans = int(np.isnan(wide).sum())
    return Numbers(x.dtype.name, x.shape, *ends, nans, wide.size - finite.size - nans)


class Trip(NamedTuple):
    """An iteration of a loop, counted from 0 in the order in which they run."""

    trip: int
    place: Place | None  # the line of the loop


@dataclasses.dataclass(frozen=True)
class FirstNonfinite(Report):
    """The first infinity or NaN that reaches the results of a program.

    Attributes:
        kind: `"inf"` or `"NaN"`.
        operation: the operation that made it, as rules spell it, such as `exp`. Empty if the
            program was given it.
        given: the argument that holds it, such as `params['w']`, or `a constant`; empty if an
            operation made it.
        place: the user's line: a file, a line and a function. None if there is none.
        scope: the path of the module, and the named scopes in it.
        policy: the policy under which it ran; empty if there was none.
        is_backward: whether it is in the backward pass.
        trips: for each loop around it, the outermost first, the iteration in which it was made,
            counted from 0, and the line of the loop.
        operands: the numbers that the operation read.
        results: the numbers that it made.
        loss_scale: the loss scale of the run; None without one among the arguments. If lowering it
            to its floor does not help, the report is about the run at the floor.
        is_at_floor: whether the scale is at its floor.
        cause: why it is not finite, and how to fix it.
        rule: the text to paste: a rule of a policy map, or a loss scale; empty if none fixes it.

    Example:
        >>> import jax.numpy as jnp
        >>> import jmpx
        >>> found = jmpx.inspect.first_nonfinite(lambda x: jnp.log(x).sum())(jnp.zeros(2))
        >>> found.kind, found.operation, found.is_backward, found.rule
        ('inf', 'log', False, '')
    """

    __module__ = "jmpx.inspect"

    kind: str
    operation: str = ""
    given: str = ""
    place: Place | None = None
    scope: str = ""
    policy: str = ""
    is_backward: bool = False
    trips: tuple[Trip, ...] = ()
    operands: tuple[Numbers, ...] = ()
    results: tuple[Numbers, ...] = ()
    loss_scale: float | None = None
    is_at_floor: bool = False
    cause: str = ""
    rule: str = ""

    def _blocks(self) -> Iterator[str]:
        """Yields lines of at most 79 characters, except for long paths and rules."""
        what = "an infinity" if self.kind == "inf" else "a NaN"
        passes = "backward" if self.is_backward else "forward"
        made = f"{self.operation} makes {what} in the {passes} pass"
        rows = (f"  {name:<{_INDENT}}{text}" for name, text in self._rows())
        yield "\n".join([f"{self.given} holds {what}" if self.given else made, *rows])

    def _rows(self) -> Iterator[tuple[str, str]]:
        for name in ("place", "scope", "policy"):
            if value := getattr(self, name):
                yield "at" if name == "place" else name, str(value)
        for trip, place in self.trips:
            yield "trip", f"{trip + 1} of the loop at {place}" if place else f"{trip + 1}"
        for each in self.operands:
            yield "operand", str(each)
        for each in self.results:
            yield "result" if self.operation else "value", str(each)
        if self.loss_scale is not None:
            yield "loss scale", f"{self.loss_scale:g}{', its floor' * self.is_at_floor}"
        width = _WIDTH - 2 - _INDENT
        lines = textwrap.wrap(self.cause, width, break_long_words=False, break_on_hyphens=False)
        yield from (("" if number else "cause", line) for number, line in enumerate(lines))
        if self.rule:
            yield "rule", self.rule
