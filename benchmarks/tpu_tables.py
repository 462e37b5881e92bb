"""Tables and bars of what `tpu_compile.py` found; `report.py` writes them into the pages."""

from collections.abc import Iterable, Iterator
from typing import Any

from records import Record, Row, table, table_of_bars
from tpu_compile import RESULTS as RESULTS

MARKS = "<!-- table, by tpu_tables.py -->", "<!-- end of TPU v5e -->"
WAYS = {  # how the tables name them, in this order
    "float32": "float32",
    "float32, highest": "float32, `matmul=highest`",
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
    "autocast, marked blocks": "`c=bf16`, each block marked by hand",
    "autocast, marked blocks, bfloat16 carry": "the same with `op.scan: bf16`",
    "autocast, save, bfloat16 carry": "`c=bf16,save=products; op.scan: bf16`",
}
SHORT = [way for way in WAYS if way != "float32, highest" and not way.endswith("carry")]
LOW_SCORES = "by hand, low scores"
OURS = ("autocast", "autocast, marked blocks", "autocast, save")
VISITED = ("float32", "by hand", LOW_SCORES, "MPX", *OURS)
COSTS = ("by hand", LOW_SCORES, "by hand, marked blocks", f"{LOW_SCORES}, marked blocks", *OURS)
COSTS += ("autocast, save mixed", "autocast, save attention")
MODELS = {
    "vit": "ViT of width 768",
    "language_model": "language model, 32,000 tokens",
    "byte_model": "language model, 256 bytes",
    "resnet": "Haiku's ResNet-50",
}
GROUP = ("model", "layers", "batch", "scanned", "chips")
Group = tuple[Any, ...]  # the values of these fields
VIT = ("vit", 6, 64, False, "one")
SCANNED = ("vit", 6, 32, True, "one")
TEXT = ("language_model", 6, 16, False, "one")
BYTES = ("byte_model", *TEXT[1:])
IMAGES = ("resnet", 50, 32, False, "one")


def groups(found: Iterable[Record]) -> dict[Group, dict[str, Record]]:
    """Returns the lines that can be compared, by way."""
    by_group: dict[Group, dict[str, Record]] = {}
    for record in found:
        by_group.setdefault(tuple(record[key] for key in GROUP), {})[record["way"]] = record
    return by_group


def title(group: Group) -> str:
    model, layers, batch, scanned, chips = group
    depth = "" if model == "resnet" else f", {layers} layers{', scanned' * scanned}"
    places = {"one": "", "data": ", data-parallel on 2x4 chips", "fsdp": ", FSDP on 2x4 chips"}
    return f"{MODELS[model]}{depth}, batch {batch}{' a chip' * (chips != 'one')}{places[chips]}"


# The bars: group, figure, way, the way to compare with, and the most that the ratio may be.

NAMES = {
    "peak_mib": "peak memory",
    "gflop": "FLOPs",
    "gb_accessed": "bytes",
    "gb_hbm": "bytes of HBM",
}
MIXED = "autocast, save mixed"
HAND, SAVE, MARKED = "by hand", "autocast, save", "autocast, marked blocks"
BARS: list[tuple[Group, str, str, str, float]] = [
    (VIT, "peak_mib", SAVE, HAND, 0.54),
    (VIT, "peak_mib", SAVE, LOW_SCORES, 0.63),
    (VIT, "peak_mib", SAVE, "float32", 0.44),
    (VIT, "peak_mib", SAVE, MARKED, 1),
    (VIT, "gflop", SAVE, MARKED, 1.001),
    (VIT, "gb_accessed", SAVE, MARKED, 1),
    (VIT, "gb_hbm", SAVE, MARKED, 1),
    (VIT, "gflop", SAVE, "autocast", 1.02),
    (VIT, "gb_accessed", SAVE, "autocast", 1),
    (SCANNED, "peak_mib", SAVE, HAND, 0.45),
    (SCANNED, "peak_mib", f"{SAVE}, bfloat16 carry", f"{HAND}, marked blocks", 1),
    (TEXT, "peak_mib", SAVE, HAND, 0.7),
    (BYTES, "peak_mib", SAVE, HAND, 0.7),
    (IMAGES, "peak_mib", SAVE, HAND, 0.7),
    # The products of attention, which are computed again, are 2.2 % of those of the step.
    (TEXT, "gflop", SAVE, "autocast", 1.027),
    (VIT, "gb_accessed", "module policies", HAND, 1.01),
]


def bars(found: Iterable[Record]) -> Iterator[Row]:
    """Yields the rows that the lines answer."""
    by_group = groups(found)
    for group, key, ours, theirs, bar in BARS:
        one, other = (by_group.get(group, {}).get(way, {}).get(key) for way in (ours, theirs))
        if one and other:
            yield Row(f"{title(group)}: {NAMES[key]}, {ours} over {theirs}", one / other, bar)


def peaks(found: list[Record], corner: str, models: Iterable[Group], ways: Iterable[str]) -> str:
    """Returns the peak memory of models in some ways, in MiB."""
    by_group = groups(found)
    models = [model for model in models if model in by_group]
    rows = [[WAYS[way], *(peak(by_group[model].get(way)) for model in models)] for way in ways]
    return table((corner, *map(title, models)), (row for row in rows if any(row[1:])))


def peak(record: Record | None) -> str:
    if record is None:
        return ""
    return f"{record['peak_mib']:,.0f}" if record["status"] == "ok" else "too large"


def visited(found: list[Record], *more: str) -> str:
    """Returns the table of the README, or one that has more ways."""
    return peaks(found, "MiB", (VIT, BYTES, TEXT, IMAGES), (*VISITED, *more))


def costs(found: list[Record]) -> str:
    """Returns what the ViT needs in the ways that a user has to save memory."""
    header = (title(VIT), "peak, MiB", "GFLOP", "GB accessed", "GB from and to HBM")
    lines = groups(found).get(VIT, {})
    keys = {"peak_mib": 0, "gflop": 0, "gb_accessed": 1, "gb_hbm": 1}  # and their digits
    cell = lambda line, key: f"{line[key]:,.{keys[key]}f}" if key in line else ""  # noqa: E731
    rows = ((WAYS[w], *(cell(lines[w], key) for key in keys)) for w in COSTS if w in lines)
    return table(header, rows)


def short(found: list[Record]) -> str:
    """Returns the peak memory of each model in each way, and the bars."""
    corner = "peak memory of a train step, MiB"
    held = [row for row in bars(found) if "peak memory" in row.measure or "save" in row.measure]
    tables = peaks(found, corner, (VIT, TEXT, BYTES, IMAGES), SHORT), costs(found)
    return "\n\n".join((*tables, table_of_bars(held)))
