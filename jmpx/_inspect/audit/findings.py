"""The findings of an audit: what looks for them, and how they are merged and sorted."""

from collections.abc import Iterable

from jmpx._inspect.audit.accumulation import accumulation
from jmpx._inspect.audit.data import SEVERITIES, Finding
from jmpx._inspect.audit.hardware import hardware
from jmpx._inspect.audit.leaks import leaks
from jmpx._inspect.audit.logits import Logits
from jmpx._inspect.audit.low_precision import low_precision
from jmpx._inspect.audit.options import Options as Options
from jmpx._inspect.audit.rounding import rounding
from jmpx._inspect.audit.streams import Streams
from jmpx._inspect.graph import Graph


def find(graph: Graph, options: Options) -> tuple[Finding, ...]:
    """Returns all findings in a graph, the worst first."""
    streams, logits = Streams(graph), Logits(graph)
    # Each looks at the graph once, and yields a finding for each operation that it is about.
    found = (
        logits.found,
        leaks(graph, streams, logits.explained),
        rounding(graph, streams, logits.explained),
        low_precision(graph, logits.explained),
        accumulation(graph),
        hardware(graph, options),
    )
    return merged(finding for findings in found for finding in findings)


def merged(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Merges findings of one name, place and scope, and sorts them by severity and size.

    The message and the rule are those of the first of the worst severity.
    """
    groups: dict[tuple[object, ...], Finding] = {}
    for finding in findings:
        key = (finding.name, finding.place, finding.scope)
        groups[key] = _sum(groups[key], finding) if key in groups else finding
    return tuple(sorted(groups.values(), key=_rank))


def _sum(first: Finding, second: Finding) -> Finding:
    worst = min(first, second, key=lambda finding: SEVERITIES.index(finding.severity))
    return worst._replace(
        count=first.count + second.count,
        flops=first.flops + second.flops,
        nbytes=first.nbytes + second.nbytes,
    )


def _rank(finding: Finding) -> tuple[object, ...]:
    size = (-finding.flops, -finding.nbytes, -finding.count)
    return (SEVERITIES.index(finding.severity), *size, finding.name, str(finding.place))
