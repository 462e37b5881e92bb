"""Findings are merged by name, place and scope, and sorted by severity and size."""

import hypothesis.strategies as st
from hypothesis import given

from jmpx._inspect.audit.data import SEVERITIES, Finding
from jmpx._inspect.audit.findings import KINDS, merged
from jmpx._inspect.audit.step import Found
from jmpx._jaxprs.places import Place

FINDINGS = st.builds(
    Finding,
    name=st.sampled_from(["promotion", "low-exp"]),
    severity=st.sampled_from(SEVERITIES),
    message=st.sampled_from(["one", "other"]),
    place=st.sampled_from([None, Place("a.py", 1, "f"), Place("a.py", 2, "f")]),
    scope=st.sampled_from(["", "net/head"]),
    rule=st.just("*/head: f32"),
    count=st.integers(1, 3),
    flops=st.integers(0, 3),
    nbytes=st.integers(0, 3),
)


def key(finding):
    return finding.name, finding.place, finding.scope


@given(st.lists(FINDINGS))
def test_merged(findings):
    found = [Found(KINDS[each.name], each, [], ()) for each in findings]
    result = [each.finding for each in merged(found)]
    assert {key(each) for each in result} == {key(each) for each in findings}
    for each in result:
        group = [finding for finding in findings if key(finding) == key(each)]
        assert SEVERITIES.index(each.severity) == min(
            SEVERITIES.index(finding.severity) for finding in group
        )
        for field in ("count", "flops", "nbytes"):
            assert getattr(each, field) == sum(getattr(finding, field) for finding in group)
    ranks = [(SEVERITIES.index(each.severity), -each.flops, -each.nbytes) for each in result]
    assert ranks == sorted(ranks)
    assert len(result) == len({key(each) for each in result})
