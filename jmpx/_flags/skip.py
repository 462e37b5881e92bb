"""The flags that say whether steps are skipped, and how many in a row."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from absl import flags

from jmpx._flags.kinds import BooleanFlag, define, is_given
from jmpx._steps.optimizer_checks import MAX_CONSECUTIVE_SKIPS
from jmpx._steps.whole_numbers import LARGEST_COUNT

# absl does not type its validators:
# pyright: reportUnknownMemberType=false

# A flag belongs to the module that calls a function of jmpx.flags, and --help lists it there.
flags.disclaim_key_flags()


@dataclasses.dataclass(frozen=True)
class SkipFlags:
    """The two flags. Read them after the program has parsed its flags.

    Args:
        skip: whether to skip steps whose gradients are not finite.
        most: how many in a row may be skipped; 0 means any number.
    """

    skip: flags.FlagHolder[bool]
    most: flags.FlagHolder[int]

    @property
    def limit(self) -> int | None:
        """How many steps in a row may be skipped; None for any number, and where none is."""
        return (self.most.value or None) if self.skip.value else None


def define_skip_flags(prefix: str, flag_values: flags.FlagValues) -> SkipFlags:
    """Defines the flags of `jmpx.flags.define_mp_flags` that are about skipped steps."""
    skip, most = f"{prefix}_skip_nonfinite", f"{prefix}_max_skips"
    help = "Whether to skip the optimizer step where gradients are not finite."
    skip_holder = flags.DEFINE_flag(BooleanFlag(skip, True, help), flag_values)
    most_holder: flags.FlagHolder[int] = define(
        flags.IntegerParser(lower_bound=0, upper_bound=LARGEST_COUNT),
        most,
        MAX_CONSECUTIVE_SKIPS,
        "How many steps in a row may be skipped: one more, and training has diverged and ends. 0 "
        "sets no limit.",
        flag_values,
    )

    def agree(values: Mapping[str, Any]) -> bool:
        # A flag file has the default, too, so that it cannot contradict.
        return bool(values[skip]) or values[most] in (0, MAX_CONSECUTIVE_SKIPS)

    for name in (skip, most):  # a program may set None
        message = "must have a value"
        flags.register_validator(name, is_given, message, flag_values)
    message = f"--{most} counts skipped steps, of which --no{skip} leaves none: give one of the two"
    flags.register_multi_flags_validator([skip, most], agree, message, flag_values)
    return SkipFlags(skip_holder, most_holder)
