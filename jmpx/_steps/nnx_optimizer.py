"""A step of an `nnx.Optimizer`, which holds its own state: it and the model change in place."""

import functools
from collections.abc import Callable

import jax

from jmpx._base.leaves import PyTree
from jmpx._base.messages import describe
from jmpx._base.nnx_objects import Object, is_object, nnx
from jmpx._base.trees import Flag, as_flag

# Takes a step: of parameters, an optax optimizer, its state and gradients, without variables.
Step = Callable[[PyTree, PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]


def is_nnx_optimizer(optimizer: object) -> bool:
    """Whether `optimizer` is an `nnx.Optimizer`."""
    return nnx() is not None and isinstance(optimizer, nnx().Optimizer)


def updated_in_place(
    model: Object, optimizer: Object, grads: PyTree, grads_finite: Flag, step: Step
) -> None:
    """Takes a step of an `nnx.Optimizer` by its optax optimizer, and counts one that is taken."""
    from jmpx._adapters.nnx.objects import array_in, set_value  # here, because it imports Flax

    if not is_object(model):
        raise TypeError(
            f"Expected the nnx.Module that an nnx.Optimizer updates as the model, got "
            f"{describe(model)}: pass the module itself, or optimizer.tx and a state of its own."
        )
    arrays_in = functools.partial(
        jax.tree.map, lambda x: array_in(x) if is_object(x) else x, is_leaf=is_object
    )
    graph = getattr(optimizer, "graph", None)  # Flax 0.12.0 has no such mode
    mode = {} if graph is None else {"graph": graph}
    params = nnx().state(model, optimizer.wrt, **mode)
    own_grads = arrays_in(nnx().state(grads, optimizer.wrt, **mode))
    state = optimizer.opt_state
    stepped, new_state = step(arrays_in(params), optimizer.tx, arrays_in(state), own_grads)
    nnx().update(model, jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(stepped)))
    variables, treedef = jax.tree.flatten(state, is_leaf=is_object)
    for variable, new in zip(variables, treedef.flatten_up_to(new_state), strict=True):
        set_value(variable, new)
    count = array_in(optimizer.step)
    set_value(optimizer.step, count + as_flag(grads_finite, "grads_finite").astype(count.dtype))
