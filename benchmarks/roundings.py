"""Counts which roundings to 16 bits that a program writes are in what compilers make of it.

    PYTHONPATH=DIR JAX_PLATFORMS=cpu python benchmarks/roundings.py  # DIR: see gpu_compile.py

Each function takes arrays of 16 bits or of float32, and returns float32, so that only roundings in
between count. On a CPU it runs: what a compiled function returns is what it returns operation by
operation, or is not. Of the programs for a TPU v5e and an H100, which run nowhere here, the
instructions are counted that give 16 bits, or reduce the precision. A TPU v5e has no float16.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import gpu
import jax
import jax.numpy as jnp
import numpy as np
import records
import tpu
from jax import lax

import jmpx
from jmpx._inspect.hlo.module import Module

RESULTS = records.RESULTS / "roundings.jsonl"
FLAG = {"xla_allow_excess_precision": False}
ROUNDING = re.compile("(convert|multiply|dot|convolution|custom-call)$")
LOW = ("bf16", "f16")
Function = Callable[..., jax.Array]
SIZE = 512


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    return (x @ w).astype(jnp.float32) * 3


def chain(x: jax.Array, w: jax.Array) -> jax.Array:
    return (x * w * x).astype(jnp.float32) * 3


def there_and_back(x: jax.Array, w: jax.Array) -> jax.Array:
    low, wide = x.dtype, x.astype(jnp.float32)
    return (wide * w.astype(jnp.float32)).astype(low).astype(jnp.float32) * 3


def norm(x: jax.Array, w: jax.Array) -> jax.Array:
    squares = jnp.mean((x * x).astype(jnp.float32), axis=-1, keepdims=True)
    return (x * lax.rsqrt(squares).astype(x.dtype)).astype(jnp.float32) * 3


def behind_barriers(x: jax.Array, w: jax.Array) -> jax.Array:
    h = lax.optimization_barrier(x * w)
    return lax.optimization_barrier(h * x).astype(jnp.float32) * 3


def reduced(x: jax.Array, w: jax.Array, wide: bool) -> jax.Array:
    """The cast and back, with a reduced precision before the cast, in float32, or behind it."""
    info, y = jnp.finfo(x.dtype), x.astype(jnp.float32) * w.astype(jnp.float32)
    y = y if wide else y.astype(x.dtype)
    low = lax.reduce_precision(y, info.nexp, info.nmant).astype(x.dtype)
    return low.astype(jnp.float32) * 3


# What each is called in the table, the function, how many roundings it writes, and XLA's options.
# An emulation rounds its two arguments, too, and so does not count other instructions of 16 bits.
EMULATED = ", emulated"
CASES: dict[str, tuple[Function, int, dict[str, Any]]] = {
    "a product, cast to float32": (product, 1, {}),
    "a chain of two elementwise operations": (chain, 2, {}),
    "a cast to 16 bits and back": (there_and_back, 1, {}),
    "an RMSNorm": (norm, 3, {}),
    "a product, with the flag": (product, 1, FLAG),
    "a chain, with the flag": (chain, 2, FLAG),
    "a cast and back, with the flag": (there_and_back, 1, FLAG),
    "an RMSNorm, with the flag": (norm, 3, FLAG),
    "a chain, behind `optimization_barrier`s": (behind_barriers, 2, {}),
    "a cast and back, `reduce_precision` on 16 bits": (partial(reduced, wide=False), 1, {}),
    "a cast and back, `reduce_precision` on float32": (partial(reduced, wide=True), 1, {}),
    f"a product{EMULATED}": (jmpx.inspect.emulate(product), 3, {}),
    f"a chain{EMULATED}": (jmpx.inspect.emulate(chain), 4, {}),
    f"a cast and back{EMULATED}": (jmpx.inspect.emulate(there_and_back), 3, {}),
    f"an RMSNorm{EMULATED}": (jmpx.inspect.emulate(norm), 4, {}),
}
CHIPS = [("CPU", "bfloat16"), ("CPU", "float16"), ("TPU v5e", "bfloat16")]
CHIPS += [("H100", "bfloat16"), ("H100", "float16")]


def measure(case: str, chip: str, dtype: str, small: bool = False) -> records.Record:
    """Compiles a function for a chip; `kept` is whether all of its roundings are there."""
    function, written, options = CASES[case]
    if chip == "CPU":
        return {"kept": runs_as_written(function, dtype, options)}
    tpus = chip == "TPU v5e"
    on, platform, more = (tpu.chip(), "tpu", {}) if tpus else (gpu.on(), "cuda", gpu.UNTUNED)
    shapes = [jax.ShapeDtypeStruct((SIZE, SIZE), dtype, sharding=on)] * 2
    lowered = jax.jit(function).trace(*shapes).lower(lowering_platforms=(platform,))
    hlo: Any = lowered.compile(options | more).as_text()
    return {"kept": roundings(hlo, case.endswith(EMULATED)) >= written}


def runs_as_written(function: Function, dtype: str, options: dict[str, Any]) -> bool:
    """Whether a compiled function returns what it returns operation by operation."""
    rng = np.random.default_rng(0)
    given = [jnp.asarray(rng.normal(size=(SIZE, SIZE)) / 16, dtype) for _ in range(2)]
    compiled = jax.jit(lambda *args: function(*args), compiler_options=options)(*given)
    with jax.disable_jit():
        expected = function(*given)
    return bool(jnp.all(compiled == expected))


def roundings(hlo: str, reductions: bool) -> int:
    """Counts the instructions that round to 16 bits, or only reductions of the precision."""
    return sum(
        one.kind == "reduce-precision"
        or (
            not reductions
            and one.types.lstrip("(").startswith(LOW)
            and bool(ROUNDING.match(one.kind))
        )
        for one in Module(hlo).instructions.values()
    )


POINTS = [{"case": case, "chip": chip, "dtype": dtype} for case in CASES for chip, dtype in CHIPS]


def table(found: list[records.Record]) -> str:
    lines = {(one["case"], one["chip"], one["dtype"]): one["kept"] for one in found}
    words = {True: "rounded", False: "**not rounded**"}
    rows = ((case, *(words[lines[case, *chip]] for chip in CHIPS)) for case in CASES)
    return records.table(("what is written", *map(", ".join, CHIPS)), rows)


if __name__ == "__main__":
    records.main(__doc__, {"roundings": (POINTS, measure)}, out=RESULTS)
