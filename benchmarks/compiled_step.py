"""Counts what each way of writing a mixed-precision train step compiles to, as JSON lines.

    python benchmarks/compiled_step.py --layers=12
    python benchmarks/compiled_step.py --layers=48 --timeout=600 --steps float16_cond jmpx_cond

The model is a vision transformer of 152 arrays in 12 layers (`models.py`), the optimizer Adam. Each
step is compiled in a process of its own, so that compile times are clean, with its state donated.
Counted are the instructions of the optimized HLO; the operations of its entry computation
(`entry_ops`), which are run one by one; copies and converts; what XLA says it reads and writes
(`bytes_accessed`) and holds besides arguments and results (`temp_bytes`); the seconds to trace and
lower, and those to compile: the smallest of `--rounds`, which take the steps in turns. Counts are
the same on every machine with one backend, one version of
JAX and one number of cores; times are not. A step that exceeds `--timeout` is reported as such.

Steps in float16, with a dynamic loss scale, that skip where gradients are not finite:

- float16_where, float16_cond: by hand, gradients checked as they arrive; the flag is an output.
- float16_where_late: by hand, gradients checked after they are unscaled, as all libraries do.
- jmp, mpx: as the users of JMP and of MPX (PyPI: mixed-precision-for-JAX) write it.
- jmpx_where, jmpx_cond: `filter_value_and_grad` and `optimizer_update`.
- jmpx_counting_where, jmpx_counting_cond: the same with an optimizer made by `skip_nonfinite`.
- jmpx_wrapped_where, jmpx_wrapped_cond: `skip_nonfinite` alone, with `optax.apply_updates`.
- jmpx_jmp_style: JMP's step with jmpx in its place.

Steps in bfloat16 that neither scale nor skip: bfloat16 (by hand), bfloat16_jmp, bfloat16_jmpx and
bfloat16_mpx, which scales and skips nevertheless. float32 is the step with nothing added.
"""

import argparse
import importlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from models import ViT

import jmpx

ADAM = optax.adam(1e-3)
START, PERIOD = 2.0**15, 2000


class Program(NamedTuple):
    """A train step `(params, opt_state, extra), images, labels -> state, loss`, and its extra."""

    train_step: Callable[..., Any]
    extra: Any
    optimizer: Any = ADAM


