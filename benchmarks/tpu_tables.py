"""Tables and bars of what `tpu_compile.py` found; `report.py` writes them into its two pages."""

from collections.abc import Iterable, Iterator
from typing import Any

import records
from models import LanguageModel
from records import Record
from tables import Row, plain, table, table_of_bars
from tpu_compile import RESULTS

MARKS = "<!-- table, by tpu_tables.py -->", "<!-- end of TPU v5e -->"
WAYS = {  # how the tables name them, in this order
    "float32": "float32",
    "float32, highest": "float32, `matmul=highest`",
    "by hand": "bfloat16 by hand",
    "JMP": "JMP",
    "MPX": "MPX",
    "module policies": "jmpx, module policies",
    "gradient functions": "jmpx, gradient functions",
    "autocast": "jmpx.autocast",
    "autocast, save": '`jmpx.autocast(..., save="products")`',
    "autocast, save, with the loss": "the same around the loss, too",
    "by hand, marked blocks": "by hand, each block under `jax.checkpoint`",
    "autocast, marked blocks": "autocast, each block under `jax.checkpoint`",
    "autocast, marked blocks, bfloat16 carry": "the same with `op.scan: bf16`",
    "autocast, save, bfloat16 carry": '`save="products"`, `op.scan: bf16`',
}
SHORT = [*WAYS][:1] + [*WAYS][2:10]
MODELS = {
    "vit": "ViT of width 768",
    "language_model": "language model, 32,000 tokens",
    "byte_model": "language model, 256 bytes",
    "resnet": "Haiku's ResNet-50",
}
GROUP = ("model", "layers", "batch", "scanned", "chips")
Group = tuple[Any, ...]  # the values of these fields
HAND, SAVE = "by hand", "autocast, save"


def groups(found: Iterable[Record]) -> dict[Group, dict[str, Record]]:
    """Returns the records that can be compared, by way; costs of scans count each layer."""
    by_group: dict[Group, dict[str, Record]] = {}
    twice: dict[Group, dict[str, Record]] = {}
    for record in found:
        place = by_group if record["unroll"] == 1 else twice
        place.setdefault(tuple(record[key] for key in GROUP), {})[record["way"]] = record
    for group, ways in by_group.items():
        if group[GROUP.index("scanned")]:
            for way, record in ways.items():
                ways[way] = record | whole(record, twice.get(group, {}).get(way))
    return by_group


def whole(once: Record, twice: Record | None) -> Record:
    """Returns the costs of all layers of a scan, from programs with one and two layers a turn."""
    if twice is None or once["status"] != "ok":
        return {"gflop": None, "gb_accessed": None}
    further = once["layers"] - 1
    return {key: once[key] + further * (twice[key] - once[key]) for key in ("gflop", "gb_accessed")}


def title(group: Group) -> str:
    model, layers, batch, scanned, chips = group
    depth = "" if model == "resnet" else f", {layers} layers{', scanned' * scanned}"
    places = {"one": "", "data": ", data-parallel on 2x4 chips", "fsdp": ", FSDP on 2x4 chips"}
    return f"{MODELS[model]}{depth}, batch {batch}{' a chip' * (chips != 'one')}{places[chips]}"


# The bars.


def ratio(ways: dict[str, Record], key: str, ours: str, theirs: str) -> float | None:
    one, other = (ways.get(way, {}).get(key) for way in (ours, theirs))
    return one / other if one and other else None


def attention_share(model: str, tokens: int = 197, width: int = 768) -> float:
    """Returns the share of a step's products that the forward products of attention are.

    A block saves the results of products with weights, so these are computed once more. A product
    of `n` by `k` and `k` by `m` counts `n * k * m`, a token at a time; a step has three times the
    products of a forward pass.
    """
    attention, weights, head = 2 * tokens * width, 12 * width**2, 0
    if model == "language_model":
        head = LanguageModel().classes * width / LanguageModel().layers
    return attention / (3 * (attention + weights + head))


def bars(found: Iterable[Record]) -> Iterator[Row]:
    """Yields the rows that the records answer."""
    by_group = groups(found)
    for group, key, ours, theirs, bar in wanted():
        value = ratio(by_group.get(group, {}), key, ours, theirs)
        if value is not None:
            yield Row(f"{title(group)}: {NAMES[key]}, {ours} over {theirs}", value, bar)


