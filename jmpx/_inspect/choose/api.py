"""`jmpx.inspect.choose(loss, policy, error=0.01)(*batches)`, and its report."""

import dataclasses
import functools
import math
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jmpx._base.messages import describe, share_text
from jmpx._base.trees import PyTree, is_array
from jmpx._inspect.blame.api import blamed_runs, check_blamed
from jmpx._inspect.blame.runs import Measure
from jmpx._inspect.choose.search import LeftOut, Strings
from jmpx._inspect.plan.api import Planned, plan
from jmpx._inspect.plan.chips import get_chip
from jmpx._inspect.reports import GREEN, ORANGE, SKY_BLUE, Report, Table, new_figure
from jmpx._inspect.running import progress, relative_error
from jmpx._inspect.text import bytes_text, error_text
from jmpx._jaxprs.core import Array
from jmpx._policies.map_strings import get_policy_map
from jmpx._policies.maps import PolicyMapLike

# --- The report ---


class Tried(NamedTuple):
    """A policy string, the error that was measured under it, and what it costs."""

    policy: str
    error: float
    memory: int  # bytes: the peak on the chip, or those that the trace keeps for the backward pass
    low: float  # the share of the FLOPs of matrix products that run in 16 or in 8 bits
    fits: bool | None = None  # on the chip; None if it was not compiled


def front(rows: Sequence[Tried]) -> tuple[Tried, ...]:
    """Returns the rows that no other row beats in both memory and error, the smallest first."""
    kept = list[Tried]()
    for row in sorted(rows, key=lambda row: (row.memory, row.error, len(row.policy))):
        if all(row.error < each.error for each in kept):
            kept.append(row)
    return tuple(kept)


