"""Compiles train steps for a TPU v5e, without the chip, and records what they need.

    pip install -e '.[bench,tpu]'
    python benchmarks/tpu_compile.py                   # the points that are missing
    python benchmarks/tpu_compile.py --only vit autocast   # those of one model and one way
    python benchmarks/tpu_compile.py --list            # all points, and which are missing

A point takes a minute or two of a core, so the points are chosen: GROUPS says what each group
shows. The optimizer is Adam; the state is donated. A line has

- peak_mib: the most memory that a chip holds at once, by the compiler's plan, with arguments;
- gflop, gb_accessed: the compiler's estimates, which count the body of a loop once; gb_accessed
  counts arrays in the memory on the chip, too, and what is fetched into it twice;
- gb_hbm: what instructions and fetches read from the chip's HBM and write to it (one chip alone);
- mcycles: millions of cycles, by the compiler's estimates of what runs, the body of a loop once for
  each of its turns; for ratios at most, and the lines before 2026-11-27 have none;
- instructions, fusions, converts, copies: counted in the optimized program;
- products: matrix products and convolutions by the dtypes of operands and result;
- collectives: MiB that a chip sends, by kind and dtype;
- trace_cpu_s, compile_cpu_s: processor seconds, over all threads; compile_s: seconds by the clock,
  and load: how many processes wanted the cores when it was over.

A program that does not fit into the 16 GiB of a chip is a line, too (status `oom`).
"""

import collections
import functools
from collections.abc import Callable
from typing import Any

import jax
import records
import tpu
from collectives import read, table
from compiled_step import FREE, clocked, sizes, unfused
from gpu_program import Program
from model_steps import Point, trace
from tpu_matmul import CYCLES, count

import jmpx
from jmpx._inspect.hlo.module import Module

RESULTS = records.RESULTS / "tpu_compile.jsonl"
BARS = ("by hand", "autocast, save", "autocast", "float32")
MAIN = (*BARS, "MPX")
MARKED = ("by hand, marked blocks", "autocast, marked blocks")
LOW_SCORES = ("by hand, low scores", "by hand, low scores, marked blocks")
REST = ("MPX", "JMP", "module policies", "gradient functions", *MARKED, "float32, highest")
MIXED = "autocast, save mixed"
WITH_LOSS = "autocast, save, with the loss"
WIDE = ("gradient functions", "gradient functions, r=f32")
CARRIES = ("autocast, marked blocks, bfloat16 carry", "autocast, save, bfloat16 carry")

# Model, layers, batch, chips, whether scanned, ways, and what these points show. The bars compare
# those of the first groups.
GROUPS: list[tuple[str, int, int, str, bool, tuple[str, ...], str]] = [
    ("vit", 6, 64, "one", False, BARS, "six layers that are written out, 197 tokens"),
    (
        *("vit", 6, 32, "one", True),
        ("by hand", MARKED[0], "autocast, save", CARRIES[1]),
        "a scan keeps what its body saves, for each layer; its carry may be float32",
    ),
    ("language_model", 6, 16, "one", False, BARS, "attention over 512 tokens, and large logits"),
    ("byte_model", 6, 16, "one", False, (*BARS, *REST[:2]), "the same without large logits"),
    ("language_model", 6, 16, "one", False, (WITH_LOSS,), "the logits in a piece, too"),
    ("resnet", 50, 32, "one", False, BARS[:2], "convolutions, and state; it compiles longest"),
    ("vit", 6, 64, "one", False, REST, "how others write it, and marks in the model"),
    ("vit", 6, 64, "one", False, (MIXED, "autocast, save attention"), "memory against time"),
    ("byte_model", 6, 16, "one", False, (MIXED,), "as ViT's"),
    ("language_model", 6, 16, "one", False, (MIXED,), "as ViT's"),
    ("vit", 6, 64, "one", False, LOW_SCORES, "scores scaled in bfloat16: less is kept by hand"),
    ("byte_model", 6, 16, "one", False, (LOW_SCORES[0], MARKED[1]), "as ViT's"),
    ("language_model", 6, 16, "one", False, (*LOW_SCORES, MARKED[1]), "as ViT's"),
    ("vit", 2, 32, "data", False, MAIN, "in which dtypes eight chips sum their gradients"),
    ("vit", 2, 32, "fsdp", False, BARS[:3], "in which dtypes they gather weights"),
    ("language_model", 6, 16, "one", True, ("by hand", MARKED[0], "autocast, save"), "as ViT's"),
    ("vit", 6, 16, "one", False, MAIN, "the picture's left end, where the state counts most"),
    ("vit", 6, 128, "one", False, MAIN, "the picture's right end"),
    ("language_model", 6, 16, "one", False, REST[:2], "the same programs as by hand?"),
    ("language_model", 6, 4, "one", False, MAIN, "the picture's left end"),
    ("language_model", 6, 32, "one", False, MAIN, "the picture's right end"),
    ("resnet", 50, 32, "one", False, (*MAIN, "JMP"), "BatchNorm as others write it"),
    ("vit", 6, 32, "one", True, ("autocast", MARKED[1], CARRIES[0]), "what the scan's carry costs"),
    ("vit", 6, 64, "one", False, ("gradient functions, r=f32",), "float32 gradients"),
    ("language_model", 6, 16, "one", False, WIDE, "as ViT's, and sums of large logits"),
    ("vit", 12, 64, "one", False, BARS[:2], "whether six layers stand for the paper's twelve"),
]
KEY = ("model", "way", "layers", "batch", "scanned", "chips")


def points() -> list[records.Record]:
    """Returns the fields of all points, the most informative first."""
    found = []
    for model, layers, batch, chips, scanned, ways, _ in GROUPS:
        found += [(model, way, layers, batch, scanned, chips) for way in ways]
    return [dict(zip(KEY, values, strict=True)) for values in dict.fromkeys(found)]


def counts(hlo: str) -> records.Record:
    """Counts what an optimized program holds, given as text."""
    names = collections.Counter(one.kind for one in Module(hlo).instructions.values())
    return {
        "instructions": names.total(),
        "fusions": names["fusion"],
        "converts": names["convert"],
        "copies": names["copy"] + names["copy-start"],
        "products": count(jmpx.inspect.compiled(hlo).products),
    }


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


def measure(small: bool = False, **fields: Any) -> records.Record:
    """Compiles a point and returns what was found."""
    return compiled(lambda: trace(Point(**fields), tpu.devices(), small))


def compiled(make: Callable[[], Any]) -> records.Record:
    """Compiles what a function traces; a program that does not fit is a result, too."""
    try:
        program, spent = clocked(make, "tpu")
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"status": "oom", "message": str(error).splitlines()[0][:300], **tpu.target()}
    hlo, cost, memory = program.as_text(), program.cost_analysis(), program.memory_analysis()
    sent = table(read(hlo))
    return {
        "status": "ok",
        "peak_mib": memory.peak_memory_in_bytes / 2**20,
        "arguments_mib": memory.argument_size_in_bytes / 2**20,
        "gflop": cost["flops"] / 1e9,
        "gb_accessed": cost["bytes accessed"] / 1e9,
        "mcycles": megacycles(hlo),
        "gb_hbm": None if sent else hbm_bytes(hlo) / 1e9,
        **counts(hlo),
        "collectives": sent,
        **spent,
        **tpu.target(),
    }


main = functools.partial(records.main, __doc__, {"tpu_compile": (points(), measure)}, out=RESULTS)


if __name__ == "__main__":
    main()
