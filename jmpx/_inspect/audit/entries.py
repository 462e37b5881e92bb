"""The operations of a program that a lock file holds, and in which dtypes they run.

These are where precision is lost or paid for: matrix products and convolutions, reductions, and
what loops carry. Maxima and minima round nothing. Of the operations of the backward pass a lock has
rows of their own, because a cast that was forgotten may change them alone.
"""

import functools

import numpy as np
from jax import lax

from jmpx._base.leaves import is_floating_dtype
from jmpx._inspect.audit.data import Entry
from jmpx._inspect.audit.flops import is_product
from jmpx._inspect.graph import Graph, Node

_REDUCTIONS = frozenset(
    """
    reduce reduce_sum reduce_prod reduce_window reduce_window_sum cumsum cumprod cumlogsumexp
    scatter_add scatter_sub scatter_mul select_and_scatter_add psum reduce_scatter
    """.split()
)
_DEVICES = {"psum_invariant": "psum", "psum2": "psum"}  # psum2 until JAX 0.8


def entries(graph: Graph) -> tuple[Entry, ...]:
    """Returns what a lock file holds of a program, each row once, with its first place."""
    found: dict[tuple[str, str, str], Entry] = {}
    for node in graph.nodes:
        operation = _DEVICES.get(node.name, node.name)
        if is_product(node):
            dtypes = _dtypes_of_product(node)
        elif operation in _REDUCTIONS or node.is_carry:
            floating = (v.dtype.name for v in node.operands if is_floating_dtype(v.dtype))
            dtypes = ", ".join(sorted(set(floating)))
        else:
            continue
        if node.is_backward:
            operation = f"{operation}, backward"
        key = lasting_scope(graph.path(node)), operation, dtypes
        if dtypes and key not in found:
            found[key] = Entry(*key, graph.place(node))
    return tuple(found.values())


def _dtypes_of_product(node: Node) -> str:
    """Returns the dtypes of a product, and an algorithm that holds for them; empty for integers."""
    # Sorted, because the backward pass of another JAX may swap the operands.
    operands = sorted(value.dtype.name for value in node.operands[:2])
    result = node.results[0].dtype
    if not any(is_floating_dtype(value.dtype) for value in (*node.operands[:2], *node.results)):
        return ""
    text = " x ".join(operands)
    if {result.name} != {*operands}:
        text += f" -> {result.name}"
    algorithm = _algorithm(node.eqn.params.get("precision"))
    is_wide = any(value.dtype.itemsize >= np.dtype(np.float32).itemsize for value in node.operands)
    return f"{text}, {algorithm}" if algorithm and is_wide else text


def _algorithm(precision: object) -> str:
    """Returns the name of an algorithm of products; an empty string for JAX's default."""
    names = []
    for each in precision if type(precision) is tuple else (precision,):
        name = "default" if each is None else getattr(each, "name", str(each))
        names.append(name.lower() if isinstance(each, lax.Precision) else name)
    names = list(dict.fromkeys(names))
    return "" if names in (["default"], ["DEFAULT"]) else " x ".join(names)


@functools.lru_cache(maxsize=4096)
def lasting_scope(path: str) -> str:
    """Returns a scope without the names that repeat those before them.

    What is transposed in a recomputation has its scope twice.
    """
    names: list[str] = []
    for name in path.split("/"):
        names.append(name)
        for count in range(1, len(names) // 2 + 1):
            if names[-count:] == names[-2 * count : -count]:
                del names[-count:]
                break
    return "/".join(names)
