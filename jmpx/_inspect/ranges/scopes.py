"""Which scopes of the ranges a user asks for."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jmpx._base.messages import describe, did_you_mean
from jmpx._inspect.ranges.data import Range
from jmpx._policies.rules import Rule

if TYPE_CHECKING:
    from jmpx._inspect.ranges.report import Ranges

KINDS = ("activations", "gradients")


def among(ranges: "Ranges", kind: str, scope: str | None) -> Sequence[Range]:
    """Returns the ranges of a kind that have histograms, in all scopes or in some.

    Args:
        ranges: the ranges.
        kind: `gradients` or `activations`.
        scope: a scope, which stands for those inside of it, too, or a selector; None for all.

    Raises:
        ValueError: if there is no such kind or scope, or if only extremes were asked for.
    """
    if kind not in KINDS:
        raise ValueError(
            f"Expected kind= to be 'activations' or 'gradients', got {describe(kind)}"
            f"{did_you_mean(str(kind), list(KINDS))}"
        )
    _check_scope(ranges, scope)
    found = [each for each in getattr(ranges, kind) if _is_in(each.scope, scope)]
    if any(each.histogram is None for each in found):
        raise ValueError(
            "Expected counts by exponent, got extremes alone: run jmpx.inspect.ranges(fn) without "
            "extremes_only=True."
        )
    return found


def _check_scope(ranges: "Ranges", scope: str | None) -> None:
    known = sorted({each.scope for each in (*ranges.activations, *ranges.gradients)})
    if scope is not None and not any(_is_in(each, scope) for each in known):
        choices = {name: path for path in known for name in (path.rpartition("/")[2], path)}
        raise ValueError(
            f"Expected scope= to be one of the scopes that print(ranges.to_text(all=True)) shows, "
            f"got {describe(scope)}{did_you_mean(str(scope).strip('*/'), choices)}"
        )


def _is_in(path: str, scope: str | None) -> bool:
    if scope is None or scope == path:
        return True
    if not isinstance(scope, str) or not scope:
        return False
    names = path.split("/")
    outer = ("/".join(names[:end]) for end in range(1, len(names) + 1))
    rule = Rule(scope)
    return any(each == scope or rule.matches_scope(each) for each in outer)
