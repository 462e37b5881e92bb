"""What the findings about 16 bits ask of values and nodes."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jmpx._inspect.audit.flops import is_product
from jmpx._inspect.graph import Graph, Node, Value
from jmpx._jaxprs.marks import Module
from jmpx._policies.places import modules_of, where

LOW = frozenset(map(np.dtype, (jnp.float16, jnp.bfloat16)))

# What changes neither a number nor its order of magnitude, each with the array as first operand.
VIEWS = frozenset(
    """
    broadcast_in_dim convert_element_type copy copy_p device_put mesh_cast name pbroadcast pcast
    pvary reduce_precision reshape reshard rev sharding_constraint squeeze stop_gradient transpose
    """.split()
)
# Operations that move numbers and compute none.
MOVES = frozenset(
    """
    broadcast_in_dim reshape transpose squeeze expand_dims rev slice copy copy_p dynamic_slice
    gather name stop_gradient optimization_barrier device_put stack result shard unshard
    """.split()
)
_SHARDS = frozenset({"shard", "unshard"})


def is_low(value: Value) -> bool:
    """Whether a value has 16 bits."""
    return value.dtype in LOW


def low_dtype(node: Node) -> np.dtype | None:
    """Returns the 16-bit dtype of a node's first operand that has one; None if none has."""
    return next((value.dtype for value in node.operands if is_low(value)), None)


def largest_count(dtype: np.dtype) -> int:
    """Returns up to which number a dtype holds all integers: 256 for bfloat16, 2048 for float16.

    A sum in that dtype that is as large does not change when 1 is added.
    """
    return 2 ** (int(jnp.finfo(dtype).nmant) + 1)


def digits(dtype: np.dtype) -> str:
    """Returns how many decimal digits a dtype keeps, in words."""
    return "2 to 3 digits" if dtype == jnp.bfloat16 else "3 to 4 digits"


def is_view(node: Node) -> bool:
    """Whether a node returns the numbers of its first operand, in another shape or dtype."""
    return node.name in (_SHARDS if node.is_structure else VIEWS)


def source(value: Value) -> Value:
    """Returns the value whose numbers a value has: casts, copies and shapes are left out."""
    while value.node is not None and is_view(value.node):
        value = value.node.operands[0]
    return value


def number(value: Value) -> float | None:
    """Returns a number that is known when a program is traced, such as `1 - 0.9`; else None."""
    value = source(value)
    if value.node is None:
        is_real = any(jnp.issubdtype(value.dtype, kind) for kind in (jnp.floating, jnp.integer))
        constant: Any = value.constant if is_real and value.size == 1 else None
        return None if constant is None else float(np.asarray(constant).reshape(()))
    if value.node.name not in ("sub", "add") or value.node.is_structure:
        return None
    left, right = (source(operand) for operand in value.node.operands)
    if left.node is not None or right.node is not None:
        return None
    a, b = number(left), number(right)
    if a is None or b is None:
        return None
    return a - b if value.node.name == "sub" else a + b


def scopes_of_products(graph: Graph) -> set[str]:
    """Returns the paths of the modules that multiply matrices, and of all around them."""
    paths: set[str] = set()
    for scope in {node.scope for node in graph.nodes if is_product(node)}:
        path = where(scope).path
        while path and path not in paths:
            paths.add(path)
            path = path.rpartition("/")[0]
    return paths


def modules_with_parts(graph: Graph) -> set[Module]:
    """Returns the modules that hold others, to which a rule for them would extend."""
    scopes = {node.scope for node in graph.nodes}
    return {each for scope in scopes for each in modules_of(scope) if each != where(scope).module}


def full_rule(graph: Graph, node: Node, with_products: set[str]) -> str | None:
    """Returns the policy map rule that computes the module of a node in float32.

    Args:
        graph: the graph.
        node: the node.
        with_products: the result of `scopes_of_products`.

    Returns:
        The rule; None outside of modules, and for a module with products, which would slow down.
    """
    module = where(node.scope).module
    if module is None or (module.path or module.cls.__name__) in with_products:
        return None
    selector = graph.selector(node)
    return None if selector is None else f"{selector}: full"


def full_rule_or(graph: Graph, node: Node, with_products: set[str], advice: str) -> str:
    """Returns `full_rule`, or advice: what to do in the code."""
    return full_rule(graph, node, with_products) or advice
