"""The results of gradient functions: named tuples that unpack as tuples do."""

import pickle
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_same_bits
from jax.sharding import Mesh, PartitionSpec as P

import jmpx
import jmpx.mpx as mpx
from jmpx.types import Gradients, GradientsAndAux, ValueAndGradients

MAKERS = {"value": jmpx.filter_value_and_grad, "grad": jmpx.filter_grad}
FIELDS = {
    ("value", False): (ValueAndGradients, ("value", "scaling", "grads_finite", "grads")),
    ("value", True): (ValueAndGradients, ("value", "scaling", "grads_finite", "grads")),
    ("grad", False): (Gradients, ("scaling", "grads_finite", "grads")),
    ("grad", True): (GradientsAndAux, ("scaling", "grads_finite", "grads", "aux")),
}


def loss_fn(params, x):
    return jnp.mean((x @ params["w"]) ** 2).astype(jnp.float32)


def loss_and_aux(params, x):
    return loss_fn(params, x), {"norm": jnp.abs(params["w"]).sum()}


def make_problem(rng):
    params = {"w": jnp.asarray(rng.normal(size=3), jnp.float32)}
    return params, jnp.asarray(rng.normal(size=(4, 3)), jnp.float32)


def make_grad_fn(name, has_aux, **options) -> Any:
    scaling = jmpx.DynamicLossScale(2.0**10)
    room = mpx if "use_mixed_precision" in options else jmpx
    make = {"value": room.filter_value_and_grad, "grad": room.filter_grad}[name]
    return make(loss_and_aux if has_aux else loss_fn, scaling, has_aux, **options)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("how", ["eager", "jit", "eqx.filter_jit", "nnx.jit"])
@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize(("name", "has_aux"), FIELDS)
def test_they_have_names_in_the_order_in_which_they_unpack(name, has_aux, mixed, how, rng):
    params, x = make_problem(rng)
    grad_fn = make_grad_fn(name, has_aux, use_mixed_precision=mixed)
    wrap = {"eager": lambda f: f, "jit": jax.jit, "eqx.filter_jit": eqx.filter_jit}
    result: Any = wrap.get(how, nnx.jit)(grad_fn)(params, x)
    cls, fields = FIELDS[name, has_aux]
    assert type(result) is cls and issubclass(cls, tuple)
    assert result._fields == fields and len(result) == len(fields)
    first, *others = result
    assert first is getattr(result, fields[0])
    assert all(a is getattr(result, b) for a, b in zip(others, fields[1:], strict=True))
    assert isinstance(result.scaling, jmpx.DynamicLossScale)
    assert result.grads_finite.dtype == jnp.bool_ and result.grads_finite.shape == ()
    assert result.grads["w"].shape == (3,) and result.grads["w"].dtype == jnp.float32
    if has_aux:
        aux = result.aux if name == "grad" else result.value[1]
        assert set(aux) == {"norm"}
    if name == "value":
        value = result.value[0] if has_aux else result.value
        assert value.shape == () and value.dtype == jnp.float32


@pytest.mark.parametrize(("name", "has_aux"), FIELDS)
def test_they_are_pytrees_that_pickle(name, has_aux, rng):
    grad_fn = make_grad_fn(name, has_aux)
    params, x = make_problem(rng)
    result = grad_fn(params, x)
    shapes = jax.eval_shape(grad_fn, params, x)
    assert type(shapes) is type(result)
    assert jax.tree.map(lambda s: s.dtype, shapes) == jax.tree.map(lambda a: a.dtype, result)
    assert_same_bits(pickle.loads(pickle.dumps(result)), result)
    assert_same_bits(jax.tree.map(lambda leaf: leaf, result), result)


def test_a_scan_carries_them(rng):
    params, x = make_problem(rng)

    def body(last, x):
        new = jmpx.filter_value_and_grad(loss_fn, last.scaling)(params, x)
        return new, new.value

    scaling = jmpx.DynamicLossScale(2.0**10, period=1)
    first = jmpx.filter_value_and_grad(loss_fn, scaling)(params, x)
    last, values = jax.lax.scan(body, first, jnp.stack([x] * 3))
    assert type(last) is ValueAndGradients
    assert last.scaling.loss_scale == first.scaling.loss_scale * 2**3
    assert values.shape == (3,)


@pytest.mark.parametrize("how", ["shard_map", "vmap"])
def test_a_prefix_of_one_is_made_by_its_class(how, rng):
    params, x = make_problem(rng)
    scaling = jmpx.DynamicLossScale(2.0**10)
    grad_fn = jmpx.filter_value_and_grad(loss_fn, scaling, policy="full", over=jmpx.Over("data"))
    if how == "shard_map":
        specs = ValueAndGradients(P(), P(), P(), {"w": P()})  # pyright: ignore[reportArgumentType]
        mesh = Mesh(jax.devices()[:4], "data")
        mapped = jax.shard_map(grad_fn, mesh=mesh, in_specs=(P(), P("data")), out_specs=specs)
        result = jax.jit(mapped)(params, x)
    else:
        axes = ValueAndGradients(None, None, None, {"w": None})  # pyright: ignore[reportArgumentType]
        mapped = jax.vmap(grad_fn, in_axes=(None, 0), out_axes=axes, axis_name="data")
        result = jax.jit(mapped)(params, x[:, None])
    value, grads = jax.jit(jax.value_and_grad(loss_fn))(params, x)
    np.testing.assert_allclose(result.value, value, rtol=1e-6)
    np.testing.assert_allclose(result.grads["w"], grads["w"], rtol=1e-5)


def test_an_nnx_module_gets_an_nnx_state(rng):
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    x = jnp.asarray(rng.normal(size=(4, 3)), jnp.float32)
    grad_fn = jmpx.filter_grad(lambda m, x: m(x).mean(), jmpx.NoOpLossScale(), policy="c=bf16")
    result = nnx.jit(grad_fn)(model, x)
    assert type(result) is Gradients and isinstance(result.grads, nnx.State)
