"""The report of an audit: its data, its text, and its check for tests."""

import dataclasses
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Self

from jmpx._base.dtypes import DTypeLike, as_dtype, dtype_name
from jmpx._base.formats import E4M3, E5M2
from jmpx._base.messages import describe, share_text
from jmpx._inspect.reports import Report, Table, as_text
from jmpx._inspect.text import bytes_text, columns, error_text, flop_text, short_names, starred
from jmpx._jaxprs.equations import Place

_EIGHT_BITS = (E4M3.name, E5M2.name)
SEVERITIES = ("high", "medium", "low")  # the worst one first
_WIDTH, _INDENT = 100, 8  # of the text of a finding, whose first line is not indented
_SHARES, _FINDINGS, _SCOPES = 6, 8, 16  # how many of each the text shows, unless all are asked for
_MORE = "more {}: print(report.to_text(all=True))"


# --- Data ---


class Finding(NamedTuple):
    """A use of dtypes that costs precision, range, time or memory, and can be avoided.

    Attributes:
        name: which kind of finding it is, such as `"low-exp"`.
        severity: `"high"`, `"medium"` or `"low"`.
        message: one sentence: what happens, and why it matters.
        place: the line of the user's code; None if there is none.
        scope: the module's path, else the named scopes; empty outside of both.
        rule: a rule to paste into the policy, such as `"*/head: f32"`, which was seen to fix the
            finding; empty if none was.
        advice: what to write in the code; empty if there is no advice.
        count: how many operations it is about, at this place in this scope.
        flops: their floating-point operations; 0 if these do not matter.
        nbytes: the bytes of their values; 0 if these do not matter.
        before: the error of the results against float32, relative to their norm, of the loss or of
            its gradient, whichever is larger; None if it was not measured.
        after: the error under the rule, or with what the advice says to narrow; where it is larger
            than rounding explains, neither is proposed.
    """

    name: str
    severity: str
    message: str
    place: Place | None = None
    scope: str = ""
    rule: str = ""
    advice: str = ""
    count: int = 1
    flops: int = 0
    nbytes: int = 0
    before: float | None = None
    after: float | None = None

    def with_sizes_of(self, group: Iterable["Finding"]) -> "Finding":
        """Returns the finding with the sums of the counts, FLOPs and bytes of a group."""
        sizes = ((each.count, each.flops, each.nbytes) for each in group)
        count, flops, nbytes = map(sum, zip(*sizes, strict=True))
        return self._replace(count=count, flops=flops, nbytes=nbytes)


class Products(NamedTuple):
    """The matrix products and convolutions of operand dtypes such as `"bfloat16 x bfloat16"`.

    One in a loop counts once per trip.
    """

    dtypes: str
    flops: int
    count: int


class EightBits(NamedTuple):
    """Forward products to which a rule with `matmul=fp8` or `matmul=mxfp8` gives 8 bits.

    Attributes:
        why: why they run in 16 bits all the same; empty for those that run in 8 bits.
        flops: their floating-point operations.
        count: how many they are; one in a loop counts once per trip.
    """

    why: str
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
        path: its path; empty for operations outside of modules and scopes.
        module: the name of the module's class; empty for a named scope.
        policy: the policy under which it ran; empty if there was none.
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


