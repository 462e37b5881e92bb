"""Counts what scaling, checking and skipping add to a train step on a TPU v5e, without the chip.

    pip install -e '.[bench,tpu]'
    python benchmarks/tpu_overhead.py --again

The model is the one of `compiled_step.py`, the step one of `steps.py`, in bfloat16, in which a v5e
computes, with the dynamic loss scale that float16 needs. A line has the counts of that script, the
fusions, the conditionals and the peak of memory. `plain` neither scales nor checks nor skips.
"""

import time
from typing import Any

import compiled_step
import records
import steps
import tpu
from models import ViT
from steps import Point

SCALED = "bfloat16_scaled"
WAYS = {
    "plain": Point("handwritten", "bfloat16"),
    "handwritten where": Point("handwritten", SCALED),
    "handwritten cond": Point("handwritten_cond", SCALED),
    "jmpx": Point("jmpx", SCALED),
    "jmpx where": Point("jmpx_where", SCALED),
    "jmpx cond": Point("jmpx_cond", SCALED),
    "jmp": Point("jmp", SCALED),
    "mpx": Point("mpx", SCALED),
}


def lowered(way: str, layers: int, batch: int, chip: Any = None) -> Any:
    """Lowers a step for a TPU, which may be absent."""
    traced = steps.trace(WAYS[way], ViT(layers), batch, sharding=chip).step
    return traced.lower(lowering_platforms=("tpu",))


def measure(way: str, layers: int, batch: int, **_: Any) -> records.Record:
    """Compiles one step for one chip."""
    step = lowered(way, layers, batch, tpu.chip())
    start = time.process_time()
    compiled = step.compile()
    seconds = round(time.process_time() - start, 2)
    hlo = compiled.as_text()
    return {
        **compiled_step.counts(compiled),
        "fusions": hlo.count(" fusion("),
        "conditionals": hlo.count(" conditional("),
        "peak_bytes": compiled.memory_analysis().peak_memory_in_bytes,
        "compile_cpu_s": seconds,
        **tpu.target(),
    }


POINTS = [{"way": way, "dtype": "bfloat16", "layers": 12, "batch": 64} for way in WAYS]

if __name__ == "__main__":
    out = records.RESULTS / "tpu_overhead.jsonl"
    records.main(__doc__, {"tpu_overhead": (POINTS, measure)}, out=out)
