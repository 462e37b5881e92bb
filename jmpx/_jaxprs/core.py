"""Jaxprs: trace a function, read its equations, run them again on other operands.

This is the only file that uses `jax.extend`.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jmpx._base.trees import PyTree, is_traceable
from jmpx._jaxprs import extend
from jmpx._jaxprs.extend import source_info_util as info
from jmpx._jaxprs.marks import (
    Array as Array,
    Atom as Atom,
    Aval as Aval,
    Equation as Equation,
    Jaxpr as Jaxpr,
    Params as Params,
    Primitive as Primitive,
    Scopes as Scopes,
    is_jaxpr,
    unmarked_stack,
)

V = TypeVar("V")

# Errors of Python code that reads the numbers of a traced array.
UNREAD = (
    jax.errors.ConcretizationTypeError,  # `if x > 0`, `float(x)`, `x.item()`
    jax.errors.TracerIntegerConversionError,
    jax.errors.TracerArrayConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


class Traced(NamedTuple):
    """A function as a jaxpr."""

    jaxpr: Jaxpr  # the closed jaxpr
    arrays: list[Array]  # the arrays among the arguments, in the order of the jaxpr's inputs
    # Makes the function's result out of the jaxpr's outputs.
    rebuild: Callable[[Sequence[object]], PyTree]


def trace(
    fn: Callable[..., PyTree],
    args: PyTree,
    kwargs: PyTree,
    is_array: Callable[[object], bool] = is_traceable,
    name: str = "on_arrays",
) -> Traced:
    """Traces `fn(*args, **kwargs)`; leaves that are not arrays go in and out as they are.

    JAX's errors refer to the function by `name`.
    """
    leaves, treedef = jax.tree.flatten((args, kwargs))
    indices = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
    kept: list[object] = []  # the leaves of the result, `_TRACED` in place of arrays
    out_treedef = treedef

    def on_arrays(*arrays: Array) -> list[Array]:  # made anew, because JAX caches by identity
        nonlocal out_treedef
        inputs = list(leaves)
        for i, array in zip(indices, arrays, strict=True):
            inputs[i] = array
        args, kwargs = jax.tree.unflatten(treedef, inputs)
        outputs, out_treedef = jax.tree.flatten(fn(*args, **kwargs))
        kept[:] = [_TRACED if is_traceable(output) else output for output in outputs]
        return [output for output in outputs if is_traceable(output)]

    on_arrays.__name__ = name
    arrays = [leaves[i] for i in indices]
    jaxpr = jax.make_jaxpr(on_arrays)(*arrays)
    arrays = [_as_traced(array, aval) for array, aval in zip(arrays, jaxpr.in_avals, strict=True)]

    def rebuild(outputs: Sequence[object]) -> PyTree:
        remaining = iter(outputs)
        merged = [next(remaining) if leaf is _TRACED else leaf for leaf in kept]
        return jax.tree.unflatten(out_treedef, merged)

    return Traced(jaxpr, arrays, rebuild)


_TRACED = object()  # stands for an array of the result


def _as_traced(array: Array, aval: Aval) -> Array:
    """Returns a NumPy array in the dtype that JAX traces it in: without x64, int64 is int32."""
    if not isinstance(array, np.ndarray | np.generic) or array.dtype == aval.dtype:
        return array
    return np.asarray(array, aval.dtype)


# The traces and transformations of JAX that are running.


def current_trace() -> object:
    """Returns an object that identifies the current trace, of one body of a jaxpr."""
    return _of_core("get_opaque_trace_state")()


@functools.cache
def _of_core(name: str) -> Callable[[], Any]:
    """Returns a function of traces; older JAX, as 0.7, has it in `jax.core`."""
    return getattr(extend.core, name, None) or getattr(jax.core, name)


# The traces of functions that are being differentiated.
_DERIVATIVES = ("JVPTrace", "LinearizeTrace")


def enclosing_bodies() -> list[str | None]:
    """Returns JAX's names of the transformations that trace a body here, the innermost first.

    A name is None if it is unknown. `jax.vmap` traces no body.
    """
    bodies = []
    for trace in _enclosing_traces():
        frame = getattr(trace, "frame", None)
        if frame is not None:
            bodies.append(getattr(getattr(frame, "debug_info", None), "traced_for", None))
        elif type(trace).__name__ in _DERIVATIVES:
            bodies.append("derivative")
    return bodies


def in_vmap() -> bool:
    """Whether `jax.vmap` maps a function here."""
    return any(type(trace).__name__ == "BatchTrace" for trace in _enclosing_traces())


def in_vmap_around() -> bool:
    """Whether `jax.vmap` maps a function here that is differentiated outside of it, if at all."""
    kinds = [type(trace).__name__ for trace in _enclosing_traces()]
    first = next((kind for kind in kinds if kind in ("BatchTrace", *_DERIVATIVES)), "")
    return first == "BatchTrace"


def _enclosing_traces() -> list[object]:
    """Returns the traces of JAX here, the innermost first."""
    traces = []
    with _of_core("take_current_trace")() as trace:
        while trace is not None:
            traces.append(trace)
            trace = getattr(trace, "parent_trace", None)
    return traces


def is_traced() -> bool:
    """Whether operations become equations of a jaxpr here, instead of being run one by one."""
    return any(body != "derivative" for body in enclosing_bodies())


def _makes_equations() -> bool:
    """Whether operations become equations here without being differentiated or batched first."""
    with _of_core("take_current_trace")() as trace:
        return hasattr(trace, "frame")


# Facts about jaxprs, operands and scopes.


def is_literal(atom: Atom) -> bool:
    """Whether an operand is a constant that is written into the jaxpr, its `val`."""
    return hasattr(atom, "val")


def is_floating(atom: Atom) -> bool:
    """Whether an operand or a result is an array of floating dtype."""
    return hasattr(atom.aval, "dtype") and jnp.issubdtype(atom.aval.dtype, jnp.floating)


def operation_name(primitive: str) -> str:
    """Returns a primitive's name as policy rules spell it: `scatter-add` is `scatter_add`."""
    return primitive.replace("-", "_")


