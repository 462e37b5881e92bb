"""Compiled functions of a program, shared by all programs that do the same."""

import contextvars
import functools
from collections.abc import Callable, Hashable
from typing import TypeVar

import jax

from jmpx._base.trees import ARRAYS, PyTree
from jmpx._inspect.watched import constants, is_opaque
from jmpx._jaxprs.inner import structure
from jmpx._jaxprs.marks import Array, Jaxpr

R = TypeVar("R")
# XLA may otherwise compute chains of 16-bit operations in float32, and an overflow disappears.
# The pass that is disabled makes two or three kernels of each reduction on a CPU, and a watched
# program has a reduction for each operation.
_AS_WRITTEN = {
    "xla_allow_excess_precision": False,
    "xla_disable_hlo_passes": "tree_reduction_rewriter",
}
# What runs once or twice is not worth optimizing: that would take half of the time to compile.
_ONCE = _AS_WRITTEN | {"xla_backend_optimization_level": 0}
# What a program traces when it runs for the first time, or in another context of JAX.
_traced: contextvars.ContextVar[Callable[..., PyTree]] = contextvars.ContextVar("_traced")


class Compiled:
    """The compiled functions of a jaxpr: those of its structure, with its constants as operands.

    So what was compiled for a step is found again if `jax.grad` or a lambda makes the step anew. It
    is kept for the structures that were used last, and holds no array of them.

    Args:
        jaxpr: the jaxpr.
        runs_often: whether the functions are optimized, because they run more than once or twice.
    """

    def __init__(self, jaxpr: Jaxpr, runs_often: bool = False) -> None:
        self.runs_often = runs_often
        self.consts = list(constants(jaxpr))
        self.own: dict[Hashable, Callable[..., PyTree]] = {}
        first: dict[int, int] = {}
        same = tuple(first.setdefault(id(const), i) for i, const in enumerate(self.consts))
        # A constant other than an array, such as a reference, stays in the jaxpr.
        is_alone = is_opaque(jaxpr) or not all(isinstance(c, ARRAYS) for c in self.consts)
        self.key = None if is_alone else _hashed((structure(jaxpr), same))

    def run(self, fn: Callable[..., R], arguments: tuple[PyTree, ...], *depends_on: Hashable) -> R:
        """Returns `fn(constant, *arguments)`, compiled.

        Args:
            fn: a function that evaluates the jaxpr; `constant` is what `watched.evaluate` takes.
            arguments: pytrees of arrays.
            *depends_on: what else decides what `fn` does.
        """

        def traced(arguments: tuple[PyTree, ...], consts: list[Array]) -> R:
            given = dict(zip(map(id, self.consts), consts, strict=True))
            return fn(lambda array: given.get(id(array), array), *arguments)

        if self.key is None:
            program = self.own.setdefault(depends_on, _new_program(self.runs_often))
        else:
            program = _program((self.key, depends_on), self.runs_often)
        before = _traced.set(traced)
        try:
            return program(arguments, self.consts)
        finally:
            _traced.reset(before)


def _new_program(runs_often: bool) -> Callable[..., PyTree]:
    options = _AS_WRITTEN if runs_often else _ONCE
    return jax.jit(lambda *args: _traced.get()(*args), compiler_options=options)


@functools.lru_cache(maxsize=16)
def _program(key: Hashable, runs_often: bool) -> Callable[..., PyTree]:
    """Returns the function of a structure, which refers to no jaxpr of it."""
    return _new_program(runs_often)


def _hashed(key: Hashable) -> Hashable | None:
    """Returns a key, or None if a parameter of an equation has no hash."""
    try:
        hash(key)
    except TypeError:
        return None
    return key
