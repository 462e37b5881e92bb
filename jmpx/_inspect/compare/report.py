"""What a comparison found: frozen data, which prints itself."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple, Self

from jmpx._base.messages import describe
from jmpx._inspect.reports import Parts, TableReport
from jmpx._inspect.text import columns, count_text, short_names
from jmpx._jaxprs.equations import Place

_FEW = 8  # outputs without a pair that are shown


class Compared(NamedTuple):
    """What leaves a scope of both functions.

    `error` is the norm of the difference, relative to that of the reference.
    """

    scope: str
    is_backward: bool
    dtypes: tuple[str, str]  # of the reference and of the candidate
    size: int
    error: float
    in_float32: float  # the error of both in float32: of its rounding, and of constants in 16 bits
    place: Place | None  # the line of the candidate


class Unpaired(NamedTuple):
    """What leaves a scope of one function, and agrees in float32 with nothing of the other."""

    scope: str
    shape: tuple[int, ...]
    of: str  # "reference" or "candidate"
    place: Place | None


class LogProbabilities(NamedTuple):
    """How far log-probabilities that both functions return are apart.

    `kl` is the divergence of the candidate from the reference: of whole distributions over the last
    axis, its mean; of the log-probabilities of single choices, which the reference is taken to have
    drawn, its estimate `k3`, the mean of `exp(d) - 1 - d` of the differences d.
    """

    size: int
    rms: float
    largest: float
    kl: float
    is_distribution: bool


@dataclasses.dataclass(frozen=True)
class Comparison(TableReport):
    """What `jmpx.inspect.compare` found: how far two functions of one model are apart, by scope.

    Attributes:
        title: the names of the functions.
        band: the relative error up to which two outputs are taken as equal.
        rows: the outputs of modules and scopes that both functions have, in the order of the
            reference, and what they return, as the scope `result`.
        unpaired: outputs that agree in float32 with none of the other function, those of the
            reference first: such as scores before a mask, or what one of them computes alone.
        log_probabilities: those among the results, which are at most 0; None without any.
    """

    __module__ = "jmpx.inspect"
    _right = (2, 3)

    title: str
    band: float
    rows: tuple[Compared, ...]
    unpaired: tuple[Unpaired, ...] = ()
    log_probabilities: LogProbabilities | None = None

    def first(self, at_most: float | None = None) -> Compared | None:
        """Returns the first output whose error leaves the band, or `at_most`; None without one."""
        limit = self.band if at_most is None else at_most
        return next((row for row in self.rows if not row.error <= limit), None)

    def check(self, at_most: float | None = None, *, kl: float | None = None) -> Self:
        """Raises if outputs are too far apart: for tests.

        Args:
            at_most: the largest relative error of any output; None means the band.
            kl: the largest divergence of log-probabilities; None leaves it unchecked.

        Returns:
            The comparison itself.

        Raises:
            AssertionError: if the check fails, also under `python -O`: it names the first output,
                its line and its error.
            ValueError: if `kl` is given and the functions return no log-probabilities.
        """
        found = self.first(at_most)
        if found is not None:
            limit = self.band if at_most is None else at_most
            raise AssertionError(
                f"{self.title} differ by {_text(found.error)} in {_where(found)}, expected at most "
                f"{limit:g}.\n\n{self}"
            )
        if kl is not None and self.log_probabilities is None:
            raise ValueError(
                f"Expected results that are log-probabilities, to compare with {kl=}, got none: "
                "return them, or leave kl= out."
            )
        if kl is not None and self.log_probabilities and not self.log_probabilities.kl <= kl:
            raise AssertionError(
                f"The log-probabilities of {self.title} have a KL of "
                f"{_text(self.log_probabilities.kl)}, expected at most {kl:g}.\n\n{self}"
            )
        return self

    def _parts(self) -> Parts:
        counts = (
            f"{count_text(len(self.rows), 'output')} of both, {len(self.unpaired)} of one alone"
        )
        first, lines = self.first(), []
        if first is not None:
            lines = [f"First beyond {self.band:g}: {_where(first)}, {_text(first.error)}"]
        return Parts(
            f"Comparison of {self.title}: {counts}",
            _cells(self.rows, self.band),
            [lines, _log_lines(self.log_probabilities), _unpaired_lines(self.unpaired)],
        )


def _cells(rows: Sequence[Compared], band: float) -> list[list[str]]:
    """Returns the rows of the table of outputs, its header first."""
    table = [["scope", "dtypes", "error", "in float32", ""]]
    for row in rows:
        name = f"{row.scope}, backward" if row.is_backward else row.scope
        dtypes = " / ".join(map(short_names, dict.fromkeys(row.dtypes)))
        mark = "" if row.error <= band else "<"
        table.append([name, dtypes, _text(row.error), _text(row.in_float32), mark])
    return table


def _log_lines(found: LogProbabilities | None) -> list[str]:
    if found is None:
        return []
    name = "KL" if found.is_distribution else "KL (k3)"
    numbers = {"rms": found.rms, "largest": found.largest, name: found.kl}
    text = ", ".join(f"{key} {_text(number)}" for key, number in numbers.items())
    return [f"Log-probabilities, {found.size:,} numbers: {text}"]


def _unpaired_lines(found: Sequence[Unpaired]) -> list[str]:
    if not found:
        return []
    rows = [[one.scope, one.of, str(list(one.shape)), str(one.place or "")] for one in found]
    more = f"... and {len(rows) - _FEW} more" if len(rows) > _FEW else ""
    lines = ["Without a pair that agrees in float32:", *columns(rows[:_FEW])]
    return [*lines, more] if more else lines


def _where(row: Compared) -> str:
    return f"{row.scope}{f', {row.place}' if row.place else ''}"


def _text(number: float) -> str:
    return "0" if number == 0 else f"{number:.1e}" if math.isfinite(number) else str(number)


def check_band(band: object) -> float:
    """Returns a band; refuses what is no relative error."""
    if not isinstance(band, int | float) or not 0 <= band < math.inf:
        raise ValueError(
            f"Expected band= to be a relative error of at least 0, such as 0.01, got "
            f"{describe(band)}."
        )
    return float(band)
