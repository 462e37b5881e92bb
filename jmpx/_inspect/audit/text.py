"""The report of an audit as text, for a terminal or a log."""

import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from jmpx._base.leaves import is_int
from jmpx._base.messages import describe
from jmpx._base.text import bytes_text, flop_text, share_text
from jmpx._inspect.audit.alike import alike_findings
from jmpx._inspect.audit.data import SEVERITIES, Finding, Scope
from jmpx._inspect.audit.findings import KINDS
from jmpx._inspect.audit.scope_rows import COLUMNS, ScopeRow, scope_rows
from jmpx._inspect.audit.shares import Shares, notes, shares

if TYPE_CHECKING:
    from jmpx._inspect.audit.report import Audit

_WIDTH = 100
_NARROWEST = 60
_GAP = "  "
_BAR = 30
_NAME = 24  # columns that the name of a scope needs: a narrow table goes without policies
_INDENT = 8  # of what is below the first line of a finding
# How much the text shows, unless all is asked for.
_SHARES, _FINDINGS, _SCOPES = 6, 8, 16
_ALL = "print(report.to_text(all=True))"
_KEPT = "\N{NO-BREAK SPACE}"  # a space at which lines do not break
_RULE = re.compile(r"\S+: ")  # a rule of a policy map; other advice is a sentence or code


def report_text(report: "Audit", width: int | None, is_full: bool) -> str:
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
        "\n".join(_wrapped(note, width) for note in notes(report)),
        *_finding_blocks(report, width, is_full),
        "\n".join(_scope_lines(report.scopes, width, is_full)),
    ]
    return "\n\n".join(filter(None, blocks))


def title(report: "Audit") -> str:
    """Returns what was audited."""
    gradient = "" if report.is_step else " and its gradient"
    return f"Audit of {report.title}{gradient}{f' on {report.platform}' if report.platform else ''}"


def summary_line(report: "Audit") -> str:
    """Returns a report in one line: the largest share of products, and how many findings."""
    products = shares(report)[0].rows
    parts = [f"{flop_text(products[0].whole)} of products" if products else "no products"]
    parts += [f"{share_text(row.part, row.whole)} {row.label}" for row in products[:1]]
    parts.append(severities(alike_findings(report.findings)) or "no findings")
    return f"Audit of {report.title}: {', '.join(parts)}"


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


def _wrapped(text: str, width: int) -> str:
    """Returns the text in lines that break at spaces alone, because paths are copied.

    The first line sets the indentation.
    """
    indent = " " * (len(text) - len(text.lstrip(" ")))
    lines = textwrap.wrap(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines)


def _left_out(number: int, what: str) -> list[str]:
    return [f"... and {number:,} more {what}: {_ALL}"] if number > 0 else []


