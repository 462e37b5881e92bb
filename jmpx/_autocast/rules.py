"""The registry: one rule, `rule(operation) -> results`, for each primitive that autocast knows.

`@register("scan")` puts it here when `kinds.py`, `primitives.py` or `control_flow.py` is imported.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from jmpx._autocast.neighbours import NOTHING, Dtypes, Ends, Neighbours
from jmpx._autocast.regions import Region, Regions, Used
from jmpx._autocast.value import FLOAT32, Array, Traits, Value, promoted
from jmpx._jaxprs.core import Atom, Equation, Jaxpr, is_floating, operation_name

Cast = Callable[[Value, np.dtype], Array]  # such as `Value.to`


def is_float32(atom: Atom) -> bool:
    """Whether an operand or a result was float32 when traced: all others keep their dtype."""
    return getattr(atom.aval, "dtype", None) == FLOAT32


class InnerPlace(NamedTuple):
    """Where a jaxpr that an equation holds is evaluated, and what becomes of it."""

    scope: str  # around it
    ends: Ends = NOTHING  # what becomes of its results
    result_dtypes: tuple[np.dtype, ...] = ()  # of its first results; the others come in any
    num_uncast: int = 0  # how many of its first operands are cast inside
    has_rounded: bool = False  # whether operands that are pending come a second time, rounded
    rounds: bool = False  # whether results that are pending are rounded


class Retraced(NamedTuple):
    """A closed jaxpr in other dtypes, the traits of its results, and what its evaluation met."""

    jaxpr: Jaxpr
    results: list[Traits]
    used: Used


class Interpreter(Protocol):
    """What a rule may ask of `interpreter.Interpreter`, for the jaxprs that its equation holds."""

    regions: Regions

    def fresh(self) -> "Interpreter": ...

    def evaluate(
        self, jaxpr: Jaxpr, values: Sequence[Value], scope: str, ends: Ends = NOTHING
    ) -> list[Value]: ...

    def retrace(self, jaxpr: Jaxpr, values: Sequence[Value], place: InnerPlace) -> Retraced: ...

    def alike(self, jaxpr: Jaxpr, scope: str) -> tuple[Jaxpr, str]: ...


class Operation(NamedTuple):
    """An equation that is about to run, its operands, and what holds where it runs."""

    equation: Equation
    values: list[Value]
    interpreter: Interpreter  # of the jaxprs that the equation holds
    scope: str  # the names of the scopes around the equation, joined by slashes
    region: Region  # what the policy rules say about that scope
    override: np.dtype | None  # what a policy rule gives to the primitive; None without one
    neighbours: Neighbours  # results whose dtypes depend on the equations next to their own
    read: tuple[Dtypes, ...] = ()  # in which its results are read; see `reads.result_dtypes`
    is_single: bool = False  # whether few are like it, so that JAX need not cache a function for it

    @property
    def name(self) -> str:
        """The name of the primitive."""
        return operation_name(self.equation.primitive.name)

    @property
    def result(self) -> Atom:
        """The first result."""
        return self.equation.outvars[0]

    @property
    def dtype(self) -> np.dtype:
        """The dtype that the policy gives to the operation."""
        return self.region.dtype if self.override is None else self.override

    @property
    def float32_values(self) -> list[Value]:
        """The operands that were float32 when traced."""
        pairs = zip(self.equation.invars, self.values, strict=True)
        return [value for atom, value in pairs if is_float32(atom)]

    @property
    def promoted(self) -> np.dtype:
        """The widest dtype of the operands that were float32 when traced and, if any, not weak."""
        return promoted([value.traits for value in self.float32_values])

    @property
    def is_weak(self) -> bool:
        """Whether all floating operands are weak, so that the results are, too."""
        pairs = zip(self.equation.invars, self.values, strict=True)
        return all(v.is_weak and is_float32(atom) for atom, v in pairs if is_floating(atom))

    @property
    def is_tangent(self) -> bool:
        """Whether an operand is a tangent, so that the results are, too."""
        return any(value.tangent for value in self.values)

    @property
    def is_exposed(self) -> bool:
        """Whether the first result must not be rounded onto a bound."""
        return self.result in self.neighbours.exposed

    @property
    def ends(self) -> Ends:
        """What becomes of the results of the jaxpr that the equation holds."""
        return self.neighbours.ends_within(self.equation)._replace(read=self.read)

    def arrays(self, dtype: np.dtype, cast: Cast = Value.to) -> list[Array]:
        """Returns the operands; the ones that were float32 when traced are in `dtype`."""
        pairs = zip(self.equation.invars, self.values, strict=True)
        return [cast(value, dtype) if is_float32(atom) else value.array for atom, value in pairs]

    def retrace(
        self,
        jaxpr: Jaxpr,
        values: Sequence[Value],
        result_dtypes: Sequence[np.dtype] = (),
        num_uncast: int = 0,
        **pending: bool,
    ) -> Retraced:
        """Traces the evaluation of a jaxpr whose results are those of the equation."""
        place = InnerPlace(self.scope, self.ends, tuple(result_dtypes), num_uncast, **pending)
        return self.interpreter.retrace(jaxpr, values, place)


PrimitiveRule = Callable[[Operation], list[Value]]
_Rule = TypeVar("_Rule", bound=PrimitiveRule)


class Entry(NamedTuple):
    """What the registry holds of a primitive."""

    rule: PrimitiveRule
    # Whether the rule is asked even if a policy rule gives the primitive a dtype, or the region is
    # float32, as the operation tells.
    everywhere: bool = False
    # Whether JAX may cache the primitive as a jitted function: not if its parameters can hold
    # objects of the user, which the cache would keep alive.
    cached: bool = False
    # Whether finite numbers stay finite also in the dtype that a policy rule gives the primitive,
    # because it adds its operands or puts one into another.
    keeps_finite: bool = False


ENTRIES: dict[str, Entry] = {}  # by the names of primitives


def register(
    *names: str, everywhere: bool = False, cached: bool = False, keeps_finite: bool = False
) -> Callable[[_Rule], _Rule]:
    """Registers a function as the rule of primitives; see `Entry` for the arguments."""

    def add(rule: _Rule) -> _Rule:
        for name in names:
            if name in ENTRIES:
                raise ValueError(f"Two rules for the primitive {name!r}: leave one out.")
            ENTRIES[name] = Entry(rule, everywhere, cached, keeps_finite)
        return rule

    return add


def lookup(equation: Equation) -> Entry | None:
    """Returns the entry of an equation's primitive, None for a primitive without a rule."""
    return ENTRIES.get(operation_name(equation.primitive.name))
