"""Collectives: their fields, and how many bytes they send.

A collective's bytes are those of the whole array, which a gather returns and a reduction reads.
In a ring of n devices, each of them sends

    all-gather, reduce-scatter, all-to-all: (n - 1) / n of the bytes, if ragged at most
    all-reduce: twice that, because it is a reduce-scatter and an all-gather
    collective-permute, collective-broadcast: the bytes
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from jmpx._jaxprs.equations import Place

KINDS = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all",
    "collective-permute", "collective-broadcast",
)  # fmt: skip


class Collective(NamedTuple):
    """A collective of one array, whose fields `jmpx.inspect.Collectives` describes."""

    kind: str
    dtype: str
    bytes: int
    group: int
    times: int = 1
    parameter: str = ""
    results: tuple[str, ...] = ()
    is_backward: bool = False
    in_while: bool = False
    in_branch: bool = False
    place: Place | None = None

    def at(self, sources: Sequence[str], is_backward: bool, place: Place | None) -> "Collective":
        """Returns it with the input that its operand is a copy of, and where it is."""
        return self._replace(parameter=sources[0], is_backward=is_backward, place=place)

    @property
    def sent(self) -> float:
        """The bytes that a device sends."""
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.times * self.bytes
        rounds = 2 if self.kind == "all-reduce" else 1
        return self.times * rounds * self.bytes * (self.group - 1) / self.group

    @property
    def is_scalar(self) -> bool:
        """Whether it exchanges a loss or a flag rather than an array."""
        return self.bytes * 8 <= bits(self.dtype)


def bits(dtype: str) -> int:
    """Returns the size of a dtype of HLO, such as `bf16`, `f8e4m3fn` or `pred`."""
    return 8 if dtype == "pred" else int(re.sub(r"^\D*(\d+).*", r"\1", dtype))
