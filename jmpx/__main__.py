"""Prints what a policy string means, and which of its rules each module of a model has.

    python -m jmpx "c=bf16,o=f32; BatchNorm: full; */router: c=f32,m=highest"
    python -m jmpx --model pkg.module:make "c=bf16,o=f32; BatchNorm: full | dynamic, init=2**15"

The string is a policy or a policy map and, after a bar, a loss scale; without one, the policy map
decides, as with the loss scale `auto`.

`make` is a function without arguments. It returns a module of Equinox or NNX; or a pair of a Linen
module or a Haiku transformed function, whose `init` is traced, and a tuple of its arguments; or a
pair of any other function and its arguments, such as `lambda x: model.init(key, x, train=False)`.
A function that calls no module of these frameworks is traced under autocast. No array is computed.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn, TypeAlias

from jmpx._loss_scale import LossScale, NoOpLossScale
from jmpx._mixed_precision import get_mixed_precision
from jmpx._policy import ATTRIBUTES, Policy, given_fields
from jmpx._policy_map import PolicyMap
from jmpx._rules import Rule

if TYPE_CHECKING:
    from jmpx._models import Report

_Row: TypeAlias = tuple[tuple[str, ...], dict[str, str]]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Prints one line, and ends the program with the code 2."""
        self.exit(2, f"{message}; {self.format_usage()}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m jmpx",
        usage='python -m jmpx [--model MODULE:FUNCTION] "c=bf16,o=f32; BatchNorm: full"',
        description=(__doc__ or "").partition("\n")[0],
    )
    parser.add_argument(
        "precision",
        metavar="POLICY",
        help="a policy or a policy map and, after a bar (|), a loss scale",
    )
    parser.add_argument(
        "--model",
        metavar="MODULE:FUNCTION",
        help="a function without arguments that returns a module of Equinox or NNX, or a pair of "
        "what is traced and a tuple of its arguments: a Linen module, a Haiku transformed "
        "function, or any other function",
    )
    return parser


def table(policy_map: PolicyMap) -> str:
    """Returns a table of what each rule of a policy map sets or inherits."""
    default, rules = policy_map.default, policy_map.rules
    rows = [(("default",), given_fields(default))]
    rows += [((rule.label,), _fields_of(rule, default)) for rule in rules]
    has_matmul = any("matmul" in fields for _, fields in rows)
    for (_, fields), rule in zip(rows, (None, *rules), strict=True):
        if has_matmul and not (rule and rule.is_operation):
            fields.setdefault("matmul", "- *" if rule else "-")
    lines = _aligned(("",), rows)
    if any("*" in value for _, fields in rows for value in fields.values()):
        inherited = "the compute dtype, or matmul," if has_matmul else "the compute dtype"
        lines.append(f"* {inherited} of what surrounds the call: here, of the default")
    if any(rule.optional for rule in rules):
        lines.append("? no warning where the rule matches nothing")
    return "\n".join(lines)


def _fields_of(rule: Rule, default: Policy) -> dict[str, str]:
    """Returns what holds where a rule matches, with a star where it is inherited from a call."""
    fields = given_fields(rule.resolve(default, default))
    inherited = {key for key in ("compute", "output", "matmul") if getattr(rule, key) is None}
    if rule.is_operation:  # it has no more than the rule says
        return {key: fields[key] for key in ("compute", "matmul") if key not in inherited}
    return {key: f"{value} *" if key in inherited else value for key, value in fields.items()}


def _loss_scale_line(text: str, loss_scale: LossScale) -> str:
    """Returns the line that shows the loss scale, and why, if the policy map decided on it."""
    line = f"loss scale: {loss_scale}"
    if text.partition("|")[2].partition(",")[0].strip().lower() not in ("", "auto"):
        return line
    which = "no policy computes" if isinstance(loss_scale, NoOpLossScale) else "a policy computes"
    return f"{line} (auto: {which} in float16)"


def _aligned(header: tuple[str, ...], rows: Sequence[_Row]) -> list[str]:
    """Returns the lines of a table.

    Args:
        header: the names of the first columns.
        rows: the first cells of each row, and what it sets, by the keys of policy strings. A column
            that no row sets is left out.
    """
    keys = [key for key in ATTRIBUTES if any(key in fields for _, fields in rows)]
    cells = [(*header, *keys)]
    cells += [(*labels, *(fields.get(key, "") for key in keys)) for labels, fields in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]


def _lines_of(report: "Report") -> Iterator[str]:
    """Yields the lines that tell which rule each module of a model has."""
    for table in report.tables:
        yield from ("", table.title, *_aligned(table.header, table.rows))
    if report.notes:
        yield from ("", *report.notes)


def main(arguments: list[str]) -> int:
    """Prints what the arguments ask for, and returns the exit code.

    Raises:
        SystemExit: after the help, and after a line about wrong usage.
    """
    given = _parser().parse_args(arguments)
    try:
        precision = get_mixed_precision(given.precision)
        policy_map = precision.policy_map
        lines = [table(policy_map), _loss_scale_line(given.precision, precision.loss_scale)]
        if given.model is not None:
            from jmpx._models import load, report  # here, because it needs most of jmpx

            lines += _lines_of(report(policy_map, load(given.model)))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(*lines, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
