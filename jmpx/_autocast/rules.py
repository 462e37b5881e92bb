"""The registry of rules, the operation that a rule gets, and the algorithm of float32 products."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import lax

from jmpx._autocast.neighbours import NOTHING, Dtypes, Ends, Neighbours
from jmpx._autocast.value import FLOAT32, Array, Region, Regions, Traits, Used, Value, promoted
from jmpx._base.dtypes import is_algorithm
from jmpx._jaxprs import core
from jmpx._jaxprs.core import Atom, Equation, Jaxpr, is_floating, operation_name
from jmpx._jaxprs.equations import place_of
from jmpx._jaxprs.inner import CONVOLUTION, PRODUCTS, once_per_jaxpr
from jmpx._jaxprs.marks import Params
from jmpx._jaxprs.rewriting import with_equations, with_jaxprs

Cast = Callable[[Value, np.dtype], Array]  # such as `Value.to`


def is_float32(atom: Atom) -> bool:
    """Whether an operand or a result was float32 when traced: all others keep their dtype."""
    return getattr(atom.aval, "dtype", None) == FLOAT32


class Retracing(NamedTuple):
    """How a jaxpr that an equation holds is evaluated anew."""

    scope: str  # around it
    ends: Ends = NOTHING  # how its results are used
    result_dtypes: tuple[np.dtype, ...] = ()  # of the first results; others stay as computed
    num_uncast: int = 0  # how many of its first operands are cast inside
    has_rounded: bool = False  # whether pending operands come a second time, rounded
    rounds: bool = False  # whether pending results are rounded


class Retraced(NamedTuple):
    """A closed jaxpr in other dtypes, the traits of its results, and the rules that it used."""

    jaxpr: Jaxpr
    results: list[Traits]
    used: Used


class Evaluator(Protocol):
    """What a rule may ask of the `Interpreter`, for the jaxprs that its equation holds."""

    regions: Regions

    def fresh(self) -> "Evaluator": ...

    def evaluate(
        self, jaxpr: Jaxpr, values: Sequence[Value], scope: str, ends: Ends = NOTHING
    ) -> list[Value]: ...

    def retrace(self, jaxpr: Jaxpr, values: Sequence[Value], how: Retracing) -> Retraced: ...

    def alike(self, jaxpr: Jaxpr, scope: str) -> tuple[Jaxpr, str]: ...


class Operation(NamedTuple):
    """An equation that is about to run, its operands, and its surroundings."""

    equation: Equation
    values: list[Value]
    interpreter: Evaluator  # of the jaxprs that the equation holds
    scope: str  # the names of the scopes around the equation, joined by slashes
    region: Region  # of that scope, by the policy rules
    override: np.dtype | None  # the dtype that a policy rule gives to the primitive, if any
    neighbours: Neighbours  # results whose dtypes depend on the equations next to their own
    read: tuple[Dtypes, ...] = ()  # the dtypes of its readers; see `binding.result_dtypes`
    is_single: bool = False  # whether few are equal, so that JAX need not cache a function for it

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
        """How the results of the jaxpr in the equation are used."""
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
        how = Retracing(self.scope, self.ends, tuple(result_dtypes), num_uncast, **pending)
        return self.interpreter.retrace(jaxpr, values, how)


PrimitiveRule = Callable[[Operation], list[Value]]
_Rule = TypeVar("_Rule", bound=PrimitiveRule)


class Entry(NamedTuple):
    """The entry of a primitive in the registry."""

    rule: PrimitiveRule
    # Whether the rule runs even if a policy rule gives the primitive a dtype, or the region is
    # float32: it reads both from the operation.
    everywhere: bool = False
    # Whether JAX may cache the primitive as a jitted function: not if its parameters can hold
    # objects of the user, which the cache would keep alive.
    cached: bool = False
    # Whether finite numbers stay finite in the dtype that a policy rule gives the primitive, too:
    # it adds its operands, or puts one into another.
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


# Products: the primitives that multiply matrices, and the algorithm of those in float32.
#
# Products in 16 bits get none: a dot algorithm would change the dtype in which they multiply.


_WORDS_FOR = frozenset({FLOAT32, np.dtype(np.complex64)})  # dtypes to which a precision applies


def is_precise(equation: Equation) -> bool:
    """Whether the user asked for more precision of a product than the default."""
    precision = equation.params.get("precision")
    asked = precision if isinstance(precision, tuple) else (precision,)
    return any(p not in (None, lax.Precision.DEFAULT) for p in asked)


def low_dtype(equation: Equation, dtype: np.dtype) -> np.dtype:
    """Returns the compute dtype, float32 for a product of high precision or of another dtype."""
    atoms = [atom for atom in equation.invars if jnp.issubdtype(atom.aval.dtype, jnp.inexact)]
    dtypes = {atom.aval.dtype for atom in atoms}  # one operand may be complex
    is_low = FLOAT32 in dtypes and dtypes <= {FLOAT32, dtype} and not is_precise(equation)
    return dtype if is_low else FLOAT32


def with_algorithms(operation: Operation, dtype: np.dtype = FLOAT32) -> Params:
    """Returns the parameters of an operation that change by the algorithms of its products.

    The products are the operation itself, or those in a jaxpr that it holds and that nothing
    evaluates, such as the matrix of a linear solver or a kernel. Only float32 ones have algorithms.
    """
    regions = operation.interpreter.regions
    if not regions.give_algorithms:
        return {}
    if dtype != FLOAT32:
        return _without_algorithm(operation.equation, regions)
    return _params(operation.equation, operation.scope, regions)


def _without_algorithm(equation: Equation, regions: Regions) -> Params:
    """Returns parameters that shield a product in 16 bits from a dot algorithm around the call."""
    # Without a precision of the product, JAX would use the algorithm for its transposed products.
    is_product = operation_name(equation.primitive.name) in PRODUCTS
    is_open = is_product and equation.params["precision"] is None
    is_set = is_open and is_algorithm(regions.surrounding)
    return {"precision": (lax.Precision.DEFAULT,) * 2} if is_set else {}


def _params(equation: Equation, scope: str, regions: Regions) -> Params:
    if operation_name(equation.primitive.name) in PRODUCTS:
        return _precision(equation, scope, regions)
    old = equation.params
    new = with_jaxprs(old, lambda jaxpr: _rewrite(jaxpr, scope, regions))
    return {key: value for key, value in new.items() if value is not old[key]}


def _precision(equation: Equation, scope: str, regions: Regions) -> Params:
    name, params = operation_name(equation.primitive.name), equation.params
    region = regions.region(scope)
    algorithm = regions.algorithm(name, region)
    if algorithm is None:
        return {}
    rule = regions.rule_of(algorithm)
    if name == CONVOLUTION and rule is not None and rule.product is not None:
        if algorithm.rank != region.rank:  # another rule is for the convolution
            return {}
        place = place_of(equation) or "a library"
        raise rule.convolution_error(f"conv_general_dilated at {place}")
    dtypes = {atom.aval.dtype for atom in equation.invars}
    dtypes = {d for d in dtypes if jnp.issubdtype(d, jnp.inexact)}
    is_word = not is_algorithm(algorithm.name)
    # The derivative of a product of 16 bits that is summed in float32 has a factor in float32.
    takes_part = is_word and (dtypes | {params["preferred_element_type"]}) & _WORDS_FOR
    if not takes_part and dtypes != {FLOAT32}:
        return _without_algorithm(equation, regions) if dtypes else {}
    regions.note(algorithm)
    if params["precision"] is not None:  # the user's takes precedence
        return {}
    if is_word:
        return {"precision": (lax.Precision(algorithm.name),) * 2}
    # JAX ignores dot algorithms for convolutions.
    return {} if name == CONVOLUTION else {"precision": lax.DotAlgorithmPreset[algorithm.name]}


def _rewrite(jaxpr: Jaxpr, scope: str, regions: Regions) -> Jaxpr:
    """Returns a jaxpr whose products have their algorithms; the same object if none has one."""
    new, used = _rewritten(jaxpr, scope, regions.policy_map, regions.surrounding)
    regions.used.add(used)
    return jaxpr if new is None else new


@once_per_jaxpr
def _rewritten(jaxpr: Jaxpr, scope: str, *of_regions: Any) -> tuple[Jaxpr | None, Used]:
    """Returns a jaxpr with algorithms, None if nothing changes, and the rules that it used."""
    regions = Regions(*of_regions)

    def change(equation: Equation) -> Equation:
        params = _params(equation, core.scope_within(scope, equation), regions)
        return equation.replace(params={**equation.params, **params}) if params else equation

    new = with_equations(jaxpr, change)
    return None if new is jaxpr else new, regions.used
