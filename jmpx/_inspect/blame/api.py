"""The public function `jmpx.inspect.blame(func, policy)(*batches)`, and its report."""

import contextlib
import dataclasses
import functools
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np

from jmpx._adapters.applying import apply_policy
from jmpx._autocast.value import matches_scope
from jmpx._base.contexts import RUN
from jmpx._base.messages import describe, share_text
from jmpx._base.trees import PyTree, is_floating_dtype
from jmpx._inspect.blame.runs import MOST, Batch, Costs, Measure, Points, Runs, costs, size_of
from jmpx._inspect.first_nonfinite.api import found_in
from jmpx._inspect.graph import Graph, Node, where
from jmpx._inspect.programs import Program, name_of, traced_program
from jmpx._inspect.reports import BLUE, ORANGE, Report, Table, new_figure
from jmpx._inspect.running import Advance, CompileCache, progress, relative_error, with_arrays
from jmpx._inspect.text import columns, error_text, paths_around, short_names
from jmpx._jaxprs import core
from jmpx._jaxprs.core import Equation, Jaxpr
from jmpx._jaxprs.equations import Place, library_of, place_of
from jmpx._jaxprs.inner import all_equations, once_per_jaxpr
from jmpx._jaxprs.marks import module_of
from jmpx._jaxprs.rewriting import with_equations, with_jaxprs
from jmpx._policies.map_strings import parse_rule
from jmpx._policies.maps import Rule
from jmpx._scales.strings import MixedPrecisionLike

Function: TypeAlias = Callable[..., PyTree]
Batches: TypeAlias = Sequence[tuple[PyTree, ...]]  # each the arguments of the function

WAYS = ("modules", "scopes", "lines")
_KINDS = ("gradients", "results")
_NOWHERE = "(outside of modules and scopes)"
_ROWS = 20  # how many a text shows
_BARS = 15  # how many a picture shows
_EXPLAINED = (0.5, 2.0)  # the range of the sum of all shares in which they add up
_BAR_KINDS = {False: (BLUE, "first order"), True: (ORANGE, "measured")}


class Blamed(NamedTuple):
    """A module, a scope or a line, and the cost of its roundings.

    `share` is its part of the squared error, and `error` the error that it alone would make,
    relative to the norm of the results. If its roundings cancel others, its share may exceed 1.
    """

    name: str
    share: float
    error: float
    operation: str  # the operation with the largest part of it
    place: Place | None  # the line of that operation
    size: int  # how many numbers it rounds
    is_measured: bool  # by two runs: it alone rounds, it alone does not; else it is first order
    rule: str  # a rule that was checked to select it, and puts it into float32; empty without one
    edit: str = ""  # the line to write around `place`, so that the rule selects it
    moves: float = 0.0  # the share of the FLOPs of 16-bit products that the rule puts into float32


