"""Runs of a program in float32 that round at chosen points, and the cost of each rounding."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jmpx._autocast.rules import PRODUCTS
from jmpx._base.formats import E4M3, E5M2, rounded_to
from jmpx._base.trees import PyTree
from jmpx._inspect import watched
from jmpx._inspect.emulate import LOW_DTYPES, OPERAND_DTYPES, algorithm_of, is_exact
from jmpx._inspect.running import Advance, CompileCache, norm, relative_error, run_widened, widened
from jmpx._inspect.watched import Constant, Results, Site, SiteKey, Step, Trips
from jmpx._jaxprs import core
from jmpx._jaxprs.core import Array, Equation, Jaxpr, operation_name

# float32 of shape (2,): the sums of `(cotangent * error)**2` and of `cotangent * error`.
Slot: TypeAlias = Array
Errors: TypeAlias = dict[SiteKey, list[Array]]  # at the points that are kept, in bfloat16
Measure: TypeAlias = Callable[[list[Array], list[Array]], float]  # of results and exact ones

_FEW = 64  # numbers in the results: for fewer, one random direction is too little
_DIRECTIONS = 8
_LEAST = 0.01  # the share from which a group is worth a run of its own
_SIGNS = np.array([-1, 1], np.float32)
_ADDS_UP = (0.75, 1.25)  # outside of this range, first order does not explain the error
MOST = 32  # groups that are measured by runs of their own


class Point(NamedTuple):
    """An operand of a product, or a result of an equation, that a program rounds."""

    is_operand: bool
    index: int  # of the operand or result
    dtype: np.dtype  # the dtype to which it is rounded
    lengths: tuple[int, ...]  # of the scans around it, the outermost first
    shape: tuple[int, ...]
    is_kept: bool  # whether the error of the rounding is kept; else it is zero or unknown
    edit: int | None = None  # the number of the edit that makes it round; None for the program


Edit: TypeAlias = Mapping[SiteKey, Sequence[Point]]  # the points where it makes a program round


class Points:
    """The points of a program, by the sites of its equations, and those of edits of the program.

    Attributes:
        at: the points of each site that has some.
        order: the number of each site in a mask. The edits follow in their order.
        wide: the dtype in which the program runs between its roundings.
        has_while: whether the program has a while loop, which has no reverse derivative.
    """

    def __init__(self, jaxpr: Jaxpr, edits: Sequence[Edit] = ()) -> None:
        self.jaxpr = jaxpr
        # With float64 enabled, float32 rounds, too.
        self.wide = np.dtype(np.float64 if jax.config.read("jax_enable_x64") else np.float32)
        self.at: dict[SiteKey, list[Point]] = {}
        self.has_while = False
        for site in watched.sites(jaxpr):
            self.has_while |= any(eqn.primitive.name == "while" for eqn in site.loops)
            if points := _points(site, self.wide):
                self.at[site.key] = points
        self.order = {key: number for number, key in enumerate(self.at)}
        for number, edit in enumerate(edits):
            for key, points in edit.items():
                added = (point._replace(edit=number) for point in points)
                self.at[key] = [*self.at.get(key, ()), *added]

    def rounded(
        self,
        constant: Constant,
        arrays: Sequence[Array],
        mask: Array | None = None,
        keep: bool = False,
    ) -> tuple[list[Array], Errors]:
        """Runs the program with its roundings; returns its results and the errors at points.

        Args:
            constant: returns the array to use for a constant.
            arrays: the inputs.
            mask: booleans, one for each number in `order` and each edit: whether the points of a
                site or an edit round. With None all do.
            keep: whether to keep the errors of all points.
        """

        def step(state: Errors, site: Site, operands: list[Array]) -> Results:
            new = list[Array]()

            def at(point: Point, array: Array) -> Array:
                low = rounded_to(array, point.dtype)
                if mask is not None:
                    edit = point.edit
                    at = self.order[site.key] if edit is None else len(self.order) + edit
                    return jnp.where(mask[at], low, array)
                if keep and point.is_kept:
                    error = jnp.where(jnp.isfinite(low), low - array, 0)
                    new.append(error.astype(jnp.bfloat16))
                return low

            results = self._run(site, operands, at)
            return results, watched.stored(state, site, new) if new else state

        empty: Errors = {}
        for key, points in self.at.items() if keep else ():
            if kept := [p for p in points if p.is_kept]:
                empty[key] = [jnp.zeros((*p.lengths, *p.shape), jnp.bfloat16) for p in kept]
        return self._evaluate(constant, arrays, step, empty)

    def charged(
        self,
        constant: Constant,
        arrays: Sequence[Array],
        errors: Errors,
        slots: dict[SiteKey, Slot],
    ) -> list[Array]:
        """Runs the program in float32; the cotangents of the slots are the costs of the errors."""

        def step(state: PyTree, site: Site, operands: list[Array]) -> Results:
            kept = iter(errors.get(site.key, ()))

            def at(point: Point, array: Array) -> Array:
                if not point.is_kept or site.key not in slots:
                    return array
                return _charged(array, slots[site.key], next(kept), site.trips)

            return self._run(site, operands, at), state

        return self._evaluate(constant, arrays, step, {})[0]

    def _run(
        self, site: Site, operands: list[Array], at: Callable[[Point, Array], Array]
    ) -> list[Array]:
        """Runs an equation in float32; `at` returns the array to use at a point."""
        points, operands = self.at.get(site.key, ()), list(operands)
        for point in points:
            if point.is_operand:
                operands[point.index] = at(point, operands[point.index])
        results = self._run_wide(site.equation, operands)
        for point in points:
            if not point.is_operand:
                results[point.index] = at(point, results[point.index])
        return results

    def _run_wide(self, eqn: Equation, operands: Sequence[Array]) -> list[Array]:
        if algorithm_of(eqn) in OPERAND_DTYPES:
            return core.bind(eqn, operands, precision=(jax.lax.Precision.HIGHEST,) * 2)
        return run_widened(eqn, operands, self.wide)

    def _evaluate(
        self, constant: Constant, arrays: Sequence[Array], step: Step, state: PyTree
    ) -> Results:
        wide = lambda array: widened(constant(array), self.wide)  # noqa: E731
        watcher = watched.Watcher(run=self._run_wide, constant=wide, instead=step)
        return watcher.evaluate(self.jaxpr, [widened(x, self.wide) for x in arrays], state)


def _points(site: Site, wide: np.dtype) -> list[Point]:
    eqn = site.equation
    lengths = tuple(each.params.get("length", 0) for each in site.loops)
    is_kept = all(each.primitive.name == "scan" for each in site.loops)
    to, found = OPERAND_DTYPES.get(algorithm_of(eqn)), []
    if operation_name(eqn.primitive.name) in PRODUCTS:
        # Operands in 16 bits were rounded where they were computed; only algorithms round anew.
        for index, atom in enumerate(eqn.invars[:2]):
            found.append((True, index, to or _low(atom.aval, wide), atom.aval, to is not None))
    if not is_exact(eqn):
        found += [(False, i, _low(v.aval, wide), v.aval, True) for i, v in enumerate(eqn.outvars)]
    return [
        Point(is_operand, index, dtype, lengths, aval.shape, is_kept and has_error)
        for is_operand, index, dtype, aval, has_error in found
        if dtype is not None
    ]


def _low(aval: core.Aval, wide: np.dtype) -> np.dtype | None:
    """Returns the dtype of an abstract value if it rounds, else None."""
    dtypes = (*LOW_DTYPES, E4M3.name, E5M2.name, *["float32"] * (wide != np.float32))
    is_reference, dtype = hasattr(aval, "inner_aval"), getattr(aval, "dtype", None)
    return dtype if not is_reference and getattr(dtype, "name", "") in dtypes else None


@jax.custom_vjp
def _charged(array: Array, slot: Slot, errors: Array, trips: Trips) -> Array:
    """Returns the array; its backward pass adds the cost of an error of the array to the slot."""
    return array


def _backward(
    kept: tuple[Array, Trips], cotangent: Array
) -> tuple[Array, Slot, None, tuple[None, ...]]:
    errors, trips = kept
    # The float32 run may not be differentiable where the rounded one is: a square root at zero.
    cotangent = jnp.where(jnp.isfinite(cotangent), cotangent, 0)
    costs = cotangent * (errors[trips] if trips else errors).astype(cotangent.dtype)
    slot = jnp.stack([jnp.sum(costs**2), jnp.sum(costs)]).astype(jnp.float32)
    return cotangent, slot, None, (None,) * len(trips)


_charged.defvjp(lambda array, slot, errors, trips: (array, (errors, trips)), _backward)


def size_of(points: Sequence[Point]) -> int:
    """Returns how many numbers points round."""
    return sum(math.prod((*point.lengths, *point.shape)) for point in points)


# --- The costs of the points ---


class Batch(NamedTuple):
    """The inputs of one run, and the results in float32."""

    arrays: Sequence[Array]
    exact: list[Array]


class Costs(NamedTuple):
    """The costs of groups of sites.

    Attributes:
        squared: the mean over batches of the squared error, relative to the results.
        parts: the part of each group in it.
        sites: the part of each site in it, by first order.
        direct: the groups that were measured. The part of such a group is the mean of two squared
            errors: that of a run in which it alone rounds, and that which vanishes if it does not.
        reason: why independent groups were measured, too; empty if they were not.
    """

    squared: float
    parts: np.ndarray
    sites: np.ndarray
    direct: frozenset[int]
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Runs:
    """The compiled runs of a program, on batches."""

    points: Points
    outputs: tuple[int, ...]  # the indices of the results whose error counts
    batches: Sequence[Batch]
    compiled: CompileCache
    measure: Measure  # returns the error of results, given the results in float32

    def squared(self, mask: np.ndarray) -> float:
        """Returns the mean squared error where the sites of a mask round."""
        return float(np.mean(self.squares(mask)))

    def squares(self, mask: np.ndarray | None = None) -> np.ndarray:
        """Returns the squared error of each batch where the sites of a mask round; None is all."""
        pairs = ((self.results(batch.arrays, mask), batch.exact) for batch in self.batches)
        return np.array([self.measure(*pair) ** 2 for pair in pairs])

    def results(self, arrays: Sequence[Array], mask: np.ndarray | None = None) -> list[Array]:
        """Returns the results on some inputs where the sites of a mask round; None is all."""

        def run(constant: Constant, arrays: list[Array], mask: Array | None) -> list[Array]:
            results, _ = self.points.rounded(constant, arrays, mask)
            return [results[index] for index in self.outputs]

        arguments = (list(arrays), mask)
        return self.compiled.run(run, arguments, "blame", mask is None, self.outputs)

    def first_order(self, seed: int) -> tuple[np.ndarray, np.ndarray, float]:
        """Returns the cost of each site in each run, squared and signed, and the squared error.

        Returns:
            Two arrays of float64 of shape (runs, sites), relative to the norm of the results, and
            the mean squared relative error.
        """

        def run(
            constant: Constant, arrays: list[Array], direction: list[Array]
        ) -> tuple[list[Array], list[Array]]:
            rounded, errors = self.points.rounded(constant, arrays, keep=True)
            slots = {name: jnp.zeros(2, jnp.float32) for name in errors}

            def charged(slots: dict[SiteKey, Slot]) -> list[Array]:
                results = self.points.charged(constant, arrays, errors, slots)
                return [results[index] for index in self.outputs]

            wide, pull = jax.vjp(charged, slots)
            pairs = zip(direction, wide, strict=True)
            (each,) = pull([signs.astype(x.dtype) for signs, x in pairs])
            none = jnp.zeros(2, jnp.float32)
            return [rounded[i] for i in self.outputs], [each.get(k, none) for k in self.points.at]

        squares, sums, total = list[np.ndarray](), list[np.ndarray](), list[float]()
        few = sum(array.size for array in self.batches[0].exact) < _FEW
        for number, batch in enumerate(self.batches):
            size = norm(batch.exact) or 1.0
            for turn in range(_DIRECTIONS if few else 1):
                rng = np.random.default_rng((seed, number, turn))
                signs = [rng.choice(_SIGNS, size=x.shape) for x in batch.exact]
                arguments = (list(batch.arrays), signs)
                results, found = self.compiled.run(run, arguments, "first order", self.outputs)
                both = np.asarray(found, np.float64)
                squares.append(both[:, 0] / size**2)
                sums.append(both[:, 1] / size)
            total.append(relative_error(results, batch.exact) ** 2)
        return np.stack(squares), np.stack(sums), float(np.mean(total))


def costs(runs: Runs, groups: Sequence[Sequence[int]], seed: int, done: Advance) -> Costs:
    """Returns the costs of groups of sites, which are numbers of `Points.order`.

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
        return Costs(squared, parts, sites, frozenset(), reason)
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
    return Costs(squared, parts, sites, frozenset(measured), reason)


def _coherent(parts: np.ndarray, signed: np.ndarray, runs: int) -> list[int]:
    """Returns the groups whose roundings are not independent, the largest first.

    If they are independent, `signed` is the mean of `runs` squares of normal numbers.
    """
    most = 1 + 4 * math.sqrt(2 / runs)
    ratios = signed / np.where(parts > 0, parts, 1)
    sizes = np.maximum(parts, signed)
    odd = (ratios > most) | ((ratios < 0.2) & (runs >= 8))
    worth = odd & (sizes > _LEAST * sizes.sum())
    return [int(i) for i in np.argsort(-sizes) if worth[i]]
