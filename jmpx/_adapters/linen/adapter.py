"""What jmpx offers for Linen besides `policies`: marks for autocast, and the dtypes of `init`."""

import functools
from contextlib import AbstractContextManager, nullcontext

import jax
from flax import linen as nn

from jmpx._adapters.boundaries import Args, Kwargs, Method
from jmpx._adapters.dtype_fields import field_in_autocast
from jmpx._adapters.linen.modules import is_public_method, module_of
from jmpx._adapters.linen.policies import LinenScope, applied
from jmpx._adapters.scopes import creation_in_force
from jmpx._base.casts import cast_like
from jmpx._base.contexts import opened
from jmpx._base.leaves import PyTree
from jmpx._policies.frameworks import Adapter
from jmpx._policies.maps import PolicyMap
from jmpx._policies.modules import marked_call


def _create(
    method: Method, args: Args, kwargs: Kwargs, context: nn.module.InterceptorContext
) -> PyTree:
    """Intercepts each method call, so that new parameters are in the dtype of a `Creation`."""
    module = context.module
    if module.scope is not None and module.is_initializing() and not opened(LinenScope):
        object.__setattr__(module, "param", functools.partial(_param, module))
    return method(*args, **kwargs)


def _param(module: nn.Module, name: str, init: Method, *args: PyTree, **kwargs: PyTree) -> PyTree:
    """Stands in for `module.param` while parameters are created."""
    creation = creation_in_force(LinenScope)
    if creation is None:
        return type(module).param(module, name, init, *args, **kwargs)
    asked: PyTree = None

    def create(*args: PyTree, **kwargs: PyTree) -> PyTree:
        nonlocal asked
        asked = init(*args, **kwargs)
        return creation.policy.cast_to_param(asked)

    stored = type(module).param(module, name, create, *args, **kwargs)
    if creation.are_cast:
        return creation.policy.cast_to_compute(stored)
    return stored if asked is None else jax.tree.map(cast_like, stored, asked)


def _mark(
    method: Method, args: Args, kwargs: Kwargs, context: nn.module.InterceptorContext
) -> PyTree:
    """Intercepts each method call under autocast, and marks those of public methods."""
    module = context.module
    if module.scope is None:
        return method(*args, **kwargs)
    called = module_of(module)
    is_public = is_public_method(type(module), context.method_name)
    with field_in_autocast(module, called), marked_call(*called) if is_public else nullcontext():
        return method(*args, **kwargs)


class _Adapter(Adapter):
    creation = staticmethod(functools.partial(nn.intercept_methods, _create))

    def marked_calls(self) -> AbstractContextManager[None]:
        return nn.intercept_methods(_mark)

    def applied(self, policy_map: PolicyMap) -> AbstractContextManager[object]:
        return applied(policy_map)


adapter: Adapter = _Adapter()
