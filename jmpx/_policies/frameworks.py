"""The frameworks that jmpx supports, and the interface that their adapters implement.

To support another framework, write a file or a package in `jmpx/_adapters/` with an `adapter`: an
instance of a subclass of `Adapter` that overrides what the framework needs. Then add one line to
`_ADAPTERS`.
"""

import contextlib
import functools
import importlib
import itertools
import operator
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

import jax

from jmpx._base.contexts import Hook
from jmpx._base.trees import PyTree
from jmpx._policies.maps import PolicyMap
from jmpx._policies.policy import Policy

T = TypeVar("T")
R = TypeVar("R")

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
    """

    made: dict[type, type]

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


def out_of_sight(given: PyTree) -> str:
    """Returns what to do, if arguments show that a function makes a model of NNX itself."""
    from jmpx._base.stateful import nnx  # here, so that the import of jmpx stays light

    nodes = jax.tree.leaves(given, is_leaf=lambda node: type(node).__name__ == "State")
    has_state = nnx() is not None and any(isinstance(node, nnx().State) for node in nodes)
    instead = "in place of the nnx.State that nnx.merge gets in the function"
    return f"pass the model itself {instead}" if has_state else ""


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


# Calls of functions with proxies: in the arguments, and in what the function closes over.


# A function, with its positional and its keyword arguments.
_Call: TypeAlias = tuple[Callable[..., R], tuple[PyTree, ...], dict[str, PyTree]]
_Change: TypeAlias = Callable[[PyTree], PyTree]

# JAX's errors about two trees that differ begin so, since JAX 0.10 and in JAX 0.7.
_DIFFERENT_TREES = ("pytree structure error", "Custom node type mismatch")


def call_with_proxies(
    proxies: Sequence[Proxies],
    fn: Callable[..., R],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    exempt: Callable[..., PyTree] = lambda change, *arguments: change(arguments),
) -> R:
    """Calls a function with the proxies of each framework in place of its modules.

    If it fails as it joins a part of a model with one that it closes over, it is called again with
    proxies there, too. `exempt` changes `args` and `kwargs`, but may leave some as they are.
    """
    from jmpx._base.stateful import apply  # here, so that the import of jmpx stays light

    if fn is apply:
        fn, args = args[0], args[1:]
    own: _Call[R] = (fn, (), {})
    with contextlib.ExitStack() as stack:
        for each in proxies:
            stack.callback(each.restore, None)
            args, kwargs = exempt(each.replace, args, kwargs)
            own = _replaced(each.replace, *own)
        fn, before, keywords = own
        given, named = (*before, *args), {**keywords, **kwargs}
        try:
            result = fn(*given, **named)
        except ValueError as error:
            closing, made = fn, [cls for each in proxies for cls in each.made.values()]
            if str(error).startswith(_DIFFERENT_TREES):
                for each in proxies:
                    closing = _closing_over(closing, each.replace, {})
            try:
                if closing is fn:
                    raise
                result = closing(*given, **named)
            except ValueError as last:
                text, is_closed_over = str(last), closing is not fn
                found = (cls for cls in made if is_closed_over or _are_both(cls, text))
                names = {cls.__name__ for cls in found}
                if names and text.startswith(_DIFFERENT_TREES):
                    last.add_note(
                        f"jmpx gives the modules in arguments ({', '.join(sorted(names))}) "
                        "subclasses, so that rules can select them: where the function joins a "
                        "part of a model with a part from outside, as equinox.combine does, pass "
                        "both parts as arguments, or join them before the call and pass the whole "
                        "model."
                    )
                raise
        for each in proxies:
            result = each.restore(result)
    return result


def _are_both(cls: type, text: str) -> bool:
    """Whether JAX's text is of two trees of a class; JAX 0.7 shows the second one as it is."""
    return text.count(repr(cls)) + text.count(f"value: {cls.__name__}(") > 1


def _replaced(
    change: _Change, fn: Callable[..., R], args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
) -> _Call[R]:
    """Applies a change to a function and to its first arguments.

    For a method, to the object that it is bound to; for a partial, to its function and arguments.
    """
    if isinstance(fn, functools.partial):
        return _replaced(change, fn.func, (*fn.args, *args), {**fn.keywords, **kwargs})
    owner, name = getattr(fn, "__self__", None), getattr(fn, "__name__", "")
    if not isinstance(fn, types.MethodType) or getattr(owner, name, None) != fn:
        return change((fn, args, kwargs))
    owner, args, kwargs = change((owner, args, kwargs))
    return getattr(owner, name), args, kwargs


def _closing_over(value: PyTree, change: _Change, known: dict[int, PyTree]) -> PyTree:
    """Applies a change to what a function closes over, and to the globals that it names.

    Follows the functions among them; `known` has those that were met. Other values are changed
    themselves. What has nothing to change stays the same object.
    """
    from jmpx._jaxprs.equations import library_of  # as above

    if not isinstance(value, types.FunctionType):
        return change(value)
    if id(value) in known:
        return known[id(value)]
    known[id(value)] = value  # where a function calls itself
    around, cells = value.__globals__, value.__closure__ or ()
    names = () if library_of(value.__code__.co_filename) else _names(value.__code__)
    read = {name: around[name] for name in names if name in around}
    held = [None if cell == types.CellType() else cell.cell_contents for cell in cells]
    olds = [value.__defaults__, *held, *read.values()]
    news = [_closing_over(old, change, known) for old in olds]
    if any(map(operator.is_not, news, olds)):
        inside = zip(cells, held, news[1:], strict=False)
        cells = tuple(c if new is old else types.CellType(new) for c, old, new in inside)
        around = around | dict(zip(read, news[len(held) + 1 :], strict=True))
        function = types.FunctionType(value.__code__, around, None, news[0], cells)
        function.__kwdefaults__ = value.__kwdefaults__
        known[id(value)] = functools.update_wrapper(function, value)
    return known[id(value)]


def _names(code: types.CodeType) -> Iterator[str]:
    """Yields the names of globals and attributes in a function, and in those that it defines."""
    inner = (_names(each) for each in code.co_consts if isinstance(each, types.CodeType))
    yield from itertools.chain(code.co_names, *inner)
