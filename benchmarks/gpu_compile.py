"""Compiles train steps for NVIDIA's H100, A100 and B200, without a GPU, and records what they need.

    pip install --no-deps --target=DIR $(python benchmarks/gpu.py)     # once, 573 MB
    PYTHONPATH=DIR JAX_PLATFORMS=cpu python benchmarks/gpu_compile.py  # the points that are missing
    PYTHONPATH=DIR JAX_PLATFORMS=cpu python benchmarks/gpu_compile.py --only float16

The folder is apart from the environment, in which JAX would look for a driver. A point takes some
ten seconds of a core. The optimizer is Adam; the state is donated. A line has the fields of
`tpu_compile.py` that this compiler knows, and

- kernels: what runs by itself, the body of a loop once for each of its turns;
- estimate_ms: XLA's estimate for an H100, for ratios at most (`compiled_step.py` says of what), and
  not_estimated: what is not in it. Its figures of products in 8 bits exceed the hardware, so
  steps with such products have none;
- calls: the products by the functions that compute them.

`eight_bits` has steps whose MLPs multiply in 8 bits by a rule, on chips with units for them.

Autotuning and Triton's products are off, so fusions differ from those of a real run.
"""

import collections
import functools
from collections.abc import Sequence
from typing import Any

import gpu
import jax
import records
from compiled_step import Program, planned
from model_steps import LOW, Point, trace
from records import Record, grouped, table
from tpu_compile import CARRIES, MARKED, WAYS

from jmpx._inspect.hlo.found import kind_of

RESULTS = records.RESULTS / "gpu_compile.jsonl"
ALL_DOTS = "by hand, marked blocks, all dots"
PEERS = ("JMP", "MPX", "gradient functions")
MAIN = ("float32", "by hand", MARKED[0], "autocast, save", "autocast, save attention", "autocast")
SCANNED = (*MAIN, MARKED[1], "by hand, low scores", ALL_DOTS)
BY_ARGUMENTS = ("arguments, save", "arguments, save mixed", "arguments, save attention")
WRITTEN_OUT = (*SCANNED, "autocast, save mixed", *BY_ARGUMENTS, "gradient functions, r=f32")
SKIPS = ("by hand", "by hand, cond", *(f"gradient functions, {by}" for by in ("where", "cond")))

# Chip, model, layers, batch, whether scanned, dtype and ways. In float16, a step scales and skips;
# with two layers and two images, its state dominates.
GROUPS: list[tuple[str, str, int, int, bool, str, tuple[str, ...]]] = [
    ("H100", "vit", 4, 64, False, LOW, (*WRITTEN_OUT, *PEERS)),
    ("H100", "vit", 4, 64, False, "float16", (*SKIPS, *PEERS)),
    ("H100", "vit", 2, 2, False, "float16", (*SKIPS, PEERS[-1])),
    ("H100", "vit", 12, 64, True, LOW, (*SCANNED, *CARRIES)),
    ("H100", "long_byte_model", 4, 16, False, LOW, (*WRITTEN_OUT, PEERS[-1])),
    ("A100", "vit", 4, 64, False, LOW, MAIN),
]
# The same with the MLPs in 8 bits; on a B200, also in 16 bits, to which they are compared.
FP8 = ("autocast, fp8", "autocast, save, fp8")
MXFP8 = ("autocast", "autocast, save", *FP8, "autocast, mxfp8")
EIGHT_BITS: list[tuple[str, str, int, int, bool, str, tuple[str, ...]]] = [
    (chip, model, 4, batch, False, LOW, ways)
    for chip, ways in {"H100": FP8, "B200": MXFP8}.items()
    for model, batch in {"vit": 64, "long_byte_model": 16}.items()
]
KEY = ("chip", "model", "layers", "batch", "scanned", "dtype")


def points(groups: Sequence[tuple[Any, ...]] = GROUPS) -> list[Record]:
    """Returns the fields of the points of train steps."""
    found = ((*group, way) for *group, ways in groups for way in ways)
    return [dict(zip((*KEY, "way"), values, strict=True)) for values in found]


def compiled(make: Any, chip: str) -> Record:
    """Compiles what a function traces, and returns what was found."""
    program, found = planned(make, "cuda", **gpu.OPTIONS[chip])
    hlo = Program(program.as_text())
    milliseconds, untimed = hlo.estimate()
    is_estimated = chip == "H100" and not in_eight_bits(found)
    guess = {"estimate_ms": milliseconds, "not_estimated": untimed} if is_estimated else {}
    calls = collections.Counter[str]()
    for one, times in hlo.kernels():
        calls[one.target] += times if kind_of(one) else 0
    counts = {"kernels": sum(times for _, times in hlo.kernels()), "calls": dict(+calls)}
    return found | guess | counts


