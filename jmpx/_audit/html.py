"""The report of an audit as HTML, for notebooks."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jmpx._audit.report import Report


def report_html(report: "Report") -> str:
    """Returns the report as HTML."""
    return f"<pre>{report}</pre>"
