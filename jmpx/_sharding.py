"""Parameters of which each device holds a shard, found by the gathers that read them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jmpx._jaxpr import evaluate, inner_jaxprs, is_literal, scan_counts, trace

# What an array is to this analysis: the parameters that it is made of, as their places; or None,
# if data went into it. A number on its own is made of nothing: it scales a parameter or picks a
# part of it.
Origin = frozenset[int] | None
_NUMBER: Origin = frozenset()

# Each hands a device what other devices hold; of the first there are several kinds.
_EXCHANGES = ("all_gather", "all_to_all", "ragged_all_to_all", "ppermute", "pgather")

# Of these, indices and masks are no part of what an array is made of.
_PICKED_FROM = {
    "dynamic_slice": slice(0, 1),
    "dynamic_update_slice": slice(0, 2),
    "select_n": slice(1, None),
}


def without_shards(
    func: Callable[[list[Any]], Any], params: list[Any], paths: Sequence[str], axis_name: Any
) -> Callable[[list[Any]], Any]:
    """Traces a function of parameters once, and refuses it if it gathers one over the axis.

    The backward pass of a gather sums the gradient over the devices and hands each the part of its
    shard, so that a mean over the devices would mix the shards. A gathered activation, as in a
    contrastive loss, is none of a parameter's: data went into it.

    Args:
        func: the function; its result may hold anything.
        params: the arrays that it is to be called with.
        paths: what to call each of them.
        axis_name: the name (or names) of the mapped axis.

    Returns:
        A function that does the same without another call of `func`.

    Raises:
        TypeError: if a parameter is gathered.
    """
    traced = trace(func, (params,), {})
    names = axis_name if isinstance(axis_name, tuple | list) else (axis_name,)
    search = _Search(frozenset(names))
    search.run(traced.jaxpr, [frozenset([place]) for place in range(len(params))])
    if search.found:
        place, operation = search.found[0]
        raise TypeError(
            f"Cannot average the gradient of the first argument's {paths[place]} over the axis "
            f"{axis_name!r}, because the function reads it by {operation} over that axis, as it "
            "does a shard, whose gradient is summed over the devices already: gather it before "
            "the call, or leave axis_name out and reduce the value and the other gradients by hand."
        )
    return lambda params: traced.rebuild(evaluate(traced.jaxpr, params))


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _shape(atom: Any) -> tuple[int, ...]:
    return getattr(atom.aval, "shape", ())  # a token has none


def _join(origins: Sequence[Origin]) -> Origin:
    known = [origin for origin in origins if origin is not None]
    return frozenset().union(*known) if len(known) == len(origins) else None


@dataclasses.dataclass(frozen=True)
class _Search:
    """Follows parameters through a jaxpr, and notes those that are gathered.

    Attributes:
        axes: the names of the axes.
        found: a parameter's place and the name of the operation, for each gather of one.
    """

    axes: frozenset[Any]
    found: list[tuple[int, str]] = dataclasses.field(default_factory=list)

    def run(self, jaxpr: Any, inputs: Sequence[Origin]) -> list[Origin]:
        """Returns the origins of a jaxpr's outputs, given those of its inputs."""
        jaxpr = _open(jaxpr)
        origins: dict[Any, Origin] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var in jaxpr.constvars:
            origins[var] = None if _shape(var) else _NUMBER

        def read(atom: Any) -> Origin:
            return _NUMBER if is_literal(atom) else origins[atom]

        for eqn in jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            origins.update(zip(eqn.outvars, self.step(eqn, operands), strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def step(self, eqn: Any, operands: list[Origin]) -> list[Origin]:
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

    def scan(self, eqn: Any, operands: list[Origin]) -> list[Origin]:
        consts, carry = scan_counts(eqn)
        return self.loop(eqn.params["jaxpr"], operands, consts, consts + carry)

    def while_loop(self, eqn: Any, operands: list[Origin]) -> list[Origin]:
        operands = operands[eqn.params["cond_nconsts"] :]
        consts = eqn.params["body_nconsts"]
        return self.loop(eqn.params["body_jaxpr"], operands, consts, len(operands))

    def loop(self, body: Any, operands: list[Origin], start: int, stop: int) -> list[Origin]:
        """Runs a body until the origins of what it carries, at `start` to `stop`, stay."""
        while True:
            results = self.run(body, operands)
            carried = list(map(_join, zip(operands[start:stop], results, strict=False)))
            if carried == operands[start:stop]:
                return results
            operands = [*operands[:start], *carried, *operands[stop:]]

    def operation(self, eqn: Any, operands: list[Origin]) -> list[Origin]:
        """Returns the origins of what an operation makes, and notes if it gathers a parameter."""
        name = eqn.primitive.name
        origin = _join(operands[_PICKED_FROM.get(name, slice(None))])
        axes = eqn.params.get("axis_name", ())
        axes = axes if isinstance(axes, tuple | list) else (axes,)
        if origin and name.startswith(_EXCHANGES) and not self.axes.isdisjoint(axes):
            self.found.append((min(origin), name))
        if name == "stop_gradient":
            origin = None
        # The norm of a parameter is a number, and gathering norms is no harm.
        of_arrays = any(_shape(atom) for atom in eqn.invars)
        reduced = [of_arrays and not _shape(var) for var in eqn.outvars]
        return [_NUMBER if number and origin else origin for number in reduced]
