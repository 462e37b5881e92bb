"""Remedies are tried before they are printed: the program is traced again under each rule."""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from jmpx._inspect.audit.alike import alike_groups, common, pattern
from jmpx._inspect.audit.data import SEVERITIES, Finding
from jmpx._inspect.audit.findings import find
from jmpx._inspect.audit.flops import flops
from jmpx._inspect.audit.leaks import KINDS as _LEAKS
from jmpx._inspect.audit.remedies import Remedies, is_half_product
from jmpx._inspect.audit.step import Found
from jmpx._inspect.graph import Graph
from jmpx._jaxprs.equations import Place
from jmpx._policies.map_strings import parse_rule
from jmpx._policies.maps import Rule

MOST = 12  # rules that are tried in one audit; each is one more trace

_Key: TypeAlias = tuple[str, Place | None, str]  # of a finding: its name, place and scope


def _key(finding: Finding) -> _Key:
    return finding.name, finding.place, finding.scope


class _Seen(NamedTuple):
    """What an audit saw of a program."""

    findings: dict[_Key, str]  # the severities of its findings
    half: int  # the FLOPs of its products in 16 bits


def _seen(graph: Graph, findings: Sequence[Found]) -> _Seen:
    severities = {_key(each.finding): each.finding.severity for each in findings}
    return _Seen(severities, sum(flops(node) for node in graph.nodes if is_half_product(node)))


def tried(graph: Graph, platform: str | None) -> tuple[Finding, ...]:
    """Returns the findings in a graph, each with a rule that was seen to mend it, or with advice.

    A rule mends a finding if the program, traced with the rule at the end of its policy maps, has
    neither the finding nor a new one that is worse, and no fewer FLOPs of products in 16 bits, but
    for those of the finding itself. Layers that are alike share a rule.
    """
    found = find(graph, platform)
    findings = tuple(each.finding for each in found)
    if not graph.program.takers:
        return findings
    trials = _Trials(graph, platform, found)
    remedies = {}
    for group in alike_groups(findings):
        remedy = trials.remedy(group)
        remedies |= {_key(each): remedy.replace("{}", each.rule) for each in group}
    return tuple(each._replace(rule=remedies[_key(each)]) for each in findings)


class _Trials:
    """Programs that are traced again, each rule once."""

    def __init__(self, graph: Graph, platform: str | None, found: Sequence[Found]) -> None:
        self._graph, self._platform = graph, platform
        self._found = {_key(each.finding): each for each in found}
        self._remedies, self._before = Remedies(graph), _seen(graph, found)
        self._after: dict[Rule, _Seen | None] = {}  # None if the program cannot be traced so

    def remedy(self, group: Sequence[Finding]) -> str:
        """Returns the first rule that mends a group, else a sentence with `{}` for the advice."""
        is_leak = self._found[_key(group[0])].kind in _LEAKS
        own = 0 if is_leak else sum(finding.flops for finding in group)
        rank, second = SEVERITIES.index(group[0].severity), ""
        candidates = self._common_rules(group)
        for text, rule in candidates.items():
            if not own and self._remedies.lowers_share(rule):
                continue
            if rule not in self._after and len(self._after) == MOST:
                return second or f"{{}}; rules for it were not tried, after {MOST} others"
            new = self._worst_new(rule, group, own)
            if new is not None and new > rank:
                return text
            # Another rule mends what is as bad: where a norm returns float32, that of a layer.
            second = second or (text if new == rank else "")
        return second or ("no rule that keeps 16-bit matmuls fixes it: {}" if candidates else "{}")

    def _common_rules(self, group: Sequence[Finding]) -> dict[str, Rule]:
        """Returns the rules for a group of layers out of those for each of them."""
        columns = zip(*map(self._rules, group), strict=False)
        alike = [column for column in columns if len(set(map(pattern, column))) == 1]
        return {text: parse_rule(text) for text in map(common, alike)}

    def _rules(self, finding: Finding) -> list[str]:
        """Returns the rules that may mend a finding, without those of an outermost module."""
        found = self._found[_key(finding)]
        texts = dict.fromkeys((*found.rules, *found.kind.rules(self._remedies, found.nodes)))
        return [t for t in texts if not self._remedies.is_of_all(parse_rule(t))]

    def _worst_new(self, rule: Rule, group: Sequence[Finding], own: int) -> int | None:
        """Returns how bad new findings are under a rule, 0 the worst; None if it mends nothing."""
        if rule not in self._after:
            self._after[rule] = self._traced(rule)
        old, after = self._before, self._after[rule]
        if after is None or after.half < old.half - own:
            return None
        if any(_key(finding) in after.findings for finding in group):
            return None
        new = [after.findings[key] for key in after.findings if key not in old.findings]
        return min(map(SEVERITIES.index, new), default=len(SEVERITIES))

    def _traced(self, rule: Rule) -> _Seen | None:
        try:
            program = self._graph.program.with_rules(rule)
        except Exception:  # such as the carry of a user's loop, which would change its dtype
            return None
        graph = Graph(program, self._platform)
        return _seen(graph, find(graph, self._platform))
