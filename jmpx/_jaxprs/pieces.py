"""Pieces of a jaxpr: equations that run together, and what goes into them and comes out."""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jmpx._jaxprs.backward import variables
from jmpx._jaxprs.core import Atom, Equation, Jaxpr, Scopes, is_literal, stack_of


class Piece(NamedTuple):
    """Equations that run together."""

    equations: list[Equation]  # in their order
    inputs: list[Atom]  # the variables that they read, and others define
    outputs: list[Atom]  # the variables that they define, and others read
    last: list[Atom]  # the variables that nothing reads after them


def split(jaxpr: Jaxpr, groups: Sequence[Sequence[int]]) -> list[Piece]:
    """Returns the pieces that groups of the equations make, given their indices, in order."""
    read = {atom for atom in jaxpr.outvars if not is_literal(atom)}
    pieces = []
    for indices in reversed(groups):
        equations = [jaxpr.eqns[i] for i in indices]
        defined = {var: None for equation in equations for var in equation.outvars}
        used = {var: None for equation in equations for var in variables(equation)}
        inputs = [var for var in used if var not in defined]
        last = [var for var in (*inputs, *defined) if var not in read]
        outputs = [var for var in defined if var in read]
        pieces.append(Piece(equations, inputs, outputs, last))
        read.update(inputs)
    return pieces[::-1]


def scopes_around(piece: Piece, stack_of: Callable[[Equation], Scopes] = stack_of) -> Scopes:
    """Returns the scopes, as JAX keeps them, that are around all equations of a piece."""
    first, *stacks = map(stack_of, piece.equations)
    for stack in stacks:
        if stack[: len(first)] != first:
            pairs = zip(first, stack, strict=False)
            first = tuple(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return first
