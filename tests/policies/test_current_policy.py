"""`jmpx.current_policy()` in methods of modules of all frameworks."""

import threading

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jmpx
import jmpx.equinox
import jmpx.flax
import jmpx.haiku

X = jnp.ones(2)
SEEN = []


def note(name):
    policy = jmpx.current_policy()
    SEEN.append((name, policy and jnp.dtype(policy.compute_dtype).name))


class HaikuLeaf(hk.Module):
    def __call__(self, x):
        note("leaf")
        return x

    def method(self, x):
        note("method")
        return self._private(x)

    def _private(self, x):
        note("private")
        return x


class HaikuNet(hk.Module):
    def __call__(self, x):
        note("before")
        x = HaikuLeaf(name="plain")(x)
        leaf = HaikuLeaf(name="island")
        x = leaf.method(leaf(x))
        note("after")
        return x


class LinenLeaf(nn.Module):
    def __call__(self, x):
        note("leaf")
        return x

    def method(self, x):
        note("method")
        return self._private(x)

    def _private(self, x):
        note("private")
        return x


class LinenNet(nn.Module):
    def setup(self):
        self.plain, self.island = LinenLeaf(), LinenLeaf()

    def __call__(self, x):
        note("before")
        x = self.island.method(self.island(self.plain(x)))
        note("after")
        return x


class EquinoxLeaf(eqx.Module):
    def __call__(self, x):
        note("leaf")
        return x

    def method(self, x):
        note("method")
        return self._private(x)

    def _private(self, x):
        note("private")
        return x


class EquinoxNet(eqx.Module):
    plain: EquinoxLeaf
    island: EquinoxLeaf

    def __call__(self, x):
        note("before")
        x = self.island.method(self.island(self.plain(x)))
        note("after")
        return x


class NnxLeaf(nnx.Module):
    def __call__(self, x):
        note("leaf")
        return x

    def method(self, x):
        note("method")
        return self._private(x)

    def _private(self, x):
        note("private")
        return x


class NnxNet(nnx.Module):
    def __init__(self):
        self.plain, self.island = NnxLeaf(), NnxLeaf()

    def __call__(self, x):
        note("before")
        x = self.island.method(self.island(self.plain(x)))
        note("after")
        return x


def run_haiku(x, policy_map):
    with jmpx.haiku.policies(policy_map):
        return hk.transform(lambda x: HaikuNet(name="net")(x)).apply({}, None, x)


def run_linen(x, policy_map):
    with jmpx.flax.policies(policy_map):
        return LinenNet().apply({}, x)


def run_equinox(x, policy_map):
    return jmpx.equinox.with_policies(EquinoxNet(EquinoxLeaf(), EquinoxLeaf()), policy_map)(x)


def run_nnx(x, policy_map):
    return jmpx.flax.with_policies(NnxNet(), policy_map)(x)


RUNS = [run_haiku, run_linen, run_equinox, run_nnx]
ISLAND = "c=bf16; *island: c=f16"
ONE_RUN = [
    ("before", "bfloat16"),
    ("leaf", "bfloat16"),
    ("leaf", "float16"),
    ("method", "float16"),
    ("private", "float16"),
    ("after", "bfloat16"),
]


@pytest.fixture(autouse=True)
def nothing_seen():
    SEEN.clear()
    assert jmpx.current_policy() is None
    yield
    assert jmpx.current_policy() is None


