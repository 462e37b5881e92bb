"""What a program does, as a key: programs that were traced apart share it if they do the same."""

from collections.abc import Hashable, Iterator, Sequence

import numpy as np

from jmpx._jaxprs.core import consts_of, inner_jaxprs, is_literal, stack_of
from jmpx._jaxprs.inner import inner_of, once_per_jaxpr
from jmpx._jaxprs.types import Atom, Equation, Jaxpr, is_jaxpr


def structure(jaxpr: Jaxpr) -> Hashable:
    """Returns a key of a jaxpr: equal ones compute the same, given equal operands and constants.

    The primitives, their parameters and contexts, inner jaxprs, abstract values, the numbers of
    literals and how variables connect are part of it; scopes and lines are not, and of constants
    only the abstract values. Where one inner jaxpr runs twice, it does so in all jaxprs of the key.

    Functions with derivatives of their own differ only by the jaxpr that they run: JAX makes the
    rules anew in each trace.

    Raises:
        TypeError: by `hash` of the key, if a parameter has no hash.
    """
    return _Keys(derivatives=False).jaxpr(jaxpr)


def structure_of(
    equations: Sequence[Equation], inputs: Sequence[Atom], outputs: Sequence[Atom]
) -> Hashable:
    """Returns the key of equations that read and return these variables; rules differ in it."""
    return _Keys(derivatives=True).equations(equations, inputs, outputs)


@once_per_jaxpr
def kind(jaxpr: Jaxpr) -> Hashable:
    """Returns `kind_of` the equations of a jaxpr."""
    return kind_of(jaxpr.eqns, jaxpr.invars, jaxpr.outvars)


def kind_of(
    equations: Sequence[Equation], inputs: Sequence[Atom], outputs: Sequence[Atom], depth: int = 0
) -> Hashable:
    """Returns a key of equations: equal ones compute the same, at the same lines.

    The constants and the derivatives of the functions in them are the same, too, and so are their
    scopes, without marks and the first ones, as many as `depth` says. Where a parameter has no
    hash, no other key is equal.
    """
    key = structure_of(equations, inputs, outputs), tuple(_places(equations, depth))
    try:
        hash(key)
    except TypeError:
        return object()
    return key


def _places(equations: Sequence[Equation], depth: int = 0) -> Iterator[Hashable]:
    """Yields the scopes and lines of equations, and of those in the jaxprs that they hold.

    Also what identifies the constants of these jaxprs.
    """
    for eqn in equations:
        yield stack_of(eqn)[depth:], eqn.source_info.traceback
        for jaxpr in inner_jaxprs(eqn.params):
            yield tuple(map(id, consts_of(jaxpr)))
            yield from _places(jaxpr.eqns)


class _Keys:
    """Makes keys, and knows the inner jaxprs that it has met."""

    def __init__(self, derivatives: bool) -> None:
        self.derivatives = derivatives
        self.met: dict[int, int] = {}

    def jaxpr(self, jaxpr: Jaxpr) -> Hashable:
        if id(jaxpr) in self.met:
            return "again", self.met[id(jaxpr)]
        self.met[id(jaxpr)] = len(self.met)
        inputs = (*jaxpr.constvars, *jaxpr.invars)
        return len(consts_of(jaxpr)), self.equations(jaxpr.eqns, inputs, jaxpr.outvars)

    def equations(
        self, equations: Sequence[Equation], inputs: Sequence[Atom], outputs: Sequence[Atom]
    ) -> Hashable:
        numbers: dict[Atom, int] = {}

        def atom(atom: Atom) -> Hashable:
            if is_literal(atom):  # its bytes, as NaN does not equal itself, and 0.0 equals -0.0
                return atom.aval, np.asarray(atom.val).dtype, np.asarray(atom.val).tobytes()
            known = atom in numbers
            number = numbers.setdefault(atom, len(numbers))
            return number if known else (number, atom.aval)

        first = tuple(map(atom, inputs))
        rows = tuple(
            (eqn.primitive, eqn.ctx, *map(atom, (*eqn.invars, *eqn.outvars)), self.params(eqn))
            for eqn in equations
        )
        return first, rows, tuple(map(atom, outputs))

    def params(self, eqn: Equation) -> Hashable:
        inner = None if self.derivatives else inner_of(eqn)
        if inner is not None and inner.kind == "call":
            return self.jaxpr(inner.jaxprs[0])
        return tuple((name, self.value(value)) for name, value in eqn.params.items())

    def value(self, value: object) -> Hashable:
        if type(value) is tuple:
            return tuple(map(self.value, value))
        if isinstance(value, np.generic):
            return value.dtype, value.tobytes()
        return self.jaxpr(value) if is_jaxpr(value) else value
