"""The rows of a report's table of scopes: one for all layers that are alike."""

from collections.abc import Iterable
from typing import NamedTuple

from jmpx._base.text import flop_text, short_names
from jmpx._inspect.audit.alike import common, pattern
from jmpx._inspect.audit.data import Scope

_OUTSIDE = "(outside of all)"


class ScopeRow(NamedTuple):
    """A scope, or several that differ in the numbers of their paths alone.

    Args:
        path: the path; `*` stands for numbers that differ.
        module: the class of the module; empty for a named scope.
        policy: the policy that held.
        dtypes: the dtypes.
        scopes: how many scopes they are.
        operations: how many operations they have together.
        flops: the FLOPs of their products and convolutions together.
    """

    path: str
    module: str
    policy: str
    dtypes: str
    scopes: int
    operations: int
    flops: int

    @property
    def name(self) -> str:
        """The path, and the class unless it stands for the path of the outermost module."""
        path = self.path or _OUTSIDE
        return f"{path} ({self.module})" if self.module not in ("", path) else path

    @property
    def cells(self) -> tuple[str, str, str, str, str]:
        """What stands in the columns after the name, as `COLUMNS` names them."""
        return (
            f"{self.scopes:,} x" if self.scopes > 1 else "",
            self.policy,
            self.dtypes,
            f"{self.operations:,}",
            flop_text(self.flops) if self.flops else "",
        )


COLUMNS = ("", "policy", "dtypes", "operations", "products")


def scope_rows(scopes: Iterable[Scope], is_full: bool) -> list[ScopeRow]:
    """Returns the rows, those with the most FLOPs first.

    Args:
        scopes: the scopes.
        is_full: whether each scope has a row of its own.
    """
    groups: dict[object, list[Scope]] = {}
    for scope in scopes:
        like = scope._replace(path=scope.path if is_full else pattern(scope.path))
        groups.setdefault(like, []).append(scope)
    rows = [_row(group) for group in groups.values()]
    return sorted(rows, key=lambda row: (-row.flops, -row.operations))


def _row(group: list[Scope]) -> ScopeRow:
    first, number = group[0], len(group)
    return ScopeRow(
        common([scope.path for scope in group]),
        first.module,
        short_names(first.policy),
        short_names(first.dtypes),
        number,
        number * first.operations,
        number * first.flops,
    )
