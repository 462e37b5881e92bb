"""How watched programs run: their arrays, float32 in place of 16 bits, and compiled once."""

import contextlib
import contextvars
import functools
import math
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeAlias, TypeVar

import jax
import jax.core
import numpy as np
from jax import lax

from jmpx._autocast.kinds import keep
from jmpx._autocast.rules import lookup
from jmpx._base.dtypes import is_dtype
from jmpx._base.trees import ARRAYS, PyTree, is_floating_dtype
from jmpx._inspect.programs import Program
from jmpx._inspect.watched import constants, is_opaque
from jmpx._jaxprs import core
from jmpx._jaxprs.core import Array, Atom, Equation, Jaxpr, Params, operation_name
from jmpx._jaxprs.inner import structure
from jmpx._scales.kinds import DynamicLossScale

R = TypeVar("R")
Advance: TypeAlias = Callable[..., object]  # advances a bar by one; may get a line to write
_FLOAT32 = np.dtype(np.float32)
_ALGORITHMS = (lax.DotAlgorithm, lax.DotAlgorithmPreset)


def with_arrays(program: Program, caller: str) -> Program:
    """Returns the program; refuses arguments without values on behalf of a public function."""
    for name, array in zip(program.names, program.arrays, strict=True):
        if isinstance(array, jax.core.Tracer):
            raise TypeError(f"Cannot look at the traced {name}: call {caller} outside of jax.jit.")
        if not isinstance(array, jax.Array | np.ndarray | np.generic):
            raise TypeError(
                f"Expected arrays, got a shape as {name}: {caller} runs it, so pass arrays, "
                "or call jmpx.inspect.audit, which takes shapes."
            )
    return program


def scale_text(scale: float) -> str:
    """Returns the string of a dynamic loss scale that begins with this number."""
    return str(DynamicLossScale(scale, min_loss_scale=min(scale, 1.0)))


def norm(arrays: Sequence[Array]) -> float:
    """Returns the norm of all numbers of some arrays."""
    return math.sqrt(sum(float(np.sum(np.asarray(x, np.float64) ** 2)) for x in arrays))


def relative_error(results: Sequence[Array], exact: Sequence[Array]) -> float:
    """Returns the norm of the error of results, relative to the norm of the exact ones."""
    pairs = zip(results, exact, strict=True)
    error = norm([np.asarray(x, np.float64) - np.asarray(y, np.float64) for x, y in pairs])
    size = norm(exact)
    return error / size if size else math.inf if error else 0.0


_SHOWS_AFTER = 1.0  # seconds


@contextlib.contextmanager
def progress(what: str, total: int | None) -> Iterator[Advance]:
    """Yields a function that advances a bar by one; the total may be unknown.

    The bar shows after a second, also if it has not advanced, as in a long compile. Without tqdm,
    or where the standard error is no terminal, it is a line. A line, which the function may be
    given, is written at once.
    """
    bar = None
    if sys.stderr is not None and sys.stderr.isatty():
        with contextlib.suppress(ImportError):
            from tqdm import tqdm

            bar = tqdm(desc=what, total=total, leave=False, delay=2 * _SHOWS_AFTER)

    def show() -> None:
        if bar is None:
            print(f"{what} ...", file=sys.stderr, flush=True)
        else:
            bar.delay = 0  # it is there to be cleared
            bar.refresh()

    timer = threading.Timer(_SHOWS_AFTER, show)
    timer.daemon = True
    timer.start()

    def advance(line: str = "") -> None:
        if bar is not None:
            bar.update()
        if line:
            (print if bar is None else bar.write)(line, file=sys.stderr)

    try:
        yield advance
    finally:
        timer.cancel()
        if bar is not None:
            bar.close()


# --- float32 in place of 16 bits ---


def is_narrow(dtype: object, wide: np.dtype = _FLOAT32) -> bool:
    """Whether something is a floating dtype of fewer bits than a wide one."""
    return is_dtype(dtype) and is_floating_dtype(dtype) and np.dtype(dtype).itemsize < wide.itemsize


def widened(array: Array, wide: np.dtype = _FLOAT32) -> Array:
    """Returns an array in a wide dtype if its floating dtype has fewer bits."""
    if not is_narrow(getattr(array, "dtype", None), wide):
        return array
    if isinstance(array, np.ndarray | np.generic):
        return np.asarray(array, wide)
    return lax.convert_element_type(array, wide)


