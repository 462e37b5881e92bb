"""Counts the matrix products of train steps lowered for CUDA, by operand dtypes, as JSON lines.

    python benchmarks/cuda_lowering.py --model=base

The steps are those of `gpu_vit.py`, lowered and not compiled, which needs no GPU. A CPU's program
would not tell: XLA computes 16-bit products in float32 there. A line counts the `dot_general`
operations of the StableHLO text, those of a function as often as it is called.
"""

import argparse
import collections
import json
import re
from typing import Any

import gpu_vit
import jax
from gpu_vit import Point

DOT = re.compile(r"stablehlo\.dot_general .*: \(tensor<(\S*)>, tensor<(\S*)>\) ->")
CALL = re.compile(r"call @([\w.]+)\(")
FUNCTION = re.compile(r"^  func\.func \w+ @([\w.]+)\(", re.MULTILINE)


def lowered_text(model: gpu_vit.ViT, point: Point, batch: int) -> str:
    """Returns a step's StableHLO for CUDA."""
    state = gpu_vit.new_state(model.init())
    traced, _ = gpu_vit.trace(model, point, state, model.batch(batch))
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def count_dots(text: str) -> dict[str, int]:
    """Counts by dtypes, such as `f16 x f16`; `main` calls the other functions."""
    pieces = FUNCTION.split(text)[1:]
    bodies = dict(zip(pieces[::2], pieces[1::2], strict=True))
    counts: dict[str, collections.Counter[str]] = {}

    def of(name: str) -> collections.Counter[str]:
        if name not in counts:
            dtypes = [" x ".join(map(element, dot)) for dot in DOT.findall(bodies[name])]
            calls = CALL.findall(bodies[name])
            counts[name] = sum(map(of, calls), collections.Counter(dtypes))
        return counts[name]

    return dict(sorted(of("main").items()))


def element(tensor: str) -> str:
    """Returns the dtype of a tensor type such as `8x64xbf16`."""
    return tensor.rpartition("x")[2]


POINTS = (
    Point("handwritten", "float32"),
    *(Point(name, d) for name in ("handwritten", "jmpx", "autocast") for d in gpu_vit.LOW),
)


def measure(model: gpu_vit.ViT, batch: int, point: Point) -> dict[str, Any]:
    dots = count_dots(lowered_text(model, point, batch))
    return {**point._asdict(), "dots": dots}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(gpu_vit.MODELS), default="tiny")
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args(arguments)
    for point in POINTS:
        found = measure(gpu_vit.MODELS[args.model], args.batch, point)
        where = {"benchmark": "cuda_lowering", "jax": jax.__version__}
        print(json.dumps({**where, "model": args.model, "batch": args.batch, **found}))


if __name__ == "__main__":
    main()