def consts_of(jaxpr: Jaxpr) -> Sequence[Array]:
    """Returns the constants of a jaxpr; an open jaxpr, as in `jax.checkpoint`, has none."""
    return getattr(jaxpr, "consts", ())


def inner_jaxprs(params: Params) -> list[Jaxpr]:
    """Returns the jaxprs among the parameters of an equation, also in tuples."""
    values = params.values()  # Not a nested generator, which is slower: traces call this often.
    return [j for v in values for j in (v if isinstance(v, tuple) else (v,)) if is_jaxpr(j)]


def evaluate(
    jaxpr: Jaxpr, arrays: Sequence[Array], consts: Sequence[Array] | None = None
) -> list[Array]:
    """Runs a closed jaxpr, with the custom derivatives in it, on its constants or on others."""
    consts = consts_of(jaxpr) if consts is None else consts
    return jax.core.eval_jaxpr(getattr(jaxpr, "jaxpr", jaxpr), consts, *arrays)


def last_uses(jaxpr: Jaxpr) -> list[list[Atom]]:
    """Returns for each equation the variables that nothing reads after it."""
    seen = {atom for atom in jaxpr.outvars if not is_literal(atom)}
    uses = []
    for eqn in reversed(jaxpr.eqns):
        atoms = {atom for atom in (*eqn.invars, *eqn.outvars) if not is_literal(atom)} - seen
        seen |= atoms
        uses.append(list(atoms))
    return uses[::-1]


def reached(
    jaxpr: Jaxpr,
    operands: Sequence[Atom],
    begins: Callable[[Equation], bool] = lambda equation: False,
) -> set[Atom]:
    """Returns the variables that depend on these operands, or on an equation that `begins`."""
    found = set(operands)
    for eqn in jaxpr.eqns:
        if begins(eqn) or any(atom in found for atom in eqn.invars if not is_literal(atom)):
            found.update(eqn.outvars)
    return found


_WRAPPED = re.compile(r"[\w.]+\(|\)")


def scope_of(eqn: Equation) -> str:
    """Returns the scopes of an equation, with marks of modules, as a path.

    Names of transformations are left out: `transpose(jvp(enc))/mlp` becomes `enc/mlp`.
    """
    return _plain_scope(str(eqn.source_info.name_stack))


def scope_within(scope: str, eqn: Equation) -> str:
    """Returns the scope of an equation in an inner jaxpr, after the scope around that jaxpr."""
    inner = scope_of(eqn)
    return f"{scope}/{inner}" if scope and inner else scope or inner


@functools.lru_cache(maxsize=4096)
def _plain_scope(stack: str) -> str:
    return "/".join(filter(None, _WRAPPED.sub("", stack).split("/")))


def stack_of(eqn: Equation) -> Scopes:
    """Returns the scopes of an equation as JAX keeps them, without marks."""
    return unmarked_stack(eqn.source_info.name_stack).stack


def marked_stack_of(eqn: Equation) -> Scopes:
    """Returns `stack_of` an equation, with marks."""
    return eqn.source_info.name_stack.stack


def with_stack(eqn: Equation, scopes: Scopes) -> Equation:
    """Returns an equation in other scopes."""
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=info.NameStack(scopes)))


def with_scope(eqn: Equation, name: str) -> Equation:
    """Returns an equation within one more scope, the innermost one."""
    return with_stack(eqn, eqn.source_info.name_stack.extend(name).stack)