@dataclasses.dataclass(frozen=True)
class Choice(Report):
    """What `jmpx.inspect.choose` found: policy strings on the front of error against memory.

    Attributes:
        title: the results whose error it is.
        bound: the bound on the error.
        batches: the number of batches on which the error was measured.
        chip: the chip for which memory was planned; empty if memory is the bytes that the trace
            keeps for the backward pass.
        rows: the strings, the one with the least memory first, and float32 last. Each has a smaller
            error than all rows before it.
        left_out: strings that are no candidates, with reasons.
        notes: why float32 is chosen, and limits of these numbers, in sentences.
    """

    __module__ = "jmpx.inspect"

    title: str
    bound: float
    batches: int
    chip: str
    rows: tuple[Tried, ...]
    left_out: tuple[LeftOut, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def chosen(self) -> Tried | None:
        """The first row that holds the bound and fits, which may be float32; None without one."""
        rows = (row for row in self.rows if row.error <= self.bound and row.fits is not False)
        return next(rows, None)

    @property
    def policy(self) -> str:
        """The policy string of the chosen row.

        Raises:
            ValueError: if no string holds the bound on this chip.
        """
        if self.chosen is None:
            raise ValueError(
                f"Expected a policy that holds an error of {self.bound:g} and fits on "
                f"{self.chip}, found none: allow a larger error, or make the step smaller."
            )
        return self.chosen.policy

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the error of each string and the memory that it needs. It needs matplotlib.

        Args:
            path: the file to write, whose ending is its format, such as `.png`, `.svg` or `.pdf`.

        Raises:
            ImportError: if there is no matplotlib.
            ValueError: if matplotlib knows no such format.
        """
        rows, bound = self.rows, self.bound
        names = [row.policy.replace("; ", "\n") for row in rows]
        known = [bound, *(row.error for row in rows if row.error)]
        height = 1.3 + sum(0.3 + 0.16 * len(name.splitlines()) for name in names)
        figure = new_figure(7.2, height)
        errors, memory = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
        for axes in (errors, memory):
            axes.grid(axis="x", lw=0.3)
            axes.set_axisbelow(True)
        colors = [ORANGE if row is self.chosen else SKY_BLUE for row in rows]
        places = range(len(rows))
        errors.scatter([row.error for row in rows], places, s=60, c=colors)
        for place, row in enumerate(rows):
            text = f"{row.error:.2g}" + ", chosen" * (row is self.chosen)
            at = (row.error, place)
            errors.annotate(text, at, (0, 8), textcoords="offset points", ha="center")
        errors.axvspan(0, bound, color=GREEN, alpha=0.15, lw=0, zorder=0)
        errors.set_xscale("symlog", linthresh=min(known), linscale=0.5)  # 0 is linear
        errors.set(xlim=(-min(known), 3 * max(known)), ylim=(len(rows) - 0.4, -0.6))
        errors.set_xlabel(f"error (in the shade: at most {bound:g})")
        errors.set_yticks(places, names, family="monospace", fontsize="small")
        bars = memory.barh(places, [row.memory / 2**20 for row in rows], 0.5, color=colors)
        memory.bar_label(bars, fmt="{:.3g}", padding=3)
        memory.margins(x=0.3)
        memory.set_xlabel(f"{self._what} (MiB)")
        figure.suptitle(f"Error of {self.title}")
        figure.savefig(path)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as `json.dumps` takes it, with the policy of the chosen row."""
        return {**super().to_dict(), "policy": self.chosen and self.chosen.policy}

    @property
    def _what(self) -> str:
        return f"peak on {self.chip}" if self.chip else "saved"

    def _blocks(self) -> Iterator[str | Table]:
        yield f"Error of {self.title}, over {self.batches} batches, at most {self.bound:g}"
        chosen = self.chosen
        cells = [["", "error", self._what, "products in 16 bits", "policy"]]
        for row in self.rows:
            mark = "chosen" if row is chosen else "does not fit" if row.fits is False else ""
            numbers = [error_text(row.error), bytes_text(row.memory), share_text(row.low, 1)]
            cells.append([mark, *numbers, row.policy])
        cells += [[each.mark, "", "", "", each.policy] for each in self.left_out]
        yield Table(cells, right=(1, 2, 3))
        end = "No string holds the bound and fits."
        if chosen is not None:
            end = f"--mp_policy={shlex.quote(chosen.policy)}"
        reasons = [f"{each.policy}: left out, as {each.why}." for each in self.left_out]
        yield "\n".join([end, *reasons, *self.notes])


# --- The choice ---


def choose(
    func: Callable[..., PyTree],
    policy: PolicyMapLike = "c=bf16",
    *,
    error: float,
    make_step: Callable[[str], tuple[Callable[..., PyTree], tuple[PyTree, ...]]] | None = None,
    chip: str | None = None,
    of: str = "gradients",
    metric: Measure | None = None,
    seed: int = 0,
) -> Callable[..., Choice]:
    """Finds the policy string with the fewest parts in float32 that keeps the error within a bound.

    Modules and scopes are ordered by the cost of their roundings (see `jmpx.inspect.blame`), then
    the operations outside of them. Without modules and scopes, lines of code take their place, and
    the notes say which `jax.named_scope` to write. One compiled program, which rounds as a mask
    says, tries sets of them. A part is taken if it lowers the error by more than batches differ by
    chance. Some ten strings are then run and compiled as written, so no number in the report is an
    estimate; a rule without which the last one holds the bound, too, is left out. If `policy`
    overflows, it first gets rules of `jmpx.inspect.first_nonfinite`. Strings that overflow or are
    refused have rows that say so.

    For a chip that multiplies in 8 bits, the widest layers are tried with `m=fp8`, too, where that
    holds the bound. Such a string is chosen if it needs less memory; nothing here says how fast it
    is.

    Args:
        func: a loss, or another function, as `jmpx.inspect.blame` takes it.
        policy: the policy string or map to which rules are added: by modules or by operations.
        error: the bound on the error: the root mean square over batches, relative to the norm of
            the gradients in float32; or of `metric`.
        make_step: as for `jmpx.inspect.plan`: the step whose memory counts. None is the gradient
            of `func` on one of the batches, without an optimizer.
        chip: the chip for whose memory the strings are compiled, as for `jmpx.inspect.plan`; None
            counts the bytes that the trace keeps for the backward pass.
        of: `"gradients"`, or `"results"` for the value of a loss, as for `jmpx.inspect.blame`.
        metric: a function of two lists of arrays, the gradients or results with roundings and those
            of float32, that returns the error, a number: 0 if there is none.
        seed: as for `jmpx.inspect.blame`. The same seed gives the same choice.

    Returns:
        A function of batches, each the tuple of the arguments of `func`, that returns a
        `jmpx.inspect.Choice`. Use about 8 small batches of one size.

    Raises:
        TypeError: as `jmpx.inspect.blame` and `jmpx.inspect.plan`.
        ValueError: as these; if the error is not positive, or `policy` is applied by arguments,
            which has no rules; when called, if float32 itself misses the bound, or `metric` returns
            no such number.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import jmpx
        >>> def loss_fn(w, x):
        ...     with jax.named_scope("encoder"):
        ...         h = jnp.tanh(x @ w)
        ...     with jax.named_scope("distance"):  # a difference of large numbers
        ...         h = (h @ w + 64) - 64
        ...     return jnp.mean(h.astype(jnp.float32) ** 2)
        >>> keys = jax.random.split(jax.random.key(0), 8)
        >>> batches = [tuple(jax.random.normal(key, (2, 16, 16))) for key in keys]
        >>> choice = jmpx.inspect.choose(loss_fn, error=0.01)(*batches)
        >>> choice.policy
        'c=bf16,save=products; */distance: full'
    """
    base = get_policy_map(policy)
    check_blamed(func, of)
    if chip is not None:
        get_chip(chip)
    if not (bound := _number(error)) > 0:
        raise ValueError(f"Expected error= to be a positive number, got {describe(error)}.")
    if metric is not None and not callable(metric):
        raise TypeError(
            "Expected metric= to be a function of two lists of arrays that returns the error, got "
            f"{describe(metric)}: leave it out for the relative error."
        )
    measure = functools.partial(_measured, relative_error if metric is None else metric)
    if base.way == "arguments":
        raise ValueError(
            f"Cannot add rules to policy {str(policy)!r}, which is applied by arguments: leave by "
            "out, or write by=modules."
        )

    given = policy.strip().rstrip(";") if isinstance(policy, str) else str(base)

    def call(*batches: tuple[PyTree, ...]) -> Choice:
        program, runs = blamed_runs(func, base, batches, with_gradient=of == "gradients")
        measure(runs.batches[0].exact, runs.batches[0].exact)  # raises if the metric is none
        what = "metric" if metric else "gradients" if program.is_differentiated else "results"
        strings = Strings(func, batches, program, runs, base, given, what).with_measure(measure)
        with progress(f"compiling {given!r}, then sets of rules tried", None) as done:
            strings = strings.without_overflow()
            strings.find(bound, seed, done)
            if chip is not None and "fp8" in get_chip(chip).formats:
                strings.find_eight_bits(bound)
        finite = [text for text, error in strings.errors.items() if math.isfinite(error)]
        planned = plan(make_step or strings.gradient, finite, chip=chip)
        planned_for = chip if chip and any(row.peak for row in planned.rows) else ""
        title, rows = f"the {what} of {program.name}", _rows(planned.rows, strings)
        left_out = [*strings.left_out.values(), *_without_a_row(planned.rows, strings, rows)]
        shown = [each.policy for each in (*rows, *left_out)]
        notes = (*strings.edits(shown), *(() if planned_for else planned.notes))
        choice = Choice(title, bound, len(batches), planned_for, rows, tuple(left_out), notes)
        if choice.chosen is None or choice.chosen.policy != strings.wide:
            return choice
        return dataclasses.replace(choice, notes=(_why_float32(strings, bound, left_out), *notes))

    return call


def _number(value: object) -> float:
    """Returns a real number, of Python or in an array of shape (), as a float; NaN for others."""
    if not (is_array(value) or isinstance(value, int | float)):
        return math.nan
    array = np.asarray(value)
    return float(array) if array.ndim == 0 and array.dtype.kind in "biuf" else math.nan


def _measured(metric: Measure, results: list[Array], exact: list[Array]) -> float:
    """Returns the error of results: infinite if they are not finite, else that of the metric."""
    if not all(np.isfinite(result).all() for result in results):
        return math.inf
    error = metric(results, exact)
    if not (number := _number(error)) >= 0:
        raise ValueError(
            "Expected metric= to return the error, a number from 0 on, got "
            f"{describe(error)}: return for example a norm of the differences, as a float."
        )
    return number


def _rows(planned: Sequence[Planned], strings: Strings) -> tuple[Tried, ...]:
    """Returns the strings on the front of error against memory, and float32 behind them."""
    rows = []
    for row in planned:
        if not row.error:
            memory = row.peak or sum(row.saved.values())
            error = strings.errors[row.policy]
            rows.append(Tried(row.policy, error, memory, _low(row), row.fits))
    # Rules that put all products into float32 make a string that is float32 in many words. With
    # small batches it may need the least memory, because no parameter has a copy in 16 bits.
    products = any(row.products for row in planned)
    kept = [row for row in rows if row.policy != strings.wide and (row.low or not products)]
    return (*front(kept), *(row for row in rows if row.policy == strings.wide))


def _without_a_row(
    planned: Sequence[Planned], strings: Strings, rows: Sequence[Tried]
) -> Iterator[LeftOut]:
    """Yields the strings that were run, but not compiled, or whose 8 bits save no memory."""
    for row in filter(lambda row: row.error, planned):
        mark = "does not fit" if row.fits is False else "not compiled"
        yield LeftOut(row.policy, mark, f"its step is refused: {row.error.rstrip('.')}")
    known = {row.policy for row in (*rows, *(row for row in planned if row.error))}
    for text in sorted(strings.in_eight_bits - known - strings.left_out.keys()):
        why = f"it saves no memory, with an error of {error_text(strings.errors[text])}"
        yield LeftOut(text, "saves nothing", why)


def _why_float32(strings: Strings, bound: float, left_out: Sequence[LeftOut]) -> str:
    """Returns the sentence that says why float32 is chosen."""
    names = {strings.wide, *(each.policy for each in left_out)}
    known = {text: error for text, error in strings.errors.items() if text not in names}
    found = [
        f"{text!r} " + (f"is off by {error:.1e}" if error > bound else "has no products in 16 bits")
        for text, error in sorted(known.items(), key=lambda pair: pair[1])
    ]
    others = ", ".join(found) or "all others are left out"
    return f"{strings.wide} is chosen, as no cheaper string holds {bound:g}: {others}."


def _low(row: Planned) -> float:
    """Returns the share of FLOPs of matrix products whose operands have 16 bits."""
    flops = {each.dtypes: each.flops for each in row.products}
    low = sum(flops[name] for name in flops if "float32" not in name and "float64" not in name)
    return low / sum(flops.values()) if flops else 0.0