def cast(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def update(params: Any, opt_state: Any, grads: Any) -> tuple[Any, Any]:
    updates, opt_state = ADAM.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def plain(model: ViT, dtype: Any) -> Program:
    """The step that neither scales nor skips, by hand."""

    def loss_fn(params: Any, images: Any, labels: Any) -> Any:
        return model.loss(cast(params, dtype), cast(images, dtype), labels)

    def train_step(state: Any, images: Any, labels: Any) -> Any:
        params, opt_state, _ = state
        loss, grads = jax.value_and_grad(loss_fn)(params, images, labels)
        return (*update(params, opt_state, grads), None), loss

    return Program(train_step, None)


def unscaled(grads: Any, scale: Any) -> Any:
    return jax.tree.map(lambda g: g * (1 / scale), grads)


def where_late(grads: Any, scale: Any, params: Any, opt_state: Any) -> Any:
    return where_early(unscaled(grads, scale), jnp.float32(1), params, opt_state)


def where_early(grads: Any, scale: Any, params: Any, opt_state: Any) -> Any:
    finite = all_finite(grads)
    new = update(params, opt_state, unscaled(grads, scale))
    select = lambda a, b: jnp.where(finite, a, b)  # noqa: E731
    return finite, *jax.tree.map(select, new, (params, opt_state))


def cond(grads: Any, scale: Any, params: Any, opt_state: Any) -> Any:
    finite = all_finite(grads)
    new = jax.lax.cond(
        finite,
        lambda params, opt_state, grads: update(params, opt_state, unscaled(grads, scale)),
        lambda params, opt_state, grads: (params, opt_state),
        *(params, opt_state, grads),
    )
    return finite, *new


def all_finite(grads: Any) -> Any:
    return jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()


def by_hand(model: ViT, skip: Callable[..., Any]) -> Program:
    """The float16 step by hand; its state holds scale, counter and, as an output, the flag."""

    def scaled_loss(params: Any, scale: Any, images: Any, labels: Any) -> tuple[Any, Any]:
        loss = model.loss(cast(params, jnp.float16), cast(images, jnp.float16), labels)
        return loss * scale, loss

    def train_step(state: Any, images: Any, labels: Any) -> Any:
        params, opt_state, (scale, counter, _) = state
        grad_fn = jax.grad(scaled_loss, has_aux=True)
        grads, loss = grad_fn(params, scale, images, labels)
        finite, params, opt_state = skip(grads, scale, params, opt_state)
        due = counter == PERIOD - 1
        grown = jnp.where(due & jnp.isfinite(scale * 2), scale * 2, scale)
        scale = jnp.where(finite, grown, jnp.maximum(scale / 2, 1.0))
        counter = jnp.where(finite & ~due, counter + 1, 0)
        return (params, opt_state, (scale, counter, finite)), loss

    return Program(train_step, (jnp.float32(START), jnp.int32(0), jnp.array(True)))


def jmp_style(model: ViT, name: str, dtype: str) -> Program:
    """The step of JMP's users, with the library of that name."""
    jmp = importlib.import_module(name)
    policy = jmp.get_policy(f"params=float32,compute={dtype},output=float32")

    def scaled_loss(params: Any, loss_scale: Any, images: Any, labels: Any) -> tuple[Any, Any]:
        params, images = policy.cast_to_compute((params, images))
        loss = model.loss(params, images, labels)
        return loss_scale.scale(loss), loss

    def train_step(state: Any, images: Any, labels: Any) -> Any:
        params, opt_state, loss_scale = state
        grad_fn = jax.grad(scaled_loss, has_aux=True)
        grads, loss = grad_fn(params, loss_scale, images, labels)
        grads = loss_scale.unscale(grads)
        new = update(params, opt_state, grads)
        if dtype == "float16":
            finite = jmp.all_finite(grads)
            loss_scale = loss_scale.adjust(finite)
            new = jmp.select_tree(finite, new, (params, opt_state))
        return (*new, loss_scale), loss

    if dtype == "float16":
        return Program(train_step, jmp.DynamicLossScale(jnp.float32(START)))
    return Program(train_step, jmp.NoOpLossScale())


def mpx_style(model: ViT, dtype: Any, start: float) -> Program:
    """The step of MPX's users."""
    import mpx

    mpx.set_half_precision_datatype(dtype)

    def train_step(state: Any, images: Any, labels: Any) -> Any:
        params, opt_state, scaling = state
        grad_fn = mpx.filter_value_and_grad(model.loss, scaling)
        loss, scaling, finite, grads = grad_fn(params, images, labels)
        return (*mpx.optimizer_update(params, ADAM, opt_state, grads, finite), scaling), loss

    return Program(train_step, mpx.DynamicLossScaling(jnp.float32(start), jnp.float32(1)))


def jmpx_style(model: ViT, skip: Any, optimizer: Any = ADAM) -> Program:
    """The step of jmpx's users."""

    def train_step(state: Any, images: Any, labels: Any) -> Any:
        params, opt_state, scaling = state
        grad_fn = jmpx.filter_value_and_grad(model.loss, scaling, policy="compute=float16")
        loss, scaling, finite, grads = grad_fn(params, images, labels)
        new = jmpx.optimizer_update(params, optimizer, opt_state, grads, finite, skip=skip)
        return (*new, scaling), loss

    return Program(train_step, jmpx.DynamicLossScale(START), optimizer)


def jmpx_wrapped(model: ViT, skip: Any) -> Program:
    """The step of those who apply updates themselves."""
    optimizer = jmpx.skip_nonfinite(ADAM, skip=skip)

    def train_step(state: Any, images: Any, labels: Any) -> Any:
        params, opt_state, scaling = state
        grad_fn = jmpx.filter_value_and_grad(model.loss, scaling, policy="compute=float16")
        loss, scaling, finite, grads = grad_fn(params, images, labels)
        updates, opt_state = optimizer.update(grads, opt_state, params, grads_finite=finite)
        return (optax.apply_updates(params, updates), opt_state, scaling), loss

    return Program(train_step, jmpx.DynamicLossScale(START), optimizer)


def bfloat16_jmpx(model: ViT) -> Program:
    grad_fn = jmpx.filter_value_and_grad(
        model.loss, jmpx.NoOpLossScale(), policy="compute=bfloat16"
    )

    def train_step(state: Any, images: Any, labels: Any) -> Any:
        params, opt_state, _ = state
        loss, _, _, grads = grad_fn(params, images, labels)
        return (*update(params, opt_state, grads), None), loss

    return Program(train_step, None)


STEPS: dict[str, Callable[[ViT], Program]] = {
    "float32": lambda model: plain(model, jnp.float32),
    "float16_where": lambda model: by_hand(model, where_early),
    "float16_where_late": lambda model: by_hand(model, where_late),
    "float16_cond": lambda model: by_hand(model, cond),
    "jmp": lambda model: jmp_style(model, "jmp", "float16"),
    "mpx": lambda model: mpx_style(model, jnp.float16, START),
    "jmpx_where": lambda model: jmpx_style(model, "where"),
    "jmpx_cond": lambda model: jmpx_style(model, "cond"),
    "jmpx_counting_where": lambda model: jmpx_style(model, "where", jmpx.skip_nonfinite(ADAM)),
    "jmpx_counting_cond": lambda model: jmpx_style(model, "cond", jmpx.skip_nonfinite(ADAM)),
    "jmpx_wrapped_where": lambda model: jmpx_wrapped(model, "where"),
    "jmpx_wrapped_cond": lambda model: jmpx_wrapped(model, "cond"),
    "jmpx_jmp_style": lambda model: jmp_style(model, "jmpx", "float16"),
    "bfloat16": lambda model: plain(model, jnp.bfloat16),
    "bfloat16_jmp": lambda model: jmp_style(model, "jmp", "bfloat16"),
    "bfloat16_mpx": lambda model: mpx_style(model, jnp.bfloat16, 1.0),
    "bfloat16_jmpx": bfloat16_jmpx,
    "bfloat16_jmpx_jmp_style": lambda model: jmp_style(model, "jmpx", "bfloat16"),
}


def count(hlo: str) -> dict[str, int]:
    """Counts the instructions of an HLO module, given as text."""
    instruction = re.compile(r"^  +(?:ROOT )?\S+ = (?:\(.*?\)|\S+) ([\w-]+)\(", re.MULTILINE)
    names = instruction.findall(hlo)
    entry = hlo[hlo.index("\nENTRY ") :]
    return {
        "instructions": len(names),
        "entry_ops": len(instruction.findall(entry[: entry.index("\n}")])),
        "copies": names.count("copy"),
        "converts": names.count("convert"),
    }


def lower(program: Program, model: ViT, batch: int) -> Any:
    """Lowers a step, its state donated: as leaves, because JAX cannot lower JMP's loss scales."""
    params = model.init()
    state = params, program.optimizer.init(params), program.extra
    leaves, structure = jax.tree.flatten(state)

    def train_step(leaves: Any, images: Any, labels: Any) -> Any:
        return jax.tree.leaves(program.train_step(structure.unflatten(leaves), images, labels))

    return jax.jit(train_step, donate_argnums=0).lower(leaves, *model.batch(batch))


def counts(compiled: Any) -> dict[str, int]:
    """Returns all that is counted of a compiled step."""
    return {
        **count(compiled.as_text()),
        "bytes_accessed": int(compiled.cost_analysis()["bytes accessed"]),
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
    }


def measure(name: str, layers: int, batch: int) -> dict[str, Any]:
    """Compiles one step and returns what was counted and how long it took."""
    model = ViT(layers)
    program = STEPS[name](model)
    jax.block_until_ready(model.init())  # starts JAX
    start = time.perf_counter()
    lowered = lower(program, model, batch)
    traced = time.perf_counter()
    compiled = lowered.compile()
    seconds = {"trace_s": traced - start, "compile_s": time.perf_counter() - traced}
    return counts(compiled) | {name: round(value, 2) for name, value in seconds.items()}


def measure_in_process(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Does the same in a fresh process, and gives up after the timeout."""
    command = [sys.executable, __file__, "--in-process", f"--steps={name}"]
    command += [f"--layers={arguments.layers}", f"--batch={arguments.batch}"]
    try:
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=arguments.timeout)
    except subprocess.TimeoutExpired:
        return {"timed_out_after_s": arguments.timeout}
    if run.returncode:
        return {"failed_with": run.returncode}
    return json.loads(run.stdout.splitlines()[-1])


def faster(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Returns what was counted, with the smaller times of two rounds."""
    both = {"trace_s", "compile_s"} & a.keys() & b.keys()  # a step may have timed out
    return b | {key: min(a[key], b[key]) for key in both}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS), metavar="STEP")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=8, help="images in a batch")
    parser.add_argument("--rounds", type=int, default=1, help="how often each step is compiled")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that a step may take")
    parser.add_argument("--in-process", action="store_true", help="no process for each step")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    found: dict[str, dict[str, Any]] = {}
    for last in [*[False] * (arguments.rounds - 1), True]:
        for name in arguments.steps:
            if arguments.in_process:
                record = measure(name, arguments.layers, arguments.batch)
            else:
                record = measure_in_process(name, arguments)
            found[name] = record = faster(found.get(name, record), record)
            if last:
                which = {"benchmark": "compiled_step", "step": name, "layers": arguments.layers}
                version = {"backend": jax.default_backend(), "jax": jax.__version__}
                print(json.dumps(which | record | version), flush=True)


if __name__ == "__main__":
    main()
