"""Objects of Flax's NNX in pytrees, and functions of them as pure functions."""

import contextlib
import dataclasses
import functools
import sys
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax

from jmpx._base.messages import refuse_delayed
from jmpx._base.trees import PyTree, can_replace, cast_except, cast_like

Object: TypeAlias = Any  # Flax may be missing, and its types with it.


def nnx() -> Object:
    """Returns the module `flax.nnx`; None if the program has not imported it."""
    return sys.modules.get("flax.nnx")


def is_object(value: object) -> bool:
    """Whether `value` is an object of NNX, which has an identity and may change."""
    return nnx() is not None and isinstance(value, (nnx().Pytree, nnx().Variable))


def is_whole(value: object) -> bool:
    """Whether `value` is an object or an `nnx.State`: neither is searched for more objects."""
    return is_object(value) or (nnx() is not None and isinstance(value, nnx().State))


def holds_objects(tree: PyTree) -> bool:
    """Whether a pytree holds an object, other than in an `nnx.State`."""
    return any(map(is_object, jax.tree.leaves(tree, is_leaf=is_whole)))


def _opened(leaf: PyTree) -> tuple[list[PyTree], Callable[[list[PyTree]], PyTree]]:
    """Returns the parts of a bound method, a partial or another callable, and how to rebuild it."""
    if isinstance(leaf, types.MethodType):
        return [leaf.__self__], lambda parts: _bound(leaf.__func__, *parts)
    if isinstance(leaf, functools.partial):
        tree = leaf.func, leaf.args, leaf.keywords
        parts, treedef = jax.tree.flatten(tree, is_leaf=is_whole)
        return parts, lambda parts: _partial(*treedef.unflatten(parts))
    if callable(leaf) and not jax.tree_util.all_leaves([leaf], is_leaf=is_whole):
        parts, treedef = jax.tree.flatten(leaf, is_leaf=is_whole)
        return parts, treedef.unflatten
    return [], lambda _: leaf


def _partial(func: Callable[..., PyTree], args: PyTree, kwargs: PyTree) -> PyTree:
    return functools.partial(func, *args, **kwargs)


def _bound(func: Callable[..., PyTree], owner: Object) -> PyTree:
    """Binds a method to an object; if the object is a proxy, binds its wrapper of the method."""
    name = getattr(func, "__name__", "")
    if getattr(getattr(type(owner), name, None), "__wrapped__", None) is func:
        return getattr(owner, name)
    return types.MethodType(func, owner)


def objects_of(leaf: PyTree) -> Iterator[Object]:
    """Yields `leaf` if it is an object, or the objects in a bound method or a partial."""
    if is_object(leaf):
        yield leaf
    else:
        for part in _opened(leaf)[0]:
            yield from objects_of(part)


def has_objects(leaf: PyTree) -> bool:
    """Whether `objects_of` yields any object."""
    return next(objects_of(leaf), None) is not None


def replace_objects(leaf: PyTree, copies: Iterator[Object]) -> PyTree:
    """Returns `leaf` with copies in place of its objects, in the order of `objects_of`."""
    if is_object(leaf):
        return next(copies)
    if not has_objects(leaf):
        return leaf
    parts, rebuild = _opened(leaf)
    return rebuild([replace_objects(part, copies) for part in parts])


def skip_kept(cast: Callable[[PyTree], PyTree]) -> Callable[[PyTree], PyTree]:
    """Makes a cast skip variables of NNX other than `nnx.Param`.

    They are state: running statistics, caches, counters. A rounded average would lose digits at
    every step. Layers that compute in 16 bits cast the state that they read themselves.
    """

    def spared(tree: PyTree) -> PyTree:
        # Copies, because a trace may not change the variables of its caller.
        return cast_except(cast, jax.tree.map(lambda leaf: leaf, tree), is_kept)

    return spared


def is_kept(value: object) -> bool:
    """Whether `value` is a variable other than an `nnx.Param`: state, which is never cast."""
    is_variable = nnx() is not None and isinstance(value, nnx().Variable)
    return is_variable and not isinstance(value, nnx().Param)


# Functions of NNX objects as pure functions: objects are split before a call, and updated after it.
#
# Using an object may change it, and functions that JAX traces must not change objects. NNX's own
# transformations split an object outside, use a copy inside, and update the object by the copy's
# new state. `call` does the same for the transformations of jmpx; the transformation returns the
# new state as a pytree, `Changes`.


R = TypeVar("R")
_CONTEXT = "jmpx"  # the tag of our `nnx.update_context`
Leaf: TypeAlias = Any  # of the state of an object: an array, a Python number or text
Function: TypeAlias = Callable[..., Any]
Arguments: TypeAlias = tuple[PyTree, ...]
Keywords: TypeAlias = dict[str, PyTree]


