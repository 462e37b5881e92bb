"""The report of an audit as text, for a terminal or a log."""

import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from jmpx._base.leaves import is_int
from jmpx._base.messages import describe
from jmpx._base.text import bytes_text, columns, flop_text, share_text, short_names
from jmpx._inspect.audit.alike import alike_findings, common, pattern
from jmpx._inspect.audit.data import SEVERITIES, AuditData, Finding, Scope
from jmpx._inspect.audit.findings import KINDS

_WIDTH, _NARROWEST = 100, 60
_GAP = "  "
_BAR = 30
_NAME = 24  # columns that the name of a scope needs: a narrow table goes without policies
_INDENT = 8  # of what is below the first line of a finding
# How much the text shows, unless all is asked for.
_SHARES, _FINDINGS, _SCOPES = 6, 8, 16
_KEPT = "\N{NO-BREAK SPACE}"  # a space at which lines do not break
_RULE = re.compile(r"\S+: ")  # a rule of a policy map; other advice is a sentence or code


def report_text(report: AuditData, width: int | None, is_full: bool) -> str:
    """Returns the report as text; the arguments are those of `Audit.to_text`."""
    width = _columns(width)
    gradient = "" if report.is_step else " and its gradient"
    platform = f" on {report.platform}" if report.platform else ""
    blocks = [
        f"Audit of {report.title}{gradient}{platform}",
        "\n".join(_share_lines(report, width, is_full)),
        "\n".join(_wrapped(note, width) for note in _notes(report)),
        *_finding_blocks(report, width, is_full),
        "\n".join(_scope_lines(report.scopes, width, is_full)),
    ]
    return "\n\n".join(filter(None, blocks))


def summary_line(report: AuditData) -> str:
    """Returns a report in one line: the largest share of products, and how many findings."""
    parts = ["no products"]
    if report.products:
        whole = sum(each.flops for each in report.products)
        most = max(report.products, key=lambda each: each.flops)
        share = share_text(most.flops, whole)
        parts = [f"{flop_text(whole)} of products", f"{share} {most.dtypes}"]
    parts.append(severities(alike_findings(report.findings)) or "no findings")
    return f"Audit of {report.title}: {', '.join(parts)}"


def _columns(width: int | None) -> int:
    if width is None:
        # A terminal may say that it has no columns.
        terminal = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDTH
        return max(_NARROWEST, min(_WIDTH, terminal or _WIDTH))
    if not is_int(width) or width < _NARROWEST:
        raise ValueError(
            f"Expected width= to be a number of columns, {_NARROWEST} or more, got "
            f"{describe(width)}: pass width=80, or nothing for the width of the terminal."
        )
    return width


def _wrapped(text: str, width: int) -> str:
    """Returns the text in lines, indented as the first one, that break at spaces alone."""
    indent = " " * (len(text) - len(text.lstrip(" ")))
    lines = textwrap.wrap(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines)


def _left_out(number: int, what: str) -> list[str]:
    left = f"... and {number:,} more {what}: print(report.to_text(all=True))"
    return [left] if number > 0 else []


def _aligned(rows: Sequence[Sequence[str]], right: Sequence[int]) -> list[str]:
    """Returns the rows with aligned columns, without the columns that are empty."""
    kept = [i for i, column in enumerate(zip(*rows, strict=True)) if any(column)]
    to_the_right = [at for at, i in enumerate(kept) if i in right]
    return columns([[row[i] for i in kept] for row in rows], to_the_right, _GAP) if rows else []


def _room(rows: Sequence[Sequence[str]], width: int) -> int:
    """Returns how many columns of text these leave, with a gap behind each."""
    sizes = (max(map(len, column)) for column in zip(*rows, strict=True))
    return width - sum(size + len(_GAP) for size in sizes if size)


# Shares


class _Share(NamedTuple):
    """A part of something, such as the products of two dtypes: its dtypes, amount and count."""

    label: str
    part: int
    whole: int
    amount: str
    times: str


