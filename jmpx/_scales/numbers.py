"""Numbers of loss scales as texts: how they are read and written."""

import math
import re
from collections.abc import Mapping

import numpy as np

from jmpx._scales.arguments import DYNAMIC

# Each character is tried a fixed number of times, so that a long text takes linear time.
_LITERAL = r"(?:[0-9]+(?:_[0-9]+)*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
_NUMBER = rf"([+-]?{_LITERAL})|({_LITERAL})\s*\*\*\s*([+-]?[0-9]+)"
_LONGEST_EXPONENT = 9  # digits; any longer one gives 0, 1 or a number beyond float32
_LONGEST_LITERAL = 40  # float32's largest number has 39 digits


def parse_number(text: str) -> int | float:
    """Returns the number that a text such as `32768`, `2**15`, `0.5` or `1e4` stands for.

    Nothing is evaluated: a power of two literals is the only operation. A number that is too large
    for a Python float is returned as infinity.

    Raises:
        ValueError: if the text is anything else.
    """
    match = re.fullmatch(_NUMBER, text.strip())
    if match is None:
        raise ValueError(text)
    number, base, exponent = match.groups()
    if number is not None:
        return _parse_literal(number)
    return _power(_parse_literal(base), exponent)


def _parse_literal(text: str) -> int | float:
    digits = text.lstrip("+-").replace("_", "")
    is_whole = digits.isdigit() and len(text) <= _LONGEST_LITERAL
    return int(text) if is_whole else float(text)


def _power(base: int | float, exponent: str) -> int | float:
    if len(exponent.lstrip("+-")) > _LONGEST_EXPONENT:
        return math.inf
    try:
        power = float(base) ** int(exponent)
    except (OverflowError, ZeroDivisionError):
        return math.inf
    is_whole = isinstance(base, int) and int(exponent) >= 0  # finite, so it has at most 1024 bits
    return base ** int(exponent) if is_whole else power


def format_number(number: int | float) -> str:
    """Returns the text of a number, which `parse_number` reads back exactly.

    A power of two that would take more than eight characters is written as one, such as `2**-14`.
    """
    text = str(plain_number(number))
    if len(text) > 8 and number > 0:
        exponent = math.frexp(number)[1] - 1
        if 2.0**exponent == number:
            return f"2**{exponent}"
    return text


def plain_number(number: int | float) -> int | float:
    """Returns a whole number as an int, which is shorter, unless it has more than 16 digits."""
    if isinstance(number, float) and number.is_integer() and abs(number) < 2**53:
        return int(number)
    return number


def shortest(number: np.float32) -> int | float:
    """Returns the number with the fewest digits that is `number` in float32, or a power of two."""
    exact, short = float(number), float(str(number))
    is_exact = math.frexp(exact)[0] == 0.5 or np.float32(short) != number
    return plain_number(exact if is_exact else short)


def as_text(kind: str, numbers: Mapping[str, int | float]) -> str:
    """Returns the string of a loss scale, such as `dynamic,init=32768` or `static=1024`."""
    if kind == "static":
        return f"static={format_number(numbers['init'])}"
    parts = [f"{key}={format_number(numbers[key])}" for key in DYNAMIC if key in numbers]
    return ",".join([kind, *parts])
