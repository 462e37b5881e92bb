"""The blame as users call it: `jmpx.inspect.blame(func, policy)(*batches)`."""

from collections.abc import Callable, Sequence

import numpy as np

from jmpx._adapters.applying import apply_policy
from jmpx._base.messages import describe
from jmpx._base.trees import PyTree, is_floating_dtype
from jmpx._inspect.blame.points import Points, size_of
from jmpx._inspect.blame.report import Blame, Blamed
from jmpx._inspect.blame.shares import MOST, Batch, Measure, Runs, Shares, relative, shares
from jmpx._inspect.compiled import Compiled
from jmpx._inspect.first_nonfinite.api import first_nonfinite
from jmpx._inspect.graph import Graph, Node
from jmpx._inspect.programs import Program, traced_program
from jmpx._inspect.progress import progress
from jmpx._inspect.running import check_arrays, key_of
from jmpx._inspect.where import where
from jmpx._jaxprs.core import Array
from jmpx._scales.strings import MixedPrecisionLike

WAYS = ("modules", "scopes", "lines")
_KINDS = ("gradients", "results")
_NOWHERE = "(outside of modules and scopes)"


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
        TypeError: when called, if `func` is not callable, a batch is no tuple, or an argument is a
            shape or traced.
        ValueError: if `by` or `of` is none of the words; when called, if there are no batches or
            they differ in shapes, nothing is rounded to 16 bits, no result is floating, a result is
            not finite, or the program holds a `jax.shard_map`.

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
    check_kind(of)

    def call(*batches: tuple[PyTree, ...]) -> Blame:
        program, runs = blamed_runs(func, policy, batches, with_gradient=of == "gradients")
        graph = Graph(program)
        names = group_names(graph, runs.points, by)
        groups = {name: [n for n, each in enumerate(names) if each == name] for name in names}
        with progress("groups measured", min(len(groups), MOST)) as done:
            found = shares(runs, list(groups.values()), seed, done)
        if not np.isfinite(found.squared):
            applied = apply_policy(func, policy) if policy is not None else func
            raise ValueError(_nonfinite(applied, batches[0], "16 bits"))
        rows = _rows(graph, runs.points, groups, found)
        size = sum(array.size for array in runs.batches[0].exact)
        kind = "gradients" if program.is_differentiated else "results"
        title = f"the {kind} of {program.name}" + ("" if policy is None else f" under {policy}")
        return Blame(title, found.squared**0.5, len(batches), tuple(rows), size == 1, found.reason)

    return call


def check_kind(of: object) -> None:
    """Refuses an `of=` that is none of the words."""
    if of not in _KINDS:
        raise ValueError(f"Expected of= to be 'gradients' or 'results', got {describe(of)}.")


def blamed_runs(
    func: Callable[..., PyTree],
    policy: MixedPrecisionLike | None,
    batches: Sequence[tuple[PyTree, ...]],
    with_gradient: bool = True,
) -> tuple[Program, Runs]:
    """Traces a function under a policy; returns its program and its runs on the batches."""
    _check_batches(batches)
    applied = func if policy is None else apply_policy(func, policy)
    program = traced_program(applied, batches[0], None, with_gradient)
    # A constant that was traced in 16 bits is rounded in both runs of one program.
    exact = program if policy is None else traced_program(func, batches[0], None, with_gradient)
    runs = runs_of(program, exact_batches(func, exact, batches, with_gradient))
    if not runs.points.at:
        under = "" if policy is None else f" under {str(policy)!r}"
        fewer = "16 bits" if runs.points.wide == np.float32 else "less than float64"
        raise ValueError(
            f"Found no rounding to blame: {_name(func)}{under} computes nothing in {fewer}; give a "
            "policy such as 'c=bf16'."
        )
    return program, runs


def runs_of(
    program: Program,
    batches: Sequence[Batch],
    measure: Measure = relative,
    runs_often: bool = True,
) -> Runs:
    """Returns the runs of a program on batches, which have the results of float32."""
    compiled = Compiled(program.jaxpr, runs_often)
    return Runs(Points(program.jaxpr), _outputs(program), batches, compiled, measure)


