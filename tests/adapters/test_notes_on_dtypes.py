"""Errors about dtypes that a policy has cast to have a note: which policy, and what mends it."""

from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import BF16, normal
from jax import lax

import jmpx

pytestmark = pytest.mark.usefixtures("promoting")
W = normal(np.random.default_rng(0), 3, 3)
FIXED = normal(np.random.default_rng(1), 3, 3)
SPD = lambda w: w @ w.T + 4 * jnp.eye(3, dtype=w.dtype)  # noqa: E731


def conv(w):
    return lax.conv_general_dilated(w[None, None], FIXED[None, None], (1, 1), "SAME")


@pytest.fixture
def promoting():
    with jax.numpy_dtype_promotion("standard"):
        yield


MEETING = {  # a dtype that is no argument's
    "conv_general_dilated": conv,
    "add": lambda w: lax.add(w, FIXED),
    "concatenate": lambda w: lax.concatenate([w, FIXED], 0),
    "jvp": lambda w: jax.jvp(jnp.sin, (w,), (FIXED,))[1],
    "vjp": lambda w: jax.vjp(jnp.sin, w)[1](FIXED)[0],
    "cond": lambda w: lax.cond(w[0, 0] > 9, lambda: w, lambda: FIXED),
    "switch": lambda w: lax.switch(0, [lambda: w, lambda: FIXED]),
    "scan": lambda w: lax.scan(lambda c, _: (c * FIXED, None), w, length=2)[0],
    "while_loop": lambda w: lax.while_loop(lambda c: c.sum() < -9, lambda c: c * FIXED, w),
    "fori_loop": lambda w: lax.fori_loop(0, 2, lambda i, c: c * FIXED, w),
    "rfft": jnp.fft.rfft,
}
WITHOUT_KERNEL = {
    "cholesky": lambda w: jnp.linalg.cholesky(SPD(w)),
    "eigh": lambda w: jnp.linalg.eigh(SPD(w))[0],
    "qr": lambda w: jnp.linalg.qr(w)[0],
    "svd": lambda w: jnp.linalg.svd(w, full_matrices=False)[1],
    "solve": lambda w: jnp.linalg.solve(SPD(w), w),
    "complex": lambda w: lax.complex(w, w).real,
}
FAILING = MEETING | WITHOUT_KERNEL


class Equinox(eqx.Module):
    weight: jax.Array
    run: Any = eqx.field(static=True)

    def __call__(self, x):
        return self.run(self.weight + x)


class Haiku(hk.Module):
    def __init__(self, run):
        super().__init__("inner")
        self.run = run

    def __call__(self, x):
        return self.run(hk.get_parameter("w", (3, 3), init=hk.initializers.Constant(W)) + x)


class Linen(nn.Module):
    run: Any

    @nn.compact
    def __call__(self, x):
        return self.run(self.param("w", lambda key: W) + x)


class Nnx(nnx.Module):
    def __init__(self, run):
        self.weight, self.run = nnx.Param(W), run

    def __call__(self, x):
        return self.run(self.weight[...] + x)


X = jnp.zeros((3, 3))


def of_linen(run):
    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Linen(run, name="inner")(x)

    return lambda policy: jmpx.apply_policy(Outer().apply, policy)(
        {"params": {"inner": {"w": W}}}, X
    )


def of_haiku(run):
    apply = hk.without_apply_rng(hk.transform(lambda x: Haiku(run)(x))).apply
    return lambda policy: jmpx.apply_policy(apply, policy)({"inner": {"w": W}}, X)


def call(module, x):
    return module(x)


# A model that runs a function of its parameter, under a policy; what the note calls the module.
MODELS = {
    "Equinox": (lambda run: lambda p: jmpx.apply_policy(call, p)(Equinox(W, run), X), "Equinox"),
    "Haiku": (of_haiku, "Haiku at 'inner'"),
    "Linen": (of_linen, "Linen at 'inner'"),
    "Nnx": (lambda run: lambda p: jmpx.apply_policy(call, p)(Nnx(run), X), "Nnx"),
}


