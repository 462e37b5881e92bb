"""Layers that are alike: what differs in the numbers of its paths alone is shown once."""

import re
from collections.abc import Iterable, Sequence

from jmpx._inspect.audit.data import Finding

_NUMBER = re.compile(r"\d+")
_DECIMAL = re.compile(r"\d+(?:\.\d+)?")  # of a sentence


def pattern(text: str) -> str:
    """Returns a path with `*` for each number: equal for the paths of layers that are alike."""
    return _NUMBER.sub("*", text)


def common(texts: Sequence[str], number: re.Pattern[str] = _NUMBER, differing: str = "*") -> str:
    """Returns texts of one pattern as one, with `differing` for numbers that differ."""
    columns = zip(*(number.findall(text) for text in texts), strict=True)
    ranges = [sorted(set(column), key=float) for column in columns]
    parts = iter([r[0] if len(r) == 1 else differing.format(r[0], r[-1]) for r in ranges])
    return number.sub(lambda _: next(parts), texts[0])


def alike_groups(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Returns the findings of each line in layers that are alike."""
    groups: dict[object, list[Finding]] = {}
    for each in findings:
        key = (each.name, each.severity, each.place, pattern(each.scope), pattern(each.rule))
        groups.setdefault((*key, _DECIMAL.sub("*", each.message)), []).append(each)
    return list(groups.values())


def alike_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Returns findings with those of layers that are alike as one, whose rule selects all."""
    return tuple(
        group[0]._replace(
            message=common([each.message for each in group], _DECIMAL, "{} to {}"),
            scope=common([each.scope for each in group]),
            rule=common([each.rule for each in group]),
            count=sum(each.count for each in group),
            flops=sum(each.flops for each in group),
            nbytes=sum(each.nbytes for each in group),
        )
        for group in alike_groups(findings)
    )
