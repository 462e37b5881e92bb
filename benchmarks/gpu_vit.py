"""Step time and memory of vision transformers in mixed precision, as MPX's paper measures them.

    python benchmarks/gpu_vit.py --model=base --batches 32 64 128 256 --out=results.jsonl
    python benchmarks/gpu_vit.py --model=tiny --measure=time        # seconds, on any machine
    python benchmarks/plot_results.py results.jsonl --out=results.png

The models are the two of arXiv 2507.03312, ViT-Base and a desktop-sized one, and a tiny one to try
the program with, whose machine code is not optimized: its times mean nothing. Data are random, the
optimizer is AdamW, a step's state is donated.

dtypes: float32_highest is float32 with `jax_default_matmul_precision="highest"`; float32 is JAX's
default, which multiplies in TF32 on NVIDIA's GPUs; bfloat16 neither scales nor skips; float16 has a
dynamic loss scale and skips steps with non-finite gradients.

implementations: `handwritten` (skips with `where`) and `handwritten_cond`; `jmp` and `mpx` (PyPI:
mixed-precision-for-JAX) as their users write them; `jmpx` is `filter_value_and_grad` with
`optimizer_update`, as `jmpx_where` and `jmpx_cond` with that `skip=`; `autocast` runs the float32
model under `jmpx.autocast`, `autocast_saved` under `jax.checkpoint` with `save_low_precision`
besides. MPX always scales and skips, also in bfloat16. What is not installed is left out.

Each point is a line in `--out`; points that are there already are skipped, unless they failed (out
of memory is an answer, no failure). All steps of one batch size are timed in one process, in turns,
on one training state that goes round; lines of one such process share their date. Where a device
reports its peak of memory, each point takes a fresh process. It finds the program that the timing
compiled in JAX's compilation cache, and so neither compiles again nor counts what XLA allocates to
choose kernels. `compiled_bytes` is XLA's own count of arguments, results and temporaries together.
It stands in every line; `peak_bytes` is null where a device does not report it, as CPUs do not.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import datetime
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import jmpx

OPTIMIZER = optax.adamw(1e-4)
START, PERIOD = 2.0**15, 2000  # of the dynamic loss scale
SLICE_S = 0.02  # a step is timed for at least so long at a time
DTYPES = {
    "float32_highest": jnp.float32,
    "float32": jnp.float32,
    "bfloat16": jnp.bfloat16,
    "float16": jnp.float16,
}


# The model.


@dataclasses.dataclass(frozen=True)
class ViT:
    """The sizes of a vision transformer; its parameters are a nested dict."""

    width: int
    hidden: int
    blocks: int
    heads: int
    image: int
    patch: int
    classes: int
    batches: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return (self.image // self.patch) ** 2 + 1

    def init(self, seed: int = 0) -> dict[str, Any]:
        """Returns float32 parameters as NumPy arrays, so that a device holds nothing else."""
        rng = np.random.default_rng(seed)
        return {
            "embed": _linear(rng, 3 * self.patch**2, self.width),
            "class": _normal(rng, 1, self.width),
            "positions": _normal(rng, self.tokens, self.width),
            "blocks": [self._block(rng) for _ in range(self.blocks)],
            "norm": _norm(self.width),
            "head": _linear(rng, self.width, self.classes),
        }

    def _block(self, rng: np.random.Generator) -> dict[str, Any]:
        return {
            "norm1": _norm(self.width),
            "qkv": _linear(rng, self.width, 3 * self.width),
            "out": _linear(rng, self.width, self.width),
            "norm2": _norm(self.width),
            "up": _linear(rng, self.width, self.hidden),
            "down": _linear(rng, self.hidden, self.width),
        }

    def batch(self, size: int, seed: int = 1) -> tuple[jax.Array, jax.Array]:
        """Returns random images of shape (size, image, image, 3), and labels."""
        rng = np.random.default_rng(seed)
        images = rng.standard_normal((size, self.image, self.image, 3), np.float32)
        return jnp.array(images), jnp.array(rng.integers(self.classes, size=size), jnp.int32)

    def logits(self, params: Any, images: jax.Array) -> jax.Array:
        """Returns scores of shape (size, classes), in the dtype of parameters and images."""
        x = dense(params["embed"], self._patches(images))
        first = jnp.broadcast_to(params["class"], (len(x), 1, self.width))
        x = jnp.concatenate([first, x], axis=1) + params["positions"]
        for block in params["blocks"]:
            x = x + self._attention(block, layer_norm(block["norm1"], x))
            up = dense(block["up"], layer_norm(block["norm2"], x))
            x = x + dense(block["down"], jax.nn.gelu(up))
        return dense(params["head"], layer_norm(params["norm"], x[:, 0]))

    def _patches(self, images: jax.Array) -> jax.Array:
        side = self.image // self.patch
        x = images.reshape(len(images), side, self.patch, side, self.patch, 3)
        return x.swapaxes(2, 3).reshape(len(images), side**2, 3 * self.patch**2)

    def _attention(self, block: Any, x: jax.Array) -> jax.Array:
        shape = (len(x), self.tokens, 3, self.heads, self.width // self.heads)
        q, k, v = jnp.moveaxis(dense(block["qkv"], x).reshape(shape), 2, 0)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q * shape[-1] ** -0.5, k)
        weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(x.dtype)
        return dense(block["out"], jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape))

    def loss(self, params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(self.logits(params, images), labels)


MODELS = {
    "base": ViT(768, 3072, 12, 12, 224, 16, 1000, (16, 32, 64, 128, 256)),
    "desktop": ViT(256, 800, 12, 4, 32, 4, 100, (32, 64, 128, 256, 512)),
    "tiny": ViT(16, 32, 1, 2, 8, 4, 10, (8,)),
}
QUICK = {"xla_backend_optimization_level": 0}  # for the tiny one: it compiles in half the time


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return np.float32(0.02) * rng.standard_normal(shape, np.float32)


def _linear(rng: np.random.Generator, inputs: int, outputs: int) -> dict[str, np.ndarray]:
    return {"w": _normal(rng, inputs, outputs), "b": np.zeros(outputs, np.float32)}


def _norm(width: int) -> dict[str, np.ndarray]:
    return {"scale": np.ones(width, np.float32), "bias": np.zeros(width, np.float32)}


def dense(params: Any, x: jax.Array) -> jax.Array:
    return x @ params["w"] + params["b"]


def layer_norm(params: Any, x: jax.Array) -> jax.Array:
    """Normalizes in float32, as the paper's model does."""
    wide = x.astype(jnp.float32)
    centered = wide - wide.mean(axis=-1, keepdims=True)
    variance = jnp.square(centered).mean(axis=-1, keepdims=True)
    normal = (centered * jax.lax.rsqrt(variance + 1e-6)).astype(x.dtype)
    return normal * params["scale"] + params["bias"]


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean over the batch, in float32."""
    scores = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(scores, labels[:, None], axis=-1).mean()


# The train steps: run(state, extra, images, labels) -> (state, extra, loss), where state is
# (params, opt_state) for all of them, and extra what an implementation carries besides.


class Step(NamedTuple):
    run: Callable[..., Any]
    extra: Any


class Implementation(NamedTuple):
    make: Callable[[ViT, Any], Step]
    dtypes: tuple[str, ...]
    needs: str


LOW = ("bfloat16", "float16")
IMPLEMENTATIONS: dict[str, Implementation] = {}


def implementation(name: str, *dtypes: str, needs: str = "jax") -> Callable[[Any], Any]:
    """Enters a function that makes a step of a model in one of the dtypes."""

    def enter(make: Any) -> Any:
        IMPLEMENTATIONS[name] = Implementation(make, dtypes, needs)
        return make

    return enter


def take_step(state: Any, grads: Any) -> Any:
    params, opt_state = state
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def cast_by_hand(model: ViT, dtype: Any) -> Callable[..., jax.Array]:
    def loss_fn(params: Any, images: Any, labels: Any) -> jax.Array:
        params = jax.tree.map(lambda p: p.astype(dtype), params)
        return model.loss(params, images.astype(dtype), labels)

    return loss_fn


def unscaled_by_hand(loss_fn: Callable[..., jax.Array]) -> Step:
    def step(state: Any, extra: Any, images: Any, labels: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(state[0], images, labels)
        return take_step(state, grads), extra, loss

    return Step(step, ())


def scaled_by_hand(loss_fn: Callable[..., jax.Array], skip: Callable[..., Any]) -> Step:
    """A dynamic loss scale; the flag is an output, which keeps XLA from cloning its reduction."""

    def scaled_loss(params: Any, scale: Any, images: Any, labels: Any) -> Any:
        loss = loss_fn(params, images, labels)
        return loss * scale, loss

    def step(state: Any, extra: Any, images: Any, labels: Any) -> Any:
        scale, counter, _ = extra
        grad_fn = jax.grad(scaled_loss, has_aux=True)
        grads, loss = grad_fn(state[0], scale, images, labels)
        finite = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()

        def take(state: Any, grads: Any) -> Any:
            return take_step(state, jax.tree.map(lambda g: g * (1 / scale), grads))

        state = skip(finite, take, state, grads)
        due = counter == PERIOD - 1
        grown = jnp.where(due & jnp.isfinite(scale * 2), scale * 2, scale)
        scale = jnp.where(finite, grown, jnp.maximum(scale / 2, 1.0))
        counter = jnp.where(finite & ~due, counter + 1, 0)
        return state, (scale, counter, finite), loss

    return Step(step, (jnp.float32(START), jnp.int32(0), jnp.array(True)))


def skip_by_where(finite: Any, take: Any, state: Any, grads: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(finite, a, b), take(state, grads), state)


def skip_by_cond(finite: Any, take: Any, state: Any, grads: Any) -> Any:
    return jax.lax.cond(finite, take, lambda state, grads: state, state, grads)


@implementation("handwritten", *DTYPES)
def handwritten(model: ViT, dtype: Any) -> Step:
    loss_fn = cast_by_hand(model, dtype)
    if dtype == jnp.float16:
        return scaled_by_hand(loss_fn, skip_by_where)
    return unscaled_by_hand(loss_fn)


@implementation("handwritten_cond", "float16")
def handwritten_cond(model: ViT, dtype: Any) -> Step:
    return scaled_by_hand(cast_by_hand(model, dtype), skip_by_cond)


@implementation("jmp", *LOW, needs="jmp")
def with_jmp(model: ViT, dtype: Any) -> Step:
    import jmp

    policy = jmp.Policy(jnp.float32, dtype, jnp.float32)
    scaled = dtype == jnp.float16

    def scaled_loss(params: Any, loss_scale: Any, images: Any, labels: Any) -> Any:
        params, images = policy.cast_to_compute((params, images))
        loss = model.loss(params, images, labels)
        return loss_scale.scale(loss), loss

    def step(state: Any, extra: Any, images: Any, labels: Any) -> Any:
        # Made in the step, because `jit(...).lower` does not take JMP's own.
        loss_scale = jmp.DynamicLossScale(*extra, PERIOD) if scaled else jmp.NoOpLossScale()
        grad_fn = jax.grad(scaled_loss, has_aux=True)
        grads, loss = grad_fn(state[0], loss_scale, images, labels)
        grads = loss_scale.unscale(grads)
        new_state = take_step(state, grads)
        if not scaled:
            return new_state, extra, loss
        finite = jmp.all_finite(grads)
        loss_scale = loss_scale.adjust(finite)
        new_state = jmp.select_tree(finite, new_state, state)
        return new_state, (loss_scale.loss_scale, loss_scale.counter), loss

    return Step(step, (jnp.float32(START), jnp.int32(0)) if scaled else ())


@implementation("mpx", *LOW, needs="mpx")
def with_mpx(model: ViT, dtype: Any) -> Step:
    import mpx

    start = jnp.float32(START if dtype == jnp.float16 else 1)

    def step(state: Any, extra: Any, images: Any, labels: Any) -> Any:
        mpx.set_half_precision_datatype(dtype)  # global in MPX, read while tracing
        scale, counter = extra
        # Made in the step: its period and factor are numbers, which jit would make arrays.
        scaling = mpx.DynamicLossScaling(scale, jnp.float32(1), period=PERIOD, counter=counter)
        grad_fn = mpx.filter_value_and_grad(model.loss, scaling)
        loss, scaling, finite, grads = grad_fn(state[0], images, labels)
        state = mpx.optimizer_update(state[0], OPTIMIZER, state[1], grads, finite)
        return state, (scaling.loss_scaling, scaling.counter), loss

    return Step(step, (start, jnp.int32(0)))


def with_jmpx(loss_fn: Callable[..., Any], dtype: Any, policy: str, **options: Any) -> Step:
    """The step of jmpx's users: only float16 scales and skips."""
    scaled = dtype == jnp.float16

    def step(state: Any, scaling: Any, images: Any, labels: Any) -> Any:
        grad_fn = jmpx.filter_value_and_grad(loss_fn, scaling, policy=policy)
        loss, scaling, finite, grads = grad_fn(state[0], images, labels)
        if scaled:
            state = jmpx.optimizer_update(state[0], OPTIMIZER, state[1], grads, finite, **options)
        else:
            state = take_step(state, grads)
        return state, scaling, loss

    return Step(step, jmpx.DynamicLossScale(START) if scaled else jmpx.NoOpLossScale())


