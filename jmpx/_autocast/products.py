"""Products: the primitives that multiply matrices, and the algorithm with which they do in float32.

Products in 16 bits get none: they multiply in their own dtype, and a dot algorithm would change it.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jmpx._autocast.regions import Regions, Used
from jmpx._autocast.rules import Operation
from jmpx._autocast.value import FLOAT32
from jmpx._base.matmul import is_algorithm
from jmpx._jaxprs import core
from jmpx._jaxprs.backward import CONVOLUTION, PRODUCTS
from jmpx._jaxprs.core import Equation, Jaxpr, operation_name
from jmpx._jaxprs.inner import once_per_jaxpr
from jmpx._jaxprs.places import place_of
from jmpx._jaxprs.rewriting import with_equations, with_jaxprs
from jmpx._jaxprs.types import Params

_WORDS_FOR = frozenset({FLOAT32, np.dtype(np.complex64)})  # which is a pair of float32 numbers


def is_precise(equation: Equation) -> bool:
    """Whether the user asked for more precision of a product than the default."""
    precision = equation.params.get("precision")
    asked = precision if isinstance(precision, tuple) else (precision,)
    return any(p not in (None, lax.Precision.DEFAULT) for p in asked)


def low_dtype(equation: Equation, dtype: np.dtype) -> np.dtype:
    """Returns the compute dtype, float32 for a product of high precision or of another dtype."""
    atoms = [atom for atom in equation.invars if jnp.issubdtype(atom.aval.dtype, jnp.inexact)]
    dtypes = {atom.aval.dtype for atom in atoms}  # of a matrix and a complex one, too
    is_low = FLOAT32 in dtypes and dtypes <= {FLOAT32, dtype} and not is_precise(equation)
    return dtype if is_low else FLOAT32


def with_algorithms(operation: Operation, dtype: np.dtype = FLOAT32) -> Params:
    """Returns the parameters of an operation that change by the algorithms of its products.

    These are the operation itself, or those in a jaxpr that it holds and nothing evaluates, such as
    the matrix of a linear solver or a kernel. In another `dtype` than float32 there is none.
    """
    regions = operation.interpreter.regions
    if not regions.give_algorithms:
        return {}
    if dtype != FLOAT32:
        return _without_algorithm(operation.equation, regions)
    return _params(operation.equation, operation.scope, regions)


def _without_algorithm(equation: Equation, regions: Regions) -> Params:
    """Returns parameters that keep a dot algorithm around the call from a product in 16 bits."""
    # If the product had no precision, JAX would take the algorithm for the transposed products.
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
    if params["precision"] is not None:  # what the user wrote takes precedence
        return {}
    if is_word:
        return {"precision": (lax.Precision(algorithm.name),) * 2}
    # JAX ignores dot algorithms for convolutions.
    return {} if name == CONVOLUTION else {"precision": lax.DotAlgorithmPreset[algorithm.name]}


def _rewrite(jaxpr: Jaxpr, scope: str, regions: Regions) -> Jaxpr:
    """Returns a jaxpr, the products in it with their algorithms; the same object if none has."""
    new, used = _rewritten(jaxpr, scope, regions.policy_map, regions.surrounding)
    regions.used.add(used)
    return jaxpr if new is None else new


@once_per_jaxpr
def _rewritten(jaxpr: Jaxpr, scope: str, *of_regions: Any) -> tuple[Jaxpr | None, Used]:
    """Returns a jaxpr with algorithms, None if it is the same, and what was met in it."""
    regions = Regions(*of_regions)

    def change(equation: Equation) -> Equation:
        params = _params(equation, core.scope_within(scope, equation), regions)
        return equation.replace(params={**equation.params, **params}) if params else equation

    new = with_equations(jaxpr, change)
    return None if new is jaxpr else new, regions.used
