"""Notes on errors that come of tracing: autocast traces a function, which other ways run as it is.

An array that a trace has left behind, as in a list, is an error where it is used later: far from
any call of jmpx. JAX's message names the function that it traced, so that name says what to do.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.core
import jax.numpy as jnp

from jmpx._base.leaves import PyTree
from jmpx._jaxprs import core
from jmpx._policies.frameworks import imported_adapters

# Of the errors in `core.UNREAD`, those that `jax.grad` alone raises, too.
_UNDERIVED = (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError)
# What is in the message of a TypeError for the same reason.
_UNREAD_TEXT = re.compile(r"Tracer\.__format__|Shapes must be .*Tracer")
_TRACED = "traced by jmpx's autocast"  # is in the name that JAX knows
_WAYS = "by=arguments or by=modules"


def traced_name(fn: Callable[..., PyTree]) -> str:
    """Returns the name by which JAX's errors are to call a function that autocast traces."""
    kept = f"return what it keeps, as in a list, or write {_WAYS}"
    return f"{getattr(fn, '__name__', type(fn).__name__)} ({_TRACED}: {kept})"


@contextlib.contextmanager
def tracing_explained(by: str, name: str) -> Iterator[None]:
    """Adds a note to an error that comes of tracing a function; JAX knows it by the name."""
    before = _held()
    around = [*core.enclosing_bodies(), *["vmap"] * core.in_vmap()]
    try:
        yield
        for key, array in _held().items():
            if key not in before:
                jnp.ravel(array)  # JAX raises its error, unless in a body, where it does later
    except Exception as error:
        note = _note(error, name, by, around)
        if note:
            error.add_note(note)
        raise


def _held() -> dict[int, jax.Array]:
    """Returns the traced arrays that frameworks keep for the functions around this one."""
    arrays = (array for adapter in imported_adapters() for array in adapter.held())
    return {id(array): array for array in arrays if isinstance(array, jax.core.Tracer)}


def _note(error: Exception, name: str, by: str, around: Sequence[str | None]) -> str:
    """Returns what to say of an error; empty if all ways have it.

    What is `around` the call are bodies that JAX traces or maps, without numbers, and derivatives.
    """
    text = str(error)
    use = "use jmpx.apply_policy with" if by == "jmpx.autocast" else "write"
    as_it_is = f"{use} {_WAYS}, which run the function as it is"
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
    is_unread = isinstance(error, core.UNREAD)
    is_unread |= isinstance(error, TypeError) and _UNREAD_TEXT.search(text) is not None
    # JAX names the innermost function that it traces, which may be in a `jax.jit` of the user.
    is_ours = "while tracing the function" not in text or name in text
    has_numbers = is_ours and {*around} <= {"derivative"}
    if is_unread and has_numbers:
        but = ", but for `float` and NumPy on what is differentiated"
        return (
            f"{by} traces the function to cast its operations, so that Python reads no number of "
            f"an array in it: {as_it_is}{but if around and type(error) in _UNDERIVED else ''}."
        )
    if type(error).__name__ == "TraceContextError" and has_numbers:  # of Flax
        return (
            f"{by} traces the function, which therefore cannot change an object of NNX from "
            "outside: pass the object as an argument, so that it gets its new state."
        )
    return ""
