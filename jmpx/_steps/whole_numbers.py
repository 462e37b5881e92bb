"""The check of every option that is a whole number, such as a count of micro-batches."""

from jmpx._base.leaves import is_int
from jmpx._base.messages import describe

LARGEST_COUNT = 2**31 - 1  # an int32


def check_whole(value: object, name: str, remedy: str) -> int:
    """Returns a whole number from 1 to the largest int32, as Python's."""
    if not is_int(value):
        raise TypeError(f"Expected {name} to be a whole number, got {describe(value)}: {remedy}.")
    if not 1 <= value <= LARGEST_COUNT:
        raise ValueError(
            f"Expected {name} to be between 1 and 2**31 - 1, got {describe(value)}: {remedy}."
        )
    return int(value)
