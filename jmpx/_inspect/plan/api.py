"""The public function `jmpx.inspect.plan(make_step, policies)`, and its report."""

import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jmpx._base.formats import lacking_for, listed
from jmpx._base.messages import describe, share_text
from jmpx._base.trees import PyTree, is_array
from jmpx._inspect.audit import summary
from jmpx._inspect.audit.report import Products
from jmpx._inspect.graph import Graph
from jmpx._inspect.plan.chips import Chip, get_chip, missing
from jmpx._inspect.plan.compiling import BROKEN, ask, line_of, placed, versions
from jmpx._inspect.programs import Program, traced_step
from jmpx._inspect.reports import BLUE, ORANGE, Report, Table, new_figure
from jmpx._inspect.running import progress
from jmpx._inspect.text import bytes_text, flop_text, short_names
from jmpx._inspect.watched import constants
from jmpx._scales.strings import MixedPrecisionLike, get_mixed_precision

_NUMBERS = 16  # the most elements of an array argument: a key, a count, a loss scale
_CONSTANT = 8 * 2**20  # the most bytes of a constant: a mask, a table of positions
NO_DONATION = (
    "No argument is donated, so that the old state is held beside the new one: jit the step with "
    "donate_argnums."
)
_UNTUNED = "Nothing is tuned without the GPU: a real run fuses a little more or less."
_PARTS = 3  # how many shares are shown


class Planned(NamedTuple):
    """The costs of a policy; None or empty if they are unknown.

    Products and saved bytes are counted in the trace of the whole program; the other fields come
    from the compiler, for one chip.
    """

    policy: str
    chips: int = 1
    peak: int | None = None  # bytes that the chip holds at once, with the arguments
    fits: bool | None = None
    products: tuple[Products, ...] = ()  # by the dtypes of their operands
    saved: dict[str, int] = {}  # bytes that are kept for the backward pass, by dtype
    accessed: float | None = None  # bytes; a loop's body counts once
    sent: dict[str, float] = {}  # bytes, by the kind of collective and its dtype
    seconds: float | None = None  # that the compiler took
    error: str = ""


