"""What the function of `--model` returned: which module, function and arguments are looked at."""

import functools
import inspect
import sys
from collections.abc import Callable

import jax

from jmpx._autocast import Autocast
from jmpx._base.leaves import PyTree, is_traceable
from jmpx._cli.targets import attempt

RETURNS = (
    "a module of Equinox or NNX, or a pair of a function, a Linen module or a Haiku transformed "
    "function and the tuple of its arguments"
)


def function_and_arguments(made: PyTree) -> tuple[PyTree, tuple[PyTree, ...]]:
    """Returns the function or module to look at, and its arguments.

    Raises:
        ValueError: if there is none, or if arguments are missing.
    """
    is_pair = type(made) is tuple and len(made) == 2
    fn, args = made if is_pair else (made, ())
    got = f"a value of type {type(made).__name__}"
    if isinstance(fn, Autocast):
        raise ValueError(
            "The function of --model returns what jmpx.autocast has made under a policy map of "
            "its own: let it return the module or the function without that."
        )
    if not is_pair and _is_viewable(fn):
        return fn, ()
    if callable(fn) or initializer(fn) is not None:
        if is_pair and isinstance(args, tuple | list):
            return fn, tuple(args)
        given = f"arguments of type {type(args).__name__}" if is_pair else "no arguments"
        got = f"a {type(fn).__name__} and {given}"
    raise ValueError(f"Expected the function of --model to return {RETURNS}, got {got}.")


def models_in(fn: PyTree, args: tuple[PyTree, ...]) -> list[PyTree]:
    """Returns the outermost modules of which views can be made: the function, or its arguments."""
    fn = _unwrapped(fn)
    if _is_viewable(fn):
        return [fn]
    return list(filter(_is_viewable, jax.tree.leaves(args, is_leaf=_is_viewable)))


def forward_call(
    fn: PyTree, args: tuple[PyTree, ...]
) -> tuple[Callable[..., PyTree], tuple[PyTree, ...]]:
    """Returns what is traced by operations: the call of a model, with shapes as its parameters.

    Raises:
        ValueError: if nothing, or more than one function, could be called.
    """
    init = initializer(fn)
    has_several = isinstance(fn, _type_of("haiku", "MultiTransformed"))
    if has_several or (_is_viewable(fn) and not args):
        got = f"a {type(fn).__name__} {'of several functions' if has_several else 'alone'}"
        raise ValueError(
            "Expected the function of --model to return a pair of a function, such as the model, "
            "and the tuple of its arguments, because operations are found by a call, got "
            f"{got}: return the pair, or write by=modules."
        )
    if init is None:
        return fn, args
    key = jax.random.key(0)
    made = attempt("Tracing the model failed", lambda: _shapes_of(init, (key, *args)))
    if isinstance(fn, _type_of("flax.linen", "Module")):
        changing = [name for name in made if name != "params"]
        call = functools.partial(fn.apply, rngs=key, mutable=changing)
        return call, (made, *args)
    stored = made if isinstance(fn, _type_of("haiku", "TransformedWithState")) else (made,)
    names = [*inspect.signature(fn.apply).parameters][len(stored) :]
    keys = [key] if names[:1] == ["rng"] else []  # hk.without_apply_rng takes it away
    return fn.apply, (*stored, *keys, *args)


def initializer(fn: PyTree) -> Callable[..., PyTree] | None:
    """Returns the `init` of a Linen module or of a Haiku function, None for any other object."""
    kinds = _type_of("flax.linen", "Module")
    for name in ("Transformed", "TransformedWithState", "MultiTransformed"):
        kinds += _type_of("haiku", name)
    return fn.init if isinstance(fn, kinds) else None


def trace_abstractly(fn: Callable[..., PyTree], args: tuple[PyTree, ...]) -> None:
    """Calls a function with abstract arrays; other arguments stay as they are."""
    leaves, treedef = jax.tree.flatten(args)
    arrays = {i: leaf for i, leaf in enumerate(leaves) if is_array_or_shape(leaf)}

    def run(arrays: dict[int, PyTree]) -> None:
        fn(*treedef.unflatten(arrays.get(i, leaf) for i, leaf in enumerate(leaves)))

    jax.eval_shape(run, arrays)


def is_array_or_shape(leaf: object) -> bool:
    return is_traceable(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def _shapes_of(fn: Callable[..., PyTree], args: tuple[PyTree, ...]) -> PyTree:
    """Returns the shapes of what a function returns, which must be arrays."""
    found: list[PyTree] = []
    as_shape = lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype)  # noqa: E731
    trace_abstractly(lambda *args: found.append(jax.tree.map(as_shape, fn(*args))), args)
    return found[0]


def _unwrapped(fn: PyTree) -> PyTree:
    """Returns what is in a transformed function, such as `jax.vmap(model)`, or has its method."""
    while not _is_viewable(fn):
        owner = getattr(fn, "__self__", None)
        inner = fn.func if isinstance(fn, functools.partial) else getattr(fn, "__wrapped__", None)
        if inner is None and not _is_viewable(owner):
            return fn
        fn = owner if _is_viewable(owner) else inner
    return fn


def _is_viewable(model: PyTree) -> bool:
    """Whether it is a module of which a view can be made without a call, and no wrapper of one."""
    is_wrapper = isinstance(model, _type_of("equinox", "Module")) and hasattr(model, "__wrapped__")
    kinds = _type_of("equinox", "Module") + _type_of("flax.nnx", "Module")
    return isinstance(model, kinds) and not is_wrapper


def _type_of(package: str, name: str) -> tuple[type, ...]:
    """Returns a class of a framework in a tuple, for `isinstance`; `()` if it is not imported."""
    module = sys.modules.get(package)
    return () if module is None else (getattr(module, name),)