def _shares(report: AuditData) -> Iterator[tuple[str, list[_Share]]]:
    """Yields the headings of the tables that a report begins with, and their rows."""
    products = [(each.dtypes, each.flops, f"{each.count:,} x") for each in report.products]
    saved = [(dtype, nbytes, "") for dtype, nbytes in report.saved.items()]
    casts = [(f"{c.source} -> {c.target}", c.nbytes, f"{c.count:,} x") for c in report.casts]
    yield _table("Matrix products and convolutions", products, flop_text)
    yield f"Everything else: {flop_text(report.other_flops)}", []
    yield _table("Saved for the backward pass", saved, bytes_text)
    yield _table("Written by casts", casts, bytes_text)


def _table(
    what: str, parts: list[tuple[str, int, str]], text: Callable[[int], str]
) -> tuple[str, list[_Share]]:
    whole = sum(part for _, part, _ in parts)
    rows = [_Share(label, part, whole, text(part), times) for label, part, times in parts]
    rows.sort(key=lambda row: -row.part)
    return f"{what}: {text(whole) if rows else 'nothing'}", rows


def _share_lines(report: AuditData, width: int, is_full: bool) -> Iterator[str]:
    """Yields the tables one below the other, with columns of the same widths."""
    limit, tables = None if is_full else _SHARES, list(_shares(report))
    shown = [row for _, rows in tables for row in rows[:limit]]
    cells = [(r.label, share_text(r.part, r.whole), r.amount, r.times) for r in shown]
    room = _room(cells, width - len(_GAP))
    if room < 0:  # long names of dtypes: what is known best from the other columns goes
        cells = [(*cell[:3], "") for cell in cells]
    bars = [_bar(row.part, row.whole, min(room, _BAR)) for row in shown]
    lines = iter(
        _aligned([(c[0], bar, *c[1:]) for c, bar in zip(cells, bars, strict=True)], (2, 3, 4))
    )
    for heading, rows in tables:
        yield heading
        yield from (_GAP + next(lines) for _ in rows[:limit])
        yield from (_GAP + line for line in _left_out(len(rows[len(rows[:limit]) :]), "rows"))


def _bar(part: int, whole: int, size: int) -> str:
    """Returns a bar: full for the whole alone, and empty for nothing alone."""
    if size < 8 or not part:
        return ""
    length = size if part == whole else min(max(round(size * part / whole), 1), size - 1)
    return "#" * length + "." * (size - length)


def _notes(report: AuditData) -> Iterator[str]:
    """Yields sentences about what the tables do not count."""
    if report.has_while:
        yield "In a while loop, operations are counted for one trip: how many it makes is unknown."
    if report.uncounted:
        yield f"Not counted: {', '.join(report.uncounted)}, whose FLOPs are unknown."


# Findings


def _finding_blocks(report: AuditData, width: int, is_full: bool) -> Iterator[str]:
    """Yields the findings, or what was looked for if there are none."""
    if not report.findings:
        names = [kind.name for kind in KINDS.values() if report.platform or not kind.needs_platform]
        text = f"No findings. Looked for {', '.join(names[:-1])} and {names[-1]}."
        yield _wrapped(text, width)
        return
    findings = report.findings if is_full else alike_findings(report.findings)
    shown = findings if is_full else findings[:_FINDINGS]
    yield f"Findings: {severities(findings)}"
    yield from (finding_text(finding, width) for finding in shown)
    yield from _left_out(len(findings) - len(shown), "findings")


def severities(findings: Sequence[Finding]) -> str:
    """Returns how many findings have which severity, such as `2 high, 1 low`."""
    counts = [(sum(f.severity == severity for f in findings), severity) for severity in SEVERITIES]
    return ", ".join(f"{count:,} {severity}" for count, severity in counts if count)


