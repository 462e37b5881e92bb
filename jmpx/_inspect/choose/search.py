"""A small set of islands that holds a bound, found by runs that round what a mask says."""

import math
from collections.abc import Callable, Container, Iterable, Sequence

import numpy as np

from jmpx._inspect.blame.points import size_of
from jmpx._inspect.blame.shares import Runs
from jmpx._inspect.choose.islands import Island, Sites

_TRIED = 8  # islands of the largest shares, of which the best one is taken
_MARGIN = 0.02  # of the squared error that an island takes away at least
_TINY = 1e-30  # the squared error of no error


class Search:
    """Sets of islands, tried on all batches.

    Args:
        runs: the runs of the program.
        sites: its sites.
        islands: the islands among them that are tried.
        shares: what each has of the squared error.
        done: called after each set that is tried.
    """

    def __init__(
        self,
        runs: Runs,
        sites: Sites,
        islands: Sequence[Island],
        shares: Sequence[float],
        done: Callable[[], object],
    ) -> None:
        self.runs, self.sites, self.islands, self.done = runs, sites, islands, done
        is_last = [island.is_operation for island in islands]
        self.order = sorted(range(len(islands)), key=lambda i: (is_last[i], -shares[i]))
        self.costs = _costs(runs, islands)
        self._known: dict[frozenset[int], np.ndarray] = {}

    def squares(self, chosen: Iterable[int]) -> np.ndarray:
        """Returns the squared error of each batch where all but the chosen islands round."""
        key = frozenset(chosen)
        if key not in self._known:
            mask = np.ones(len(self.runs.points.order), bool)
            for number in key:
                mask &= ~self.islands[number].sites
            self._known[key] = self.runs.squares(mask)
            self.done()
        return self._known[key]

    def error(self, chosen: Iterable[int]) -> float:
        """Returns the root mean square of the error where all but the chosen islands round."""
        return math.sqrt(float(np.mean(self.squares(chosen))))

    def leave_out(self, numbers: Iterable[int]) -> None:
        """Takes islands out of those that are tried."""
        self.order = [number for number in self.order if number not in numbers]

    def selectors(self, chosen: Iterable[int]) -> list[str]:
        """Returns selectors of islands, as few as select the same."""
        return self.sites.shortened([self.islands[number].selector for number in chosen])

    def find(self, bound: float) -> tuple[int, ...]:
        """Returns islands that hold a bound, the one that takes most of the error away first.

        An island that lowers the error by no more than chance is left out where others do as well.
        If no set holds the bound, all islands are returned that earn their place.
        """
        useless = set[int]()
        chosen = self._holding(bound, useless)
        while idle := [i for i in chosen if not self._earns(i, chosen)]:
            worst = min(idle, key=lambda i: self.error(set(chosen) - {i}))
            others = self._holding(bound, useless | {worst})
            is_held = self.error(chosen) <= bound
            if is_held and (self.error(others) > bound or len(others) > len(chosen)):
                break
            useless.add(worst)
            chosen = others
        return tuple(chosen)

    def _holding(self, bound: float, useless: Container[int]) -> list[int]:
        """Returns islands that hold a bound, of which none can be left out; all if none do."""
        chosen = list[int]()
        while self.error(chosen) > bound:
            left = [i for i in self.order if i not in chosen and i not in useless]
            places = [i for i in left if not self.islands[i].is_operation]
            tried = (places or left)[:_TRIED]  # operations once no module or scope is left
            if not tried:
                return chosen
            chosen.append(min(tried, key=lambda i: self._merit(chosen, i, bound)))
        for number in sorted(chosen, key=lambda i: self.error(set(chosen) - {i})):
            if self.error(set(chosen) - {number}) <= bound:
                chosen.remove(number)
        return chosen

    def _merit(self, chosen: Sequence[int], number: int, bound: float) -> tuple[float, ...]:
        """Returns what is least for the next island: the cheapest that holds the bound goes first.

        Where none does, it is the one that takes most of the error away.
        """
        error = self.error([*chosen, number])
        return (0, *self.costs[number]) if error <= bound else (1, error)

    def _earns(self, number: int, chosen: Sequence[int]) -> bool:
        """Whether an island of a set lowers the error by a margin, and by more than by chance."""
        before, after = self.squares(set(chosen) - {number}), self.squares(chosen)
        is_finite = np.isfinite(before) & np.isfinite(after)
        if not is_finite.all():
            return bool(np.isfinite(after).sum() > np.isfinite(before).sum())
        gains = np.log(np.maximum(before, _TINY) / np.maximum(after, _TINY))
        noise = gains.std(ddof=1) / math.sqrt(len(gains)) if len(gains) > 1 else 0.0
        return bool(gains.mean() > max(_MARGIN, noise))


def _costs(runs: Runs, islands: Sequence[Island]) -> list[tuple[int, int]]:
    """Returns how many operands of products, and numbers in all, islands put into float32."""
    sites = runs.points.at.values()
    operands = np.array([size_of([p for p in points if p.is_operand]) for points in sites])
    numbers = np.array([size_of(points) for points in sites])
    return [(int(operands[i.sites].sum()), int(numbers[i.sites].sum())) for i in islands]
