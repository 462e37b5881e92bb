"""Writes the tables of the results into the pages.

    python benchmarks/report.py

`benchmarks/README.md` has the bars, docs/ the tables for visitors; the lines of all points are in
`benchmarks/results/`.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import compiled_step
import eight_bits
import gpu_compile
import known_models
import language_model
import llama
import mutants
import records
import roundings
import storage
import tpu_compile
from records import Record, Row, table, table_of_bars

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "benchmarks" / "README.md"
MARKS = "<!-- table, by report.py -->", "<!-- end -->"

# --- The bars: what has to hold, and what was measured ---

COUNTS = {"kernels": "kernels", "bytes_accessed": "bytes"}
RESIDUALS = {"autocast": 0.67, "autocast, save": 0.12, "arguments, save": 0.12}
TRACES = {"24 layers": 2.3}
BY_HAND = {f"{layers} layers, by hand": 1.15 for layers in (12, 24)}
MARKED = {f"{layers} layers, marked blocks": 1.15 for layers in (12, 48, 96)}
MARKED["24 layers, scanned, marked blocks"] = 1.0
FIRST_USE = {f"first use, {layers} layers": 1.6 for layers in (4, 12)}
AUTOCAST = [  # of `autocast.py`: a field, the bars of some ways, and what it measures
    ("of_float32", RESIDUALS, "residual bytes over float32's"),
    ("ratio", TRACES, "trace time over no autocast's"),
    ("save_ratio", TRACES, "trace time of save= over one checkpoint's"),
    ("ratio", BY_HAND, "trace time of c=bf16 over by hand's"),
    ("ratio", MARKED, "trace time of c=bf16,save=products over by hand's"),
    ("arguments_ratio", MARKED, "trace time of by=arguments,c=bf16,save=products over by hand's"),
    ("ratio", FIRST_USE, "first traced use of c=bf16 in a process over by hand's"),
]
SENT = {  # what a device may send in a step, in MiB
    ("fsdp_partitioner", "c=bf16,r=f32"): 7.2,
    ("fsdp_stablehlo", "jmpx.distributed.gather, c=bf16"): 4.3,
    ("fsdp_stablehlo", "jmpx.distributed.gather, c=bf16,r=bf16"): 2.9,
}
# Steps that gather weights in bfloat16 and sum gradients in float32.
EXACT = ("c=bf16,r=f32", "jmpx.distributed.gather, c=bf16")
ROUTER = "; */router: c=f32,m=highest"  # how the policy ends whose steps have a bar


def of(found: Iterable[Record], *names: str) -> list[Record]:
    return [record for record in found if record["benchmark"] in names]


def bars(found: list[Record]) -> Iterator[Row]:
    """Yields the rows that the lines answer."""
    yield from compiled_bars(of(found, "compiled_step"))
    for record in of(found, "autocast"):
        for key, limits, words in AUTOCAST:
            if bar := limits.get(record["way"]):
                yield Row(f"{words}: {record['way']}", record[key], bar)
    (jmpx,) = (r for r in of(found, "import_time") if r["library"] == "jmpx")
    yield Row("milliseconds that `import jmpx` adds to `import jax`", jmpx["over_jax_ms"], 60)
    yield from fsdp_bars(of(found, "fsdp_partitioner", "fsdp_stablehlo"))
    yield from tpu_bars(of(found, "tpu_steps"), of(found, "tpu_products"))


def compiled_bars(found: list[Record]) -> Iterator[Row]:
    steps = {(r["implementation"], r["dtype"]): r for r in found if r["layers"] == 12}
    for dtype, name, by_hand, bar in (
        ("float16", "jmpx_where", "handwritten", 1.01),
        ("float16", "jmpx", "handwritten_cond", 1.01),
        ("bfloat16", "jmpx", "handwritten", 1.0),
    ):
        forms = [(form, dtype) for form in (by_hand, compiled_step.DIVIDE[by_hand])]
        for key, count in COUNTS.items():
            better = min(steps[form][key] for form in forms if form in steps)
            words = f"{dtype}, {count}: {name} over {by_hand}"
            yield Row(words, steps[name, dtype][key] / better, bar)
    jmp, ours = steps["jmp", "float16"], steps["jmpx_where", "float16"]
    ratio = jmp["compile_cpu_s"] / ours["compile_cpu_s"]
    yield Row("float16, compile time: jmp over jmpx_where", ratio, 6, least=True)


def fsdp_bars(found: list[Record]) -> Iterator[Row]:
    for record in found:
        way, name = record["way"], record["benchmark"]
        if bar := SENT.get((name, way)):
            yield Row(f"FSDP, MiB sent: {way}, {name}", record["sent_mib"], bar)
        if way in EXACT and "gradient_error" in record:
            ratio = record["gradient_error"] / record["error_one_device"]
            # Unrounded sums differ by their order alone, rounded ones are worse on one device.
            bar = 1.01 if way.endswith("r=f32") else 1
            yield Row(f"FSDP, gradient error over that on one device: {way}", ratio, bar)


def tpu_bars(steps: list[Record], products: list[Record]) -> Iterator[Row]:
    parts = (
        ("router", "float32, highest", r".* -> f32, highest"),
        ("rest", "bfloat16", r"bf16 x bf16 -> .*"),
    )
    for record in (record for record in steps if record["policy"].endswith(ROUTER)):
        for part, words, wanted in parts:
            right = sum(n for key, n in record[part].items() if re.fullmatch(wanted, key))
            measure = f"TPU v5e, share of products in {words}: {part}, {record['way']}"
            yield Row(measure, right / sum(record[part].values()), 1, least=True)
    low = [record for record in products if record["dtype"] == "bfloat16" and "cycles" in record]
    cycles = {record["precision"]: record["cycles"] for record in low}
    ratio = cycles["highest"] / cycles["unset"]
    yield Row("TPU v5e, cycles of a bfloat16 product: highest over unset", ratio, 1)


# --- The tables ---

STEPS = {  # how a step is written, and what it skips with
    "handwritten_cond": ("by hand, `g * (1 / scale)`", "`cond`"),
    "handwritten_cond_divide": ("by hand, `g / scale`", "`cond`"),
    "jmpx": ("jmpx", "`cond`, the default on CPUs"),
    "handwritten": ("by hand, `g * (1 / scale)`", "`where`"),
    "handwritten_divide": ("by hand, `g / scale`", "`where`"),
    "jmpx_where": ("jmpx", "`where`"),
    "mpx": ("MPX", "`where`"),
    "jmp": ("JMP", "`where`"),
}


def programs(found: list[Record]) -> str:
    """Returns the sizes of compiled float16 steps, and how long they compile."""
    found = [r for r in of(found, "compiled_step") if (r["dtype"], r["layers"]) == ("float16", 12)]
    chosen = {record["implementation"]: record for record in found}
    header = ("kernels", "MB accessed", "HLO instructions", "CPU seconds to compile")
    rows = []
    for name, how in STEPS.items():
        line = chosen[name]
        counts = line["kernels"], line["bytes_accessed"] / 1e6, line["instructions"]
        cells = (f"{count:,.0f}" for count in counts)
        rows.append((*how, *cells, f"{line['compile_cpu_s']:.1f}"))
    return table(("the step", "skips with", *header), rows)


def pages() -> dict[Path, str]:
    """Returns the text that each page should have."""
    found, tpu = records.read(records.CPU), records.read(tpu_compile.RESULTS)
    headlines = table_of_bars(bars(found))
    learned = language_model.table(records.read(language_model.RESULTS))
    stored = [r for r in records.read(storage.RESULTS) if records.version_of(r) == "0.10.2"]
    at_scale = llama.table(records.read(llama.RESULTS))
    planted = mutants.table(records.read(mutants.RESULTS))
    gpu = records.read(gpu_compile.RESULTS)
    page = between(MARKS, headlines, PAGE.read_text())
    page = between(tpu_compile.MARKS, tpu_compile.short(tpu), page)
    peaks = tpu_compile.visited(tpu), gpu_compile.short(gpu)
    tables = {
        "docs/cost.md": (*peaks, tpu_compile.costs(tpu)),
        "docs/overhead.md": (programs(found),),
        "docs/llama.md": (at_scale,),
        "docs/eight_bits_measured.md": (
            eight_bits.table(records.read(eight_bits.RESULTS)),
            gpu_compile.eight_bits(gpu),
        ),
        "docs/known_models.md": (known_models.table(records.read(known_models.RESULTS)),),
        "docs/reliability.md": (planted,),
        "docs/roundings.md": (roundings.table(records.read(roundings.RESULTS)),),
        "docs/storage.md": (storage.table(stored),),
    }
    texts = {ROOT / name: replaced((ROOT / name).read_text(), *new) for name, new in tables.items()}
    others = gpu_compile.architectures(records.read(records.RESULTS / "over_by_hand.jsonl"))
    return {PAGE: replaced(page, learned, at_scale, gpu_compile.costs(gpu), others), **texts}


def replaced(text: str, *tables: str) -> str:
    """Returns the text with tables in place of those with their headers.

    Raises:
        ValueError: if there is no table with such a header.
    """
    for new in tables:
        header, _, _ = new.partition("\n")
        pattern = rf"^{re.escape(header)}\n(\|.*\n)*"
        text, number = re.subn(pattern, lambda _, new=new: f"{new}\n", text, flags=re.M)
        if number != 1:
            raise ValueError(f"Found {number} tables with the header {header!r} instead of one.")
    return text


def between(marks: tuple[str, str], new: str, text: str) -> str:
    """Returns the text with what is new between its marks."""
    pattern = re.compile(f"{re.escape(marks[0])}.*?{re.escape(marks[1])}", re.DOTALL)
    return pattern.sub(lambda _: f"{marks[0]}\n\n{new}\n\n{marks[1]}", text)


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
