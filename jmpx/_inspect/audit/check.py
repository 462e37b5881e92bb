"""Checks of a report that tests call: the share of a dtype, and findings that are not allowed."""

import math
from collections.abc import Iterable, Iterator

from jmpx._base.dtypes import DTypeLike, as_dtype, dtype_name
from jmpx._base.messages import describe
from jmpx._base.text import share_text
from jmpx._inspect.audit.alike import alike_findings
from jmpx._inspect.audit.data import SEVERITIES, AuditData
from jmpx._inspect.audit.text import finding_text, severities


def check_report(
    report: AuditData,
    compute: DTypeLike | None,
    at_least: float | None,
    allow: str | Iterable[str],
    severity: str,
) -> None:
    """Raises an AssertionError if the report fails; the arguments are those of `Audit.check`."""
    if severity not in SEVERITIES:
        raise ValueError(
            f"Unknown severity {describe(severity)}: expected the lowest one that fails, "
            f"{', '.join(map(repr, SEVERITIES))}."
        )
    names = {allow} if isinstance(allow, str) else {*allow}
    failing = SEVERITIES[: SEVERITIES.index(severity) + 1]
    problems = list(_too_few(report, compute, at_least))
    left = [f for f in report.findings if f.name not in names and f.severity in failing]
    if left:
        findings = alike_findings(left)
        problems.append(f"Findings: {severities(findings)}.")
        problems += map(finding_text, findings)
        others = tuple(dict.fromkeys(finding.name for finding in findings))
        problems.append(f"Mend what is not intended, and allow the rest by name: allow={others}.")
    if problems:
        raise AssertionError(f"The audit of {report.title} failed.\n\n" + "\n\n".join(problems))


def _too_few(report: AuditData, compute: DTypeLike | None, at_least: float | None) -> Iterator[str]:
    """Yields what is wrong with the share of products in a dtype, if anything is."""
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
    part = sum(each.flops for each in report.products if each.dtypes == f"{name} x {name}")
    if not whole and at_least:
        yield f"It has no matrix products or convolutions, so none in {name}."
    elif part < at_least * whole:
        percent = math.floor(10_000 * part / whole) / 100  # never rounded up to what was expected
        shares = [f"  {each.dtypes}: {share_text(each.flops, whole)}" for each in report.products]
        yield (
            f"{percent:g} % of the FLOPs of matrix products and convolutions are {name}, expected "
            f"at least {100 * at_least:g} %:\n" + "\n".join(shares)
        )
