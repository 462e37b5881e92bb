"""The report of an audit: frozen data, which prints and checks itself."""

import html
import math
from collections.abc import Iterable, Iterator
from typing import Self

from jmpx._base.dtypes import DTypeLike, as_dtype, dtype_name
from jmpx._base.messages import describe
from jmpx._inspect.audit.alike import alike_findings
from jmpx._inspect.audit.data import SEVERITIES, AuditData
from jmpx._inspect.audit.text import finding_text, report_text, severities, summary_line
from jmpx._inspect.reports import Report
from jmpx._inspect.text import share_text


class Audit(AuditData, Report):
    """What `jmpx.inspect.audit` found in a program.

    `print(report)` and notebooks show it, and `report.check` makes it a test.

    Attributes:
        title: the name of the function.
        is_step: whether the function was looked at as it is, such as a training step that contains
            its gradient; False for a loss, which the audit differentiated in its first argument.
        platform: the platform that was asked about, such as `"tpu"`; None if none was.
        products: the matrix products and convolutions by operand dtypes.
        saved: the bytes that are kept for the backward pass, by dtype.
        casts: the casts by source and target.
        scopes: the operations by module or named scope.
        findings: what leaked, or needs more range or precision; the worst ones first.
        has_while: whether the program has a while loop, which is counted for one trip.
        uncounted: the names of operations whose products are not known, such as `"pallas_call"`.

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

    __module__ = "jmpx.inspect"
    _version = 4

    def __repr__(self) -> str:
        return f"<{summary_line(self)}>"

    def __str__(self) -> str:
        return self.to_text()

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.to_text())}</pre>"

    def to_text(self, *, all: bool = False) -> str:
        """Returns the report as text: shares, the worst findings, the largest scopes.

        Args:
            all: whether to show every finding and every row of the tables.
        """
        return report_text(self, all)

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
                in any spelling of policies, such as `"bf16"`. None leaves shares unchecked.
            at_least: which share of the FLOPs of all products and convolutions should be in
                `compute`, from 0 to 1. None means 0.95.
            allow: names of findings that do not fail, such as `("low-exp",)`.
            severity: the lowest severity that fails: `"low"`, `"medium"` or `"high"`.

        Returns:
            The report itself.

        Raises:
            AssertionError: if the check fails, as checks of `numpy.testing` do, also under
                `python -O`. The message has the share, and all findings with their lines and rules.
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
            findings = alike_findings(left)
            problems.append(f"Findings: {severities(findings)}.")
            problems += map(finding_text, findings)
            rest = tuple(dict.fromkeys(finding.name for finding in findings))
            problems.append(f"Mend what is not intended, and allow the rest by name: allow={rest}.")
        if problems:
            raise AssertionError(f"The audit of {self.title} failed.\n\n" + "\n\n".join(problems))
        return self


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