NAMES = {"peak_mib": "peak memory", "gflop": "FLOPs", "gb_accessed": "bytes"}
NAMES |= {name: name for name in ("instructions", "converts", "copies")}
VIT = ("vit", 6, 64, False, "one")
SCANNED = ("vit", 6, 32, True, "one")
TEXT = ("language_model", 6, 16, False, "one")
BYTES = ("byte_model", *TEXT[1:])
IMAGES = ("resnet", 50, 32, False, "one")


def wanted() -> Iterator[tuple[Group, str, str, str, float]]:
    """Yields what has to hold: group, field, way, the way to compare with, and the bar."""
    yield VIT, "peak_mib", SAVE, HAND, 0.54
    yield VIT, "peak_mib", SAVE, "float32", 0.44
    yield VIT, "gflop", SAVE, "autocast", 1.02
    yield VIT, "gb_accessed", SAVE, "autocast", 1
    yield SCANNED, "peak_mib", SAVE, HAND, 0.45
    yield SCANNED, "peak_mib", f"{SAVE}, bfloat16 carry", f"{HAND}, marked blocks", 1
    yield TEXT, "peak_mib", SAVE, HAND, 0.7
    yield BYTES, "peak_mib", SAVE, HAND, 0.7
    yield IMAGES, "peak_mib", SAVE, HAND, 0.7
    share = 1 + attention_share("language_model", LanguageModel().length)
    yield TEXT, "gflop", SAVE, "autocast", round(share + 0.005, 3)
    for way in ("module policies", "gradient functions", "autocast"):
        for key in ("instructions", "converts", "copies", "gb_accessed"):
            if way != "autocast" or key != "instructions":
                yield VIT, key, way, HAND, 1.01


# The tables.


def cell(record: Record | None) -> str:
    """Returns the peak memory in MiB."""
    if record is None:
        return ""
    return f"{record['peak_mib']:,.0f}" if record["status"] == "ok" else "too large"


def short(found: Iterable[Record] | None = None) -> str:
    """Returns the bars, and the peak memory of each model in each way."""
    by_group = groups(found := load(found))
    columns = [group for group in (VIT, TEXT, BYTES, IMAGES) if group in by_group]
    rows = [[WAYS[way], *(cell(by_group[g].get(way)) for g in columns)] for way in SHORT]
    rows = [row for row in rows if any(row[1:])]
    peaks = table(("peak memory of a train step, MiB", *map(title, columns)), rows)
    held = [row for row in bars(found) if "peak memory" in row.measure or "save" in row.measure]
    return f"{peaks}\n\n{table_of_bars(held)}"


COLUMNS = {
    "peak_mib": "peak MiB",
    "gflop": "GFLOP",
    "gb_accessed": "GB accessed",
    "instructions": "instructions",
    "fusions": "fusions",
    "converts": "converts",
    "copies": "copies",
    "compile_cpu_s": "compile, CPU s",
    "compile_s": "by the clock, s",
    "products": "products",
}


def details(group: Group, ways: dict[str, Record]) -> str:
    columns = dict(COLUMNS)
    if group[-1] != "one":
        columns["collectives"] = "MiB that a chip sends"
    ordered = sorted(ways.values(), key=lambda record: [*WAYS].index(record["way"]))
    rows = ([WAYS[r["way"]], *(number(r, key) for key in columns)] for r in ordered)
    return table(("step", *columns.values()), rows)


def number(record: Record, key: str) -> str:
    if record["status"] != "ok":
        return "too large" if key == "peak_mib" else ""
    value = record[key]
    if key == "collectives":
        value = {kind: round(mib, 1) for kind, mib in value.items()}
    if value is None:
        return ""
    return f"{value:,.0f}" if isinstance(value, float) and value >= 1000 else plain(value)


def load(found: Iterable[Record] | None) -> list[Record]:
    return records.read(RESULTS) if found is None else list(found)


def sections(found: Iterable[Record] | None = None) -> list[str]:
    """Returns the paragraphs of all that was compiled."""
    if not (found := load(found)):
        return []
    places = sorted({f"JAX {r['versions']['jax']}, libtpu {r['libtpu']}" for r in found})
    days = sorted({record["date"][:10] for record in found})
    parts = ["## tpu_compile", f"For a {found[0]['target']}; {', '.join(places + days)}. {NOTE}"]
    parts += [table_of_bars(bars(found))]
    for group, ways in groups(found).items():
        parts += [f"### {title(group)}", details(group, ways)]
    return parts


NOTE = (
    "Compile times were taken on two cores that many others used as well. Costs of scans are those "
    "of one layer a turn and five times what a second layer in the turn adds; they are empty where "
    "that was not compiled."
)
