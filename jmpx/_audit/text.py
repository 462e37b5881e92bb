"""The report of an audit as text, for a terminal or a log."""

import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from jmpx._audit.data import FINDING_NAMES, ONLY_WITH_PLATFORM, SEVERITIES, Finding, Scope
from jmpx._audit.shares import WHILE, Shares, shares
from jmpx._audit.units import bytes_text, flop_text, share_text, short_names
from jmpx._leaves import is_int
from jmpx._messages import describe

if TYPE_CHECKING:
    from jmpx._audit.report import Report

_WIDTH = 100
_NARROWEST = 60
_GAP = "  "
_BAR = 30
_INDENT = 8  # of what is below the first line of a finding
# How many lines the text has at most, unless all are asked for.
_SHARES, _FINDINGS, _SCOPES = 6, 8, 16
_RULE = re.compile(r"\S+: ")  # a rule of a policy map; other advice is a sentence
_ALL = "print(report.to_text(all=True))"


def report_text(report: "Report", width: int | None, is_full: bool) -> str:
    """Returns the report as text: the shares, the findings, the scopes.

    Args:
        report: the report.
        width: the columns that the text may have; None: 100, or the terminal's if it has fewer.
        is_full: whether long tables are printed as a whole.

    Raises:
        ValueError: if `width` is no whole number of at least 60.
    """
    width = _columns(width)
    blocks = [
        title(report),
        "\n".join(_share_lines(shares(report), width, is_full)),
        _wrapped(WHILE, width) if report.has_while else "",
        *_finding_blocks(report, width, is_full),
        "\n".join(_scope_lines(report.scopes, width, is_full)),
    ]
    return "\n\n".join(filter(None, blocks))


def title(report: "Report") -> str:
    """Returns what was audited."""
    gradient = "" if report.is_step else " and its gradient"
    return f"Audit of {report.title}{gradient}{f' on {report.platform}' if report.platform else ''}"


def _columns(width: int | None) -> int:
    if width is None:
        # A terminal may say that it has no columns.
        columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDTH
        return max(_NARROWEST, min(_WIDTH, columns or _WIDTH))
    if not is_int(width) or width < _NARROWEST:
        raise ValueError(
            f"Expected width= to be a number of columns, {_NARROWEST} or more, got "
            f"{describe(width)}: pass width=80, or nothing for the width of the terminal."
        )
    return width


def _left_out(number: int, what: str) -> list[str]:
    return [f"... and {number:,} more {what}: {_ALL}"] if number > 0 else []


def _aligned(rows: Sequence[Sequence[str]], right: str) -> list[str]:
    """Returns the rows with aligned columns; without those that are empty.

    Args:
        rows: the cells of each row.
        right: `>` for each column whose cells are aligned to the right, `<` for the others.
    """
    sizes = _sizes(rows)
    return [
        _GAP.join(
            f"{cell:{side}{size}}"
            for cell, side, size in zip(row, right, sizes, strict=True)
            if size
        ).rstrip()
        for row in rows
    ]


