"""What an audit finds, as plain data: findings, products, casts and scopes."""

import dataclasses
from typing import NamedTuple

from jmpx._jaxprs.equations import Place

SEVERITIES = ("high", "medium", "low")  # the worst one first


class Finding(NamedTuple):
    """Something that costs precision, range, time or memory, and that the program need not do.

    Attributes:
        name: what kind of finding it is, such as `"low-exp"`.
        severity: `"high"`, `"medium"` or `"low"`.
        message: one sentence: what happens, and why it matters.
        place: the line of the user's code; None where there is none.
        scope: the module's path, else the named scopes; empty outside of all.
        rule: what to paste, such as `"*/head: f32"`, which was seen to mend it; else what to do.
        count: how many operations do so, at this place in this scope.
        flops: their floating-point operations; 0 where these say nothing.
        nbytes: the bytes of their values; 0 where these say nothing.
    """

    name: str
    severity: str
    message: str
    place: Place | None = None
    scope: str = ""
    rule: str = ""
    count: int = 1
    flops: int = 0
    nbytes: int = 0


class Products(NamedTuple):
    """The matrix products and convolutions of operand dtypes such as `"bfloat16 x bfloat16"`.

    One in a loop counts once per trip.
    """

    dtypes: str
    flops: int
    count: int


class Cast(NamedTuple):
    """The casts from one dtype to another, and the bytes that they write."""

    source: str
    target: str
    count: int
    nbytes: int


class Scope(NamedTuple):
    """The operations of one module or one named scope.

    Attributes:
        path: its path; empty for operations outside of all.
        module: the name of the module's class; empty for a named scope.
        policy: the policy that held; empty where none did.
        operations: how many operations it has.
        dtypes: the dtypes that it computes in.
        flops: the floating-point operations of its products and convolutions.
    """

    path: str
    module: str
    policy: str
    operations: int
    dtypes: str
    flops: int


class Entry(NamedTuple):
    """An operation of a lock file, of which jmpx 0.2 had some: its pickles hold them."""

    scope: str
    operation: str
    dtypes: str
    place: Place | None = None


@dataclasses.dataclass(frozen=True, repr=False)
class AuditData:
    """The data of a report; `Audit` says what each attribute is."""

    title: str
    is_step: bool
    platform: str | None
    products: tuple[Products, ...]
    saved: dict[str, int]
    casts: tuple[Cast, ...]
    scopes: tuple[Scope, ...]
    findings: tuple[Finding, ...]
    has_while: bool
    uncounted: tuple[str, ...] = ()