def compute_policy(dtype: Any) -> str:
    return f"compute={np.dtype(dtype).name}"


@implementation("jmpx", *LOW)
def jmpx_default(model: ViT, dtype: Any) -> Step:
    return with_jmpx(model.loss, dtype, compute_policy(dtype))


@implementation("jmpx_where", "float16")
def jmpx_where(model: ViT, dtype: Any) -> Step:
    return with_jmpx(model.loss, dtype, compute_policy(dtype), skip="where")


@implementation("jmpx_cond", "float16")
def jmpx_cond(model: ViT, dtype: Any) -> Step:
    return with_jmpx(model.loss, dtype, compute_policy(dtype), skip="cond")


def with_autocast(model: ViT, dtype: Any, wrap: Callable[..., Any] = lambda f: f) -> Step:
    """The float32 model; autocast does the casts, so the gradients' policy is `full`."""
    apply = wrap(jmpx.autocast(model.logits, compute_policy(dtype)))

    def loss_fn(params: Any, images: Any, labels: Any) -> jax.Array:
        return cross_entropy(apply(params, images), labels)

    return with_jmpx(loss_fn, dtype, "full")


@implementation("autocast", *LOW)
def autocast(model: ViT, dtype: Any) -> Step:
    return with_autocast(model, dtype)