@contextlib.contextmanager
def within_scopes(scopes: Scopes) -> Iterator[None]:
    """Runs operations in more scopes, as `stack_of` returns them."""
    with info.set_name_stack(info.current_name_stack() + info.NameStack(scopes)):
        yield


@contextlib.contextmanager
def at_source_of(eqn: Equation, *scopes: str, depth: int = 0) -> Iterator[None]:
    """Runs operations at the line, in the context and in the scopes of an equation, and in more.

    The first `depth` scopes of the equation are around the operations already.
    """
    stack = info.current_name_stack() + info.NameStack(stack_of(eqn)[depth:])
    for scope in scopes:
        stack = stack.extend(scope)
    with info.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
        yield


# Running equations.


def looks_for_nans(operands: Sequence[Array]) -> bool:
    """Whether JAX checks each operation on arrays, not tracers, for NaNs or infinities."""
    is_asked = any(getattr(jax.config, f"jax_debug_{what}") for what in ("nans", "infs"))
    return is_asked and not any(isinstance(array, jax.core.Tracer) for array in operands)


def looks_for_leaks() -> bool:
    """Whether JAX looks for tracers that outlive their trace."""
    return getattr(jax.config, "jax_check_tracer_leaks")  # noqa: B009, unknown to pyright


def bind(
    eqn: Equation, operands: Sequence[Array], *, cached: bool = False, **params: object
) -> list[Array]:
    """Runs an equation on other operands, with `params` in place of its own.

    If `cached`, JAX may cache the primitive with its parameters as a jitted function. It cannot if
    there are effects, a jaxpr, or parameters without a hash.
    """
    params = {**eqn.params, **params}
    run = functools.partial(_bind, eqn.primitive, params)
    if cached and not eqn.effects and not inner_jaxprs(params) and not _makes_equations():
        with contextlib.suppress(TypeError):  # a parameter has no hash
            run = _jitted(eqn.primitive, tuple(params.items()))
    results = run(*operands)
    return list(results) if eqn.primitive.multiple_results else [results]


def _bind(primitive: Primitive, params: Params, *operands: Array) -> PyTree:
    bound = primitive.get_bind_params(params)
    # JAX 0.7 returns (functions, parameters), later versions one dictionary with both.
    functions, bound = bound if isinstance(bound, tuple) else ((), bound)
    return primitive.bind(*functions, *operands, **bound)


@functools.lru_cache(maxsize=4096)
def _jitted(primitive: Primitive, params: tuple[tuple[str, object], ...]) -> Callable[..., PyTree]:
    """Returns a primitive as jax.numpy would call it: jitted, and inlined into the jaxpr."""
    # JAX then differentiates it once for all equations of the same shapes, which makes tracing the
    # gradients of a deep model much faster.
    # Since JAX 0.12, True inlines when lowering, JAX_EARLY when tracing, as True did before.
    inline = getattr(getattr(jax, "Inline", None), "JAX_EARLY", True)
    return jax.jit(functools.partial(_bind, primitive, dict(params)), inline=inline)


def with_dtype(aval: Aval, dtype: np.dtype) -> Aval:
    """Returns an abstract value in another dtype, with its sharding and its varying axes."""
    return aval if aval.dtype == dtype else aval.update(dtype=np.dtype(dtype), weak_type=False)


def weakly_typed(array: Array) -> Array:
    """Returns the array with a weak type, as Python numbers have: other operands set its dtype."""
    return jax.lax.convert_element_type_p.bind(
        array, new_dtype=np.dtype(array.dtype), weak_type=True, sharding=None
    )


def scan_counts(eqn: Equation) -> tuple[int, int]:
    """Returns how many of a scan's operands are constants, and how many are carried."""
    return scan_counts_of(eqn.params)


def scan_counts_of(params: Params) -> tuple[int, int]:
    """Returns `scan_counts` of an equation with these parameters."""
    if "num_carry" in params:  # until JAX 0.11
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def in_shard_map(eqn: Equation, run: Callable[[], V]) -> V:
    """Runs a function inside of the mesh axes that a shard_map makes manual."""
    results: list[V] = []

    def body() -> tuple[()]:
        results.append(run())
        return ()

    mapped = jax.shard_map(
        body,
        mesh=eqn.params["mesh"],
        in_specs=(),
        out_specs=(),
        axis_names=manual_axes(eqn),
        check_vma=eqn.params["check_vma"],
    )
    jax.make_jaxpr(mapped)()
    return results[0]


def manual_axes(eqn: Equation) -> frozenset[str]:
    """Returns the names of the axes that a shard_map makes manual."""
    params = eqn.params  # JAX 0.7 calls them manual_axes
    return params["newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"]
