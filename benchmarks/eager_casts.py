"""Times casts of whole trees outside of `jax.jit`, beside JMP and MPX.

    python benchmarks/eager_casts.py --again

A tree of small float32 arrays of twelve shapes is cast to bfloat16 (`to_cast`) and to float32
(`already_right`). `first_ms` is the first call, with what it compiles; `later_ms` the median of
later calls, the libraries taking turns. MPX is mixed-precision-for-JAX of PyPI. `identity` is
`jax.tree.map` of a function that does nothing: no cast can be faster. Python's garbage collection
is off, as in timeit.
"""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import mpx
import records

import jmpx

Cast = Callable[[Any, Any], Any]  # tree, dtype -> tree
CASTS: dict[str, Cast] = {
    "jmpx": jmpx.cast_tree,
    "jmp": lambda tree, dtype: jmp.Policy(dtype, dtype, dtype).cast_to_param(tree),
    "mpx": mpx.cast_tree,
    "identity": lambda tree, dtype: jax.tree.map(lambda leaf: leaf, tree),
}
CASES = {"to_cast": jnp.bfloat16, "already_right": jnp.float32}
ROUNDS = 7  # later calls


def milliseconds(cast: Cast, tree: Any, dtype: Any) -> float:
    start = time.perf_counter()
    result = jax.block_until_ready(cast(tree, dtype))
    end = time.perf_counter()
    del result  # which takes time too
    return 1000 * (end - start)


def measure(leaves: int, case: str, small: bool = False) -> list[records.Record]:
    """Times all libraries on one tree."""
    tree = {f"layer_{i}": jnp.zeros((4, 1 + i % 12)) for i in range(2 if small else leaves)}
    first, later = {}, {name: [] for name in CASTS}
    gc.disable()
    for name, cast in CASTS.items():
        jax.clear_caches()
        jax.block_until_ready(jnp.zeros(3) + 1)  # compiles what every library needs
        first[name] = round(milliseconds(cast, tree, CASES[case]), 2)
    for _ in range(ROUNDS + 1):
        for name, cast in CASTS.items():
            later[name].append(milliseconds(cast, tree, CASES[case]))
    gc.enable()
    medians = {name: round(statistics.median(times[1:]), 3) for name, times in later.items()}
    return [{"library": n, "first_ms": first[n], "later_ms": medians[n]} for n in CASTS]


POINTS = [{"leaves": leaves, "case": case} for leaves in (20, 152, 2000, 20000) for case in CASES]

if __name__ == "__main__":
    records.main(__doc__, {"eager_casts": (POINTS, measure)})
