"""Checks of a report that tests call: the share of a dtype, and findings that are not allowed."""

import math
from collections.abc import Iterable, Iterator
from numbers import Real

from jmpx._base.dtypes import DTypeLike, as_dtype, dtype_name
from jmpx._base.messages import describe, did_you_mean
from jmpx._base.text import share_text
from jmpx._inspect.audit.alike import alike_findings
from jmpx._inspect.audit.data import SEVERITIES, AuditData
from jmpx._inspect.audit.findings import KINDS
from jmpx._inspect.audit.text import finding_text, severities


def check_report(
    report: AuditData,
    compute: DTypeLike | None,
    at_least: float | None,
    allow: str | Iterable[str],
    severity: str,
) -> None:
    """Raises an AssertionError if the report fails; the arguments are those of `Audit.check`."""
    names = _allowed(allow)
    if severity not in SEVERITIES:
        raise ValueError(
            f"Unknown severity {describe(severity)}: expected the lowest one that fails, "
            f"{', '.join(map(repr, SEVERITIES))}{did_you_mean(str(severity), list(SEVERITIES))}"
        )
    failing = SEVERITIES[: SEVERITIES.index(severity) + 1]
    problems = list(_too_few(report, compute, at_least))
    left = [f for f in report.findings if f.name not in names and f.severity in failing]
    if left:
        findings = alike_findings(left)
        names = tuple(dict.fromkeys(finding.name for finding in findings))
        problems.append(f"Findings: {severities(findings)}.")
        problems += map(finding_text, findings)
        problems.append(f"Mend what is not intended, and allow the rest by name: allow={names}.")
    if problems:
        raise AssertionError(f"The audit of {report.title} failed.\n\n" + "\n\n".join(problems))


def _allowed(allow: str | Iterable[str]) -> set[str]:
    if not isinstance(allow, Iterable):
        raise TypeError(
            f"Expected allow= to be names of findings, got {describe(allow)}: pass for example "
            "allow=('low-exp',)."
        )
    names = {allow} if isinstance(allow, str) else set(allow)
    for name in names:
        if name not in KINDS:
            raise ValueError(
                f"Unknown finding {describe(name)} in allow=: expected names of "
                f"{', '.join(KINDS)}{did_you_mean(str(name), list(KINDS))}"
            )
    return names


def _too_few(report: AuditData, compute: DTypeLike | None, at_least: float | None) -> Iterator[str]:
    """Yields what is wrong with the share of products in a dtype, if anything is."""
    if at_least is not None and not _is_share(at_least):
        raise ValueError(
            f"Expected at_least= to be a share from 0 to 1, got {describe(at_least)}: write 0.95 "
            "for 95 %."
        )
    if compute is None:
        if at_least is not None:
            raise ValueError(
                f"Got at_least={at_least} without the dtype that it is a share of: pass "
                "compute='bfloat16', too."
            )
        return
    at_least = 0.95 if at_least is None else at_least
    name = dtype_name(as_dtype(compute, " at compute="))
    whole = sum(each.flops for each in report.products)
    part = sum(each.flops for each in report.products if each.dtypes == f"{name} x {name}")
    if not whole and at_least:
        yield f"It has no matrix products or convolutions, so none in {name}."
    elif part < at_least * whole:
        percent = math.floor(10_000 * part / whole) / 100  # never rounded up to what was expected
        largest = sorted(report.products, key=lambda each: -each.flops)
        shares = [f"  {each.dtypes}: {share_text(each.flops, whole)}" for each in largest]
        yield (
            f"{percent:g} % of the FLOPs of matrix products and convolutions are {name}, expected "
            f"at least {100 * at_least:g} %:\n" + "\n".join(shares)
        )


def _is_share(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0 <= float(value) <= 1