def in_eight_bits(line: Record) -> int:
    """Returns how many products multiply in 8 bits."""
    return sum(count for name, count in line["products"].items() if name.startswith("f8"))


def measure(chip: str, small: bool = False, **fields: Any) -> Record:
    # A rule for products in 8 bits asks whether the default device has units for them.
    device = gpu.devices(chip)[0] if "fp8" in fields["way"] else None
    with jax.default_device(device):
        return compiled(lambda: trace(Point(**fields), gpu.devices(chip), small), chip)


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
VISITED += ("autocast, save mixed", *BY_ARGUMENTS)
SHOWN = {
    "ViT": ("H100", "vit", 4, 64, False, LOW),
    "language model": ("H100", "long_byte_model", 4, 16, False, LOW),
}


def costs(found: list[Record]) -> str:
    """Returns what each step needs, and its ratios to the step by hand."""
    groups, rows = grouped(found, KEY), []
    for line in found:
        if line["benchmark"] == "gpu_compile":
            group = tuple(line[key] for key in KEY)
            by_hand = groups[group]["by hand"]
            rows.append((title(*group), NAMES[line["way"]], *cells(line, by_hand)))
    return table(("GPU compiler", "the step", *NUMBERS), rows)


def short(found: list[Record]) -> str:
    """Returns memory against time of the bfloat16 steps that are written out, for visitors."""
    groups = grouped(found, KEY)
    header = [text for name in SHOWN for text in (f"{name}, MiB", "peak", "time")]
    rows = []
    for way in VISITED:
        row = [NAMES[way]]
        for lines in (groups[group] for group in SHOWN.values()):
            numbers = cells(lines[way], lines["by hand"]) if way in lines else [""] * 4
            row += [numbers[0], numbers[1], numbers[3]]
        rows.append(row)
    return table(("NVIDIA H100", *header), rows)


def architectures(found: list[Record]) -> str:
    """Returns what steps of other networks need on an H100, over those by hand."""
    by_model = grouped(found, ("model",))
    rows = (
        (line["model"], f"`{line['way']}`", *cells(line, by_model[line["model"],]["by hand"])[:4])
        for line in found
        if line["way"] != "by hand"
    )
    return table(("H100, the network", "policy", *NUMBERS[:4]), rows)


EIGHT_NAMES = NAMES | {
    "autocast, fp8": "`c=bf16; */mlp: m=fp8`",
    "autocast, save, fp8": "`c=bf16,save=products; */mlp: m=fp8`",
    "autocast, mxfp8": "`c=bf16; */mlp: m=mxfp8`",
}
COUNTS = ("products in 8 bits", "in blocks of 8 bits", "in 16 bits", "kernels", "added")
COUNTS += ("peak, MiB", "over 16 bits")


def eight_bits(found: list[Record]) -> str:
    """Returns what products in 8 bits need, over the same step in 16 bits."""
    groups, rows = grouped(found, KEY), []
    for *group, ways in EIGHT_BITS:
        lines = groups[tuple(group)]
        for way in ("autocast", "autocast, save", *(way for way in ways if "fp8" in way)):
            line, base = lines[way], lines[way.removesuffix(", mxfp8").removesuffix(", fp8")]
            eight, kernels = in_eight_bits(line), line["kernels"]
            blocks = line.get("calls", {}).get("__cudnn$blockScaledDot", 0)
            of = eight - blocks, blocks, sum(line["products"].values()) - eight, kernels
            peak = f"{line['peak_mib']:,.0f}", f"{line['peak_mib'] / base['peak_mib']:.3f}"
            counts = (*map(str, (*of, kernels - base["kernels"])), *peak)
            model = MODELS[str(group[1])].partition(" of ")[0]
            rows.append((f"{group[0]}, {model}", EIGHT_NAMES[way], *counts))
    return table(("GPU compiler, 4 layers", "the step", *COUNTS), rows)


def title(chip: str, model: str, layers: int, batch: int, scanned: bool, dtype: str) -> str:
    depth = f"{layers} layers{', scanned' * scanned}"
    return f"{chip}, {MODELS[model]}, {depth}, batch {batch}, {dtype}"


def cells(line: Record, by_hand: Record) -> tuple[str, ...]:
    guess, peak = line.get("estimate_ms"), line["peak_mib"]
    times = (f"{guess:.3f}", f"{guess / by_hand['estimate_ms']:.3f}") if guess else ("", "")
    ratio = f"{peak / by_hand['peak_mib']:.3f}"
    return f"{peak:,.0f}", ratio, *times, f"{line['kernels']:,}", f"{line['compile_s']:.0f}"


BENCHMARKS = {"gpu_compile": (points(), measure), "eight_bits": (points(EIGHT_BITS), measure)}
main = functools.partial(records.main, __doc__, BENCHMARKS, out=RESULTS)

if __name__ == "__main__":
    main()
