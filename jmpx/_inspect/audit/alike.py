"""Layers that are alike: what differs in the numbers of its paths alone is shown once."""

import re
from collections.abc import Iterable, Sequence

from jmpx._inspect.audit.data import Finding

_NUMBER = re.compile(r"\d+")
_DECIMAL = re.compile(r"\d+(?:\.\d+)?")  # of a sentence


def pattern(text: str) -> str:
    """Returns a path with `*` for each number: equal for the paths of layers that are alike."""
    return _NUMBER.sub("*", text)


def common(texts: Sequence[str]) -> str:
    """Returns texts of one pattern as one text, with `*` for the numbers that differ."""
    numbers = zip(*(_NUMBER.findall(text) for text in texts), strict=True)
    parts = iter([same[0] if len(set(same)) == 1 else "*" for same in numbers])
    return _NUMBER.sub(lambda _: next(parts), texts[0])


def _ranged(texts: Sequence[str]) -> str:
    """Returns sentences of one pattern as one sentence, with `3 to 5` for numbers that differ."""
    numbers = zip(*(_DECIMAL.findall(text) for text in texts), strict=True)
    ranges = iter([_range(sorted(set(same), key=float)) for same in numbers])
    return _DECIMAL.sub(lambda _: next(ranges), texts[0])


def _range(numbers: Sequence[str]) -> str:
    return numbers[0] if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def alike_groups(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Returns the findings of each line in layers that are alike."""
    groups: dict[object, list[Finding]] = {}
    for each in findings:
        key = (each.name, each.severity, each.place, pattern(each.scope), pattern(each.rule))
        groups.setdefault((*key, _DECIMAL.sub("*", each.message)), []).append(each)
    return list(groups.values())


def alike_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Returns findings with those of one line in layers that are alike as one.

    Its rule selects all of these layers.
    """
    return tuple(
        group[0]._replace(
            message=_ranged([each.message for each in group]),
            scope=common([each.scope for each in group]),
            rule=common([each.rule for each in group]),
            count=sum(each.count for each in group),
            flops=sum(each.flops for each in group),
            nbytes=sum(each.nbytes for each in group),
        )
        for group in alike_groups(findings)
    )
