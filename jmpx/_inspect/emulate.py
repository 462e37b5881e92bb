"""`emulate`: a function whose 16-bit results are rounded where the program writes them.

Compilers may keep more digits than a program says: XLA removes a cast to bfloat16 whose result is
cast back, and rounds neither inside of a fusion, nor a product that a fusion reads. Here each
equation runs as it was traced, and its 16-bit results are rounded in float32, which no compiler
removes.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.core
import numpy as np
from jax import lax

from jmpx._base.dtypes import SUMMED_IN_FLOAT32, DTypeLike, as_dtype, dtype_name
from jmpx._base.formats import E4M3, E5M2, rounded_to
from jmpx._base.messages import describe
from jmpx._base.stateful import Arguments, Changes, Keywords, Leaf, PureFunction, apply, call
from jmpx._base.trees import PyTree
from jmpx._inspect.watched import Watcher, unwatched
from jmpx._jaxprs import core
from jmpx._jaxprs.core import Array, Equation, Jaxpr, operation_name
from jmpx._jaxprs.equations import IDENTITIES, JOINS, PICKS, PLACEMENTS, RESHAPES

_Function = TypeVar("_Function", bound=Callable[..., PyTree])
LOW_DTYPES = ("bfloat16", "float16")
# The dtypes to which dot algorithms round operands of float32.
OPERAND_DTYPES = {algorithm: np.dtype(name) for name, algorithm in SUMMED_IN_FLOAT32.items()}
_TF32 = "TF32_TF32_F32"  # multiplies with ten bits of mantissa and the exponents of float32
# The results of these are 16-bit numbers if their operands are.
_EXACT = IDENTITIES | PLACEMENTS | RESHAPES | PICKS | JOINS
_EXACT |= set("select_n neg abs sign max min clamp floor ceil round sort".split())
_EXACT |= {"reduce_max", "reduce_min"}


def _rounded(array: Array, dtype: np.dtype | None) -> Array:
    """Returns an array rounded to a dtype, as float32; None stands for TF32.

    `lax.reduce_precision` of a 16-bit array is no operation, so compilers may remove it. Of a
    float32 array they may not.
    """
    wide = lax.convert_element_type(array, np.float32)
    if dtype is None:
        return lax.reduce_precision(wide, exponent_bits=8, mantissa_bits=10)
    return rounded_to(wide, dtype)


class Rounding:
    """Runs programs, and rounds the results of their equations to some dtypes, and to 8 bits."""

    def __init__(self, formats: Sequence[str]) -> None:
        self.dtypes = (*map(np.dtype, formats), E4M3, E5M2)

    def run(self, fn: Callable[..., PyTree], args: PyTree) -> PyTree:
        """Runs a function; its derivative is that of the original function, run in the same way."""
        traced = core.trace(fn, args, {})
        jaxpr, consts = traced.jaxpr, core.consts_of(traced.jaxpr)
        indices = [i for i, const in enumerate(consts) if isinstance(const, jax.core.Tracer)]
        count = len(indices)

        def given(arrays: Sequence[Array]) -> list[Array]:
            """Returns the constants of the jaxpr: traced ones are the first arrays."""
            known = dict(zip(indices, arrays[:count], strict=True))
            return [known.get(i, const) for i, const in enumerate(consts)]

        def as_traced(*arrays: Array) -> list[Array]:
            return core.evaluate(jaxpr, arrays[count:], given(arrays))

        @jax.custom_vjp
        def call(*arrays: Array) -> list[Array]:
            return self.evaluate(jaxpr, given(arrays), arrays[count:])

        # The program is differentiated before it is rounded, which keeps the rules of custom
        # functions. For higher derivatives, the two functions here are differentiated so, too.
        def forward(*arrays: Array) -> PyTree:
            return self.run(functools.partial(jax.vjp, as_traced), arrays)

        def backward(pullback: Callable[..., PyTree], cotangents: PyTree) -> PyTree:
            return self.run(lambda pullback, given: pullback(given), (pullback, cotangents))

        call.defvjp(forward, backward)
        return traced.rebuild(call(*(consts[i] for i in indices), *traced.arrays))

    def evaluate(
        self, jaxpr: Jaxpr, consts: Sequence[Array], arrays: Sequence[Array]
    ) -> list[Array]:
        """Runs a jaxpr with these constants, and rounds its inputs, too."""
        replaced = {id(old): new for old, new in zip(core.consts_of(jaxpr), consts, strict=True)}
        watcher = Watcher(
            run=self.equation,
            constant=lambda array: replaced.get(id(array), array),
            reduce=unwatched,
        )
        return watcher.evaluate(jaxpr, [*map(self.rounded, arrays)])[0]

    def rounded(self, array: Array) -> Array:
        """Returns an array, rounded if it has one of the dtypes; references stay."""
        is_reference = hasattr(getattr(array, "aval", None), "inner_aval")
        if is_reference or getattr(array, "dtype", None) not in self.dtypes:
            return array
        return lax.convert_element_type(_rounded(array, array.dtype), array.dtype)

    def equation(self, eqn: Equation, operands: list[Array]) -> list[Array]:
        """Runs an equation that holds no jaxpr."""
        algorithm = algorithm_of(eqn)
        to = OPERAND_DTYPES.get(algorithm)
        if algorithm == _TF32 or to in self.dtypes:
            # Products of float32 run on all chips; those with an algorithm do not.
            operands = [_rounded(array, to) for array in operands]
            results = core.bind(eqn, operands, precision=(lax.Precision.HIGHEST,) * 2)
        else:
            results = core.bind(eqn, operands)
        return results if is_exact(eqn) else [*map(self.rounded, results)]


def algorithm_of(eqn: Equation) -> str:
    """Returns the name of the algorithm that a product names; empty if it names none."""
    return getattr(eqn.params.get("precision"), "name", "")


def is_exact(eqn: Equation) -> bool:
    """Whether an equation of 16-bit operands gives 16-bit numbers without rounding."""
    return operation_name(eqn.primitive.name) in _EXACT


def emulate(func: _Function, formats: Sequence[DTypeLike] = LOW_DTYPES) -> _Function:
    """Makes a function round each result of 16 bits where the program writes it.

    XLA leaves out some of these roundings on CPUs, GPUs and TPUs, on each in different places.
    `xla_allow_excess_precision=False` forbids it, but does not prevent it everywhere. So the
    results of a 16-bit function depend on what is fused, and a measurement on one chip does not
    carry over to another. Here the rounding is part of the program, for all operations, forward
    and backward, in loops, branches, jitted functions and functions with custom derivatives, which
    keep their rules. The operands of matmuls with a dot algorithm (`matmul=BF16_BF16_F32`,
    `product=f32`) are rounded, too.

    A 16-bit result equals that of `jax.disable_jit()` to the bit, unless it depends on a float32
    value that a compiler may compute in another order: a sum, or a product and a sum in one. Then
    a few numbers differ in their last bit, and their readers by as much. Use it to measure: it
    is slower than the function that it emulates.

    Args:
        func: a function of pytrees, such as a loss, a train step or the `apply` of a model. It can
            be differentiated in reverse mode; forward mode raises JAX's error of `jax.custom_vjp`.
        formats: the dtypes to round: bfloat16, float16 or both.

    Returns:
        A function with the signature, results and dtypes of `func`. Put `jax.jit` around it.

    Raises:
        TypeError: if `func` is not callable, or a format is no dtype.
        ValueError: if a format is not of 16 bits.

    Example:
        >>> import jax, jax.numpy as jnp, jmpx
        >>> def f(x):
        ...     return (x * x).astype(jnp.float32) * 2
        >>> x = jnp.asarray(1.0078125, jnp.bfloat16)  # 1 + 2**-7
        >>> float(f(x)), float(jax.jit(jmpx.inspect.emulate(f))(x))  # not 2.0313721
        (2.03125, 2.03125)
    """
    if not callable(func):
        raise TypeError(f"Expected a function to emulate, got {describe(func)}: pass it itself.")
    if isinstance(formats, str):
        raise TypeError(f"Expected a list of formats, got {formats!r}: write [{formats!r}].")
    names = [dtype_name(as_dtype(each)) for each in formats]
    for name in names:
        if name not in LOW_DTYPES:
            raise ValueError(
                f"Cannot round to {name} where a program writes it: give formats of 16 bits, "
                "bfloat16 or float16."
            )
    rounding = Rounding(names)

    def transform(
        pure: PureFunction, state: list[Leaf], args: Arguments, kwargs: Keywords
    ) -> tuple[PyTree, Changes]:
        run = lambda state, args, kwargs: pure(state, *args, **kwargs)  # noqa: E731
        return rounding.run(run, (state, args, kwargs))

    @functools.wraps(func, updated=())
    def emulated(*args: PyTree, **kwargs: PyTree) -> PyTree:
        return call(transform, apply, (func, *args), kwargs)

    return emulated  # pyright: ignore[reportReturnType]
