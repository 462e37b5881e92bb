"""Ranges as dicts, lists, strings and numbers, for JSON."""

from typing import TYPE_CHECKING, Any

from jmpx._inspect.ranges.data import Range

if TYPE_CHECKING:
    from jmpx._inspect.ranges.report import Ranges

_VERSION = 1  # changes when the meaning of a key does


def ranges_dict(ranges: "Ranges") -> dict[str, Any]:
    """Returns what `json.dumps` takes."""
    return {
        "version": _VERSION,
        "title": ranges.title,
        "is_step": ranges.is_step,
        "masks": list(ranges.masks),
        "activations": [_range_dict(each) for each in ranges.activations],
        "gradients": [_range_dict(each) for each in ranges.gradients],
    }


def _range_dict(each: Range) -> dict[str, Any]:
    found: dict[str, Any] = {
        "scope": each.scope,
        "selector": each.selector,
        "largest": each.largest,
        "smallest": each.smallest,
        "entering": each.entering,
        "operations": [operation._asdict() for operation in each.operations],
    }
    if each.histogram is not None:
        found["exponents"] = {str(e): count for e, count in each.histogram.exponents.items()}
        for name in ("zeros", "infinite", "nan", "masked"):
            found[name] = getattr(each.histogram, name)
    return found
