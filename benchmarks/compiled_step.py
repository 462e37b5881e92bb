"""Counts what a train step compiles to, as a line of JSON.

    python benchmarks/compiled_step.py --implementation=jmpx --dtype=float16 --layers=12

The model is a vision transformer (`models.py`), the optimizer Adam, the step one of `steps.py`; the
state is donated. A line counts the instructions of the optimized HLO; the operations of its entry
computation, which run one by one (`entry_ops`); copies and converts; the bytes that XLA says it
accesses, and those that it holds besides arguments and results (`temp_bytes`). All of these are the
same on every machine with one backend, one version of JAX and one number of cores. Times are those
of the processor (`time.process_time`), over all threads: of tracing, and of compiling in XLA.
"""

import re
import time
from typing import Any

import records
import steps
from models import ViT
from steps import Point

INSTRUCTION = re.compile(r"^  +(?:ROOT )?\S+ = (?:\(.*?\)|\S+) ([\w-]+)\(", re.MULTILINE)


def count(hlo: str) -> dict[str, int]:
    """Counts the instructions of an HLO module, given as text."""
    names = INSTRUCTION.findall(hlo)
    entry = hlo[hlo.index("\nENTRY ") :]
    return {
        "instructions": len(names),
        "entry_ops": len(INSTRUCTION.findall(entry[: entry.index("\n}")])),
        "copies": names.count("copy"),
        "converts": names.count("convert"),
    }


def counts(compiled: Any) -> dict[str, int]:
    """Returns all that is counted of a compiled step."""
    return {
        **count(compiled.as_text()),
        "bytes_accessed": int(compiled.cost_analysis()["bytes accessed"]),
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
    }


def measure(point: Point, layers: int, batch: int) -> dict[str, Any]:
    """Compiles one step and returns its counts and times."""
    start = time.process_time()
    lowered = steps.trace(point, ViT(layers), batch).step.lower()
    traced = time.process_time()
    compiled = lowered.compile()
    seconds = {"trace_cpu_s": traced - start, "compile_cpu_s": time.process_time() - traced}
    return counts(compiled) | {name: round(value, 2) for name, value in seconds.items()}


def main(arguments: list[str] | None = None) -> None:
    parser = records.parser(__doc__)
    parser.add_argument("--implementation", choices=steps.IMPLEMENTATIONS, default="jmpx")
    parser.add_argument("--dtype", choices=steps.DTYPES, default="float16")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=8, help="images in a batch")
    args = parser.parse_args(arguments)
    point = Point(args.implementation, args.dtype)
    fields = {**point._asdict(), "layers": args.layers, "batch": args.batch}
    records.emit("compiled_step", **fields, **measure(point, args.layers, args.batch))


if __name__ == "__main__":
    main()
