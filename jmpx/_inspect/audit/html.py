"""The report of an audit as HTML, for notebooks: one element with inline styles, no script.

Its colors are those of the notebook, and half-transparent ones over them, so that it can be read on
light and on dark.
"""

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from jmpx._base.text import count_text, share_text
from jmpx._inspect.audit.alike import alike_findings
from jmpx._inspect.audit.data import SEVERITIES, Finding
from jmpx._inspect.audit.scope_rows import COLUMNS, scope_rows
from jmpx._inspect.audit.shares import Share, Shares, notes, shares
from jmpx._inspect.audit.text import facts, is_rule, no_findings, severities, title

if TYPE_CHECKING:
    from jmpx._inspect.audit.report import Audit

_FINDINGS = 8  # these are open; the others unfold
_GRAY, _BLUE = "rgba(128,128,128,0.2)", "rgba(66,133,244,0.4)"
_COLORS: dict[str, str] = dict(zip(SEVERITIES, ("#d93025", "#b06000", "#5f6368"), strict=True))
_MONO = "font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:0.92em"
_LEFT, _RIGHT = "text-align:left", "text-align:right"
_CELL = "padding:2px 0.5em 2px 0;white-space:nowrap;border:0"


def report_html(report: "Audit") -> str:
    """Returns the report as HTML."""
    parts = [
        f'<div style="font-size:1.15em;font-weight:600">{escape(title(report))}</div>',
        _shares(shares(report)),
        *(f"<p>{escape(note)}</p>" for note in notes(report)),
        _findings(report),
        _scopes(report),
    ]
    style = "color:inherit;line-height:1.45;max-width:60em;overflow-wrap:anywhere"
    return f'<div style="{style}">{"".join(parts)}</div>'


def _shares(tables: Iterable[Shares]) -> str:
    """Returns one table with a heading above each part, so that all columns are aligned."""
    rows: list[str] = []
    for table in tables:
        heading = f'<td colspan="4" style="{_CELL};{_LEFT};padding-top:0.8em">'
        rows.append(f'<tr style="background:none">{heading}{escape(table.heading)}</td></tr>')
        for row in table.rows:
            cells = (_bar(row), share_text(row.part, row.whole), row.amount, row.times)
            rows.append(_row((cells[0], *map(escape, cells[1:])), "lrrr"))
    return _table("".join(rows))


def _bar(share: Share) -> str:
    """Returns the label on a bar, which takes no room of its own on a phone."""
    percent = f"{100 * share.part / share.whole if share.whole else 0:.1f}%"
    fill = f"linear-gradient(to right,{_BLUE} {percent},{_GRAY} {percent})"
    style = f"background:{fill};min-width:9.5em;padding:0 0.4em"
    return f'<div style="{style}">{escape(share.label)}</div>'


def _table(rows: str) -> str:
    """Returns a table that scrolls sideways where the page is narrow."""
    if not rows:
        return ""
    table = f'<table style="border-collapse:collapse;margin:0;background:none;color:inherit">{rows}'
    return f'<div style="overflow-x:auto">{table}</table></div>'


def _row(cells: Iterable[str], sides: str, tag: str = "td") -> str:
    """Returns a row of cells that are HTML, aligned left (`l`) or right (`r`)."""
    inner = "".join(
        f'<{tag} style="{_CELL};{_LEFT if side == "l" else _RIGHT}">{cell}</{tag}>'
        for cell, side in zip(cells, sides, strict=True)
    )
    return f'<tr style="background:none">{inner}</tr>'


def _findings(report: "Audit") -> str:
    if not report.findings:
        return f"<p>{escape(no_findings(report))}</p>"
    findings = alike_findings(report.findings)
    first, others = findings[:_FINDINGS], findings[_FINDINGS:]
    heading = f"Findings: {severities(findings)}"
    parts = [f'<div style="margin-top:0.8em">{escape(heading)}</div>', *map(_finding, first)]
    if others:
        parts.append(_unfolds(f"{len(others):,} more findings", "".join(map(_finding, others))))
    return "".join(parts)


def _finding(finding: Finding) -> str:
    color = _COLORS.get(finding.severity, _GRAY)
    badge = (
        f'<span style="background:{color};color:#fff;border-radius:3px;padding:0 0.5em">'
        f"{escape(finding.severity)}</span>"
    )
    name, *where = map(escape, facts(finding))
    lines = [f"{badge} <b>{name}</b>", *([", ".join(where)] if where else [])]
    lines.append(escape(finding.message))
    inner = "".join(f"<div>{line}</div>" for line in lines)
    if is_rule(finding):  # a click selects it as a whole
        style = f"{_MONO};background:{_GRAY};color:inherit;padding:0.2em 0.5em;user-select:all"
        inner += f'<code style="{style}">{escape(finding.rule)}</code>'
    else:
        inner += f"<i>{escape(finding.rule)}</i>"
    style = f"border-left:3px solid {color};padding-left:0.7em;margin:0.7em 0"
    return f'<div style="{style}">{inner}</div>'


def _scopes(report: "Audit") -> str:
    alike, every = (scope_rows(report.scopes, is_full) for is_full in (False, True))
    if not every:
        return ""
    table = _scope_table([(row.name, *row.cells) for row in alike])
    heading = count_text(len(every), "scope")
    if len(alike) < len(every):
        table += _unfolds("each of them", _scope_table([(row.name, *row.cells) for row in every]))
    return _unfolds(heading, table)


def _scope_table(rows: Sequence[Sequence[str]]) -> str:
    header = _row(("scope", *COLUMNS), "lrllrr", "th")
    return _table(header + "".join(_row(map(escape, row), "lrllrr") for row in rows))


def _unfolds(summary: str, inner: str) -> str:
    heading = f'<summary style="cursor:pointer">{escape(summary)}</summary>'
    return f'<details style="margin-top:0.8em">{heading}{inner}</details>'
