"""Times mixed-precision steps against hand-written ones on this machine, as JSON lines.

    python benchmarks/step_time.py --model=desktop --batch=8 --rounds=20

The steps are those of `gpu_vit.py`, taken in turns. A ratio is the median over the rounds of an
implementation's time over the hand-written step's in the same round, in the same dtype; beside it
stand the quartiles. Hand-written is the step that skips with `where`; in bfloat16 only MPX skips.
"""

import argparse
import json
import statistics
from typing import Any

import gpu_vit
from gpu_vit import Point


def measure(
    model: gpu_vit.ViT, batch: int, points: list[Point], rounds: int, **options: Any
) -> list[dict[str, Any]]:
    """Returns each implementation's time over that of the hand-written step of its dtype."""
    records = gpu_vit.time_points(model, batch, points, rounds, **options)
    rounds_of = {(r["dtype"], r["implementation"]): r.get("step_ms_rounds") for r in records}
    found = []
    for (dtype, implementation), times in rounds_of.items():
        if implementation != "handwritten":
            base = rounds_of[dtype, "handwritten"]
            fields = {"dtype": dtype, "implementation": implementation}
            fields["handwritten_ms"] = round(statistics.median(base), 4)
            found.append(fields | (ratio(times, base) if times else {"failed": True}))
    return found


def ratio(times: list[float], base: list[float]) -> dict[str, Any]:
    ratios = [a / b for a, b in zip(times, base, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {"ratio": round(median, 4), "quartiles": [round(low, 4), round(high, 4)]}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(gpu_vit.MODELS), default="tiny")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--dtypes", nargs="+", choices=gpu_vit.LOW, default=gpu_vit.LOW)
    names = list(gpu_vit.IMPLEMENTATIONS)
    parser.add_argument("--implementations", nargs="+", choices=names, default=names)
    args = parser.parse_args(arguments)
    others = [name for name in args.implementations if name != "handwritten"]
    points = gpu_vit.choose(["handwritten", *others], args.dtypes)
    fields = {"model": args.model, "batch": args.batch, "rounds": args.rounds}
    for found in measure(gpu_vit.MODELS[args.model], args.batch, points, args.rounds):
        print(json.dumps({"benchmark": "step_time", **gpu_vit.surroundings(), **fields, **found}))


if __name__ == "__main__":
    main()
