"""Objects of NNX in a model: their kinds (a called module, a container), and searches for them."""

from collections.abc import Callable
from typing import TypeGuard

import jax
from flax import nnx

from jmpx._adapters.boundaries import are_same, is_optimizer_state, public_methods
from jmpx._base.stateful import is_object, is_whole
from jmpx._base.trees import PyTree


def map_objects(
    tree: PyTree, parts: tuple[str, ...], func: Callable[[PyTree, str], PyTree]
) -> PyTree:
    """Maps the value of an attribute: an object of NNX, or a container of them, with its path.

    A container whose leaves stay the same objects stays the same object.
    """

    def at_path(key_path: jax.tree_util.KeyPath, leaf: PyTree) -> PyTree:
        keys = jax.tree_util.keystr(key_path, simple=True, separator="/")
        return func(leaf, "/".join(filter(None, (*parts, keys))))

    new = jax.tree_util.tree_map_with_path(at_path, tree, is_leaf=is_object)
    return tree if are_same(tree, new, is_object) else new


def is_called(value: object) -> TypeGuard[nnx.Module]:
    """Whether it is a module that may be called, rather than a list or a dict of modules."""
    is_container = isinstance(value, nnx.List | nnx.Dict) and not callable(value)
    return isinstance(value, nnx.Module) and not is_container


def is_holder(module: nnx.Module) -> bool:
    """Whether it only holds modules: without public methods, it is never called."""
    return not any(public_methods(type(module), nnx.Module)) and not _holds_parameter(module)


def has_statistics(module: nnx.Module) -> bool:
    """Whether it keeps running statistics, which stay in float32 and would widen its results."""
    return any(isinstance(value, nnx.BatchStat) for value in vars(module).values())


def reads(module: nnx.Module) -> bool:
    """Whether its calls cast their arguments: it reads variables, or is a step of a loop."""
    is_cell = isinstance(module, nnx.RNNCellBase)
    return is_cell or has_statistics(module) or _holds_parameter(module)


def _holds_parameter(value: nnx.Pytree) -> bool:
    """Whether an object holds a parameter outside of the modules that are called."""
    nodes = filter(is_object, jax.tree.leaves(list(vars(value).values()), is_leaf=is_object))
    return any(
        isinstance(node, nnx.Param)
        or (isinstance(node, nnx.Pytree) and not is_called(node) and _holds_parameter(node))
        for node in nodes
    )


def notes_dtype(module: nnx.Module) -> bool:
    """Whether it is an `nnx.Embed` that was given no dtype, and noted that of its table."""
    return isinstance(module, nnx.Embed) and module.dtype == module.embedding[...].dtype


def array_in(variable: nnx.Variable) -> PyTree:
    """Returns the one array in a variable; None if there are several."""
    leaves = jax.tree.leaves(variable)
    return leaves[0] if len(leaves) == 1 else None


def set_value(variable: nnx.Variable, value: jax.Array) -> None:
    """Gives a variable another array."""
    if hasattr(variable, "set_value"):
        variable.set_value(value)
    else:  # Flax 0.12.0
        variable.value = value


def objects_in(roots: list[PyTree]) -> list[tuple[nnx.Pytree, str]]:
    """Returns objects and those in them, other than variables, each once, with their paths."""
    found: dict[int, tuple[PyTree, str]] = {}

    def visit(value: PyTree, path: str) -> PyTree:
        if isinstance(value, nnx.Pytree) and id(value) not in found:
            found[id(value)] = value, path
            for name, attribute in vars(value).items():
                map_objects(attribute, (path, str(name)), visit)
        return value

    for root in roots:
        visit(root, "")
    return list(found.values())


def models_in(roots: list[PyTree]) -> tuple[list[nnx.Module], list[nnx.Optimizer]]:
    """Returns the models and the optimizers in objects.

    The models are the outermost modules, also in a list or dict of NNX, or in a train state: a
    module that holds an optimizer, or metrics if it is not callable itself.
    """
    models: dict[int, nnx.Module] = {}
    optimizers: list[nnx.Optimizer] = []

    def visit(values: list[PyTree]) -> None:
        for value in values:
            if isinstance(value, nnx.Optimizer):
                optimizers.append(value)
            if is_called(value) and not _is_train_state(value):
                models[id(value)] = value
            elif isinstance(value, nnx.Pytree) and not isinstance(value, nnx.Metric):
                visit(_parts(value))

    visit(roots)
    inside = {id(part) for model in models.values() for part, path in objects_in([model]) if path}
    return [model for key, model in models.items() if key not in inside], optimizers


def _parts(value: nnx.Pytree) -> list[PyTree]:
    """Returns the objects in the attributes of an object, without those in optimizer states."""
    leaves = jax.tree.leaves(list(vars(value).values()), is_leaf=is_closed)
    return list(filter(is_object, leaves))


def _is_train_state(module: nnx.Module) -> bool:
    kinds = (nnx.Optimizer,) if callable(module) else (nnx.Optimizer, nnx.Metric)
    return any(isinstance(part, kinds) for part in _parts(module))


def is_closed(node: object) -> bool:
    """Whether a search for models by `jax.tree` does not enter a node."""
    return is_whole(node) or is_optimizer_state(node)
