"""Runs the benchmarks that need no GPU, and writes their tables into pages.

    python benchmarks/report.py                      # all of it: half an hour on two quiet cores
    python benchmarks/report.py --only autocast import_time
    python benchmarks/report.py --only               # only the pages again

What compiles for a TPU runs where libtpu is installed, and keeps its lines elsewhere.

Every line that a benchmark prints is kept in `benchmarks/results/cpu.jsonl`; a benchmark that is
run again replaces its lines there. `benchmarks/README.md` gets the rows of HEADLINES, between two
marks, and `benchmarks/results/README.md` all rows and all tables. Both get those of
`tpu_compile.py`, which keeps its own lines (`tpu_tables.py`). The repository's README and
`docs/cost.md` get the two tables for visitors, of programs and of peak memory.
"""

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import records
import tpu_tables
from records import Record
from tables import Row, plain, table, table_of_bars
from tqdm import tqdm

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results" / "cpu.jsonl"
PAGE, DETAILS = FOLDER / "README.md", FOLDER / "results" / "README.md"
MARKS = "<!-- table, by report.py -->", "<!-- end -->"
VISITED = FOLDER.parent / "README.md", FOLDER.parent / "docs" / "cost.md"

# A step of jmpx, and the hand-written step that skips in the same way.
FLOAT16 = {
    "jmpx_where": "handwritten",
    "jmpx_counting_where": "handwritten",
    "jmpx_wrapped": "handwritten",
    "jmpx_jmp_style": "handwritten_late",
    "jmpx": "handwritten_cond",
    "jmpx_counting": "handwritten_cond",
    "jmpx_wrapped_cond": "handwritten_cond",
}
BFLOAT16 = {"jmpx": "handwritten", "jmpx_jmp_style": "handwritten"}
GROWTH = ("handwritten", "jmpx_where", "jmpx", "mpx", "jmp")  # over these numbers of layers
LAYERS = (2, 4, 6, 8)


def compile_step(implementation: str, dtype: str = "float16", layers: int = 12) -> list[str]:
    point = [f"--implementation={implementation}", f"--dtype={dtype}", f"--layers={layers}"]
    return ["compiled_step.py", *point]


COMMANDS = {
    "compiled_step": [
        *(compile_step(name, layers=n) for n in LAYERS for name in GROWTH),
        *(compile_step(name) for name in ("jmp", "mpx", *FLOAT16, *sorted({*FLOAT16.values()}))),
        compile_step("handwritten", "float32"),
        *(compile_step(name, "bfloat16") for name in ("jmp", "mpx", "handwritten", *BFLOAT16)),
    ],
    "autocast": [["autocast.py"]],
    "growth_steps": [["growth_steps.py"]],
    "underflow": [["underflow.py"]],
    "cuda_lowering": [["cuda_lowering.py"]],
    "eager_casts": [["eager_casts.py"]],
    "import_time": [["import_time.py"]],
    "fsdp_partitioner": [["fsdp.py", "--compiler=partitioner"]],
    "fsdp_stablehlo": [["fsdp.py", "--compiler=stablehlo"]],
    "tpu_steps": [["tpu_matmul.py", "--part=steps"]],
    "tpu_products": [["tpu_matmul.py", "--part=products"]],
    "tpu_reductions": [["tpu_matmul.py", "--part=reductions"]],
    "tpu_fsdp": [["fsdp.py", "--compiler=tpu"]],
}
RUNNABLE = [
    name
    for name in COMMANDS
    if not name.startswith("tpu_") or importlib.util.find_spec("libtpu") is not None
]


def run(command: list[str]) -> list[Record]:
    """Runs one benchmark and returns its lines."""
    process = subprocess.run(
        [sys.executable, *command], cwd=FOLDER, stdout=subprocess.PIPE, text=True, check=True
    )
    return [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]


# The bar: what has to hold, and what was measured.

