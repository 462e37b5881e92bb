"""A cache whose results are the same objects in all threads."""

import functools
from collections.abc import Callable
from typing import TypeVar

R = TypeVar("R")


def made_once(make: Callable[..., R]) -> Callable[..., R]:
    """Caches a function so that all threads get the same object for equal arguments.

    With `functools.cache`, threads that call at the same time may each get an object of their own.
    Two classes of one name would be two node types to JAX: pytrees that should match would not, and
    functions would be traced again. There is no lock, because making a class runs the user's code.
    """
    made: dict[tuple[object, ...], R] = {}

    @functools.wraps(make)
    def get(*key: object) -> R:
        if key not in made:
            made.setdefault(key, make(*key))  # If another thread was first, its object stays.
        return made[key]

    return get
