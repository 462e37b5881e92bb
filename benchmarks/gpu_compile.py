"""Compiles train steps for NVIDIA's H100 and A100, without a GPU, and records what they need.

    pip install --no-deps --target=DIR $(python benchmarks/gpu.py)     # once, 573 MB
    PYTHONPATH=DIR JAX_PLATFORMS=cpu python benchmarks/gpu_compile.py  # the points that are missing
    PYTHONPATH=DIR JAX_PLATFORMS=cpu python benchmarks/gpu_compile.py --only float16

The folder is apart from the environment, in which JAX would look for a driver. A point takes some
ten seconds of a core. The optimizer is Adam; the state is donated. A line has the fields of
`tpu_compile.py` that this compiler knows, and

- kernels: what runs by itself, the body of a loop once for each of its turns;
- estimate_ms: XLA's estimate for an H100, for ratios at most (`compiled_step.py` says of what), and
  not_estimated: what is not in it.

Autotuning and Triton's products are off, so fusions differ from those of a real run.
"""

import functools
from typing import Any

import fsdp
import gpu
import jax
import jax.numpy as jnp
import records
from compiled_step import Program, clocked, mib_by_kind, sends
from model_steps import Point, trace
from records import Record, table
from tpu_compile import CARRIES, MARKED, WAYS, counts

import jmpx

RESULTS = records.RESULTS / "gpu_compile.jsonl"
ALL_DOTS = "by hand, marked blocks, all dots"
PEERS = ("JMP", "MPX", "gradient functions")
FEW = ("float32", "by hand", MARKED[0], "autocast, save")
MAIN = (*FEW, "autocast, save attention", "autocast", *MARKED[1:], "by hand, low scores", ALL_DOTS)
BY_ARGUMENTS = ("arguments, save", "arguments, save mixed", "arguments, save attention")
WRITTEN_OUT = (*MAIN, "autocast, save mixed", *BY_ARGUMENTS)
WIDE = ("gradient functions", "gradient functions, r=f32")
SKIPS = ("by hand", "by hand, cond", *(f"gradient functions, {by}" for by in ("where", "cond")))

# Chip, model, layers, batch, whether scanned, dtype, ways, and what these points show.
GROUPS: list[tuple[str, str, int, int, bool, str, tuple[str, ...], str]] = [
    ("H100", "vit", 4, 64, False, "bfloat16", (*WRITTEN_OUT, *PEERS), "memory against time"),
    ("H100", "vit", 4, 64, False, "float16", (*SKIPS, *PEERS), "what scaling and skipping add"),
    ("H100", "vit", 2, 2, False, "float16", (*SKIPS, PEERS[-1]), "where the state dominates"),
    ("H100", "vit", 12, 64, True, "bfloat16", (*MAIN, *CARRIES), "what a scan keeps"),
    ("H100", "long_byte_model", 4, 16, False, "bfloat16", WRITTEN_OUT, "1,024 tokens"),
    ("H100", "vit", 4, 64, False, "bfloat16", WIDE[1:], "what float32 gradients cost"),
    ("H100", "long_byte_model", 4, 16, False, "bfloat16", WIDE, "as ViT's"),
    ("A100", "vit", 4, 64, False, "bfloat16", MAIN[:6], "without estimates"),
]
KEY = ("chip", "model", "layers", "batch", "scanned", "dtype")


def points() -> list[Record]:
    """Returns the fields of the points of train steps."""
    found = ((*group, way) for *group, ways, _ in GROUPS for way in ways)
    return [dict(zip((*KEY, "way"), values, strict=True)) for values in found]


def compiled(make: Any, chip: str) -> Record:
    """Compiles what a function traces, and returns what was found."""
    program, spent = clocked(make, "cuda", **gpu.OPTIONS[chip])
    hlo, memory = program.as_text(), program.memory_analysis()
    found, sent = Program(hlo), mib_by_kind(sends(hlo))
    milliseconds, untimed = found.estimate()
    guess = {"estimate_ms": milliseconds, "not_estimated": untimed} if chip == "H100" else {}
    return {
        "status": "ok",
        "peak_mib": memory.peak_memory_in_bytes / 2**20,
        "arguments_mib": memory.argument_size_in_bytes / 2**20,
        **guess,
        "kernels": sum(times for _, times in found.kernels()),
        **counts(hlo),
        "products": jmpx.inspect.compiled(hlo).counts(),
        "collectives": sent,
        **spent,
        **gpu.compiler(chip),
    }


def measure(chip: str, small: bool = False, **fields: Any) -> Record:
    return compiled(lambda: trace(Point(**fields), gpu.devices(chip), small), chip)


def measure_fsdp(way: str, small: bool = False) -> Record:
    """Compiles a step that eight H100 share, which is small in any case."""
    eight = gpu.devices("H100", fsdp.DEVICES)
    return compiled(lambda: fsdp.prepare(way, fsdp.problem(), eight).traced, "H100")