@dataclasses.dataclass(frozen=True, repr=False)
class Audit(Report):
    """What `jmpx.inspect.audit` found in a program.

    `print(report)` and notebooks show it; `report.check` turns it into a test.

    Attributes:
        title: the name of the function.
        is_step: whether the function was audited as it is, such as a training step that contains
            its gradient; False for a loss, which the audit differentiated in its first argument.
        platform: the platform that `audit` was given, such as `"tpu"`; None if it was given none.
        products: the matrix products and convolutions by operand dtypes.
        saved: the bytes that are kept for the backward pass, by dtype.
        casts: the casts by source and target.
        scopes: the operations by module or named scope.
        findings: leaks, and operations that need more range or precision; the worst ones first.
        has_while: whether the program has a while loop, which is counted for one trip.
        uncounted: the names of operations whose products are not known, such as `"pallas_call"`.
        eight_bits: the forward products to which rules give 8 bits, by why they do not run so.
        untried: why advice to narrow was not tried on values; empty if it was, or if there is none.

    Example:
        >>> import jax, jmpx
        >>> def loss_fn(w, x):
        ...     return (x @ w).max()
        >>> w = jax.ShapeDtypeStruct((8, 8), "bfloat16")
        >>> report = jmpx.inspect.audit(loss_fn)(w, w).check("bfloat16")
        >>> report
        <Audit of loss_fn: 2.05 kFLOP of products, 100.0 % bfloat16 x bfloat16, no findings>
        >>> print(report.to_text().splitlines()[2])
        Matrix products and convolutions: 2.05 kFLOP
        >>> report.to_dict()["products"]
        [{'dtypes': 'bfloat16 x bfloat16', 'flops': 2048, 'count': 2}]
    """

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
    eight_bits: tuple[EightBits, ...] = ()
    untried: str = ""

    __module__ = "jmpx.inspect"
    _version = 7

    def __repr__(self) -> str:
        parts = ["no products"]
        if self.products:
            whole, most = sum(each.flops for each in self.products), self.products[0]
            share = f"{share_text(most.flops, whole)} {most.dtypes}"
            parts = [f"{flop_text(whole)} of products", share]
        parts.append(_severities(_alike_findings(self.findings)) or "no findings")
        return f"<Audit of {self.title}: {', '.join(parts)}>"

    def to_text(self, *, all: bool = False) -> str:
        """Returns the report as text: shares, the worst findings, the largest scopes.

        Args:
            all: whether to show every finding and every row of the tables.
        """
        return as_text(self._blocks(all))

    def _blocks(self, is_full: bool = False) -> Iterator[str | Table]:
        gradient = "" if self.is_step else " and its gradient"
        yield f"Audit of {self.title}{gradient}{f' on {self.platform}' if self.platform else ''}"
        products = [(each.dtypes, each.flops, each.count) for each in self.products]
        words = {each: f"not: {each.why}" if each.why else "in 8 bits" for each in self.eight_bits}
        bits = [(text, each.flops, each.count) for each, text in words.items()]
        saved = [(dtype, nbytes, 0) for dtype, nbytes in self.saved.items()]
        casts = [(f"{c.source} -> {c.target}", c.nbytes, c.count) for c in self.casts]
        lines = [
            *_shares("Matrix products and convolutions", products, flop_text, is_full),
            *(_shares("Given 8 bits by rules, forward", bits, flop_text, is_full) if bits else ()),
            *_shares("Saved for the backward pass", saved, bytes_text, is_full),
            *_shares("Written by casts", casts, bytes_text, is_full),
        ]
        yield "\n".join(lines)
        loop = "In a while loop, operations are counted for one trip: how many it makes is unknown."
        hidden = f"Not counted: {', '.join(self.uncounted)}, whose products are unknown."
        notes = [loop] * self.has_while + [hidden] * bool(self.uncounted)
        yield "\n".join(map(_wrapped, notes))
        findings = self.findings if is_full else _alike_findings(self.findings)
        shown = findings if is_full else findings[:_FINDINGS]
        yield f"Findings: {_severities(findings)}" if findings else "No findings."
        yield from map(_finding_text, shown)
        yield from _left_out(len(findings) - len(shown), "findings")
        yield f"Advice was not tried: {self.untried}." if self.untried else ""
        if self.scopes:
            yield _scope_table(self.scopes, is_full)

    def check(
        self,
        compute: DTypeLike | None = None,
        *,
        at_least: float | None = None,
        allow: str | Iterable[str] = (),
        severity: str = "low",
    ) -> Self:
        """Raises if there are findings, or if too few products compute in a dtype: for tests.

        Args:
            compute: the dtype that both operands of matrix products and convolutions should have,
                in any spelling of policies, such as `"bf16"`. Products in 8 bits count for each
                dtype. None leaves shares unchecked.
            at_least: which share of the FLOPs of all products and convolutions should be in
                `compute`, from 0 to 1. None means 0.95.
            allow: names of findings that do not fail, such as `("low-exp",)`.
            severity: the lowest severity that fails: `"low"`, `"medium"` or `"high"`.

        Returns:
            The report itself.

        Raises:
            AssertionError: if the check fails, also under `python -O`. The message has the share,
                and all findings with their lines and rules.
            TypeError: if `compute` is not a dtype.
            ValueError: if an argument is not one that is described here.
        """
        if severity not in SEVERITIES:
            raise ValueError(
                f"Unknown severity {describe(severity)}: expected the lowest one that fails, "
                f"{', '.join(map(repr, SEVERITIES))}."
            )
        names = {allow} if isinstance(allow, str) else {*allow}
        failing = SEVERITIES[: SEVERITIES.index(severity) + 1]
        problems = list(_too_few(self, compute, at_least))
        left = [f for f in self.findings if f.name not in names and f.severity in failing]
        if left:
            findings = _alike_findings(left)
            problems.append(f"Findings: {_severities(findings)}.")
            problems += map(_finding_text, findings)
            rest = tuple(dict.fromkeys(finding.name for finding in findings))
            problems.append(f"Mend what is not intended, and allow the rest by name: allow={rest}.")
        if problems:
            raise AssertionError(f"The audit of {self.title} failed.\n\n" + "\n\n".join(problems))
        return self


