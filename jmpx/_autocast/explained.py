"""Notes on errors that come of tracing: autocast traces a function, which other ways run as it is.

An array that a trace has left behind, as in a list, is an error where it is used later: far from
any call of jmpx. JAX's message names the function that it traced, so that name says what to do.
"""

import contextlib
import re
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from jmpx._base.leaves import PyTree
from jmpx._jaxprs import core
from jmpx._policies.frameworks import imported_adapters

# Errors of Python code that asks a traced array for its numbers.
_UNREAD = (
    jax.errors.ConcretizationTypeError,  # `if x > 0`, `float(x)`, `x.item()`
    jax.errors.TracerIntegerConversionError,
    jax.errors.TracerArrayConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
# What is in the message of a TypeError for the same reason.
_UNREAD_TEXT = re.compile(r"Tracer\.__format__|Shapes must be .*Tracer")
_TRACED = "traced by jmpx's autocast"  # is in the name that JAX knows
_WAYS = "by=arguments or by=modules"


@contextlib.contextmanager
def tracing_explained(fn: Callable[..., PyTree], by: str) -> Iterator[str]:
    """Adds a note to an error of a function under autocast that comes of tracing it.

    Yields the name that JAX is to give the function in its errors.
    """
    # In a body that JAX traces anyway, arrays have no numbers, whatever the way.
    has_numbers = all(body == "derivative" for body in core.enclosing_bodies())
    kept = f"return what it keeps, as in a list, or write {_WAYS}"
    name = f"{getattr(fn, '__name__', type(fn).__name__)} ({_TRACED}: {kept})"
    before = _held()
    try:
        yield name
        for key, array in _held().items():
            if key not in before:
                jnp.ravel(array)  # JAX raises its error, unless in a body, where it does later
    except Exception as error:
        note = _note(error, name, by, has_numbers)
        if note:
            error.add_note(note)
        raise


def _held() -> dict[int, object]:
    """Returns the traced arrays that frameworks keep for the functions around this one."""
    arrays = (array for adapter in imported_adapters() for array in adapter.held())
    return {id(array): array for array in arrays if isinstance(array, jax.core.Tracer)}


def _note(error: Exception, name: str, by: str, has_numbers: bool) -> str:
    """Returns what to say of an error; empty if it would not be another one by other ways."""
    text = str(error)
    use = "use jmpx.apply_policy with" if by == "jmpx.autocast" else "write"
    as_it_is = f"{use} {_WAYS}, which runs the function as it is"
    if isinstance(error, NotImplementedError) and "must be fp16" in text:
        return (
            "Autocast changes dtypes after JAX has traced this: cast q, k and v before "
            "jax.nn.dot_product_attention, as in `q.astype(jnp.bfloat16)`, or write by=modules, "
            "under which layers hand out 16-bit arrays."
        )
    if isinstance(error, jax.errors.UnexpectedTracerError) and _TRACED in text:
        return (
            f"{by} traces the function, so that arrays are lost which it keeps elsewhere than in "
            "its result, such as parameters that Haiku creates in it: return them, wrap "
            f"`transformed.apply` in place of a part of the model, or {as_it_is}."
        )
    is_unread = isinstance(error, _UNREAD)
    is_unread |= isinstance(error, TypeError) and _UNREAD_TEXT.search(text) is not None
    # JAX names the innermost function that it traces, which may be in a `jax.jit` of the user.
    is_ours = "while tracing the function" not in text or name in text
    if is_unread and is_ours and has_numbers:
        return (
            f"{by} traces the function to cast its operations, so that Python reads no number of "
            f"an array in it: {as_it_is}."
        )
    if type(error).__name__ == "TraceContextError" and has_numbers:  # of Flax
        return (
            f"{by} traces the function, which therefore cannot change an object of NNX from "
            "outside: pass the object as an argument, so that it gets its new state."
        )
    return ""
