"""Searches through jaxprs."""

import re

import jax

# Operands of a matrix product, as `dots` spells them.
LOW, FULL = "bfloat16xbfloat16", "float32xfloat32"


def equations(jaxpr):
    """All equations of a jaxpr, with those of the functions that its equations carry."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def trace(f, *args):
    """A function's jaxpr, traced anew: JAX would give back what it knows of the same function."""
    return jax.make_jaxpr(lambda *args: f(*args))(*args)


def program(f, *args):
    """The text of a function's jaxpr, traced anew, without the addresses of Python's objects."""
    return re.sub("0x[0-9a-f]+", "", str(trace(f, *args)))


def equations_of(f, *args):
    """All equations of a function, those of inner functions too."""
    return list(equations(jax.make_jaxpr(f)(*args)))


def dots(f, *args):
    """The operand dtypes of all matrix products of a function, in their order."""
    products = [eqn for eqn in equations_of(f, *args) if eqn.primitive.name == "dot_general"]
    return ["x".join(var.aval.dtype.name for var in eqn.invars) for eqn in products]


def stacks(jaxpr):
    """The name stacks of all equations."""
    return [str(eqn.source_info.name_stack) for eqn in equations(jaxpr)]