def _sizes(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _share_lines(tables: Sequence[Shares], width: int, is_full: bool) -> list[str]:
    """Returns the tables one below the other, with columns of the same widths."""
    limit = None if is_full else _SHARES
    shown = [row for table in tables for row in table.rows[:limit]]
    cells = [(r.label, share_text(r.part, r.whole), r.amount, r.times) for r in shown]
    room = width - sum(size + len(_GAP) for size in _sizes(cells)) - len(_GAP)
    bars = [_bar(row.part, row.whole, min(room, _BAR)) for row in shown]
    rows = _aligned([(c[0], bar, *c[1:]) for c, bar in zip(cells, bars, strict=True)], "<<>>>")
    remaining = iter(rows)
    lines: list[str] = []
    for table in tables:
        lines.append(table.heading)
        lines += (_GAP + next(remaining) for _ in table.rows[:limit])
        more = 0 if is_full else len(table.rows) - _SHARES
        lines += (_GAP + line for line in _left_out(more, "of them"))
    return lines


def _bar(part: int, whole: int, size: int) -> str:
    """Returns a bar: full for the whole only, and empty for nothing only."""
    if size < 8 or not part:
        return ""
    length = size if part == whole else min(max(round(size * part / whole), 1), size - 1)
    return "#" * length + "." * (size - length)


def _finding_blocks(report: "Report", width: int, is_full: bool) -> Iterator[str]:
    """Yields the findings, and what was looked for if there are none."""
    if not report.findings:
        yield _wrapped(f"No findings. Looked for: {', '.join(looked_for(report))}.", width)
        return
    yield f"Findings: {severities(report.findings)}"
    limit = len(report.findings) if is_full else _FINDINGS
    for finding in report.findings[:limit]:
        yield finding_text(finding, width)
    yield from _left_out(len(report.findings) - limit, "findings")


def looked_for(report: "Report") -> list[str]:
    """Returns the names of the findings that the audit could have had."""
    left_out = () if report.platform else ONLY_WITH_PLATFORM
    return [name for name in FINDING_NAMES if name not in left_out]


def severities(findings: Sequence[Finding]) -> str:
    """Returns how many findings have which severity, such as `2 high, 1 low`."""
    counts = [(sum(f.severity == severity for f in findings), severity) for severity in SEVERITIES]
    return ", ".join(f"{count} {severity}" for count, severity in counts if count)


def finding_text(finding: Finding, width: int) -> str:
    """Returns a finding as text: what and where, why, and the rule on a line of its own."""
    head = f"{finding.severity:{_INDENT}}{', '.join(facts(finding))}"
    lines = [_wrapped(head, width), _wrapped(" " * _INDENT + finding.message, width)]
    if finding.rule:
        # A rule is copied, so it is never broken; advice is a sentence.
        rule = " " * _INDENT + finding.rule
        lines.append(rule if _RULE.match(finding.rule) else _wrapped(rule, width))
    return "\n".join(lines)


def _wrapped(text: str, width: int) -> str:
    """Returns the text in lines that break at spaces only, as paths are copied."""
    return textwrap.fill(
        text,
        width,
        subsequent_indent=" " * (_INDENT if text[0] == " " else 0),
        break_long_words=False,
        break_on_hyphens=False,
    )


def facts(finding: Finding) -> list[str]:
    """Returns a finding's name, where it is, how often and how large."""
    return [
        finding.name,
        *([str(finding.place)] if finding.place else []),
        *([f"in {finding.scope}"] if finding.scope else []),
        *([f"{finding.count:,} x"] if finding.count > 1 else []),
        *([flop_text(finding.flops)] if finding.flops else []),
        *([bytes_text(finding.nbytes)] if finding.nbytes else []),
    ]


def _scope_lines(scopes: Sequence[Scope], width: int, is_full: bool) -> Iterator[str]:
    """Yields the table of scopes, those with most operations of products first."""
    largest = sorted(scopes, key=lambda scope: (-scope.flops, -scope.operations))
    limit = len(scopes) if is_full else _SCOPES
    rows = [scope_cells(scope) for scope in largest[:limit]]
    if rows:
        used = [any(column) for column in zip(*rows, strict=True)]
        header = tuple(name if use else "" for name, use in zip(SCOPE_CELLS, used, strict=True))
        yield from _aligned(_fitting([header, *rows], width), "<<<>>")
        yield from _left_out(len(scopes) - limit, "scopes")


SCOPE_CELLS = ("scope", "policy", "dtypes", "operations", "products")


def scope_cells(scope: Scope) -> tuple[str, str, str, str, str]:
    """Returns the cells of a row, as `SCOPE_CELLS` names them."""
    name = scope.path or "(outside of all)"
    return (
        f"{name} ({scope.module})" if scope.module else name,
        short_names(scope.policy),
        short_names(scope.dtypes),
        f"{scope.operations:,}",
        flop_text(scope.flops) if scope.flops else "",
    )


def _fitting(rows: Sequence[tuple[str, ...]], width: int) -> list[tuple[str, ...]]:
    """Shortens paths at their start, policies and dtypes at their end, until the rows fit."""
    path, policy, dtypes, *numbers = _sizes(rows)
    room = width - sum(numbers) - len(_GAP) * len(numbers)
    policy, dtypes = (min(size, room // 4) for size in (policy, dtypes))
    path = min(path, room - policy - dtypes - 2 * len(_GAP))
    return [
        (_end(row[0], path), _start(row[1], policy), _start(row[2], dtypes), *row[3:])
        for row in rows
    ]


def _start(text: str, size: int) -> str:
    return text if len(text) <= size else text[: size - 3] + "..."


def _end(text: str, size: int) -> str:
    return text if len(text) <= size else "..." + text[3 - size :]
