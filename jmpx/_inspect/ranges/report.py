"""The ranges of a program: frozen data, which prints and draws itself."""

import dataclasses
import operator
import os
from collections.abc import Iterator

from jmpx._base.dtypes import DTypeLike
from jmpx._base.messages import describe
from jmpx._inspect.ranges.data import Histogram, Range, Shares, exponent_of, merged
from jmpx._inspect.ranges.formats import FORMATS, as_format
from jmpx._inspect.ranges.plot import plot_histograms
from jmpx._inspect.reports import Report
from jmpx._inspect.running import scale_text
from jmpx._inspect.text import columns, count_text, share_text
from jmpx._scales.scaling import HIGHEST_SCALE, LOWEST_SCALE

_KINDS = ("activations", "gradients")
_IN_FLOAT16 = 2.0**15  # the largest power of two in float16, through which the scale may pass
_ROWS = 24  # how many scopes are shown


@dataclasses.dataclass(frozen=True)
class Ranges(Report):
    """What `jmpx.inspect.ranges` found: the magnitudes of activations and gradients, by scope.

    `print(ranges)` shows them, and `jmpx.inspect.ranges` says which numbers count. Numbers of
    float64 that float32 cannot hold count as infinite or zero.

    Attributes:
        title: the name of the function, and whether its gradient was taken.
        activations: the numbers of the forward pass, by scope, in the order of the program: each
            has a `scope` and a `histogram`.
        gradients: the numbers of the backward pass, by scope.
        masks: constants beyond float16 that `jnp.where` puts into arrays, such as 1e9 for -1e9.
            Numbers of these magnitudes are counted apart: they do not overflow where they matter,
            as softmax makes the same of an infinity, and autocast keeps them finite.
    """

    __module__ = "jmpx.inspect"
    _version = 2

    title: str
    activations: tuple[Range, ...]
    gradients: tuple[Range, ...]
    masks: tuple[float, ...] = ()

    def histogram(self, kind: str = "gradients", scope: str | None = None) -> Histogram:
        """Returns how many numbers have which magnitude.

        Args:
            kind: `gradients` or `activations`.
            scope: a scope, with those inside of it, or a selector such as `*/mlp`; None for all.

        Raises:
            ValueError: if there is no such kind or scope.
        """
        if kind not in _KINDS:
            raise ValueError(
                f"Expected kind= to be 'activations' or 'gradients', got {describe(kind)}."
            )
        found: tuple[Range, ...] = getattr(self, kind)
        if scope is None:
            return merged(each.histogram for each in found)
        if not any(each.is_in(scope) for each in (*self.activations, *self.gradients)):
            raise ValueError(
                f"Expected scope= to be one of those in to_dict(), got {describe(scope)}."
            )
        return merged(each.histogram for each in found if each.is_in(scope))

    def shares(
        self,
        dtype: DTypeLike,
        scale: float = 1,
        *,
        kind: str = "gradients",
        scope: str | None = None,
    ) -> Shares:
        """Returns which shares of the numbers that are not zero a format does not hold.

        The shares are exact: each number is multiplied by the scale and rounded once.

        Args:
            dtype: `float16`, `bfloat16`, `float8_e4m3fn` or `float8_e5m2`.
            scale: what the numbers are multiplied by, a power of two, such as a loss scale.
            kind: `gradients` or `activations`.
            scope: a scope or a selector, see `histogram`; None for all.

        Returns:
            The shares that are `lost`, `subnormal` and `overflowing`.

        Raises:
            ValueError: if an argument is none of those described here.
        """
        return self.histogram(kind, scope).shares(dtype, scale)

    def loss_scale(self, head_room: int = 2, dtype: DTypeLike = "float16") -> float:
        """Returns a loss scale for the gradients: a static one, or where a dynamic one begins.

        It is the largest power of two with which the largest gradient, times `2**head_room`, does
        not overflow. If the function scales its loss itself, it is a factor to that scale. A loss
        that is itself computed in float16, as under `policy="c=f16"` of the gradient functions,
        takes no more than 2**15, because the scale passes through its dtype.

        Args:
            head_room: by how many powers of two gradients may grow, a whole number.
            dtype: the format that holds the gradients. For bfloat16 it is 1.

        Raises:
            ValueError: if the format is unknown, `head_room` is negative, or there are no
                gradients.

        Example:
            >>> import jax.numpy as jnp, jmpx
            >>> loss_fn = lambda w, x: jnp.mean((x @ w) ** 2)
            >>> found = jmpx.inspect.ranges(loss_fn)(jnp.ones(4), jnp.eye(4))
            >>> str(jmpx.DynamicLossScale(found.loss_scale()))
            'dynamic,init=16384'
        """
        found = self.histogram()
        if not found.numbers:
            raise ValueError(
                "Expected gradients that are not all zero, got none: give jmpx.inspect.ranges a "
                "loss that depends on its first argument, or a step that contains its gradient."
            )
        if as_format(dtype) is FORMATS["bfloat16"]:
            return 1.0  # it has the range of float32
        if operator.index(head_room) < 0:
            raise ValueError(f"Expected head_room= to be at least 0, got {head_room}.")
        scale = 2.0 ** (found.room(dtype) - head_room)
        return min(max(scale, LOWEST_SCALE), HIGHEST_SCALE)

    def plot(
        self, path: str | os.PathLike[str], scope: str | None = None, scale: float = 1
    ) -> None:
        """Draws how many numbers have which exponent, as figure 3 of arXiv 1710.03740 does.

        The range of float16 is shaded. It needs matplotlib.

        Args:
            path: the file to write, whose ending is its format, such as `.png`, `.svg` or `.pdf`.
            scope: a scope or a selector, see `histogram`; None for all.
            scale: a loss scale, a power of two: the picture shows where it moves float16's range.

        Raises:
            ImportError: if there is no matplotlib.
            ValueError: if matplotlib knows no such format, or there is no such scope.
        """
        where = "" if scope is None else f" in {scope}"
        histograms = {kind: self.histogram(kind, scope) for kind in _KINDS}
        plot_histograms(f"{self.title}{where}: magnitudes in float32", histograms, path, scale)

    def __str__(self) -> str:
        """Returns formats, the scopes of which float16 holds the least, and a loss scale for it."""
        scale = self.loss_scale() if self.histogram().numbers else 1.0
        scopes = {each.scope for each in (*self.activations, *self.gradients)}
        counts = f"{count_text(len(scopes), 'scope')}, {_all_numbers(self).size:,} numbers"
        blocks = [
            [f"Ranges of {self.title} in float32: {counts}"],
            _format_lines(self, scale),
            _scope_lines(self, scale),
            list(_advice_lines(self, scale)),
        ]
        return "\n\n".join("\n".join(lines) for lines in blocks if lines)

    def to_dict(self) -> dict[str, object]:
        """Returns dicts, lists, strings and numbers, as `json.dumps` takes them."""
        kinds = {kind: list(map(_range_dict, getattr(self, kind))) for kind in _KINDS}
        return {"version": self._version, "title": self.title, "masks": list(self.masks), **kinds}