TRANSFORMS = {
    "plain": lambda run: run(X, ISLAND),
    "jit": lambda run: jax.jit(lambda x: run(x, ISLAND))(X),
    "vmap": lambda run: jax.vmap(lambda x: run(x, ISLAND))(X[None]),
    "grad": lambda run: jax.grad(lambda x: run(x, ISLAND).astype(jnp.float32).sum())(X),
    "checkpoint": lambda run: jax.checkpoint(lambda x: run(x, ISLAND))(X),
    "scan": lambda run: jax.lax.scan(lambda c, x: (c, run(x, ISLAND)), 0, X[None]),
    "filter_grad": lambda run: jmpx.filter_grad(
        lambda x: run(x, ISLAND).sum(), jmpx.NoOpLossScale(), policy="full"
    )(X),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("run", RUNS)
def test_it_is_the_policy_of_the_innermost_running_method(run, transform):
    TRANSFORMS[transform](run)
    assert SEEN and SEEN == ONE_RUN * (len(SEEN) // len(ONE_RUN))


@pytest.mark.parametrize("run", RUNS)
def test_without_policies_there_is_none(run):
    if run in (run_haiku, run_linen):
        apply = {
            run_haiku: lambda: hk.transform(lambda x: HaikuNet()(x)).apply({}, None, X),
            run_linen: lambda: LinenNet().apply({}, X),
        }
        apply[run]()
    else:
        run(X, None)
    assert {policy for _, policy in SEEN} == {None}


@pytest.mark.parametrize(
    ("run", "net", "leaf"),
    [
        (run_haiku, HaikuNet, HaikuLeaf),
        (run_linen, LinenNet, LinenLeaf),
        (run_equinox, EquinoxNet, EquinoxLeaf),
        (run_nnx, NnxNet, NnxLeaf),
    ],
)
def test_policies_of_classes_are_answered_too(run, net, leaf):
    with jmpx.push_policy(leaf, "f16"):
        run(X, None if run is not run_haiku else "c=f32")
    outside = "float32" if run is run_haiku else None
    leaves = {policy for name, policy in SEEN if name in ("leaf", "method", "private")}
    assert leaves == {"float16"}
    assert {policy for name, policy in SEEN if name in ("before", "after")} == {outside}


def test_haikus_own_policies_are_answered_as_ever():
    with hk.mixed_precision.push_policy(HaikuLeaf, jmpx.get_policy("f16")):  # pyright: ignore[reportArgumentType]
        hk.transform(lambda x: HaikuNet()(x)).apply({}, None, X)
    assert dict(SEEN)["leaf"] == "float16" and dict(SEEN)["before"] is None


@pytest.mark.parametrize("run", RUNS)
def test_it_is_none_after_an_error(run):
    def fail(x):
        note("failing")
        raise RuntimeError("in the middle")

    classes = {run_haiku: HaikuLeaf, run_linen: LinenLeaf, run_equinox: EquinoxLeaf}
    cls = classes.get(run, NnxLeaf)
    original = cls._private
    cls._private = lambda self, x: fail(x)
    try:
        with pytest.raises(RuntimeError, match="in the middle"):
            run(X, ISLAND)
    finally:
        cls._private = original
    assert SEEN[-1] == ("failing", "float16") and jmpx.current_policy() is None


@pytest.mark.parametrize("run", RUNS)
def test_other_threads_have_none(run):
    answers = []

    def ask():
        answers.append(jmpx.current_policy())
        run(X, "c=f16")

    class Asks(eqx.Module):
        def __call__(self, x):
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()
            note("mine")
            return x

    jmpx.equinox.with_policies(Asks(), "c=bf16")(X)
    assert answers == [None] and SEEN[-1] == ("mine", "bfloat16")


def test_of_nested_frameworks_the_innermost_answers():
    class Outer(eqx.Module):
        def __call__(self, x):
            note("outer")
            run_linen(x, "c=f16")
            note("outer")
            run_nnx(x, None)  # which has no boundary: what surrounds it goes on
            return x

    jmpx.equinox.with_policies(Outer(), "c=bf16")(X)
    answers = [policy for _, policy in SEEN]
    assert answers == ["bfloat16"] + ["float16"] * 6 + ["bfloat16"] * 7


def test_a_linen_context_without_a_policy_answers_none_inside_of_another():
    class Outer(nn.Module):
        def __call__(self, x):
            note("outer")
            with jmpx.flax.policies():
                LinenLeaf(parent=None).apply({}, x)
            return x

    with jmpx.flax.policies("c=bf16"):
        Outer().apply({}, X)
    assert SEEN == [("outer", "bfloat16"), ("leaf", None)]


@pytest.mark.parametrize("lift", [nn.remat, nn.jit])
def test_lifted_linen_modules(lift):
    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return lift(LinenLeaf)(name="island")(x)

    with jmpx.flax.policies(ISLAND):
        Outer().apply({}, X)
    assert set(SEEN) == {("leaf", "float16")}


def test_linens_setup_and_new_parameters_see_the_policy_that_casts_them():
    class Sets(nn.Module):
        def setup(self):
            note("setup")
            self.w = self.param("w", nn.initializers.ones, (2,))

        def __call__(self, x):
            note("call")
            assert self.w.dtype == jnp.bfloat16
            return x * self.w

    with jmpx.flax.policies("c=bf16"):
        Sets().init(jax.random.key(0), X)
    assert set(SEEN) == {("setup", "bfloat16"), ("call", "bfloat16")}


@pytest.mark.parametrize("wrap", [eqx.filter_checkpoint, jax.vmap, eqx.filter_jit])
def test_equinox_wrappers_of_a_view(wrap):
    view = jmpx.equinox.with_policies(EquinoxNet(EquinoxLeaf(), EquinoxLeaf()), ISLAND)
    wrap(view)(X[None])
    assert SEEN == ONE_RUN
