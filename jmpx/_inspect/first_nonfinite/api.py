"""The first infinity or NaN, as users ask for it: `jmpx.inspect.first_nonfinite(fn)(*args)`."""

import functools
from collections.abc import Callable

import jax

from jmpx._base.trees import PyTree
from jmpx._inspect.first_nonfinite.replay import Replay
from jmpx._inspect.first_nonfinite.report import FirstNonfinite
from jmpx._inspect.programs import traced_program
from jmpx._inspect.running import check_arrays


def first_nonfinite(fn: Callable[..., object]) -> Callable[..., FirstNonfinite | None]:
    """Finds the operation that makes the first infinity or NaN, and the rule that fixes it.

    It runs the function once, equation by equation in one compiled program, and checks each
    result. Then it follows infinities and NaNs from the results back to their origin, through
    loops, jitted functions and the backward pass. An infinity that reaches no result is not
    reported: exp(-inf) of a mask is 0, and `jnp.where` may drop a log(0). A rule is reported only
    if the infinity is gone when the function runs with it; at most six are tried. Compiled
    programs are kept for a while, without arrays, for a step that does the same.

    `jax_debug_nans` stops at each overflow, even at those that a dynamic loss scale expects. This
    replays a step that was skipped: see `docs/nonfinite.md`.

    Args:
        fn: a loss, which is differentiated in its first argument: it returns a floating scalar, or
            a tuple that begins with one. Or a step that computes its own gradients: gradients
            that it checks, as `jmpx.all_finite` does, count as results. Any other function runs as
            it is. Nothing is printed, and the modules among its arguments stay as they are.

    Returns:
        A function of the arguments of `fn` that returns a `jmpx.inspect.FirstNonfinite`, which
        prints the operation, its line, module, operands and fix; or None if all results are
        finite.

    Raises:
        TypeError: when called, if `fn` is not callable, or an argument is a shape or traced.
        ValueError: when called, if `fn` is a loss whose first argument holds no floating array.

    Example:
        >>> import jax.numpy as jnp
        >>> import jmpx
        >>> def loss_fn(params, x):
        ...     logits = x @ params["w"]
        ...     return jnp.exp(logits).mean()
        >>> loss_fn = jmpx.autocast(loss_fn, "c=f16; op.exp: f16")
        >>> params = {"w": jnp.ones((2, 3))}
        >>> found = jmpx.inspect.first_nonfinite(loss_fn)(params, 6 * jnp.ones((4, 2)))
        >>> found.operation, found.place.function, found.rule
        ('exp', 'loss_fn', 'op.exp: f32')
        >>> print(found.results[0], found.results[0].infs)
        float16[4,3], 12 inf 12
    """

    @functools.wraps(fn, updated=(), assigned=("__name__", "__qualname__", "__module__"))
    def run(*args: PyTree, **kwargs: PyTree) -> FirstNonfinite | None:
        program = traced_program(fn, args, kwargs)
        check_arrays(program, "jmpx.inspect.first_nonfinite")
        with jax.debug_nans(False), jax.debug_infs(False):  # They would stop before it is named.
            return Replay(program).find()

    return run
