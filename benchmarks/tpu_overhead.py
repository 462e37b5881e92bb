"""Counts what scaling, checking and skipping add to a train step on a TPU v5e that is not there.

    pip install -e '.[bench,tpu]'
    python benchmarks/tpu_overhead.py | tee benchmarks/results/tpu_overhead.jsonl

The model is a vision transformer of width 192 (`models.py`), the optimizer Adam, the step one of
`steps.py`, in bfloat16, in which a v5e computes, with the dynamic loss scale that float16 needs.
The state is donated. A line has the counts of `compiled_step.py`, the fusions, the conditionals and
the peak of memory. `plain` neither scales nor checks nor skips. The rows whose name ends with the
name of a form of `all_finite` check the gradients in that form.
"""

import functools
import importlib.util
import operator
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import compiled_step
import jax
import jax.numpy as jnp
import numpy as np
import records
import steps
from models import ViT
from tpu import devices
from tqdm import tqdm

from jmpx._steps import differentiation

PyTree = Any


def _flags(grads: PyTree) -> list[jax.Array]:
    return [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(grads)]


def by_stack(grads: PyTree, axes: object = None) -> jax.Array:
    """Reduces the flags of all arrays as bools, as most steps written by hand do."""
    return jnp.stack(_flags(grads)).all()


def by_chain(grads: PyTree, axes: object = None) -> jax.Array:
    """Joins the flags of all arrays one by one."""
    return functools.reduce(operator.and_, _flags(grads))


def by_sum(grads: PyTree, axes: object = None) -> jax.Array:
    """Sums numbers times zero, which is NaN where one is not finite."""
    return jnp.stack([(leaf * 0).sum() for leaf in jax.tree.leaves(grads)]).sum() == 0


FORMS = {"stack": by_stack, "chain": by_chain, "sum": by_sum}

_by_hand = functools.partial(steps.handwritten, scales=True)
_jmpx = functools.partial(steps.jmpx_style, scales=True)
WAYS: dict[str, Callable[..., steps.Step]] = {
    "plain": steps.handwritten,
    "handwritten where": _by_hand,
    "handwritten cond": functools.partial(_by_hand, skip=steps.by_cond),
    "jmpx": _jmpx,
    "jmpx where": functools.partial(_jmpx, skip_by="where"),
    "jmpx cond": functools.partial(_jmpx, skip_by="cond"),
    "jmpx counting": functools.partial(_jmpx, counting=True),
    "jmp": functools.partial(steps.jmp_style, library="jmp", scales=True),
    "mpx": functools.partial(steps.mpx_style, scales=True),
    **{f"jmpx {form}": _jmpx for form in FORMS},
}
INSTALLED = [way for way in WAYS if way not in steps.PEERS or importlib.util.find_spec(way)]


def lowered(way: str, layers: int, batch: int, platform: str, chip: Any = None) -> Any:
    """Lowers a step, whose state goes in and out as leaves, for a platform that may be absent."""
    rng, model = np.random.default_rng(0), ViT(layers)
    step = WAYS[way](model, "bfloat16", steps.ADAM)
    params = model.init(rng)
    leaves, structure = jax.tree.flatten((params, step.optimizer.init(params), step.scaling))

    def train_step(leaves: Sequence[jax.Array], *batch: jax.Array) -> Any:
        state, loss = step.run(structure.unflatten(leaves), *batch)
        return jax.tree.leaves(state), loss

    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=chip),
        (list(map(jnp.asarray, leaves)), *model.batch(rng, batch)),
    )
    form = FORMS.get(way.rpartition(" ")[2], differentiation.all_finite)
    with mock.patch.object(differentiation, "all_finite", form):
        traced = jax.jit(train_step, donate_argnums=0).trace(*arguments)
    return traced.lower(lowering_platforms=(platform,))


def measure(way: str, layers: int, batch: int) -> records.Record:
    """Compiles one step for one chip."""
    chip = jax.sharding.SingleDeviceSharding(devices()[0])
    step = lowered(way, layers, batch, "tpu", chip)
    start = time.process_time()
    compiled = step.compile()
    seconds = round(time.process_time() - start, 2)
    hlo = compiled.as_text()
    return {
        **compiled_step.counts(compiled),
        "fusions": hlo.count(" fusion("),
        "conditionals": hlo.count(" conditional("),
        "peak_bytes": compiled.memory_analysis().peak_memory_in_bytes,
        "compile_cpu_s": seconds,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = records.parser(__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--way", choices=WAYS, action="append", help="all, if none is named")
    args = parser.parse_args(arguments)
    target = {"target": devices()[0].device_kind, "libtpu": records.version("libtpu")}
    for way in tqdm(args.way or INSTALLED, unit="step"):
        found = measure(way, args.layers, args.batch)
        fields = {"way": way, "dtype": "bfloat16", "layers": args.layers, "batch": args.batch}
        records.emit("tpu_overhead", **fields, **found, **target)


if __name__ == "__main__":
    main()