@dataclasses.dataclass(frozen=True)
class Plan(Report):
    """The costs of a step under each policy, as `jmpx.inspect.plan` predicts them.

    Attributes:
        step: the name of the step.
        chip: the name of the chip; None if there are only the counts of the trace.
        memory: the bytes that a program may use on the chip.
        compiler: the versions of JAX and of the compiler.
        rows: one for each policy, in the order in which they were given.
        notes: limits of these numbers, in sentences.
    """

    __module__ = "jmpx.inspect"

    step: str
    chip: str | None
    memory: int | None
    compiler: str
    rows: tuple[Planned, ...]
    notes: tuple[str, ...] = ()

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the peak memory of each policy as a bar, and the chip's as a line, by matplotlib.

        Args:
            path: the file to write, whose ending is its format, such as `.png`, `.svg` or `.pdf`.

        Raises:
            ImportError: if there is no matplotlib.
            ValueError: if nothing was compiled, or matplotlib knows no such format.
        """
        sizes, most = [(row.peak or 0) / 2**30 for row in self.rows], (self.memory or 0) / 2**30
        if not any(sizes):
            raise ValueError("Expected a plan that was compiled, got none: give plan(chip=...).")
        figure = new_figure(8, 1.5 + 0.35 * len(sizes))
        axes, places = figure.add_subplot(), range(len(sizes))
        bars = axes.barh(places, sizes, color=[BLUE if s <= most else ORANGE for s in sizes])
        labels = [f"{size:.3g}" if size else "not compiled" for size in sizes]
        axes.bar_label(bars, labels, padding=3, fontsize=8)
        if max(sizes) > most / 2:  # else the line would make the bars short
            axes.axvline(most, color="0.5", lw=1)
        axes.set_yticks(places, [row.policy[-60:] for row in self.rows], fontsize=8)
        axes.set_xlabel(f"peak memory (GiB); {self.chip} has {most:.4g}")
        axes.set_title(self._title, fontsize=9)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        figure.savefig(path)

    def _blocks(self) -> Iterator[str | Table]:
        failed = [f"{row.policy}: {row.error}" for row in self.rows if row.error]
        yield self._title
        yield Table(_cells(self.rows), right=(1, 3))
        yield "\n".join([*failed, *self.notes])

    @property
    def _title(self) -> str:
        if self.chip is None:
            return f"Plan of {self.step}: counts of the trace"
        chips = max(row.chips for row in self.rows)
        many = f"{chips} x {self.chip}" if chips > 1 else self.chip
        return f"Plan of {self.step} on {many}, {bytes_text(self.memory or 0)} ({self.compiler})"


def plan(
    make_step: Callable[[Any], tuple[Callable[..., PyTree], tuple[PyTree, ...]]],
    policies: Sequence[MixedPrecisionLike],
    *,
    chip: str | None = None,
) -> Plan:
    """Predicts what a train step costs under each policy, before you rent a chip.

    Each step is traced, which gives its FLOPs by dtype and the bytes that it keeps for the backward
    pass. For a chip, the chip's own compiler, which runs without the chip in a separate process,
    gives the memory that the step needs, the bytes that it touches, and what chips send to each
    other. Answers are kept in `jmpx/plan` of the user's cache, so no program is compiled twice.

    Args:
        make_step: a function of a policy that returns a step and the tuple of its arguments. The
            step may be jitted: its donated arguments and its shardings count. The arguments hold
            `jax.ShapeDtypeStruct`s, as `jax.eval_shape` makes them, instead of arrays. Their
            shardings, of any mesh, such as a `jax.sharding.AbstractMesh`, say how many chips.
        policies: policy strings or maps. Each is passed to `make_step` as it is.
        chip: `"v5e"`, `"v5p"` or `"v6e"` (TPUs, by `pip install 'jmpx[tpu]'`), `"h100"`, `"a100"`
            or `"b200"` (GPUs, by `'jmpx[cuda]'`). None, or a chip without its compiler, gives only
            the counts of the trace.

    Returns:
        A `jmpx.inspect.Plan` with a row for each policy. If a policy cannot be traced or compiled,
        does not fit, or has a rule for products in 8 bits that the chip has no units for, its row
        says so.

    See Also:
        `jmpx.inspect.blame` shows what a policy costs in accuracy.

    Raises:
        TypeError: if `make_step` is not callable or returns something else, or a policy is none.
        ValueError: if there are no policies or one is wrong, the chip is unknown, or there are
            arrays among the arguments or large constants of a step.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import jmpx
        >>> def make_step(policy):
        ...     loss_fn = jmpx.apply_policy(lambda w, x: jnp.mean(jnp.tanh(x @ w)), policy)
        ...     step = jax.jit(lambda w, x: w - jax.grad(loss_fn)(w, x), donate_argnums=0)
        ...     shape = jax.ShapeDtypeStruct((64, 64), "float32")
        ...     return step, (shape, shape)
        >>> report = jmpx.inspect.plan(make_step, ["c=f32", "c=bf16,o=f32"])
        >>> [row.products[0].dtypes for row in report.rows]
        ['float32 x float32', 'bfloat16 x bfloat16']
    """
    target = None if chip is None else get_chip(chip)
    names = _names(policies)
    rules = [get_mixed_precision(policy).policy_map.rules for policy in policies]
    if not callable(make_step):
        raise TypeError(f"Expected make_step(policy), a function, got {describe(make_step)}.")
    reason = missing(target) if target else ""
    if target:  # JAX starts without the stack trace of a plugin that finds no chip here
        before = logging.root.manager.disable
        logging.disable(logging.ERROR)
        try:
            jax.devices()
        finally:
            logging.disable(before)
    rows, programs, failures = list[Planned](), list[Program](), list[Exception]()
    with progress("policies", len(names)) as done:
        for name, policy, own in zip(names, policies, rules, strict=True):
            try:
                step, arguments = _made(make_step, policy)
                programs.append(traced_step(step, arguments))
            except Exception as error:  # such as a kernel that refuses a dtype
                failures.append(error)
                rows.append(Planned(name, error=line_of(error)))
            else:
                _refuse_arrays(programs[-1])
                unfit = lacking_for(own, target.name, target.formats) if target else []
                row = _planned(name, programs[-1], target, not reason, *unfit[:1])
                if row.error.startswith(BROKEN):
                    reason, row = row.error, row._replace(error="")
                rows.append(row)
            done(_line(rows[-1]) if target and not reason else "")
    if not programs:
        raise failures[0]
    if not target:
        return Plan(programs[0].name, None, None, "", tuple(rows))
    notes = [] if any(placed(program)[0] for program in programs) else [NO_DONATION]
    notes += [_UNTUNED] if target.platform == "cuda" else []
    notes = [f"{reason} These are counts of the trace."] if reason else notes
    if any(rule.is_in_eight_bits for own in rules for rule in own):
        notes.append(f"{target.name} multiplies {listed(target.formats)}.")
    known = target.name, target.memory, versions(target)
    return Plan(programs[0].name, *known, tuple(rows), tuple(notes))


def _names(policies: object) -> list[str]:
    """Returns the names of policies in a report; raises an error if they are no list."""
    if isinstance(policies, str) or not isinstance(policies, Sequence) or not policies:
        raise ValueError(
            f"Expected policies as a list, such as ['c=f32', 'c=bf16'], got {describe(policies)}."
        )
    return [each if isinstance(each, str) else short_names(str(each)) for each in policies]


def _made(make_step: Callable[[Any], Any], policy: object) -> Any:
    """Returns a step and its arguments; raises a `TypeError` if `make_step` returns others."""
    match made := make_step(policy):
        case (step, tuple()) if callable(step) and isinstance(made, tuple):
            return made
    raise TypeError(
        f"Expected make_step to return a step and the tuple of its arguments, got "
        f"{describe(made)}: write `return step, (state, batch)`."
    )


def _refuse_arrays(program: Program) -> None:
    arrays = [x for x in program.arrays if is_array(x) and x.size > _NUMBERS]
    for array in (*arrays, *(x for x in constants(program.jaxpr) if x.nbytes > _CONSTANT)):
        raise ValueError(
            f"Expected {program.name} to take shapes in place of arrays, got or closed over one of "
            f"{array.dtype.name}{list(array.shape)}: make it by jax.eval_shape, which computes "
            "nothing, and pass it among the arguments."
        )


def _planned(
    name: str, program: Program, chip: Chip | None, compiles: bool, refused: str = ""
) -> Planned:
    graph = Graph(program, chip and {"cuda": "gpu"}.get(chip.platform, chip.platform))
    products, saved = summary.products(graph), summary.saved(graph)
    row = Planned(name, products=products, saved=saved, error=refused)
    if chip is None or not compiles or refused:
        return row
    try:
        row = row._replace(**ask(program, chip))
    except Exception as error:  # such as an effect that JAX cannot export
        return row._replace(error=line_of(error))
    # A GPU's compiler also compiles programs that do not fit.
    return row._replace(fits=row.fits and (row.peak or 0) <= chip.memory)


# --- The table ---


def _cells(rows: Sequence[Planned]) -> list[list[str]]:
    """Returns the rows of the table, its header first, without columns that are empty."""
    is_compiled = any(row.peak for row in rows)
    table = [_row(row, is_compiled) for row in rows]
    kept = [name for name in table[0] if not name or any(row[name] for row in table)]
    return [kept, *([row[name] for name in kept] for row in table)]


def _row(row: Planned, is_compiled: bool) -> dict[str, str]:
    """Returns the cells of a row, by the names of their columns."""
    # `bf16` stands for `bfloat16 x bfloat16`, and `bf16 x f32` for mixed operands.
    names = [
        dict.fromkeys(short_names(each.dtypes.replace("float8_", "")).split(" x "))
        for each in row.products
    ]
    products = {" x ".join(n): p.flops for n, p in zip(names, row.products, strict=True)}
    flops = sum(each.flops for each in row.products)
    return {
        "": row.policy,
        "peak": _bytes(row.peak),
        "fits": {True: "yes", False: "no", None: ""}[row.fits],
        "FLOP": flop_text(flops) if flops else "",
        "products": _shares(products),
        # the trace's count, which the compiler's peak replaces
        "saved": "" if is_compiled else _bytes(sum(row.saved.values())),
        "accessed": _bytes(row.accessed),
        "sent": _bytes(sum(row.sent.values())),
        "collectives": _shares(row.sent),
        "compiled": "" if row.seconds is None else f"{row.seconds:.0f} s",
    }


def _line(row: Planned) -> str:
    """Returns a row as a line, for those who wait for the next one."""
    cells = (f"{name} {cell}" for name, cell in _row(row, True).items() if name and cell)
    return f"{row.policy}: {row.error or ', '.join(cells)}"


def _bytes(number: float | None) -> str:
    return bytes_text(round(number)) if number else ""


def _shares(parts: Mapping[str, float]) -> str:
    """Returns the largest parts and their shares, such as `bf16 98.2 %, f32 1.8 %`."""
    largest, whole = sorted(parts, key=lambda name: -parts[name])[:_PARTS], sum(parts.values())
    return ", ".join(f"{name} {share_text(parts[name], whole)}" for name in largest)