@implementation("autocast_saved", *LOW)
def autocast_saved(model: ViT, dtype: Any) -> Step:
    return with_autocast(model, dtype, lambda f: jax.checkpoint(f, policy=jmpx.save_low_precision))


# Measuring, in the process that runs on the device.


class Point(NamedTuple):
    implementation: str
    dtype: str


class Failure(NamedTuple):
    message: str

    @property
    def fields(self) -> dict[str, str]:
        status = "oom" if "RESOURCE_EXHAUSTED" in self.message else "error"
        return {"status": status, "message": self.message.splitlines()[0][:300]}


class Program(NamedTuple):
    """A compiled step, and what its lines say of it."""

    run: Callable[..., Any]
    extra: Any
    fields: dict[str, Any]


def attempt(fn: Callable[..., Any], *args: Any) -> Any:
    """Returns the result, or how it failed: one step out of memory must not end the others."""
    try:
        return fn(*args)
    except Exception as error:
        return Failure(f"{type(error).__name__}: {error}")


def new_state(params: Any) -> Any:
    """Returns a training state on the device; donating it leaves the NumPy parameters alone."""
    params = jax.tree.map(jnp.array, params)
    return params, OPTIMIZER.init(params)


def trace(model: ViT, point: Point, state: Any, batch: Any) -> Any:
    """Returns a traced step, and what it carries."""
    step = IMPLEMENTATIONS[point.implementation].make(model, DTYPES[point.dtype])
    extra = jax.tree.map(jnp.array, step.extra)
    precision = "highest" if point.dtype == "float32_highest" else None
    with jax.default_matmul_precision(precision):
        return jax.jit(step.run, donate_argnums=(0, 1)).trace(state, extra, *batch), extra


