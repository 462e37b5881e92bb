"""Compiles train steps for a TPU v5e, without the chip, and records what they need.

    pip install -e '.[bench,tpu]'
    python benchmarks/tpu_compile.py                   # the points that are missing
    python benchmarks/tpu_compile.py --only vit autocast   # those of one model and one way
    python benchmarks/tpu_compile.py --list            # all points, and which are missing

A point takes a minute or two of a core, so GROUPS has no more than what the pages show. The
optimizer is Adam; the state is donated. A line has

- peak_mib: the most memory that a chip holds at once, by the compiler's plan, with arguments;
- gflop, gb_accessed: the compiler's estimates, which count the body of a loop once; gb_accessed
  counts arrays in the memory on the chip, too, and what is fetched into it twice;
- gb_hbm: what instructions and fetches read from the chip's HBM and write to it (one chip alone);
- mcycles: millions of cycles, by the compiler's estimates of what runs, the body of a loop once for
  each of its turns; for ratios at most, and the lines before 2026-11-27 have none;
- products: matrix products and convolutions by the dtypes of operands and result, the body of a
  loop once for each of its turns, or once in the lines before 2026-11-28;
- collectives: MiB that a chip sends, by kind and dtype;
- trace_cpu_s, compile_cpu_s: processor seconds, over all threads; compile_s: seconds by the clock.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import records
import tpu
from compiled_step import FREE, Program, planned, sizes, unfused
from model_steps import Point, trace
from records import Group, Record, Row, grouped, table, table_of_bars
from tpu_matmul import CYCLES

from jmpx._inspect.hlo.module import Module

RESULTS = records.RESULTS / "tpu_compile.jsonl"
FOUR = ("by hand", "autocast, save", "autocast", "float32")
PEERS = ("MPX", "JMP")
MARKED = ("by hand, marked blocks", "autocast, marked blocks")
SCORES = ("by hand, low scores", "by hand, low scores, marked blocks")
MIXED = "autocast, save mixed"
WIDE = ("gradient functions", "gradient functions, r=f32")
CARRIES = ("autocast, marked blocks, bfloat16 carry", "autocast, save, bfloat16 carry")
VIT_WAYS = (*FOUR, *PEERS, *MARKED, *SCORES, MIXED, *WIDE)
VIT_WAYS += ("module policies", "autocast, save attention")
NORM_FIRST = ("float32, norm first", "by hand, low scores, norm first")
VIT_WAYS += NORM_FIRST
TEXT_WAYS = (*FOUR, *PEERS, MARKED[1], *SCORES, MIXED, *WIDE, "autocast, save, with the loss")

# Model, layers, batch, chips, whether scanned, and ways.
GROUPS: list[tuple[str, int, int, str, bool, tuple[str, ...]]] = [
    ("vit", 6, 64, "one", False, VIT_WAYS),
    # A scan keeps what its body saves, for each layer; its carry may be float32.
    ("vit", 6, 32, "one", True, (*FOUR[:3], *MARKED, *CARRIES)),
    ("language_model", 6, 16, "one", False, TEXT_WAYS),
    ("byte_model", 6, 16, "one", False, (*FOUR, *PEERS, MARKED[1], *SCORES, MIXED)),
    ("resnet", 50, 32, "one", False, (*FOUR, *PEERS)),
    # In which dtypes eight chips gather weights, and the bytes of larger batches.
    ("vit", 2, 32, "fsdp", False, FOUR[:3]),
    ("vit", 6, 128, "one", False, FOUR[1:3]),
    ("language_model", 6, 32, "one", False, FOUR[1:3]),
]
KEY = ("model", "layers", "batch", "chips", "scanned", "way")


def points() -> list[Record]:
    """Returns the fields of all points."""
    found = ((*group, way) for *group, ways in GROUPS for way in ways)
    return [dict(zip(KEY, values, strict=True)) for values in found]


# What moves between a chip and its HBM. `S(1)` in a layout, as of `f32[8]{0:S(1)}`, is on the chip.

FETCHES = {"copy-start", "slice-start"}  # their results name what they read, too


def hbm_bytes(hlo: str) -> float:
    """Returns the bytes that the instructions outside of fusions move between HBM and the chip."""
    module, moved = Module(hlo), 0.0
    for one in unfused(module):
        if one.kind in FETCHES:
            moved += min(size for size in sizes(one.types) if size > 4)
        elif one.kind not in FREE and not one.kind.endswith("-done"):
            read = (module.instructions[key].types for key, _ in one.inputs)
            moved += sum(sizes(" ".join((one.types, *read)), hbm=True))
    return moved


def megacycles(hlo: str) -> float:
    """Returns the millions of cycles that the compiler estimates."""
    ran = ((CYCLES.search(one.rest), times) for one, times in Program(hlo).run())
    return sum(int(found[1]) * times for found, times in ran if found) / 1e6


def measure(small: bool = False, **fields: Any) -> Record:
    """Compiles a point and returns what was found."""
    return compiled(lambda: trace(Point(**fields), tpu.devices(), small))


def compiled(make: Callable[[], Any]) -> Record:
    """Compiles what a function traces."""
    program, found = planned(make, "tpu")
    hlo, cost = program.as_text(), program.cost_analysis()
    return found | {
        "gflop": cost["flops"] / 1e9,
        "gb_accessed": cost["bytes accessed"] / 1e9,
        "mcycles": megacycles(hlo),
        "gb_hbm": None if found["collectives"] else hbm_bytes(hlo) / 1e9,
    }


# --- Tables, which `report.py` writes into the pages ---

MARKS = "<!-- table, by tpu_compile.py -->", "<!-- end of TPU v5e -->"
WAYS = {  # how the tables name them, in this order
    "float32": "float32",
    "float32, norm first": "float32, all tokens normalized",
    "by hand": "bfloat16 by hand, scores scaled in float32",
    "by hand, low scores": "bfloat16 by hand, scores scaled in bfloat16",
    "JMP": "JMP",
    "MPX": "MPX",
    "module policies": "jmpx, module policies",
    "gradient functions": "jmpx, gradient functions",
    "gradient functions, r=f32": "jmpx, gradient functions, `r=f32`",
    "autocast": "`c=bf16`",
    "autocast, save": "`c=bf16,save=products`",
    "arguments, save": "`by=arguments,c=bf16,save=products`",
    "autocast, save mixed": "`c=bf16,save=products+mixed`",
    "arguments, save mixed": "`by=arguments,c=bf16,save=products+mixed`",
    "autocast, save attention": "`c=bf16,save=products+attention`",
    "arguments, save attention": "`by=arguments,c=bf16,save=products+attention`",
    "autocast, save, with the loss": "`c=bf16,save=products` around the loss, too",
    "by hand, marked blocks": "bfloat16 by hand, scaled in float32, blocks marked",
    "by hand, low scores, marked blocks": "bfloat16 by hand, scaled in bfloat16, blocks marked",
    "by hand, low scores, norm first": "bfloat16 by hand, all tokens normalized",
    "autocast, marked blocks": "`c=bf16`, each block marked by hand",
    "autocast, marked blocks, bfloat16 carry": "the same with `op.scan: bf16`",
    "autocast, save, bfloat16 carry": "`c=bf16,save=products; op.scan: bf16`",
}
SHORT = [way for way in WAYS if not way.endswith("carry")]
LOW_SCORES = "by hand, low scores"
OURS = ("autocast", "autocast, marked blocks", "autocast, save")
VISITED = ("float32", NORM_FIRST[0], "by hand", LOW_SCORES, NORM_FIRST[1])
VISITED += (f"{LOW_SCORES}, marked blocks", "MPX", *OURS, MIXED)
COSTS = ("by hand", LOW_SCORES, "by hand, marked blocks", f"{LOW_SCORES}, marked blocks", *OURS)
COSTS += ("autocast, save mixed", "autocast, save attention")
MODELS = {
    "vit": "ViT of width 768",
    "language_model": "language model, 32,000 tokens",
    "byte_model": "language model, 256 bytes",
    "resnet": "Haiku's ResNet-50",
}
GROUP = ("model", "layers", "batch", "scanned", "chips")
VIT = ("vit", 6, 64, False, "one")
SCANNED = ("vit", 6, 32, True, "one")
TEXT = ("language_model", 6, 16, False, "one")
BYTES = ("byte_model", *TEXT[1:])
IMAGES = ("resnet", 50, 32, False, "one")


def title(group: Group) -> str:
    model, layers, batch, scanned, _ = group
    depth = "" if model == "resnet" else f", {layers} layers{', scanned' * scanned}"
    return f"{MODELS[model]}{depth}, batch {batch}"


# The bars: group, figure, way, the way to compare with, and the most that the ratio may be.

NAMES = {
    "peak_mib": "peak memory",
    "gflop": "FLOPs",
    "gb_accessed": "bytes",
    "gb_hbm": "bytes of HBM",
}
HAND, SAVE = "by hand", "autocast, save"
BARS: list[tuple[Group, str, str, str, float]] = [
    (VIT, "peak_mib", SAVE, HAND, 0.54),
    (VIT, "peak_mib", SAVE, LOW_SCORES, 0.63),
    (VIT, "peak_mib", SAVE, "float32", 0.44),
    (VIT, "peak_mib", SAVE, MARKED[1], 1),
    (VIT, "gflop", SAVE, MARKED[1], 1.001),
    (VIT, "gb_accessed", SAVE, MARKED[1], 1),
    (VIT, "gb_hbm", SAVE, MARKED[1], 1),
    (VIT, "gflop", SAVE, "autocast", 1.02),
    (VIT, "gb_accessed", SAVE, "autocast", 1),
    (SCANNED, "peak_mib", SAVE, HAND, 0.45),
    (SCANNED, "peak_mib", f"{SAVE}, bfloat16 carry", f"{HAND}, marked blocks", 1),
    (TEXT, "peak_mib", SAVE, HAND, 0.7),
    (BYTES, "peak_mib", SAVE, HAND, 0.7),
    (IMAGES, "peak_mib", SAVE, HAND, 0.7),
    # The products of attention, which are computed again, are 2.2 % of those of the step.
    (TEXT, "gflop", SAVE, "autocast", 1.027),
]


def bars(found: Iterable[Record]) -> Iterator[Row]:
    """Yields the rows that the lines answer."""
    by_group = grouped(found, GROUP)
    for group, key, ours, theirs, bar in BARS:
        one, other = (by_group.get(group, {}).get(way, {}).get(key) for way in (ours, theirs))
        if one and other:
            yield Row(f"{title(group)}: {NAMES[key]}, {ours} over {theirs}", one / other, bar)


def peaks(found: list[Record], corner: str, models: Iterable[Group], ways: Iterable[str]) -> str:
    """Returns the peak memory of models in some ways, in MiB."""
    by_group = grouped(found, GROUP)
    models = [model for model in models if model in by_group]
    peak = lambda line: f"{line['peak_mib']:,.0f}" if line else ""  # noqa: E731
    rows = [[WAYS[way], *(peak(by_group[model].get(way)) for model in models)] for way in ways]
    return table((corner, *map(title, models)), (row for row in rows if any(row[1:])))


def visited(found: list[Record]) -> str:
    """Returns the table for visitors."""
    return peaks(found, "MiB", (VIT, BYTES, TEXT, IMAGES), VISITED)


def costs(found: list[Record]) -> str:
    """Returns what the ViT needs in the ways that a user has to save memory."""
    header = (title(VIT), "peak, MiB", "GFLOP", "GB accessed", "GB from and to HBM", "Mcycles")
    lines = grouped(found, GROUP).get(VIT, {})
    keys = {"peak_mib": 0, "gflop": 0, "gb_accessed": 1, "gb_hbm": 1, "mcycles": 1}  # and digits
    cell = lambda line, key: f"{line[key]:,.{keys[key]}f}" if line.get(key) else ""  # noqa: E731
    rows = ((WAYS[w], *(cell(lines[w], key) for key in keys)) for w in COSTS if w in lines)
    return table(header, rows)


def short(found: list[Record]) -> str:
    """Returns the peak memory of each model in each way, and the bars."""
    corner = "peak memory of a train step, MiB"
    tables = peaks(found, corner, (VIT, TEXT, BYTES, IMAGES), SHORT), costs(found)
    return "\n\n".join((*tables, table_of_bars(bars(found))))


main = functools.partial(records.main, __doc__, {"tpu_compile": (points(), measure)}, out=RESULTS)


if __name__ == "__main__":
    main()
