"""Findings that depend on the platform: how it multiplies float32, and attention on a GPU."""

from collections.abc import Iterator

import numpy as np

from jmpx._inspect.audit.step import AuditedStep, FindingKind, UntriedFinding
from jmpx._inspect.audit.values import CAST, compute_dtype, flops, is_low, is_product
from jmpx._inspect.graph import Graph, Node, Value
from jmpx._inspect.text import bytes_text, count_text
from jmpx._inspect.where import where
from jmpx._remat.saving import is_batched_product

_PLATFORM = FindingKind("platform-product")
_ATTENTION = FindingKind("unfused-attention")
KINDS = (_PLATFORM, _ATTENTION)
# The dtype in which TPUs, and GPUs of NVIDIA since Ampere, multiply float32 by default.
MULTIPLIES_IN = {"tpu": "bfloat16", "gpu": "TF32"}
DIGITS = {"bfloat16": 8, "TF32": 11}  # of a factor, in bits; float32 has 24


def search(step: AuditedStep) -> Iterator[UntriedFinding]:
    """Yields `platform-product` for a TPU or a GPU, and `unfused-attention` for a GPU.

    The products of a backward pass follow those of the forward pass, on whose lines they are found.
    """
    if step.platform in MULTIPLIES_IN:
        yield from _products(step, MULTIPLIES_IN[step.platform])
    for node in step.graph.nodes if step.platform == "gpu" else ():
        if not node.is_backward and _is_low_batched(node) and _meets_softmax(node):
            size = node.times * node.results[0].nbytes
            text = f"An attention writes its scores, {bytes_text(size)}: cuDNN's kernel does not."
            advice = "jax.nn.dot_product_attention(q, k, v, implementation='cudnn')"
            yield step.found(_ATTENTION, "low", node, text, advice, nbytes=size)


def _products(step: AuditedStep, inside: str) -> Iterator[UntriedFinding]:
    products = [node for node in step.graph.nodes if is_product(node)]
    forward = [node for node in products if not node.is_backward]
    # Float32 products for which neither the code nor a policy says how to multiply.
    found = [
        node
        for node in forward
        if all(value.dtype == np.float32 for value in node.operands[:2])
        and node.eqn.params["precision"] is None
    ]
    bits = f"in {inside}, whose factors keep {DIGITS[inside]} of 24 bits"
    if found and not any(is_low(value) for node in products for value in node.operands):
        # One rule mends all products of a model in float32: one finding, of no scope.
        count, total = sum(node.times for node in found), sum(map(flops, found))
        text = f"The hardware multiplies {count_text(count, 'float32 product')} {bits}."
        advice = "matmul=highest in the default policy, or jax.default_matmul_precision('highest')"
        one = step.found(_PLATFORM, "high", found[0], text, advice, count=count, flops=total)
        yield one._replace(finding=one.finding._replace(scope=""))
        return
    for node in found:
        policy, selector = step.graph.policy(node), step.graph.selector(node)
        is_full = bool(policy) and compute_dtype(policy) == np.float32
        is_asked = is_full or where(node.scope).is_full
        why = ", though a rule asks for float32" if is_asked else ""
        text = f"The hardware multiplies this float32 product {bits}{why}."
        rules = () if selector is None else (f"{selector}: m=highest",)
        advice, severity = "precision='highest' of the product", "high" if is_asked else "low"
        yield step.found(_PLATFORM, severity, node, text, advice, *rules, flops=flops(node))


def _is_low_batched(node: Node) -> bool:
    """Whether a node is a matrix product with dimensions of a batch, of operands in 16 bits."""
    is_batched = not node.is_structure and is_batched_product(node.eqn)
    return is_batched and all(map(is_low, node.operands[:2]))


def _meets_softmax(node: Node) -> bool:
    """Whether exponentials of a product are summed, and reach the next product, also batched."""

    def through(node: Node) -> list[Value]:
        return [] if node.is_backward or is_product(node) else node.results

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
