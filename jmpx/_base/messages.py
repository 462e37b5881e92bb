"""Words of errors and warnings, and the nested mappings whose values they locate."""

import contextlib
import functools
import inspect
import os
import re
import reprlib
import sys
import traceback
import warnings
from collections.abc import (
    AsyncGenerator,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import (
    Any,
    Generic,
    NamedTuple,
    Protocol,
    TypeAlias,
    TypeGuard,
    TypeVar,
    runtime_checkable,
)

import jax
import jax.core
import numpy as np


class _Repr(reprlib.Repr):
    def repr_instance(self, x: Any, level: int) -> str:
        is_array = isinstance(x, np.ndarray | jax.Array) and not isinstance(x, jax.core.Tracer)
        has_many = is_array and x.ndim > 0
        return f"{x.dtype}{list(x.shape)}" if has_many else super().repr_instance(x, level)


_REPR = _Repr()
_REPR.maxstring = _REPR.maxother = 80


def share_text(part: float, whole: float) -> str:
    """Returns a share in percent: `100.0 %` is all, and `0.0 %` is nothing."""
    percent = 100 * part / whole if whole else 0.0
    if 0 < percent < 0.1:
        return "<0.1 %"
    return ">99.9 %" if 99.95 <= percent and part < whole else f"{percent:.1f} %"


def did_you_mean(word: str, choices: list[str] | dict[str, str]) -> str:
    """Returns the end of an error message: `; did you mean 'x'?`, or a full stop.

    The choices are words, or a dict from words to the suggestions for them.
    """
    import difflib  # here, because only errors need it

    known = choices if isinstance(choices, dict) else {choice: choice for choice in choices}
    word = word.strip()
    near = [n for w in (word, word.lower()) for n in difflib.get_close_matches(w, known, n=1)]
    near += [each for each in known if len(word) > 1 and each.startswith(word)]
    return f"; did you mean {known[near[0]]!r}?" if near else "."


def user_stacklevel(*packages: str) -> int:
    """Returns the `stacklevel` at which the caller's `warnings.warn` names the user's line.

    Skips lines of jmpx, of these packages, of Python's contexts and decorators, and of the
    constructors that dataclasses generate ("<string>"). Python 3.11 lacks the `skip_file_prefixes`
    of `warnings.warn`.
    """
    loaded = [sys.modules[name] for name in ("jmpx", *packages) if name in sys.modules]
    folders = [os.path.dirname(module.__file__ or "") + os.sep for module in loaded]
    others = (*folders, contextlib.__file__, functools.__file__, "<string>")
    stack = traceback.StackSummary.extract(traceback.walk_stack(None), lookup_lines=False)
    levels = (n for n, frame in enumerate(stack) if not frame.filename.startswith(others))
    return next(levels, len(stack) - 1)


def warn(message: str) -> None:
    """Warns at the user's line that calls jmpx, or a function that jmpx made."""
    warnings.warn(message, stacklevel=user_stacklevel("jax"))


def describe(value: object) -> str:
    """Returns the `repr` of any value on one line, shortened if it is long or deeply nested.

    Of an array it is the dtype and the shape, such as `float32[2, 3]`.
    """
    try:
        text = _REPR.repr(value)
    except ValueError:  # Python refuses to write integers of several thousand digits.
        text = f"<{type(value).__name__}>"
    return " ".join(text.splitlines())


# A note on errors of dtypes: which policy casts.


_DTYPES = re.compile(r"\b(float64|float32|float16|bfloat16)\b(\[[^\]]*\])?")  # with the shape
_REFUSED = re.compile(r"(?i)unsupported dtype|does not accept dtype|is not supported")


@contextlib.contextmanager
def casts_noted(what: str, dtype: str, policy: object, rule: str = "") -> Iterator[None]:
    """Adds a note to an error if `dtype` met another one, or an operation that does not take it.

    It says `what` is cast to that dtype, by which policy, unless one that is nested deeper does.
    """
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        text, found = str(error), _DTYPES.findall(str(error))
        shapes = {shape for name, shape in found if name == dtype}
        same = shapes & {shape for name, shape in found if name != dtype}
        is_refused = bool(shapes) and _REFUSED.search(text) is not None
        is_of_dtypes = is_refused or "" in same or (bool(same) and "dtype" in text)
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        is_own = frame.f_code.co_filename.startswith(os.path.dirname(os.path.dirname(__file__)))
        notes = getattr(error, "__notes__", ())
        if is_of_dtypes and not is_own and not any(n.startswith("jmpx casts") for n in notes):
            around = ", or put jmpx.force_full_precision around the operation" if is_refused else ""
            error.add_note(
                f"jmpx casts {what} to {dtype}, as policy {str(policy)!r} says: apply it "
                f"by=operations, which leaves the dtypes in the code as they are{rule}{around}."
            )
        raise


# Generators and coroutines are refused: their bodies run after the call, out of reach.


# The type of what such a function returns -> its name, and the test of functions, in this order.
_KINDS: dict[type, tuple[str, Callable[[object], bool]]] = {
    Generator: ("a generator", inspect.isgeneratorfunction),
    AsyncGenerator: ("an async generator", inspect.isasyncgenfunction),
    Coroutine: ("a coroutine", inspect.iscoroutinefunction),
}


def check_runs_at_once(func: Callable[..., Any]) -> None:
    """Refuses a function that is written as a generator or as a coroutine."""
    is_function = inspect.isroutine(func) or isinstance(func, functools.partial)
    code = func if is_function else type(func).__call__
    for name, is_of_kind in _KINDS.values():
        if is_of_kind(code):
            raise _error(name)


def refuse_delayed(result: Any) -> Any:
    """Returns the result of a function; refuses one whose computation is still to come."""
    for leaf in jax.tree.leaves(result, is_leaf=_is_delayed):
        if _is_delayed(leaf):
            if isinstance(leaf, Coroutine):
                leaf.close()  # Python would warn that nothing awaits it.
            raise _error(next(_KINDS[kind][0] for kind in _KINDS if isinstance(leaf, kind)))
    return result


def _is_delayed(node: object) -> bool:
    return isinstance(node, tuple(_KINDS))


def _error(name: str) -> TypeError:
    return TypeError(
        f"Expected a function that computes its result when it is called, got one that returns "
        f"{name}, whose body runs later, out of jmpx's reach: wrap the functions that it "
        "calls, or return a list of the results."
    )


# Values that a user wrote in a string or in a nested mapping, with places for error messages.
#
# A place is a position in a string, or a path such as `rules[0].compute` in a mapping, as YAML and
# JSON files give it.


T_co = TypeVar("T_co", covariant=True)

# The words for `save`, in a policy and elsewhere.
SAVES = ("products", "products+mixed", "products+attention")


class Located(NamedTuple, Generic[T_co]):
    """A value and its path; the path of a value outside of a mapping is empty."""

    value: T_co
    path: str = ""

    @property
    def at(self) -> str:
        """The place in a message: ` at rules[0].compute`, or nothing."""
        return f" at {self.path}" if self.path else ""


class Text(NamedTuple):
    """A part of a user's string."""

    text: str
    start: int  # its index in the whole string
    whole: str  # the whole string as messages quote it: `policy 'c=bf16,o=f32'`

    @property
    def value(self) -> str:
        """The part without the white space around it."""
        return self.text.strip()

    @property
    def path(self) -> str:
        """The place: `position 2 of policy 'c=bf16'`. Only messages need it, so it is lazy."""
        start = self.start + len(self.text) - len(self.text.lstrip())
        return f"position {start} of {self.whole}"

    @property
    def at(self) -> str:
        """The place in a message: ` at position 2 of policy 'c=bf16'`."""
        return f" at {self.path}"

    def split(self, mark: str) -> Iterator["Text"]:
        """Yields the parts between marks."""
        start = self.start
        for text in self.text.split(mark):
            yield Text(text, start, self.whole)
            start += len(text) + len(mark)

    def cut(self, mark: str) -> tuple["Text", "Text"]:
        """Returns the parts before and after the first mark."""
        before, _, after = self.text.partition(mark)
        start = self.start + len(before) + len(mark)
        return self._replace(text=before), Text(after, start, self.whole)

    def refuse(self, mark: str, remedy: str) -> None:
        """Refuses a mark that the part must not contain.

        Raises:
            ValueError: if the part contains it.
        """
        if mark in self.text:
            place = Text(mark, self.start + self.text.index(mark), self.whole)
            raise ValueError(f"Unexpected {mark!r}{place.at}: {remedy}.")


def whole_text(text: str, what: str, at: str = "") -> Text:
    """Returns a user's whole string, such as a "policy", without the semicolon that may end it."""
    return Text(text.rstrip().removesuffix(";"), 0, f"{what} {text!r}{at}")


Found: TypeAlias = Located[object] | Text
Entry: TypeAlias = tuple[Located[str] | Text, Found]  # a key, and its value


@runtime_checkable
class MappingLike(Protocol):
    """What `dict()` takes: `ml_collections.ConfigDict`, for one, is not a `Mapping`."""

    def keys(self) -> Iterable[Any]:
        """Returns the keys."""
        ...

    def __getitem__(self, key: Any, /) -> Any: ...


def is_mapping(value: object) -> TypeGuard[MappingLike]:
    """Whether a value is a mapping, rather than a class of mappings."""
    return isinstance(value, MappingLike) and not isinstance(value, type)


def is_list(value: object) -> TypeGuard[Sequence[object]]:
    """Whether a value is a list, a tuple or another sequence, but not text."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def child(path: str, key: object) -> str:
    """Returns the path of the value that a mapping or a list has under a key."""
    if not (isinstance(key, str) and key.isidentifier()):
        return f"{path}[{describe(key)}]"
    return f"{path}.{key}" if path else key


def read_entries(mapping: MappingLike, path: str = "") -> list[Entry]:
    """Returns the keys and the values of a mapping at a path.

    Raises:
        TypeError: if a key is not a string.
    """
    entries: list[Entry] = []
    for key in mapping.keys():
        if not isinstance(key, str):
            raise refuse_value("a string as a key", Located(key, path), "write it in quotes")
        place = child(path, key)
        entries.append((Located(key, place), Located(mapping[key], place)))
    return entries


def by_name(
    entries: Iterable[Entry],
    names: Mapping[str, str],
    elsewhere: Mapping[str, str] = {},
) -> dict[str, Found]:
    """Returns values by the names that their keys stand for; case and space do not count.

    A ValueError refuses two keys for one name, and keys that are not in `names`. For a key that
    users write in the wrong place, `elsewhere` has the remedy.
    """
    found: dict[str, Found] = {}
    for key, value in entries:
        word = key.value.strip().lower()
        name = names.get(word)
        if name is None and word in elsewhere:
            raise ValueError(f"Unexpected key {word!r}{key.at}: {elsewhere[word]}.")
        if name is None:
            raise unknown("key", key, ", ".join(map(repr, dict.fromkeys(names.values()))), names)
        if name in found:
            raise ValueError(f"Duplicate key {name!r}{key.at}: give each key at most once.")
        found[name] = value
    return found


def unknown(what: str, found: Found, expected: str, near: Iterable[str] = ()) -> ValueError:
    """Returns the error for a word that is not accepted as a `what`, such as "dtype".

    It lists the expected words, and suggests the nearest one of `near`.
    """
    word = str(found.value).strip()
    got = f"Unknown {what} {word!r}" if word else f"Missing {what}"
    end = did_you_mean(word, near if isinstance(near, dict) else list(near))
    return ValueError(f"{got}{found.at}: expected one of {expected}{end}")


def refuse_value(what: str, found: Found, remedy: str) -> TypeError:
    """Returns the error for a value of the wrong type, where `what` was expected."""
    if found.at and found.value is None:
        remedy += ", or leave it out"
    elif isinstance(found.value, bool):
        remedy += "; YAML reads the words on, off, yes and no as booleans, unless they are quoted"
    return TypeError(f"Expected {what}{found.at}, got {describe(found.value)}: {remedy}.")
