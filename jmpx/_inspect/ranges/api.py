"""The ranges as users call them: `jmpx.inspect.ranges(fn)(*args)`."""

import functools
from collections.abc import Callable

from jmpx._base.trees import PyTree
from jmpx._inspect.graph import Graph
from jmpx._inspect.programs import traced_program
from jmpx._inspect.ranges.counting import counted
from jmpx._inspect.ranges.data import Histogram, Range
from jmpx._inspect.ranges.plan import Plan
from jmpx._inspect.ranges.report import Ranges
from jmpx._inspect.running import check_arrays


def ranges(fn: Callable[..., object]) -> Callable[..., Ranges]:
    """Runs a train step once in float32, and shows how large and how small its numbers are.

    Even what was traced in 16 or 8 bits runs in float32: casts in the function, in its policies
    and in autocast have no effect. The numbers that each operation computes are counted by
    exponent, also in loops, for each module or `jax.named_scope`, activations and gradients apart.
    So the report has exactly what float16, bfloat16 and the 8-bit formats would lose, for any loss
    scale. Operations that only move numbers, such as reshapes, do not count, nor does a single
    number outside of modules and scopes, such as the loss. What `jax.checkpoint` computes again
    counts as activations, both times; all else in a backward pass counts as gradients, even where a
    `jax.custom_vjp` computes activations again.

    A program is compiled once with its counts, also for later calls of a step that does the same. A
    large program runs operation by operation, and its loops are compiled with their counts, in each
    call.

    Args:
        fn: a loss, which is differentiated in its first argument: it returns a floating scalar, or
            a tuple that begins with one. Or a step that computes its own gradients; if it scales
            its loss, its gradients count as scaled. Any other function runs as it is.

    Returns:
        A function of the arguments of `fn`, which are arrays, that returns a `jmpx.inspect.Ranges`.

    Raises:
        TypeError: when called, if `fn` is not callable, or an argument is a shape or traced.
        ValueError: when called, if `fn` is a loss whose first argument holds no floating array, or
            if the program holds a `jax.shard_map`, where each device has numbers of its own.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import jmpx
        >>> def loss_fn(params, x):
        ...     with jax.named_scope("encoder"):
        ...         h = jnp.tanh(x @ params["w"])
        ...     with jax.named_scope("energy"):
        ...         energy = jnp.square(1000 * h).sum(-1)  # beyond float16
        ...     return jnp.mean(jnp.sqrt(energy)) / 1000
        >>> params = {"w": jnp.full((8, 4), 0.25)}
        >>> found = jmpx.inspect.ranges(loss_fn)(params, jnp.ones((2, 8)))
        >>> found.shares("float16", kind="activations", scope="energy").overflowing > 0.3
        True
        >>> found.loss_scale()
        32768.0
    """

    @functools.wraps(fn, updated=())
    def call(*args: PyTree, **kwargs: PyTree) -> Ranges:
        program = traced_program(fn, args, kwargs)
        check_arrays(program, "jmpx.inspect.ranges")
        plan = Plan(Graph(program))
        kinds: tuple[list[Range], list[Range]] = [], []
        for (scope, is_gradient), counts in zip(plan.table, counted(program, plan), strict=True):
            kinds[is_gradient].append(Range(scope, Histogram.of(counts)))
        title = program.name + (" and its gradient" if program.is_differentiated else "")
        return Ranges(title, tuple(kinds[0]), tuple(kinds[1]), plan.masks)

    return call
