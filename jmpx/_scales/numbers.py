"""Numbers of loss scales as texts, such as `2**15`."""

import math
import re

import numpy as np


def parse_number(text: str) -> int | float:
    """Returns the number that `32768`, `2**15`, `0.5` or `1e4` stands for, inf if too large."""
    # Python reads -2**2 as -(2**2), and `float` takes the words nan and inf. A power is a float's,
    # so that a huge one costs nothing.
    if not re.fullmatch(r"[-+.\deE_]+|[\d.][-+.\deE_]*\s*\*\*\s*[-+\d]+", text.strip(), re.ASCII):
        raise ValueError(text)
    base, power, exponent = text.partition("**")
    if not power:
        is_whole = re.fullmatch(r"[-+]?\d+", text.strip(), re.ASCII)
        return int(text) if is_whole else plain_number(float(text))
    try:
        return plain_number(float(base) ** int(exponent))
    except (OverflowError, ZeroDivisionError):
        return math.inf


def format_number(number: int | float) -> str:
    """Returns the text of a number, which `parse_number` reads back; a long one may be a power."""
    text = str(plain_number(number))
    if len(text) > 8 and number > 0:
        exponent = math.frexp(number)[1] - 1
        if 2.0**exponent == number:
            return f"2**{exponent}"
    return text


def plain_number(number: int | float) -> int | float:
    """Returns a whole number as an int, which is shorter, unless it has more than 16 digits."""
    is_whole = isinstance(number, float) and number.is_integer() and abs(number) < 2**53
    return int(number) if is_whole else number


def shortest(number: np.float32) -> int | float:
    """Returns the number with the fewest digits that is `number` in float32, or a power of two."""
    exact, short = float(number), float(str(number))
    is_exact = math.frexp(exact)[0] == 0.5 or np.float32(short) != number
    return plain_number(exact if is_exact else short)
