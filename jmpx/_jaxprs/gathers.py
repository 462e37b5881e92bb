"""Gathers of 16-bit numbers, whose gradients are summed in float32.

The gradient of a gather, such as a lookup in an embedding table, adds up the cotangents of equal
indices. In bfloat16 that sum stops at 256, because 256 + 1 is 256 there. `summed_in_float32` has
each gather widen its operand, pick in float32 and round the picked numbers. The result is the same
to the bit, the sum is in float32, and compilers fuse both casts with the gather.

The user's functions may branch on numbers, or keep arrays in lists, so jmpx cannot trace them first
and change their jaxprs. Instead, JAX's primitives `gather` and `scan` call this file each time they
run, whether a function runs eagerly or is traced.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import jax
import numpy as np
from jax import lax

from jmpx._base.contexts import fact, fact_set
from jmpx._base.trees import PyTree, is_floating_dtype
from jmpx._jaxprs.core import (
    Array,
    Aval,
    Equation,
    Jaxpr,
    enclosing_bodies,
    evaluate,
    scan_counts_of,
    with_dtype,
)
from jmpx._jaxprs.equations import IDENTITIES, PLACEMENTS, RESHAPES, ROUNDINGS
from jmpx._jaxprs.inner import inner_of, once_per_jaxpr, walk
from jmpx._jaxprs.marks import Params, Primitive

Bind = Callable[..., PyTree]
Sources = frozenset[int]  # the indices of a jaxpr's operands whose numbers an array has

_TOPIC = "sums of gathers"
_FLOAT32 = np.dtype(np.float32)
_KEEPING = IDENTITIES | PLACEMENTS | RESHAPES | ROUNDINGS


def summed_in_float32(is_on: bool = True) -> AbstractContextManager[None]:
    """Sums the gradients of gathers in this thread in float32, or as JAX does."""
    is_set = fact(_TOPIC) is not None
    return contextlib.nullcontext() if is_set == is_on else fact_set(_TOPIC, is_on or None)


def _is_narrow(aval: Array | Aval) -> bool:
    dtype = getattr(aval, "dtype", None)  # tokens have none, and keys one that is not NumPy's
    return isinstance(dtype, np.dtype) and is_floating_dtype(dtype) and dtype.itemsize < 4


def _gather(bind: Bind, operand: Array, indices: Array, **params: PyTree) -> Array:
    if not _is_narrow(operand) or _picks_once(indices, params) or _is_in_kernel():
        return bind(operand, indices, **params)
    rows = bind(lax.convert_element_type(operand, _FLOAT32), indices, **params)
    return lax.convert_element_type(rows, operand.dtype)


def _is_in_kernel() -> bool:
    """Whether a Pallas kernel is traced: JAX does not differentiate its gathers."""
    return any((name or "").startswith("pallas_call") for name in enclosing_bodies())


def _picks_once(indices: Array, params: Params) -> bool:
    """Whether no two indices of a gather can be equal, so that its gradient sums nothing."""
    batching = params["dimension_numbers"].start_indices_batching_dims
    sizes = [size for axis, size in enumerate(indices.shape[:-1]) if axis not in batching]
    return params["unique_indices"] or math.prod(sizes) <= 1


def _scan(bind: Bind, *operands: Array, **params: PyTree) -> list[Array]:
    """Runs a scan that gets its tables in float32: it sums their gradients over its trips."""
    jaxpr, (consts, _) = params["jaxpr"], scan_counts_of(params)
    tables = _tables(jaxpr, consts)
    if not tables:
        return bind(*operands, **params)
    arrays = [
        lax.convert_element_type(array, _FLOAT32) if i in tables else array
        for i, array in enumerate(operands)
    ]
    return bind(*arrays, **{**params, "jaxpr": _taking_float32(jaxpr, tables)})


@once_per_jaxpr
def _tables(jaxpr: Jaxpr, consts: int) -> Sources:
    """Returns the constants of a scan, of less than 32 bits, from which each trip picks rows."""
    found = set[int]()

    def follow(jaxpr: Jaxpr, operands: Sequence[Sources]) -> list[Sources]:
        return walk(jaxpr, operands, step, lambda var, constant: frozenset())

    def step(eqn: Equation, inputs: Sequence[Sources]) -> Sequence[Sources]:
        if eqn.primitive.name in ("dynamic_slice", "gather"):
            found.update(inputs[0])
        inner = inner_of(eqn)
        if inner is not None:
            results = [follow(each, inputs[inner.first :]) for each in inner.jaxprs]
            return [frozenset().union(*each) for each in zip(*results, strict=True)]
        keeps = eqn.primitive.name in _KEEPING
        return [inputs[0] if keeps else frozenset()] * len(eqn.outvars)

    narrow = [i < consts and _is_narrow(var.aval) for i, var in enumerate(jaxpr.invars)]
    if any(narrow):
        follow(jaxpr, [frozenset({i} if each else ()) for i, each in enumerate(narrow)])
    return frozenset(found)


@once_per_jaxpr
def _taking_float32(jaxpr: Jaxpr, operands: Sources) -> Jaxpr:
    """Returns a jaxpr that takes some operands in float32, and rounds them at its beginning."""
    avals = [var.aval for var in jaxpr.invars]
    dtypes = {i: avals[i].dtype for i in operands}

    def run(*arrays: Array) -> list[Array]:
        narrow = {i: lax.convert_element_type(arrays[i], dtypes[i]) for i in dtypes}
        return evaluate(jaxpr, [narrow.get(i, array) for i, array in enumerate(arrays)])

    return jax.make_jaxpr(run)(
        *(with_dtype(aval, _FLOAT32) if i in operands else aval for i, aval in enumerate(avals))
    )


def _have_run(primitive: Primitive, run: Callable[..., PyTree]) -> None:
    """Makes a primitive call `run(bind, *operands, **params)` under `summed_in_float32`."""
    bind = primitive.bind

    @functools.wraps(bind)
    def look(*operands: Array, **params: PyTree) -> PyTree:
        if fact(_TOPIC) is None:
            return bind(*operands, **params)
        return run(bind, *operands, **params)

    primitive.bind = look


_have_run(lax.gather_p, _gather)
_have_run(lax.scan_p, _scan)
