"""`jmpx.current_policy()` in methods of modules of all frameworks."""

import functools
import threading

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from helpers import LOG, zoo

import jmpx
import jmpx.equinox
import jmpx.flax

X = jnp.ones(2)
FAILING = []  # with something in it, each leaf fails


def note(name):
    policy = jmpx.current_policy()
    LOG.append((name, policy and jnp.dtype(policy.compute_dtype).name))


def leaf(m, x):
    note("leaf")
    if FAILING:
        raise RuntimeError("in the middle")
    return x


def whole(m, x):
    note("before")
    x = m.inner("island", leaf)(m.inner("plain", leaf)(x))
    note("after")
    return x


@functools.cache
def net_of(framework):
    noted = len(LOG)
    net = zoo.build(framework, whole, X)
    del LOG[noted:]  # what it noted while it was made
    return net


def run(framework, x, policy_map):
    net = net_of(framework)
    return net.under(policy_map)(net.model, x)


class LinenLeaf(nn.Module):
    def __call__(self, x):
        note("leaf")
        return x


every_framework = pytest.mark.parametrize("framework", zoo.FRAMEWORKS)
ISLAND = "c=bf16; *island: c=f16"
ONE_RUN = [
    ("before", "bfloat16"),
    ("leaf", "bfloat16"),
    ("leaf", "float16"),
    ("after", "bfloat16"),
]


@pytest.fixture(autouse=True)
def nothing_seen():
    assert jmpx.current_policy() is None
    yield
    assert jmpx.current_policy() is None


TRANSFORMS = {
    "plain": lambda f: f(X),
    "jit": lambda f: jax.jit(f)(X),
    "vmap": lambda f: jax.vmap(f)(X[None]),
    "grad": lambda f: jax.grad(lambda x: f(x).astype(jnp.float32).sum())(X),
    "checkpoint": lambda f: jax.checkpoint(f)(X),
    "scan": lambda f: jax.lax.scan(lambda c, x: (c, f(x)), 0, X[None]),
    "filter_grad": lambda f: jax.make_jaxpr(
        jmpx.grad(lambda x: f(x).sum(), jmpx.NoOpLossScale(), policy="full")
    )(X),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("transform", TRANSFORMS)
@every_framework
def test_it_is_the_policy_of_the_innermost_running_method(framework, transform):
    TRANSFORMS[transform](lambda x: run(framework, x, ISLAND))
    assert LOG and LOG == ONE_RUN * (len(LOG) // len(ONE_RUN))


@every_framework
def test_without_policies_there_is_none(framework):
    run(framework, X, None)
    assert {policy for _, policy in LOG} == {None}


@every_framework
def test_policies_of_classes_are_answered_too(framework):
    outside = "float32" if framework == "haiku" else None
    net = net_of(framework)
    leaves = zoo.INNER.get(framework) or type(net.model.plain)
    with jmpx.push_policy(leaves, "f16"):
        net.within(*[f"c={outside}"] if outside else [])(net.model, X)
    assert {policy for name, policy in LOG if name == "leaf"} == {"float16"}
    assert {policy for name, policy in LOG if name in ("before", "after")} == {outside}


def test_haikus_own_policies_are_answered_as_ever():
    with hk.mixed_precision.push_policy(zoo.HaikuInner, jmpx.get_policy("f16")):  # pyright: ignore[reportArgumentType]
        run("haiku", X, None)
    assert dict(LOG)["leaf"] == "float16" and dict(LOG)["before"] is None


@every_framework
def test_it_is_none_after_an_error(framework, monkeypatch):
    net_of(framework)
    monkeypatch.setattr("test_current_policy.FAILING", [True])
    with pytest.raises(RuntimeError, match="in the middle"):
        run(framework, X, ISLAND.replace("*island", "*plain"))
    assert LOG[-1] == ("leaf", "float16") and jmpx.current_policy() is None


@every_framework
def test_other_threads_have_none(framework):
    answers = []

    def ask():
        answers.append(jmpx.current_policy())
        run(framework, X, "c=f16")

    class Asks(eqx.Module):
        def __call__(self, x):
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()
            note("mine")
            return x

    jmpx.equinox.with_policies(Asks(), "c=bf16")(X)
    assert answers == [None] and LOG[-1] == ("mine", "bfloat16")


def test_of_nested_frameworks_the_innermost_answers():
    class Outer(eqx.Module):
        def __call__(self, x):
            note("outer")
            run("linen", x, "c=f16")
            note("outer")
            run("nnx", x, None)  # which has no boundary: what surrounds it goes on
            return x

    jmpx.equinox.with_policies(Outer(), "c=bf16")(X)
    answers = [policy for _, policy in LOG]
    assert answers == ["bfloat16"] + ["float16"] * 4 + ["bfloat16"] * 5


def test_a_linen_context_without_a_policy_answers_none_inside_of_another():
    class Outer(nn.Module):
        def __call__(self, x):
            note("outer")
            with jmpx.flax.policies():
                LinenLeaf(parent=None).apply({}, x)
            return x

    with jmpx.flax.policies("c=bf16"):
        Outer().apply({}, X)
    assert LOG == [("outer", "bfloat16"), ("leaf", None)]


@pytest.mark.parametrize("lift", [nn.remat, nn.jit])
def test_lifted_linen_modules(lift):
    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return lift(LinenLeaf)(name="island")(x)

    with jmpx.flax.policies(ISLAND):
        Outer().apply({}, X)
    assert set(LOG) == {("leaf", "float16")}


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
    assert set(LOG) == {("setup", "bfloat16"), ("call", "bfloat16")}


@pytest.mark.parametrize("wrap", [eqx.filter_checkpoint, jax.vmap, eqx.filter_jit])
def test_equinox_wrappers_of_a_view(wrap):
    view = jmpx.equinox.with_policies(net_of("equinox").model, ISLAND)
    wrap(view)(X[None])
    assert LOG == ONE_RUN