def finding_text(finding: Finding, width: int = _WIDTH) -> str:
    """Returns a finding as text: what and where, why, and the rule on a line of its own."""
    indent = " " * _INDENT
    # The facts are words that do not break, and the severity stands in the indentation.
    words = ", ".join(_facts(finding)).replace(" ", _KEPT).replace(f",{_KEPT}", ", ")
    head = _wrapped(indent + words, width).replace(_KEPT, " ")
    rule = indent + finding.rule
    lines = [
        f"{finding.severity:{_INDENT}}{head[_INDENT:]}",
        _wrapped(indent + finding.message, width),
        rule if is_rule(finding) else _wrapped(rule, width),
    ]
    return "\n".join(lines if finding.rule else lines[:2])


def is_rule(finding: Finding) -> bool:
    """Whether a finding has a rule of a policy map to copy, and not advice in words."""
    return _RULE.match(finding.rule) is not None


def _facts(finding: Finding) -> Iterator[str]:
    """Yields a finding's name, where it is, how often and how large."""
    yield finding.name
    if finding.place:
        yield str(finding.place)
    if finding.scope:
        yield f"in {finding.scope}"
    if finding.count > 1:
        yield f"{finding.count:,} x"
    if finding.flops:
        yield flop_text(finding.flops)
    if finding.nbytes:
        yield bytes_text(finding.nbytes)


# Scopes

_HEADER = ("scope", "", "policy", "dtypes", "operations", "products")


def _scope_lines(scopes: Sequence[Scope], width: int, is_full: bool) -> Iterator[str]:
    """Yields the table of scopes."""
    rows = _scope_rows(scopes, is_full)
    if rows:
        shown = rows if is_full else rows[:_SCOPES]
        filled = map(any, zip(*shown, strict=True))
        header = [name * is_filled for name, is_filled in zip(_HEADER, filled, strict=True)]
        yield from _aligned(_fitting([header, *shown], width), right=(1, 4, 5))
        yield from _left_out(len(rows) - len(shown), "rows")


def _scope_rows(scopes: Iterable[Scope], is_full: bool) -> list[tuple[str, ...]]:
    """Returns the cells of scopes, or of layers that are alike, those with the most FLOPs first."""
    groups: dict[object, list[Scope]] = {}
    for scope in scopes:
        like = scope._replace(path=scope.path if is_full else pattern(scope.path))
        groups.setdefault(like, []).append(scope)
    totals = [(len(g) * g[0].flops, len(g) * g[0].operations, g) for g in groups.values()]
    return [_cells(*total) for total in sorted(totals, key=lambda total: (-total[0], -total[1]))]


def _cells(flops: int, operations: int, group: list[Scope]) -> tuple[str, ...]:
    first = group[0]
    path = common([scope.path for scope in group]) or "(outside of all)"
    return (
        f"{path} ({first.module})" if first.module not in ("", path) else path,
        f"{len(group):,} x" if len(group) > 1 else "",
        short_names(first.policy),
        short_names(first.dtypes),
        f"{operations:,}",
        flop_text(flops) if flops else "",
    )


def _fitting(rows: Sequence[Sequence[str]], width: int) -> list[list[str]]:
    """Returns the cells of the scopes, shortened so that they fit, first of all but the names."""
    cells = [row[1:] for row in rows]
    if _room(cells, width) < _NAME:
        size = width // 5
        cells = [[c if len(c) <= size else f"{c[: size - 3]}..." for c in row] for row in cells]
    if _room(cells, width) < _NAME:  # without policies
        cells = [[row[0], "", *row[2:]] for row in cells]
    size = _room(cells, width)
    return [[_name(row[0], size), *rest] for row, rest in zip(rows, cells, strict=True)]


def _name(name: str, size: int) -> str:
    """Returns the path and the class, else the path, else the end of the path."""
    path = name if len(name) <= size else name.partition(" (")[0]
    return path if len(path) <= size else f"...{path[3 - size :]}"