def lower(model: ViT, point: Point, state: Any, batch: Any) -> Any:
    """Returns a step as XLA takes it, what it carries, and the seconds that took."""
    start = time.perf_counter()
    traced, extra = trace(model, point, state, batch)
    return traced.lower(), extra, time.perf_counter() - start


def compile_step(options: Any, lowered: Any, extra: Any, trace_s: float) -> Program:
    start = time.perf_counter()
    compiled = lowered.compile(options)
    fields = {"trace_s": trace_s, "compile_s": time.perf_counter() - start}
    return Program(compiled, extra, {**fields, **compiled_bytes(compiled)})


def compiled_bytes(compiled: Any) -> dict[str, Any]:
    """Returns what XLA plans to hold; a donated argument and its result are the same bytes."""
    memory = compiled.memory_analysis()
    kinds = ("temp", "argument", "output", "alias")
    found = {f"compiled_{k}_bytes": getattr(memory, f"{k}_size_in_bytes", None) for k in kinds}
    temp, argument, output, alias = found.values()
    whole = None if temp is None else temp + argument + output - alias
    return {"compiled_bytes": whole, **found}


class Bench:
    """Runs compiled steps on one training state, which goes from one to the next."""

    def __init__(self, model: ViT, batch: int, options: dict[str, Any]) -> None:
        self.model, self.options = model, options  # of the compiler
        self.params, self.batch = model.init(), model.batch(batch)
        self.state = new_state(self.params)

    def programs(self, points: Iterable[Point], threads: int = 1) -> dict[Point, Any]:
        """Traces one after the other (MPX's dtype is global), compiles side by side."""
        points = list(points)
        lowered = [attempt(lower, self.model, point, self.state, self.batch) for point in points]

        def finish(item: Any) -> Any:
            return item if isinstance(item, Failure) else attempt(compile_step, self.options, *item)

        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            return dict(zip(points, pool.map(finish, lowered), strict=True))

    def run(self, program: Program, steps: int) -> tuple[Program, float, float]:
        """Returns the program with what it carries now, seconds per step, and the last loss."""
        extra, loss = program.extra, None
        start = time.perf_counter()
        for _ in range(steps):
            self.state, extra, loss = program.run(self.state, extra, *self.batch)
        jax.block_until_ready((self.state, extra, loss))
        seconds = (time.perf_counter() - start) / steps
        return program._replace(extra=extra), seconds, float(loss)

    def try_run(self, program: Program, steps: int) -> Any:
        """As `run`, or a Failure; a step that failed has taken the donated state with it."""
        result = attempt(self.run, program, steps)
        if isinstance(result, Failure):
            self.state = None
            self.state = new_state(self.params)
        return result


