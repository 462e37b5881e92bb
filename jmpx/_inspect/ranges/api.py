"""The public function `jmpx.inspect.ranges(fn)(*args)`, and its report."""

import dataclasses
import functools
import operator
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Never

from jmpx._base.contexts import MEASURED
from jmpx._base.dtypes import DTypeLike
from jmpx._base.messages import describe, share_text
from jmpx._base.trees import PyTree
from jmpx._inspect.graph import Graph
from jmpx._inspect.programs import traced_program
from jmpx._inspect.ranges.counting import (
    FORMATS,
    Histogram,
    Range,
    Rows,
    Shares,
    as_format,
    counted,
    exponent_of,
    merged,
)
from jmpx._inspect.reports import BLUE, GREEN, ORANGE, Report, Table, new_figure
from jmpx._inspect.running import scale_text, with_arrays
from jmpx._inspect.text import count_text, refuse_arguments
from jmpx._scales.scaling import HIGHEST_SCALE, LOWEST_SCALE, format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_KINDS = ("activations", "gradients")
_IN_FLOAT16 = 2.0**15  # the largest power of two in float16, through which the scale may pass
_ROWS = 24  # how many scopes are shown
# The exponents of float16's smallest number, smallest normal number, and above its largest.
_SMALLEST, _NORMAL, _ABOVE = -24, -14, 16
_COLORS = {"activations": BLUE, "gradients": ORANGE}


# --- The report ---


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
            Numbers of these magnitudes are counted apart, because their overflow does no harm:
            softmax makes the same of an infinity, and autocast keeps them finite.
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
            scale: a factor of the numbers, a power of two, such as a loss scale.
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
        takes no more than 2**15, because the scale passes through its dtype. A dynamic scale below
        1 needs a floor as low: `jmpx.DynamicLossScale(scale, min_loss_scale=min(scale, 1))`.

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
        scale = 2.0 ** (found.head_room(dtype) - head_room)
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
        shift, title = exponent_of(scale), self.title + (f" in {scope}" if scope else "")
        histograms = {kind: self.histogram(kind, scope) for kind in _KINDS}
        shown = {kind: each for kind, each in histograms.items() if each.size}
        figure = new_figure(8, 1 + 2.6 * max(len(shown), 1))
        exponents = [e for each in shown.values() for e in each.exponents]
        low = max(min([*exponents, _SMALLEST, _SMALLEST - shift]) - 2, -80)
        for index, (kind, histogram) in enumerate(shown.items()):
            axes = figure.add_subplot(len(shown), 1, index + 1)
            _draw(axes, kind, histogram, shift if kind == "gradients" else 0)
            axes.set_xlim(low, max([*exponents, _ABOVE]) + 2.5)
            axes.set_xlabel("exponent: magnitudes from $2^e$ to below $2^{e+1}$")
        figure.suptitle(f"{title}: magnitudes in float32", fontsize=11)
        figure.savefig(path)

    def _blocks(self) -> Iterator[str | Table]:
        scale = self.loss_scale() if self.histogram().numbers else 1.0
        scopes = {each.scope for each in (*self.activations, *self.gradients)}
        every = merged(map(self.histogram, _KINDS))
        counts = f"{count_text(len(scopes), 'scope')}, {every.size:,} numbers"
        yield f"Ranges of {self.title} in float32: {counts}"
        if every.numbers:
            yield Table(_format_rows(self, scale), right=(2, 3, 4))
        yield "By scope, the magnitudes and what float16 does not hold:"
        yield _scope_table(self, scale)
        yield "\n".join(_advice_lines(self, every, scale))

    def to_dict(self) -> dict[str, object]:
        """Returns dicts, lists, strings and numbers, as `json.dumps` takes them."""

        def plain(each: Range) -> dict[str, object]:
            others = {n: getattr(each.histogram, n) for n in ("zeros", "infinite", "nan", "masked")}
            exponents = {str(e): count for e, count in each.histogram.exponents.items()}
            return {"scope": each.scope, "exponents": exponents, **others}

        kinds = {kind: list(map(plain, getattr(self, kind))) for kind in _KINDS}
        return {"version": self._version, "title": self.title, "masks": list(self.masks), **kinds}


