"""Functions that are wrapped keep their signatures, at runtime."""

import inspect
import operator

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import jmpx


def loss_fn(params: jax.Array, x: jax.Array, *, scale: float = 1.0) -> jax.Array:
    """Half of the mean."""
    return (params * x * scale).mean() / 2


class Halve(eqx.Module):
    weight: jax.Array

    def __call__(self, x: jax.Array, *, shift: float = 0.0) -> jax.Array:
        return self.weight * x / 2 + shift

    @jmpx.force_full_precision
    def method(self, x: jax.Array, power: int = 2) -> jax.Array:
        assert x.dtype == jnp.float32
        return x**power


WRAPPERS = {
    "cast_function": lambda f: jmpx.mpx.cast_function(f, "bf16", "f32"),
    "force_full_precision": jmpx.force_full_precision,
    "filter_grad": lambda f: jmpx.filter_grad(f, jmpx.NoOpLossScale()),
    "filter_value_and_grad": lambda f: jmpx.filter_value_and_grad(f, jmpx.NoOpLossScale()),
    "grad_dtype": lambda f: jmpx.filter_grad(f, jmpx.NoOpLossScale(), grad_dtype="f32"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_function_keeps_its_signature_and_its_name(wrapper):
    wrapped = WRAPPERS[wrapper](loss_fn)
    assert inspect.signature(wrapped) == inspect.signature(loss_fn)
    assert (wrapped.__name__, wrapped.__doc__) == ("loss_fn", "Half of the mean.")
    wrapped(jnp.ones(3), jnp.ones(3), scale=2.0)


def test_both_gradient_functions_take_the_same_arguments():
    grad, value_and_grad = map(inspect.signature, (jmpx.filter_grad, jmpx.filter_value_and_grad))
    assert list(grad.parameters.values()) == list(value_and_grad.parameters.values())
    keywords = [p.name for p in grad.parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert keywords[:2] == ["policy", "grad_dtype"]


@pytest.mark.parametrize("wrapper", ["cast_function", "force_full_precision"])
def test_a_module_keeps_its_signature(wrapper):
    module = Halve(jnp.ones(3))
    wrapped = WRAPPERS[wrapper](module)
    assert inspect.signature(wrapped) == inspect.signature(module)
    assert list(inspect.signature(wrapped).parameters) == ["x", "shift"]
    assert wrapped(jnp.ones(3, jnp.float32), shift=1.0).tolist() == [1.5] * 3


def test_a_decorated_method_is_one(rng):
    module = Halve(jnp.ones(3, jnp.float16))
    x = jnp.asarray(rng.normal(size=3), jnp.float16)
    assert module.method(x).dtype == jnp.float16
    assert list(inspect.signature(Halve.method).parameters) == ["self", "x", "power"]


@pytest.mark.parametrize(
    "name", ["NoOpLossScale", "StaticLossScale", "DynamicLossScale", "mpx.DynamicLossScaling"]
)
def test_the_class_of_a_loss_scale_in_place_of_one(name):
    cls = operator.attrgetter(name)(jmpx)
    calls = [
        lambda: jmpx.filter_grad(jnp.sum, cls),
        lambda: jmpx.get_loss_scale(cls),
        lambda: jmpx.MixedPrecision("c=f16", cls),
    ]
    for call in calls:
        with pytest.raises(TypeError, match="Expected .*loss scale.*, got <class 'jmpx"):
            call()
    with pytest.raises(TypeError, match="Expected a loss scale as the second argument, got Array"):
        jmpx.filter_grad(jnp.sum, jnp.ones(3))  # pyright: ignore[reportArgumentType, reportCallIssue]