def _aligned(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Returns the rows with aligned columns, without the columns that are empty.

    Args:
        rows: the cells of each row.
        sides: `>` for each column whose cells are aligned to the right, `<` for the others.
    """
    sizes = _sizes(rows)
    columns = [
        (i, side, size) for i, (side, size) in enumerate(zip(sides, sizes, strict=True)) if size
    ]
    return [
        _GAP.join(f"{row[i]:{side}{size}}" for i, side, size in columns).rstrip() for row in rows
    ]


def _sizes(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


# Shares


def _share_lines(tables: Sequence[Shares], width: int, is_full: bool) -> Iterator[str]:
    """Yields the tables one below the other, with columns of the same widths."""
    limit = None if is_full else _SHARES
    shown = [row for table in tables for row in table.rows[:limit]]
    cells = [(r.label, share_text(r.part, r.whole), r.amount, r.times) for r in shown]
    room = width - len(_GAP) - sum(size + len(_GAP) for size in _sizes(cells))
    if room < 0:  # long names of dtypes: what is known best from the other columns goes
        cells = [(label, share, amount, "") for label, share, amount, _ in cells]
    bars = [_bar(row.part, row.whole, min(room, _BAR)) for row in shown]
    rows = [(label, bar, *rest) for (label, *rest), bar in zip(cells, bars, strict=True)]
    lines = iter(_aligned(rows, "<<>>>") if rows else [])
    for table in tables:
        yield table.heading
        for _ in table.rows[:limit]:
            yield _GAP + next(lines)
        for line in _left_out(0 if is_full else len(table.rows) - _SHARES, "rows"):
            yield _GAP + line


def _bar(part: int, whole: int, size: int) -> str:
    """Returns a bar: full for the whole alone, and empty for nothing alone."""
    if size < 8 or not part:
        return ""
    length = size if part == whole else min(max(round(size * part / whole), 1), size - 1)
    return "#" * length + "." * (size - length)


# Findings


def _finding_blocks(report: "Audit", width: int, is_full: bool) -> Iterator[str]:
    """Yields the findings, or what was looked for if there are none."""
    if not report.findings:
        yield _wrapped(no_findings(report), width)
        return
    findings = report.findings if is_full else alike_findings(report.findings)
    shown = findings if is_full else findings[:_FINDINGS]
    yield f"Findings: {severities(findings)}"
    yield from (finding_text(finding, width) for finding in shown)
    yield from _left_out(len(findings) - len(shown), "findings")


def no_findings(report: "Audit") -> str:
    """Returns the sentence of a report without findings: what the audit looked for."""
    names = [kind.name for kind in KINDS.values() if report.platform or not kind.needs_platform]
    return f"No findings. Looked for {', '.join(names[:-1])} and {names[-1]}."


def severities(findings: Sequence[Finding]) -> str:
    """Returns how many findings have which severity, such as `2 high, 1 low`."""
    counts = [(sum(f.severity == severity for f in findings), severity) for severity in SEVERITIES]
    return ", ".join(f"{count:,} {severity}" for count, severity in counts if count)


def finding_text(finding: Finding, width: int) -> str:
    """Returns a finding as text: what and where, why, and the rule on a line of its own."""
    indent = " " * _INDENT
    # The facts are words that do not break, and the severity stands in the indentation.
    words = ", ".join(facts(finding)).replace(" ", _KEPT).replace(f",{_KEPT}", ", ")
    head = _wrapped(indent + words, width).replace(_KEPT, " ")
    lines = [
        f"{finding.severity:{_INDENT}}{head[_INDENT:]}",
        _wrapped(indent + finding.message, width),
    ]
    if finding.rule:
        rule = indent + finding.rule
        lines.append(rule if is_rule(finding) else _wrapped(rule, width))
    return "\n".join(lines)


def is_rule(finding: Finding) -> bool:
    """Whether a finding has a rule of a policy map to copy, and not advice in words."""
    return _RULE.match(finding.rule) is not None


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


# Scopes


def _scope_lines(scopes: Sequence[Scope], width: int, is_full: bool) -> Iterator[str]:
    """Yields the table of scopes."""
    rows = scope_rows(scopes, is_full)
    if rows:
        shown = rows if is_full else rows[:_SCOPES]
        yield from _aligned(_fitting(shown, width), "<><<>>")
        yield from _left_out(len(rows) - len(shown), "rows")


def _fitting(rows: Sequence[ScopeRow], width: int) -> list[tuple[str, ...]]:
    """Returns the cells of a header and the rows, shortened so that they fit."""
    columns = list(zip(COLUMNS, *(row.cells for row in rows), strict=True))
    columns = [column if any(column[1:]) else [""] * len(column) for column in columns]
    if _room(columns, width) < _NAME:
        columns = [[_start(cell, width // 5) for cell in column] for column in columns]
    if _room(columns, width) < _NAME:
        columns[COLUMNS.index("policy")] = [""] * (len(rows) + 1)
    names = ["scope", *(_name(row, _room(columns, width)) for row in rows)]
    return list(zip(names, *columns, strict=True))


def _room(columns: Sequence[Sequence[str]], width: int) -> int:
    """Returns how many columns the text of other columns leaves."""
    sizes = (max(map(len, column)) for column in columns)
    return width - sum(size + len(_GAP) for size in sizes if size)


def _start(text: str, size: int) -> str:
    return text if len(text) <= size else text[: size - 3] + "..."


def _name(row: ScopeRow, size: int) -> str:
    """Returns the path and the class, else the path, else the end of the path."""
    if len(row.name) <= size or not row.path:
        return _start(row.name, size)
    return row.path if len(row.path) <= size else "..." + row.path[3 - size :]
