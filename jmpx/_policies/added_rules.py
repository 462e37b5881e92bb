"""Rules that every policy map gets while a program is traced again, to see what they mend."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jmpx._base.contexts import Context, entered, opened
from jmpx._policies.maps import PolicyMap
from jmpx._policies.rules import Rule


class _Added(NamedTuple):
    """What a context adds, and the functions that took a policy map inside of it."""

    rules: tuple[Rule, ...]
    takers: set[str]


@contextlib.contextmanager
def rules_added(rules: Sequence[Rule]) -> Iterator[set[str]]:
    """Adds rules to the end of each policy map that is taken while the context lasts.

    The rules are part of the key of JAX's caches, so that jitted functions are traced anew. What
    the context yields is which functions took a policy map, such as `jmpx.autocast`.
    """
    added = _Added(tuple(rules), set())
    with entered(Context("rules_added", added, key=added.rules)):
        yield added.takers


def in_force(policy_map: PolicyMap, by: str) -> PolicyMap:
    """Returns the policy map that a function follows: the one that it was given, or a longer one.

    `by` is the function as the user calls it.
    """
    rules: tuple[Rule, ...] = ()
    for added in opened(_Added):
        added.takers.add(by)
        rules += added.rules
    if not rules or policy_map.rules[-len(rules) :] == rules:
        return policy_map
    return dataclasses.replace(policy_map, rules=(*policy_map.rules, *rules))
