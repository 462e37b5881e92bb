"""Finds parameters of which each device holds a shard, by the gathers that read them."""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax

from jmpx._axes import axis_names
from jmpx._jaxpr import evaluate, inner_jaxprs, is_literal, scan_counts, trace

R = TypeVar("R")

# JAX has public types of these in `jax.extend` alone, which is imported on first use.
Jaxpr: TypeAlias = Any  # open or closed
Equation: TypeAlias = Any
Atom: TypeAlias = Any  # a variable or a literal

# The indices of the parameters that an array is computed from, or None if it depends on data. A
# scalar counts as computed from no parameter: it scales one, or picks a part of one.
Origin: TypeAlias = frozenset[int] | None
_SCALAR: Origin = frozenset()

# Primitives that give a device the arrays of others; `all_gather` has variants with suffixes.
_EXCHANGES = ("all_gather", "all_to_all", "ragged_all_to_all", "ppermute", "pgather")

# The operands of which the result holds elements; the others are indices and masks.
_PICKED_FROM = {
    "dynamic_slice": slice(0, 1),
    "dynamic_update_slice": slice(0, 2),
    "select_n": slice(1, None),
}


class Gather(NamedTuple):
    """An operation that gives a device parts of parameters that other devices hold.

    Attributes:
        params: the indices of the parameters.
        operation: the name of the primitive.
        axes: the mapped axes over which it does so.
    """

    params: frozenset[int]
    operation: str
    axes: frozenset[Hashable]


def find_gathers(
    func: Callable[[list[jax.Array]], R], params: list[jax.Array], axes: Iterable[Hashable]
) -> tuple[Callable[[list[jax.Array]], R], list[Gather]]:
    """Traces a function of parameters once, and finds those that it gathers over axes.

    The backward pass of a gather sums the gradient over the devices and gives each device the part
    of its shard. An activation may be gathered, as contrastive losses do: it depends on data.

    Args:
        func: the function; its result may hold any leaves.
        params: the arrays to trace it with.
        axes: the names of the mapped axes.

    Returns:
        A function that does the same without another call of `func`, and the gathers.
    """
    traced = trace(func, (params,), {})
    search = _Search(frozenset(axes))
    search.run(traced.jaxpr, [frozenset([index]) for index in range(len(params))])
    return lambda params: traced.rebuild(evaluate(traced.jaxpr, params)), search.found


def _open(jaxpr: Jaxpr) -> Jaxpr:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _shape(atom: Atom) -> tuple[int, ...]:
    return getattr(atom.aval, "shape", ())  # A token has no shape.


def _join(origins: Sequence[Origin]) -> Origin:
    """Returns the origin of an array that is computed from arrays of these origins."""
    known = [origin for origin in origins if origin is not None]
    return frozenset().union(*known) if len(known) == len(origins) else None


@dataclasses.dataclass(frozen=True)
class _Search:
    """Follows parameters through a jaxpr, and notes those that are gathered.

    Attributes:
        axes: the names of the axes.
        found: the gathers of parameters.
    """

    axes: frozenset[Hashable]
    found: list[Gather] = dataclasses.field(default_factory=list)

    def run(self, jaxpr: Jaxpr, inputs: Sequence[Origin]) -> list[Origin]:
        """Returns the origins of a jaxpr's outputs, given those of its inputs."""
        jaxpr = _open(jaxpr)
        origins: dict[Atom, Origin] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var in jaxpr.constvars:
            origins[var] = None if _shape(var) else _SCALAR

        def read(atom: Atom) -> Origin:
            return _SCALAR if is_literal(atom) else origins[atom]

        for eqn in jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            origins.update(zip(eqn.outvars, self.step(eqn, operands), strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def step(self, eqn: Equation, operands: list[Origin]) -> list[Origin]:
        """Returns the origins of an equation's results."""
        name = eqn.primitive.name
        if name == "scan":
            return self.scan(eqn, operands)
        if name == "while":
            return self.while_loop(eqn, operands)
        if name == "cond":
            branches = [self.run(branch, operands[1:]) for branch in eqn.params["branches"]]
            return [_join(results) for results in zip(*branches, strict=True)]
        for jaxpr in inner_jaxprs(eqn.params):
            if len(_open(jaxpr).invars) == len(operands):
                results = self.run(jaxpr, operands)
                if len(results) == len(eqn.outvars):
                    return results
        return self.operation(eqn, operands)

    def scan(self, eqn: Equation, operands: list[Origin]) -> list[Origin]:
        consts, carry = scan_counts(eqn)
        return self.loop(eqn.params["jaxpr"], operands, consts, consts + carry)

    def while_loop(self, eqn: Equation, operands: list[Origin]) -> list[Origin]:
        operands = operands[eqn.params["cond_nconsts"] :]
        consts = eqn.params["body_nconsts"]
        return self.loop(eqn.params["body_jaxpr"], operands, consts, len(operands))

    def loop(self, body: Jaxpr, operands: list[Origin], start: int, stop: int) -> list[Origin]:
        """Runs a body until the origins of its carry, at `start` to `stop`, no longer change."""
        while True:
            results = self.run(body, operands)
            carried = list(map(_join, zip(operands[start:stop], results, strict=False)))
            if carried == operands[start:stop]:
                return results
            operands = [*operands[:start], *carried, *operands[stop:]]

    def operation(self, eqn: Equation, operands: list[Origin]) -> list[Origin]:
        """Returns the origins of an operation's results, and notes if it gathers a parameter."""
        name = eqn.primitive.name
        origin = _join(operands[_PICKED_FROM.get(name, slice(None))])
        axes = self.axes.intersection(axis_names(eqn.params.get("axis_name", ())))
        if origin and axes and name.startswith(_EXCHANGES):
            self.found.append(Gather(origin, name, axes))
        if name == "stop_gradient":
            origin = None
        # An array that is reduced to a scalar, such as a parameter's norm, may be gathered.
        of_arrays = any(_shape(atom) for atom in eqn.invars)
        are_reduced = [of_arrays and not _shape(var) for var in eqn.outvars]
        return [_SCALAR if is_reduced and origin else origin for is_reduced in are_reduced]
