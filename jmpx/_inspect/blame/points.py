"""A program in float32, with the roundings of its 16 bits at points that can be turned off."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jmpx._autocast.rules import PRODUCTS
from jmpx._base.trees import PyTree
from jmpx._inspect import watched
from jmpx._inspect.emulate import FORMATS, OPERANDS, algorithm_of, is_exact, rounded_to
from jmpx._inspect.running import run_widened, widened
from jmpx._inspect.watched import Site, Trips
from jmpx._jaxprs import core
from jmpx._jaxprs.core import Array, Equation, Jaxpr, operation_name

Key: TypeAlias = tuple[int, ...]  # of a site
# float32 of shape (2,): the sums of the squares of `cotangent * error`, and of these themselves.
Slot: TypeAlias = Array
Errors: TypeAlias = dict[Key, list[Array]]  # of the points that are kept, in bfloat16


class Point(NamedTuple):
    """Where a program rounds: an operand of a product, or the result of an equation."""

    is_operand: bool
    index: int  # of the operand or result
    dtype: np.dtype  # to which it is rounded
    lengths: tuple[int, ...]  # of the scans around it, the outermost first
    shape: tuple[int, ...]
    is_kept: bool  # whether the error of the rounding is kept: it is zero, or unknown, elsewhere


class Points:
    """The points of a program, by the sites of its equations.

    Attributes:
        at: the points of each site that has some.
        order: the number of each site in a mask.
        wide: the dtype in which the program runs between its roundings.
        has_while: whether a point is in a while loop, of which nothing is differentiated.
    """

    def __init__(self, jaxpr: Jaxpr) -> None:
        self.jaxpr = jaxpr
        # With float64 enabled, float32 is a dtype that rounds.
        self.wide = np.dtype(np.float64 if jax.config.read("jax_enable_x64") else np.float32)
        self.at: dict[Key, list[Point]] = {}
        for site in watched.sites(jaxpr):
            if points := list(_points(site, self.wide)):
                self.at[site.key] = points
        self.order = {key: number for number, key in enumerate(self.at)}
        self.has_while = any(
            eqn.primitive.name == "while" for s in watched.sites(jaxpr) for eqn in s.loops
        )

    def rounded(
        self,
        constant: Callable[[Array], Array],
        arrays: Sequence[Array],
        mask: Array | None = None,
        keep: bool = False,
    ) -> tuple[list[Array], Errors]:
        """Runs the program with its roundings; returns its results and the errors at points.

        Args:
            constant: returns the array to use for a constant.
            arrays: the inputs.
            mask: booleans, one for each number in `order`: whether the points of a site round.
                With None all do.
            keep: whether to keep the errors of all points.
        """

        def at(site: Site, point: Point, array: Array, kept: list[Array], trips: Trips) -> Array:
            low = rounded_to(array, point.dtype)
            if mask is not None:
                return jnp.where(mask[self.order[site.key]], low, array)
            if keep and point.is_kept:
                error = jnp.where(jnp.isfinite(low), low - array, 0).astype(jnp.bfloat16)
                kept.append(error)
            return low

        def step(
            state: Errors, site: Site, operands: list[Array], trips: Trips
        ) -> tuple[list[Array], Errors]:
            new = list[Array]()
            results = self._run(site, operands, lambda p, x: at(site, p, x, new, trips))
            if new and trips:
                new = [old.at[trips].set(x) for old, x in zip(state[site.key], new, strict=True)]
            return results, {**state, site.key: new} if new else state

        empty: Errors = {}
        for key, points in self.at.items() if keep else ():
            if kept := [p for p in points if p.is_kept]:
                empty[key] = [jnp.zeros((*p.lengths, *p.shape), jnp.bfloat16) for p in kept]
        return self._evaluate(constant, arrays, step, empty)

    def charged(
        self,
        constant: Callable[[Array], Array],
        arrays: Sequence[Array],
        errors: Errors,
        slots: dict[Key, Slot],
    ) -> list[Array]:
        """Runs the program in float32; the cotangents of slots are what the errors cost."""

        def step(
            state: PyTree, site: Site, operands: list[Array], trips: Trips
        ) -> tuple[list[Array], PyTree]:
            kept = iter(errors.get(site.key, ()))

            def at(point: Point, array: Array) -> Array:
                if not point.is_kept or site.key not in slots:
                    return array
                return _charged(array, slots[site.key], next(kept), trips)

            return self._run(site, operands, at), state

        return self._evaluate(constant, arrays, step, {})[0]

    def _run(
        self, site: Site, operands: list[Array], at: Callable[[Point, Array], Array]
    ) -> list[Array]:
        """Runs an equation in float32; `at` returns what stands for the array at a point."""
        points, eqn = self.at.get(site.key, ()), site.equation
        for point in points:
            if point.is_operand:
                operands = list(operands)
                operands[point.index] = at(point, operands[point.index])
        results = self._run_wide(eqn, operands)
        for point in points:
            if not point.is_operand:
                results[point.index] = at(point, results[point.index])
        return results

    def _run_wide(self, eqn: Equation, operands: Sequence[Array]) -> list[Array]:
        if OPERANDS.get(algorithm_of(eqn)) is not None:
            return core.bind(eqn, operands, precision=(jax.lax.Precision.HIGHEST,) * 2)
        return run_widened(eqn, operands, self.wide)

    def _evaluate(
        self,
        constant: Callable[[Array], Array],
        arrays: Sequence[Array],
        step: object,
        state: PyTree,
    ) -> tuple[list[Array], PyTree]:
        return watched.evaluate(
            self.jaxpr,
            [widened(array, self.wide) for array in arrays],
            watch=lambda state, *seen: state,
            state=state,
            run=self._run_wide,
            constant=lambda array: widened(constant(array), self.wide),
            by_site=True,
            step=step,  # pyright: ignore[reportArgumentType]
        )


def _points(site: Site, wide: np.dtype) -> Iterator[Point]:
    eqn = site.equation
    lengths = tuple(each.params.get("length", 0) for each in site.loops)
    is_kept = all(each.primitive.name == "scan" for each in site.loops)
    to = OPERANDS.get(algorithm_of(eqn))
    if operation_name(eqn.primitive.name) in PRODUCTS:
        for index, atom in enumerate(eqn.invars[:2]):
            dtype = to or _low(atom.aval, wide)
            if dtype is not None:  # What a rounded part hands to one in 16 bits is rounded already.
                yield Point(
                    True, index, dtype, lengths, atom.aval.shape, is_kept and to is not None
                )
    for index, var in enumerate(eqn.outvars):
        dtype = _low(var.aval, wide)
        if dtype is not None and not is_exact(eqn):
            yield Point(False, index, dtype, lengths, var.aval.shape, is_kept)


def _low(aval: core.Aval, wide: np.dtype) -> np.dtype | None:
    """Returns the dtype of an abstract value if it rounds, else None."""
    if hasattr(aval, "inner_aval"):  # a reference
        return None
    dtype = getattr(aval, "dtype", None)
    formats = FORMATS if wide == np.float32 else (*FORMATS, "float32")
    return dtype if getattr(dtype, "name", "") in formats else None


@jax.custom_vjp
def _charged(array: Array, slot: Slot, errors: Array, trips: Trips) -> Array:
    """Returns the array; its backward pass adds what an error of the array costs to the slot."""
    return array


def _forward(
    array: Array, slot: Slot, errors: Array, trips: Trips
) -> tuple[Array, tuple[Array, Trips]]:
    return array, (errors, trips)


def _backward(
    kept: tuple[Array, Trips], cotangent: Array
) -> tuple[Array, Slot, None, tuple[None, ...]]:
    errors, trips = kept
    # The float32 run may not be differentiable where the rounded one stands, as a root of zero.
    cotangent = jnp.where(jnp.isfinite(cotangent), cotangent, 0)
    costs = cotangent * (errors[trips] if trips else errors).astype(cotangent.dtype)
    slot = jnp.stack([jnp.sum(costs**2), jnp.sum(costs)]).astype(jnp.float32)
    return cotangent, slot, None, tuple(None for _ in trips)


_charged.defvjp(_forward, _backward)


def size_of(points: Sequence[Point]) -> int:
    """Returns how many numbers points round."""
    return sum(math.prod((*point.lengths, *point.shape)) for point in points)
