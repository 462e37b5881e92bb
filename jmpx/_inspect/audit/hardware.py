"""Findings: float32 products that the hardware multiplies in fewer bits."""

from collections.abc import Iterator

import numpy as np

from jmpx._base.text import count_text
from jmpx._inspect.audit.data import Finding
from jmpx._inspect.audit.flops import flops, is_product
from jmpx._inspect.audit.low_values import LOW
from jmpx._inspect.audit.options import Options
from jmpx._inspect.graph import Graph, Node
from jmpx._policies.places import where
from jmpx._policies.strings import get_policy

# In what a platform multiplies float32 by default: a TPU, and GPUs of NVIDIA since Ampere.
MULTIPLIES_IN = {"tpu": "bfloat16", "gpu": "TF32"}
DIGITS = {"bfloat16": 8, "TF32": 11}  # of a factor, in bits; float32 has 24


def hardware(graph: Graph, options: Options) -> Iterator[Finding]:
    """Yields `platform-product`, if a platform is given.

    The products of a backward pass follow those of the forward pass, on whose lines they are found.
    """
    inside = MULTIPLIES_IN.get(options.platform or "")
    products = [node for node in graph.nodes if is_product(node)]
    found = [node for node in products if not node.is_backward and _is_left_to_hardware(node)]
    if inside is None or not found:
        return
    bits = f"whose factors keep {DIGITS[inside]} of 24 bits"
    if not any(value.dtype in LOW for node in products for value in node.operands):
        count = sum(node.times for node in found)
        told = count_text(count, "float32 product")
        # One rule mends all of a model in float32, so that it is one finding.
        yield Finding(
            "platform-product",
            "high",
            f"The hardware multiplies {told} in {inside}, {bits}.",
            graph.place(found[0]),
            "",
            "matmul=highest in the default policy, or jax.default_matmul_precision('highest')",
            count=count,
            flops=sum(map(flops, found)),
        )
        return
    for node in found:
        yield _product(graph, node, f"multiplies this float32 product in {inside}, {bits}")


def _is_left_to_hardware(node: Node) -> bool:
    """Whether a product is in float32, and neither it nor a policy says how to multiply."""
    is_full = all(value.dtype == np.float32 for value in node.operands[:2])
    return is_full and node.eqn.params["precision"] is None


def _product(graph: Graph, node: Node, what: str) -> Finding:
    policy, selector = graph.policy(node), graph.selector(node)
    is_asked = where(node.scope).is_full or (
        bool(policy) and get_policy(policy).compute_dtype == np.float32
    )
    why = ", though a rule asks for float32" if is_asked else ""
    return Finding(
        "platform-product",
        "high" if is_asked else "low",
        f"The hardware {what}{why}.",
        graph.place(node),
        graph.path(node),
        f"{selector}: m=highest" if selector else "precision='highest' of the product",
        count=node.times,
        flops=flops(node),
    )
