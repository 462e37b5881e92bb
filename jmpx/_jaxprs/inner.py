"""The jaxprs that equations run, and the one walk through a jaxpr on values of any kind.

A call, a branch, a loop and a map over shards hand their operands to the jaxprs that they hold, and
hand out what these return, each in its own way. `inner_of` says how, for all versions of JAX.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from jmpx._jaxprs.core import (
    Atom,
    Equation,
    Jaxpr,
    consts_of,
    inner_jaxprs,
    is_literal,
    last_uses,
    platform_branch,
    scan_counts,
)

V = TypeVar("V")


class Inner(NamedTuple):
    """The jaxprs that an equation runs.

    Each takes the equation's operands from `first` on, and returns its results. In a loop, these
    operands are `consts` constants, `carry` arrays that each trip hands to the next, as its first
    results, and arrays of which each trip reads a slice; the results after the carry are stacked.

    Attributes:
        kind: `call`, `scan`, `while`, `cond` or `shard_map`.
        jaxprs: the jaxprs, of which one runs: a cond has several.
        first: the number of operands before: the index of a cond, the constants of `condition`.
        consts: the number of constants of a loop.
        carry: the number of carried arrays of a loop.
        trips: how many trips a loop makes; None if it depends on the data.
        condition: the condition of a while loop; it takes the first operands and the carry.
    """

    kind: str
    jaxprs: tuple[Jaxpr, ...]
    first: int = 0
    consts: int = 0
    carry: int = 0
    trips: int | None = 1
    condition: Jaxpr | None = None

    def split(self, operands: Sequence[V]) -> tuple[list[V], list[V], list[V]]:
        """Returns the constants, the carry and the sliced arrays among a loop's operands."""
        consts, end = self.first + self.consts, self.first + self.consts + self.carry
        return (
            list(operands[self.first : consts]),
            list(operands[consts:end]),
            list(operands[end:]),
        )


def inner_of(eqn: Equation, platform: str | None = None) -> Inner | None:
    """Returns the jaxprs that an equation runs, and how.

    Args:
        eqn: the equation.
        platform: such as "tpu": of a `lax.platform_dependent`, the only branch is the one of this
            platform; None for the platform that JAX takes here.

    Returns:
        None if the equation stands for itself: if it holds no jaxpr, or makes more of one than a
        call, as a Pallas kernel and a linear solve do.
    """
    params, name = eqn.params, eqn.primitive.name
    if name == "scan":
        consts, carry = scan_counts(eqn)
        return Inner(name, (params["jaxpr"],), 0, consts, carry, params["length"])
    if name == "while":
        first, consts = params["cond_nconsts"], params["body_nconsts"]
        carry = len(eqn.invars) - first - consts
        bodies = (params["body_jaxpr"],)
        return Inner(name, bodies, first, consts, carry, None, params["cond_jaxpr"])
    if name == "cond":
        branch = platform_branch(eqn, platform)
        branches = params["branches"]
        return Inner(name, tuple(branches if branch is None else branches[branch : branch + 1]), 1)
    jaxprs = tuple(inner_jaxprs(params))
    if name == "shard_map":
        return Inner(name, jaxprs)
    return Inner("call", jaxprs) if len(jaxprs) == 1 and _is_call(jaxprs[0], eqn) else None


def _is_call(jaxpr: Jaxpr, eqn: Equation) -> bool:
    """Whether operands and results of a jaxpr and of its equation have the same shapes."""
    inner, outer = (*jaxpr.invars, None, *jaxpr.outvars), (*eqn.invars, None, *eqn.outvars)
    return list(map(_shape, inner)) == list(map(_shape, outer))


def _shape(atom: Atom | None) -> tuple[int, ...] | None:
    """Returns the shape of an operand or a result; None if it has none, as a token."""
    return getattr(atom.aval, "shape", None) if atom is not None else None


def walk(
    jaxpr: Jaxpr,
    operands: Sequence[V],
    step: Callable[[Equation, list[V]], Sequence[V]],
    constant: Callable[[Atom, object], V],
    join: Callable[[Sequence[V]], V] | None = None,
) -> list[V]:
    """Goes through the equations of a jaxpr, in order, and returns its results.

    Args:
        jaxpr: the jaxpr, closed or open.
        operands: its operands: arrays, or whatever stands for them.
        step: `step(equation, operands)` returns the results of an equation.
        constant: `constant(atom, array)` returns what stands for a constant or a literal.
        join: makes one of what an array was that an equation may have written to, of all operands
            and of the results; None where such arrays keep what was written themselves.
    """
    env = dict(zip(jaxpr.invars, operands, strict=True))
    for var, const in zip(jaxpr.constvars, consts_of(jaxpr), strict=False):
        env[var] = constant(var, const)

    def read(atom: Atom) -> V:
        return constant(atom, atom.val) if is_literal(atom) else env[atom]

    for eqn, last in zip(jaxpr.eqns, last_uses(jaxpr), strict=True):
        inputs = list(map(read, eqn.invars))
        results = step(eqn, inputs)
        env.update(zip(eqn.outvars, results, strict=True))
        if join is not None:
            joined = [atom for atom in eqn.invars if hasattr(atom.aval, "inner_aval")]
            env.update((atom, join([*inputs, *results])) for atom in joined)
        for var in last:
            del env[var]
    return list(map(read, jaxpr.outvars))


def all_equations(jaxpr: Jaxpr) -> Iterator[Equation]:
    """Yields the equations of a jaxpr, each followed by those of all jaxprs that it holds."""
    for eqn in jaxpr.eqns:
        yield eqn
        yield from itertools.chain.from_iterable(map(all_equations, inner_jaxprs(eqn.params)))
