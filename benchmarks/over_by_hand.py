"""Compiles seven kinds of networks for an H100 and a TPU v5e, cast by hand and by a policy.

    pip install --no-deps --target=DIR $(python benchmarks/gpu.py) libtpu
    PYTHONPATH=DIR JAX_PLATFORMS=cpu python benchmarks/over_by_hand.py      # what is missing
    PYTHONPATH=DIR JAX_PLATFORMS=cpu python benchmarks/over_by_hand.py --only UNet H100

The networks are those of `architectures.py`; the optimizer is Adam; the state is donated. A line
has the fields of `gpu_compile.py` or of `tpu_compile.py`. The table has, over the program by hand,
the peak of memory and the compiler's estimate of the time: milliseconds of an H100, from which the
convolutions are missing, which are the same in all programs, and cycles of a v5e.
"""

import functools
from collections.abc import Callable
from typing import Any

import architectures
import gpu
import gpu_compile
import jax
import records
import steps
import tpu
import tpu_compile
from architectures import ARCHITECTURES, Params
from model_steps import LOW, shapes
from records import Record
from steps import Step

import jmpx

RESULTS = records.RESULTS / "over_by_hand.jsonl"
CARRY = "; op.scan: bf16"  # a scan hands bfloat16 on
POLICIES = ("c=bf16", f"c=bf16{CARRY}", "c=bf16,save=products", f"c=bf16,save=products{CARRY}")
POLICIES += ("c=bf16,save=products+mixed", f"c=bf16,save=products+mixed{CARRY}")
Loss = Callable[..., tuple[jax.Array, Any]]


def loss_of(model: Any) -> Loss:
    """Returns the loss with the averages that the model keeps, which are None of all but one."""
    if hasattr(model, "averages"):
        return model.loss
    return lambda params, averages, *batch: (model.loss(params, *batch), averages)


def by_hand(loss_fn: Loss) -> Loss:
    def low(params: Params, averages: Any, x: jax.Array, *rest: jax.Array) -> Any:
        inputs = steps.cast(x, LOW)  # tokens stay integers
        return loss_fn(architectures.cast(params, LOW), averages, inputs, *rest)

    return low


def policy(text: str) -> Callable[[Loss], Loss]:
    return lambda loss_fn: jmpx.apply_policy(loss_fn, text)


WAYS: dict[str, Callable[[Loss], Loss]] = {
    "by hand": by_hand,
    **{text: policy(text) for text in POLICIES},
}
CHIPS = {"H100": gpu.on, "v5e": tpu.chip}


def trace(chip: str, model: str, way: str, small: bool) -> Any:
    """Traces a step that donates its state, for one chip."""
    size, *networks = ARCHITECTURES[model]
    network, size = networks[small], 2 if small else size
    loss_fn = WAYS[way](loss_of(network))

    def run(state: Any, *batch: jax.Array) -> Any:
        params, opt_state, averages = state
        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, averages), grads = grad_fn(params, averages, *batch)
        return (*steps.update(steps.ADAM, grads, params, opt_state), averages), loss

    params, batch = shapes(network, size)
    averages = network.averages(params) if hasattr(network, "averages") else None
    state = params, jax.eval_shape(steps.ADAM.init, params), averages
    state, batch = tpu.described(
        (state, batch), jax.tree.map(lambda _: CHIPS[chip](), (state, batch))
    )
    return steps.traced(Step(run, (), steps.ADAM), state, batch, None).step


def measure(chip: str, model: str, way: str, small: bool = False) -> Record:
    make = functools.partial(trace, chip, model, way, small)
    return gpu_compile.compiled(make, chip) if chip == "H100" else tpu_compile.compiled(make)


def points() -> list[Record]:
    scans = lambda model, way: "scan" in way and "scan" not in model  # noqa: E731
    every = ((chip, model, way) for chip in CHIPS for model in ARCHITECTURES for way in WAYS)
    keys = "chip", "model", "way"
    return [dict(zip(keys, one, strict=True)) for one in every if not scans(*one[1:])]


main = functools.partial(records.main, __doc__, {"over_by_hand": (points(), measure)}, out=RESULTS)

if __name__ == "__main__":
    main()