def _range_dict(each: Range) -> dict[str, object]:
    return {
        "scope": each.scope,
        "exponents": {str(e): count for e, count in each.histogram.exponents.items()},
        **{n: getattr(each.histogram, n) for n in ("zeros", "infinite", "nan", "masked")},
    }


def _all_numbers(found: Ranges) -> Histogram:
    return merged(found.histogram(kind) for kind in _KINDS)


def _times(scale: float) -> str:
    return "" if scale == 1 else f" x 2**{exponent_of(scale)}"


def _shares(histogram: Histogram, dtype: str, scale: float) -> list[str]:
    return [share_text(part, 1) for part in histogram.shares(dtype, scale)]


def _format_lines(found: Ranges, scale: float) -> list[str]:
    """Returns a table: what each format loses of all activations and of all gradients."""
    kinds = [("activations", 1.0), *(("gradients", factor) for factor in sorted({1.0, scale}))]
    rows = [["", "", *Shares._fields]]
    for kind, factor in kinds:
        histogram, name = found.histogram(kind), f"{kind}{_times(factor)}"
        for known in FORMATS if histogram.numbers else ():
            rows.append([name, known, *_shares(histogram, known, factor)])
            name = ""
    return columns(rows, right=(2, 3, 4)) if len(rows) > 1 else []


def _scope_lines(found: Ranges, scale: float) -> list[str]:
    """Returns a table: the range of each scope, and what float16 does not hold of it."""
    forward, backward = ({each.scope: each.histogram for each in getattr(found, k)} for k in _KINDS)
    pairs = {
        scope: (forward.get(scope, Histogram()), backward.get(scope, Histogram()))
        for scope in dict.fromkeys([*forward, *backward])
    }

    def badness(scope: str) -> tuple[float, float]:
        shares = [h.shares("float16", f) for h, f in zip(pairs[scope], (1, scale), strict=True)]
        return max(each.overflowing for each in shares), max(each.lost for each in shares)

    worst = sorted(pairs, key=badness, reverse=True)[:_ROWS]
    rows = [["activations", "over", "gradients", f"lost{_times(scale)}", "over", "scope"]]
    for scope in filter(set(worst).__contains__, pairs):
        magnitudes, _, over = _cells(pairs[scope][0], 1)
        name = scope or "(no scope)"
        rows.append([magnitudes, over, *_cells(pairs[scope][1], scale), name])
    lines = ["By scope, the magnitudes and what float16 does not hold:"]
    lines += columns(rows, right=(1, 3, 4))
    left_out = len(pairs) - len(worst)
    more = f"... and {left_out} more scopes, which to_dict() holds"
    return [*lines, more] if left_out else lines


def _cells(histogram: Histogram, scale: float) -> list[str]:
    """Returns the magnitudes, and which shares are lost and overflow."""
    if not histogram.numbers:
        return ["", "", ""]
    lost, _, over = _shares(histogram, "float16", scale)
    exponents = histogram.exponents
    return [f"2**{min(exponents)} .. 2**{max(exponents)}", lost, over]


def _advice_lines(found: Ranges, scale: float) -> Iterator[str]:
    gradients, every = found.histogram(), _all_numbers(found)
    if gradients.numbers:
        largest = f"largest gradient 2**{max(gradients.exponents)}"
        yield f"Loss scale for float16: {scale_text(scale)}  ({largest})"
        if scale > _IN_FLOAT16:
            yield f"A loss that is itself computed in float16 takes {scale_text(_IN_FLOAT16)}."
    if every.masked:
        masks = ", ".join(f"{mask:.3g}" for mask in found.masks)
        yield f"Masks, counted apart: {every.masked:,} numbers such as {masks}."
    if every.infinite + every.nan:
        count = f"{every.infinite + every.nan:,} numbers"
        yield f"Infinite or NaN in float32: {count}; jmpx.inspect.first_nonfinite finds the first."