@dataclasses.dataclass(frozen=True)
class Blame(Report):
    """What `jmpx.inspect.blame` found: which roundings cause the error of a function.

    Attributes:
        title: the results whose error it is, and the policy.
        error: the root mean square over batches of the relative error: the norm of the difference
            to float32, over the norm of the results in float32.
        batches: the number of batches.
        rows: modules, scopes or lines, the one with the largest share first.
        is_scalar: whether the result is one number, whose error is not first order near an optimum.
        reason: why all rows, or the first ones, were measured one by one; empty if they are first
            order.
    """

    __module__ = "jmpx.inspect"

    title: str
    error: float
    batches: int
    rows: tuple[Blamed, ...]
    is_scalar: bool = False
    reason: str = ""

    @property
    def explained(self) -> float:
        """The sum of the shares, near 1 if roundings are independent and first order."""
        return sum(row.share for row in self.rows)

    def check(self, at_most: float) -> Self:
        """Raises if the relative error is larger: for tests.

        Args:
            at_most: the largest relative error.

        Returns:
            The blame itself.

        Raises:
            AssertionError: if the check fails, also under `python -O`: it names the row with the
                largest share.
        """
        if self.error <= at_most:
            return self
        first = self.rows[0]
        raise AssertionError(
            f"Expected {self.title} to be off by at most {at_most:g}, got "
            f"{error_text(self.error)}, of which {first.name} makes "
            f"{share_text(first.share, 1)}.\n\n{self}"
        )

    def diff(self, before: "Blame | Mapping[str, Any]") -> str:
        """Returns what has changed since another blame, as a table, the largest change first.

        Args:
            before: the other blame, or its `to_dict()`, for example from a file that another
                commit wrote.
        """
        old = before.to_dict() if isinstance(before, Blame) else before
        errors = {row["name"]: row["error"] for row in old["rows"]}
        new = {row.name: row.error for row in self.rows}
        names = [*new, *(name for name in errors if name not in new)]
        changes = {name: new.get(name, 0.0) ** 2 - errors.get(name, 0.0) ** 2 for name in names}
        names.sort(key=lambda name: -abs(changes[name]))
        was, now = error_text(old["error"]), error_text(self.error)
        head = f"Error of {self.title}: {was} before, {now} now"
        cells = [["", "before", "now"]]
        for name in names[:_ROWS]:
            cells.append([name, *(error_text(each.get(name, 0.0)) for each in (errors, new))])
        return "\n".join([head, "", *columns(cells, right=(1, 2))])

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the shares as bars. It needs matplotlib.

        Args:
            path: the file to write, whose ending is its format, such as `.png`, `.svg` or `.pdf`.

        Raises:
            ImportError: if there is no matplotlib.
            ValueError: if matplotlib knows no such format.
        """
        shown, rest = self.rows[:_BARS], self.rows[_BARS:]
        others = sum(100 * row.share for row in rest)
        more = f"; {len(rest)} more have {others:.1f} %" if rest else ""
        figure = new_figure(7.2, 1.2 + 0.26 * len(shown))
        axes = figure.add_subplot()
        for kind, (color, label) in _BAR_KINDS.items():
            found = [(i, 100 * row.share) for i, row in enumerate(shown) if row.is_measured == kind]
            if found:
                bars = axes.barh(*zip(*found, strict=True), color=color, label=label)
                axes.bar_label(bars, fmt="{:.1f} %", padding=3)
        axes.set_yticks(range(len(shown)), [row.name[-60:] for row in shown], family="monospace")
        axes.invert_yaxis()
        axes.margins(x=0.12, y=0.02)
        axes.set_xlabel(f"share of the squared error (%){more}")
        figure.suptitle(short_names(f"Error of {self.title}: {error_text(self.error)}"))
        if any(row.is_measured for row in shown):
            axes.legend(loc="lower right")
        figure.savefig(path)

    def _blocks(self) -> Iterator[str | Table]:
        over = "" if self.batches == 1 else f", over {self.batches} batches"
        yield f"Error of {self.title}: {error_text(self.error)}{over}"
        cells = [["", "share", "error", "most of it", "line", "moves", "rule"]]
        for row in self.rows:
            share = f"{100 * row.share:.0f} %" if row.share > 1 else share_text(row.share, 1)
            numbers = (share + "*" * row.is_measured, error_text(row.error))
            moves = share_text(row.moves, 1) if row.rule else ""
            cells.append([row.name, *numbers, row.operation, str(row.place or ""), moves, row.rule])
        yield Table(cells, (1, 2, 5), _ROWS)
        yield "\n".join(self._notes())

    def _notes(self) -> Iterator[str]:
        if not self.error:
            yield "The results are those of float32."
            return
        yield f"The shares explain {100 * self.explained:.0f} % of the squared error."
        if not _EXPLAINED[0] <= self.explained <= _EXPLAINED[1]:
            yield (
                "They do not add up, because roundings depend on each other: trust the order of "
                "the rows, not their numbers."
            )
        if edited := next((row for row in self.rows if row.edit), None):
            yield (
                f"Rules of lines want the line in a scope of that name: {edited.rule!r} selects "
                f"{edited.place} once it is written in `{edited.edit}`."
            )
        if self.is_scalar:
            yield (
                "One number near its optimum is not first order: blame the gradients, or a vector."
            )
        if any(row.is_measured for row in self.rows):
            why = f" ({self.reason})" if self.reason else ""
            yield f"* measured by two runs: it alone rounds, and it alone does not{why}"


# --- The runs ---


def blame(
    func: Callable[..., PyTree],
    policy: MixedPrecisionLike | None = None,
    *,
    by: str | None = None,
    of: str = "gradients",
    seed: int = 0,
) -> Callable[..., Blame]:
    """Shows which roundings cause the error of a function, as shares of its square.

    The function runs as written, with each 16-bit result rounded (see `jmpx.inspect.emulate`),
    and in float32, on the same inputs; in float64, if JAX's 64-bit types are enabled. To first
    order, a rounding contributes its own error times the cotangent that reaches it, so one backward
    pass covers them all. A line counts once for all iterations of a scan. If roundings are not
    independent, as in a running sum of one number, or if there is no derivative, a group is
    measured by two runs: one in which only this group rounds, one in which only it does not.

    Args:
        func: a loss, which is differentiated in its first argument: the error of its gradients
            counts. Or any other function, such as a model, whose floating results count.
        policy: a policy string or map that `jmpx.apply_policy` applies to `func`; with None it
            runs as it is written.
        by: `"modules"`, `"scopes"` (modules, and `jax.named_scope`s in them) or `"lines"`; None is
            scopes, or lines if there is one scope at most.
        of: `"gradients"`, or `"results"` to look at the value of a loss, too. A scalar near its
            optimum is not first order, and the report warns.
        seed: seeds the random directions in which results are summed.

    Returns:
        A function of batches, each the tuple of the arguments of `func`, that returns a
        `jmpx.inspect.Blame`. Several batches say more than one: use about 8 small ones. It needs
        the memory of about four gradients in float32.

    Raises:
        TypeError: when called, if `func` is not callable, there are no batches or one is no tuple,
            or an argument is a shape or traced.
        ValueError: if `by` or `of` is none of the words; when called, if batches differ in shapes,
            nothing is rounded to 16 bits, no result is floating, a result is not finite, or the
            program holds a `jax.shard_map`.

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
        >>> report = jmpx.inspect.blame(loss_fn, "c=bf16")(*batches)
        >>> report.rows[0].name, report.rows[0].share > 0.5, report.rows[0].rule
        ('distance', True, '*/distance: full')
    """
    if by is not None and by not in WAYS:
        raise ValueError(f"Expected by= to be one of {', '.join(WAYS)}, got {describe(by)}.")
    check_blamed(func, of)

    def call(*batches: tuple[PyTree, ...]) -> Blame:
        program, runs = blamed_runs(func, policy, batches, with_gradient=of == "gradients")
        graph = Graph(program)
        names = group_names(graph, runs.points, by)
        groups = {name: [n for n, each in enumerate(names) if each == name] for name in names}
        with progress("groups measured", min(len(groups), MOST)) as done:
            found = costs(runs, list(groups.values()), seed, done)
        if not np.isfinite(found.squared):
            raise ValueError(_nonfinite(program, "16 bits"))
        rows = _rows(graph, runs.points, groups, found, by)
        if policy is not None and not program.mapped_by:  # by=arguments has no rules
            rows = [row._replace(rule="", edit="") for row in rows]
        size = sum(array.size for array in runs.batches[0].exact)
        kind = "gradients" if program.is_differentiated else "results"
        title = f"the {kind} of {program.name}" + ("" if policy is None else f" under {policy}")
        return Blame(title, found.squared**0.5, len(batches), tuple(rows), size == 1, found.reason)

    return call


def check_blamed(func: object, of: object) -> None:
    """Refuses what is no function, such as batches, and an `of=` that is not one of the words."""
    if not callable(func):
        raise TypeError(
            f"Expected a loss or another function, got one of type {type(func).__name__}: pass the "
            "function first, and the batches to the function that is returned."
        )
    if of not in _KINDS:
        raise ValueError(f"Expected of= to be 'gradients' or 'results', got {describe(of)}.")


def blamed_runs(
    func: Function, policy: MixedPrecisionLike | None, batches: Batches, with_gradient: bool = True
) -> tuple[Program, Runs]:
    """Traces a function under a policy; returns its program and its runs on the batches."""
    others = {type(batch) for batch in batches} - {tuple}
    if others or not batches:
        got = ", ".join(sorted(f"one of type {cls.__name__}" for cls in others)) or "none"
        raise TypeError(
            f"Expected batches that are tuples of the arguments of the function, got {got}: write "
            "each as a tuple of its own, as in (params, x), (params, x2)."
        )
    applied = func if policy is None else apply_policy(func, policy)
    with progress(f"compiling and running {name_of(func)} in float32", len(batches)) as done:
        exact = program = traced_program(applied, batches[0], None, with_gradient, RUN)
        if policy is not None:  # constants that were traced in 16 bits are rounded already
            exact = traced_program(func, batches[0], None, with_gradient, RUN)
        runs = runs_of(program, _exact(func, exact, batches, with_gradient, done))
    if not runs.points.at:
        under = "" if policy is None else f" under {str(policy)!r}"
        fewer = "16 bits" if runs.points.wide == np.float32 else "less than float64"
        raise ValueError(
            f"Found no rounding to blame: {name_of(func)}{under} computes nothing in {fewer}; give "
            "a policy such as 'c=bf16'."
        )
    return program, runs


def runs_of(
    program: Program,
    batches: Sequence[Batch],
    measure: Measure = relative_error,
    runs_often: bool = True,
) -> Runs:
    """Returns the runs of a program on batches."""
    compiled = CompileCache(program.jaxpr, runs_often)
    return Runs(Points(program.jaxpr), _outputs(program), batches, compiled, measure)


def _exact(
    func: Function, program: Program, batches: Batches, with_gradient: bool, done: Advance
) -> list[Batch]:
    """Returns the arrays of batches, and the results of a function on them in float32."""
    points, outputs = Points(program.jaxpr), _outputs(program)
    compiled = CompileCache(program.jaxpr)
    wide = lambda constant, arrays: points.charged(constant, arrays, {}, {})  # noqa: E731
    found = list[Batch]()
    for number, batch in enumerate(batches):
        each = traced_program(func, batch, None, with_gradient, RUN) if number else program
        each = with_arrays(each, "jmpx.inspect.blame")
        if each.jaxpr.in_avals != program.jaxpr.in_avals:
            raise ValueError(
                f"Expected batches of the shapes and dtypes of the first one, got others in batch "
                f"{number}: cut them to one size."
            )
        results = compiled.run(wide, (list(each.arrays),), "float32")
        kept = [np.asarray(results[index]) for index in outputs]
        if not all(np.isfinite(array).all() for array in kept):
            raise ValueError(_nonfinite(each, "float32"))
        found.append(Batch(each.arrays, kept))
        done()
    return found


def _nonfinite(program: Program, precision: str) -> str:
    """Returns the error message about results that are not finite, with their first cause."""
    first = found_in(program)
    by = f", first by {first.operation} at {first.place or 'no known line'}" if first else ""
    return (
        f"Expected results of {program.name} that are finite in {precision}, got NaN or "
        f"infinity{by}: print jmpx.inspect.first_nonfinite(...) for where it came from."
    )


def _outputs(program: Program) -> tuple[int, ...]:
    """Returns the indices of the gradients of a loss, or of the floating results."""
    indices = [i for i, a in enumerate(program.jaxpr.out_avals) if is_floating_dtype(a.dtype)]
    if program.is_differentiated:
        indices = indices[-program.gradients :]
    if not indices:
        raise ValueError(
            f"Expected floating results, whose error can be blamed, got none from {program.name}: "
            "return the numbers that count."
        )
    return tuple(indices)


def group_names(graph: Graph, points: Points, by: str | None) -> list[str]:
    """Returns the name of the group of each site, in the order of the points."""
    nodes = nodes_of(graph, points)
    if by == "modules":
        modules = [node.module for node in nodes]
        return [_NOWHERE if m is None else m.path or m.cls.__name__ for m in modules]
    if by != "lines":
        paths = [node.path or _NOWHERE for node in nodes]
        if by == "scopes" or len(set(paths)) > 1:
            return paths
    return [str(node.place or node.name) for node in nodes]


def nodes_of(graph: Graph, points: Points) -> list[Node]:
    """Returns the node of each site, in the order of the points."""
    return [graph.by_key[key] for key in points.order]


def selects(rule: Rule, scope: str, by_operations: bool) -> bool:
    """Whether a rule for a module or, by operations, a scope selects what is in a scope."""
    around = paths_around(scope)
    places = (each for each in around if by_operations or module_of(each) is not None)
    return any(matches_scope(rule, each) for each in places)


def _rows(
    graph: Graph, points: Points, groups: dict[str, list[int]], found: Costs, by: str | None
) -> list[Blamed]:
    nodes, sizes = nodes_of(graph, points), [size_of(each) for each in points.at.values()]
    rows = []
    for number, (name, sites) in enumerate(groups.items()):
        worst = nodes[max(sites, key=lambda site: (found.sites[site], sizes[site]))]
        part = float(found.parts[number])
        share = part / found.squared if found.squared else 0.0
        products = sum(found.sites[site] for site in sites if nodes[site].is_product)
        is_of_products = graph.program.uses_autocast and products > sum(found.sites[sites]) / 2
        policy = "product=f32" if is_of_products else "full"
        rule, edit = _mending(graph, worst, by, policy) if share else ("", "")
        if edit and number in found.direct:  # its worst line is known to first order alone
            rule, edit = "", ""
        moves = _moves(graph, nodes, worst, rule, edit) if rule.endswith("full") else 0.0
        source = (worst.name, worst.place, sum(sizes[i] for i in sites), number in found.direct)
        rows.append(Blamed(name, share, part**0.5, *source, rule, edit, moves))
    return sorted(rows, key=lambda row: -row.share)


def _mending(graph: Graph, node: Node, by: str | None, policy: str) -> tuple[str, str]:
    """Returns a rule that selects a node, and the line of code that it needs, or empty texts.

    The rule is for the innermost scope or module, except for one that holds the whole model.
    """
    by_operations = graph.program.takes_scopes
    path, module, names, _ = where(node.scope)
    # Of a scope in a module, Equinox's has no path: its name selects it, in each module.
    paths = [path, f"*/{names}"] if module and names and by != "modules" else []
    for select in filter(None, (*paths, node.selector)):
        with contextlib.suppress(ValueError):  # a name that no rule can hold
            rule = parse_rule(text := f"{select}: {policy}")
            if not graph.selects_all(rule) and selects(rule, node.scope, by_operations):
                return text, ""
    place = node.place
    if place is None or not by_operations or place[:2] in calling(graph.program.jaxpr):
        return "", ""
    name = name_of_line(place)
    return f"*/{name}: full", f'with jax.named_scope("{name}"):'


def _moves(graph: Graph, nodes: Sequence[Node], worst: Node, text: str, edit: str) -> float:
    """Returns the share of the FLOPs of products that a rule moves to float32."""
    rule, scopes = parse_rule(text), {node.scope for node in nodes}
    chosen = {scope for scope in scopes if selects(rule, scope, graph.program.takes_scopes)}
    is_moved = lambda n: n.place == worst.place if edit else n.scope in chosen  # noqa: E731
    return sum(n.flops for n in filter(is_moved, nodes)) / (sum(n.flops for n in nodes) or 1)


# --- Lines as scopes, for programs that have none: as if each line stood in a named scope ---


def name_of_line(place: Place) -> str:
    """Returns the name of the scope that a line gets, such as `residual_12`."""
    return re.sub(r"\W", "", f"{place.function}_{place.line}")


@once_per_jaxpr
def calling(jaxpr: Jaxpr) -> set[tuple[str, int]]:
    """Returns the files and numbers of lines that call others: a scope would hold these, too."""
    found = set[tuple[str, int]]()
    for eqn in all_equations(jaxpr):
        frames = eqn.source_info.traceback.frames if eqn.source_info.traceback else ()
        lines = [(f.file_name, f.line_num) for f in frames if not library_of(f.file_name)]
        found.update(line for line in lines if line != lines[0])
    return found


class Lines:
    """A function whose equations are in scopes of their lines; `places` holds these by name."""

    def __init__(self, func: Callable[..., PyTree]) -> None:
        functools.update_wrapper(self, func)
        self.func, self.places = func, dict[str, Place]()

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Runs the function."""
        traced = core.trace(self.func, args, kwargs)
        self.calling = calling(traced.jaxpr)
        return traced.rebuild(core.evaluate(self._named(traced.jaxpr, ""), traced.arrays))

    def _named(self, jaxpr: Jaxpr, called: str) -> Jaxpr:
        def change(eqn: Equation) -> Equation:
            place, name = place_of(eqn, called), eqn.params.get("name", "")
            held = itertools.chain(*map(all_equations, core.inner_jaxprs(eqn.params)))
            if any(place_of(each, name) not in (None, place) for each in held):
                return eqn.replace(params=with_jaxprs(eqn.params, lambda x: self._named(x, name)))
            if place is None or place[:2] in self.calling:
                return eqn
            self.places[name_of_line(place)] = place
            return core.with_scope(eqn, name_of_line(place))

        return with_equations(jaxpr, change)
