"""Kinds of absl flags: they parse what programs set, and may get a default from the environment."""

import copy
import functools
import os
import warnings
from collections.abc import Callable
from typing import Any, Self, TypeVar, cast

from absl import flags

from jmpx._base.messages import did_you_mean, user_stacklevel

# absl does not type its validators:
# pyright: reportUnknownMemberType=false

T = TypeVar("T")

# A flag belongs to the module that calls a function of jmpx.flags, and --help lists it there.
flags.disclaim_key_flags()


class Parser(flags.ArgumentParser[T]):
    """Parses with a function. It accepts a parsed value too, because a default may be one."""

    def __init__(
        self, parse: Callable[[str | Any], T], flag_type: str, syntactic_help: str
    ) -> None:
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

    @property
    def is_given(self) -> bool:
        """Whether the command line or the program has set the flag.

        absl's `using_default_value` does not yet say so when validators run.
        """
        return self.present > 0 or self.value != self.default

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # absl's own notes the copy too late for flags that refer to each other.
        result = memo[id(self)] = object.__new__(type(self))
        result.__dict__ = copy.deepcopy(self.__dict__, memo)
        return result


class BooleanFlag(Flag[bool], flags.BooleanFlag):
    """A boolean flag that also parses the values that a program sets, such as "false"."""


class EnumFlag(Flag[str], flags.EnumFlag):
    """An enum flag that also parses the values that a program sets, such as "static"."""


def define(
    parser: flags.ArgumentParser[T],
    name: str,
    default: Any,  # what the parser accepts
    help: str,
    flag_values: flags.FlagValues,
    required: bool = False,
    module_name: str | None = None,
    flag_class: type[Flag[Any]] = Flag,
    **args: Any,
) -> flags.FlagHolder[T]:
    """Does the same as `flags.DEFINE`, but defines a `Flag`."""
    flag = flag_class(parser, flags.ArgumentSerializer(), name, default, help, **args)
    holder = flags.DEFINE_flag(flag, flag_values, module_name, required=required)
    return cast("flags.FlagHolder[T]", holder)  # the callers' types say whether it may hold None


def define_with_variable(
    parser: flags.ArgumentParser[T],
    name: str,
    variable: str,
    default: Any,
    help: str,
    flag_values: flags.FlagValues,
    flag_class: type[Flag[Any]] = Flag,
) -> flags.FlagHolder[T]:
    """Defines a flag whose default is an environment variable, if it is set now.

    A wrong value does not stop the program here, where it imports its modules, but is a usage error
    when it parses its flags.

    Args:
        parser: the parser of the flag.
        name: the name of the flag.
        variable: the name of the environment variable. It counts as unset if it is empty.
        default: the default without the variable.
        help: the help text.
        flag_values: the flag registry.
        flag_class: the class of the flag.
    """
    text, mistake = os.environ.get(variable, ""), None
    if text.strip():
        try:
            default = parser.parse(text)
        except (TypeError, ValueError) as error:
            mistake = f"environment variable {variable}={text}: {error}"
    holder = define(parser, name, default, help, flag_values, flag_class=flag_class)
    if mistake is not None:
        flag = cast("Flag[T]", flag_values[name])
        check = functools.partial(_refuse_default, flag, mistake)
        flags.register_validator(name, check, mistake, flag_values)
    return holder


def warn_of_variables(known: tuple[str, ...]) -> None:
    """Warns of environment variables that are meant for jmpx, and that it does not read."""
    for name, value in os.environ.items():
        if name.startswith("JMPX_") and name not in known and value.strip():
            warnings.warn(
                f"The environment variable {name} does nothing: jmpx reads {' and '.join(known)}"
                f"{did_you_mean(name, list(known))}",
                stacklevel=user_stacklevel(),
            )


def _refuse_default(flag: Flag[Any], mistake: str, value: object) -> bool:
    """Refuses a wrong environment variable, unless the flag is set in another way."""
    del value
    if not flag.is_given:
        # absl would begin a ValidationError with the flag, which the user has not written.
        raise flags.IllegalFlagValueError(mistake)
    return True


def is_given(value: object) -> bool:
    """Whether a flag has a value: a program may set None, which validators by this refuse."""
    return value is not None
