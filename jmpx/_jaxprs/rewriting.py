"""Changes the equations of jaxprs, and the jaxprs in their parameters."""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jmpx._jaxprs import core
from jmpx._jaxprs.core import is_literal
from jmpx._jaxprs.marks import Atom, Aval, Equation, Jaxpr, Params, is_jaxpr


def with_equations(jaxpr: Jaxpr, change: Callable[[Equation], Equation]) -> Jaxpr:
    """Returns a jaxpr, closed or open, with changed equations; the same object if none changed."""
    return holding(jaxpr, [change(eqn) for eqn in jaxpr.eqns])


def holding(jaxpr: Jaxpr, eqns: Sequence[Equation]) -> Jaxpr:
    """Returns a jaxpr with other equations; the same object if they are the ones it has."""
    is_same = len(eqns) == len(jaxpr.eqns) and all(map(operator.is_, eqns, jaxpr.eqns))
    return jaxpr if is_same else replaced(jaxpr, eqns=list(eqns))


def renamed(atoms: Sequence[Atom], names: Mapping[Atom, Atom]) -> list[Atom]:
    """Returns operands or results with some variables replaced."""
    return [atom if is_literal(atom) else names.get(atom, atom) for atom in atoms]


def replaced(jaxpr: Jaxpr, **fields: object) -> Jaxpr:
    """Returns a jaxpr, closed or open, with other fields, such as `eqns`."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)  # of a closed one, until JAX 0.11
    if "invars" in fields:  # the old names belong to other operands
        fields["debug_info"] = inner.debug_info._replace(arg_names=None, result_paths=None)
    new = inner.replace(**fields)
    return new if inner is jaxpr else jaxpr.replace(jaxpr=new)


def with_jaxprs(params: Params, change: Callable[[Jaxpr], Jaxpr]) -> Params:
    """Returns an equation's parameters with changed jaxprs, also in tuples.

    Returns the same object if no jaxpr changed.
    """

    def changed(value: object) -> object:
        if isinstance(value, tuple):  # or a named tuple, as in custom_linear_solve
            new = list(map(changed, value))
            is_new = any(a is not b for a, b in zip(new, value, strict=True))
            return getattr(value, "_make", tuple)(new) if is_new else value
        return change(value) if is_jaxpr(value) else value

    new = {key: changed(value) for key, value in params.items()}
    return new if any(new[key] is not params[key] for key in params) else params


def new_variable(aval: Aval) -> Atom:
    """Returns a variable that no jaxpr has."""
    return type(_cast().outvars[0])(aval)


def casting(atom: Atom, var: Atom, at: Equation | None = None) -> Equation:
    """Returns an equation that casts an operand to the dtype of a variable, placed like `at`."""
    params = {**_cast().params, "new_dtype": var.aval.dtype}
    place = {} if at is None else {"source_info": at.source_info, "ctx": at.ctx}
    return _cast().replace(invars=[atom], outvars=[var], params=params, **place)


@functools.cache
def _cast() -> Equation:
    return jax.make_jaxpr(lambda x: x.astype(np.float16))(np.float32(0)).eqns[-1]


# Products of bfloat16 with float32 results, which XLA:CPU compiles, but cannot always run.
#
# In JAX 0.7 to 0.12 some fail with "Unsupported element type for DotThunk: BF16 x BF16 = F32" if
# their result is transposed; products with batch axes or of float16 do not.


def may_fail(product: Equation) -> bool:
    """Whether XLA:CPU may fail when it runs a product whose result is in float32."""
    if product.primitive.name != "dot_general" or product.invars[0].aval.dtype != jnp.bfloat16:
        return False
    _, (batch, _) = product.params["dimension_numbers"]
    return not batch


def by_platform(product: Equation) -> list[Equation]:
    """Returns the equations that run a product, with operands cast to float32 on a CPU."""
    index, cond = _platforms(jax.sharding.get_abstract_mesh()).eqns
    place = {"source_info": product.source_info, "ctx": product.ctx}

    def like(atoms: Sequence[Atom]) -> list[Atom]:
        return [new_variable(atom.aval) for atom in atoms]

    def branch(jaxpr: Jaxpr, is_cast: bool) -> Jaxpr:
        given, results = like(product.invars), like(product.outvars)
        wide = [core.with_dtype(var.aval, np.dtype(np.float32)) for var in given]
        operands = list(map(new_variable, wide)) if is_cast else given
        eqns = [casting(*pair, product) for pair in zip(given, operands, strict=True) if is_cast]
        eqns.append(product.replace(invars=operands, outvars=results))
        return replaced(jaxpr, invars=given, outvars=results, eqns=eqns)

    on_cpu, elsewhere = cond.params["branches"]
    params = {**cond.params, "branches": (branch(on_cpu, True), branch(elsewhere, False))}
    platform = like(index.outvars)
    return [
        index.replace(outvars=platform, **place),
        cond.replace(
            invars=[*platform, *product.invars], outvars=product.outvars, params=params, **place
        ),
    ]


@functools.cache
def _platforms(mesh: object) -> Jaxpr:
    """Returns a jaxpr with one branch for a CPU and another for all else, under this mesh."""
    run = functools.partial(jax.lax.platform_dependent, cpu=jnp.sin, default=jnp.cos)
    return jax.make_jaxpr(run)(np.float32(0))
