"""Nested mappings, as YAML and JSON files give them: reads their keys, with the path of each value.

A path such as `rules[0].compute` says in error messages where a value stands.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard

from jmpx._base.messages import describe, did_you_mean

if TYPE_CHECKING:

    class MappingLike(Protocol):
        """What `dict()` takes: `ml_collections.ConfigDict`, for one, is not a `Mapping`."""

        def keys(self) -> Iterable[Any]:
            """Returns the keys."""
            ...

        def __getitem__(self, key: Any, /) -> Any: ...

else:
    MappingLike = Any


class Located(NamedTuple):
    """A value of a mapping or a list, and its path."""

    value: Any
    path: str


def is_mapping(value: object) -> TypeGuard[MappingLike]:
    """Whether a value is a mapping: it has `keys()` and `[]`, which is what `dict()` asks for."""
    if isinstance(value, type):
        return False
    return hasattr(value, "keys") and hasattr(value, "__getitem__")


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Whether a value is a list, a tuple or another sequence, but not text."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def at(path: str) -> str:
    """Returns the place of a path for a message: ` at rules[0].compute`; nothing for the root."""
    return f" at {path}" if path else ""


def quote(text: str, path: str) -> str:
    """Returns how messages quote a string: with its path, if it stands in a mapping."""
    return f"{text!r}{at(path)}"


def child(path: str, key: object) -> str:
    """Returns the path of the value that a mapping or a list has under a key."""
    if not (isinstance(key, str) and key.isidentifier()):
        return f"{path}[{describe(key)}]"
    return f"{path}.{key}" if path else key


def read_keys(mapping: MappingLike, path: str, keys: Mapping[str, str]) -> dict[str, Located]:
    """Reads a mapping, whose keys are as those of policy strings: case and space do not count.

    Args:
        mapping: the mapping.
        path: its path.
        keys: the known keys, and the names that they stand for.

    Returns:
        What the mapping has under each name. A key that is not known is its own name.

    Raises:
        TypeError: if a key is not a string.
        ValueError: if two keys stand for one name, or a value cannot be read.
    """
    values: dict[str, Located] = {}
    spelled: dict[str, str] = {}
    for key in _read(lambda: list(mapping.keys()), path):
        if not isinstance(key, str):
            raise refuse_value("a string as a key", key, path, "write it in quotes")
        name = keys.get(key.strip().lower(), key)
        if name in values:
            raise ValueError(
                f"Duplicate key at {child(path, key)}: {spelled[name]!r}, which means the "
                "same, stands there, too; write one of them."
            )
        found = child(path, key)
        values[name], spelled[name] = Located(_read(lambda k=key: mapping[k], found), found), key
    return values


def read_list(values: Sequence[Any], path: str) -> Iterator[Located]:
    """Yields the items of a list, and their paths.

    Raises:
        ValueError: if a value cannot be read.
    """
    for index in range(len(values)):
        found = child(path, index)
        yield Located(_read(lambda i=index: values[i], found), found)


def _read(read: Callable[[], Any], path: str) -> Any:
    """Reads a value of a configuration, whose library may compute it, as OmegaConf's `${a.b}`."""
    try:
        return read()
    except Exception as error:
        lines = str(error).splitlines() or [""]
        reason = f"{type(error).__name__}: {lines[0]}"
        raise ValueError(
            f"Cannot read the value{at(path)} ({reason}): give it a value, or leave it out."
        ) from error


def refuse_value(what: str, value: object, path: str, remedy: str) -> TypeError:
    """Returns the error for a value of a type that cannot stand at a path.

    Args:
        what: what is expected there, such as "a policy".
        value: the value.
        path: its path.
        remedy: the end of the sentence.
    """
    if path and value is None:
        remedy += ", or leave it out"
    elif isinstance(value, bool):
        remedy += "; YAML reads the words on, off, yes and no as booleans, unless they are quoted"
    return TypeError(f"Expected {what}{at(path)}, got {describe(value)}: {remedy}.")


def unknown_key(key: str, path: str, expected: str, known: Iterable[str]) -> ValueError:
    """Returns the error for a key that a mapping cannot have.

    Args:
        key: the key.
        path: the path of the mapping.
        expected: what the mapping may have, in words.
        known: the keys that it may have, of which the message suggests the nearest.
    """
    near = did_you_mean(key, list(known))
    return ValueError(f"Unknown key at {child(path, key)}: expected one of {expected}{near}")
