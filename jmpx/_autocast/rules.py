"""The registry: one rule for each primitive that autocast knows.

A rule is a function, `rule(context, equation, values) -> results`, that runs an equation on its
operands. `@register("scan")` puts it here; `kinds.py`, `primitives.py`, `control_flow.py` and
`custom_vjp.py` do so when they are imported.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from jmpx._autocast.neighbours import NOTHING, Ends, Neighbours
from jmpx._autocast.regions import Region, Regions, Used
from jmpx._autocast.value import Traits, Value
from jmpx._jaxprs.core import Equation, Jaxpr, operation_name


class Retraced(NamedTuple):
    """A closed jaxpr in other dtypes, the traits of its results, and what its evaluation met."""

    jaxpr: Jaxpr
    results: list[Traits]
    used: Used


class Interpreter(Protocol):
    """What a rule may ask of the interpreter, for the jaxprs that its equation holds."""

    regions: Regions

    def fresh(self) -> "Interpreter":
        """Returns an interpreter of the same policy map that has met nothing yet."""
        ...

    def evaluate(
        self, jaxpr: Jaxpr, values: Sequence[Value], scope: str, *, ends: Ends = NOTHING
    ) -> list[Value]:
        """Runs a jaxpr on values, and returns its results."""
        ...

    def retrace(
        self,
        jaxpr: Jaxpr,
        values: Sequence[Value],
        scope: str,
        *,
        ends: Ends = NOTHING,
        result_dtypes: Sequence[np.dtype] = (),
        num_uncast: int = 0,
    ) -> Retraced:
        """Traces the evaluation of a jaxpr."""
        ...


class Context(NamedTuple):
    """What holds where an equation runs.

    Args:
        interpreter: evaluates and retraces the jaxprs that the equation holds.
        scope: the names of the scopes around the equation, joined by slashes.
        region: what the policy rules say about that scope.
        override: the dtype that a policy rule gives to the primitive; None without such a rule.
        neighbours: results whose dtypes depend on the equations next to their own.
    """

    interpreter: Interpreter
    scope: str
    region: Region
    override: np.dtype | None
    neighbours: Neighbours

    @property
    def dtype(self) -> np.dtype:
        """The dtype that the policy gives to the equation."""
        return self.region.dtype if self.override is None else self.override

    def is_exposed(self, equation: Equation) -> bool:
        """Whether the first result of the equation must not be rounded onto a bound."""
        return equation.outvars[0] in self.neighbours.exposed

    def retrace(
        self,
        equation: Equation,
        jaxpr: Jaxpr,
        values: Sequence[Value],
        result_dtypes: Sequence[np.dtype] = (),
        num_uncast: int = 0,
    ) -> Retraced:
        """Traces the evaluation of a jaxpr whose results are those of an equation that holds it."""
        return self.interpreter.retrace(
            jaxpr,
            values,
            self.scope,
            ends=self.neighbours.ends_within(equation),
            result_dtypes=result_dtypes,
            num_uncast=num_uncast,
        )


PrimitiveRule = Callable[[Context, Equation, list[Value]], list[Value]]
_Rule = TypeVar("_Rule", bound=PrimitiveRule)


class Entry(NamedTuple):
    """What the registry holds of a primitive.

    Args:
        rule: the rule.
        everywhere: whether the rule is asked even if a policy rule gives the primitive a dtype, or
            the region is float32; its context says so. Most rules are not asked then.
        cached: whether JAX may cache the primitive as a jitted function. It should not if its
            parameters can hold objects of the user, which the cache would keep alive.
        keeps_finite: whether finite numbers stay finite also in the dtype that a policy rule gives
            the primitive, because it adds its operands or puts one into another.
    """

    rule: PrimitiveRule
    everywhere: bool = False
    cached: bool = False
    keeps_finite: bool = False


_entries: dict[str, Entry] = {}

# Primitives that not all supported versions of JAX have. Keys are versions that the tests run (0.7,
# 0.10, 0.12): in SINCE the first that has the primitives, in BEFORE the first that lacks them.
SINCE = {
    "0.10": "all_gather_reduced mulhi ormqr stack tile unstack",
    "0.12": "log2 one_minus_square polynomial",
}
BEFORE = {"0.12": "call closed_call"}


def register(
    *names: str, everywhere: bool = False, cached: bool = False, keeps_finite: bool = False
) -> Callable[[_Rule], _Rule]:
    """Registers a function as the rule of primitives; see `Entry` for the arguments.

    Raises:
        ValueError: if a primitive has a rule already.
    """

    def add(rule: _Rule) -> _Rule:
        for name in names:
            if name in _entries:
                raise ValueError(f"Two rules for the primitive {name!r}: leave one out.")
            _entries[name] = Entry(rule, everywhere, cached, keeps_finite)
        return rule

    return add


def lookup(equation: Equation) -> Entry | None:
    """Returns the entry of an equation's primitive, None for a primitive without a rule."""
    return _entries.get(operation_name(equation.primitive.name))


def is_registered(name: str) -> bool:
    """Whether the primitive of that name has a rule."""
    return name in _entries


def registered() -> Iterable[str]:
    """Returns the names of all primitives that have a rule."""
    return _entries.keys()


def overridable() -> list[str]:
    """Returns the names of the primitives that run in whatever dtype a policy rule gives them."""
    return [name for name, entry in _entries.items() if not entry.everywhere]
