"""What `python -m jmpx explain` prints: what a policy string means, and for which modules."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from jmpx._loss_scale import LossScale, NoOpLossScale
from jmpx._mixed_precision import get_mixed_precision
from jmpx._policy import ATTRIBUTES, Policy, given_fields
from jmpx._policy_map import PolicyMap
from jmpx._rules import Rule

if TYPE_CHECKING:
    from jmpx._models import Report

FLAGS_REMEDY = (
    "explain parses no flags of a program, so use audit MODULE:FUNCTION -- FLAGS, whose table has "
    "the policy of each module"
)

_Row: TypeAlias = tuple[tuple[str, ...], dict[str, str]]


def explain(precision: str, model: str | None) -> list[str]:
    """Returns the lines that tell what a policy string means.

    Args:
        precision: the policy string.
        model: the function that makes a model, such as `"pkg.module:make"`, if the lines are to
            tell which rule each of its modules has.

    Raises:
        ValueError: if the string is wrong, or the model cannot be made or traced.
    """
    mixed = get_mixed_precision(precision)
    lines = [table(mixed.policy_map), _loss_scale_line(precision, mixed.loss_scale)]
    if model is not None:
        lines += _lines_about(model, mixed.policy_map)
    return lines


def _lines_about(model: str, policy_map: PolicyMap) -> list[str]:
    """Returns the lines that tell which rule each module of a model has."""
    from jmpx._models import RETURNS, report  # here, because it needs most of jmpx
    from jmpx._targets import load

    try:
        return list(_lines_of(report(policy_map, load(model, "--model", RETURNS))))
    except ValueError as error:
        if type(error.__cause__).__name__ != "UnparsedFlagAccessError":  # absl's
            raise
        raise ValueError(f"{error}: {FLAGS_REMEDY}.") from error


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