HEADLINES = (
    "float16, HLO instructions: jmpx over handwritten_cond",
    "float16, HLO instructions: jmpx_where over handwritten",
    "bfloat16, HLO instructions: jmpx over handwritten",
    "float16, compile time: jmp over jmpx_where",
    "gradient over float32's, on growth steps: largest",
    "residual bytes over float32's: autocast",
    "residual bytes over float32's: autocast, save",
    "trace time over no autocast's: 24 layers",
    "trace time of save= over one checkpoint's: 24 layers",
    "time over JMP's of casting 2000 arrays outside of jit",
    "milliseconds that `import jmpx` adds to `import jax`",
    "FSDP, MiB sent: batch_sharding, c=bf16, fsdp_partitioner",
    "FSDP, MiB sent: batch_sharding, c=bf16,r=bf16, fsdp_partitioner",
    "FSDP, MiB sent: jmpx.distributed.gather, c=bf16, fsdp_stablehlo",
    "FSDP, MiB sent: jmpx.distributed.gather, c=bf16,r=bf16, fsdp_stablehlo",
    "FSDP, gradient error over that on one device: batch_sharding, c=bf16",
    "FSDP, gradient error over that on one device: jmpx.distributed.gather, c=bf16",
    "TPU v5e, share of products in float32, highest: router, adapter",
    "TPU v5e, share of products in bfloat16: rest, adapter",
    "TPU v5e, share of products in float32, highest: router, autocast",
    "TPU v5e, share of products in bfloat16: rest, autocast",
    "TPU v5e, cycles of a bfloat16 product: highest over unset",
)
COUNTS = {"instructions": "HLO instructions", "entry_ops": "entry ops", "bytes_accessed": "bytes"}
RESIDUALS = {"autocast": 0.67, "autocast, save": 0.12}
TRACES = {"24 layers": 2.3, "24 layers, scanned": 1.3}
EAGER = {  # shares of JMP's time, because milliseconds are those of one machine
    (2000, "to_cast", "casting 2000 arrays outside of jit"): 0.212,
    (2000, "already_right", "casting 2000 arrays that are right"): 0.107,
    (20000, "to_cast", "casting 20000 arrays outside of jit"): 0.307,
    (20000, "already_right", "casting 20000 arrays that are right"): 0.163,
}


def bars(found: list[Record]) -> Iterator[Row]:
    """Yields the rows that the records answer."""
    by_name: dict[str, list[Record]] = {}
    for record in found:
        by_name.setdefault(record["benchmark"], []).append(record)
    yield from compiled_bars(by_name.get("compiled_step", []))
    for record in by_name.get("growth_steps", []):
        for kind in ("growth", "shrink", "steady") if record["implementation"] == "jmpx" else ():
            measure, ends = f"gradient over float32's, on {kind} steps", record[kind]
            yield Row(f"{measure}: smallest", ends["smallest_ratio"], 1.0, least=True)
            yield Row(f"{measure}: largest", ends["largest_ratio"], 1.0)
    for record in by_name.get("autocast", []):
        way = record["way"]
        if way in RESIDUALS:
            measure = f"residual bytes over float32's: {way}"
            yield Row(measure, record["of_float32"], RESIDUALS[way])
        elif way in TRACES:
            yield Row(f"trace time over no autocast's: {way}", record["ratio"], TRACES[way])
            measure = f"trace time of save= over one checkpoint's: {way}"
            yield Row(measure, record["save_ratio"], TRACES[way])
    eager = by_name.get("eager_casts", [])
    later = {(r["library"], r["leaves"], r["case"]): r["later_ms"] for r in eager}
    for (leaves, case, words), bar in EAGER.items() if later else ():
        ratio = later["jmpx", leaves, case] / later["jmp", leaves, case]
        yield Row(f"time over JMP's of {words}", ratio, bar)
    for record in by_name.get("import_time", []):
        if record["library"] == "jmpx":
            measure = "milliseconds that `import jmpx` adds to `import jax`"
            yield Row(measure, record["over_jax_ms"], 10)
    yield from fsdp_bars(record for name in FSDP for record in by_name.get(name, []))
    yield from tpu_bars(by_name.get("tpu_steps", []), by_name.get("tpu_products", []))


FSDP = {  # what a device may send in a step, in MiB
    "fsdp_partitioner": {"batch_sharding, c=bf16": 7.2, "batch_sharding, c=bf16,r=bf16": 4.4},
    "fsdp_stablehlo": {
        "jmpx.distributed.gather, c=bf16": 4.3,
        "jmpx.distributed.gather, c=bf16,r=bf16": 2.9,
    },
}
EXACT = {
    "batch_sharding, c=bf16": "all-reduce f32",
    "jmpx.distributed.gather, c=bf16": "reduce-scatter f32",
}


