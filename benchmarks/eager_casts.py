"""Times casts of whole trees outside of `jax.jit`, beside JMP and MPX, as JSON lines.

    python benchmarks/eager_casts.py --leaves 20 152 2000 20000

A tree of small float32 arrays of twelve shapes is cast to bfloat16 (`to_cast`) and to float32
(`already_right`). `first_ms` is the first call, with what it compiles; `later_ms` the median of
later calls, the libraries taking turns. MPX is mixed-precision-for-JAX of PyPI. `identity` is
`jax.tree.map` of a function that does nothing: no cast can be faster. Python's garbage
collection is off, as in timeit.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import mpx

import jmpx

SHAPES = [(4, 1 + size) for size in range(12)]
CASTS: dict[str, Callable[[Any, Any], Any]] = {
    "jmpx": jmpx.cast_tree,
    "jmp": lambda tree, dtype: jmp.Policy(dtype, dtype, dtype).cast_to_param(tree),
    "mpx": mpx.cast_tree,
    "identity": lambda tree, dtype: jax.tree.map(lambda leaf: leaf, tree),
}
TARGETS = {"to_cast": jnp.bfloat16, "already_right": jnp.float32}


def make_tree(leaves: int) -> dict[str, jax.Array]:
    return {f"layer_{i}": jnp.zeros(SHAPES[i % len(SHAPES)]) for i in range(leaves)}


def milliseconds(cast: Callable[[Any, Any], Any], tree: Any, dtype: Any) -> float:
    start = time.perf_counter()
    result = jax.block_until_ready(cast(tree, dtype))
    end = time.perf_counter()
    del result  # which takes time too
    return 1000 * (end - start)


def measure(leaves: int, case: str, rounds: int) -> list[dict[str, Any]]:
    """Times all libraries on one tree."""
    tree, dtype = make_tree(leaves), TARGETS[case]
    first, later = {}, {name: [] for name in CASTS}
    for name, cast in CASTS.items():
        jax.clear_caches()
        jax.block_until_ready(jnp.zeros(3) + 1)  # what is compiled once for everyone
        first[name] = milliseconds(cast, tree, dtype)
    for _ in range(rounds + 1):
        for name, cast in CASTS.items():
            later[name].append(milliseconds(cast, tree, dtype))
    return [
        {
            "benchmark": "eager_casts",
            "library": name,
            "leaves": leaves,
            "case": case,
            "first_ms": round(first[name], 2),
            "later_ms": round(statistics.median(later[name][1:]), 3),  # caches were cleared
            "backend": jax.default_backend(),
            "jax": jax.__version__,
        }
        for name in CASTS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--leaves", type=int, nargs="+", default=[20, 152, 2000, 20000])
    parser.add_argument("--rounds", type=int, default=7, help="later calls")
    arguments = parser.parse_args()
    gc.disable()
    for leaves in arguments.leaves:
        for case in TARGETS:
            for record in measure(leaves, case, arguments.rounds):
                print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