def _too_few(report: Audit, compute: DTypeLike | None, at_least: float | None) -> Iterator[str]:
    """Yields a sentence if the share of products in a dtype is too small."""
    if at_least is not None and (compute is None or not 0 <= at_least <= 1):
        raise ValueError(
            f"Expected at_least= to be a share from 0 to 1, and compute= the dtype that it is a "
            f"share of, got {at_least=} and {compute=}: write compute='bfloat16', at_least=0.95."
        )
    if compute is None:
        return
    at_least = 0.95 if at_least is None else at_least
    name = dtype_name(as_dtype(compute, " at compute="))
    whole = sum(each.flops for each in report.products)
    names = {name, *_EIGHT_BITS}
    part = sum(p.flops for p in report.products if names.issuperset(p.dtypes.split(" x ")))
    if not whole and at_least:
        yield f"It has no matrix products or convolutions, so none in {name}."
    elif part < at_least * whole:
        percent = math.floor(10_000 * part / whole) / 100  # rounded down, below the expected share
        shares = [f"  {each.dtypes}: {share_text(each.flops, whole)}" for each in report.products]
        yield (
            f"{percent:g} % of the FLOPs of matrix products and convolutions are {name}, expected "
            f"at least {100 * at_least:g} %:\n" + "\n".join(shares)
        )


# --- Text ---


def _wrapped(text: str, indent: str = "") -> str:
    width = _WIDTH - len(indent)
    lines = textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)
    return textwrap.indent(lines, indent)


def _left_out(number: int, what: str) -> list[str]:
    return [f"... and {number:,} {_MORE.format(what)}"] if number > 0 else []


def _shares(
    what: str, parts: list[tuple[str, int, int]], text: Callable[[int], str], is_full: bool
) -> Iterator[str]:
    """Yields a heading, and a line for each label with its amount and count."""
    whole = sum(part for _, part, _ in parts)
    yield f"{what}: {text(whole) if parts else 'nothing'}"
    rows = [
        (label, share_text(part, whole), text(part), f"{count:,} x" if count else "")
        for label, part, count in parts
    ]
    shown = rows if is_full else rows[:_SHARES]
    lines = [*columns(shown, right=(1, 2, 3)), *_left_out(len(rows) - len(shown), "rows")]
    yield from (f"  {line}" for line in lines)


