"""Objects of Flax's NNX around a transformation: they are split before it, and updated after it.

An object changes when it is used, which a function that JAX traces cannot do. NNX's own
transformations split an object outside, use a copy inside, and update the object by the copy's new
state. `call` does the same for the transformations of this package.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax

from jmpx._base.leaves import PyTree, can_replace, is_floating
from jmpx._base.nnx_objects import (
    Object,
    has_objects,
    is_object,
    is_whole,
    nnx,
    objects_of,
    replace_objects,
)

_CONTEXT = "jmpx"  # the tag of our contexts in `nnx.update_context`
Leaf: TypeAlias = Any  # of an object: most are arrays, some are Python numbers or text


def apply(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function. `call(transform, apply, (fn, *args), kwargs)` makes `fn` an argument."""
    return fn(*args, **kwargs)


class PureFunction:
    """A function as a pure one: it takes the state of its objects, and returns their new state.

    This class is for a function without objects, `_Split` for one with objects.

    Args:
        fn: the function.

    Attributes:
        invoke: calls the function with its arguments, objects among them; may be replaced.
        size: the number of arrays of state that the last call returned.
    """

    size = 0

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.invoke: Callable[..., Any] = apply

    def __call__(self, state: Sequence[Leaf], *args: Any, **kwargs: Any) -> tuple[Any, list[Leaf]]:
        """Calls the function; returns its result, and the arrays that are new in its objects."""
        with _explain_closures():
            return self.invoke(self.fn, *args, **kwargs), []

    def is_replaced(self, array: Leaf) -> bool:
        """Whether the objects held this array before the last call, and hold it no longer."""
        return False

    def stored(self) -> list[Leaf]:
        """Returns what each new array of the last call replaces; None for a new variable."""
        return []

    def before(self) -> list[Leaf]:
        """Returns what each new array of the last call goes back to where a step is skipped.

        None stands for a new variable, and for a random counter, which goes on in any case: a
        skipped step has drawn its numbers.
        """
        return []

    def advance(self, state: Sequence[Leaf], updates: Sequence[Leaf]) -> list[Leaf]:
        """Returns the state with the new arrays of the last call in it, for a next call.

        Raises:
            ValueError: if the last call changed more of its objects than the values of arrays.
        """
        return list(state)

    def updates_of(self, state: Sequence[Leaf]) -> list[Leaf]:
        """Returns the arrays of a state that the last call made anew."""
        return []

    def restore(self, result: PyTree, updates: Sequence[Leaf]) -> PyTree:
        """Updates the objects by the new arrays of a call; returns the function's result."""
        return result


def call(
    transform: Callable[..., tuple[Any, list[Leaf]]],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Calls a function through a transformation, and gives the state of NNX objects back.

    The function itself may be an object, a bound method of one, or a `functools.partial` with one.
    The arguments may hold objects anywhere, the same one more than once. A variable comes back in
    the dtype in which it was stored, and an array that was not replaced as the same array.

    Args:
        transform: called as `transform(pure, state, args, kwargs)`, returns the pair that
            `pure(state, *args, **kwargs)` returns, transformed. In `args` and `kwargs`, each object
            is replaced by the `nnx.State` of its `nnx.Param`s, so that these can be cast and
            differentiated. The other leaves of the objects are in `state`, a list.
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
    with split(fn, args, kwargs) as (pure, state, args, kwargs):
        result, updates = transform(pure, state, args, kwargs)
        return pure.restore(result, updates)


@contextlib.contextmanager
def split(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[PureFunction, list[Leaf], tuple[Any, ...], dict[str, Any]]]:
    """Yields a function as a pure one, the state of its NNX objects, and its arguments.

    The objects stay as they are unless `pure.restore` updates them. See `call`.
    """
    leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=is_whole)
    if nnx() is None or not any(map(has_objects, (fn, *leaves))):
        yield PureFunction(fn), [], args, kwargs
        return
    with nnx().update_context(_CONTEXT):
        pure = _Split(fn, leaves, treedef)
        yield pure, pure.state, *treedef.unflatten(pure.arguments)