def fsdp_bars(found: Iterable[Record]) -> Iterator[Row]:
    for record in found:
        way, name = record["way"], record["benchmark"]
        if way in FSDP[name]:
            yield Row(f"FSDP, MiB sent: {way}, {name}", record["sent_mib"], FSDP[name][way])
        if way in EXACT:
            sent = sum(record["by_kind"].get(kind, 0) for kind in ("all-gather bf16", EXACT[way]))
            words = "gathered in bfloat16 or reduced in float32"
            share = sent / sum(record["by_kind"].values())
            yield Row(f"FSDP, share {words}: {way}, {name}", share, 1, least=True)
        if way in EXACT and "gradient_error" in record:
            ratio = record["gradient_error"] / record["error_one_device"]
            yield Row(f"FSDP, gradient error over that on one device: {way}", ratio, 1)


ROUTER = "; */router: c=f32,m=highest"  # how the policy ends whose steps have a bar


def tpu_bars(steps: list[Record], products: list[Record]) -> Iterator[Row]:
    for record in steps:
        if record["policy"].endswith(ROUTER):
            for part, words, wanted in (
                ("router", "float32, highest", r".* -> f32, highest"),
                ("rest", "bfloat16", r"bf16 x bf16 -> .*"),
            ):
                right = sum(n for key, n in record[part].items() if re.fullmatch(wanted, key))
                measure = f"TPU v5e, share of products in {words}: {part}, {record['way']}"
                yield Row(measure, right / sum(record[part].values()), 1, least=True)
    cycles = {
        r["precision"]: r["cycles"] for r in products if r["dtype"] == "bfloat16" and "cycles" in r
    }
    if cycles:
        ratio = cycles["highest"] / cycles["unset"]
        yield Row("TPU v5e, cycles of a bfloat16 product: highest over unset", ratio, 1)


def compiled_bars(found: list[Record]) -> Iterator[Row]:
    steps = {(r["implementation"], r["dtype"]): r for r in found if r["layers"] == 12}
    for dtype, pairs, bar in (("float16", FLOAT16, 1.01), ("bfloat16", BFLOAT16, 1.0)):
        for name, by_hand in pairs.items():
            if (name, dtype) in steps and (by_hand, dtype) in steps:
                ours, theirs = steps[name, dtype], steps[by_hand, dtype]
                words = f"{name} over {by_hand}"
                for key, count in COUNTS.items():
                    yield Row(f"{dtype}, {count}: {words}", ours[key] / theirs[key], bar)
                ratio = ours["compile_cpu_s"] / theirs["compile_cpu_s"]
                yield Row(f"{dtype}, compile time: {words}", ratio, 1.1)
    if ("jmp", "float16") in steps and ("jmpx_where", "float16") in steps:
        jmp, ours = steps["jmp", "float16"], steps["jmpx_where", "float16"]
        ratio = jmp["compile_cpu_s"] / ours["compile_cpu_s"]
        yield Row("float16, compile time: jmp over jmpx_where", ratio, 6, least=True)


# The tables for visitors.


STEPS = {  # how a step is written, and what it skips with
    "handwritten_cond": ("by hand", "`cond`"),
    "jmpx": ("jmpx", "`cond`, the default on CPUs"),
    "handwritten": ("by hand", "`where`"),
    "jmpx_where": ("jmpx", "`where`"),
    "mpx": ("MPX", "`where`"),
    "jmp": ("JMP", "`where`"),
}
MODELS = (tpu_tables.VIT, tpu_tables.BYTES, tpu_tables.TEXT, tpu_tables.IMAGES)
WAYS = ("float32", "by hand", "JMP", "MPX", "autocast", "autocast, save")


