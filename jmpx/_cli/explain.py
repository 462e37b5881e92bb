"""What `python -m jmpx explain` prints: what a policy string means, and for which modules."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from jmpx._base.messages import describe
from jmpx._base.text import columns
from jmpx._policies.maps import PolicyMap
from jmpx._policies.policy import ATTRIBUTES, Policy, given_fields
from jmpx._policies.rules import Rule
from jmpx._scales.kinds import LossScale, NoOpLossScale
from jmpx._scales.mixed_precision import MixedPrecision, get_mixed_precision

if TYPE_CHECKING:
    from jmpx._cli.models import Report

FLAGS_REMEDY = (
    "explain parses no flags of a program, so use audit MODULE:FUNCTION -- FLAGS, whose table has "
    "the policy of each module"
)

_REMEDY = (
    "write it as a string under a key such as policy, mp_policy or precision, or as a mapping that "
    "jmpx.get_mixed_precision reads"
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
    try:
        mixed = get_mixed_precision(precision)
    except ValueError:
        raise
    except Exception as error:  # of JAX, which starts to find what `half` is
        raise ValueError(
            f"Cannot read {precision!r}, because JAX cannot start ({type(error).__name__}): see "
            "python -m jmpx doctor, or write bf16 or f16 in place of half."
        ) from error
    return _lines_of_precision(precision, mixed) + _lines_about(model, mixed.policy_map)


def explain_config(path: str, model: str | None) -> tuple[list[str], list[str]]:
    """Returns the lines about the policies in a configuration file, and those about wrong ones.

    Args:
        path: the file.
        model: as in `explain`; there must be one policy then.

    Raises:
        ValueError: if the file cannot be read or has no policy, or with a model more than one; or
            the model cannot be made or traced.
        OSError: if the file cannot be read.
    """
    from jmpx._cli.config_files import sections

    right: list[tuple[str, object, MixedPrecision]] = []
    wrong, others = list[str](), list[str]()
    for section in sections(path):
        place = f"{path}: {section.path}" if section.path else path
        if section.precision is not None:
            right.append((place, section.given, section.precision))
        elif section.error is not None:
            wrong.append(f"{place}: {section.error}")
        else:
            others.append(
                f"{place}: {describe(section.given)} is not a policy of jmpx, so it is left out"
            )
    if not right and not wrong:
        end = f" ({'; '.join(others)})" if others else ""
        raise ValueError(f"Found no policy in {path}{end}: {_REMEDY}.")
    if model is not None and len(right) != 1 and not wrong:
        raise ValueError(
            f"Expected one policy for --model, got {len(right)}, at "
            f"{', '.join(place for place, _, _ in right)}: give the string of one of them in place "
            "of --config."
        )
    blocks = [[place, *_lines_of_precision(given, mixed)] for place, given, mixed in right]
    lines = [line for block in (*blocks, others) if block for line in ("", *block)]
    if not wrong:
        lines += _lines_about(model, right[0][2].policy_map)
    return lines[1:], wrong


def _lines_of_precision(given: object, mixed: MixedPrecision) -> list[str]:
    """Returns the lines about a policy map and a loss scale, as a user gave them."""
    return [
        table(mixed.policy_map),
        _way_line(mixed.policy_map),
        _loss_scale_line(given, mixed.loss_scale),
    ]


def _way_line(policy_map: PolicyMap) -> str:
    """Returns the line that shows how a policy map is applied, and why."""
    way, rules = policy_map.way, policy_map.rules
    why = "it has no rules"
    if rules:
        why = "it has rules for classes or paths"
        if way == "operations":
            why = "its rules are for operations"
    why = "by= says so" if policy_map.by else f"{why}; write by=... to choose"
    saves = f", save={policy_map.save}" if policy_map.save else ""
    return f"applied by: {way}{saves} ({why})"


def _lines_about(model: str | None, policy_map: PolicyMap) -> list[str]:
    """Returns the lines that tell which rule each module of a model has; none without a model."""
    if model is None:
        return []
    from jmpx._cli.models import RETURNS, report  # here, because it needs most of jmpx
    from jmpx._cli.targets import load

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


def _loss_scale_line(given: object, loss_scale: LossScale) -> str:
    """Returns the line that shows the loss scale, and why, if the policy map decided on it."""
    line = f"loss scale: {loss_scale}"
    text = given.get("loss_scale", "") if isinstance(given, dict) else str(given).partition("|")[2]
    if not isinstance(text, str) or text.partition(",")[0].strip().lower() not in ("", "auto"):
        return line
    which = "no policy computes" if isinstance(loss_scale, NoOpLossScale) else "a policy computes"
    return f"{line} (auto: {which} in float16)"


def _aligned(header: tuple[str, ...], rows: Sequence[_Row]) -> list[str]:
    """Returns the lines of a table; a column that is empty in all rows is left out.

    Args:
        header: the names of the first columns.
        rows: the first cells of each row, and what it sets, by the keys of policy strings.
    """
    names = (*header, *ATTRIBUTES)
    cells = [(*labels, *(fields.get(key, "") for key in ATTRIBUTES)) for labels, fields in rows]
    shown = [i for i in range(len(names)) if any(row[i] for row in cells)]
    return columns([[row[i] for i in shown] for row in (names, *cells)])


def _lines_of(report: "Report") -> Iterator[str]:
    """Yields the lines that tell which rule each module of a model has."""
    for table in report.tables:
        yield from ("", table.title, *_aligned(table.header, table.rows))
    if report.notes:
        yield from ("", *report.notes)