class _Split(PureFunction):
    """A function of NNX objects, which are split. Make it within an `nnx.update_context`.

    Args:
        fn: the function.
        leaves: its arguments, flattened into objects and other leaves.
        treedef: the structure of the arguments.
    """

    def __init__(self, fn: Callable[..., Any], leaves: list[Leaf], treedef: Any) -> None:
        super().__init__(fn)
        self.leaves, self.treedef = leaves, treedef
        with nnx().split_context(_CONTEXT) as context:
            splits = [[_split(context, o) for o in objects_of(fn)]]
            for leaf in leaves:
                splits.append([_split(context, o, is_object(leaf)) for o in objects_of(leaf)])
        pairs = zip(leaves, splits[1:], strict=True)
        self.arguments = [parts[0].params if is_object(leaf) else leaf for leaf, parts in pairs]
        self.splits = [part for parts in splits for part in parts]
        self.state, self.state_def = jax.tree.flatten([part.rest for part in self.splits])
        self.originals: list[Leaf] = []
        self.indices: dict[jax.tree_util.KeyPath, int] = {}  # of each path, in `originals`
        for parts in ([part.params for part in self.splits], [part.rest for part in self.splits]):
            for path, leaf in jax.tree_util.tree_leaves_with_path(parts):
                _refuse_ref(leaf)
                self.indices[path] = len(self.originals)
                self.originals.append(leaf)

    def __call__(self, state: Sequence[Leaf], *args: Any, **kwargs: Any) -> tuple[Any, list[Leaf]]:
        given = self.treedef.flatten_up_to((args, kwargs))
        exposed = [part for part, leaf in zip(given, self.leaves, strict=True) if is_object(leaf)]
        copies = self.merge(state, exposed)
        before = nnx().graphdef(tuple(copies))
        fn, (args, kwargs) = self._insert(copies, given)
        with _explain_closures():
            result = self.invoke(fn, *args, **kwargs)
        self.is_rebuilt = nnx().graphdef(tuple(copies)) != before
        return self._split_again(copies, result, [*jax.tree.leaves(exposed), *state])

    def merge(self, state: Sequence[Leaf], exposed: list[PyTree]) -> list[Object]:
        """Returns a copy of each object, merged from its parts. No other method makes copies.

        It runs inside of the trace, before the function runs on the copies.
        """
        rests, params = self.state_def.unflatten(state), iter(exposed)
        with nnx().merge_context(_CONTEXT, inner=True) as context:
            return [
                part.merge(context, next(params) if part.is_exposed else None, rest)
                for part, rest in zip(self.splits, rests, strict=True)
            ]

    def _insert(
        self, copies: list[Object], given: list[PyTree]
    ) -> tuple[Callable[..., Any], tuple[tuple[Any, ...], dict[str, Any]]]:
        """Returns the function and its arguments with copies in place of the objects."""
        remaining = iter(copies)
        fn = replace_objects(self.fn, remaining)
        arguments = [
            replace_objects(leaf, remaining) if has_objects(leaf) else part
            for leaf, part in zip(self.leaves, given, strict=True)
        ]
        return fn, self.treedef.unflatten(arguments)

    def _split_again(
        self, copies: list[Object], result: PyTree, known: list[Leaf]
    ) -> tuple[PyTree, list[Leaf]]:
        """Splits the copies and the objects in the result; returns the result and the new arrays.

        Args:
            copies: the copies, after the function ran on them.
            result: what the function returned.
            known: the leaves that the copies were merged from, in the order of `originals`.
        """
        results, result_def = jax.tree.flatten(result, is_leaf=is_whole)
        with nnx().split_context(_CONTEXT) as context:
            self.new = [_split(context, copy) for copy in copies]
            for index, leaf in enumerate(results):
                if is_object(leaf):
                    results[index] = _Returned(len(self.new))
                    self.new.append(_split(context, leaf))
        leaves, self.new_def = jax.tree_util.tree_flatten_with_path([new.rest for new in self.new])
        self.own = own = [self.indices.get(path) for path, _ in leaves]
        # Where `restore` finds each leaf: an original, a constant, or None for the next new array.
        self.sources: list[int | _Constant | None] = []
        updates: list[Leaf] = []
        for index, (_, leaf) in zip(own, leaves, strict=True):
            if index is not None and known[index] is leaf:
                self.sources.append(index)
            elif isinstance(leaf, jax.Array):
                self.sources.append(None)
                updates.append(leaf if index is None else _as_stored(leaf, self.originals[index]))
            else:
                self.sources.append(_Constant(leaf))
        self.size = len(updates)
        kept = {id(self.originals[source]) for source in self.sources if isinstance(source, int)}
        self.replaced = {id(leaf) for leaf in self.originals} - kept
        self.is_changed = self.is_rebuilt or self.sources != own or len(own) != len(known)
        return result_def.unflatten(results), updates

    def is_replaced(self, array: Leaf) -> bool:
        return id(array) in self.replaced

    def stored(self) -> list[Leaf]:
        pairs = zip(self.own, self.sources, strict=True)
        return [None if i is None else self.originals[i] for i, source in pairs if source is None]

    def before(self) -> list[Leaf]:
        is_variable = lambda node: isinstance(node, nnx().Variable)  # noqa: E731
        variables = jax.tree.leaves([new.rest for new in self.new], is_leaf=is_variable)
        is_random = [isinstance(v, nnx().RngState) for v in variables for _ in jax.tree.leaves(v)]
        changed = [r for r, s in zip(is_random, self.sources, strict=True) if s is None]
        pairs = zip(changed, self.stored(), strict=True)
        return [None if is_random else old for is_random, old in pairs]

    def advance(self, state: Sequence[Leaf], updates: Sequence[Leaf]) -> list[Leaf]:
        new, arrays = list(state), iter(updates)
        exposed = len(self.originals) - len(state)  # the parameters go before the state
        same = not self.is_rebuilt and len(self.new) == len(self.splits)
        for index, source in zip(self.own, self.sources, strict=True):
            if index is None or index < exposed:
                same &= index == source
            elif index != source:
                new[index - exposed] = next(arrays) if source is None else self._value_of(source)
        if not same or not all(map(can_replace, new, state)):
            raise ValueError(
                "Cannot hand the state of an NNX module from one micro-batch to the next, because "
                "the function changes more than the values of arrays in it, such as a parameter, a "
                "Python number, a shape, a dtype or which variables there are: create all "
                "variables before the call, or leave microbatches out."
            )
        return new

    def updates_of(self, state: Sequence[Leaf]) -> list[Leaf]:
        exposed = len(self.originals) - len(state)
        pairs = zip(self.own, self.sources, strict=True)
        return [state[i - exposed] for i, source in pairs if source is None and i is not None]

    def restore(self, result: PyTree, updates: Sequence[Leaf]) -> PyTree:
        if not self.is_changed and len(self.new) == len(self.splits):
            return result
        _check_level([part.value for part in self.splits])
        arrays = iter(updates)
        leaves = [next(arrays) if s is None else self._value_of(s) for s in self.sources]
        parts = zip(self.new, self.new_def.unflatten(leaves), strict=True)
        with nnx().merge_context(_CONTEXT, inner=False) as context:
            objects = [new.merge(context, None, rest) for new, rest in parts]
        return jax.tree.map(
            lambda leaf: objects[leaf.index] if isinstance(leaf, _Returned) else leaf,
            result,
            is_leaf=lambda leaf: isinstance(leaf, _Returned),
        )

    def _value_of(self, source: "int | _Constant") -> Leaf:
        return source.value if isinstance(source, _Constant) else self.originals[source]


