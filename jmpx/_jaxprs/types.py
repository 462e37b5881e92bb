"""Names for types of JAX that are not public, or not the same in all supported versions."""

from typing import Any, TypeAlias

# JAX has no public types that all supported versions share: since 0.11, open and closed jaxprs are
# one class; and the public type of an operand does not know that arrays have dtypes.
Jaxpr: TypeAlias = Any
Equation: TypeAlias = Any
Atom: TypeAlias = Any  # an operand or a result of an equation: a variable or a literal
Aval: TypeAlias = Any  # an abstract array: a shape, a dtype and more
Primitive: TypeAlias = Any
Array: TypeAlias = Any  # of JAX or NumPy, or what stands for one, such as a tracer
Params: TypeAlias = dict[str, Any]  # the parameters of an equation
NameStack: TypeAlias = Any
Scopes: TypeAlias = tuple[Any, ...]  # what a name stack holds


def is_jaxpr(value: object) -> bool:
    """Whether something is a jaxpr, closed or open."""
    return hasattr(value, "eqns")
