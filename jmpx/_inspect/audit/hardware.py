"""Findings: float32 products that the hardware multiplies in fewer bits."""

from collections.abc import Iterator

import numpy as np

from jmpx._inspect.audit.flops import flops, is_product
from jmpx._inspect.audit.step import Found, Kind, Step
from jmpx._inspect.audit.values import compute_dtype, is_low
from jmpx._inspect.graph import Node
from jmpx._inspect.text import count_text
from jmpx._inspect.where import where

_PLATFORM = Kind("platform-product")
KINDS = (_PLATFORM,)
# In what a platform multiplies float32 by default: a TPU, and GPUs of NVIDIA since Ampere.
MULTIPLIES_IN = {"tpu": "bfloat16", "gpu": "TF32"}
DIGITS = {"bfloat16": 8, "TF32": 11}  # of a factor, in bits; float32 has 24


def search(step: Step) -> Iterator[Found]:
    """Yields `platform-product`, if a platform is given.

    The products of a backward pass follow those of the forward pass, on whose lines they are found.
    """
    inside = MULTIPLIES_IN.get(step.platform or "")
    products = [node for node in step.graph.nodes if is_product(node)]
    found = [node for node in products if not node.is_backward and _is_left_to_hardware(node)]
    if inside is None or not found:
        return
    bits = f"in {inside}, whose factors keep {DIGITS[inside]} of 24 bits"
    if any(is_low(value) for node in products for value in node.operands):
        yield from (_product(step, node, bits) for node in found)
        return
    # One rule mends all of a model in float32, so that it is one finding, of no scope.
    count, total = sum(node.times for node in found), sum(map(flops, found))
    text = f"The hardware multiplies {count_text(count, 'float32 product')} {bits}."
    advice = "matmul=highest in the default policy, or jax.default_matmul_precision('highest')"
    one = step.found(_PLATFORM, "high", found[0], text, advice, count=count, flops=total)
    yield one._replace(finding=one.finding._replace(scope=""))


def _is_left_to_hardware(node: Node) -> bool:
    """Whether a product is in float32, and neither it nor a policy says how to multiply."""
    is_full = all(value.dtype == np.float32 for value in node.operands[:2])
    return is_full and node.eqn.params["precision"] is None


def _product(step: Step, node: Node, bits: str) -> Found:
    policy, selector = step.graph.policy(node), step.graph.selector(node)
    is_asked = where(node.scope).is_full or (bool(policy) and compute_dtype(policy) == np.float32)
    why = ", though a rule asks for float32" if is_asked else ""
    return step.found(
        _PLATFORM,
        "high" if is_asked else "low",
        node,
        f"The hardware multiplies this float32 product {bits}{why}.",
        "precision='highest' of the product",
        *([f"{selector}: m=highest"] if selector else ()),
        flops=flops(node),
    )
