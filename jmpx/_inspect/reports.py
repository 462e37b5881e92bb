"""What the reports of this room share: their data, for JSON."""

import dataclasses
import json
import math
from typing import Any

from jmpx._base.leaves import is_int


class Report:
    """A frozen dataclass that is the result of an inspection."""

    _version = 1

    def to_dict(self) -> dict[str, Any]:
        """Returns dicts, lists, strings and numbers, as `json.dumps` takes them.

        The keys are names of attributes, and `"version"`, which changes when their meaning does.
        """
        names = [field.name for field in dataclasses.fields(self)]  # pyright: ignore[reportArgumentType]
        return {"version": self._version, **{name: plain(getattr(self, name)) for name in names}}

    def to_json(self, indent: int | None = 2) -> str:
        """Returns `to_dict()` as JSON, in one line if `indent` is None."""
        return json.dumps(self.to_dict(), indent=indent)


def plain(value: Any) -> Any:
    """Returns named tuples as dicts, tuples as lists, what JSON has no number for as text."""
    value = value._asdict() if hasattr(value, "_asdict") else value
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return list(map(plain, value))
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return int(value) if is_int(value) else value  # `json.dumps` takes no numbers of NumPy
