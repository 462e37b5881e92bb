"""`grad_dtype`: gradients that are wider, or narrower, than the parameters are stored."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_same_bits, dtypes, leniently, normal, zoo
from helpers.maps import AXIS, DEVICES, mesh_of, over_devices
from helpers.policies import by_arguments
from helpers.training import LOSS_SCALES, loss_fn, make_params
from jax.sharding import NamedSharding, PartitionSpec as P

import jmpx

in_16_bits = pytest.mark.filterwarnings(  # on purpose
    "ignore:The gradient function differentiates parameters that are stored in less:UserWarning"
)


def gradients(*args: Any, loss: Any = loss_fn, scaling: Any = None, **options: Any) -> Any:
    scaling = jmpx.StaticLossScale(2.0**10) if scaling is None else scaling
    policy = by_arguments(options.pop("policy", "c=bf16,o=f32"))
    return jmpx.grad(loss, scaling, policy=policy, **options)(*args)


def stored(params, dtype):
    """Stored parameters, and float32 ones with the same values."""
    narrow = jmpx.cast_tree(params, dtype)
    return narrow, jmpx.cast_to_full(narrow)


def is_rounded(grads, dtype):
    """Whether all gradients are numbers of a narrower dtype."""
    pairs = [(np.asarray(g), np.asarray(g.astype(dtype), g.dtype)) for g in jax.tree.leaves(grads)]
    return all((grad == rounded).all() for grad, rounded in pairs)


# Wider than the parameters


@pytest.mark.parametrize(
    ("dtype", "policy", "microbatches"),
    [("bfloat16", "c=bf16", 3), ("float16", "c=f32", 1), ("float8_e4m3fn", "c=f16", 3)],
)
@in_16_bits
def test_they_are_those_of_float32_parameters(dtype, policy, microbatches, rng):
    params, wide = stored(make_params(rng), dtype)
    scaling = jmpx.DynamicLossScale(2.0**10)
    batch = jmpx.Batch(microbatches=microbatches)
    options = {"policy": policy, "batch": batch, "scaling": scaling}

    @jax.jit
    def run(x):
        widened = gradients(params, x, grad_dtype="float32", **options)
        return (
            widened,
            gradients(wide, x, grad_dtype="f32", **options),
            gradients(params, x, **options).grads,
        )

    widened, expected, given = run(normal(rng, 6, 6))
    assert_same_bits(widened, expected)
    assert not is_rounded(widened.grads, dtype)
    assert jax.tree.map(lambda leaf: leaf.dtype, given) == {"b": dtype, "w": dtype}


@pytest.mark.parametrize(("how", "policy"), [("shard_map", "c=bf16,r=f32"), ("vmap", "c=bf16")])
def test_means_over_devices_are_not_rounded(how, policy, rng):
    params, wide = stored(make_params(rng), jnp.bfloat16)
    options = {"policy": policy, "over": jmpx.Over(AXIS)}

    def run(params, wide, x):
        grads = gradients(params, x, grad_dtype=jnp.float32, **options).grads
        return grads, gradients(wide, x, grad_dtype="f32", **options).grads

    x = normal(rng, 2 * DEVICES, 6)
    grads, expected = over_devices(run, how, params, wide, x, specs=(P(), P(), P(AXIS)))
    assert_same_bits(grads, expected)
    assert not is_rounded(grads, jnp.bfloat16)


def test_sums_of_shards_are_not_rounded(rng):
    w, wide = stored(normal(rng, 2 * DEVICES, 3), jnp.bfloat16)

    def loss(w, x):
        y = jnp.tanh(x @ jmpx.distributed.gather(w, AXIS, "c=bf16"))
        return jnp.mean(y.astype(jnp.float32) ** 2)

    def run(w, wide, x):
        options = {"loss": loss, "over": jmpx.Over(AXIS, sharded=True), "uncast": 0}
        grads = gradients(w, x, grad_dtype="f32", **options).grads
        return grads, gradients(wide, x, grad_dtype="f32", **options).grads

    x = normal(rng, DEVICES, 2 * DEVICES)
    grads, expected = over_devices(run, "shard_map without vma", w, wide, x)
    assert_same_bits(grads, expected)
    assert not is_rounded(grads, jnp.bfloat16)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_sums_of_a_batch_that_jit_splits_are_not_rounded(microbatches, dtype, rng):
    params, wide = stored(make_params(rng), dtype)
    options = {"microbatches": microbatches, "policy": f"c={jnp.dtype(dtype).name},r=f32"}

    @jax.jit
    def run(x):
        grads = gradients(params, x, grad_dtype="float32", **options).grads
        return grads, gradients(wide, x, grad_dtype="f32", **options).grads

    x = jax.device_put(normal(rng, 8, 6), NamedSharding(mesh_of(4), P(AXIS)))
    grads, expected = run(x)
    assert_same_bits(grads, expected)
    assert not is_rounded(grads, dtype)


@in_16_bits
def test_tiny_gradients_do_not_underflow_when_they_are_unscaled(rng):
    """After division by the loss scale, they are below the range of float16."""
    w = jnp.asarray(1 + rng.random(3), jnp.float16)

    def loss(w):
        return ((w * 2.0**-14).astype(jnp.float32) * 2.0**-14).sum()

    options = {"loss": loss, "policy": "f16", "scaling": jmpx.StaticLossScale(2.0**14)}
    assert gradients(w, grad_dtype="f32", **options).grads.tolist() == [2.0**-28] * 3
    assert gradients(w, **options).grads.tolist() == [0] * 3


def test_other_leaves_and_aux_are_as_ever(rng):
    params = {"c": jnp.ones(2, jnp.complex64), "w": normal(rng, 2).astype(jnp.bfloat16)}
    params = {**params, "wide": normal(rng, 2), "steps": jnp.arange(2), "name": "net"}

    def loss(params, x):
        total = jnp.sum(jnp.abs(params["c"]) ** 2) + jnp.sum(params["wide"] * x)
        return total + jnp.sum(params["w"] * x), {"steps": params["steps"], "x": x}

    options = {"loss": loss, "has_aux": True, "policy": "f32", "grad_dtype": "float32"}
    result = gradients(params, normal(rng, 2), **options)
    assert result.grads["steps"] is result.grads["name"] is None
    assert dtypes(result.grads) == ["complex64", "float32", "float32"]
    assert_same_bits(result.aux["steps"], params["steps"])
    value_and_grad = jmpx.value_and_grad(
        loss, jmpx.NoOpLossScale(), True, policy="f32", grad_dtype=jnp.float32
    )
    assert_same_bits(value_and_grad(params, result.aux["x"]).grads, result.grads)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"policy": "c=bf16"}, "bfloat16"),
        ({"policy": "c=f16"}, "float16"),
        ({"uncast": 0}, "float32"),
    ],
)
def test_the_function_gets_the_compute_dtype_unless_it_casts_itself(options, expected, rng):
    w, seen = normal(rng, 3).astype(jnp.bfloat16), []

    def loss(w):
        seen.append(w.dtype.name)
        return (w * w).sum().astype(jnp.float32)

    grads = gradients(w, loss=loss, grad_dtype=jnp.float32, **options).grads
    assert grads.dtype == jnp.float32 and set(seen) == {expected}


# Frameworks


@pytest.mark.thorough
@pytest.mark.parametrize("framework", ["haiku", "linen", "equinox"])
def test_a_policy_map_casts_what_is_stored_in_16_bits_as_it_casts_float32(framework, rng):
    x = normal(rng, 5, 6)
    net = zoo.build(framework, zoo.mlp, x, rng=rng)
    policy = "p=bf16,c=bf16,o=f32; */head: full"
    model, wide = stored(net.model, jnp.bfloat16)
    loss = lambda model, x: (leniently(net.under(policy))(model, x) ** 2).mean()  # noqa: E731
    options = {"loss": loss, "policy": policy}
    grads = gradients(model, x, grad_dtype="f32", **options).grads
    assert_same_bits(grads, gradients(wide, x, grad_dtype="f32", **options).grads)
    assert set(dtypes(model)) == {"bfloat16"} and set(dtypes(grads)) == {"float32"}
    assert not is_rounded(grads, jnp.bfloat16)


@pytest.mark.thorough
@pytest.mark.versions
def test_modules_of_nnx_keep_their_state_and_their_storage(rng):
    def make(dtype):
        layers = nnx.Linear(6, 4, rngs=nnx.Rngs(0)), nnx.BatchNorm(4, rngs=nnx.Rngs(0))
        model = nnx.Sequential(*layers)
        params = jmpx.cast_tree(nnx.state(model, nnx.Param), jnp.bfloat16)
        nnx.update(model, jmpx.cast_tree(params, dtype))
        return model

    def loss(model, x):
        return (leniently(model)(x).astype(jnp.float32) ** 3).mean()

    x = normal(rng, 5, 6)
    models = model, wide = make(jnp.bfloat16), make(jnp.float32)
    grads = [gradients(each, x, loss=loss, grad_dtype="f32").grads for each in models]
    assert_same_bits(*grads)
    assert set(dtypes(grads[0])) == {"float32"}
    assert set(dtypes(nnx.state(model, nnx.Param))) == {"bfloat16"}
    assert_same_bits(nnx.state(model, nnx.BatchStat), nnx.state(wide, nnx.BatchStat))
    assert np.abs(model.layers[1].mean[...]).max() > 0


@pytest.mark.thorough
def test_no_warning_of_casts_where_nothing_was_rounded(rng):
    """A warning would be an error: bfloat16 parameters lose nothing in the cast to bfloat16."""
    model, wide = stored(eqx.nn.Linear(6, 2, key=jax.random.key(0)), jnp.bfloat16)

    def loss(model, x):
        return jmpx.autocast(lambda model, x: (jax.vmap(model)(x) ** 2).mean(), "c=bf16")(model, x)

    x = normal(rng, 5, 6)
    assert gradients(model, x, loss=loss, grad_dtype="f32").grads.weight.dtype == jnp.float32
    with pytest.warns(UserWarning, match="has cast its arguments to 16 bits"):
        gradients(wide, x, loss=loss, grad_dtype="f32")


# Narrower than the parameters, and float64


@pytest.mark.parametrize(
    ("factor", "finite", "scale"),
    [(2.0**15, True, "Static"), (2.0**17, False, "Dynamic"), (2.0**17, False, "NoOp")],
)
@in_16_bits
def test_what_overflows_in_the_last_cast_is_seen(factor, finite, scale):
    scaling = LOSS_SCALES[scale]()
    options = {"loss": lambda w: (factor * w).sum(), "policy": "f32", "scaling": scaling}
    for dtype in jnp.float32, jnp.bfloat16:  # the parameters
        w = jnp.ones(2, dtype)
        result = gradients(w, grad_dtype=jnp.float16, **options)
        assert result.grads.dtype == jnp.float16 and result.grads_finite == finite
        assert_same_bits(result.loss_scale, scaling.adjust(finite))
        assert gradients(w, **options).grads_finite


def test_16_bits_of_the_other_kind_are_rounded_once(rng):
    w, wide = stored(normal(rng, 5), jnp.bfloat16)
    options = {"loss": lambda w: jnp.sin(w).sum(), "policy": "f32"}
    grads = gradients(w, grad_dtype="f16", **options).grads
    assert_same_bits(grads, gradients(wide, **options).grads.astype(jnp.float16))
    assert not is_rounded(grads.astype(jnp.float32), jnp.bfloat16)
