"""Runs policies in eight threads at once, and holds that each thread sees its own dtypes only.

    python benchmarks/threads.py
    python benchmarks/threads.py --small

Each thread attaches its own policy to classes that all threads share, pushes another one, opens a
policy map of its own, and calls modules of Haiku, Linen, Equinox and NNX, autocast and a gradient
function: eagerly, through jitted functions that all threads share, and with shapes that no thread
has compiled before. A call tells the dtypes, the algorithm of products and the `current_policy()`
with which it was traced. Python changes threads every tenth of a millisecond. Warnings are errors.

At the end, new threads have no policy, modules compute as they were written, and the filters of
warnings are as they were.
"""

import contextlib
import os
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")  # to compile sooner

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import reliability
from flax import nnx
from tqdm import tqdm

import jmpx
import jmpx.equinox
import jmpx.flax
import jmpx.haiku

THREADS, COMPILE_EVERY = 8, 20
DTYPES = ("float32", "float16", "bfloat16")
MATMULS = (None, "high", "highest")

# Modules whose results tell how they were traced.


class Log(threading.local):
    """The policies that were current in the calls of modules that this thread traced."""

    def __init__(self) -> None:
        self.current: list[str] = []


_log = Log()


def traced_with(x: Any, w: Any) -> tuple[Any, Any]:
    """Returns a floating result, and an integer that tells what JAX traced it with."""
    _log.current.append(str(jmpx.current_policy()))
    config: Any = jax.config
    code = DTYPES.index(x.dtype.name) + 3 * DTYPES.index(w.dtype.name)
    code += 9 * MATMULS.index(config.jax_default_matmul_precision)
    return x * w, jnp.int32(code)


class Outer(hk.Module):
    def __call__(self, x: Any) -> Any:
        return traced_with(x, hk.get_parameter("w", (), jnp.float32, init=jnp.ones))


