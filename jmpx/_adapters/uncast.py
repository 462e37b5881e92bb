"""Arguments of a function that are not cast: `uncast=`, their positions and names."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import Any, TypeAlias

from jmpx._base.messages import describe

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
UncastLike: TypeAlias = int | str | Sequence[int | str]  # positions and names, one or several


@dataclasses.dataclass(frozen=True)
class UncastArguments:
    """The arguments that a function gets as they are, while its others are cast.

    Args:
        numbers: the positions that the user gave.
        names: the names that the user gave.
        positional: the names of the arguments that the function takes by position, in order.
        known: the names of all arguments of the function.
    """

    numbers: tuple[int, ...]
    names: tuple[str, ...]
    positional: tuple[str, ...] = ()
    known: tuple[str, ...] = ()

    @classmethod
    def of(cls, func: Callable[..., Any], uncast: UncastLike) -> "UncastArguments":
        """Checks the positions and the names, and reads the signature of the function.

        Raises:
            TypeError: if one of them is neither an int nor a string.
        """
        given: tuple[Any, ...] = (uncast,)
        if isinstance(uncast, Iterable) and not isinstance(uncast, str | bytes):
            given = tuple(uncast)
        if any(isinstance(each, bool) or not isinstance(each, Integral | str) for each in given):
            raise TypeError(
                "Expected uncast to be the position or the name of an argument, or several of "
                f"both, got {describe(uncast)}: write uncast=2, uncast='targets' or "
                "uncast=(0, 'targets')."
            )
        try:
            parameters = inspect.signature(func).parameters.values() if given else ()
        except (TypeError, ValueError):  # of a function that is not written in Python
            parameters = ()
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        each_one = (*by_position, inspect.Parameter.KEYWORD_ONLY)
        return cls(
            tuple(each for each in given if not isinstance(each, str)),
            tuple(each for each in given if isinstance(each, str)),
            tuple(p.name for p in parameters if p.kind in by_position),
            tuple(p.name for p in parameters if p.kind in each_one),
        )

    def including(self, number: int | None) -> "UncastArguments":
        """Returns these arguments and one more, by its position."""
        if number is None:
            return self
        return dataclasses.replace(self, numbers=(*self.numbers, number))

    def exempt(self, cast: Callable[[Arguments], Arguments]) -> Callable[..., Arguments]:
        """Returns a function `(args, kwargs)` that casts the arguments of a call except these."""

        def cast_others(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
            numbers, names = self._find(args, kwargs)
            uncast = {number: args[number] for number in numbers}
            uncast_by_name = {name: kwargs[name] for name in names}
            args = tuple(None if i in uncast else arg for i, arg in enumerate(args))
            args, kwargs = cast((args, {k: v for k, v in kwargs.items() if k not in names}))
            args = tuple(uncast.get(i, arg) for i, arg in enumerate(args))
            return args, {**kwargs, **uncast_by_name}

        return cast_others

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[set[int], set[str]]:
        """Finds these arguments in a call; returns the positions of some, the names of others."""
        numbers: set[int] = set()
        names = set(self.names)
        for number in self.numbers:
            if -len(args) <= number < len(args):
                numbers.add(number % len(args))
            elif 0 <= number < len(self.positional):
                names.add(self.positional[number])
            else:
                raise ValueError(
                    f"Cannot leave argument {number} uncast, as uncast says, in a call with "
                    f"{len(args)} positional arguments: count from 0, or give its name."
                )
        for name in names - kwargs.keys():
            if name in self.positional[: len(args)]:
                numbers.add(self.positional.index(name))
            elif name not in self.known:
                raise ValueError(
                    f"Cannot leave argument {name!r} uncast, as uncast says, which is neither "
                    "passed nor an argument of the function: expected one of "
                    f"{sorted({*self.known, *kwargs})}."
                )
        return numbers, names & kwargs.keys()
