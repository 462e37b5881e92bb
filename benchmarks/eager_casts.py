"""Times casts of whole trees outside of `jax.jit`, beside JMP and MPX, as lines of JSON.

    python benchmarks/eager_casts.py --leaves 20 152 2000 20000

A tree of small float32 arrays of twelve shapes is cast to bfloat16 (`to_cast`) and to float32
(`already_right`). `first_ms` is the first call, with what it compiles; `later_ms` the median of
later calls, the libraries taking turns. MPX is mixed-precision-for-JAX of PyPI. `identity` is
`jax.tree.map` of a function that does nothing: no cast can be faster. Python's garbage
collection is off, as in timeit.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import mpx
import records
from tqdm import tqdm

import jmpx

Cast = Callable[[Any, Any], Any]  # tree, dtype -> tree
CASTS: dict[str, Cast] = {
    "jmpx": jmpx.cast_tree,
    "jmp": lambda tree, dtype: jmp.Policy(dtype, dtype, dtype).cast_to_param(tree),
    "mpx": mpx.cast_tree,
    "identity": lambda tree, dtype: jax.tree.map(lambda leaf: leaf, tree),
}
CASES = {"to_cast": jnp.bfloat16, "already_right": jnp.float32}


def milliseconds(cast: Cast, tree: Any, dtype: Any) -> float:
    start = time.perf_counter()
    result = jax.block_until_ready(cast(tree, dtype))
    end = time.perf_counter()
    del result  # which takes time too
    return 1000 * (end - start)


def measure(leaves: int, case: str, rounds: int) -> Iterator[records.Record]:
    """Times all libraries on one tree."""
    tree = {f"layer_{i}": jnp.zeros((4, 1 + i % 12)) for i in range(leaves)}
    first, later = {}, {name: [] for name in CASTS}
    for name, cast in CASTS.items():
        jax.clear_caches()
        jax.block_until_ready(jnp.zeros(3) + 1)  # compiles what every library needs
        first[name] = milliseconds(cast, tree, CASES[case])
    for _ in range(rounds + 1):
        for name, cast in CASTS.items():
            later[name].append(milliseconds(cast, tree, CASES[case]))
    for name in CASTS:
        later_ms = round(statistics.median(later[name][1:]), 3)  # the first finds no caches
        yield {"library": name, "first_ms": round(first[name], 2), "later_ms": later_ms}


def main(arguments: list[str] | None = None) -> None:
    parser = records.parser(__doc__)
    parser.add_argument("--leaves", type=int, nargs="+", default=[20, 152, 2000, 20000])
    parser.add_argument("--rounds", type=int, default=7, help="later calls")
    args = parser.parse_args(arguments)
    gc.disable()
    for leaves in tqdm(args.leaves, unit="tree"):
        for case in CASES:
            for found in measure(leaves, case, args.rounds):
                records.emit("eager_casts", leaves=leaves, case=case, **found)


if __name__ == "__main__":
    main()