def programs(found: list[Record]) -> str:
    """Returns the sizes of compiled float16 steps, and how long they compile."""
    compiled = [record for record in found if record["benchmark"] == "compiled_step"]
    float16 = [r for r in compiled if (r["dtype"], r["layers"]) == ("float16", 12)]
    chosen = {record["implementation"]: record for record in float16}
    rows = [
        (*words, plain(chosen[name]["instructions"]), f"{chosen[name]['compile_cpu_s']:.1f}")
        for name, words in STEPS.items()
        if name in chosen
    ]
    return table(("the step", "skips with", "HLO instructions", "CPU seconds to compile"), rows)


def peaks(found: Iterable[Record] | None = None) -> str:
    """Returns the peak memory of train steps on a TPU."""
    by_group = tpu_tables.groups(tpu_tables.load(found))
    rows = (
        (tpu_tables.WAYS[way], *(tpu_tables.cell(by_group.get(m, {}).get(way)) for m in MODELS))
        for way in WAYS
    )
    return table(("MiB", *map(tpu_tables.title, MODELS)), rows)


def visited(found: list[Record], text: str) -> str:
    """Returns the text with the two tables for visitors, in place of those with their headers."""
    for new in (programs(found), peaks()):
        header = re.escape(new.partition("\n")[0])
        text = re.sub(rf"^{header}\n(\|.*\n)*", lambda _, new=new: f"{new}\n", text, flags=re.M)
    return text


# The pages.


# Fields that say where and when; one line over each table says it.
WHERE = {"benchmark", "date", "measured", "platform", "device_kind", "backend", "cores", "cuda"}
WHERE |= {"python", "jax", "versions", "target", "libtpu"}


def where(found: list[Record]) -> str:
    jax = {r.get("jax") or r["versions"]["jax"] for r in found}
    days = {r.get("measured") or r["date"][:10] for r in found}
    cores = {f"{r['cores']} CPU cores" for r in found}
    chips = {f"; for {r['target']} by libtpu {r['libtpu']}" for r in found if "target" in r}
    places = f"{', '.join(sorted(cores))}{''.join(sorted(chips))}"
    return f"JAX {', '.join(sorted(jax))}; {', '.join(sorted(days))}; {places}."


def table_of(found: list[Record]) -> str:
    keys = list(dict.fromkeys(key for record in found for key in record if key not in WHERE))
    return table(keys, ([plain(record.get(key, "")) for key in keys] for record in found))


def details(found: list[Record]) -> str:
    """Returns the page of all rows and all tables."""
    parts = ["# All results", f"Written by `{Path(__file__).name}` from `{RESULTS.name}`."]
    parts += ["## The bar", table_of_bars(bars(found))]
    for name in COMMANDS:
        chosen = [record for record in found if record["benchmark"] == name]
        if chosen:
            parts += [f"## {name}", where(chosen), table_of(chosen)]
    parts += tpu_tables.sections()
    return "\n\n".join(parts) + "\n"


def page(found: list[Record], text: str) -> str:
    """Returns the text with the headlines between its marks, and what a TPU's compiler made."""
    rows = {row.measure: row for row in bars(found)}
    headlines = table_of_bars(rows[name] for name in HEADLINES if name in rows)
    return between(tpu_tables.MARKS, tpu_tables.short(), between(MARKS, headlines, text))


def between(marks: tuple[str, str], new: str, text: str) -> str:
    pattern = re.compile(f"{re.escape(marks[0])}.*?{re.escape(marks[1])}", re.DOTALL)
    return pattern.sub(lambda _: f"{marks[0]}\n\n{new}\n\n{marks[1]}", text)


def main(arguments: list[str] | None = None) -> None:
    parser = records.parser(__doc__)
    parser.add_argument("--only", nargs="*", choices=list(COMMANDS), default=RUNNABLE)
    chosen = parser.parse_args(arguments).only
    found = records.read(RESULTS)
    for name, command in tqdm([(n, c) for n in chosen for c in COMMANDS[n]], unit="run"):
        if command is COMMANDS[name][0]:
            found = [record for record in found if record["benchmark"] != name]
        found += run(command)
        RESULTS.write_text("".join(json.dumps(record) + "\n" for record in found))
    DETAILS.write_text(details(found))
    PAGE.write_text(page(found, PAGE.read_text()))
    for path in VISITED:
        path.write_text(visited(found, path.read_text()))


if __name__ == "__main__":
    main()
