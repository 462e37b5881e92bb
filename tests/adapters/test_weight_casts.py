"""Each weight is cast once in each body that is traced, however often the model uses it."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers import normal
from helpers.autocast import assert_near
from helpers.shared_weights import (
    BODIES,
    FRAMEWORKS,
    X,
    beside_an_island,
    in_a_checkpoint,
    in_a_loop,
)
from helpers.weight_casts import casts_of

import jmpx
import jmpx.flax

CLASSES = {
    "haiku": ("HaikuModel", "Linear", "HaikuScale"),
    "linen": ("LinenModel", "Dense", "LinenScale"),
    "nnx": ("NNXModel", "Linear", "NNXScale"),
    "equinox": ("EquinoxModel", "EquinoxLinear", "EquinoxScale"),
}
every_framework = pytest.mark.parametrize("framework", FRAMEWORKS)
every_body = pytest.mark.parametrize("body", BODIES)


def assert_cast_once(fn, params):
    """Holds a function to cast no parameter twice in one body, and some parameter at all."""
    bodies = casts_of(fn, params, X)
    assert max(max(counts.values()) for counts in bodies) == 1


@pytest.mark.sampled(5)
@every_framework
@every_body
def test_adapters_cast_a_weight_once(framework, body):
    params, _, under = FRAMEWORKS[framework](body)
    assert_cast_once(under("c=bf16,o=f32"), params)


@every_framework
def test_adapters_cast_a_weight_once_beside_an_island_and_under_a_parent_that_casts(framework):
    params, _, under = FRAMEWORKS[framework](beside_an_island)
    model, linear, scale = CLASSES[framework]
    assert_cast_once(under(f"c=bf16,o=f32; {scale}: full"), params)
    assert_cast_once(under(f"c=f32; {model}: c=f16; {linear}: c=bf16; {scale}: c=bf16"), params)


@pytest.mark.sampled(5)
@every_framework
@every_body
@pytest.mark.parametrize("save", [None, "products"])
def test_autocast_casts_a_weight_once(framework, body, save):
    params, apply, _ = FRAMEWORKS[framework](body)
    if save and body is in_a_checkpoint:  # which is left as the user wrote it, with a warning
        with pytest.warns(UserWarning, match="checkpoint"):
            assert_cast_once(jmpx.autocast(apply, "c=bf16", save=save), params)
    else:
        assert_cast_once(jmpx.autocast(apply, "c=bf16", save=save), params)


@pytest.mark.parametrize("framework", ["haiku", "equinox"])  # NNX promotes to the stored dtype
@every_body
def test_gradient_functions_cast_a_weight_once(framework, body):
    params, apply, _ = FRAMEWORKS[framework](body)

    def loss_fn(params, x):
        return apply(params, x).astype(jnp.float32).sum()

    assert_cast_once(jmpx.filter_grad(loss_fn, jmpx.NoOpLossScale(), policy="c=bf16"), params)


@pytest.mark.thorough
@every_framework
@pytest.mark.parametrize("body", [in_a_loop, in_a_checkpoint])
def test_a_cast_does_not_leak_into_another_trace(framework, body, rng):
    params, apply, under = FRAMEWORKS[framework](body)
    policy, x = under("c=bf16,o=f32"), normal(rng, *X.shape)

    def grads_of(apply):
        return jax.grad(lambda params: (apply(params, x) ** 2).sum())(params)

    expected = grads_of(apply)
    assert_near(grads_of(policy), expected, 0.1)  # six products in a row
    assert_near(jax.jit(lambda: grads_of(policy))(), expected, 0.1)
    with jax.checking_leaks():
        jax.eval_shape(lambda x: policy(params, x), x)


def test_modules_of_two_policies_share_a_parameter_that_each_casts_itself():
    class Shared(nnx.Module):
        def __init__(self):
            self.first, self.second = (nnx.Linear(2, 2, rngs=nnx.Rngs(0)) for _ in range(2))
            self.second.kernel = self.first.kernel
            self.third = self.first

    view = jmpx.flax.with_policies(Shared(), "c=bf16; */second: full")
    assert view.first.kernel[...].dtype == jnp.bfloat16
    assert view.second.kernel[...].dtype == jnp.float32
    assert view.third is view.first
