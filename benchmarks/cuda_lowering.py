"""Counts the matrix products of train steps lowered for CUDA, by operand dtypes, as lines of JSON.

    python benchmarks/cuda_lowering.py --model=base

The steps are lowered and not compiled, which needs no GPU. A CPU's program could not tell: XLA
computes 16-bit products in float32 there. A line counts the `dot_general` operations of the
StableHLO text; those of a function count as often as it is called.
"""

import collections
import re

import records
import steps
from models import MODELS
from tqdm import tqdm

DOT = re.compile(r"stablehlo\.dot_general .*: \(tensor<(\S*)>, tensor<(\S*)>\) ->")
CALL = re.compile(r"call @([\w.]+)\(")
FUNCTION = re.compile(r"^  func\.func \w+ @([\w.]+)\(", re.MULTILINE)


def count_dots(text: str) -> dict[str, int]:
    """Counts products by the dtypes of their operands, such as `f16 x f16`."""
    pieces = FUNCTION.split(text)[1:]
    bodies = dict(zip(pieces[::2], pieces[1::2], strict=True))
    counts: dict[str, collections.Counter[str]] = {}

    def of(name: str) -> collections.Counter[str]:
        if name not in counts:
            dots, calls = DOT.findall(bodies[name]), CALL.findall(bodies[name])
            dtypes = [" x ".join(tensor.rpartition("x")[2] for tensor in dot) for dot in dots]
            counts[name] = sum(map(of, calls), collections.Counter(dtypes))
        return counts[name]

    return dict(sorted(of("main").items()))


def main(arguments: list[str] | None = None) -> None:
    parser = records.parser(__doc__)
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args(arguments)
    points = steps.points(
        ("handwritten", "jmpx", "autocast", "autocast_saved"), ("float32", *steps.LOW)
    )
    for point in tqdm(points, unit="step"):
        traced = steps.trace(point, MODELS[args.model], args.batch).step
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        records.emit("cuda_lowering", **vars(args), **point._asdict(), dots=count_dots(text))


if __name__ == "__main__":
    main()