def apply(fn: Callable[..., R], *args: PyTree, **kwargs: PyTree) -> R:
    """Calls a function. `call(transform, apply, (fn, *args), kwargs)` makes `fn` an argument."""
    return fn(*args, **kwargs)


class _Parts(NamedTuple):
    """A split object; if it is an argument itself, the transformation gets its `params`."""

    graphdef: Object
    params: PyTree  # None if the object is not an argument itself
    rest: PyTree


def _split(context: Object, value: Object, is_exposed: bool = False) -> _Parts:
    if is_exposed and not isinstance(value, nnx().Variable):
        return _Parts(*context.split(value, nnx().Param, ...))
    graphdef, state = context.split(value)
    return _Parts(graphdef, *((state, None) if is_exposed else (None, state)))


_ARRAY = object()  # stands for a new array in a record, which does not hold it


class _Origin(NamedTuple):
    """The origin of a leaf that an object has after a call."""

    place: int | None  # the index that the leaf had before the call; None for a new variable
    is_old: bool  # whether the leaf is unchanged
    leaf: Leaf  # the leaf; `_ARRAY` for a new array
    is_random: bool  # whether it is in a random counter


@dataclasses.dataclass(frozen=True, eq=False)
class _Record:
    """How a call has changed objects, without the new arrays."""

    objects: Sequence[Object] = ()  # before the call
    leaves: Sequence[Leaf] = ()  # of them: the parameters, then the state
    num_params: int = 0  # among these leaves
    graphdefs: Sequence[Object] = ()  # after the call, with those of objects in its result
    structure: PyTree = None  # of the leaves after the call
    origins: Sequence[_Origin] = ()  # of the leaves after the call
    is_rebuilt: bool = False  # whether a structure or the number of objects has changed

    def merged(self, arrays: Sequence[Leaf]) -> list[Leaf]:
        """Returns the leaves after the call, given the new arrays."""
        new = iter(arrays)
        return [next(new) if origin.leaf is _ARRAY else origin.leaf for origin in self.origins]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Returned:
    """Stands for an object in a function's result, by its index in `_Record.graphdefs`."""

    index: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Changes:
    """The new state of NNX objects after a call: a pytree of the new arrays."""

    arrays: list[Leaf]
    record: _Record = dataclasses.field(metadata={"static": True})

    def replaced(self) -> set[int]:
        """Returns the identities of the leaves that the call has replaced."""
        kept = {id(origin.leaf) for origin in self.record.origins if origin.is_old}
        return set(map(id, self.record.leaves)) - kept

    def stored(self, state: Sequence[Leaf] | None = None, with_random: bool = True) -> "Changes":
        """Returns the leaves that the new arrays replace; None for a new variable.

        A `state` from `advance` may take the place of the state before the call. A skipped step
        restores these leaves, except random counters, because its numbers were drawn.
        """
        record = self.record
        leaves = record.leaves if state is None else [*[None] * record.num_params, *state]
        places = [o.place if with_random or not o.is_random else None for o in self._new_origins()]
        return Changes([None if p is None else leaves[p] for p in places], record)

    def new_parameters(self) -> dict[int, int]:
        """Returns the places of replaced parameters, by the indices of the new arrays."""
        num = self.record.num_params
        places = enumerate(origin.place for origin in self._new_origins())
        return {index: p for index, p in places if p is not None and p < num}

    def without(self, places: Collection[int]) -> "Changes":
        """Returns the changes without the new arrays for the leaves at some places."""
        pairs = zip(self.arrays, self._new_origins(), strict=True)
        arrays = [array for array, origin in pairs if origin.place not in places]

        def before(origin: _Origin) -> _Origin:
            place = origin.place
            if origin.leaf is not _ARRAY or place is None or place not in places:
                return origin
            return origin._replace(is_old=True, leaf=self.record.leaves[place])

        origins = list(map(before, self.record.origins))
        return Changes(arrays, dataclasses.replace(self.record, origins=origins))

    def _new_origins(self) -> list[_Origin]:
        return [origin for origin in self.record.origins if origin.leaf is _ARRAY]

    def advance(self, state: Sequence[Leaf]) -> list[Leaf]:
        """Returns the state with the new arrays in it, for the next call.

        Raises:
            ValueError: if the call has changed more of its objects than the values of arrays.
        """
        record, new, same = self.record, list(state), not self.record.is_rebuilt
        for origin, leaf in zip(record.origins, record.merged(self.arrays), strict=True):
            if origin.place is None or origin.place < record.num_params:
                same &= origin.is_old
            elif not origin.is_old:
                new[origin.place - record.num_params] = leaf
        if not same or not all(map(can_replace, new, state)):
            raise ValueError(
                "Cannot hand the state of an NNX module from one micro-batch to the next, because "
                "the function changes more than the values of arrays in it, such as a parameter, a "
                "Python number, a shape, a dtype or which variables there are: create all "
                "variables before the call, or leave microbatches out."
            )
        return new

    def restore(self, result: PyTree) -> PyTree:
        """Updates the objects by the new arrays; returns the function's result."""
        record = self.record
        is_same = not record.is_rebuilt and len(record.origins) == len(record.leaves)
        if is_same and all(origin.is_old for origin in record.origins):
            return result
        _check_level(record.objects)
        rests = record.structure.unflatten(record.merged(self.arrays))
        with nnx().merge_context(_CONTEXT, inner=False) as context:
            objects = list(map(context.merge, record.graphdefs, rests))
        return jax.tree.map(
            lambda leaf: objects[leaf.index] if isinstance(leaf, _Returned) else leaf,
            result,
            is_leaf=lambda leaf: isinstance(leaf, _Returned),
        )


