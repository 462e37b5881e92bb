"""The frameworks that jmpx supports, and what an adapter offers to the files below it.

To support another framework, write a file in `jmpx/_adapters/` with `sessions.py` as its base, and
add one line to `_ADAPTERS`. The new file holds the functions that users call, and `adapter`: an
instance of a subclass of `Adapter` that overrides what the framework needs.
"""

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from jmpx._policies.maps import PolicyMap
from jmpx._policies.policy import Policy

T = TypeVar("T")

# The package of a framework -> the file of its adapter. An adapter is imported after its framework
# and never before, so that jmpx imports no framework by itself.
_ADAPTERS = {
    "haiku": "jmpx._adapters.haiku",
    "equinox": "jmpx._adapters.equinox",
    "flax.linen": "jmpx._adapters.linen",
    "flax.nnx": "jmpx._adapters.nnx",
}


class ClassPolicies(Protocol):
    """A framework's own store of the policies of its classes, in this thread."""

    def get(self, cls: type) -> Policy | None:
        """Returns the policy of a class, None without one."""
        ...

    def set(self, cls: type, policy: Policy) -> None:
        """Attaches a policy to a class."""
        ...

    def clear(self, cls: type) -> None:
        """Detaches the policy of a class, if it has one."""
        ...

    def check_push(self, cls: type, policy: Policy) -> None:
        """Raises the framework's own error where it cannot push a policy."""
        ...

    def interception(self) -> AbstractContextManager[None]:
        """Intercepts what modules call while a policy is pushed; see `_contexts.Context.hook`."""
        ...


class Marker(Protocol):
    """Has the modules in a pytree mark their calls, for `jmpx.autocast`.

    Attributes:
        made: the classes of marked modules, and the classes in whose place they are.
    """

    made: dict[type, type]

    def mark(self, tree: T) -> T:
        """Returns a pytree whose modules mark their calls."""
        ...

    def unmark(self, tree: T) -> T:
        """Returns a pytree whose modules are as they were before `mark`."""
        ...


class Views(Protocol):
    """Replaces the modules in pytrees by views under one policy map, for `jmpx.apply_policy`.

    Attributes:
        made: the classes of modules in views, and the classes in whose place they are.
    """

    made: dict[type, type]

    def view(self, tree: T) -> T:
        """Returns a pytree with a view in place of each outermost module in it.

        A view of this policy map stays as it is, and so do optimizer states. A train state is
        walked into, so that the paths of rules begin at each model.
        """
        ...

    def stored(self, tree: T) -> T:
        """Returns a result of the function with models in place of their views.

        Leaves have the values of the model where the function left them alone, and the dtypes in
        which the model stores them where it has changed them.
        """
        ...


class Adapter:
    """What an adapter offers: by default nothing, so that a subclass overrides what it needs.

    Attributes:
        class_policies: the framework's own store of class policies; None for a framework without
            one, whose class policies jmpx keeps.
    """

    class_policies: ClassPolicies | None = None

    def current_policy(self) -> Policy | None:
        """Returns the policy under which the framework itself runs a method, None without one."""
        return None

    def noted_casts(self) -> AbstractContextManager[None]:
        """Notes, while the context lasts, what the framework itself casts by class policies."""
        return contextlib.nullcontext()

    def marked_calls(self) -> AbstractContextManager[None]:
        """Marks the calls of modules while the context lasts, if the framework reports calls."""
        return contextlib.nullcontext()

    def marker(self, matches: Callable[[type, str], bool]) -> Marker | None:
        """Returns a marker, if the framework's modules can be found in pytrees.

        Args:
            matches: whether the calls of a module of this class and path are to be marked.
        """
        return None

    def applied(self, policy_map: PolicyMap) -> AbstractContextManager[None]:
        """Casts, while the context lasts, what modules are called with, if calls are reported."""
        return contextlib.nullcontext()

    def views(self, policy_map: PolicyMap) -> Views | None:
        """Returns what makes views, if the framework's modules can be found in pytrees."""
        return None

    def created(self, policy: Policy, are_cast: bool) -> AbstractContextManager[None]:
        """Creates parameters in the param dtype of a policy, where no module has a policy.

        Where arguments are cast, parameters would be created in the dtype of the inputs.

        Args:
            policy: the policy.
            are_cast: whether the function that creates them reads them in the compute dtype, as it
                reads its arguments; if not, it reads what its initializers return.
        """
        return contextlib.nullcontext()

    def refuse_creation(self) -> AbstractContextManager[None]:
        """Refuses, while the context lasts, to create parameters that could not leave autocast."""
        return contextlib.nullcontext()


def imported_adapters() -> Iterator[Adapter]:
    """Yields the adapters of the frameworks that the program has imported."""
    for package, name in _ADAPTERS.items():
        if sys.modules.get(package) is not None:  # without its framework, no module can run
            yield importlib.import_module(name).adapter


def adapters_of(cls: type) -> Iterator[Adapter]:
    """Yields the adapters of the frameworks that a class descends from."""
    for package in _packages_of(cls, tuple(_ADAPTERS)):
        yield importlib.import_module(_ADAPTERS[package]).adapter


@functools.lru_cache(maxsize=4096)  # asked at each call of each module
def _packages_of(cls: type, packages: tuple[str, ...]) -> list[str]:
    modules = [f"{base.__module__}." for base in cls.__mro__]
    return [name for name in packages if any(each.startswith(f"{name}.") for each in modules)]