def run_widened(eqn: Equation, operands: Sequence[Array], wide: np.dtype = _FLOAT32) -> list[Array]:
    """Runs an equation that was traced in fewer bits in a wide dtype, on wide operands.

    If its result depends on the dtype, as in a bitcast, or its primitive is unknown, it runs as it
    was traced, and the results are widened. An equation without results, such as a print, does not
    run.
    """
    if not eqn.outvars:
        return []
    if not any(is_low(atom, wide) for atom in (*eqn.invars, *eqn.outvars)):
        return core.bind(eqn, operands)
    name = operation_name(eqn.primitive.name)
    if name == "convert_element_type" and is_narrow(eqn.params["new_dtype"], wide):
        dtype = operands[0].dtype
        is_wide = is_floating_dtype(dtype) and not is_narrow(dtype, wide)  # float64 stays float64
        return [operands[0] if is_wide else lax.convert_element_type(operands[0], wide)]
    if name.startswith("scatter"):  # it holds a jaxpr for the traced dtypes
        keys = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
        return [getattr(lax, name)(*operands, **{key: eqn.params[key] for key in keys})]
    entry = lookup(eqn)
    # A product that names an algorithm only takes operands of certain dtypes.
    has_algorithm = isinstance(eqn.params.get("precision"), _ALGORITHMS)
    if entry is None or entry.rule is keep or has_algorithm or core.inner_jaxprs(eqn.params):
        as_traced = [
            lax.convert_element_type(array, atom.aval.dtype) if is_low(atom, wide) else array
            for array, atom in zip(operands, eqn.invars, strict=True)
        ]
        return [widened(array, wide) for array in core.bind(eqn, as_traced)]
    params: Params = {key: wide for key, dtype in eqn.params.items() if is_narrow(dtype, wide)}
    return core.bind(eqn, operands, **params)


def is_low(atom: Atom, wide: np.dtype = _FLOAT32) -> bool:
    """Whether the dtype of an operand or a result is narrow."""
    return is_narrow(getattr(atom.aval, "dtype", None), wide)


# --- Compiled once for all programs of one structure ---

# Otherwise XLA may compute chains of 16-bit operations in float32, where overflows disappear. The
# disabled pass splits each reduction on a CPU into two or three kernels, and a watched program has
# a reduction for each operation.
_AS_WRITTEN = {
    "xla_allow_excess_precision": False,
    "xla_disable_hlo_passes": "tree_reduction_rewriter",
}
# Optimizing takes half of the compile time, which one or two runs do not repay.
_ONCE = _AS_WRITTEN | {"xla_backend_optimization_level": 0}
# The function that JAX traces when a compiled one runs first, or runs in another context of JAX.
_traced: contextvars.ContextVar[Callable[..., PyTree]] = contextvars.ContextVar("_traced")


class CompileCache:
    """Compiled functions of a jaxpr, kept by its structure, with its constants as operands.

    If a step is traced anew, as by `jax.grad` or as a lambda, its new jaxpr finds the compiled
    function. The structures that were used last are kept, without their arrays.

    Args:
        jaxpr: the jaxpr.
        runs_often: whether to optimize the functions, because they run more than once or twice.
        is_shared: whether other programs of one structure run in the same way.
    """

    def __init__(self, jaxpr: Jaxpr, runs_often: bool = False, is_shared: bool = True) -> None:
        self.runs_often = runs_often
        self.consts = list(constants(jaxpr))
        first: dict[int, int] = {}
        same = tuple(first.setdefault(id(const), i) for i, const in enumerate(self.consts))
        # Constants other than arrays, such as references, stay in the jaxpr.
        is_alone = not is_shared or is_opaque(jaxpr)
        is_alone |= not all(isinstance(c, ARRAYS) for c in self.consts)
        self.key: Hashable = object() if is_alone else (structure(jaxpr), same)
        try:
            hash(self.key)
        except TypeError:  # a parameter of an equation has no hash
            self.key = object()

    def run(self, fn: Callable[..., R], arguments: tuple[PyTree, ...], *depends_on: Hashable) -> R:
        """Returns `fn(constant, *arguments)`, compiled.

        Args:
            fn: a function that evaluates the jaxpr; `constant` is for `watched.Watcher`.
            arguments: pytrees of arrays.
            *depends_on: the values that `fn` closes over and depends on.
        """

        def traced(arguments: tuple[PyTree, ...], consts: list[Array]) -> R:
            given = dict(zip(map(id, self.consts), consts, strict=True))
            return fn(lambda array: given.get(id(array), array), *arguments)

        before = _traced.set(traced)
        try:
            return _program((self.key, depends_on), self.runs_often)(arguments, self.consts)
        finally:
            _traced.reset(before)


@functools.lru_cache(maxsize=16)
def _program(key: Hashable, runs_often: bool) -> Callable[..., PyTree]:
    """Returns the function of a structure, which refers to none of its jaxprs."""
    options = _AS_WRITTEN if runs_often else _ONCE
    return jax.jit(lambda *args: _traced.get()(*args), compiler_options=options)
