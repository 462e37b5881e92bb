"""`jmpx.inspect.compare(reference, candidate)(*args)`: how far two functions of one model differ.

Each function runs twice, in float32 and as it is written. Outputs of scopes with one path are a
pair if they agree in float32. There equal numbers differ by 1e-6, or by some 1e-3 if a constant was
traced in 16 bits, and different numbers by their own size. Agreement also decides the order of the
axes: a sampler has tokens one by one, a full pass has an axis, and axes may have equal lengths.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jmpx._base.contexts import RUN
from jmpx._base.messages import describe
from jmpx._base.trees import PyTree, is_floating_dtype
from jmpx._inspect.emulate import LOW_DTYPES, Rounding
from jmpx._inspect.graph import Graph, Node
from jmpx._inspect.programs import Program, traced_program
from jmpx._inspect.reports import Report, Table
from jmpx._inspect.running import relative_error, run_widened, widened, with_arrays
from jmpx._inspect.text import count_text, error_text, paths_around, short_names
from jmpx._inspect.watched import Constant, Run, Site, SiteKey, Watcher, sites, stored
from jmpx._jaxprs.equations import Place
from jmpx._jaxprs.marks import Array, Jaxpr

_RESULT = "result"  # the scope of the results of the function
_FEW = 8  # how many outputs without a pair are shown
_SUMS_TO_ONE = 1e-3
_AGREES = 0.02  # the largest relative error of equal numbers in float32
_MOST_AXES = 6  # with more axes, not all orders are tried
_LARGE, _LOWEST = 1e9, -65504.0  # masks fill arrays with larger numbers, or with float16's lowest
_Numbers = dict[SiteKey, list[Array]]  # the kept results of sites


# --- The report ---


class Compared(NamedTuple):
    """An output of a scope of both functions.

    `error` is the norm of the difference, relative to that of the reference.
    """

    scope: str
    is_backward: bool
    dtypes: tuple[str, str]  # of the reference and of the candidate
    size: int
    error: float
    in_float32: float  # the error in float32: its rounding, and constants that have 16 bits
    place: Place | None  # the line of the candidate

    @property
    def at(self) -> str:
        """The scope and the line."""
        return f"{self.scope}{f', {self.place}' if self.place else ''}"


class Unpaired(NamedTuple):
    """An output of one function that agrees in float32 with none of the other."""

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
class Comparison(Report):
    """What `jmpx.inspect.compare` found: how far two functions of one model are apart, by scope.

    Attributes:
        title: the names of the functions.
        band: the relative error up to which two outputs are taken as equal.
        rows: the outputs of modules and scopes that both functions have, in the order of the
            reference, and their results, as the scope `result`.
        unpaired: outputs that agree in float32 with none of the other function, those of the
            reference first: such as scores before a mask, or values that only one computes.
        log_probabilities: the first results that are at most 0; None without any.
    """

    __module__ = "jmpx.inspect"

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
                f"{self.title} differ by {error_text(found.error)} in {found.at}, expected at most "
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
                f"{error_text(self.log_probabilities.kl)}, expected at most {kl:g}.\n\n{self}"
            )
        return self

    def _blocks(self) -> Iterator[str | Table]:
        both, alone = count_text(len(self.rows), "output"), len(self.unpaired)
        yield f"Comparison of {self.title}: {both} of both, {alone} of one alone"
        table = [["scope", "dtypes", "error", "in float32", ""]]
        names = [row.scope + ", backward" * row.is_backward for row in self.rows]
        lines = [f", line {row.place.line}" if row.place else "" for row in self.rows]
        for told in (lines, [f", {count_text(row.size, 'number')}" for row in self.rows]):
            pairs = zip(names, told, strict=True)  # what tells rows of one name apart
            names = [name + more * (names.count(name) > 1) for name, more in pairs]
        for name, row in zip(names, self.rows, strict=True):
            dtypes = " / ".join(map(short_names, dict.fromkeys(row.dtypes)))
            errors = map(error_text, (row.error, row.in_float32))
            table.append([name, dtypes, *errors, "" if row.error <= self.band else "<"])
        yield Table(table, right=(2, 3))
        if (first := self.first()) is not None:
            yield f"First beyond {self.band:g}: {first.at}, {error_text(first.error)}"
        if (found := self.log_probabilities) is not None:
            name = "KL" if found.is_distribution else "KL (k3)"
            numbers = {"rms": found.rms, "largest": found.largest, name: found.kl}
            text = ", ".join(f"{key} {error_text(number)}" for key, number in numbers.items())
            yield f"Log-probabilities, {found.size:,} numbers: {text}"
        if self.unpaired:
            rows = [["without a pair that agrees in float32", "of", "shape", "line"]]
            rows += [[o.scope, o.of, str(list(o.shape)), str(o.place or "")] for o in self.unpaired]
            yield Table(rows, most=_FEW)


# --- Outputs of scopes ---


class Output(NamedTuple):
    """An array that leaves a scope. In loops, the axes of iterations precede the others."""

    scope: str  # the path of a module, and the named scopes in it
    is_backward: bool  # whether a backward pass computes it
    place: Place | None  # the line that computes it
    dtype: str  # the dtype in which the program computes it
    wide: np.ndarray  # computed in float32
    written: np.ndarray  # computed as written, then cast to float32


# A node, the number of a result, and the scopes that the result leaves.
_Kept: TypeAlias = tuple[Node, int, tuple[str, ...]]


def _outputs_of(program: Program) -> list[Output]:
    """Runs a program in float32 and as it is written; returns the outputs of its scopes."""
    graph = Graph(program)
    kept = list(_leaving(graph))
    arrays, rounding = list(program.arrays), Rounding(LOW_DTYPES)
    wide = _run(program.jaxpr, kept, [*map(widened, arrays)], run_widened, widened)
    rounded = [*map(rounding.rounded, arrays)]
    written = _run(program.jaxpr, kept, rounded, rounding.equation, lambda array: array)
    found = list[Output]()
    for (node, index, scopes), *both in zip(kept, wide[0], written[0], strict=True):
        data = (node.is_backward, node.place, node.results[index].dtype.name)
        numbers = [*map(np.asarray, both)]
        found += [Output(scope, *data, *numbers) for scope in scopes]
    for value, *both in zip(graph.outputs, wide[1], written[1], strict=True):
        if is_floating_dtype(value.dtype):
            data = (value.node and value.node.place, value.dtype.name)
            found.append(Output(_RESULT, False, *data, *map(np.asarray, both)))
    return found


def _leaving(graph: Graph) -> Iterator[_Kept]:
    """Yields the floating results of nodes that are read, or returned, outside of their scopes."""
    paths = {node.path for node in graph.nodes}  # outer paths may be of containers, such as lists
    for node in graph.nodes:
        if node.is_structure or node.in_while:
            continue
        around = [path for path in paths_around(node.path) if path in paths]
        for index, value in enumerate(node.results):
            if not around or not is_floating_dtype(value.dtype):
                continue
            readers = [paths_around(reader.path) for reader in value.readers]
            readers += [[]] if value.is_output else []
            scopes = tuple(s for s in around if any(s not in each for each in readers))
            if scopes:
                yield node, index, scopes


def _run(
    jaxpr: Jaxpr, kept: list[_Kept], arrays: list[Array], run: Run, constant: Constant
) -> tuple[list[Array], list[Array]]:
    """Runs a program, and returns the arrays to keep, and its results, in float32."""
    wanted = {node.key for node, _, _ in kept}

    def watch(state: _Numbers, site: Site, operands: list[Array], results: list[Array]) -> _Numbers:
        new = [*map(widened, results)]
        return stored(state, site, new) if site.key in wanted else state

    @jax.jit
    def run_all(arrays: list[Array]) -> tuple[list[Array], _Numbers]:
        empty: _Numbers = {}
        for site in (site for site in sites(jaxpr) if site.key in wanted):
            lengths = [eqn.params["length"] for eqn in site.loops]
            avals = [var.aval for var in site.equation.outvars]
            empty[site.key] = [widened(jnp.zeros((*lengths, *x.shape), x.dtype)) for x in avals]
        results, numbers = Watcher(watch, run, constant).evaluate(jaxpr, arrays, empty)
        return [*map(widened, results)], numbers

    results, numbers = run_all(arrays)
    return [numbers[node.key][index] for node, index, _ in kept], results


# --- Pairs: outputs that are the same numbers ---


# Two outputs that are the same numbers, the second with its axes in the order of the first, and the
# error in float32 of the one against the other.
Pair: TypeAlias = tuple[Output, Output, float]


def _paired(
    reference: Sequence[Output], candidate: Sequence[Output]
) -> tuple[list[Pair], list[Output], list[Output]]:
    """Returns the pairs, in the order of the reference, and the outputs of both without a pair.

    The outputs of a module that a Python loop calls again and again are stacked.
    """
    left, others = dict(enumerate(reference)), dict(enumerate(candidate))
    found: dict[int, Pair] = {}
    for stacks in ((False, False), (False, True), (True, False)):
        mine, theirs = map(_parts, (left, others), stacks)
        for indices, one in mine:
            fitting = (each for each in theirs if one[:2] == each[1][:2] and each[0][0] in others)
            pairs = [(taken, _pair(one, other)) for taken, other in fitting]
            pairs = [(taken, pair) for taken, pair in pairs if pair is not None]
            if pairs:
                taken, found[indices[0]] = min(pairs, key=lambda each: each[1][-1])
                left = {index: each for index, each in left.items() if index not in indices}
                others = {index: each for index, each in others.items() if index not in taken}
    return [found[index] for index in sorted(found)], [*left.values()], [*others.values()]


def _parts(outputs: dict[int, Output], is_stacked: bool) -> list[tuple[tuple[int, ...], Output]]:
    """Returns outputs with their positions: one by one, or alike ones stacked."""
    if not is_stacked:
        return [((index,), each) for index, each in outputs.items()]
    alike: dict[tuple[object, ...], list[int]] = {}
    for index, each in outputs.items():
        alike.setdefault((*each[:2], each.wide.shape), []).append(index)
    found = []
    for indices in (tuple(each) for each in alike.values() if len(each) > 1):
        wide, written = (np.stack(x) for x in zip(*(outputs[i][-2:] for i in indices), strict=True))
        found.append((indices, outputs[indices[0]]._replace(wide=wide, written=written)))
    return found


def _pair(reference: Output, candidate: Output) -> Pair | None:
    """Returns the pair of two outputs if they agree in float32, in some order of their axes."""
    one, other = (np.squeeze(each.wide) for each in (reference, candidate))
    if sorted(one.shape) != sorted(other.shape) or one.ndim > _MOST_AXES:
        return None
    errors = {
        order: _error(one, other.transpose(order))
        for order in itertools.permutations(range(one.ndim))
        if tuple(other.shape[axis] for axis in order) == one.shape
    }
    order = min(errors, key=lambda order: errors[order])
    if not errors[order] <= _AGREES:
        return None
    return (
        reference._replace(wide=one, written=np.squeeze(reference.written)),
        candidate._replace(
            wide=other.transpose(order), written=np.squeeze(candidate.written).transpose(order)
        ),
        errors[order],
    )


def _error(reference: np.ndarray, candidate: np.ndarray) -> float:
    """Returns the relative error of the candidate; numbers that both masks fill in do not count."""
    counts = ~(_is_fill(reference) & _is_fill(candidate))
    with np.errstate(invalid="ignore"):
        return relative_error(*([np.where(counts, x, 0)] for x in (candidate, reference)))


def _is_fill(array: np.ndarray) -> np.ndarray:
    return (np.abs(array) >= _LARGE) | (array == _LOWEST)


# --- The comparison ---


def compare(
    reference: Callable[..., PyTree], candidate: Callable[..., PyTree], *, band: float = 0.01
) -> Callable[..., Comparison]:
    """Runs two functions of one model, and shows where and how far their numbers differ.

    Compare a full pass with a sampler that has a cache, whose log-probabilities reinforcement
    learning takes to be the same; a model in float32 with one under a policy; or two commits. The
    report compares the outputs of each module and each `jax.named_scope`, and the results of the
    functions. 16-bit results are rounded where the program says so, see `jmpx.inspect.emulate`.

    Outputs of scopes with the same path are a pair if they agree in float32. Axes of size one are
    ignored, the others may be in any order, and the iterations of a scan or a Python loop are
    stacked, so a sampler may take tokens one by one. Outputs without a pair are listed. Numbers
    that masks put into arrays, such as -1e30, do not count, and outputs in a while loop neither.

    Args:
        reference: the function whose numbers are taken as right.
        candidate: the other one. Both are called with the same arguments.
        band: the relative error up to which outputs count as equal: beyond it, the report marks
            them, and names the first.

    Returns:
        A function of the arguments of both, which are arrays, that returns a
        `jmpx.inspect.Comparison`.

    Raises:
        TypeError: when called, if one of them is not callable, or an argument is a shape or traced.
        ValueError: if `band` is no relative error; when called, if a result of the reference is not
            finite, no output of one function agrees with one of the other, or a program holds a
            `jax.shard_map`, where each device has numbers of its own.

    Example:
        >>> import jax, jax.numpy as jnp, jmpx
        >>> def all_at_once(w, x):
        ...     with jax.named_scope("layer"):
        ...         return jnp.tanh(x @ w)
        >>> def one_by_one(w, x):
        ...     return jax.lax.scan(lambda _, row: (None, all_at_once(w, row)), None, x)[1]
        >>> w, x = jax.random.normal(jax.random.key(0), (2, 16, 16))
        >>> in_half = jmpx.apply_policy(one_by_one, "c=bf16")
        >>> report = jmpx.inspect.compare(all_at_once, in_half)(w, x)
        >>> [(row.scope, 0.0005 < row.error < 0.01) for row in report.rows]
        [('layer', True), ('result', True)]
        >>> report.check(at_most=0.01).first(at_most=1e-6).scope
        'layer'
    """
    if not isinstance(band, int | float) or not 0 <= band < math.inf:
        raise ValueError(
            f"Expected band= to be a relative error of at least 0, such as 0.01, got "
            f"{describe(band)}."
        )

    def call(*args: PyTree, **kwargs: PyTree) -> Comparison:
        both = reference, candidate
        programs = [traced_program(fn, args, kwargs, False, RUN) for fn in both]
        name, other = (with_arrays(each, "jmpx.inspect.compare").name for each in programs)
        outputs = [*map(_outputs_of, programs)]
        # Results may be -inf, as the log-probability of an impossible choice is.
        results = (each.wide for each in outputs[0] if each.scope == _RESULT)
        if not all((array < np.inf).all() for array in results):
            raise ValueError(
                f"Expected the results of {name} to be finite in float32, got NaN or infinity: "
                "jmpx.inspect.first_nonfinite finds the operation that makes it."
            )
        pairs, *alone = _paired(*outputs)
        if not pairs:
            raise ValueError(
                f"No output of {other} agrees in float32 with one of {name}: compare two "
                "functions of one model and the same arguments, whose modules or scopes have the "
                "same names."
            )
        return Comparison(
            f"{name} and {other}{' (the candidate)' * (name == other)}",
            float(band),
            tuple(map(_compared, pairs)),
            (*_unpaired(alone[0], "reference"), *_unpaired(alone[1], "candidate")),
            _log_probabilities([pair for pair in pairs if pair[0].scope == _RESULT]),
        )

    return call


def _compared(pair: Pair) -> Compared:
    one, other, in_float32 = pair
    dtypes, error = (one.dtype, other.dtype), _error(one.written, other.written)
    numbers = (one.written.size, error, in_float32)
    return Compared(one.scope, one.is_backward, dtypes, *numbers, other.place)


def _unpaired(outputs: Sequence[Output], of: str) -> list[Unpaired]:
    """Returns outputs without a pair; if one leaves several scopes, that of the innermost."""
    first: dict[int, Output] = {}
    for each in outputs:
        first.setdefault(id(each.wide), each)
    return [Unpaired(one.scope, one.wide.shape, of, one.place) for one in first.values()]


def _log_probabilities(results: Sequence[Pair]) -> LogProbabilities | None:
    """Returns how far apart the first results are that are at most 0."""
    for one, other, _ in results:
        if not one.wide.size or np.max(one.wide) > 0 or np.min(one.wide) == np.max(one.wide):
            continue
        old, new = (each.written.astype(np.float64) for each in (one, other))
        with np.errstate(invalid="ignore"):  # both are -inf where a choice is impossible
            d = np.where(old == new, 0, new - old)
            p, k3 = np.exp(old), np.where(d == np.inf, np.inf, np.expm1(d) - d)
            is_distribution = old.ndim > 0 and bool(np.all(abs(p.sum(-1) - 1) < _SUMS_TO_ONE))
            kl = np.mean(-np.where(p > 0, p * d, 0).sum(-1)) if is_distribution else np.mean(k3)
        rms = float(np.sqrt(np.mean(d**2)))
        return LogProbabilities(d.size, rms, float(np.abs(d).max()), float(kl), is_distribution)
    return None