def notes(run, *args):
    with pytest.raises((TypeError, ValueError, RuntimeError, KeyError)) as caught:
        run(*args)
    return [n for n in getattr(caught.value, "__notes__", []) if n.startswith("jmpx casts")]


@pytest.mark.parametrize("name", FAILING)
def test_a_function_whose_arguments_are_cast(name):
    run, policy = FAILING[name], "by=arguments,params=float32,compute=bfloat16"
    applied = jmpx.apply_policy(lambda w: run(w), policy)
    call = jax.eval_shape if name in MEETING else lambda run, w: run(w)  # JAX 0.10 lowers those
    (note,) = notes(call, applied, W)
    assert f"the arguments of <lambda> to bfloat16, as policy {policy!r} says" in note
    assert "by=operations" in note and ("force_full" in note) == (name in WITHOUT_KERNEL)
    nested = jmpx.grad(lambda w: applied(w).sum(), jmpx.NoOpLossScale(), policy=policy)
    assert notes(call, nested, W) == [note]
    (note,) = notes(call, jmpx.apply_policy(run, "by=arguments,c=f16"), W)
    assert "to float16, as policy" in note
    jax.eval_shape(jmpx.apply_policy(run, "c=bf16"), W)  # what the note says


@pytest.mark.parametrize("name", ["conv_general_dilated", "cond", "cholesky"])
@pytest.mark.parametrize("framework", MODELS)
def test_a_module_is_named_and_its_rule_mends_the_error(framework, name):
    make, where = MODELS[framework]
    run = make(FAILING[name])
    (note,) = notes(run, "by=modules,c=bf16")
    assert f"jmpx casts {where} to bfloat16, as policy 'compute=bfloat16' says" in note
    assert f"or write the rule '{framework}: full'" in note
    for policy in f"by=modules,c=bf16; {framework}: full", "c=bf16":
        jax.eval_shape(lambda: run(policy))  # noqa: B023


def test_contexts_and_views_have_the_note():
    (note,) = notes(jmpx.equinox.with_policies(Equinox(W, conv), "c=bf16"), X)
    assert "Equinox to bfloat16" in note
    with jmpx.haiku.policies("c=bf16"):
        (note,) = notes(hk.transform(lambda x: Haiku(conv)(x)).init, jax.random.key(0), X)
    assert "Haiku at 'inner'" in note


@pytest.mark.parametrize("name", WITHOUT_KERNEL)
def test_an_operation_without_a_kernel_runs_in_float32(name):
    run = jmpx.force_full_precision(WITHOUT_KERNEL[name])
    assert jmpx.apply_policy(run, "by=arguments,c=bf16")(W).dtype == BF16


def fail(error):
    raise error


OTHERS = {
    "a key": lambda w: {}["weight"],
    "shapes": lambda w: w @ jnp.ones(5),
    "shapes of carries": lambda w: lax.scan(lambda c, _: (c[:2], None), w, length=2),
    "sizes": lambda w: jax.vmap(jnp.add)(w, jnp.ones(4)),
    "integers": lambda w: lax.add(jnp.arange(3), w[0]),
    "trees": lambda w: jax.tree.map(jnp.add, {"w": w}, [w]),
    "the user's own": lambda w: fail(ValueError("the dtype of the bfloat16 file")),
    "not of a type": lambda w: fail(RuntimeError("dtypes float32 and bfloat16")),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("by", ["arguments", "modules"])
def test_other_errors_have_no_note(name, by):
    assert not notes(jmpx.apply_policy(Equinox(W, OTHERS[name]), f"by={by},c=bf16"), X)


def test_an_error_of_jmpx_has_no_note():
    def halve(model):
        model.weight[...] = model.weight[...] / 2

    with pytest.raises(ValueError, match="a copy in bfloat16 of the one stored in float32") as own:
        jmpx.apply_policy(halve, "by=arguments,c=bf16")(Nnx(conv))
    assert not hasattr(own.value, "__notes__")
