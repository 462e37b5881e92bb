"""The report of an audit: frozen data, which prints and checks itself."""

import html
from collections.abc import Iterable
from typing import Self

from jmpx._base.dtypes import DTypeLike
from jmpx._inspect.audit.check import check_report
from jmpx._inspect.audit.data import AuditData
from jmpx._inspect.audit.text import report_text, summary_line
from jmpx._inspect.reports import Report


class Audit(AuditData, Report):
    """What `jmpx.inspect.audit` says of a program.

    `print(report)` shows it, so does a notebook, and `report.check` makes a test of it.

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
        >>> import jax
        >>> import jmpx
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
        check_report(self, compute, at_least, allow, severity)
        return self
