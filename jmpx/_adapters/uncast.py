"""Arguments of a function that are not cast: `uncast=`, their positions and names."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import TypeAlias

from jmpx._base.leaves import PyTree
from jmpx._base.messages import describe

Arguments: TypeAlias = tuple[tuple[PyTree, ...], dict[str, PyTree]]
UncastLike: TypeAlias = int | str | Sequence[int | str]  # positions and names, one or several


@dataclasses.dataclass(frozen=True)
class UncastArguments:
    """The arguments that a function gets as they are, while its others are cast.

    Args:
        given: the positions and names that the user gave.
        positional: the names of the arguments that the function takes by position, in order.
        known: the names of all arguments of the function.
    """

    given: tuple[int | str, ...]
    positional: tuple[str, ...] = ()
    known: tuple[str, ...] = ()

    @classmethod
    def of(cls, func: Callable[..., PyTree], uncast: UncastLike) -> "UncastArguments":
        """Checks the positions and the names, and reads the signature of the function."""
        given: tuple[PyTree, ...] = (uncast,)
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
        named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        positional = tuple(p.name for p in named if p.kind != p.KEYWORD_ONLY)
        return cls(given, positional, tuple(p.name for p in named))

    def including(self, number: int | None) -> "UncastArguments":
        """Returns these arguments and one more, by its position."""
        if number is None:
            return self
        return dataclasses.replace(self, given=(*self.given, number))

    def exempt(self, cast: Callable[[Arguments], Arguments]) -> Callable[..., Arguments]:
        """Returns a function `(args, kwargs)` that casts the arguments of a call except these."""

        def cast_others(args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> Arguments:
            places = {self._place(each, args, kwargs) for each in self.given}
            others = tuple(None if i in places else arg for i, arg in enumerate(args))
            cast_args, cast_kwargs = cast(
                (others, {name: value for name, value in kwargs.items() if name not in places})
            )
            args = tuple(args[i] if i in places else arg for i, arg in enumerate(cast_args))
            return args, {**kwargs, **cast_kwargs}

        return cast_others

    def _place(
        self, given: int | str, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
    ) -> int | str:
        """Returns where an argument is in a call: its position, or its name if it has no position.

        An argument of the function that the call does not pass has a name.
        """
        if not isinstance(given, str):
            if -len(args) <= given < len(args):
                return given % len(args)
            if not 0 <= given < len(self.positional):
                raise ValueError(
                    f"Cannot leave argument {given} uncast, as uncast says, in a call with "
                    f"{len(args)} positional arguments: count from 0, or give its name."
                )
            return self.positional[given]
        if given not in kwargs and given in self.positional[: len(args)]:
            return self.positional.index(given)
        if given not in kwargs and given not in self.known:
            raise ValueError(
                f"Cannot leave argument {given!r} uncast, as uncast says, which is neither passed "
                "nor an argument of the function: expected one of "
                f"{sorted({*self.known, *kwargs})}."
            )
        return given