def _severities(findings: Sequence[Finding]) -> str:
    """Returns how many findings have which severity, such as `2 high, 1 low`."""
    counts = [(sum(f.severity == severity for f in findings), severity) for severity in SEVERITIES]
    return ", ".join(f"{count:,} {severity}" for count, severity in counts if count)


def _finding_text(finding: Finding) -> str:
    """Returns a finding as text, with its rule, or else its advice, on a line of its own."""
    facts = [
        finding.name,
        str(finding.place or ""),
        f"in {finding.scope}" if finding.scope else "",
        f"{finding.count:,} x" if finding.count > 1 else "",
        flop_text(finding.flops) if finding.flops else "",
        bytes_text(finding.nbytes) if finding.nbytes else "",
    ]
    head, indent = f"{finding.severity:{_INDENT}}{', '.join(filter(None, facts))}", " " * _INDENT
    remedy = finding.rule or finding.advice  # in one line, to be copied
    lines = [head, _wrapped(finding.message, indent), indent + remedy]
    if finding.before is not None and finding.after is not None:
        errors = map(error_text, (finding.before, finding.after))
        lines.append("{}error of the results, tried: {} before, {} after".format(indent, *errors))
    return "\n".join(lines if remedy else lines[:-1])


def _scope_table(scopes: Iterable[Scope], is_full: bool) -> Table:
    """Returns a table of scopes, or of layers that are alike, those with the most FLOPs first."""
    groups: dict[object, list[Scope]] = {}
    for scope in scopes:
        like = scope._replace(path=scope.path if is_full else starred(scope.path))
        groups.setdefault(like, []).append(scope)
    rows = [("scope", "", "policy", "dtypes", "operations", "products")]
    size = lambda group: (-len(group) * group[0].flops, -len(group) * group[0].operations)  # noqa: E731
    for group in sorted(groups.values(), key=size):
        first, count = group[0], len(group)
        path = common([scope.path for scope in group]) or "(outside of all)"
        cells = (
            f"{path} ({first.module})" if first.module not in ("", path) else path,
            f"{count:,} x" if count > 1 else "",
            short_names(first.policy),
            short_names(first.dtypes),
            f"{count * first.operations:,}",
            flop_text(count * first.flops) if first.flops else "",
        )
        rows.append(cells)
    left_out = f"... and {{:,}} {_MORE.format('rows')}"
    return Table(rows, (1, 4, 5), None if is_full else _SCOPES, left_out)


# --- Layers that are alike: their paths differ in numbers alone, and the text shows one for all ---

_NUMBER = re.compile(r"\d+")
_DECIMAL = re.compile(r"\d+(?:\.\d+)?")  # of a sentence


def common(texts: Sequence[str], number: re.Pattern[str] = _NUMBER, differing: str = "*") -> str:
    """Joins texts that are equal but for numbers; `differing` replaces numbers that differ."""
    columns = zip(*(number.findall(text) for text in texts), strict=True)
    ranges = [sorted(set(column), key=float) for column in columns]
    parts = iter([r[0] if len(r) == 1 else differing.format(r[0], r[-1]) for r in ranges])
    return number.sub(lambda _: next(parts), texts[0])


def alike_groups(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Groups findings of one line in layers that are alike."""
    groups: dict[object, list[Finding]] = {}
    for each in findings:
        remedy = starred(each.rule or each.advice)
        message = _DECIMAL.sub("*", each.message)
        key = each.name, each.severity, each.place, starred(each.scope), remedy, message
        groups.setdefault(key, []).append(each)
    return list(groups.values())


def _alike_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Joins the findings of layers that are alike, whose one rule selects all of these layers."""
    return tuple(
        group[0]
        ._replace(
            message=common([each.message for each in group], _DECIMAL, "{} to {}"),
            scope=common([each.scope for each in group]),
            rule=common([each.rule for each in group]),
            advice="" if group[0].rule else common([each.advice for each in group]),
        )
        .with_sizes_of(group)
        for group in alike_groups(findings)
    )
