"""The registry: one rule for each primitive that autocast knows.

A rule is a function, `rule(context, equation, values) -> results`, that runs an equation on its
operands. `@register("scan")` puts it here; `kinds.py`, `primitives.py` and `control_flow.py` do
so when they are imported.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from jmpx._autocast.neighbours import Neighbours
from jmpx._autocast.regions import Region, Used
from jmpx._autocast.value import Traits, Value
from jmpx._jaxpr import Equation, Jaxpr, operation_name


class Retraced(NamedTuple):
    """A jaxpr in other dtypes.

    Args:
        jaxpr: the closed jaxpr.
        results: the traits of its results.
        used: what its evaluation met.
    """

    jaxpr: Jaxpr
    results: list[Traits]
    used: Used


class Interpreter(Protocol):
    """What a rule may ask of the interpreter, for the jaxprs that its equation holds."""

    def fresh(self) -> "Interpreter":
        """Returns an interpreter of the same policy map that has met nothing yet."""
        ...

    def evaluate(self, jaxpr: Jaxpr, values: Sequence[Value], scope: str) -> list[Value]:
        """Runs a jaxpr on values, and returns its results."""
        ...

    def retrace(
        self,
        jaxpr: Jaxpr,
        values: Sequence[Value],
        scope: str,
        *,
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


PrimitiveRule = Callable[[Context, Equation, list[Value]], list[Value]]
_Rule = TypeVar("_Rule", bound=PrimitiveRule)


class Entry(NamedTuple):
    """What the registry holds of a primitive.

    Args:
        rule: the rule.
        everywhere: whether the rule runs also where a policy rule gives the primitive a dtype, or
            the region is float32; it reads both from its context. Other primitives have no say.
        cached: whether JAX may cache the primitive, jitted. Parameters that hold objects of the
            user, such as a callback, would live as long as the cache.
        keeps_finite: whether finite numbers stay finite when the operands are cast, because the
            primitive adds them to others or puts them among others.
    """

    rule: PrimitiveRule
    everywhere: bool = False
    cached: bool = False
    keeps_finite: bool = False


_entries: dict[str, Entry] = {}

# Primitives that some versions of JAX lack, by the first of the versions that the tests run (0.7,
# 0.10, 0.12) that has them, or that has them no more. Without an entry here, all versions have it.
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
