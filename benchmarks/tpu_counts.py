"""Counts of what the compiler of TPUs made of a function, which `tpu.compiled` compiles."""

from typing import Any

import compiled_step
import tpu_matmul


def counts(hlo: str) -> dict[str, int]:
    """Counts the instructions of optimized HLO, given as text; those inside of fusions, too.

    A `copy` changes a layout or gives an array another buffer. A `copy-start` fetches an array into
    the fast memory of the chip beforehand: `fetches`.
    """
    names = compiled_step.INSTRUCTION.findall(hlo)
    return {
        **compiled_step.count(hlo),
        "fusions": names.count("fusion"),
        "fetches": names.count("copy-start"),
    }


def dots(hlo: str) -> dict[str, int]:
    """Counts the products of optimized HLO by the dtypes of their operands: `bf16 x bf16`."""
    found: dict[str, int] = {}
    for product in tpu_matmul.read_products(hlo):
        key = product.dtypes.partition(" -> ")[0]
        found[key] = found.get(key, 0) + 1
    return dict(sorted(found.items()))


def measure(compiled: Any) -> dict[str, Any]:
    """Returns what a compiled function costs, by its text and by the compiler's own analysis.

    XLA's analysis counts the body of a loop once.
    """
    hlo, costs = compiled.as_text(), compiled.cost_analysis()
    return {
        **counts(hlo),
        "dots": dots(hlo),
        "peak_mib": round(compiled.memory_analysis().peak_memory_in_bytes / 2**20, 1),
        "gflop": round(costs["flops"] / 1e9, 2),
        "mib_accessed": round(costs["bytes accessed"] / 2**20, 1),
    }
