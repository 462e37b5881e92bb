"""`python -m jmpx "c=bf16,o=f32; BatchNorm: full"` prints what a policy string means."""

import sys

from jmpx._dtypes import DTypeLike, dtype_name
from jmpx._policy import Policy
from jmpx._policy_map import PolicyMap, get_policy_map

_USAGE = 'usage: python -m jmpx "c=bf16,o=f32; BatchNorm: full; */head/*: c=f32"'
_HEADER = ("", "params", "compute", "output")


def table(policy_map: PolicyMap) -> str:
    """Returns a table of the dtypes that each rule of a policy map sets or inherits."""
    default = policy_map.default
    rows = [_HEADER, ("default", *map(dtype_name, _dtypes(default)))]
    for rule in policy_map.rules:
        dtypes = [dtype_name(dtype) for dtype in _dtypes(rule.resolve(default, default))]
        depends = (False, rule.compute is None, rule.output is None)  # on the surrounding call
        marked = (f"{d} *" if is_open else d for d, is_open in zip(dtypes, depends, strict=True))
        rows.append((rule.label, *marked))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    if any("*" in cell for row in rows for cell in row[1:]):
        lines.append("* the compute dtype of what surrounds the call: here, of the default")
    if any(rule.optional for rule in policy_map.rules):
        lines.append("? no warning where the rule matches nothing")
    return "\n".join(lines)


def _dtypes(policy: Policy) -> tuple[DTypeLike, DTypeLike, DTypeLike]:
    return policy.param_dtype, policy.compute_dtype, policy.output_dtype


def main(arguments: list[str]) -> int:
    """Prints the table for the only argument, and returns the exit code."""
    if len(arguments) != 1 or arguments[0] in ("-h", "--help"):
        wanted = arguments in (["-h"], ["--help"])
        print(_USAGE, file=sys.stdout if wanted else sys.stderr)
        return 0 if wanted else 2
    try:
        print(table(get_policy_map(arguments[0])))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
