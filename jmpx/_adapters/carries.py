"""The remedy that JAX's error of a loop gets whose carry changes its dtype by a policy."""

import contextlib
import re
import threading
from collections.abc import Iterator

import numpy as np

from jmpx._base.dtypes import DTypeLike, dtype_name
from jmpx._policies.policy import Policy
from jmpx._policies.registry import in_loop


class _Thread(threading.local):
    """The calls of `noted_carries` that are open in this thread.

    Attributes:
        inside: for each call, the innermost last, the classes of the modules that it called in
            loops or branches of JAX, with their compute dtypes.
    """

    def __init__(self) -> None:
        self.inside: list[dict[type, DTypeLike]] = []


_thread = _Thread()


@contextlib.contextmanager
def noted_carries(cls: type, policy: Policy | None) -> Iterator[None]:
    """Adds the rule that mends it to JAX's error of a carry or a branch in another dtype.

    Put it around each call of a module under a policy. An error of a loop is raised in the call
    around the loop; the modules that returned inside of the loop are named.
    """
    inside: dict[type, DTypeLike] = {}
    calls = _thread.inside  # of this thread, where a generator may end in another one
    calls.append(inside)
    try:
        yield
    except TypeError as error:
        _note_carry(error, inside)
        raise
    finally:
        calls[:] = [call for call in calls if call is not inside]
    if policy is not None and calls and in_loop():
        calls[-1][cls] = policy.compute_dtype


_OTHER_DTYPES = re.compile(r"has type (\w+)\[.* has type (\w+)\[.* the dtypes do not match")


def _note_carry(error: TypeError, inside: dict[type, DTypeLike]) -> None:
    """Adds a note with rules for modules to JAX's error of dtypes that differ, if it is one."""
    dtypes = _OTHER_DTYPES.search(str(error))
    if dtypes is None or not inside:
        return
    is_loop = "carry" in str(error)  # the carry that came in is named first
    kept = dtypes[1] if is_loop else max(dtypes.groups(), key=lambda name: np.dtype(name).itemsize)
    rules = " or ".join(
        f"'{cls.__name__}: compute={dtype_name(compute)},output={kept}'"
        for cls, compute in inside.items()
    )
    error.add_note(
        "A loop of JAX keeps the dtype of its carry, and branches return equal dtypes, but a "
        "module inside returned another dtype than it was given, as its policy says: give it a "
        f"rule in the policy map with the dtype of the carry, {rules}, or begin with a carry in "
        "the other dtype."
    )
