"""The report of an audit as plain values, for JSON."""

import dataclasses
from typing import TYPE_CHECKING, Any

from jmpx._base.leaves import is_int

if TYPE_CHECKING:
    from jmpx._inspect.audit.report import Audit

_VERSION = 2  # of the keys and of what they mean


def report_dict(report: "Audit") -> dict[str, Any]:
    """Returns the report as dicts, lists, strings and numbers."""
    fields = [field.name for field in dataclasses.fields(report)]
    return {"version": _VERSION, **{name: _plain(getattr(report, name)) for name in fields}}


def _plain(value: Any) -> Any:
    if hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return [_plain(inner) for inner in value]
    return int(value) if is_int(value) else value  # NumPy's numbers are no numbers to json.dumps
