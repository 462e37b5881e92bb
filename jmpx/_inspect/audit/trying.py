"""Remedies are tried before they are printed: the program is traced again under each rule."""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from jmpx._inspect.audit.alike import alike_groups, common, pattern
from jmpx._inspect.audit.candidates import LEAKS, Candidates, as_rule, is_half_product
from jmpx._inspect.audit.data import SEVERITIES, Finding
from jmpx._inspect.audit.findings import find
from jmpx._inspect.audit.flops import flops
from jmpx._inspect.audit.options import Options
from jmpx._inspect.graph import Graph
from jmpx._jaxprs.core import Place
from jmpx._policies.map_strings import parse_rule
from jmpx._policies.rules import Rule

MOST = 12  # rules that are tried in one audit; each is one more trace

# What to write instead of a rule that mends nothing.
_IN_CODE = {
    "float32-product": "cast both operands to 16 bits with .astype",
    "mixed-product": "cast the wider operand with .astype(x.dtype)",
    "promotion": "cast it where it is made, with .astype(x.dtype)",
    "saved-float32": "leave out the cast to float32, or compute it anew with jax.checkpoint",
    "rounded-logits": "preferred_element_type=jnp.float32 in the product, and no cast behind it",
    "cast-to-and-fro": "read the value before its first cast, or leave out the cast back",
    "low-average": "keep it in float32",
    "platform-product": "precision='highest' of the product",
}
_WIDER = "x.astype(jnp.float32) before it"


_Key: TypeAlias = tuple[str, Place | None, str]  # of a finding: its name, place and scope


class _Seen(NamedTuple):
    """What an audit saw of a program.

    Attributes:
        findings: the severities of its findings, by what tells them apart.
        half: the FLOPs of its products in 16 bits.
    """

    findings: dict[_Key, str]
    half: int

    @classmethod
    def of(cls, graph: Graph, findings: Sequence[Finding]) -> "_Seen":
        half = (flops(node) for node in graph.nodes if is_half_product(node))
        return cls({_key(finding): finding.severity for finding in findings}, sum(half))


def _key(finding: Finding) -> _Key:
    return finding.name, finding.place, finding.scope


def tried(graph: Graph, options: Options) -> tuple[Finding, ...]:
    """Returns the findings in a graph, each with a rule that was seen to mend it, or with advice.

    A rule mends a finding if the program, traced with the rule at the end of its policy maps, has
    neither the finding nor a new one that is worse, and no fewer FLOPs of products in 16 bits, but
    for those of the finding itself. A rule without a new finding as bad goes first. Layers that are
    alike share a rule. At most 12 rules are tried, and none where no policy map is in force.
    """
    findings = find(graph, options)
    if not graph.program.takers:
        return tuple(each._replace(rule=_advice(each)) for each in findings)
    candidates = Candidates(graph)
    trials = _Trials(graph, options, candidates, _Seen.of(graph, findings))
    remedies = {}
    for group in alike_groups(findings):
        remedy = trials.remedy(group, _common([candidates.of(each) for each in group]))
        remedies |= {_key(each): remedy.format(_advice(each)) for each in group}
    return tuple(each._replace(rule=remedies[_key(each)]) for each in findings)


def _common(candidates: Sequence[list[str]]) -> list[str]:
    """Returns the rules for a group of layers out of those for each of them."""
    columns = zip(*candidates, strict=False)
    return [common(column) for column in columns if len(set(map(pattern, column))) == 1]


class _Trials:
    """Programs that are traced again, each rule once.

    Args:
        graph: the program as it is.
        options: those of the audit.
        candidates: its rules.
        before: what the audit saw of it.
    """

    def __init__(
        self, graph: Graph, options: Options, candidates: Candidates, before: _Seen
    ) -> None:
        self._graph, self._options = graph, options
        self._candidates, self._before = candidates, before
        self._seen: dict[Rule, _Seen | None] = {}  # None if the program cannot be traced so

    def remedy(self, group: Sequence[Finding], candidates: Sequence[str]) -> str:
        """Returns the first rule that mends a group, else a sentence with `{}` for the advice."""
        own = 0 if group[0].name in LEAKS else sum(finding.flops for finding in group)
        rank, second = SEVERITIES.index(group[0].severity), ""
        for text in candidates:
            rule = parse_rule(text)
            if not own and self._candidates.lowers_share(rule):
                continue
            if rule not in self._seen and len(self._seen) == MOST:
                return second or f"{{}}; rules for it were not tried, after {MOST} others"
            new = self._worst_new(rule, group, own)
            if new is not None and new > rank:
                return text
            # Another rule mends what is as bad: where a norm returns float32, that of a layer.
            second = second or (text if new == rank else "")
        return second or ("no rule mends it: {}" if candidates else "{}")

    def _worst_new(self, rule: Rule, group: Sequence[Finding], own: int) -> int | None:
        """Returns how bad new findings are under a rule, 0 the worst; None if it mends nothing."""
        if rule not in self._seen:
            self._seen[rule] = self._traced(rule)
        before, after = self._before, self._seen[rule]
        if after is None or after.half < before.half - own:
            return None
        if any(_key(finding) in after.findings for finding in group):
            return None
        new = [after.findings[key] for key in after.findings if key not in before.findings]
        return min(map(SEVERITIES.index, new), default=len(SEVERITIES))

    def _traced(self, rule: Rule) -> _Seen | None:
        try:
            program = self._graph.program.with_rules(rule)
        except Exception:  # such as the carry of a user's loop, which would change its dtype
            return None
        graph = Graph(program, self._options.platform)
        return _Seen.of(graph, find(graph, self._options))


def _advice(finding: Finding) -> str:
    """Returns what to do in the code."""
    is_advice = as_rule(finding.rule) is None
    return finding.rule if is_advice else _IN_CODE.get(finding.name, _WIDER)
