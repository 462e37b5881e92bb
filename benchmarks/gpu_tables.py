"""Tables of what `gpu_compile.py` found; `report.py` writes them into the pages."""

from gpu_compile import KEY, RESULTS as RESULTS
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


def costs(found: list[Record], title: str = "GPU compiler", only: str = "") -> str:
    """Returns what each step needs, and its ratios to the step by hand; those of some groups."""
    steps = [line for line in found if line["benchmark"] == "gpu_compile" and only in group(line)]
    by_hand = {group(line): line for line in steps if line["way"] == "by hand"}
    rows = [(group(one), NAMES[one["way"]], *cells(one, by_hand[group(one)])) for one in steps]
    return table((title, "the step", *NUMBERS), rows)


def short(found: list[Record]) -> str:
    """Returns the steps in bfloat16 of the ViT that is written out, for visitors."""
    return costs(found, "NVIDIA's compiler", "H100, ViT of width 768, 4 layers, batch 64, bfloat16")


def group(line: Record) -> str:
    chip, model, layers, batch, scanned, dtype = (line[key] for key in KEY)
    return (
        f"{chip}, {MODELS[model]}, {layers} layers{', scanned' * scanned}, batch {batch}, {dtype}"
    )


def cells(line: Record, by_hand: Record) -> tuple[str, ...]:
    guess, peak = line.get("estimate_ms"), line["peak_mib"]
    times = (f"{guess:.3f}", f"{guess / by_hand['estimate_ms']:.3f}") if guess else ("", "")
    ratio = f"{peak / by_hand['peak_mib']:.3f}"
    return f"{peak:,.0f}", ratio, *times, f"{line['kernels']:,}", f"{line['compile_s']:.0f}"
