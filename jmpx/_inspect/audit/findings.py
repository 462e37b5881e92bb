"""The findings of an audit: what searches for them, and how they are merged and sorted.

A new kind of finding is a file with `KINDS` and `search`, and its name in `_SEARCHES`.
"""

from collections.abc import Iterable

from jmpx._inspect.audit import (
    accumulation,
    attention,
    exponentials,
    hardware,
    leaks,
    logits,
    rounding,
    sums,
)
from jmpx._inspect.audit.data import SEVERITIES, Finding
from jmpx._inspect.audit.step import Found, Kind, Step
from jmpx._inspect.graph import Graph

# The first to run explains operations to the others.
_SEARCHES = (logits, leaks, rounding, exponentials, sums, accumulation, hardware, attention)
KINDS: dict[str, Kind] = {kind.name: kind for each in _SEARCHES for kind in each.KINDS}


def find(graph: Graph, platform: str | None) -> tuple[Found, ...]:
    """Returns all findings in a graph, the worst first."""
    step = Step(graph, platform)
    return merged(found for each in _SEARCHES for found in each.search(step))


def merged(findings: Iterable[Found]) -> tuple[Found, ...]:
    """Merges findings of one name, place and scope, and sorts them by severity and size.

    The message and the remedies are those of the first of the worst severity.
    """
    groups: dict[tuple[object, ...], Found] = {}
    for found in findings:
        key = found.finding.name, found.finding.place, found.finding.scope
        groups[key] = _sum(groups[key], found) if key in groups else found
    return tuple(sorted(groups.values(), key=lambda found: _rank(found.finding)))


def _sum(one: Found, other: Found) -> Found:
    worst = min(one, other, key=lambda found: SEVERITIES.index(found.finding.severity))
    first, second = one.finding, other.finding
    finding = worst.finding._replace(
        count=first.count + second.count,
        flops=first.flops + second.flops,
        nbytes=first.nbytes + second.nbytes,
    )
    return worst._replace(finding=finding, nodes=[*one.nodes, *other.nodes])


def _rank(finding: Finding) -> tuple[object, ...]:
    size = (-finding.flops, -finding.nbytes, -finding.count)
    return (SEVERITIES.index(finding.severity), *size, finding.name, str(finding.place))
