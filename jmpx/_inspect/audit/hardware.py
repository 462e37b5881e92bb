"""Findings that depend on the platform: how it multiplies float32, and attention on GPUs."""

from collections.abc import Iterator

import numpy as np

from jmpx._inspect.audit.step import AuditedStep, UntriedFinding
from jmpx._inspect.audit.values import CAST
from jmpx._inspect.graph import Graph, Node, Value, where
from jmpx._inspect.text import bytes_text, count_text
from jmpx._remat.saving import is_batched_product

_PLATFORM = "platform-product"
KINDS = dict.fromkeys((_PLATFORM, "unfused-attention"))
# The dtype in which TPUs, and GPUs of NVIDIA since Ampere, multiply float32 by default.
MULTIPLIES_IN = {"tpu": "bfloat16", "gpu": "TF32"}
DIGITS = {"bfloat16": 8, "TF32": 11}  # of a factor, in bits; float32 has 24


def search(step: AuditedStep) -> Iterator[UntriedFinding]:
    """Yields `platform-product` for a TPU or a GPU, and `unfused-attention` for a GPU.

    Products of a backward pass are reported with those of the forward pass, which cause them.
    """
    if step.platform in MULTIPLIES_IN:
        yield from _products(step, MULTIPLIES_IN[step.platform])
    for node in step.graph.nodes if step.platform == "gpu" else ():
        if not node.is_backward and _is_low_batched(node) and _meets_softmax(node):
            size = node.times * node.results[0].nbytes
            text = f"An attention writes its scores, {bytes_text(size)}: cuDNN's kernel does not."
            advice = "jax.nn.dot_product_attention(q, k, v, implementation='cudnn')"
            yield step.found("unfused-attention", "low", node, text, advice, nbytes=size)


def _products(step: AuditedStep, inside: str) -> Iterator[UntriedFinding]:
    products = [node for node in step.graph.nodes if node.is_product]
    forward = [node for node in products if not node.is_backward]
    # Float32 products without a precision, from the code or from a policy.
    found = [
        node
        for node in forward
        if all(value.dtype == np.float32 for value in node.operands[:2])
        and node.eqn.params["precision"] is None
    ]
    bits = f"in {inside}, whose factors keep {DIGITS[inside]} of 24 bits"
    if found and not any(value.is_low for node in products for value in node.operands):
        # One rule fixes all products of a float32 model: one finding, outside of scopes.
        count, total = sum(node.times for node in found), sum(each.flops for each in found)
        text = f"The hardware multiplies {count_text(count, 'float32 product')} {bits}."
        advice = "matmul=highest in the default policy, or jax.default_matmul_precision('highest')"
        one = step.found(_PLATFORM, "high", found[0], text, advice, count=count, flops=total)
        yield one._replace(finding=one.finding._replace(scope=""))
        return
    for node in found:
        selector, is_full = node.selector, step.graph.compute_dtype(node) == np.float32
        is_asked = is_full or where(node.scope).is_full
        why = ", though a rule asks for float32" if is_asked else ""
        text = f"The hardware multiplies this float32 product {bits}{why}."
        rules = () if selector is None else (f"{selector}: m=highest",)
        advice, severity = "precision='highest' of the product", "high" if is_asked else "low"
        yield step.found(_PLATFORM, severity, node, text, advice, *rules, flops=node.flops)


def _is_low_batched(node: Node) -> bool:
    """Whether a node is a batched matrix product of 16-bit operands."""
    is_batched = not node.is_structure and is_batched_product(node.eqn)
    return is_batched and all(each.is_low for each in node.operands[:2])


def _meets_softmax(node: Node) -> bool:
    """Whether exponentials of a product are summed, and reach another batched product."""

    def through(node: Node) -> list[Value]:
        return [] if node.is_backward or node.is_product else node.results

    readers = Graph.forward(node.results, through)
    summed = [node for node in readers if node.name == "exp" and _is_summed(node)]
    values = [value for node in summed if not node.is_backward for value in node.results]
    behind = (node for node in Graph.forward(values, through) if not node.is_backward)
    return any(map(_is_low_batched, behind))


def _is_summed(node: Node) -> bool:
    """Whether the results of a node, or casts of them, are summed."""
    readers = [reader for value in node.results for reader in value.readers]
    casts = [reader for reader in readers if reader.name == CAST]
    return any(reader.name == "reduce_sum" for reader in readers) or any(map(_is_summed, casts))
