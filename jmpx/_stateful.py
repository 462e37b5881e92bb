"""Stateful objects of Flax's NNX, taken apart around a transformation and given their state back.

An `nnx.Module`, `nnx.Rngs`, `nnx.Optimizer`, `nnx.Metric` or `nnx.Variable` changes when it is
used, which a function that JAX traces cannot do. NNX's own transformations split such an object
outside, use a copy inside, and update the object by what became of the copy; `call` does the same
for the transformations of this package. Flax is never imported: a program that holds an object of
NNX has imported it, so that `sys.modules` knows it.
"""

import contextlib
import dataclasses
import functools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

_CONTEXT = "jmpx"  # the tag of our contexts in `nnx.update_context`


def _nnx() -> Any:
    return sys.modules.get("flax.nnx")


def module_base() -> type:
    """Returns `nnx.Module`, for a program that has imported it."""
    return _nnx().Module


def is_object(value: Any) -> bool:
    """Whether `value` is an object of NNX that has an identity: a module, a variable or alike."""
    nnx = _nnx()
    return nnx is not None and isinstance(value, nnx.Pytree | nnx.Variable)


def is_state(value: Any) -> bool:
    """Whether `value` is an `nnx.State`, which is a value: its variables are nobody's."""
    nnx = _nnx()
    return nnx is not None and isinstance(value, nnx.State)


def _is_whole(value: Any) -> bool:
    return is_object(value) or is_state(value)


def apply(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function: as the function of `call`, it makes another one an argument."""
    return fn(*args, **kwargs)


class Pure:
    """A function as a pure one: takes the state of its objects, and returns what is new of it.

    Args:
        fn: the function; this class itself is for one without objects.

    Attributes:
        size: of the last call, how many arrays of state it returned.
    """

    size = 0

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    def __call__(self, state: Any, *args: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
        """Calls the function; returns its result, and the arrays that are new in its objects."""
        with _explain_closures():
            return self.fn(*args, **kwargs), []

    def is_replaced(self, array: Any) -> bool:
        """Whether the last call put another array in the place of this one."""
        return False


def call(
    transform: Callable[..., tuple[Any, list[Any]]],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Calls a function through a transformation, and gives the state of NNX objects back.

    The objects may be `fn`, what it is a bound method or a `functools.partial` of, or anywhere in
    the arguments, the same one more than once. A variable comes back in the dtype in which it was
    stored, and an array that was not replaced as the same array.

    Args:
        transform: called as `transform(pure, state, args, kwargs)`, returns the pair that
            `pure(state, *args, **kwargs)` returns, transformed. In `args` and `kwargs`, the
            `nnx.State` of an object's `nnx.Param`s stands for the object, so that they can be cast
            and differentiated; all else that the objects hold is in `state`, a list.
        fn: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Returns:
        The result of `fn`, as `transform` returned it.

    Raises:
        TypeError: if a variable holds a mutable reference.
        ValueError: if a module that changes is not among the arguments, or is there but belongs to
            an outer trace.
    """
    leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=_is_whole)
    if _nnx() is None or not any(map(_has_objects, (fn, *leaves))):
        return transform(Pure(fn), [], args, kwargs)[0]
    with _nnx().update_context(_CONTEXT):
        pure = _Split(fn, leaves, treedef)
        args, kwargs = treedef.unflatten(pure.arguments)
        result, updates = transform(pure, pure.state, args, kwargs)
        return pure.restore(result, updates)


