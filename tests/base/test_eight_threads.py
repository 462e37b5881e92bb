"""Eight threads share classes and jitted functions, and have policies and contexts of their own.

In the first test, each of eight threads attaches its own policy to classes that all threads share,
pushes another one, opens a policy map of its own, and calls modules of Haiku, Linen, Equinox and
NNX, autocast and a gradient function, through jitted functions that all threads share, with a shape
that no thread has compiled before. A call reports the dtypes, the algorithm of products and the
`current_policy()` with which it was traced. Python changes threads every tenth of a millisecond. At
the end, new threads have no policy, modules compute as they were written, and the filters of
warnings are as they were.
"""

import contextlib
import itertools
import sys
import threading
import warnings
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import zoo
from jax.experimental.compilation_cache import compilation_cache

import jmpx
import jmpx.equinox
import jmpx.flax
import jmpx.haiku

THREADS = 8
DTYPES = ("float32", "float16", "bfloat16")
MATMULS = (None, "high", "highest")
ONE, X = jnp.ones((), jnp.float32), jnp.ones((2, 2), jnp.float32)


def together(*calls, count=1):
    """Runs functions in threads of their own, each `count` times, all at once."""
    barrier, results = threading.Barrier(count * len(calls)), []

    def run(call):
        barrier.wait()
        results.append(call())

    threads = [threading.Thread(target=run, args=(call,)) for call in calls * count]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == len(threads)
    return results


@contextlib.contextmanager
def switching_every(seconds):
    interval = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


# Modules whose results tell how they were traced.


_log = threading.local()  # the policies that were current in the calls that this thread traced


def traced_with(x: Any, w: Any) -> tuple[Any, Any]:
    """Returns a floating result, and an integer that encodes the dtypes and the precision."""
    getattr(_log, "current", []).append(str(jmpx.current_policy()))
    config: Any = jax.config
    code = DTYPES.index(x.dtype.name) + 3 * DTYPES.index(w.dtype.name)
    code += 9 * MATMULS.index(config.jax_default_matmul_precision)
    return x * w, jnp.int32(code)


class Plain:
    """A class of no framework."""


NETS = {f: zoo.build(f, lambda m, x: traced_with(x, m.param("w")), X) for f in zoo.FRAMEWORKS}
EQUINOX = NETS["equinox"].model
CLASSES = (zoo.HaikuNet, zoo.LinenNet, type(EQUINOX), zoo.NNXNet, Plain)


@jax.jit
def shared_loss(w: Any, x: Any) -> Any:
    return traced_with(x, w)


@jax.jit
def shared_product(model: Any, x: Any, w: Any) -> Any:
    return x[:2] @ w.astype(x.dtype) * model.w


def run_gradient(x: Any, text: str) -> Any:
    def loss_fn(w: Any, x: Any) -> Any:
        y, code = shared_loss(w, x)
        return y.astype(jnp.float32).sum(), (code, y)

    scaling = jmpx.DynamicLossScale(2.0**10)
    grad_fn = jmpx.value_and_grad(loss_fn, scaling, has_aux=True, policy=f"by=arguments,{text}")
    (_, (code, y)), *_ = grad_fn(ONE, x)
    return y, code


def run_autocast(x: Any, text: str) -> Any:
    y = jmpx.autocast(shared_product, text, output=None)(EQUINOX, x, np.eye(2))
    return y, jnp.int32(-1)


# Functions of an input and the map of a view, and the contexts that open a map for the others.
MODULES = {
    "haiku": lambda x, text: NETS["haiku"].apply(NETS["haiku"].model, x),
    "linen": lambda x, text: NETS["linen"].apply(NETS["linen"].model, x),
    "equinox": lambda x, text: jmpx.equinox.with_policies(EQUINOX, text)(x),
    "nnx": lambda x, text: jmpx.flax.with_policies(NETS["nnx"].model, text)(x),
}
OPENED = {
    "haiku": lambda text: jmpx.haiku.policies(text) if text else contextlib.nullcontext(),
    "linen": jmpx.flax.policies,
}
FUNCTIONS = {"gradient": run_gradient, "autocast": run_autocast}
JITTED = {n: jax.jit(run, static_argnums=1) for n, run in (MODULES | FUNCTIONS).items()}


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


ALL = [Wanted(c, o, matmul) for matmul in MATMULS for o in DTYPES for c in DTYPES]


