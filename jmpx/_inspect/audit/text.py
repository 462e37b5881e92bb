"""The report of an audit as text, for a terminal or a log."""

import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence

from jmpx._inspect.audit.alike import alike_findings, common, pattern
from jmpx._inspect.audit.data import SEVERITIES, AuditData, Finding, Scope
from jmpx._inspect.text import bytes_text, columns, flop_text, share_text, short_names

_WIDTH = 100
_INDENT = 8  # of what is below the first line of a finding
# How much the text shows, unless all is asked for.
_SHARES, _FINDINGS, _SCOPES = 6, 8, 16


def report_text(report: AuditData, is_full: bool) -> str:
    """Returns the report as text, all of it or the largest parts."""
    gradient = "" if report.is_step else " and its gradient"
    platform = f" on {report.platform}" if report.platform else ""
    blocks = [
        f"Audit of {report.title}{gradient}{platform}",
        "\n".join(_share_lines(report, is_full)),
        "\n".join(map(_wrapped, _notes(report))),
        *_finding_blocks(report, is_full),
        "\n".join(scope_lines(report.scopes, is_full)),
    ]
    return "\n\n".join(filter(None, blocks))


def summary_line(report: AuditData) -> str:
    """Returns a report in one line: the largest share of products, and how many findings."""
    parts = ["no products"]
    if report.products:
        whole = sum(each.flops for each in report.products)
        most = report.products[0]
        parts = [
            f"{flop_text(whole)} of products",
            f"{share_text(most.flops, whole)} {most.dtypes}",
        ]
    parts.append(severities(alike_findings(report.findings)) or "no findings")
    return f"Audit of {report.title}: {', '.join(parts)}"


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _left_out(number: int, what: str) -> list[str]:
    left = f"... and {number:,} more {what}: print(report.to_text(all=True))"
    return [left] if number > 0 else []


# Shares


def _share_lines(report: AuditData, is_full: bool) -> Iterator[str]:
    """Yields the tables that a report begins with."""
    products = [(each.dtypes, each.flops, each.count) for each in report.products]
    saved = [(dtype, nbytes, 0) for dtype, nbytes in report.saved.items()]
    casts = [(f"{c.source} -> {c.target}", c.nbytes, c.count) for c in report.casts]
    yield from _shares("Matrix products and convolutions", products, flop_text, is_full)
    yield from _shares("Saved for the backward pass", saved, bytes_text, is_full)
    yield from _shares("Written by casts", casts, bytes_text, is_full)


def _shares(
    what: str, parts: list[tuple[str, int, int]], text: Callable[[int], str], is_full: bool
) -> Iterator[str]:
    """Yields a heading, and a line for each label with its amount and count."""
    whole = sum(part for _, part, _ in parts)
    yield f"{what}: {text(whole) if parts else 'nothing'}"
    rows = [
        (label, share_text(part, whole), text(part), f"{count:,} x" if count else "")
        for label, part, count in parts
    ]
    shown = rows if is_full else rows[:_SHARES]
    lines = [*columns(shown, right=(1, 2, 3)), *_left_out(len(rows) - len(shown), "rows")]
    yield from (f"  {line}" for line in lines)


def _notes(report: AuditData) -> Iterator[str]:
    """Yields sentences about what the tables do not count."""
    if report.has_while:
        yield "In a while loop, operations are counted for one trip: how many it makes is unknown."
    if report.uncounted:
        yield f"Not counted: {', '.join(report.uncounted)}, whose products are unknown."


# Findings


def _finding_blocks(report: AuditData, is_full: bool) -> Iterator[str]:
    findings = report.findings if is_full else alike_findings(report.findings)
    shown = findings if is_full else findings[:_FINDINGS]
    yield f"Findings: {severities(findings)}" if findings else "No findings."
    yield from map(finding_text, shown)
    yield from _left_out(len(findings) - len(shown), "findings")


def severities(findings: Sequence[Finding]) -> str:
    """Returns how many findings have which severity, such as `2 high, 1 low`."""
    counts = [(sum(f.severity == severity for f in findings), severity) for severity in SEVERITIES]
    return ", ".join(f"{count:,} {severity}" for count, severity in counts if count)


def finding_text(finding: Finding) -> str:
    """Returns a finding as text: what and where, why, and the rule on a line of its own."""
    indent = " " * _INDENT
    head = f"{finding.severity:{_INDENT}}{', '.join(_facts(finding))}"
    rule = [indent + finding.rule] if finding.rule else []  # in one line, to be copied
    return "\n".join([head, _wrapped(finding.message, indent), *rule])


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


def scope_lines(scopes: Iterable[Scope], is_full: bool) -> list[str]:
    """Returns the table of scopes, or of layers that are alike, those with the most FLOPs first."""
    groups: dict[object, list[Scope]] = {}
    for scope in scopes:
        like = scope._replace(path=scope.path if is_full else pattern(scope.path))
        groups.setdefault(like, []).append(scope)
    size = lambda group: (-len(group) * group[0].flops, -len(group) * group[0].operations)  # noqa: E731
    rows = [_cells(group) for group in sorted(groups.values(), key=size)]
    if not rows:
        return []
    shown = rows if is_full else rows[:_SCOPES]
    header = ("scope", "", "policy", "dtypes", "operations", "products")
    lines = columns([header, *shown], right=(1, 4, 5))
    return [*lines, *_left_out(len(rows) - len(shown), "rows")]


def _cells(group: list[Scope]) -> tuple[str, ...]:
    first, count = group[0], len(group)
    path = common([scope.path for scope in group]) or "(outside of all)"
    return (
        f"{path} ({first.module})" if first.module not in ("", path) else path,
        f"{count:,} x" if count > 1 else "",
        short_names(first.policy),
        short_names(first.dtypes),
        f"{count * first.operations:,}",
        flop_text(count * first.flops) if first.flops else "",
    )
