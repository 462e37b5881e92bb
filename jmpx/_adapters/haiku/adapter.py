"""What jmpx offers for Haiku besides `policies`: its registry of class policies, marks, `init`."""

import contextlib
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager

import haiku as hk
import jax

from jmpx._adapters.boundaries import Args, Kwargs, Method
from jmpx._adapters.haiku.policies import HaikuScope, applied, interception, parameter_hooks, store
from jmpx._adapters.proxies import is_public
from jmpx._adapters.scopes import creation_in_force
from jmpx._base.contexts import is_hooked, note_cast, opened
from jmpx._base.dtypes import DTypeLike
from jmpx._base.leaves import PyTree, is_floating
from jmpx._base.matmul import matmul_of
from jmpx._base.messages import user_stacklevel
from jmpx._policies.frameworks import Adapter, ClassPolicies, Creation
from jmpx._policies.maps import PolicyMap
from jmpx._policies.modules import marked_call
from jmpx._policies.policy import Policy


class _ClassPolicies:
    """Haiku's own registry of class policies, and what scopes have taken out of it."""

    def get(self, cls: type) -> Policy | None:
        taken = (scope.class_policies.get(cls) for scope in opened(HaikuScope))
        kept = (policy for policy in taken if policy is not None)
        return store.get_policy(cls) or next(kept, None)

    def set(self, cls: type, policy: Policy) -> None:
        store.set_policy(cls, policy)
        if matmul_of(policy) is not None and not is_hooked(interception):
            warnings.warn(
                f"matmul={matmul_of(policy)} of the policy of {cls.__name__} holds in jmpx's "
                "contexts alone, because Haiku itself does not know of it: attach the policy by "
                "jmpx.push_policy, or write a rule for the class into a policy map.",
                stacklevel=user_stacklevel(),
            )

    def clear(self, cls: type) -> None:
        store.clear_policy(cls)
        for scope in opened(HaikuScope):
            scope.class_policies.pop(cls, None)

    def check_push(self, cls: type, policy: Policy) -> None:
        """Raises Haiku's error inside of a method of the class."""
        with store.push_policy(cls, policy):
            pass

    interception = staticmethod(interception)  # the hook of `policies`, so that they share it


def _in_force() -> Creation | None:
    """Returns the `Creation` in force; None where a module has a policy."""
    has_policy = store.current_policy() is not None
    return None if has_policy else creation_in_force(HaikuScope)


def _read_created(value: jax.Array, context: hk.GetterContext) -> jax.Array:
    """Returns a parameter that is created in the dtype in which it is read later."""
    creation = _in_force() if hk.running_init() else None
    if creation is None or not is_floating(value):
        return value
    compute = creation.policy.compute_dtype
    return value.astype(compute if creation.are_cast else context.original_dtype)


def _param_dtype() -> DTypeLike | None:
    creation = _in_force()
    return None if creation is None else creation.policy.param_dtype


# As for state: Haiku makes getters and creators only inside of a transformed function.
_creation_hooks = hk.transform(lambda: parameter_hooks(_param_dtype, _read_created))


@contextlib.contextmanager
def _creation() -> Iterator[None]:
    """Creates the parameters of this thread."""
    creator, getter = _creation_hooks.apply({}, None)
    with creator, getter:
        yield


def _note(method: Method, args: Args, kwargs: Kwargs, context: hk.MethodContext) -> PyTree:
    """Notes the calls that Haiku itself runs under the policy of their class."""
    policy = store.get_policy(type(context.module))
    if policy is not None:
        note_cast("hk.mixed_precision", policy.compute_dtype)
    return method(*args, **kwargs)


def _mark(method: Method, args: Args, kwargs: Kwargs, context: hk.MethodContext) -> PyTree:
    """Intercepts each method call under autocast, and marks those of public methods."""
    if not is_public(context.method_name):
        return method(*args, **kwargs)
    with marked_call(type(context.module), context.module.module_name):
        return method(*args, **kwargs)


class _Adapter(Adapter):
    class_policies: ClassPolicies | None = _ClassPolicies()
    creation = staticmethod(_creation)

    def current_policy(self) -> Policy | None:
        return store.current_policy()

    def held(self) -> list[PyTree]:
        try:
            return jax.tree.leaves((hk.get_params(), hk.get_current_state()))
        except ValueError:  # outside of a transformed function
            return []

    def noted_casts(self) -> AbstractContextManager[None]:
        return hk.intercept_methods(_note)

    def marked_calls(self) -> AbstractContextManager[None]:
        return hk.intercept_methods(_mark)

    def applied(self, policy_map: PolicyMap) -> AbstractContextManager[object]:
        return applied(policy_map)


adapter: Adapter = _Adapter()
