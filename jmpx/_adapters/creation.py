"""How parameters are created by `init` where no module has a policy; see `Adapter.created`."""

from contextlib import AbstractContextManager
from typing import NamedTuple

from jmpx._adapters.scopes import PolicyScope
from jmpx._base.contexts import Context, Hook, entered, opened
from jmpx._policies.policy import Policy


class Creation(NamedTuple):
    """How parameters are created.

    Args:
        policy: the policy, in whose param dtype they are created.
        are_cast: whether they are read in the compute dtype, rather than in the dtype that their
            initializers return.
    """

    policy: Policy
    are_cast: bool


def creating(
    policy: Policy, are_cast: bool, framework: str, hook: Hook
) -> AbstractContextManager[None]:
    """Puts a `Creation` in force in a framework while the context lasts."""
    creation = Creation(policy, are_cast)
    return entered(Context(f"jmpx.apply_policy in {framework}", creation, creation, hook))


def creation_in_force(scopes: type[PolicyScope]) -> Creation | None:
    """Returns the innermost `Creation`; None without one, or inside of a scope of a kind."""
    return None if opened(scopes) else next(reversed(opened(Creation)), None)