def exact_batches(
    func: Callable[..., PyTree],
    program: Program,
    batches: Sequence[tuple[PyTree, ...]],
    with_gradient: bool,
) -> list[Batch]:
    """Returns the arrays of batches, and the results that a function has of them in float32."""
    points, outputs = Points(program.jaxpr), _outputs(program)
    compiled = Compiled(program.jaxpr)

    def wide(constant: Callable[[Array], Array], arrays: list[Array]) -> list[Array]:
        return points.charged(constant, arrays, {}, {})

    found = list[Batch]()
    for number, batch in enumerate(batches):
        each = traced_program(func, batch, None, with_gradient) if number else program
        check_arrays(each, "jmpx.inspect.blame")
        if each.jaxpr.in_avals != program.jaxpr.in_avals:
            raise ValueError(
                f"Expected batches of the shapes and dtypes of the first one, got others in batch "
                f"{number}: cut them to one size."
            )
        results = compiled.run(wide, (list(each.arrays),), "float32")
        kept = [np.asarray(results[index]) for index in outputs]
        if not all(np.isfinite(array).all() for array in kept):
            raise ValueError(_nonfinite(func, batch, "float32"))
        found.append(Batch(each.arrays, kept))
    return found


def _name(func: object) -> str:
    return getattr(func, "__name__", type(func).__name__)


def _check_batches(batches: Sequence[object]) -> None:
    if not batches:
        raise ValueError(
            "Expected batches, got none: give some, each the tuple of the function's arguments."
        )
    for batch in batches:
        if type(batch) is not tuple:
            raise TypeError(
                f"Expected batches that are tuples of the arguments of the function, got "
                f"{describe(batch)}: write blame(func, policy)((params, x), (params, x2))."
            )


def _nonfinite(func: Callable[..., PyTree], batch: tuple[PyTree, ...], where: str) -> str:
    """Returns the sentence about results that are not finite, with the operation that made them."""
    first = first_nonfinite(func)(*batch)
    by = (
        "" if first is None else f", first by {first.operation} at {first.place or 'no known line'}"
    )
    return (
        f"Expected results of {_name(func)} that are finite in {where}, got NaN or infinity{by}: "
        "print jmpx.inspect.first_nonfinite(...) for where it came from."
    )


def _outputs(program: Program) -> list[int]:
    """Returns the indices of the gradients of a loss, or of the floating results."""
    indices = [i for i, a in enumerate(program.jaxpr.out_avals) if is_floating_dtype(a.dtype)]
    if program.is_differentiated:
        indices = indices[-program.gradients :]
    if not indices:
        raise ValueError(
            f"Expected floating results, whose error can be blamed, got none from {program.name}: "
            "return the numbers that count."
        )
    return indices


def group_names(graph: Graph, points: Points, by: str | None) -> list[str]:
    """Returns the name of the group of each site, in the order of the points."""
    nodes = nodes_of(graph, points)
    if by == "modules":
        modules = [where(node.scope).module for node in nodes]
        return [_NOWHERE if m is None else m.path or m.cls.__name__ for m in modules]
    if by != "lines":
        paths = [graph.path(node) or _NOWHERE for node in nodes]
        if by == "scopes" or len(set(paths)) > 1:
            return paths
    return [str(graph.place(node) or node.name) for node in nodes]


def nodes_of(graph: Graph, points: Points) -> list[Node]:
    """Returns the node of each site, in the order of the points."""
    by_key = {key_of(node): node for node in graph.nodes if not node.is_structure}
    return [by_key[key] for key in points.order]


def _rows(
    graph: Graph, points: Points, groups: dict[str, list[int]], found: Shares
) -> list[Blamed]:
    nodes, sizes = nodes_of(graph, points), [size_of(each) for each in points.at.values()]
    rows = []
    for number, (name, sites) in enumerate(groups.items()):
        worst = nodes[max(sites, key=lambda site: (found.sites[site], sizes[site]))]
        part = float(found.parts[number])
        selector = graph.selector(worst)
        rows.append(
            Blamed(
                name,
                part / found.squared if found.squared else 0.0,
                part**0.5,
                worst.name,
                graph.place(worst),
                sum(sizes[site] for site in sites),
                number in found.direct,
                "" if selector is None else f"{selector}: full",
            )
        )
    return sorted(rows, key=lambda row: -row.share)
