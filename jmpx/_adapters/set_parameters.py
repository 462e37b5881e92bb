"""Parameters of NNX that a function on cast arguments sets, which would round the stored ones."""

from jmpx._base.casts import holds
from jmpx._base.dtypes import dtype_name
from jmpx._base.leaves import is_floating
from jmpx._base.stateful import Arguments, Changes, Keywords, Leaf, PureFunction
from jmpx._jaxprs.passed_on import without_passed_on


def refuse_set(
    pure: PureFunction, state: list[Leaf], args: Arguments, kwargs: Keywords, changes: Changes
) -> Changes:
    """Returns what a call on cast arguments has changed, in which no parameter is a rounding.

    Raises:
        ValueError: if the function has set a parameter that it was given rounded.
    """
    given, stored = pure.given(state, args, kwargs), changes.record.leaves

    def rounded() -> list[int]:
        new = changes.new_parameters().values()
        pairs = ((place, given[place], stored[place]) for place in new)
        return [
            n for n, low, leaf in pairs if is_floating(leaf) and not holds(low.dtype, leaf.dtype)
        ]

    if rounded():
        changes = without_passed_on(
            lambda pure, state, args, kwargs: pure(state, *args, **kwargs),
            *(pure, state, args, kwargs, changes),
        )
    for place in rounded():
        dtypes = dtype_name(given[place].dtype), dtype_name(stored[place].dtype)
        raise ValueError(
            f"Cannot set a parameter of shape {given[place].shape} inside of a function whose "
            f"arguments are cast, where it is a copy in {dtypes[0]} of the one stored in "
            f"{dtypes[1]}: set it outside of the function, or apply the policy with by=operations."
        )
    return changes
