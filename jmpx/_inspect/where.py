"""The module or the named scope of an operation, and the rule that selects it."""

import functools
import re
from typing import NamedTuple

from jmpx._jaxprs.marks import (
    FULL_PRECISION,
    RESTORE,
    ROUNDED,
    Module,
    is_own_name,
    module_of,
    split_policy,
    without_marks,
)
from jmpx._policies.maps import Rule

_OWN = (FULL_PRECISION, RESTORE, ROUNDED)
# JAX's own names in name stacks: the subscripts of an einsum, and the parts of a checkpoint.
_OF_JAX = re.compile(r".*->.*|checkpoint|rematted_computation")
_NOT_IN_SELECTORS = re.compile(r"[\s=,:;|?]")


class Where(NamedTuple):
    """The parts of a scope that a user knows."""

    path: str  # of the innermost module, and the named scopes inside of it
    module: Module | None  # the innermost one; None outside of modules
    names: str  # the named scopes inside of the module, joined by slashes
    is_full: bool  # in `jmpx.full_precision`, or where autocast computes in float32 by a rule


@functools.lru_cache(maxsize=4096)
def where(scope: str) -> Where:
    """Returns the parts of a scope whose modules have marks: see `core.scope_of`."""
    scope, _ = split_policy(scope)
    parts = scope.split("/") if scope else []
    module, start = None, 0
    for index, part in enumerate(parts):
        found = module_of(part)
        if found is not None:
            module, start = found, index + 1
    names = [part for part in parts[start:] if part not in _OWN and not _OF_JAX.fullmatch(part)]
    while module is not None and names and is_own_name(module, names[0]):
        del names[0]
    outer = "" if module is None else module.path or module.cls.__name__
    inner = without_marks("/".join(names))
    return Where("/".join(filter(None, (outer, inner))), module, inner, FULL_PRECISION in parts)


def modules_of(scope: str) -> frozenset[Module]:
    """Returns the modules around an operation of a scope."""
    return frozenset(filter(None, map(module_of, scope.split("/"))))


@functools.lru_cache(maxsize=4096)
def selector(scope: str) -> str | None:
    """Returns a selector of policy map rules that matches a scope; None if none does.

    The module's path is tried first, then its class. Outside of modules it is the named scope,
    which only rules of `jmpx.autocast` match.
    """
    path, module, names, _ = where(scope)
    text = names if module is None else module.path
    tried = [text] if "/" in text else []
    tried += [f"*/{text}"] if text else []
    tried += [] if module is None else [module.cls.__name__]
    for each in tried:
        rule = Rule(each)
        matches = rule.matches_scope(path) if module is None else rule.matches(*module)
        if matches and not _NOT_IN_SELECTORS.search(each):
            return each
    return None
