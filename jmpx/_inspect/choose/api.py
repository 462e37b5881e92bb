"""The choice as users ask for it: `jmpx.inspect.choose(loss, policy, error=0.01)(*batches)`."""

import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from jmpx._adapters.applying import apply_policy
from jmpx._base.messages import describe
from jmpx._base.trees import PyTree, is_array, spell
from jmpx._inspect.blame.api import blamed_runs, check_kind, nodes_of, runs_of
from jmpx._inspect.blame.shares import Measure, Runs, relative, shares
from jmpx._inspect.choose.islands import Sites, worthwhile
from jmpx._inspect.choose.report import Choice, Tried, front
from jmpx._inspect.choose.search import Search
from jmpx._inspect.graph import Graph
from jmpx._inspect.plan.api import Plan, Planned, plan
from jmpx._inspect.plan.chips import get_chip
from jmpx._inspect.programs import Program, traced_program
from jmpx._inspect.progress import progress
from jmpx._jaxprs import core
from jmpx._jaxprs.core import Array
from jmpx._policies.map_strings import get_policy_map
from jmpx._policies.maps import PolicyMap, PolicyMapLike

_AGAIN = 2  # searches with a tighter bound, if a string is worse than the search expected
_SETS = 4  # strings from no rule to all: with float32, and what follows them, at most ten


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

    Modules and scopes are ordered by what their roundings cost (see `jmpx.inspect.blame`), then the
    operations outside of them. One compiled program, whose mask says what rounds, tries sets of
    them. A part is taken if it lowers the error by more than batches differ by chance. At most
    ten strings are then run and compiled as written, so no number in the report is an
    estimate. Strings that overflow, or that JAX refuses, are left out and named in the notes.

    Args:
        func: a loss, or another function, as `jmpx.inspect.blame` takes it.
        policy: the policy string or map to which rules are added: by modules or by operations.
        error: the bound on the error: the root mean square over batches, relative to the norm of
            the gradients in float32; or of `metric`.
        make_step: as for `jmpx.inspect.plan`: the step whose memory counts. None is the gradient
            of `func` on one of the batches, without an optimizer.
        chip: the chip for whose memory the strings are compiled, as for `jmpx.inspect.plan`; None
            counts what the trace keeps for the backward pass.
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
    check_kind(of)
    if chip is not None:
        get_chip(chip)
    if not (bound := _number(error)) > 0:
        raise ValueError(f"Expected error= to be a positive number, got {describe(error)}.")
    if metric is not None and not callable(metric):
        raise TypeError(
            "Expected metric= to be a function of two lists of arrays that returns the error, got "
            f"{describe(metric)}: leave it out for the relative error."
        )
    measure = functools.partial(_measured, relative if metric is None else metric)
    if base.way == "arguments":
        raise ValueError(
            f"Cannot add rules to policy {str(policy)!r}, which is applied by arguments: leave by "
            "out, or write by=modules."
        )

    given = policy.strip().rstrip(";") if isinstance(policy, str) else str(base)

    def call(*batches: tuple[PyTree, ...]) -> Choice:
        program, runs = blamed_runs(func, base, batches, with_gradient=of == "gradients")
        measured = Runs(runs.points, runs.outputs, runs.batches, runs.compiled, measure)
        strings = _Strings(func, batches[0], program, measured)
        with progress("sets of rules tried", None) as done:
            search = lambda: _search(program, runs, base, measured, seed, done)  # noqa: E731
            _try_strings(strings, search, base, given, bound)
        finite = [text for text, error in strings.errors.items() if math.isfinite(error)]
        planned = plan(make_step or strings.gradient, finite, chip=chip)
        what = "metric" if metric else "gradients" if program.is_differentiated else "results"
        where = chip if chip and any(row.peak for row in planned.rows) else ""
        failed = [f"{row.policy}: {row.error}" for row in planned.rows if row.error]
        return Choice(
            f"the {what} of {program.name}",
            bound,
            len(batches),
            where,
            _rows(planned, strings.errors, _wide(base)),
            (*strings.notes(what), *failed, *(() if where else planned.notes)),
        )

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
            f"{spell(error) if is_array(error) and error.ndim else describe(error)}: return for "
            "example a norm of the differences, as a float."
        )
    return number


class _Strings:
    """Policy strings, and the errors of those that were run as they are written."""

    def __init__(
        self,
        func: Callable[..., PyTree],
        batch: tuple[PyTree, ...],
        program: Program,
        runs: Runs,
    ) -> None:
        self.func, self.batch, self.program, self.runs = func, batch, program, runs
        self.errors: dict[str, float] = {}
        self.failures: dict[str, str] = {}  # why JAX does not trace the function under a string

    def error(self, text: str) -> float:
        """Returns the root mean square of the error under a policy string, and keeps it.

        It is infinite if results are not finite, or if JAX refuses the function under the string.
        """
        if text not in self.errors:
            program = self._tried(text)
            if program is None:
                return self.errors.setdefault(text, math.inf)
            runs = runs_of(program, self.runs.batches, self.runs.measure, False)
            self.errors[text] = math.sqrt(runs.squares().mean()) if runs.points.at else 0.0
        return self.errors[text]

    def _tried(self, text: str) -> Program | None:
        """Returns the program under a string; None if it is refused, as a carry that widens is."""
        if text in self.failures:
            return None
        try:
            return self._traced(text)
        except (TypeError, ValueError) as error:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            self.failures[text] = first.rstrip(".:")
            return None

    def fails(self, text: str) -> bool:
        """Whether JAX refuses the function under a policy string."""
        return text not in self.errors and self._tried(text) is None

    def notes(self, what: str) -> list[str]:
        """Returns sentences about strings that have no error: they are left out."""
        tried = [text for text in self.errors if text in self.failures]
        overflows = [text for text, error in self.errors.items() if math.isinf(error)]
        return [
            *(
                f"{text}: left out, as the {what} are not finite."
                for text in overflows
                if text not in tried
            ),
            *(f"{text}: left out, as it is refused: {self.failures[text]}." for text in tried),
        ]

    def gradient(self, policy: PolicyMapLike) -> tuple[Callable[..., PyTree], PyTree]:
        """Returns the function or its gradient as a step under a policy, and its shapes."""
        jaxpr = self._traced(str(policy)).jaxpr
        shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in jaxpr.in_avals]
        step = lambda *arrays: core.evaluate(jaxpr, arrays)  # noqa: E731
        step.__name__ = self.program.name
        return step, tuple(shapes)

    def _traced(self, text: str) -> Program:
        applied = apply_policy(self.func, text)
        with warnings.catch_warnings():
            # The trace under the policy that was given has given each warning; a string that is
            # tried is not the user's, such as `save=products` for what is under `jax.checkpoint`.
            warnings.simplefilter("ignore")
            return traced_program(applied, self.batch, None, self.program.is_differentiated)


