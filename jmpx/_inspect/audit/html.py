"""The report of an audit as HTML, for notebooks: one element with inline styles, no script.

Its colors are those of the notebook, and half-transparent ones over them, so that it can be read on
light and on dark.
"""

from collections.abc import Iterable, Sequence
from html import escape

from jmpx._base.text import count_text, share_text
from jmpx._inspect.audit.alike import alike_findings
from jmpx._inspect.audit.data import SEVERITIES, AuditData, Finding
from jmpx._inspect.audit.tables import (
    SCOPE_HEADER,
    SCOPE_RIGHT,
    Share,
    Shares,
    notes,
    scope_rows,
    shares,
)
from jmpx._inspect.audit.text import facts, is_rule, no_findings, severities, title

_FINDINGS = 8  # these are open; the others unfold
_GRAY, _BLUE = "rgba(128,128,128,0.2)", "rgba(66,133,244,0.4)"
_COLORS: dict[str, str] = dict(zip(SEVERITIES, ("#d93025", "#b06000", "#5f6368"), strict=True))
_MONO = "font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:0.92em"
_CELL = "padding:2px 0.5em 2px 0;white-space:nowrap;border:0;text-align:"


def report_html(report: AuditData) -> str:
    """Returns the report as HTML."""
    parts = [
        _div("font-size:1.15em;font-weight:600", escape(title(report))),
        _shares(shares(report)),
        *(f"<p>{escape(note)}</p>" for note in notes(report)),
        _findings(report),
        _scopes(report),
    ]
    style = "color:inherit;line-height:1.45;max-width:60em;overflow-wrap:anywhere"
    return _div(style, "".join(parts))


def _div(style: str, inner: str) -> str:
    return f'<div style="{style}">{inner}</div>'


def _shares(tables: Iterable[Shares]) -> str:
    """Returns one table with a heading above each part, so that all columns are aligned."""
    rows: list[str] = []
    for table in tables:
        heading = f'<td colspan="4" style="{_CELL}left;padding-top:0.8em">'
        rows.append(f'<tr style="background:none">{heading}{escape(table.heading)}</td></tr>')
        for row in table.rows:
            cells = (share_text(row.part, row.whole), row.amount, row.times)
            rows.append(_row((_bar(row), *map(escape, cells)), (1, 2, 3)))
    return _table(rows)


def _bar(share: Share) -> str:
    """Returns the label on a bar, which takes no room of its own on a phone."""
    percent = f"{100 * share.part / share.whole if share.whole else 0:.1f}%"
    fill = f"linear-gradient(to right,{_BLUE} {percent},{_GRAY} {percent})"
    return _div(f"background:{fill};min-width:9.5em;padding:0 0.4em", escape(share.label))


def _table(rows: Iterable[str]) -> str:
    """Returns a table that scrolls sideways where the page is narrow."""
    style = "border-collapse:collapse;margin:0;background:none;color:inherit"
    return _div("overflow-x:auto", f'<table style="{style}">{"".join(rows)}</table>')


def _row(cells: Iterable[str], right: Sequence[int], tag: str = "td") -> str:
    """Returns a row of cells that are HTML, of which some are aligned to the right."""
    sides = ("right" if i in right else "left" for i in range(len(SCOPE_HEADER)))
    inner = "".join(
        f'<{tag} style="{_CELL}{side}">{cell}</{tag}>'
        for cell, side in zip(cells, sides, strict=False)
    )
    return f'<tr style="background:none">{inner}</tr>'


def _findings(report: AuditData) -> str:
    if not report.findings:
        return f"<p>{escape(no_findings(report))}</p>"
    findings = alike_findings(report.findings)
    texts = list(map(_finding, findings))
    first, others = texts[:_FINDINGS], texts[_FINDINGS:]
    heading = _div("margin-top:0.8em", escape(f"Findings: {severities(findings)}"))
    more = [_unfolds(f"{len(others):,} more findings", "".join(others))] if others else []
    return "".join([heading, *first, *more])


def _finding(finding: Finding) -> str:
    color = _COLORS.get(finding.severity, _GRAY)
    style = f"background:{color};color:#fff;border-radius:3px;padding:0 0.5em"
    name, *where = map(escape, facts(finding))
    lines = [f'<span style="{style}">{escape(finding.severity)}</span> <b>{name}</b>']
    lines += [", ".join(where)] if where else []
    lines.append(escape(finding.message))
    rule = f"<i>{escape(finding.rule)}</i>"
    if is_rule(finding):  # a click selects it as a whole
        style = f"{_MONO};background:{_GRAY};color:inherit;padding:0.2em 0.5em;user-select:all"
        rule = f'<code style="{style}">{escape(finding.rule)}</code>'
    inner = "".join(f"<div>{line}</div>" for line in lines)
    return _div(f"border-left:3px solid {color};padding-left:0.7em;margin:0.7em 0", inner + rule)


def _scopes(report: AuditData) -> str:
    alike, every = (scope_rows(report.scopes, is_full) for is_full in (False, True))
    if not every:
        return ""
    table = _scope_table(alike)
    if len(alike) < len(every):
        table += _unfolds("each of them", _scope_table(every))
    return _unfolds(count_text(len(every), "scope"), table)


def _scope_table(rows: Iterable[Sequence[str]]) -> str:
    header = _row(SCOPE_HEADER, SCOPE_RIGHT, "th")
    return _table([header, *(_row(map(escape, row), SCOPE_RIGHT) for row in rows)])


def _unfolds(summary: str, inner: str) -> str:
    heading = f'<summary style="cursor:pointer">{escape(summary)}</summary>'
    return f'<details style="margin-top:0.8em">{heading}{inner}</details>'