class _Split(Pure):
    """A function of NNX objects, taken apart. Needs the `nnx.update_context` that it is made in.

    Args:
        fn: the function.
        leaves: its arguments, as `treedef` takes them apart: into objects and other leaves.
        treedef: how it does.
    """

    def __init__(self, fn: Callable[..., Any], leaves: list[Any], treedef: Any) -> None:
        super().__init__(fn)
        self.leaves, self.treedef = leaves, treedef
        with _nnx().split_context(_CONTEXT) as context:
            splits = [[_split(context, o) for o in _objects_of(fn)]]
            for leaf in leaves:
                splits.append([_split(context, o, is_object(leaf)) for o in _objects_of(leaf)])
        pairs = zip(leaves, splits[1:], strict=True)
        self.arguments = [parts[0].params if is_object(leaf) else leaf for leaf, parts in pairs]
        self.splits = [part for parts in splits for part in parts]
        self.state, self.state_def = jax.tree.flatten([part.rest for part in self.splits])
        self.originals: list[Any] = []
        self.places: dict[Any, int] = {}  # of each original, by its path in the split objects
        for parts in ([part.params for part in self.splits], [part.rest for part in self.splits]):
            for path, leaf in jax.tree_util.tree_leaves_with_path(parts):
                _refuse_ref(leaf)
                self.places[path] = len(self.originals)
                self.originals.append(leaf)

    def __call__(self, state: Any, *args: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
        given = self.treedef.flatten_up_to((args, kwargs))
        exposed = [part for part, leaf in zip(given, self.leaves, strict=True) if is_object(leaf)]
        copies = self.merge(state, exposed)
        before = _nnx().graphdef(tuple(copies))
        fn, (args, kwargs) = self._put_in_place(copies, given)
        with _explain_closures():
            result = fn(*args, **kwargs)
        self.is_rebuilt = _nnx().graphdef(tuple(copies)) != before
        return self._split_again(copies, result, [*jax.tree.leaves(exposed), *state])

    def merge(self, state: list[Any], exposed: list[Any]) -> list[Any]:
        """Returns a copy of each object, made of what it was split into: the one place that does.

        It runs inside of the trace, before the function runs on the copies.
        """
        rests, params = self.state_def.unflatten(state), iter(exposed)
        with _nnx().merge_context(_CONTEXT, inner=True) as context:
            return [
                part.merge(context, next(params) if part.is_exposed else None, rest)
                for part, rest in zip(self.splits, rests, strict=True)
            ]

    def _put_in_place(self, copies: list[Any], given: list[Any]) -> Any:
        """Returns the function and its arguments with copies in the places of the objects."""
        remaining = iter(copies)
        fn = _replace_objects(self.fn, remaining)
        arguments = [
            _replace_objects(leaf, remaining) if _has_objects(leaf) else part
            for leaf, part in zip(self.leaves, given, strict=True)
        ]
        return fn, self.treedef.unflatten(arguments)

    def _split_again(self, copies: list[Any], result: Any, known: list[Any]) -> Any:
        """Splits the copies, and the objects in the result; returns the arrays that are new."""
        results, result_def = jax.tree.flatten(result, is_leaf=_is_whole)
        with _nnx().split_context(_CONTEXT) as context:
            self.new = [_split(context, copy) for copy in copies]
            for place, leaf in enumerate(results):
                if is_object(leaf):
                    results[place] = _Returned(len(self.new))
                    self.new.append(_split(context, leaf))
        leaves, self.new_def = jax.tree_util.tree_flatten_with_path([new.rest for new in self.new])
        own = [self.places.get(path) for path, _ in leaves]
        self.sources: list[int | _Constant | None] = []  # None for the next of the new arrays
        updates: list[Any] = []
        for place, (_, leaf) in zip(own, leaves, strict=True):
            if place is not None and known[place] is leaf:
                self.sources.append(place)
            elif isinstance(leaf, jax.Array):
                self.sources.append(None)
                updates.append(leaf if place is None else _as_stored(leaf, self.originals[place]))
            else:
                self.sources.append(_Constant(leaf))
        self.size = len(updates)
        kept = {id(self.originals[source]) for source in self.sources if isinstance(source, int)}
        self.replaced = {id(leaf) for leaf in self.originals} - kept
        self.is_changed = self.is_rebuilt or self.sources != own or len(own) != len(known)
        return result_def.unflatten(results), updates

    def is_replaced(self, array: Any) -> bool:
        return id(array) in self.replaced

    def restore(self, result: Any, updates: Sequence[Any]) -> Any:
        """Updates the objects by what became of their copies; returns the function's result."""
        if not self.is_changed and len(self.new) == len(self.splits):
            return result
        _check_level([part.value for part in self.splits])
        arrays = iter(updates)
        leaves = [next(arrays) if s is None else self._value_of(s) for s in self.sources]
        parts = zip(self.new, self.new_def.unflatten(leaves), strict=True)
        with _nnx().merge_context(_CONTEXT, inner=False) as context:
            objects = [new.merge(context, None, rest) for new, rest in parts]
        return jax.tree.map(
            lambda leaf: objects[leaf.place] if isinstance(leaf, _Returned) else leaf,
            result,
            is_leaf=lambda leaf: isinstance(leaf, _Returned),
        )

    def _value_of(self, source: Any) -> Any:
        return source.value if isinstance(source, _Constant) else self.originals[source]


@dataclasses.dataclass(frozen=True)
class _Constant:
    """Something in an object that is no array, such as a Python number, and is new."""

    value: Any


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Returned:
    """Stands for an object in a function's result."""

    place: int


@dataclasses.dataclass(frozen=True)
class _Parts:
    """A split object.

    Attributes:
        value: the object.
        graphdef: its structure.
        params: if it is exposed, its parameters; the whole of it, if it is a variable.
        rest: all else.
        is_exposed: whether its parameters are handed to the transformation.
    """

    value: Any
    graphdef: Any
    params: Any
    rest: Any
    is_exposed: bool = False

    def merge(self, context: Any, params: Any, rest: Any) -> Any:
        """Returns the object made of these parts, or the one that the context has in its place."""
        return context.merge(self.graphdef, *(part for part in (params, rest) if part is not None))


def _split(context: Any, value: Any, is_exposed: bool = False) -> _Parts:
    nnx = _nnx()
    if is_exposed and not isinstance(value, nnx.Variable):
        graphdef, params, rest = context.split(value, nnx.Param, ...)
    else:
        graphdef, rest = context.split(value)
        params, rest = (rest, None) if is_exposed else (None, rest)
    return _Parts(value, graphdef, params, rest, is_exposed)


def _refuse_ref(leaf: Any) -> None:
    if type(getattr(leaf, "aval", None)).__name__ == "AbstractRef":
        raise TypeError(
            "Expected variables of NNX that hold arrays, got one that holds a mutable reference, "
            "of which a copy would change: make the nnx.Variable without ref=True."
        )


def _objects_of(leaf: Any) -> Iterator[Any]:
    """Yields the objects in a leaf: itself, or what it is a bound method or a partial of."""
    if is_object(leaf):
        yield leaf
    elif isinstance(leaf, types.MethodType):
        yield from _objects_of(leaf.__self__)
    elif isinstance(leaf, functools.partial):
        inner = jax.tree.leaves((leaf.func, leaf.args, leaf.keywords), is_leaf=_is_whole)
        for part in inner:
            yield from _objects_of(part)
    elif callable(leaf) and not jax.tree_util.all_leaves([leaf], is_leaf=_is_whole):
        for part in jax.tree.leaves(leaf, is_leaf=_is_whole):
            yield from _objects_of(part)


def _has_objects(leaf: Any) -> bool:
    return next(_objects_of(leaf), None) is not None


def _replace_objects(leaf: Any, copies: Iterator[Any]) -> Any:
    """Returns the same with copies in the places of the objects, in the order of `_objects_of`."""
    if is_object(leaf):
        return next(copies)
    if not _has_objects(leaf):
        return leaf
    replace = functools.partial(_replace_objects, copies=copies)
    if isinstance(leaf, types.MethodType):
        return types.MethodType(leaf.__func__, replace(leaf.__self__))
    if isinstance(leaf, functools.partial):
        parts = (leaf.func, leaf.args, leaf.keywords)
        func, args, kwargs = jax.tree.map(replace, parts, is_leaf=_is_whole)
        return functools.partial(func, *args, **kwargs)
    return jax.tree.map(replace, leaf, is_leaf=_is_whole)


def _as_stored(array: Any, original: Any) -> Any:
    """Returns new state in the dtype in which the old one was stored, if both are floating."""
    dtype = getattr(original, "dtype", array.dtype)
    both = (array.dtype, dtype)
    if array.dtype == dtype or not all(jnp.issubdtype(d, jnp.floating) for d in both):
        return array
    return array.astype(dtype)


_CLOSED_OVER = (
    "Cannot give the new state of an NNX module back, as it was made outside of the function that "
    "is being traced and not passed to it ({}): pass the module as an argument, f(model, x), "
    "through each of the transformations around it, as nnx.jit and nnx.grad take one."
)


@contextlib.contextmanager
def _explain_closures() -> Iterator[None]:
    """Says how to mend a function that changes a module which it closes over."""
    try:
        yield
    except Exception as error:
        errors = sys.modules.get("flax.errors")
        if errors is None or not isinstance(error, errors.TraceContextError):
            raise
        raise ValueError(_CLOSED_OVER.format(str(error).partition(" (http")[0])) from error


def _check_level(objects: list[Any]) -> None:
    """Raises unless all variables may be updated here: Flax itself would update half of them."""
    nnx = _nnx()
    with _explain_closures():
        for _, value in nnx.iter_graph(tuple(objects)):
            if isinstance(value, nnx.Variable):
                value.set_metadata(value.get_metadata())  # changes nothing, and checks


def parameters_of(tree: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Returns a pytree with the `nnx.State` of its parameters for each object of NNX in it.

    And a function that takes such a pytree, updates the objects by it, and returns the objects in
    their places.
    """
    leaves, treedef = jax.tree.flatten(tree, is_leaf=_is_whole)
    objects = [leaf for leaf in leaves if is_object(leaf)]
    if not objects:
        return tree, lambda new: new
    nnx = _nnx()
    with nnx.split_context() as context:
        parts = [_split(context, x, True).params if is_object(x) else x for x in leaves]

    def put_back(new: Any) -> Any:
        _check_level(objects)
        updated = treedef.flatten_up_to(new)
        for place, leaf in enumerate(leaves):
            if is_object(leaf):
                nnx.update(leaf, updated[place])
                updated[place] = leaf
        return treedef.unflatten(updated)

    return treedef.unflatten(parts), put_back


def holds_objects(tree: Any) -> bool:
    """Whether a pytree holds an object of NNX, other than in an `nnx.State`."""
    return any(map(is_object, jax.tree.leaves(tree, is_leaf=_is_whole)))


def sparing(cast: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Makes a cast leave the variables of NNX that are no `nnx.Param` as they are.

    They are state: running statistics, caches, counters. A rounded average would go on from its
    rounding. The layers themselves compute in 16 bits what they read of it.
    """

    def spared(tree: Any) -> Any:
        leaves, treedef = jax.tree.flatten(tree, is_leaf=_is_kept)
        if not any(map(_is_kept, leaves)):
            return cast(tree)
        hollow = treedef.unflatten([None if _is_kept(leaf) else leaf for leaf in leaves])
        pairs = zip(leaves, treedef.flatten_up_to(cast(hollow)), strict=True)
        # As other variables of the same values, which may change where the caller's may not.
        return treedef.unflatten([_copy(leaf) if _is_kept(leaf) else new for leaf, new in pairs])

    return spared


def _copy(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf, tree)


def _is_kept(value: Any) -> bool:
    nnx = _nnx()
    return nnx is not None and isinstance(value, nnx.Variable) and not isinstance(value, nnx.Param)
