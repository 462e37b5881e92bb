"""Which outputs of two programs are the same numbers: those that agree in float32.

Two functions of one model hold the same numbers in other shapes: a sampler has an axis of one token
and makes them turn by turn, a full pass has all tokens on another axis. In float32, numbers that
are the same differ by 1e-6, or by some 1e-3 where a constant was traced in 16 bits, and others by
as much as they are large; so agreement tells both which outputs belong together and which axis is
which, also where axes have equal lengths.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jmpx._inspect.compare.outputs import Output

_AGREES = 0.02  # the largest relative error of what is the same in float32
_MOST_AXES = 6  # of which all orders are tried
_LARGE, _LOWEST = 1e9, -65504.0  # what masks put into arrays: such numbers, or float16's lowest


class Pair(NamedTuple):
    """Two outputs that are the same numbers, the second with its axes in the order of the first."""

    reference: Output
    candidate: Output
    in_float32: float  # the error of the one against the other


class Paired(NamedTuple):
    """The pairs, in the order of the reference, and the outputs that have none."""

    pairs: list[Pair]
    only_reference: list[Output]
    only_candidate: list[Output]


def paired(reference: Sequence[Output], candidate: Sequence[Output]) -> Paired:
    """Pairs the outputs of two programs that leave scopes of one name.

    What calls of a module one after the other make, and not a scan, is stacked: a loop of Python.
    """
    left, others = dict(enumerate(reference)), dict(enumerate(candidate))
    found: dict[int, Pair] = {}
    for stacks in ((False, False), (False, True), (True, False)):
        mine, theirs = (
            _parts(each, stack) for each, stack in zip((left, others), stacks, strict=True)
        )
        for indices, one in mine:
            fitting = (each for each in theirs if one[:2] == each[1][:2] and each[0][0] in others)
            pairs = [(taken, _pair(one, other)) for taken, other in fitting]
            pairs = [(taken, pair) for taken, pair in pairs if pair is not None]
            if pairs:
                taken, found[indices[0]] = min(pairs, key=lambda each: each[1].in_float32)
                left = {index: each for index, each in left.items() if index not in indices}
                others = {index: each for index, each in others.items() if index not in taken}
    return Paired(
        [found[index] for index in sorted(found)], list(left.values()), list(others.values())
    )


def _parts(outputs: dict[int, Output], is_stacked: bool) -> list[tuple[tuple[int, ...], Output]]:
    """Returns outputs with their positions: one by one, or those that are alike as one."""
    if not is_stacked:
        return [((index,), each) for index, each in outputs.items()]
    alike: dict[tuple[object, ...], list[int]] = {}
    for index, each in outputs.items():
        alike.setdefault((*each[:2], each.wide.shape), []).append(index)
    return [
        (tuple(indices), _stack([outputs[index] for index in indices]))
        for indices in alike.values()
        if len(indices) > 1
    ]


def _stack(outputs: Sequence[Output]) -> Output:
    arrays = {
        key: np.stack([getattr(each, key) for each in outputs]) for key in ("wide", "written")
    }
    return outputs[0]._replace(**arrays)


def _pair(reference: Output, candidate: Output) -> Pair | None:
    """Returns the pair of two outputs if they agree in float32, in some order of their axes."""
    one, other = (np.squeeze(each.wide) for each in (reference, candidate))
    if sorted(one.shape) != sorted(other.shape) or one.ndim > _MOST_AXES:
        return None
    errors = {
        order: relative_error(one, other.transpose(order))
        for order in itertools.permutations(range(one.ndim))
        if tuple(other.shape[axis] for axis in order) == one.shape
    }
    order = min(errors, key=lambda order: errors[order])
    if not errors[order] <= _AGREES:
        return None
    turned = [np.squeeze(array).transpose(order) for array in (candidate.wide, candidate.written)]
    own = [np.squeeze(array) for array in (reference.wide, reference.written)]
    return Pair(
        reference._replace(wide=own[0], written=own[1]),
        candidate._replace(wide=turned[0], written=turned[1]),
        errors[order],
    )


def relative_error(reference: np.ndarray, candidate: np.ndarray) -> float:
    """Returns the norm of the difference over the reference's; fills of masks do not count."""
    counts = ~(_is_fill(reference) & _is_fill(candidate))
    one, other = (np.where(counts, x, 0).astype(np.float64) for x in (reference, candidate))
    with np.errstate(invalid="ignore"):
        difference, norm = np.linalg.norm(other - one), np.linalg.norm(one)
    if difference == 0:
        return 0.0
    return float(difference / norm) if norm else np.inf


def _is_fill(array: np.ndarray) -> np.ndarray:
    return (np.abs(array) >= _LARGE) | (array == _LOWEST)
