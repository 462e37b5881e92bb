"""Kinds of absl flags: they parse what programs set, and may get a default from the environment."""

import os
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

from absl import flags

from jmpx._base.messages import did_you_mean, user_stacklevel

# absl does not type its validators:
# pyright: reportUnknownMemberType=false

T = TypeVar("T")

# A flag belongs to the module that calls a function of jmpx.flags, and --help lists it there.
flags.disclaim_key_flags()


class Parser(flags.ArgumentParser[T]):
    """Parses with a function. It accepts a parsed value too, because a default may be one."""

    def __init__(self, parse: Callable[[Any], T], flag_type: str, syntactic_help: str) -> None:
        super().__init__()
        self._parse = parse
        self._flag_type = flag_type
        self.syntactic_help = syntactic_help

    def parse(self, argument: str | T) -> T:
        return self._parse(argument)

    def flag_type(self) -> str:
        return self._flag_type


class Flag(flags.Flag[T]):
    """A flag that also parses the values that a program sets.

    absl stores `FLAGS.mp_policy = "c=f16"` and `flagsaver(mp_policy="c=f16")` as strings.
    """

    @property
    def value(self) -> T | None:
        """The parsed value, None if there is none."""
        return self._value

    @value.setter
    def value(self, value: T | str | None) -> None:
        self._value = None if value is None else self._parse(value)


class BooleanFlag(Flag[bool], flags.BooleanFlag):
    """A boolean flag that also parses the values that a program sets, such as "false"."""


class EnumFlag(Flag[str], flags.EnumFlag):
    """An enum flag that also parses the values that a program sets, such as "static"."""


def parsed(
    parser: flags.ArgumentParser[T], name: str, default: object, help: str, **args: Any
) -> Flag[T]:
    """Returns a flag whose values a parser makes of what users and programs write."""
    return Flag(parser, flags.ArgumentSerializer(), name, cast(Any, default), help, **args)


def from_variable(
    parser: flags.ArgumentParser[T], variable: str, default: Any
) -> tuple[Any, str | None]:
    """Returns the default that an environment variable sets, and the mistake in the variable.

    A wrong value does not stop the program where it imports its modules: `refuse_default` makes it
    a usage error when the program parses its flags. An empty variable counts as unset.
    """
    text = os.environ.get(variable, "")
    if not text.strip():
        return default, None
    try:
        return parser.parse(text), None
    except (TypeError, ValueError) as error:
        return default, f"environment variable {variable}={text}: {error}"


def refuse_default(name: str, mistake: str, flag_values: flags.FlagValues) -> None:
    """Makes the default of a flag a usage error."""
    default = flag_values[name].default

    def check(value: object) -> bool:
        if value == default:
            # absl would begin a ValidationError with the flag, which the user has not written.
            raise flags.IllegalFlagValueError(mistake)
        return True

    flags.register_validator(name, check, mistake, flag_values)


def warn_of_variables(known: tuple[str, ...]) -> None:
    """Warns of environment variables that look like jmpx's, and that it does not read."""
    for name, value in os.environ.items():
        if name.startswith("JMPX_") and name not in known and value.strip():
            warnings.warn(
                f"The environment variable {name} does nothing: jmpx reads {' and '.join(known)}"
                f"{did_you_mean(name, list(known))}",
                stacklevel=user_stacklevel(),
            )
