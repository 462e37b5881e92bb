"""The report of an audit: frozen data, which prints, checks and locks itself."""

import dataclasses

from jmpx._audit.data import Cast, Entry, Finding, Products, Scope


@dataclasses.dataclass(frozen=True)
class Report:
    """What `jmpx.audit` says of a program.

    Attributes:
        title: the name of the function.
        is_step: whether the function is a training step that contains its gradient; False for a
            loss, which the audit differentiated in its first argument.
        platform: the platform that was asked about, such as `"tpu"`; None if none was.
        products: the matrix products and convolutions by operand dtypes.
        other_flops: the floating-point operations of everything else.
        saved: the bytes that are kept for the backward pass, by dtype.
        casts: the casts by source and target.
        scopes: the operations by module or named scope.
        findings: what leaked, or needs more range or precision; the worst ones first.
        entries: the operations that a lock file holds.
        has_while: whether a while loop was counted for one trip.
    """

    title: str
    is_step: bool
    platform: str | None
    products: tuple[Products, ...]
    other_flops: int
    saved: dict[str, int]
    casts: tuple[Cast, ...]
    scopes: tuple[Scope, ...]
    findings: tuple[Finding, ...]
    entries: tuple[Entry, ...]
    has_while: bool