def _rows(planned: Plan, errors: Mapping[str, float], wide: str) -> tuple[Tried, ...]:
    """Returns the strings on the front of error against memory, and float32 behind them."""
    rows = [
        Tried(row.policy, errors[row.policy], _memory(row), _low(row), row.fits)
        for row in planned.rows
        if not row.error
    ]
    # Rules for all products are float32 in many words. That one beats no string: of small batches
    # it may need the least memory, as it keeps no copies of parameters in 16 bits.
    products = any(row.low for row in rows)
    kept = [row for row in rows if row.policy != wide and (row.low or not products)]
    return (*front(kept), *(row for row in rows if row.policy == wide))


def _memory(row: Planned) -> int:
    """Returns the bytes that a chip holds at once, or that the trace keeps."""
    return row.peak or sum(row.saved.values())


def _low(row: Planned) -> float:
    """Returns the share of FLOPs of matrix products whose operands have 16 bits."""
    flops = {each.dtypes: each.flops for each in row.products}
    low = sum(flops[name] for name in flops if "float32" not in name and "float64" not in name)
    return low / sum(flops.values()) if flops else 0.0


def _search(
    program: Program,
    runs: Runs,
    base: PolicyMap,
    measured: Runs,
    seed: int,
    done: Callable[[], object],
) -> Search:
    graph = Graph(program)
    sites = Sites(graph, nodes_of(graph, runs.points), base)
    islands = sites.islands()
    others = [*{*range(len(sites.nodes))}.difference(*(island.own for island in islands))]
    # With what no rule is for, the shares add up, and need not be measured one by one.
    found = shares(runs, [*(island.own for island in islands), others], seed, done)
    # Where all overflows, nothing tells what an island costs before it is tried.
    is_finite = math.isfinite(found.squared)
    parts = dict(zip(islands, found.parts if is_finite else np.zeros(len(islands)), strict=False))
    kept = worthwhile(islands, found.sites) if is_finite else islands
    return Search(measured, sites, kept, [float(parts[island]) for island in kept], done)


def _try_strings(
    strings: _Strings,
    new_search: Callable[[], Search],
    base: PolicyMap,
    given: str,
    bound: float,
) -> None:
    """Measures float32, the string without a rule, with a few, and with all that are needed."""
    wide = _wide(base)
    if strings.error(wide) > bound:
        raise ValueError(
            f"Expected an error= that float32 can hold, got {bound:g}, where float32 itself is off "
            f"by {strings.error(wide):.1e}: give a larger one."
        )
    written = given
    if strings.error(given) > bound:
        written = _searched(strings, new_search(), base, given, bound)
    if strings.error(written) <= bound and base.save is None:
        for text in (given, written):  # without rules, too, to see what they cost
            strings.error(_with_save(text))


def _with_save(text: str) -> str:
    """Returns a policy string whose backward pass keeps the results of products alone."""
    default, *rules = text.split(";", 1)
    if ":" in default:  # a rule: there is no default part
        default, rules = "full", [f" {text}"]
    return ";".join([f"{default},save=products", *rules])


def _searched(strings: _Strings, search: Search, base: PolicyMap, given: str, bound: float) -> str:
    """Measures strings with some rules and with all that a bound needs; returns the last one."""
    chosen = search.find(bound)
    while strings.fails(_with_rules(given, search.selectors(chosen), "full")):
        alone = {n: _with_rules(given, search.selectors([n]), "full") for n in chosen}
        search.leave_out([n for n, text in alone.items() if strings.fails(text)] or chosen)
        for text in alone.values():
            if text in strings.failures:
                strings.error(text)  # so that it is told
        chosen = search.find(bound)
    selectors = search.selectors(chosen)
    for count in sorted({*np.linspace(0, len(selectors), _SETS, dtype=int).tolist()}):
        strings.error(_with_rules(given, selectors[:count], "full"))
    written = _with_rules(given, selectors, "full")
    for _ in range(_AGAIN):
        if not strings.error(written) > bound >= search.error(chosen):
            break
        # The policy is worse than its mask: a set is looked for that leaves room for as much.
        chosen = search.find(bound * search.error(chosen) / strings.error(written))
        selectors = search.selectors(chosen)
        written = _with_rules(given, selectors, "full")
    if strings.error(written) > bound and base.way == "modules":
        written = _with_rules(given, selectors, "c=f32,o=f32")
    strings.error(written)
    return written


def _wide(base: PolicyMap) -> str:
    return f"by={base.by},f32" if base.by else "f32"


def _with_rules(given: str, selectors: Sequence[str], policy: str) -> str:
    return "; ".join([given, *(f"{selector}: {policy}" for selector in selectors)])
