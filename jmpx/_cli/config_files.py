"""The policies in a configuration file, for `python -m jmpx explain --config`.

A policy is a string or a mapping under a key that is named for one: `policy`, `policy_map`,
`precision`, `mp_policy`, `mixed_precision`, and any key that ends with `_policy` or `_policy_map`.
The `rules` and the `loss_scale` beside it, with the same prefix (`mp_loss_scale`), belong to it. A
mapping that has `policy`, and beside it nothing but keys of jmpx, is one as a whole.
"""

import importlib
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jmpx._base.mappings import child
from jmpx._cli.targets import attempt
from jmpx._policies.maps import HOW
from jmpx._policies.strings import KEYS
from jmpx._scales.mixed_precision import MixedPrecision, get_mixed_precision

_NAMED = re.compile(r"(.*[_-])?policy([_-]map)?|(mp_)?(?:mixed_)?precision", re.IGNORECASE)
_BESIDE = ("rules", "loss_scale")
_KEYS = {*KEYS, *HOW, *_BESIDE, "policy"}
_WORD = re.compile(r"[A-Za-z][\w.-]*")

# The end of a file's name -> the module that reads it, the function, and what pip installs.
_READERS = {
    "yaml": ("yaml", "safe_load", "pyyaml"),
    "yml": ("yaml", "safe_load", "pyyaml"),
    "json": ("json", "loads", ""),
    "toml": ("tomllib", "loads", ""),
}


class Section(NamedTuple):
    """What stands under a key that is named for a policy.

    Args:
        path: the path of the key, such as `train.policy`; empty for the whole file.
        given: the value, together with the rules and the loss scale beside it.
        precision: what it means; None if it is wrong, or another program's.
        error: what is wrong with it, if anything.
    """

    path: str
    given: object
    precision: MixedPrecision | None = None
    error: str | None = None


def sections(path: str) -> list[Section]:
    """Returns what a file of YAML, JSON or TOML has under keys that are named for policies.

    Raises:
        ValueError: if the file is of another kind or damaged, or YAML is not installed.
        OSError: if it cannot be read.
    """
    content = _load(path)
    try:
        return list(_sections_in(content, ""))
    except RecursionError:
        raise ValueError(
            f"Cannot look through {path!r}, because a part of it holds itself, as by an alias of "
            "YAML, or too many are nested: give the string of its policy."
        ) from None


def _load(path: str) -> object:
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


def _sections_in(value: object, path: str) -> Iterator[Section]:
    """Yields the sections in a mapping or a list of a file."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _sections_in(item, child(path, index))
    elif isinstance(value, dict) and {"policy"} < value.keys() <= _KEYS:
        yield _section(value, path, {})
    elif isinstance(value, dict):
        for key, item in value.items():
            named = _NAMED.fullmatch(key) if isinstance(key, str) else None
            section = None
            if named is not None and item not in (None, "") and not isinstance(item, list):
                prefix = named[1] or named[3] or ""
                beside = {
                    name: value[prefix + name] for name in _BESIDE if value.get(prefix + name)
                }
                section = _section(item, child(path, key), beside)
                yield section
            if section is None or section.precision is section.error is None:
                yield from _sections_in(item, child(path, key))


def _section(value: object, path: str, beside: Mapping[str, object]) -> Section:
    """Reads what stands under a key that is named for a policy."""
    try:
        mixed = get_mixed_precision(value)  # pyright: ignore[reportArgumentType]
        if beside:  # after the value alone, whose errors have shorter paths
            whole = value if isinstance(value, dict) and "policy" in value else {"policy": value}
            value = {**beside, **whole}
            mixed = get_mixed_precision(value)
        return Section(path, value, mixed)
    except (TypeError, ValueError) as error:
        text = " ".join(str(error).split())
    return Section(path, value, error=None if _is_of_others(value, text) else text)


def _is_of_others(value: object, error: str) -> bool:
    """Whether what cannot be read belongs to another program, rather than being misspelled.

    Such is a mapping without any key of a policy; a word near to none of jmpx's, as `MlpPolicy`;
    and a string that the program fills in, as `${model.policy}`.
    """
    if isinstance(value, dict):
        return not _KEYS & {str(key).strip().lower() for key in value}
    if not isinstance(value, str) or "${" in value:
        return True
    is_far = "expected one of" in error and not error.endswith("?")
    return is_far and _WORD.fullmatch(value.strip()) is not None
