"""The shares of groups of roundings: of first order, or measured by runs with masks."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jmpx._inspect.blame.points import Key, Points, Slot
from jmpx._inspect.compiled import Compiled
from jmpx._jaxprs.core import Array

_FEW = 64  # numbers in the results, of which one random direction says too little
_DIRECTIONS = 8
_LEAST = 0.01  # the share from which a group is worth a run of its own
_SIGNS = np.array([-1, 1], np.float32)
_ADDS_UP = (0.75, 1.25)  # beyond it, first order does not tell what makes the error
MOST = 32  # groups that are measured by such runs

Measure: TypeAlias = Callable[[list[Array], list[Array]], float]  # of results and exact ones


class Batch(NamedTuple):
    """The inputs of one run, and the results that it should have."""

    arrays: Sequence[Array]
    exact: list[Array]  # the results in float32


class Shares(NamedTuple):
    """What groups cost.

    Attributes:
        squared: the mean over batches of the squared error, relative to that of the results.
        parts: what each group has of it.
        sites: what each site has of it, by first order.
        direct: the groups that were measured: the mean of what the error is where a group alone
            rounds, and of how much smaller it is where the group alone does not.
        reason: why groups were measured whose estimates agree; empty if there are none.
    """

    squared: float
    parts: np.ndarray
    sites: np.ndarray
    direct: frozenset[int]
    reason: str = ""


class Runs:
    """The compiled runs of a program, on batches.

    Args:
        points: the points of the program.
        outputs: the indices of the results whose error counts.
        batches: the inputs, and what they should give.
        compiled: the compiled functions of the program.
        measure: the error of results, given those of float32, too.
    """

    def __init__(
        self,
        points: Points,
        outputs: Sequence[int],
        batches: Sequence[Batch],
        compiled: Compiled,
        measure: Measure,
    ) -> None:
        self.points, self.outputs = points, tuple(outputs)
        self.batches, self.compiled = batches, compiled
        self.measure = measure

    def squared(self, mask: np.ndarray) -> float:
        """Returns the mean squared error where the sites of a mask round."""
        return float(np.mean(self.squares(mask)))

    def squares(self, mask: np.ndarray | None = None) -> np.ndarray:
        """Returns the squared error of each batch where the sites of a mask round, or all."""

        def run(
            constant: Callable[[Array], Array], arrays: list[Array], mask: Array | None
        ) -> list[Array]:
            results, _ = self.points.rounded(constant, arrays, mask)
            return [results[index] for index in self.outputs]

        found = []
        for batch in self.batches:
            arguments = (list(batch.arrays), mask)
            results = self.compiled.run(run, arguments, "blame", mask is None, self.outputs)
            found.append(self.measure(results, batch.exact) ** 2)
        return np.array(found)

    def first_order(self, seed: int) -> tuple[np.ndarray, np.ndarray, float]:
        """Returns what each site costs in each run, squared and signed, and the squared error.

        Returns:
            Two arrays of float64 of shape (runs, sites), relative to the norm of the results, and
            the mean squared relative error.
        """

        def run(
            constant: Callable[[Array], Array], arrays: list[Array], direction: list[Array]
        ) -> tuple[list[Array], list[Array]]:
            rounded, errors = self.points.rounded(constant, arrays, keep=True)
            slots = {name: jnp.zeros(2, jnp.float32) for name in errors}

            def charged(slots: dict[Key, Slot]) -> list[Array]:
                results = self.points.charged(constant, arrays, errors, slots)
                return [results[index] for index in self.outputs]

            wide, pull = jax.vjp(charged, slots)
            pairs = zip(direction, wide, strict=True)
            (costs,) = pull([signs.astype(x.dtype) for signs, x in pairs])
            none = jnp.zeros(2, jnp.float32)
            return [rounded[i] for i in self.outputs], [costs.get(k, none) for k in self.points.at]

        squares, sums, total = list[np.ndarray](), list[np.ndarray](), list[float]()
        few = sum(array.size for array in self.batches[0].exact) < _FEW
        for number, batch in enumerate(self.batches):
            norm = _norm(batch.exact) or 1.0
            for turn in range(_DIRECTIONS if few else 1):
                rng = np.random.default_rng((seed, number, turn))
                signs = [rng.choice(_SIGNS, size=x.shape) for x in batch.exact]
                arguments = (list(batch.arrays), signs)
                results, costs = self.compiled.run(run, arguments, "first order", self.outputs)
                both = np.asarray(costs, np.float64)
                squares.append(both[:, 0] / norm**2)
                sums.append(both[:, 1] / norm)
            total.append(relative(results, batch.exact) ** 2)
        return np.stack(squares), np.stack(sums), float(np.mean(total))


def shares(
    runs: Runs, groups: Sequence[Sequence[int]], seed: int, done: Callable[[], object]
) -> Shares:
    """Returns the shares of groups of sites, which are numbers of `Points.order`.

    `done` is called after each measurement.
    """
    count, squares, sums, reason = len(runs.points.order), None, None, ""
    everywhere = np.ones(count, bool)
    if runs.points.has_while:
        reason = "a while loop rounds, and has no derivative"
    else:
        try:
            squares, sums, squared = runs.first_order(seed)
        except (NotImplementedError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
    if squares is None or sums is None:
        squared, sites = runs.squared(everywhere), np.zeros(count)
        parts, suspects = np.zeros(len(groups)), list(range(len(groups)))
    else:
        sites = squares.mean(0)
        parts = np.array([sites[list(group)].sum() for group in groups])
        signed = np.array([(sums[:, list(group)].sum(1) ** 2).mean() for group in groups])
        suspects = _coherent(parts, signed, len(sums))
    if not math.isfinite(squared):
        return Shares(squared, parts, sites, frozenset(), reason)
    measured = list[int]()

    def measure(numbers: Sequence[int]) -> None:
        for number in numbers[: MOST - len(measured)]:
            alone = ~everywhere
            alone[list(groups[number])] = True
            parts[number] = max(squared - runs.squared(~alone) + runs.squared(alone), 0.0) / 2
            measured.append(number)
            done()

    measure(suspects)
    low, high = _ADDS_UP
    if not reason and not low * squared <= parts.sum() <= high * squared:
        reason = "the shares of first order do not add up, as with the kinks of relu in a gradient"
        others = [int(number) for number in np.argsort(-parts) if number not in measured]
        measure(others)
    return Shares(squared, parts, sites, frozenset(measured), reason)


def _coherent(parts: np.ndarray, signed: np.ndarray, runs: int) -> list[int]:
    """Returns the groups whose roundings do not add up as independent ones, the largest first.

    `signed` has the mean of as many squares as there are runs: of one, of normal numbers.
    """
    most = 1 + 4 * math.sqrt(2 / runs)
    ratios = signed / np.where(parts > 0, parts, 1)
    sizes = np.maximum(parts, signed)
    odd = (ratios > most) | ((ratios < 0.2) & (runs >= 8))
    worth = odd & (sizes > _LEAST * sizes.sum())
    return [int(i) for i in np.argsort(-sizes) if worth[i]]


def _norm(arrays: Sequence[Array]) -> float:
    return math.sqrt(sum(float(np.sum(np.asarray(x, np.float64) ** 2)) for x in arrays))


def relative(results: Sequence[Array], exact: Sequence[Array]) -> float:
    """Returns the norm of the error of results, relative to their own."""
    pairs = zip(results, exact, strict=True)
    error = _norm([np.asarray(x, np.float64) - np.asarray(y, np.float64) for x, y in pairs])
    norm = _norm(exact)
    return error / norm if norm else math.inf if error else 0.0
