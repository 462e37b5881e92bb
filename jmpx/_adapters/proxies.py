"""Proxy classes: subclasses of a user's classes, whose public methods cast or mark their calls."""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import TypeVar

import jax

from jmpx._adapters.boundaries import Method
from jmpx._adapters.dtype_fields import field_in_autocast
from jmpx._base.leaves import PyTree
from jmpx._base.made_once import made_once
from jmpx._jaxprs.marks import Module
from jmpx._policies.maps import PolicyMap
from jmpx._policies.modules import marked_call

T = TypeVar("T")

_PLAIN = "_jmpx_plain_class"  # the attribute of a proxy class that holds the plain class


def is_public(name: str) -> bool:
    """Whether a method of this name is public, as `__call__` is, too."""
    return name == "__call__" or not name.startswith("_")


def public_methods(cls: type, base: type) -> Iterator[str]:
    """Yields the names of the public methods that a class adds to the framework's base class."""
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    others = {*dir(base), *(field.name for field in fields)}
    for name in dir(cls):
        if not is_public(name) or name in others:
            continue
        attribute = inspect.getattr_static(cls, name)
        # A function binds to an instance, and so do objects such as `equinox.filter_jit` makes.
        binds = callable(attribute) and hasattr(attribute, "__get__")
        is_method = binds and not isinstance(attribute, staticmethod | classmethod | type)
        if is_method or isinstance(attribute, functools.partialmethod):
            yield name


def proxy_class(cls: type[T], namespace: Mapping[str, object], mixin: type = object) -> type[T]:
    """Returns a subclass that bears the names and the docstring of its class."""
    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    bases = (cls,) if issubclass(cls, mixin) else (mixin, cls)
    return type(cls)(cls.__name__, bases, {**namespace, **names})


@made_once
def marking_proxy_class(
    cls: type[T], modules: tuple[Module, ...], base: type, mixin: type = object
) -> type[T]:
    """Returns the proxy class whose public methods mark their calls, for `jmpx.autocast`.

    A call is of several `modules`: this one, and containers around it.
    """

    def marked(name: str) -> Method:
        method = inspect.getattr_static(cls, name)

        @functools.wraps(method, updated=())
        def wrapper(self: T, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
            with contextlib.ExitStack() as stack:
                for module in modules:
                    stack.enter_context(marked_call(*module))
                stack.enter_context(field_in_autocast(self, modules[-1]))
                return method.__get__(self, type(self))(*args, **kwargs)

        return wrapper

    namespace = {name: marked(name) for name in public_methods(cls, base)}
    return proxy_class(cls, {**namespace, _PLAIN: plain_class(cls)}, mixin)


def plain_class(cls: type) -> type:
    """Returns the class that the user wrote, for a proxy class that marks."""
    return getattr(cls, _PLAIN, cls)


def check_view(view: object, policy_map: PolicyMap | None) -> None:
    """Raises if a module is a view under another policy map than one that is given."""
    cls: PyTree = type(view)
    if policy_map not in (None, cls.__jmpx_view__):
        raise ValueError(
            f"Cannot apply policy map {str(policy_map)!r} to a {cls.__name__} that is a view "
            f"already, under {str(cls.__jmpx_view__ or '')!r}, because its parameters are cast: "
            "give the part a rule in that policy map, or pass the model itself."
        )


def is_optimizer_state(node: object) -> bool:
    """Whether a node of a pytree is a state of Optax or jmpx, whose arrays are never cast."""
    package = type(node).__module__.partition(".")[0]
    return package in ("optax", "jmpx") and not jax.tree_util.all_leaves([node])
