"""Warnings of rules that matched nothing, and what they suggest."""

import re
import warnings
from collections.abc import Iterable

from jmpx._base.messages import did_you_mean
from jmpx._policies.maps import PolicyMap, Rule, is_selector, matches_path, text_of


def warn_unused(policy_map: PolicyMap, seen: Iterable[tuple[type, str]], stacklevel: int) -> None:
    """Warns of each rule that matched no module of an adapter, and suggests the nearest selector.

    `seen` has the class and path of every module that asked for its policy. If there is none, only
    rules for operations are reported, because only autocast follows those.
    """
    seen = list(seen)
    for rule in policy_map.rules:
        if rule.is_operation:
            end = (
                ", as rules for operations hold by=operations and in jmpx.autocast alone: leave by "
                f"out, or write '{rule.selector}?' where the map is for modules, too."
            )
            warn_of(rule, policy_map, "module", end, stacklevel + 1)
        elif seen and not any(rule.matches(cls, path) for cls, path in seen):
            kind = "path" if rule.is_path else "class"
            warn_of(rule, policy_map, kind, nearest(rule, seen), stacklevel + 1)


def warn_of(rule: Rule, policy_map: PolicyMap, kind: str, near: str, stacklevel: int) -> None:
    """Warns that a rule of a policy map matched nothing, unless the rule is optional.

    `kind` names the missing match, such as "class"; `near` ends the message, and suggests another
    selector; `stacklevel` is the one that the caller would give to `warnings.warn`.
    """
    if not rule.optional:
        warnings.warn(
            f"The rule {text_of(rule)!r} of policy map {str(policy_map)!r} matched no {kind}{near}",
            stacklevel=stacklevel + 1,
        )


def nearest(
    rule: Rule,
    modules: Iterable[tuple[type, str]],
    scopes: Iterable[str] = (),
    operations: Iterable[str] = (),
) -> str:
    """Returns the end of a warning: the selector that is nearest to a rule, or some classes.

    What it suggests matches one of the modules, scopes or operations that the program has.
    """
    modules = list(modules)
    paths = sorted({path for _, path in modules}.union(scopes) - {""})
    word = rule.selector.strip("*/")
    if any(matches_path(f"*/{word}", path) for path in paths):  # a path without its beginning
        return did_you_mean(word, {word: f"*/{word}"})
    starts = ((path, match.end()) for path in paths for match in re.finditer("^|/", path))
    choices = {end: f"*/{end}" for end in sorted({path[start:] for path, start in starts})}
    choices |= {path: path for path in paths if "/" in path}
    classes = set[str]()
    if not rule.is_path:
        word = word.rpartition(".")[2]
        if word[:1].isupper():  # a class: `LayerNorm` is not meant to be `*/q_norm`
            choices = {end: each for end, each in choices.items() if end.lower() == word.lower()}
        classes = {cls.__name__ for cls, _ in modules if is_selector(cls.__name__)}
        choices |= {name: f"op.{name}" for name in sorted(operations)}
        bases = {base.__name__ for cls, _ in modules for base in cls.__mro__[:-1]}
        choices |= {name: name for name in sorted(bases)}
    choices = {name: each for name, each in choices.items() if is_selector(each)}
    near = did_you_mean(word, {name.lower(): each for name, each in choices.items()} | choices)
    if near == "." and classes:
        import difflib  # here, as in `did_you_mean`

        some = difflib.get_close_matches(word, sorted(classes), n=4, cutoff=0)
        return f": select a class that the program has, such as {' or '.join(map(repr, some))}."
    return near
