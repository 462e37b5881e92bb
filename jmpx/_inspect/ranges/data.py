"""What a run found: frozen data, and what becomes of the numbers in other formats."""

import collections
import dataclasses
import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from jmpx._base.dtypes import DTypeLike
from jmpx._base.messages import describe
from jmpx._inspect.ranges.formats import BINS, LOWEST, PARTS, as_format, bin_of
from jmpx._policies.maps import Rule


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
        """Makes a histogram of the counts of all bins."""
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
        found = collections.Counter[int]()
        for index, count in self.bins:
            found[index // PARTS + LOWEST] += count
        return dict(found)

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

    def room(self, dtype: DTypeLike) -> int:
        """Returns the exponent of the largest scale with which no number overflows in a format."""
        return (bin_of(as_format(dtype).overflows) - 1 - self.bins[-1][0]) // PARTS


def merged(histograms: Iterable[Histogram]) -> Histogram:
    """Returns the histogram of all numbers of several histograms."""
    bins, others = collections.Counter[int](), np.zeros(4, int)
    for each in histograms:
        others += [each.zeros, each.infinite, each.nan, each.masked]
        bins.update(dict(each.bins))
    return Histogram(tuple(sorted(bins.items())), *map(int, others))


def exponent_of(scale: float) -> int:
    """Returns the exponent of a scale; raises a ValueError if it is not a power of two."""
    mantissa, exponent = math.frexp(scale)
    if mantissa != 0.5:
        raise ValueError(
            f"Expected a scale that is a power of two, so that it changes exponents only, got "
            f"{describe(scale)}: give for example 2**13."
        )
    return exponent - 1


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers that the operations of one scope computed.

    Attributes:
        scope: the path of the module, or the names of scopes; empty outside of them.
        histogram: how many numbers have which magnitude.
    """

    scope: str
    histogram: Histogram = Histogram()

    def is_in(self, scope: str) -> bool:
        """Whether this is a scope, inside of it, or inside of one that it selects."""
        if not scope:
            return not self.scope
        names, rule = self.scope.split("/"), Rule(scope)
        outer = ("/".join(names[:end]) for end in range(1, len(names) + 1))
        return any(path == scope or rule.matches_scope(path) for path in outer)


# Pickles of jmpx 0.2 hold such tuples.
Operation = collections.namedtuple("Operation", "name largest smallest place")
