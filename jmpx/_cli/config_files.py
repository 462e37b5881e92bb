"""The policies in a configuration file, for `python -m jmpx explain --config`.

What holds a policy is found by trying, in this order:

- A string under a key that is named for one (`policy`, `mp_policy`, `policy_map`, `precision`,
  `mixed_precision`, and any key that ends with `_policy` or `_policy_map`) is one; if it cannot be
  read, it is a wrong one. A loss scale beside it, as `mp_loss_scale` beside `mp_policy`, is its.
- A mapping is one if `jmpx.get_mixed_precision` reads it and it stands under such a key, or has
  `compute`, `rules`, or `policy` and another key. It is a wrong one if it stands under such a key
  and has a policy's, or if all its keys are a policy's and `compute` is a string, or it has both
  `policy` and `rules`.
- Any other string is one if it can be read and has `=`, `;` or `|`.

What stands under a key that is named for a policy and is none of jmpx's, such as the word
`MlpPolicy`, is left out, and said to be.
"""

import importlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from jmpx._base.mappings import child
from jmpx._cli.targets import attempt
from jmpx._policies.maps import HOW
from jmpx._policies.strings import KEYS
from jmpx._scales.mixed_precision import MixedPrecision, get_mixed_precision

_NAMED = re.compile(r"(.*[_-])?policy([_-]map)?|(mp_)?(?:mixed_)?precision", re.IGNORECASE)
_KEYS = {*KEYS, *HOW, "policy", "rules", "loss_scale"}
_TELLING = {"policy", "rules", "c", "compute"}
_SIGNS = re.compile("[=;|]")
_WORD = re.compile(r"[A-Za-z][\w.-]*")

# The module that reads a file, its function, and what to install, by the end of the file's name.
_READERS = {
    "yaml": ("yaml", "safe_load", "pyyaml"),
    "yml": ("yaml", "safe_load", "pyyaml"),
    "json": ("json", "loads", ""),
    "toml": ("tomllib", "loads", ""),
}


class Section(NamedTuple):
    """What a file has where a policy may be.

    Args:
        path: where it stands, such as `train.policy`; empty for the whole file.
        given: what stands there.
        precision: what it means; None if it is wrong or no policy.
        error: what is wrong with it; None for what is right or no policy.
    """

    path: str
    given: Any
    precision: MixedPrecision | None = None
    error: str | None = None


def sections(path: str) -> list[Section]:
    """Returns the sections of a file that hold a policy, in its order, and those that seem to.

    Args:
        path: a file of YAML, JSON or TOML.

    Raises:
        ValueError: if the file is of another kind or damaged, or YAML is not installed.
        OSError: if it cannot be read.
    """
    content = _load(path)
    try:
        return list(_found(content, "", False, {}))
    except RecursionError:
        raise ValueError(
            f"Cannot look through {path!r}, because a part of it holds itself, as by an alias of "
            "YAML, or too many are nested: give the string of its policy."
        ) from None


def _load(path: str) -> Any:
    """Returns the content of a file."""
    kind = path.rpartition(".")[2].lower()
    if kind not in _READERS:
        raise ValueError(
            f"Expected --config FILE.yaml, FILE.json or FILE.toml, got {path!r}: of any other "
            "file, give the string of its policy."
        )
    with open(path, "rb") as file:
        content = file.read()
    module, function, package = _READERS[kind]
    try:
        load = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError:
        raise ValueError(
            f"Cannot read {path!r}, because PyYAML is not installed: pip install {package}."
        ) from None
    return attempt(f"Cannot read {path!r}", lambda: load(content.decode("utf-8-sig")))


def _found(value: Any, path: str, is_named: bool, beside: dict[str, Any]) -> Iterator[Section]:
    """Yields the sections in a value of a file.

    Args:
        value: the value.
        path: its path.
        is_named: whether its key is named for a policy.
        beside: the loss scale and the rules that stand beside it then.
    """
    section = _section(value, path, is_named, beside)
    if section is not None:
        yield section
    if section is not None and (section.precision or section.error):
        return
    if isinstance(value, dict):
        for key, each in value.items():
            is_named = isinstance(key, str) and _NAMED.fullmatch(key) is not None
            yield from _found(each, child(path, key), is_named, _beside(value, key))
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _found(each, child(path, index), False, {})


def _beside(mapping: dict[Any, Any], key: Any) -> dict[str, Any]:
    """Returns the loss scale and the rules that belong to a policy, as `mp_loss_scale`."""
    named = _NAMED.fullmatch(key) if isinstance(key, str) else None
    if named is None:
        return {}
    prefix = named[1] or named[3] or ""
    found = {name: mapping.get(prefix + name) for name in ("rules", "loss_scale")}
    return {name: value for name, value in found.items() if isinstance(value, str | dict | list)}


def _section(value: Any, path: str, is_named: bool, beside: dict[str, Any]) -> Section | None:
    """Returns what a value is, without what is in it; None for what has nothing to do with jmpx."""
    if value is None or value == "" or isinstance(value, list):
        return None
    if not is_named and not _is_likely(value):
        return None
    try:
        whole = _whole(value, beside)
        return Section(path, whole, get_mixed_precision(whole))
    except (TypeError, ValueError) as error:
        text = " ".join(str(error).split())
    if _is_meant(value, is_named, text):
        return Section(path, value, error=text)
    return Section(path, value) if is_named else None


def _is_likely(value: Any) -> bool:
    """Whether a value whose key says nothing is to be tried."""
    if isinstance(value, dict):
        return bool(_keys(value) & _TELLING) and len(_keys(value) - {"policy"}) > 0
    return isinstance(value, str) and _SIGNS.search(value) is not None


def _is_meant(value: Any, is_named: bool, error: str) -> bool:
    """Whether what cannot be read is a policy with a mistake, and not another program's.

    A string is another program's if it is one word and near to none of jmpx's, such as `MlpPolicy`,
    or if the program fills it in, as `${model.policy}`.
    """
    if isinstance(value, dict):
        keys = _keys(value)
        is_typical = any(isinstance(value.get(key), str) for key in ("c", "compute"))
        is_whole = keys <= _KEYS and (is_typical or {"policy", "rules"} <= keys)
        return is_whole or (is_named and bool(keys & _KEYS))
    if not is_named or not isinstance(value, str) or "${" in value:
        return False
    is_far = "expected one of" in error and not error.endswith("?")
    return not (is_far and _WORD.fullmatch(value.strip()))


def _keys(mapping: dict[Any, Any]) -> set[str]:
    return {str(key).strip().lower() for key in mapping}


def _whole(value: Any, beside: dict[str, Any]) -> Any:
    """Returns a policy together with the loss scale and the rules that stand beside it."""
    if not beside or not isinstance(value, str | dict):
        return value
    get_mixed_precision(value)  # for a message without the path that the whole gets here
    if isinstance(value, str) or value.keys() <= {*KEYS, *HOW}:
        value = {"policy": value}
    return {**beside, **value}