class PureFunction:
    """A pure function of the state of its NNX objects; this class is for one without objects."""

    def __init__(self, fn: Function) -> None:
        self.fn = fn
        self.objects: list[Object] = []  # of NNX
        self.invoke: Function = apply  # calls the function with its arguments; may be replaced

    def __call__(
        self, state: Sequence[Leaf], *args: PyTree, **kwargs: PyTree
    ) -> tuple[PyTree, Changes]:
        """Calls the function; returns its result and the changes of its objects."""
        return refuse_delayed(self.invoke(self.fn, *args, **kwargs)), Changes([], _Record())

    def given(self, state: Sequence[Leaf], args: Arguments, kwargs: Keywords) -> list[Leaf]:
        """Returns the leaves that a call gets for the objects, by their places."""
        return []


def call(
    transform: Callable[[PureFunction, list[Leaf], Arguments, Keywords], tuple[PyTree, Changes]],
    fn: Function,
    args: Arguments,
    kwargs: Keywords,
) -> PyTree:
    """Calls a function through a transformation, and updates the NNX objects in its arguments.

    The function itself may be an object, a bound method of one, or a `functools.partial` with one.
    The arguments may hold objects anywhere, one object more than once. A variable keeps the dtype
    in which it was stored, and an array that was not replaced stays the same array.

    Args:
        transform: called as `transform(pure, state, args, kwargs)`; calls
            `pure(state, *args, **kwargs)`, transformed, and returns the same pair. In `args` and
            `kwargs`, each object is replaced by the `nnx.State` of its `nnx.Param`s, so that these
            can be cast and differentiated. The other leaves of the objects are in `state`, a list.
        fn: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """
    with split(fn, args, kwargs) as given:
        result, changes = transform(*given)
        return changes.restore(result)


@contextlib.contextmanager
def split(
    fn: Function, args: Arguments, kwargs: Keywords
) -> Iterator[tuple[PureFunction, list[Leaf], Arguments, Keywords]]:
    """Yields a function as a pure function, the state of its NNX objects, and its arguments.

    The objects stay as they are unless `Changes.restore` updates them. See `call`.
    """
    leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=is_whole)
    if nnx() is None or not any(map(has_objects, (fn, *leaves))):
        yield PureFunction(fn), [], args, kwargs
        return
    with nnx().update_context(_CONTEXT):
        pure = _Split(fn, leaves, treedef)
        yield pure, pure.state, *treedef.unflatten(pure.arguments)