@dataclasses.dataclass
class Contender:
    """A step that takes its turns."""

    point: Point
    program: Any  # a Program, or the Failure that it ended in
    steps: int = 1
    times: list[float] = dataclasses.field(default_factory=list)
    loss: float | None = None

    def turn(self, bench: Bench) -> None:
        if isinstance(self.program, Failure):
            return
        result = bench.try_run(self.program, self.steps)
        if isinstance(result, Failure):
            self.program = result
        else:
            self.program, seconds, self.loss = result
            self.times.append(seconds)

    def warm_up(self, bench: Bench) -> None:
        """Runs twice, and chooses how many steps make a turn long enough to time."""
        self.turn(bench)
        self.turn(bench)
        self.steps = math.ceil(SLICE_S / min([SLICE_S, *self.times[1:]]))
        self.times.clear()

    def record(self, batch: int) -> dict[str, Any]:
        record = outcome(self.point, self.program)
        if record["status"] == "ok":
            # Equal losses say that the steps train alike; null is one that is not finite.
            loss = self.loss if self.loss is not None and math.isfinite(self.loss) else None
            record |= timing(self.times, batch) | {"steps_a_turn": self.steps, "loss": loss}
        return record


def time_points(
    model: ViT,
    batch: int,
    points: Iterable[Point],
    rounds: int,
    threads: int = 1,
    options: dict[str, Any] = {},  # noqa: B006 (never written to)
    say: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Times all steps of one batch size in turns, and returns one record for each."""
    say("compiling")
    bench = Bench(model, batch, options)
    contenders = [Contender(*item) for item in bench.programs(points, threads).items()]
    for contender in contenders:
        say(f"warming up {' '.join(contender.point)}")
        contender.warm_up(bench)
    order = list(contenders)
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}")
        for contender in order:
            contender.turn(bench)
        order.append(order.pop(0))  # another one goes first in the next round
    return [contender.record(batch) for contender in contenders]


def outcome(point: Point, program: Any) -> dict[str, Any]:
    """Returns the fields that say what was measured and whether it went well."""
    record: dict[str, Any] = {"implementation": point.implementation, "dtype": point.dtype}
    if isinstance(program, Failure):
        return record | program.fields
    return record | {"status": "ok", **program.fields}


def timing(times: list[float], batch: int) -> dict[str, Any]:
    step = statistics.median(times)
    low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
    return {
        "step_ms": 1000 * step,
        "step_ms_quartiles": [1000 * low, 1000 * high],
        "step_ms_rounds": [round(1000 * seconds, 4) for seconds in times],
        "images_per_s": batch / step,
    }


def measure_memory(model: ViT, batch: int, point: Point, options: Any) -> dict[str, Any]:
    """Runs one step twice; the peak means something in a process that does nothing else."""
    bench = Bench(model, batch, options)
    program = bench.programs([point])[point]
    before = peak_bytes()
    if not isinstance(program, Failure):
        result = bench.try_run(program, 2)
        program = result if isinstance(result, Failure) else result[0]
    peak = peak_bytes()
    record = outcome(point, program)
    if record["status"] == "ok":
        record |= {
            "peak_bytes": peak,
            # True where compiling (XLA tries kernels out) took more than the step itself does.
            "peak_is_upper_bound": peak is not None and before == peak,
            "device_bytes": memory_stats().get("bytes_limit"),
        }
    return record


def memory_stats() -> dict[str, Any]:
    return jax.devices()[0].memory_stats() or {}  # None on CPUs


def peak_bytes() -> int | None:
    return memory_stats().get("peak_bytes_in_use")


def surroundings() -> dict[str, Any]:
    """Returns the fields of a line that say where and with what it was measured."""
    device = jax.devices()[0]
    cuda = re.search(r"cuda (\d+)", device.client.platform_version)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "platform": device.platform,
        "device_kind": device.device_kind,
        "cuda": int(cuda[1]) if cuda else None,
        "python": platform.python_version(),
        "versions": versions(),
    }


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"jmpx": jmpx.__version__}
    names = {"mpx": "mixed-precision-for-JAX"}
    for name in ("jax", "jaxlib", "optax", "jmp", "mpx"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(names.get(name, name))
    return {name: found.get(name) for name in ("jax", "jaxlib", "optax", "jmp", "mpx", "jmpx")}


# The plan: which points are missing, and which process measures which of them.


@dataclasses.dataclass(frozen=True)
class Job:
    """What a process is to measure: the points of one batch size, their times or their memory."""

    measure: str
    model: str
    batch: int
    points: tuple[Point, ...]
    rounds: int = 20
    threads: int = 1
    cache: str = ""

    def run(self, say: Callable[[str], None] = lambda text: None) -> list[dict[str, Any]]:
        """Measures, in this process, all points or the first few of them."""
        where = self.fields | surroundings()
        return [where | record for record in self._measure(MODELS[self.model], say)]

    @property
    def fields(self) -> dict[str, Any]:
        fields = {"benchmark": "gpu_vit", "measure": self.measure}
        return fields | {"model": self.model, "batch": self.batch}

    def _measure(self, model: ViT, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
        options = QUICK if self.model == "tiny" else {}
        if self.measure == "time":
            how = self.rounds, self.threads, options, say
            yield from time_points(model, self.batch, self.points, *how)
            return
        for point in self.points:
            say(" ".join(point))
            yield measure_memory(model, self.batch, point, options)
            if peak_bytes() is not None:
                return  # a peak never falls again: the next point takes a fresh process

    def failed(self, message: str) -> list[dict[str, Any]]:
        """Returns the records of a process that did not live to write any."""
        points = self.points if self.measure == "time" else self.points[:1]
        return [self.fields | outcome(point, Failure(message)) for point in points]

    def without(self, records: list[dict[str, Any]]) -> "Job":
        """Returns what is left to do."""
        done = {(r["implementation"], r["dtype"]) for r in records}
        return dataclasses.replace(self, points=tuple(p for p in self.points if p not in done))

    def __str__(self) -> str:
        return f"{self.model}, batch {self.batch}, {self.measure}"


def key(record: dict[str, Any]) -> tuple[Any, ...]:
    """Returns what makes two lines the same point."""
    return tuple(record[k] for k in ("measure", "model", "batch", "implementation", "dtype"))


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a file, of each point the last one."""
    lines = path.read_text().splitlines() if path.exists() else []
    return list({key(r): r for r in map(json.loads, filter(None, lines))}.values())


def choose(implementations: Iterable[str], dtypes: Iterable[str]) -> list[Point]:
    """Returns the pairs that exist and are installed."""
    chosen = []
    for name in implementations:
        entry = IMPLEMENTATIONS[name]
        if importlib.util.find_spec(entry.needs) is None:
            print(f"{name} is left out: {entry.needs} is not installed", file=sys.stderr)
            continue
        chosen += [Point(name, dtype) for dtype in dtypes if dtype in entry.dtypes]
    return chosen


def plan(args: argparse.Namespace, records: list[dict[str, Any]]) -> list[Job]:
    """Returns the jobs that are left to do: step times first, which fill the cache."""
    done = {key(r) for r in records if r["status"] != "error"}
    points = choose(args.implementations, args.dtypes)
    jobs = []
    for batch in args.batches or MODELS[args.model].batches:
        for measure in ("time", "memory") if args.measure == "both" else (args.measure,):
            missing = tuple(p for p in points if (measure, args.model, batch, *p) not in done)
            options = args.rounds, args.threads, args.cache
            jobs.append(Job(measure, args.model, batch, missing, *options))
    return [job for job in jobs if job.points]


# Running the plan: this process never touches the device, which its children need whole.


def in_child(job: Job, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Measures in a fresh process, and hands on what that process says in the meantime."""
    command = [sys.executable, __file__, f"--job={json.dumps(dataclasses.asdict(job))}"]
    with tempfile.TemporaryFile("w+") as log:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as child:
            records = list(messages(child.stdout or (), say))
        if not records:
            log.seek(0)
            last = (log.read().strip() or "no output").splitlines()[-1]
            return job.failed(f"exit status {child.returncode}: {last[:300]}")
    return records


def messages(lines: Iterable[str], say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if not line.startswith('{"'):
            continue  # a library that writes where it should not
        message = json.loads(line)
        if "say" in message:
            say(message["say"])
        else:
            yield message


def be_child(text: str) -> None:
    """Measures one job and prints its lines."""
    fields = json.loads(text)
    job = Job(**{**fields, "points": tuple(Point(*p) for p in fields["points"])})
    jax.config.update("jax_compilation_cache_dir", job.cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    for record in job.run(lambda text: print(json.dumps({"say": text}), flush=True)):
        print(json.dumps(record), flush=True)


COMPILE_GUESS_S = {"base": 15.0, "desktop": 10.0, "tiny": 1.0}  # replaced by what --out says
PROCESS_GUESS_S = 8.0  # to start, to find the device, to trace


def estimate(jobs: list[Job], records: list[dict[str, Any]], threads: int) -> str:
    """Says how the time of a run will be split, before it begins."""
    if not jobs:
        return "nothing left to measure"
    model = jobs[0].model
    known = [r["compile_s"] for r in records if r["model"] == model and r.get("compile_s", 0) > 1]
    each = statistics.median(known) if known else COMPILE_GUESS_S[model]
    points = {"time": 0, "memory": 0}
    for job in jobs:
        points[job.measure] += len(job.points)
    processes = points["memory"] + sum(job.measure == "time" for job in jobs)
    compiled = points["time"] / threads or points["memory"]  # memory alone has no cache to use
    return (
        f"{points['time']} step times and {points['memory']} memory points, of which each takes a "
        f"process where devices report a peak: about {compiled * each:.0f} s of compiling "
        f"({each:.1f} s a step, {'measured' if known else 'guessed'}), up to "
        f"{processes * PROCESS_GUESS_S:.0f} s of starting processes (guessed), and the steps"
    )


def run_jobs(jobs: list[Job], out: Path, budget: float) -> None:
    """Runs one process after the other, as long as the next one should fit into the budget."""
    begin = time.perf_counter()
    spent: dict[str, list[float]] = {"time": [], "memory": []}
    compiling, left = 0.0, list(jobs)
    with tqdm(total=sum(len(job.points) for job in jobs), unit="point") as bar, out.open("a") as f:
        while left:
            job, start = left[0], time.perf_counter()
            if start - begin + max(spent[job.measure], default=0.0) > budget:
                break
            bar.set_description(str(job))
            records = in_child(job, bar.set_postfix_str)
            f.writelines(json.dumps(record) + "\n" for record in records)
            f.flush()
            bar.update(len(records))
            spent[job.measure].append(time.perf_counter() - start)
            compiling += sum(r.get("compile_s", 0) for r in records)
            rest = job.without(records)
            left[:1] = [rest] if rest.points else []
    print(
        f"{sum(spent['time']):.0f} s for step times, {sum(spent['memory']):.0f} s for memory, of "
        f"both {compiling:.0f} s of compiling (over all threads); points left: "
        f"{sum(len(job.points) for job in left)}",
        file=sys.stderr,
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(MODELS), default="tiny")
    parser.add_argument("--batches", type=int, nargs="+", help="default: the model's own sweep")
    names, dtypes = list(IMPLEMENTATIONS), list(DTYPES)
    parser.add_argument("--implementations", nargs="+", choices=names, default=names)
    parser.add_argument("--dtypes", nargs="+", choices=dtypes, default=dtypes)
    parser.add_argument("--rounds", type=int, default=20, help="turns that each step is timed for")
    parser.add_argument("--measure", choices=["time", "memory", "both"], default="both")
    parser.add_argument("--out", type=Path, default=Path("results.jsonl"))
    parser.add_argument("--threads", type=int, default=1, help="steps compiled at a time")
    parser.add_argument("--cache", help="compilation cache to keep; default: of this run alone")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds to stop after")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    if args.job:
        be_child(args.job)
        return
    with tempfile.TemporaryDirectory() as cache:
        args.cache = os.path.abspath(args.cache or cache)
        records = read(args.out)
        jobs = plan(args, records)
        print(estimate(jobs, records, args.threads), file=sys.stderr)
        run_jobs(jobs, args.out, args.budget)


if __name__ == "__main__":
    main()