class LinenOuter(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return traced_with(x, self.param("w", lambda _: jnp.ones((), jnp.float32)))


class EquinoxOuter(eqx.Module):
    w: Any

    # Equinox warns of a class with both of these when the class is made.
    def __init__(self) -> None:
        self.w = jnp.ones((), jnp.float32)

    def __call__(self, x: Any) -> Any:
        return traced_with(x, self.w)


class NNXOuter(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.ones((), jnp.float32))

    def __call__(self, x: Any) -> Any:
        return traced_with(x, self.w[...])


class Plain:
    """A class of no framework."""


HAIKU = hk.transform(lambda x: Outer()(x))
PARAMS = {"outer": {"w": jnp.ones((), jnp.float32)}}
LINEN, EQUINOX, NNX = LinenOuter(), EquinoxOuter(), NNXOuter()
CLASSES = (Outer, LinenOuter, EquinoxOuter, NNXOuter, Plain)

Run = Callable[[Any, str | None], Any]  # an input, and the policy map of a view


def run_haiku(x: Any, text: str | None) -> Any:
    return HAIKU.apply(PARAMS, None, x)


def run_linen(x: Any, text: str | None) -> Any:
    return LINEN.apply({"params": {"w": jnp.ones((), jnp.float32)}}, x)


def run_equinox(x: Any, text: str | None) -> Any:
    return jmpx.equinox.with_policies(EQUINOX, text)(x)


def run_nnx(x: Any, text: str | None) -> Any:
    return jmpx.flax.with_policies(NNX, text)(x)


def run_gradient(x: Any, text: str | None) -> Any:
    def loss_fn(w: Any, x: Any) -> Any:
        y, code = shared_loss(w, x)
        return y.astype(jnp.float32).sum(), (code, y)

    scaling = jmpx.DynamicLossScale(2.0**10)
    grad_fn = jmpx.filter_value_and_grad(loss_fn, scaling, has_aux=True, policy=text or "full")
    (_, (code, y)), _, finite, grads = grad_fn(jnp.ones((), jnp.float32), x)
    if not isinstance(finite, jax.core.Tracer) and (not finite or grads.dtype != np.float32):
        raise ValueError(f"gradients in {grads.dtype}, finite: {finite}")
    return y, code


@jax.jit
def shared_loss(w: Any, x: Any) -> Any:
    return traced_with(x, w)


def run_autocast(x: Any, text: str | None) -> Any:
    y = jmpx.autocast(shared_product, text or "full", output=None)(EQUINOX, x, np.eye(2))
    return y, jnp.int32(-1)


@jax.jit
def shared_product(model: Any, x: Any, w: Any) -> Any:
    return x[:2] @ w.astype(x.dtype) * model.w


class Case(NamedTuple):
    """How a framework runs, and the contexts in which classes and maps have their policies."""

    run: Run
    cls: type
    opened: Callable[[str | None], AbstractContextManager[Any]]  # by a map, None for classes alone
    is_view: bool = False  # the map is given to `run`


def nothing(text: str | None) -> AbstractContextManager[Any]:
    return contextlib.nullcontext()


def haiku_map(text: str | None) -> AbstractContextManager[Any]:
    return nothing(text) if text is None else jmpx.haiku.policies(text)


FRAMEWORKS = {
    "haiku": Case(run_haiku, Outer, haiku_map),
    "linen": Case(run_linen, LinenOuter, jmpx.flax.policies),
    "equinox": Case(run_equinox, EquinoxOuter, nothing, is_view=True),
    "nnx": Case(run_nnx, NNXOuter, nothing, is_view=True),
}
FUNCTIONS = {"gradient": run_gradient, "autocast": run_autocast}
JITTED = {
    name: jax.jit(run, static_argnums=1)
    for name, run in [(n, case.run) for n, case in FRAMEWORKS.items()] + [*FUNCTIONS.items()]
}


# What a thread should see, and what it sees.


class Wanted(NamedTuple):
    """A policy of one thread: its compute dtype, output dtype and algorithm of products."""

    compute: str
    output: str
    matmul: str | None

    def __str__(self) -> str:
        matmul = "" if self.matmul is None else f",matmul={self.matmul}"
        return f"params=float32,compute={self.compute},output={self.output}{matmul}"

    @property
    def code(self) -> int:
        return 4 * DTYPES.index(self.compute) + 9 * MATMULS.index(self.matmul)


ALL = [
    Wanted(compute, output, matmul) for matmul in MATMULS for output in DTYPES for compute in DTYPES
]


class Thread:
    """One thread, its policies and what went wrong in it."""

    def __init__(self, number: int, rounds: int, barrier: threading.Barrier, bar: Any) -> None:
        self.own = [ALL[(number + 9 * i) % len(ALL)] for i in range(3)]  # attached, pushed, a map
        self.rounds, self.barrier, self.bar = rounds, barrier, bar
        self.failures: list[str] = []
        self.checks = 0

    def check(self, what: str, wanted: object, seen: object) -> None:
        self.checks += 1
        if wanted != seen and len(self.failures) < 10:
            self.failures.append(f"{what}: wanted {wanted}, saw {seen}")

    def call(self, name: str, mode: str, x: Any, text: str | None, wanted: Wanted) -> None:
        """Calls a framework or a function, and checks how it was traced."""
        _log.current.clear()
        case = FRAMEWORKS.get(name)
        run = FUNCTIONS[name] if case is None else case.run
        y, code = (JITTED[name] if mode != "eager" else run)(x, text)
        what = f"{name}, {mode}, {'by class' if text is None else 'by map'}"
        if case is None:  # the matmul of these is that of the regions in them
            dtype = wanted.compute
            if name == "gradient" and jnp.dtype(wanted.output).itemsize > jnp.dtype(dtype).itemsize:
                dtype = wanted.output  # results are widened to it
            seen = (y.dtype.name, int(code) % 9 if name == "gradient" else 0)
            self.check(what, (dtype, wanted.code % 9 if name == "gradient" else 0), seen)
            return
        self.check(what, (wanted.output, wanted.code), (y.dtype.name, int(code)))
        self.check(f"{what}, current policy", {str(wanted)} & {*_log.current}, {*_log.current})

    def frameworks(self, mode: str, x: Any, by_class: Wanted, by_map: Wanted) -> None:
        for name, case in FRAMEWORKS.items():
            with case.opened(None):
                self.call(name, mode, x, None, by_class)
            with case.opened(str(by_map)):
                self.call(name, mode, x, str(by_map) if case.is_view else None, by_map)

    def round(self, number: int) -> None:
        attached, pushed, mapped = self.own
        mode = ("eager", "jitted")[number % 2] if number % COMPILE_EVERY else "compiling"
        size = 2 if mode != "compiling" else 3 + number  # a shape that is new to all threads
        x = jnp.ones((size, 2), jnp.float32)
        self.frameworks(mode, x, attached, attached)
        with contextlib.ExitStack() as stack:
            for cls in CLASSES:
                stack.enter_context(jmpx.push_policy(cls, str(pushed)))
            for cls in CLASSES:
                self.check("policy_of, pushed", str(pushed), str(jmpx.policy_of(cls)))
            self.frameworks(mode, x, pushed, pushed)
        for name in FUNCTIONS:
            self.call(name, mode, x, str(mapped), mapped)
        for cls in CLASSES:
            self.check("policy_of", str(attached), str(jmpx.policy_of(cls)))
        for text in map(str, self.own):
            self.check("get_policy", text, str(jmpx.get_policy(text)))

    def run(self) -> None:
        try:
            for cls in CLASSES:
                self.check("policy_of, at the start", None, jmpx.policy_of(cls))
                jmpx.set_policy(cls, str(self.own[0]))
            for number in range(self.rounds):
                self.barrier.wait()
                self.round(number)
                self.bar.update()
        except Exception as error:
            self.failures.append(f"{type(error).__name__}: {error}")
            self.barrier.abort()


def in_a_thread(func: Callable[[], None]) -> None:
    thread = threading.Thread(target=func)
    thread.start()
    thread.join()


def run_all(rounds: int) -> tuple[int, list[str]]:
    """Runs the threads; returns how much was checked, and what was wrong."""
    filters, interval = list(warnings.filters), sys.getswitchinterval()
    barrier, bar = threading.Barrier(THREADS), tqdm(total=rounds * THREADS, unit="round")
    workers = [Thread(number, rounds, barrier, bar) for number in range(THREADS)]
    threads = [threading.Thread(target=worker.run) for worker in workers]
    sys.setswitchinterval(1e-4)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
        bar.close()
    last = Thread(0, 0, barrier, bar)
    in_a_thread(lambda: fresh(last))
    fresh(last)
    last.check("the filters of warnings", filters, list(warnings.filters))
    workers.append(last)
    failures = [failure for worker in workers for failure in worker.failures]
    return sum(worker.checks for worker in workers), list(dict.fromkeys(failures))


def fresh(last: Thread) -> None:
    """Holds that the thread has no policies, also in functions that other threads have compiled."""
    plain, x = Wanted("float32", "float32", None), jnp.ones((2, 2), jnp.float32)
    for cls in CLASSES:
        last.check("a fresh thread's policy_of", None, jmpx.policy_of(cls))
    last.check("a fresh thread's current_policy", None, jmpx.current_policy())
    for name, case in FRAMEWORKS.items():
        for run in (case.run, JITTED[name]):
            y, code = run(x, None)
            last.check(f"a fresh thread's {name}", (plain.output, plain.code), (y.dtype.name, code))


def main(arguments: list[str] | None = None) -> None:
    parser = reliability.parser(__doc__)
    parser.add_argument("--rounds", type=int)
    args = parser.parse_args(arguments)
    rounds = args.rounds or (3 if args.small else 400)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checks, failures = run_all(rounds)
    reliability.keep(
        args.out,
        "threads",
        "policies of Haiku, Linen, Equinox, NNX, autocast and gradients in 8 threads at once",
        times="{rounds} rounds a thread, {checks} checks",
        outcome="each thread saw its own dtypes only, eager, jitted and while compiling",
        figures={"rounds": rounds, "checks": checks},
        failures=failures,
        small=args.small,
    )
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
