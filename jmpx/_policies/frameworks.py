"""The frameworks that jmpx supports, and the interface that their adapters implement.

To support another framework, write a file or a package in `jmpx/_adapters/` with an `adapter`: an
instance of a subclass of `Adapter` that overrides what the framework needs. Then add one line to
`_ADAPTERS`.
"""

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, TypeVar

from jmpx._base.contexts import Hook
from jmpx._base.trees import PyTree
from jmpx._policies.maps import PolicyMap
from jmpx._policies.policy import Policy

T = TypeVar("T")

# The package of a framework -> the file of its adapter, which is imported only after the framework:
# jmpx imports no framework by itself.
_ADAPTERS = {
    "haiku": "jmpx._adapters.haiku",
    "equinox": "jmpx._adapters.equinox.adapter",
    "flax.linen": "jmpx._adapters.linen",
    "flax.nnx": "jmpx._adapters.nnx.adapter",
}


class ClassPolicies(Protocol):
    """A framework's own store of the policies of its classes, in this thread."""

    def get(self, cls: type) -> Policy | None:
        """Returns the policy of a class; None without one."""
        ...

    def set(self, cls: type, policy: Policy) -> None:
        """Attaches a policy to a class."""

    def clear(self, cls: type) -> None:
        """Detaches the policy of a class, if it has one."""

    def check_push(self, cls: type, policy: Policy) -> None:
        """Raises the framework's own error where it cannot push a policy."""

    def interception(self) -> AbstractContextManager[None]:
        """Intercepts calls of modules while a policy is pushed; see `contexts.Context.hook`."""
        ...


class Proxies(Protocol):
    """Puts instances of proxy classes in place of the modules in pytrees, while a function runs.

    They mark their calls for `jmpx.autocast`, or cast by one policy map for `jmpx.apply_policy`.

    Attributes:
        made: the proxy classes, and the classes that they replace.
        copies: whether `replace` leaves the modules themselves as they are.
    """

    made: dict[type, type]
    copies: bool

    def replace(self, tree: T) -> T:
        """Returns a pytree with proxies in place of its modules."""
        ...

    def restore(self, tree: T) -> T:
        """Returns a result of the function with modules in place of their proxies.

        Cast parameters get their stored values back, or, if the function has changed them, their
        stored dtypes.
        """
        ...


class Creation(NamedTuple):
    """How `init` creates parameters where no module has a policy of its own."""

    policy: Policy  # they get its param dtype
    are_cast: bool  # whether they are read in its compute dtype, or in that of their initializer


class Adapter:
    """The interface of an adapter. Each default does nothing: subclasses override what they need.

    Attributes:
        class_policies: the framework's own store of class policies; None for a framework without
            one, whose class policies jmpx keeps.
        creation: hooks a `Creation` into the framework's `init`, see `contexts.Context.hook`; None
            for a framework whose models create their own parameters.
    """

    class_policies: ClassPolicies | None = None
    creation: Hook | None = None

    def current_policy(self) -> Policy | None:
        """Returns the policy under which the framework itself runs a method; None without one."""
        return None

    def held(self) -> Iterable[PyTree]:
        """Returns the parameters and the state that a running function of the framework holds."""
        return ()

    def noted_casts(self) -> AbstractContextManager[None]:
        """Notes casts that the framework itself makes by class policies while the context lasts."""
        return contextlib.nullcontext()

    def marked_calls(self) -> AbstractContextManager[None]:
        """Marks the calls of modules while the context lasts, if the framework reports calls.

        Under autocast, the adapter also sets the `dtype` fields of layers; see `field_in_autocast`.
        """
        return contextlib.nullcontext()

    def marker(self, matches: Callable[[type, str], bool]) -> Proxies | None:
        """Returns proxies that mark calls, for frameworks whose modules are in pytrees; else None.

        The calls of a module are marked if its class and path match.
        """
        return None

    def applied(self, policy_map: PolicyMap) -> AbstractContextManager[object]:
        """Casts at the calls of modules while the context lasts, if the framework reports calls."""
        return contextlib.nullcontext()

    def views(self, policy_map: PolicyMap, objects: Sequence[PyTree]) -> Proxies | None:
        """Returns proxies that are views, for frameworks whose modules are in pytrees; else None.

        `objects` are the objects of NNX among the arguments, which were found already.
        A view of this policy map stays as it is, and so do optimizer states. Train states are
        searched for models, so that the paths of rules begin at each model.
        """
        return None


@contextlib.contextmanager
def required_package(package: str, framework: str) -> Iterator[None]:
    """Says how to install a framework whose import fails; put it around the import.

    The package that is imported is also the name of the adapter and of the extra.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ModuleNotFoundError(
            f"jmpx.{package} needs {framework}, which is not installed: "
            f"pip install 'jmpx[{package}]'.",
            name=package,
        ) from None


def imported_adapters() -> Iterator[Adapter]:
    """Yields the adapters of the frameworks that the program has imported."""
    for package, name in _ADAPTERS.items():
        if sys.modules.get(package) is not None:  # without its framework, no module can run
            yield importlib.import_module(name).adapter


def adapters_of(cls: type) -> Iterator[Adapter]:
    """Yields the adapters of the frameworks that a class descends from."""
    for package in _packages_of(cls, tuple(_ADAPTERS)):
        yield importlib.import_module(_ADAPTERS[package]).adapter


@functools.lru_cache(maxsize=4096)
def is_convolution(cls: type) -> bool:
    """Whether a class descends from a framework's convolution, judging by its name."""
    packages = {name.partition(".")[0] for name in _ADAPTERS}
    own = (base for base in cls.__mro__ if base.__module__.partition(".")[0] in packages)
    return any(base.__name__.lstrip("_").startswith("Conv") for base in own)


@functools.lru_cache(maxsize=4096)  # asked at each call of each module
def _packages_of(cls: type, packages: tuple[str, ...]) -> list[str]:
    modules = [f"{base.__module__}." for base in cls.__mro__]
    return [name for name in packages if any(each.startswith(f"{name}.") for each in modules)]