def measure_product(dtypes: list[str], small: bool = False) -> Record:
    """Compiles a product of two dtypes, which returns bfloat16."""
    on, size = gpu.on(), 256 if small else 4096
    arrays = [jax.ShapeDtypeStruct((size, size), dtype, sharding=on) for dtype in dtypes]
    product = functools.partial(jax.lax.dot, preferred_element_type=jnp.bfloat16)
    found = compiled(lambda: jax.jit(product).trace(*arrays), "H100")
    return found | ({"estimate_ms": None} if E4M3 in dtypes else {})  # XLA's is not possible


E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
PAIRS = (["bfloat16"] * 2, [E4M3] * 2, [E4M3, E5M2])
BENCHMARKS: records.Benchmarks = {
    "gpu_compile": (points(), measure),
    "gpu_fsdp": ([{"way": way} for way in fsdp.WAYS], measure_fsdp),
    "gpu_products": ([{"dtypes": pair} for pair in PAIRS], measure_product),
}


# --- Tables, which `report.py` writes into the pages ---

NAMES = WAYS | {
    "by hand": "by hand, scores scaled in float32",
    "by hand, low scores": "by hand, scores scaled in 16 bits",
    "by hand, marked blocks": "by hand, blocks marked `dots_with_no_batch_dims_saveable`",
    "by hand, marked blocks, all dots": "by hand, blocks marked `dots_saveable`",
    "by hand, cond": "by hand, `cond`",
    "gradient functions, where": 'jmpx, `skip_by="where"`',
    "gradient functions, cond": 'jmpx, `skip_by="cond"`',
}
MODELS = {"vit": "ViT of width 768", "long_byte_model": "language model of 1,024 tokens"}
NUMBERS = "peak, MiB", "over by hand", "estimate, ms", "over by hand", "kernels", "compile, s"
VISITED = ("float32", "by hand", "MPX", "autocast")
VISITED += ("by hand, marked blocks", "autocast, save")
VISITED += ("by hand, marked blocks, all dots", "autocast, save attention")
MORE = ("autocast, save mixed", *BY_ARGUMENTS)
SHOWN = {
    "ViT": ("H100", "vit", 4, 64, False, "bfloat16"),
    "language model": ("H100", "long_byte_model", 4, 16, False, "bfloat16"),
}


def costs(found: list[Record]) -> str:
    """Returns what each step needs, and its ratios to the step by hand."""
    steps = [line for line in found if line["benchmark"] == "gpu_compile"]
    by_hand = {group(line): line for line in steps if line["way"] == "by hand"}
    rows = (
        (title(*group(one)), NAMES[one["way"]], *cells(one, by_hand[group(one)])) for one in steps
    )
    return table(("GPU compiler", "the step", *NUMBERS), rows)


def short(found: list[Record], *more: str) -> str:
    """Returns memory against time of the bfloat16 steps that are written out, for visitors."""
    lines = {(*group(one), one["way"]): one for one in found if one["benchmark"] == "gpu_compile"}
    header = [f"{name}, {number}" for name in SHOWN for number in ("MiB", "peak", "time")]
    rows = []
    for way in (*VISITED, *more):
        row = [NAMES[way]]
        for shown in SHOWN.values():
            one, by_hand = lines.get((*shown, way)), lines[*shown, "by hand"]
            row += [cells(one, by_hand)[i] for i in (0, 1, 3)] if one else [""] * 3
        rows.append(row)
    return table(("NVIDIA H100", *header), rows)


def architectures(found: list[Record]) -> str:
    """Returns what steps of other networks need on an H100, over those by hand."""
    steps = [line for line in found if line["chip"] == "H100" and "estimate_ms" in line]
    by_hand = {line["model"]: line for line in steps if line["way"] == "by hand"}
    rows = []
    for line in steps:
        name, way = line["model"], line["way"]
        if name in by_hand and way != "by hand":
            rows.append((name, f"`{way}`", *cells(line, by_hand[name])[:4]))
    return table(("H100, the network", "policy", *NUMBERS[:4]), rows)


def group(line: Record) -> tuple[Any, ...]:
    return tuple(line[key] for key in KEY)


def title(chip: str, model: str, layers: int, batch: int, scanned: bool, dtype: str) -> str:
    depth = f"{layers} layers{', scanned' * scanned}"
    return f"{chip}, {MODELS[model]}, {depth}, batch {batch}, {dtype}"


def cells(line: Record, by_hand: Record) -> tuple[str, ...]:
    guess, peak = line.get("estimate_ms"), line["peak_mib"]
    times = (f"{guess:.3f}", f"{guess / by_hand['estimate_ms']:.3f}") if guess else ("", "")
    ratio = f"{peak / by_hand['peak_mib']:.3f}"
    return f"{peak:,.0f}", ratio, *times, f"{line['kernels']:,}", f"{line['compile_s']:.0f}"


main = functools.partial(records.main, __doc__, BENCHMARKS, out=RESULTS)

if __name__ == "__main__":
    main()