def _times(scale: float) -> str:
    return "" if scale == 1 else f" x 2**{exponent_of(scale)}"


def _shares(histogram: Histogram, dtype: str, scale: float) -> list[str]:
    return [share_text(part, 1) for part in histogram.shares(dtype, scale)]


def _format_rows(found: Ranges, scale: float) -> list[list[str]]:
    """Returns a table: the shares of activations and gradients that each format does not hold."""
    kinds = [("activations", 1.0), *(("gradients", factor) for factor in sorted({1.0, scale}))]
    rows = [["", "", *Shares._fields]]
    for kind, factor in kinds:
        histogram, name = found.histogram(kind), f"{kind}{_times(factor)}"
        for known in FORMATS if histogram.numbers else ():
            rows.append([name, known, *_shares(histogram, known, factor)])
            name = ""
    return rows


def _scope_table(found: Ranges, scale: float) -> Table:
    """Returns the range of each scope, and the shares that float16 does not hold; the worst first.

    Among the worst, and among the others, scopes are in the order of the program.
    """
    kinds = [{each.scope: each.histogram for each in getattr(found, kind)} for kind in _KINDS]
    scopes = dict.fromkeys(scope for kind in kinds for scope in kind)
    pairs = {scope: [kind.get(scope, Histogram()) for kind in kinds] for scope in scopes}

    def badness(scope: str) -> tuple[float, float]:
        shares = [h.shares("float16", f) for h, f in zip(pairs[scope], (1, scale), strict=True)]
        return max(each.overflowing for each in shares), max(each.lost for each in shares)

    worst = sorted(pairs, key=badness, reverse=True)[:_ROWS]
    rows = [["activations", "over", "gradients", f"lost{_times(scale)}", "over", "scope"]]
    for scope in sorted(pairs, key=lambda scope: scope not in worst):
        magnitudes, _, over = _cells(pairs[scope][0], 1)
        name = scope or "(no scope)"
        rows.append([magnitudes, over, *_cells(pairs[scope][1], scale), name])
    return Table(rows, (1, 3, 4), _ROWS)


def _cells(histogram: Histogram, scale: float) -> list[str]:
    """Returns the magnitudes, and which shares are lost and overflow."""
    if not histogram.numbers:
        return ["", "", ""]
    lost, _, over = _shares(histogram, "float16", scale)
    exponents = histogram.exponents
    return [f"2**{min(exponents)} .. 2**{max(exponents)}", lost, over]


def _advice_lines(found: Ranges, every: Histogram, scale: float) -> Iterator[str]:
    gradients = found.histogram()
    if gradients.numbers:
        largest = f"largest gradient 2**{max(gradients.exponents)}"
        yield f"Loss scale for float16: {scale_text(scale)}  ({largest})"
        if scale < 1:
            skips = gradients.head_room("float16") < 0
            number, end = format_number(scale), ", where this step is skipped" * skips
            yield f"In code: jmpx.DynamicLossScale({number}, min_loss_scale={number})"
            yield f"Without min_loss_scale the floor is 1{end}."
        if scale > _IN_FLOAT16:
            yield f"A loss that is itself computed in float16 takes {scale_text(_IN_FLOAT16)}."
    if every.masked:
        masks = ", ".join(f"{mask:.3g}" for mask in found.masks)
        yield f"Masks, counted apart: {every.masked:,} numbers such as {masks}."
    if every.infinite + every.nan:
        count = f"{every.infinite + every.nan:,} numbers"
        yield (
            f"Infinite or NaN in float32: {count}, or those of masks; jmpx.inspect.first_nonfinite "
            "finds the first that reaches a result."
        )


# --- Pictures, after figure 3 of arXiv 1710.03740 ---


