"""What travels between devices, from StableHLO."""

import math
import re

KINDS = ("all_gather", "reduce_scatter", "all_reduce")
_BYTES = {"f16": 2, "bf16": 2, "f32": 4, "f64": 8}


def collectives(text, kind):
    """The dtypes and numbers of elements of the whole arrays of a kind, scalars left out.

    That is what a gather makes, and what a reduction takes.
    """
    found = re.findall(
        rf'"stablehlo\.{kind}".*?: \(tensor<([^>]*)>\) -> tensor<([^>]*)>', text, re.DOTALL
    )
    types = [(after if kind == "all_gather" else before).split("x") for before, after in found]
    return [(shape[-1], math.prod(map(int, shape[:-1]))) for shape in types if shape[:-1]]


def wire_bytes(text, devices):
    """The bytes that each device of a ring sends, by kind."""
    sent = {}
    for kind in KINDS:
        total = sum(_BYTES[dtype] * size for dtype, size in collectives(text, kind))
        sent[kind] = (2 if kind == "all_reduce" else 1) * total * (devices - 1) // devices
    return sent
