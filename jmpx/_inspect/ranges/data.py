"""What a run found: frozen data, and what becomes of the numbers in other formats."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jmpx._base.dtypes import DTypeLike
from jmpx._base.leaves import NUMBERS
from jmpx._base.messages import describe, did_you_mean
from jmpx._inspect.ranges.formats import (
    BINS,
    LOWEST,
    MANTISSA_BITS,
    PARTS,
    Format,
    as_format,
    bin_of,
)
from jmpx._policies.rules import Rule


class Shares(NamedTuple):
    """Which shares of the numbers that are not zero a format does not hold.

    Args:
        lost: becomes zero.
        subnormal: becomes a subnormal number, which has fewer digits.
        overflowing: becomes infinite, or NaN in `float8_e4m3fn`.
    """

    lost: float
    subnormal: float
    overflowing: float


@dataclasses.dataclass(frozen=True)
class Histogram:
    """How many numbers have which magnitude.

    Attributes:
        bins: pairs of a bin and a count, in the order of the magnitudes; `exponents` sums them.
        zeros: how many numbers are zero.
        infinite: how many are infinite.
        nan: how many are NaN.
        masked: how many are masks; see `Ranges.masks`.
    """

    bins: tuple[tuple[int, int], ...] = ()
    zeros: int = 0
    infinite: int = 0
    nan: int = 0
    masked: int = 0

    @classmethod
    def of(cls, counts: np.ndarray) -> "Histogram":
        """Makes a histogram of what `statistics.count` counts."""
        (indices,) = np.nonzero(counts[:BINS])
        bins = tuple((int(i), int(counts[i])) for i in indices)
        return cls(bins, *map(int, counts[BINS:]))

    @property
    def numbers(self) -> int:
        """How many numbers are finite, not zero and not masked."""
        return sum(count for _, count in self.bins)

    @property
    def size(self) -> int:
        """How many numbers there are."""
        return self.numbers + self.zeros + self.infinite + self.nan + self.masked

    @property
    def exponents(self) -> dict[int, int]:
        """How many numbers have a magnitude from `2**e` to below `2**(e + 1)`, for each e."""
        found: dict[int, int] = {}
        for index, count in self.bins:
            exponent = index // PARTS + LOWEST
            found[exponent] = found.get(exponent, 0) + count
        return found

    def shares(self, dtype: DTypeLike, scale: float = 1) -> Shares:
        """Returns which shares of these numbers a format does not hold: see `Ranges.shares`."""
        known, shift = as_format(dtype), exponent_of(scale) * PARTS
        edges = (bin_of(key) - shift for key in (known.kept, known.normal, known.overflows))
        kept, normal, overflowing = edges
        counts = (
            sum(count for i, count in self.bins if i < kept),
            sum(count for i, count in self.bins if kept <= i < normal),
            sum(count for i, count in self.bins if i >= overflowing),
        )
        return Shares(*(count / max(self.numbers, 1) for count in counts))


def merged(histograms: Iterable[Histogram]) -> Histogram:
    """Returns the histogram of all numbers of several histograms."""
    bins: dict[int, int] = {}
    others = np.zeros(4, int)
    for each in histograms:
        others += [each.zeros, each.infinite, each.nan, each.masked]
        for index, count in each.bins:
            bins[index] = bins.get(index, 0) + count
    return Histogram(tuple(sorted(bins.items())), *map(int, others))


def exponent_of(scale: float) -> int:
    """Returns the exponent of a scale; raises a ValueError if it is not a power of two."""
    is_number = isinstance(scale, (*NUMBERS, np.generic)) or getattr(scale, "ndim", None) == 0
    number = float(scale) if is_number and not isinstance(scale, complex) else 0.0
    mantissa, exponent = math.frexp(number)
    if mantissa != 0.5 or not math.isfinite(number):
        raise ValueError(
            f"Expected a scale that is a power of two, so that it changes exponents only, got "
            f"{describe(scale)}: give for example 2**13."
        )
    return exponent - 1


def overflows(number: float, known: Format, scale: float = 1) -> bool:
    """Whether a positive finite number overflows in a format once it is scaled."""
    mantissa, exponent = math.frexp(number * scale)
    key = ((exponent - 1) << MANTISSA_BITS) + (mantissa * 2 - 1) * 2**MANTISSA_BITS
    return bool(number) and key >= known.overflows


class Operation(NamedTuple):
    """The extremes of one operation in a scope.

    Args:
        name: the operation as policy rules spell it, such as `dot_general`.
        largest: the largest magnitude; 0.0 if there is none.
        smallest: the smallest magnitude that is not zero; 0.0 if there is none.
        place: where the largest magnitude is computed, such as `model.py:12 (mlp)`, or empty.
    """

    name: str
    largest: float
    smallest: float
    place: str = ""


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers that the operations of one scope computed.

    Attributes:
        scope: the path of the module, or the names of scopes; empty outside of them.
        selector: a selector of policy rules for the scope; None if only its operations have one.
        operations: the extremes by operation; those with the largest numbers first.
        entering: the largest magnitude that came from elsewhere: from other scopes, or as an
            argument.
        histogram: how many numbers have which magnitude.
    """

    scope: str
    selector: str | None
    operations: tuple[Operation, ...]
    entering: float = 0.0
    histogram: Histogram = Histogram()

    @property
    def largest(self) -> float:
        """The largest magnitude; infinities, NaNs and masks do not count."""
        return max((operation.largest for operation in self.operations), default=0.0)

    @property
    def smallest(self) -> float:
        """The smallest magnitude that is not zero; 0.0 if there is none."""
        found = [operation.smallest for operation in self.operations if operation.smallest]
        return min(found, default=0.0)

    def is_in(self, scope: object) -> bool:
        """Whether this is a scope, inside of it, or inside of one that it selects."""
        if not isinstance(scope, str) or not scope:
            return scope == self.scope
        names, rule = self.scope.split("/"), Rule(scope)
        outer = ("/".join(names[:end]) for end in range(1, len(names) + 1))
        return any(path == scope or rule.matches_scope(path) for path in outer)


def check_scope(ranges: Sequence[Range], scope: str | None) -> None:
    """Refuses a scope that no range is in."""
    if scope is not None and not any(each.is_in(scope) for each in ranges):
        known = sorted({each.scope for each in ranges})
        choices = {name: path for path in known for name in (path.rpartition("/")[2], path)}
        raise ValueError(
            "Expected scope= to be one of the scopes that print(ranges.to_text(all=True)) shows, "
            f"got {describe(scope)}{did_you_mean(str(scope).strip('*/'), choices)}"
        )
