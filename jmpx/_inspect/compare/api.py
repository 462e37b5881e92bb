"""The comparison as users call it: `jmpx.inspect.compare(reference, candidate)(*args)`."""

from collections.abc import Callable, Sequence

import numpy as np

from jmpx._base.trees import PyTree
from jmpx._inspect.compare.outputs import RESULT, Output, outputs_of
from jmpx._inspect.compare.pairs import Pair, paired, relative_error
from jmpx._inspect.compare.report import (
    Compared,
    Comparison,
    LogProbabilities,
    Unpaired,
    check_band,
)
from jmpx._inspect.programs import traced_program
from jmpx._inspect.running import check_arrays

_SUMS_TO_ONE = 1e-3


def compare(
    reference: Callable[..., PyTree], candidate: Callable[..., PyTree], *, band: float = 0.01
) -> Callable[..., Comparison]:
    """Runs two functions of one model, and shows where and how far their numbers differ.

    Compare a full pass with a sampler that has a cache, whose log-probabilities reinforcement
    learning takes to be the same; a model in float32 with one under a policy; or two commits. The
    report compares what leaves each module and each `jax.named_scope`, and what the functions
    return. 16-bit results are rounded where the program says so, see
    `jmpx.inspect.emulate`.

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
    limit = check_band(band)

    def call(*args: PyTree, **kwargs: PyTree) -> Comparison:
        programs = [
            traced_program(fn, args, kwargs, with_gradient=False) for fn in (reference, candidate)
        ]
        for program in programs:
            check_arrays(program, "jmpx.inspect.compare")
        names = [program.name for program in programs]
        outputs = [*map(outputs_of, programs)]
        _check_finite(names[0], outputs[0])
        found = paired(*outputs)
        if not found.pairs:
            raise ValueError(
                f"No output of {names[1]} agrees in float32 with one of {names[0]}: compare two "
                "functions of one model and the same arguments, whose modules or scopes have the "
                "same names."
            )
        return Comparison(
            " and ".join(names),
            limit,
            tuple(map(_compared, found.pairs)),
            (
                *_unpaired(found.only_reference, "reference"),
                *_unpaired(found.only_candidate, "candidate"),
            ),
            _log_probabilities([pair for pair in found.pairs if pair.reference.scope == RESULT]),
        )

    return call


def _check_finite(name: str, outputs: Sequence[Output]) -> None:
    for each in outputs:
        # The log-probability of what cannot be chosen is -inf.
        if each.scope == RESULT and not (each.wide < np.inf).all():
            raise ValueError(
                f"Expected the results of {name} to be finite in float32, got NaN or infinity: "
                "jmpx.inspect.first_nonfinite finds the operation that makes it."
            )


def _compared(pair: Pair) -> Compared:
    one, other, in_float32 = pair
    return Compared(
        one.scope,
        one.is_backward,
        (one.dtype, other.dtype),
        one.written.size,
        relative_error(one.written, other.written),
        in_float32,
        other.place,
    )


def _unpaired(outputs: Sequence[Output], of: str) -> list[Unpaired]:
    """Returns what has no pair; what leaves several scopes at once, as of the innermost."""
    first: dict[int, Output] = {}
    for each in outputs:
        first.setdefault(id(each.wide), each)
    return [Unpaired(one.scope, one.wide.shape, of, one.place) for one in first.values()]


def _log_probabilities(results: Sequence[Pair]) -> LogProbabilities | None:
    """Returns how far log-probabilities are apart: of the first results that are at most 0."""
    for one, other, _ in results:
        if not one.wide.size or np.max(one.wide) > 0 or np.min(one.wide) == np.max(one.wide):
            continue
        old, new = (each.written.astype(np.float64) for each in (one, other))
        with np.errstate(invalid="ignore"):  # both are -inf where nothing can be chosen
            d = np.where(old == new, 0, new - old)
            p, k3 = np.exp(old), np.where(d == np.inf, np.inf, np.expm1(d) - d)
            is_distribution = old.ndim > 0 and bool(np.all(abs(p.sum(-1) - 1) < _SUMS_TO_ONE))
            kl = np.mean(-np.where(p > 0, p * d, 0).sum(-1)) if is_distribution else np.mean(k3)
        rms = float(np.sqrt(np.mean(d**2)))
        return LogProbabilities(d.size, rms, float(np.abs(d).max()), float(kl), is_distribution)
    return None