@dataclasses.dataclass(frozen=True)
class _Constant:
    """A new leaf of an object that is not an array, such as a Python number."""

    value: Leaf


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Returned:
    """Stands for an object in a function's result: the one at `index` in `_Split.new`."""

    index: int


@dataclasses.dataclass(frozen=True)
class _Parts:
    """A split object.

    Attributes:
        value: the object.
        graphdef: its structure.
        params: its `nnx.Param`s if it is exposed, all of its state if it is an exposed variable,
            else None.
        rest: the other state.
        is_exposed: whether `params` is an argument of the transformation.
    """

    value: Object
    graphdef: Any
    params: PyTree
    rest: PyTree
    is_exposed: bool = False

    def merge(self, context: Any, params: PyTree, rest: PyTree) -> Object:
        """Returns the object made of these parts, or the one that the context has made of them."""
        return context.merge(self.graphdef, *(part for part in (params, rest) if part is not None))


def _split(context: Any, value: Object, is_exposed: bool = False) -> _Parts:
    if is_exposed and not isinstance(value, nnx().Variable):
        graphdef, params, rest = context.split(value, nnx().Param, ...)
    else:
        graphdef, rest = context.split(value)
        params, rest = (rest, None) if is_exposed else (None, rest)
    return _Parts(value, graphdef, params, rest, is_exposed)


def _refuse_ref(leaf: Leaf) -> None:
    if type(getattr(leaf, "aval", None)).__name__ == "AbstractRef":
        raise TypeError(
            "Expected variables of NNX that hold arrays, got one that holds a mutable reference, "
            "of which a copy would change: make the nnx.Variable without ref=True."
        )


def _as_stored(array: jax.Array, original: Leaf) -> jax.Array:
    """Returns new state in the dtype in which the old one was stored, if both are floating."""
    if is_floating(array) and is_floating(original) and array.dtype != original.dtype:
        return array.astype(original.dtype)
    return array


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


def _check_level(objects: list[Object]) -> None:
    """Raises unless all variables may be updated here; Flax would raise after it updated some."""
    with _explain_closures():
        for _, value in nnx().iter_graph(tuple(objects)):
            if isinstance(value, nnx().Variable):
                value.set_metadata(value.get_metadata())  # changes nothing, and checks


def parameters_of(tree: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """Replaces each object of NNX in a pytree by the `nnx.State` of its parameters.

    Returns:
        The pytree, and a function that takes such a pytree, updates the objects by it, and returns
        it with the objects in place of their parameters.
    """
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_whole)
    objects = [leaf for leaf in leaves if is_object(leaf)]
    with nnx().split_context() as context:
        parts = [_split(context, x, True).params if is_object(x) else x for x in leaves]

    def put_back(new: PyTree) -> PyTree:
        _check_level(objects)
        updated = treedef.flatten_up_to(new)
        for index, leaf in enumerate(leaves):
            if is_object(leaf):
                nnx().update(leaf, updated[index])
                updated[index] = leaf
        return treedef.unflatten(updated)

    return treedef.unflatten(parts), put_back
