"""Given of a function that are not cast: `uncast=`, their positions and names."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import NamedTuple, TypeAlias

import jax

from jmpx._base.leaves import PyTree, is_floating
from jmpx._base.messages import describe

Given: TypeAlias = tuple[tuple[PyTree, ...], dict[str, PyTree]]
UncastLike: TypeAlias = int | str | Sequence[int | str]  # positions and names, one or several


class UncastArguments(NamedTuple):
    """The arguments that a function gets as they are, while its others are cast."""

    given: tuple[int | str, ...]  # by the user, positions and names
    positional: tuple[str, ...] = ()  # the arguments that the function takes by position, in order
    named: tuple[str, ...] = ()  # all arguments of the function
    has_state: bool = False  # whether the last one given is that of `state_argnum`

    @classmethod
    def of(
        cls, func: Callable[..., PyTree], uncast: UncastLike, state_argnum: int | None = None
    ) -> "UncastArguments":
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
        given = given if state_argnum is None else (*given, state_argnum)
        try:
            parameters = inspect.signature(func).parameters.values() if given else ()
        except (TypeError, ValueError):  # of a function that is not written in Python
            parameters = ()
        named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        positional = tuple(p.name for p in named if p.kind != p.KEYWORD_ONLY)
        names = tuple(p.name for p in named)
        return cls(given, positional, names, has_state=state_argnum is not None)

    def leaves(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> list[PyTree]:
        """Returns the floating leaves of these arguments in a call, but for model state."""
        own = self._replace(given=self.given[:-1]) if self.has_state else self
        found = {**dict(enumerate(args)), **kwargs}
        trees = [found[place] for place in own._places(len(args), kwargs) if place in found]
        return [leaf for leaf in jax.tree.leaves(trees) if is_floating(leaf)]

    def check(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> None:
        """Refuses a call that has not all of these arguments."""
        self._places(len(args), kwargs)

    def exempt(
        self,
        change: Callable[[Given], Given],
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
    ) -> Given:
        """Changes the arguments of a call except these."""
        places = self._places(len(args), kwargs)
        others = tuple(None if i in places else arg for i, arg in enumerate(args))
        new_args, new_kwargs = change(
            (others, {name: value for name, value in kwargs.items() if name not in places})
        )
        new_args = tuple(args[i] if i in places else arg for i, arg in enumerate(new_args))
        return new_args, {**kwargs, **new_kwargs}

    def _places(self, count: int, kwargs: Iterable[str]) -> set[int | str]:
        """Returns where these arguments are in a call: positions, and names of all others."""
        names = {*self.named, *kwargs}
        places: dict[int | str, int | str] = {name: name for name in names}
        places.update(enumerate(self.positional))
        before = enumerate(self.positional[:count])
        places |= {name: i for i, name in before if name not in kwargs}
        places |= {i: i % count for i in range(-count, count)}
        unknown = [each for each in self.given if each not in places]
        if unknown:
            raise ValueError(
                f"Cannot leave argument {unknown[0]!r} uncast, as uncast says, in a call with "
                f"{count} positional arguments: count from 0, or give one of {sorted(names)}."
            )
        return {places[each] for each in self.given}
