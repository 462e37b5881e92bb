"""Numbers, dtypes, policies and tables as reports and commands print them."""

import itertools
import re
from collections.abc import Sequence

_SHORT = {
    **{"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64"},
    **{"params": "p", "compute": "c", "output": "o", "matmul": "m", "reduce": "r"},
}
_LONG = re.compile(rf"\b({'|'.join(_SHORT)})\b")

_SAME_OUTPUT = re.compile(r"(\bc=(\w+)),o=\2\b")


def flop_text(flops: int) -> str:
    """Returns a number of floating-point operations, such as `12.3 GFLOP`."""
    return _scaled(flops, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def bytes_text(nbytes: int) -> str:
    """Returns a number of bytes, such as `1.5 MiB`."""
    return _scaled(nbytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def _scaled(number: float, base: int, units: Sequence[str]) -> str:
    """Returns a number with three digits, or with four just below the next unit of 1024."""
    power = 0
    while power < len(units) - 1 and round(number / base**power) >= base:
        power += 1
    scaled = number / base**power
    digits = 2 - (scaled >= 9.995) - (scaled >= 99.95)
    return f"{scaled:.{digits if power else 0}f} {units[power]}"


def error_text(error: float) -> str:
    """Returns a relative error, such as `1.2e-03`."""
    return "0" if error == 0 else f"{error:.1e}"


def paths_around(path: str) -> list[str]:
    """Returns a path and the paths around it, the innermost first; none of an empty path."""
    return [*itertools.accumulate(path.split("/"), "{}/{}".format)][::-1] if path else []


def starred(text: str) -> str:
    """Returns a path with `*` for each number: equal for all layers that are alike."""
    return re.sub(r"\d+", "*", text)


def count_text(count: int, noun: str) -> str:
    """Returns a count and its noun: `1 cast`, `1,200 casts`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def refuse_arguments(name: str, args: Sequence[object]) -> None:
    """Refuses the arguments of a function beside it, for a tool that returns a function of them."""
    if args:
        raise TypeError(
            f"Expected jmpx.inspect.{name} to get the function alone, got "
            f"{count_text(len(args), 'argument')} behind it: write {name}(f)(...)."
        )


def short_names(text: str) -> str:
    """Shortens dtypes and policies as policy strings may: `compute=bfloat16` is `c=bf16`.

    Parameters in float32 are left out, and so is an output dtype that equals the compute dtype.
    """
    short = _LONG.sub(lambda found: _SHORT[found[0]], text)
    return _SAME_OUTPUT.sub(r"\1", short.removeprefix("p=f32,"))


def columns(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Returns the lines of a table, whose columns are as wide as their widest cells.

    The columns of the indices in `right` are aligned to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [">" if index in right else "<" for index in range(len(widths))]
    return [
        "  ".join(f"{c:{s}{w}}" for c, s, w in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    ]
