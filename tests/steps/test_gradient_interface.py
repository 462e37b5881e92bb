"""What gradient functions take and return: options, signatures, and named tuples."""

import dataclasses
import inspect
import pickle
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers import assert_same_bits, normal

import jmpx
import jmpx.mpx as mpx
from jmpx.types import Gradients, GradientsAndAux, ValueAndGradients

# Options


VALUES: list[Any] = [
    jmpx.Batch(argnums=(1, 2), microbatches=4),
    jmpx.Over(("data", "model"), sharded={"w": True, "b": "own"}),
]


@pytest.mark.parametrize("value", VALUES, ids=["Batch", "Over"])
def test_options_are_values(value):
    assert pickle.loads(pickle.dumps(value)) == value == dataclasses.replace(value)
    assert type(value).__module__ == "jmpx" and repr(value).startswith(f"{type(value).__name__}(")
    with pytest.raises(dataclasses.FrozenInstanceError):
        value.argnums = None


def test_micro_batches_are_no_traced_number():
    with pytest.raises(TypeError, match="Expected microbatches to be a whole number, got .*: 1 "):
        jax.jit(lambda count: jmpx.Batch(microbatches=count).microbatches)(2)
    # Micro-batches and an axis do not contradict each other; both may be given as they are.
    jmpx.grad(jnp.sum, jmpx.NoOpLossScale(), policy="full", microbatches=2, over="rows")


# Signatures


@pytest.mark.parametrize("make", [jmpx.grad, jmpx.value_and_grad])
def test_a_gradient_function_can_be_held(make):
    parameters = list(inspect.signature(make).parameters.values())
    names = "func loss_scale has_aux policy grad_dtype uncast state_argnum microbatches batch over"
    assert [p.name for p in parameters] == names.split()
    assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} == set(names.split()[3:])
    assert parameters == list(inspect.signature(jmpx.grad).parameters.values())
    assert len(str(make.__doc__).splitlines()) <= 60


def half_mean(params: jax.Array, x: jax.Array, *, scale: float = 1.0) -> jax.Array:
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
    "cast_function": lambda f: mpx.cast_function(f, "bf16", "f32"),
    "force_full_precision": jmpx.force_full_precision,
    "grad": lambda f: jmpx.grad(f, jmpx.NoOpLossScale(), policy="c=bf16"),
    "value_and_grad": lambda f: jmpx.value_and_grad(f, jmpx.NoOpLossScale(), policy="c=bf16"),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_function_keeps_its_signature_and_its_name(wrapper):
    wrapped = WRAPPERS[wrapper](half_mean)
    assert inspect.signature(wrapped) == inspect.signature(half_mean)
    assert (wrapped.__name__, wrapped.__doc__) == ("half_mean", "Half of the mean.")
    wrapped(jnp.ones(3), jnp.ones(3), scale=2.0)
    if "grad" not in wrapper:
        module = Halve(jnp.ones(3))
        wrapped = WRAPPERS[wrapper](module)
        assert inspect.signature(wrapped) == inspect.signature(module)
        assert list(inspect.signature(wrapped).parameters) == ["x", "shift"]
        assert wrapped(jnp.ones(3), shift=1.0).tolist() == [1.5] * 3


def test_a_decorated_method_is_one():
    assert Halve(jnp.ones(3, jnp.float16)).method(jnp.ones(3, jnp.float16)).dtype == jnp.float16
    assert list(inspect.signature(Halve.method).parameters) == ["self", "x", "power"]


# Results


VALUE_FIELDS = ("value", "loss_scale", "grads_finite", "grads")
FIELDS = {
    ("value", False): (ValueAndGradients, VALUE_FIELDS),
    ("value", True): (ValueAndGradients, VALUE_FIELDS),
    ("grad", False): (Gradients, VALUE_FIELDS[1:]),
    ("grad", True): (GradientsAndAux, (*VALUE_FIELDS[1:], "aux")),
}
RUNS = dict(zip(FIELDS, [jax.jit, eqx.filter_jit, nnx.jit, lambda f: f], strict=True))


def loss_fn(params, x):
    return jnp.mean((x @ params["w"]) ** 2).astype(jnp.float32)


def loss_and_aux(params, x):
    return loss_fn(params, x), {"norm": jnp.abs(params["w"]).sum()}


@pytest.mark.parametrize(("name", "has_aux"), FIELDS)
def test_results_have_names_in_the_order_in_which_they_unpack(name, has_aux, rng):
    params, x = {"w": normal(rng, 3)}, normal(rng, 4, 3)
    scaling, loss = jmpx.DynamicLossScale(2.0**10), loss_and_aux if has_aux else loss_fn
    is_value = name == "value"
    make_fn: Any = jmpx.value_and_grad if is_value else jmpx.grad
    grad_fn = make_fn(loss, scaling, has_aux, policy="c=f16")
    make_fn = mpx.filter_value_and_grad if is_value else mpx.filter_grad
    plain = make_fn(loss, scaling, has_aux, use_mixed_precision=False)
    cls, fields = FIELDS[name, has_aux]
    for make in (plain, grad_fn):
        result: Any = RUNS[name, has_aux](make)(params, x)
        assert type(result) is cls and issubclass(cls, tuple)
        assert result._fields == fields and len(result) == len(fields)
        assert all(a is getattr(result, b) for a, b in zip(result, fields, strict=True))
        assert isinstance(result.loss_scale, jmpx.DynamicLossScale)
        assert result.grads_finite.dtype == jnp.bool_ and result.grads_finite.shape == ()
        assert result.grads["w"].shape == (3,) and result.grads["w"].dtype == jnp.float32
        if has_aux:
            assert set(result.aux if name == "grad" else result.value[1]) == {"norm"}
        if name == "value":
            value = result.value[0] if has_aux else result.value
            assert value.shape == () and value.dtype == jnp.float32
    shapes = jax.eval_shape(grad_fn, params, x)
    assert type(shapes) is cls
    assert jax.tree.map(lambda s: s.dtype, shapes) == jax.tree.map(lambda a: a.dtype, result)
    assert_same_bits(pickle.loads(pickle.dumps(result)), result)
    assert_same_bits(jax.tree.map(lambda leaf: leaf, result), result)
