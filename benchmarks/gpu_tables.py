"""Tables of what `gpu_compile.py` found; `report.py` writes them into the pages."""

from typing import Any

from gpu_compile import BY_ARGUMENTS, KEY, RESULTS as RESULTS
from records import Record, table
from tpu_tables import WAYS

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