class Thread:
    """One thread, its policies and what went wrong in it."""

    def __init__(self, number):
        self.own = [ALL[(number + 9 * i) % len(ALL)] for i in range(3)]  # attached, pushed, a map
        self.failures = []

    def check(self, what, wanted, seen):
        if wanted != seen and len(self.failures) < 10:
            self.failures.append(f"{what}: wanted {wanted}, saw {seen}")

    def check_classes(self, what, wanted):
        for cls in CLASSES:
            policy = jmpx.policy_of(cls)
            self.check(f"policy_of {what}", wanted, None if policy is None else str(policy))

    def call(self, func, x, text):
        """Returns what a call was traced with: the dtype of its result, and its code."""
        _log.current = []
        y, code = func(x, text)
        return y.dtype.name, int(code)

    def modules(self, x, wanted):
        """Calls each framework under the policies of classes, and under those of a map."""
        for name, text in itertools.product(MODULES, (None, str(wanted))):
            with OPENED[name](text) if name in OPENED else contextlib.nullcontext():
                seen = self.call(JITTED[name], x, None if name in OPENED else text)
            what, current = f"{name}, map {text}", {*_log.current}
            self.check(what, (wanted.output, wanted.code), seen)
            self.check(f"{what}, current policy", {str(wanted)} & current, current)

    def functions(self, x, wanted):
        """Calls the gradient function, whose results are widened to the output, and autocast."""
        compute, output = (jnp.dtype(name) for name in (wanted.compute, wanted.output))
        widened = output if output.itemsize > compute.itemsize else compute
        dtype, code = self.call(JITTED["gradient"], x, str(wanted))
        self.check("gradient", (widened.name, wanted.code % 9), (dtype, code % 9))
        dtype, _ = self.call(JITTED["autocast"], x, str(wanted))
        self.check("autocast", wanted.compute, dtype)

    def run(self):
        attached, pushed, mapped = self.own
        x = jnp.ones((3, 2), jnp.float32)  # a shape that is new to all threads
        self.check_classes("at the start", None)
        for cls in CLASSES:
            jmpx.set_policy(cls, str(attached))
        self.modules(x, attached)
        with contextlib.ExitStack() as stack:
            for cls in CLASSES:
                stack.enter_context(jmpx.push_policy(cls, str(pushed)))
            self.check_classes("pushed", str(pushed))
            self.modules(x, pushed)
        self.functions(x, mapped)
        self.check_classes("attached", str(attached))

    def fresh(self):
        """Checks that there are no policies, also in functions that other threads have compiled."""
        self.check_classes("fresh", None)
        self.check("a fresh thread's current_policy", None, jmpx.current_policy())
        for funcs, name in itertools.product((MODULES, JITTED), MODULES):
            self.check(f"a fresh {name}", ("float32", 0), self.call(funcs[name], X, None))


@pytest.fixture
def without_cache():
    """Turns the compilation cache off: a thread could read a file that another is writing."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.mark.thorough
@pytest.mark.versions
def test_threads_see_their_own_policies(without_cache):
    filters = list(warnings.filters)
    workers, last = [Thread(number) for number in range(THREADS)], Thread(0)
    with switching_every(1e-4):
        together(*(worker.run for worker in workers))
    together(last.fresh)
    last.fresh()
    last.check("the filters of warnings", filters, list(warnings.filters))
    assert [failure for worker in (*workers, last) for failure in worker.failures] == []


# What threads share


def new_equinox():
    class Model(eqx.Module):
        w: jax.Array

        def __call__(self, x):
            return x * self.w

    return Model(ONE)


def new_nnx():
    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(ONE)

        def __call__(self, x):
            return x * self.w[...]

    return Model()


def class_of_a_marked(model):
    seen = []
    note = lambda m, x: seen.append(type(m)) or m(x)  # noqa: E731
    jax.eval_shape(jmpx.autocast(note, "f32; Model: c=bf16"), model, jnp.ones(2))
    return seen[0]


MADE = {
    "equinox view": (new_equinox, lambda m: type(jmpx.equinox.with_policies(m, "c=bf16"))),
    "nnx view": (new_nnx, lambda m: type(jmpx.flax.with_policies(m, "c=bf16"))),
    "equinox mark": (new_equinox, class_of_a_marked),
}


@pytest.mark.parametrize("kind", MADE)
def test_threads_get_one_class_for_one_class_and_policy(kind):
    new, class_of = MADE[kind]
    with switching_every(1e-6):
        for _ in range(5):
            model = new()
            classes = together(lambda model=model: class_of(model), count=8)
            assert len(classes) == 8 and len(set(classes)) == 1
    assert class_of(new()) not in classes


def test_nothing_changes_the_filters_of_warnings_which_all_threads_share(monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Equinox's, of both kinds of __init__

        class Model(eqx.Module):
            w: jax.Array

            def __init__(self):
                self.w = jnp.ones(())

            def __post_init__(self):
                raise AssertionError

            def __call__(self, x):
                return x * self.w

    def changed(*_, **__):
        raise AssertionError("the filters of warnings change")

    model, x = Model(), jnp.ones(2)
    call = jmpx.autocast(lambda m, x: m(x), "c=bf16; Model: f32")
    with monkeypatch.context() as patch:
        patch.setattr("warnings.catch_warnings", changed)
        view = jmpx.equinox.with_policies(model, "c=bf16,o=f32")
        results = [view(x), jax.eval_shape(call, model, x), jax.eval_shape(call, view, x)]
    assert {y.dtype for y in results} == {x.dtype}
    with pytest.raises(AssertionError):  # An instance has the method that its class hides.
        view.__post_init__()