class _Split(PureFunction):
    """A pure function of split NNX objects. Make it within an `nnx.update_context`."""

    def __init__(self, fn: Function, leaves: list[PyTree], treedef: PyTree) -> None:
        super().__init__(fn)
        self.leaves, self.treedef = leaves, treedef
        found = [(value, False) for value in objects_of(fn)]
        found += [(value, is_object(leaf)) for leaf in leaves for value in objects_of(leaf)]
        self.objects = [value for value, _ in found]
        with nnx().split_context(_CONTEXT) as context:
            self.splits = [_split(context, *each) for each in found]
        exposed = (part.params for part in self.splits if part.params is not None)
        self.arguments = [next(exposed) if is_object(leaf) else leaf for leaf in leaves]
        trees = [part.params for part in self.splits], [part.rest for part in self.splits]
        self.state, self.state_def = jax.tree.flatten(trees[1])
        originals = [pair for t in trees for pair in jax.tree_util.tree_leaves_with_path(t)]
        self.places = {path: place for place, (path, _) in enumerate(originals)}
        self.originals = [_refuse_ref(leaf) for _, leaf in originals]

    def __call__(
        self, state: Sequence[Leaf], *args: PyTree, **kwargs: PyTree
    ) -> tuple[PyTree, Changes]:
        given = self.treedef.flatten_up_to((args, kwargs))
        exposed = self._exposed(args, kwargs)
        rests, params = self.state_def.unflatten(state), iter(exposed)
        with nnx().merge_context(_CONTEXT, inner=True) as context:
            states = ((None if p.params is None else next(params)) for p in self.splits)
            copies = [
                context.merge(part.graphdef, *(s for s in (own, rest) if s is not None))
                for part, own, rest in zip(self.splits, states, rests, strict=True)
            ]
        before, remaining = nnx().graphdef(tuple(copies)), iter(copies)
        fn = replace_objects(self.fn, remaining)
        arguments = [
            replace_objects(leaf, remaining) if has_objects(leaf) else part
            for leaf, part in zip(self.leaves, given, strict=True)
        ]
        args, kwargs = self.treedef.unflatten(arguments)
        result = refuse_delayed(self.invoke(fn, *args, **kwargs))
        is_rebuilt = nnx().graphdef(tuple(copies)) != before
        known = [*jax.tree.leaves(exposed), *state]
        return self._split_again(copies, result, known, is_rebuilt)

    def given(self, state: Sequence[Leaf], args: Arguments, kwargs: Keywords) -> list[Leaf]:
        return [*jax.tree.leaves(self._exposed(args, kwargs)), *state]

    def _exposed(self, args: Arguments, kwargs: Keywords) -> list[PyTree]:
        """Returns the parameters of the objects among the arguments."""
        given = self.treedef.flatten_up_to((args, kwargs))
        return [part for part, leaf in zip(given, self.leaves, strict=True) if is_object(leaf)]

    def _split_again(
        self, copies: list[Object], result: PyTree, known: list[Leaf], is_rebuilt: bool
    ) -> tuple[PyTree, Changes]:
        """Splits the copies and the objects in the result, after the function ran.

        The copies were merged from the leaves in `known`, which have the order of `originals`.
        """
        results, result_def = jax.tree.flatten(result, is_leaf=is_whole)
        returned = list(filter(is_object, results))
        with nnx().split_context(_CONTEXT) as context:
            after = [_split(context, value) for value in (*copies, *returned)]
        numbers = map(_Returned, range(len(copies), len(after)))
        results = [next(numbers) if is_object(leaf) else leaf for leaf in results]
        rests = [part.rest for part in after]
        leaves, structure = jax.tree_util.tree_flatten_with_path(rests)
        origins, arrays = list[_Origin](), list[jax.Array]()
        for (path, leaf), is_random in zip(leaves, _are_random(rests), strict=True):
            place = self.places.get(path)
            original = None if place is None else self.originals[place]
            is_old = place is not None and known[place] is leaf
            if not is_old and isinstance(leaf, jax.Array):
                arrays.append(cast_like(leaf, original))  # in its stored dtype
                leaf = _ARRAY
            origins.append(_Origin(place, is_old, original if is_old else leaf, is_random))
        start = self.objects, self.originals, len(known) - len(self.state)
        graphdefs = [part.graphdef for part in after]
        record = _Record(*start, graphdefs, structure, origins, is_rebuilt or bool(returned))
        return result_def.unflatten(results), Changes(arrays, record)


def _are_random(rests: Sequence[PyTree]) -> list[bool]:
    """Returns for each leaf of the objects' state whether it is in a random counter."""
    variables = jax.tree.leaves(rests, is_leaf=lambda node: isinstance(node, nnx().Variable))
    return [isinstance(v, nnx().RngState) for v in variables for _ in jax.tree.leaves(v)]


def _refuse_ref(leaf: Leaf) -> Leaf:
    if type(getattr(leaf, "aval", None)).__name__ == "AbstractRef":
        raise TypeError(
            "Expected variables of NNX that hold arrays, got one that holds a mutable reference, "
            "of which a copy would change: make the nnx.Variable without ref=True."
        )
    return leaf


def _check_level(objects: Sequence[Object]) -> None:
    """Raises unless all variables may be updated here: Flax itself raises after updating some."""
    for _, value in nnx().iter_graph(tuple(objects)):
        if isinstance(value, nnx().Variable):
            value.set_metadata(value.get_metadata())  # changes nothing, and checks


def parameters_of(tree: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """Replaces each object of NNX in a pytree by the `nnx.State` of its parameters.

    Also returns a function that takes such a pytree, updates the objects by it, and returns it with
    the objects in it.
    """
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_whole)
    with nnx().split_context() as context:
        parts = [_split(context, x, True).params if is_object(x) else x for x in leaves]

    def put_back(new: PyTree) -> PyTree:
        _check_level(list(filter(is_object, leaves)))
        updated = treedef.flatten_up_to(new)
        for index, leaf in enumerate(leaves):
            if is_object(leaf):
                nnx().update(leaf, updated[index])
                updated[index] = leaf
        return treedef.unflatten(updated)

    return treedef.unflatten(parts), put_back