def _draw(axes: "Axes", kind: str, histogram: Histogram, shift: int) -> None:
    """Draws one panel; `shift` is the exponent of the loss scale."""
    exponents, numbers = histogram.exponents, max(histogram.numbers, 1)
    percents = [100 * count / numbers for count in exponents.values()]
    axes.bar(list(exponents), percents, width=1, align="edge", color=_COLORS[kind], lw=0.3, ec="w")
    axes.set_yscale("log")
    axes.set_ylim(max(min([1e-1, *percents]) / 2, 1e-6), 400)
    axes.set_ylabel(f"{kind} (%)")
    axes.axvspan(_NORMAL, _ABOVE, color=GREEN, alpha=0.18, lw=0, zorder=0)
    axes.axvspan(_SMALLEST, _NORMAL, color=GREEN, alpha=0.08, lw=0, zorder=0)
    for right, text in ((_ABOVE, "float16"), (_NORMAL, "subnormal")):
        axes.text(right - 0.3, 180, text, ha="right", va="center", fontsize=8)

    def held(scale: float) -> str:
        shares = zip(Shares._fields, _shares(histogram, "float16", scale), strict=True)
        return ", ".join(map(" ".join, shares))

    title = f"in float16: {held(1)}"
    if shift:
        axes.axvspan(_NORMAL - shift, _ABOVE - shift, fc="none", ec=GREEN, ls="--", lw=1)
        text = f"float16 at scale 2**{shift}"
        axes.text(_NORMAL - shift + 0.4, 60, text, fontsize=8, va="center")
        title += f"\nat scale 2**{shift}: {held(2.0**shift)}"
    axes.set_title(title, fontsize=8, loc="left")


# --- The function ---


def ranges(fn: Callable[..., object], *args: Never) -> Callable[..., Ranges]:
    """Runs a train step once in float32, and shows how large and how small its numbers are.

    Operations that were traced in 16 or 8 bits run in float32, too: casts in the function, in its
    policies and in autocast have no effect. The numbers that each operation computes are counted by
    exponent, also in loops, for each module or `jax.named_scope`, activations and gradients apart.
    So the report has the exact losses of float16, bfloat16 and the 8-bit formats, for any loss
    scale. Operations that only move numbers, such as reshapes, do not count, nor does a single
    number outside of modules and scopes, such as the loss. Numbers that `jax.checkpoint` computes
    again count as activations, both times; all others in a backward pass count as gradients, even
    where a `jax.custom_vjp` computes activations again.

    A program is compiled once with its counts, also for later calls of a step that does the same. A
    large program runs operation by operation, and its loops are compiled with their counts, in each
    call.

    Args:
        fn: a loss, which is differentiated in its first argument, also if it has derivatives
            inside: it returns a floating scalar, or a tuple that begins with one. Or a step that
            computes its own gradients; if it scales its loss, its gradients count as scaled. Any
            other function runs as it is.
        *args: none: the function that is returned takes the arguments of `fn`.

    Returns:
        A function of the arguments of `fn`, which are arrays, that returns a `jmpx.inspect.Ranges`.

    Raises:
        TypeError: if the arguments of `fn` are given beside it; when called, if `fn` is not
            callable, or an argument is a shape or traced.
        ValueError: when called, if `fn` is a loss whose first argument holds no floating array, or
            if the program holds a `jax.shard_map`, where each device has numbers of its own.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import jmpx
        >>> def loss_fn(params, x):
        ...     with jax.named_scope("encoder"):
        ...         h = jnp.tanh(x @ params["w"])
        ...     with jax.named_scope("energy"):
        ...         energy = jnp.square(1000 * h).sum(-1)  # beyond float16
        ...     return jnp.mean(jnp.sqrt(energy)) / 1000
        >>> params = {"w": jnp.full((8, 4), 0.25)}
        >>> found = jmpx.inspect.ranges(loss_fn)(params, jnp.ones((2, 8)))
        >>> found.shares("float16", kind="activations", scope="energy").overflowing > 0.3
        True
        >>> found.loss_scale()
        32768.0
    """
    refuse_arguments("ranges", args)

    @functools.wraps(fn, updated=())
    def call(*args: PyTree, **kwargs: PyTree) -> Ranges:
        program = traced_program(fn, args, kwargs, purpose=MEASURED)
        program = with_arrays(program, "jmpx.inspect.ranges")
        rows = Rows(Graph(program))
        kinds: tuple[list[Range], list[Range]] = [], []
        for (scope, is_gradient), counts in zip(rows.table, counted(program, rows), strict=True):
            kinds[is_gradient].append(Range(scope, Histogram.of(counts)))
        title = program.name + (" and its gradient" if program.is_differentiated else "")
        return Ranges(title, tuple(kinds[0]), tuple(kinds[1]), rows.masks)

    return call
