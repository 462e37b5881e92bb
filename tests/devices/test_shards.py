"""Sharded parameters: the gradients of the mean loss, and one decision on all devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import enable_x64, normal
from helpers.maps import AXIS, DEVICES, MAPS, everywhere, over_devices
from helpers.shards import (
    MASK,
    READS,
    SPECS,
    flag_reductions,
    gather,
    gradients,
    in_float64,
    make_weights,
    network,
    whole,
)
from helpers.training import LOSS_SCALES
from jax.sharding import PartitionSpec as P

import jmpx

# JAX 0.10 announces the end of pmap with a DeprecationWarning.
pytestmark = pytest.mark.filterwarnings("ignore:.*pmap.*:DeprecationWarning")

# The error of a gradient, relative to its largest number: of float32 and its sums, of products in
# bfloat16, and of sums of four numbers in 16 bits.
ERRORS = {"full": 1e-5, "c=bf16": 0.05, "c=f32,r=bf16": 0.02, "c=f32,r=f16": 5e-3}


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("how", "policy"),
    [(how, policy) for how in MAPS for policy in ERRORS if "r=" not in policy or how != "vmap"],
)
def test_values_against_float64(how, policy, rng):
    """Each of the loss scales, in one program."""
    params, batch = make_weights(rng), normal(rng, 12, 8)
    if policy == "c=bf16":
        del params["jmpx"]  # which casts by itself
    specs, mask = ({name: kind[name] for name in params} for kind in (SPECS, MASK))
    masks = [None, mask] if how == "shard_map" else [mask]
    loss_fn = lambda params, x: network(params, x, READS)  # noqa: E731

    def run(params, x):
        if how == "shard_map":
            params["cast"] = everywhere(params["cast"])
        results = {}
        for kind, scaling in LOSS_SCALES.items():
            for mask in masks if kind == "Dynamic" else masks[-1:]:
                results[f"{kind} {mask is None}"] = gradients(
                    loss_fn, scaling(), policy=policy, sharded=mask
                )(params, x)
        return results

    value, expected = in_float64(network, params, batch)
    for each in over_devices(run, how, params, batch, specs=(specs, P(AXIS))).values():
        np.testing.assert_allclose(each[0], [value] * DEVICES, rtol=ERRORS[policy])
        assert each[2].all()
        for name, grad in each[3].items():
            bound = ERRORS[policy] * np.abs(expected[name]).max()
            np.testing.assert_allclose(
                whole(name, grad), expected[name], rtol=0, atol=bound, err_msg=name
            )


@pytest.mark.parametrize("how", MAPS)
def test_both_gathers_give_the_same_bits_in_float32(how, rng):
    w, batch = normal(rng, 8, 4), normal(rng, 12, 8)

    def run(w, x):
        losses = [lambda w, x, r=READS[r]: jnp.mean((x @ r(w)) ** 2) for r in ("tiled", "jmpx")]
        return [gradients(loss, sharded=True)(w, x) for loss in losses]

    theirs, ours = over_devices(run, how, w, batch)
    for a, b in zip(jax.tree.leaves(theirs), jax.tree.leaves(ours), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.thorough
@pytest.mark.parametrize("how", MAPS)
def test_a_loss_that_is_the_same_on_all_devices(how, rng):
    """The user averages it: each of its gradients is that of the mean loss all the same."""
    common = {
        "pmean": lambda loss: jax.lax.pmean(loss, AXIS),
        "psum": lambda loss: jax.lax.psum(loss, AXIS) / DEVICES,
        "gathered": lambda loss: jax.lax.all_gather(loss, AXIS).mean(),
    }
    kinds = ["tiled", "own", "replica"]
    params = {each: {kind: normal(rng, 8, 4) for kind in kinds} for each in common}
    batch = normal(rng, 12, 8)

    def loss_fn(params, x):
        losses = [mean(network(params[each], x, READS)) for each, mean in common.items()]
        return sum(losses, jnp.zeros(()))

    def run(params, x):
        mask = dict.fromkeys(common, {kind: MASK[kind] for kind in kinds})
        return gradients(loss_fn, sharded=mask)(params, x)

    specs = dict.fromkeys(common, {kind: SPECS[kind] for kind in kinds})
    value, _, _, grads = over_devices(run, how, params, batch, specs=(specs, P(AXIS)))
    total = 0.0
    for each in common:
        one, expected = in_float64(network, params[each], batch)
        total += one
        for name, grad in grads[each].items():
            np.testing.assert_allclose(
                whole(name, grad), expected[name], 1e-4, 1e-6, err_msg=f"{each} {name}"
            )
    np.testing.assert_allclose(value, [total] * DEVICES, rtol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize(("devices", "how"), list(zip([3, 1, 6, 3], MAPS, strict=True)))
def test_numbers_of_devices_that_are_no_power_of_two(devices, how, rng):
    params = {"tiled": normal(rng, 2 * devices, 4), "replica": normal(rng, 2 * devices, 4)}
    batch = normal(rng, 2 * devices, 2 * devices)
    run = gradients(
        lambda params, x: network(params, x, READS),
        policy="c=f32,r=f16",
        sharded={"tiled": True, "replica": False},
    )
    specs = ({name: SPECS[name] for name in params}, P(AXIS))
    grads = over_devices(run, how, params, batch, specs=specs, devices=devices)[-1]
    _, expected = in_float64(network, params, batch)
    np.testing.assert_allclose(whole("tiled", grads["tiled"]), expected["tiled"], 1e-4, 1e-6)
    bound = 5e-3 * np.abs(expected["replica"]).max()
    np.testing.assert_allclose(grads["replica"][0], expected["replica"], 0, bound)


@pytest.mark.thorough
@pytest.mark.parametrize("mixed", [True, False])
def test_parameters_of_all_dtypes(mixed, rng):
    """Complex, wide and narrow ones, and integers, which have no gradient."""
    with enable_x64():
        params = {
            "f64": jnp.asarray(rng.normal(size=(8, 4))),
            "c64": jax.lax.complex(normal(rng, 8, 4), normal(rng, 8, 4)),
            "bf16": normal(rng, 8, 4).astype(jnp.bfloat16),
            "int": jnp.arange(8),
            "none": None,
        }
        batch = normal(rng, 12, 8).astype(jnp.float64)

        def loss_fn(params, x, read=gather):
            f64, c64, bf16 = (read(params[name]) for name in ("f64", "c64", "bf16"))
            y = x @ f64.astype(x.dtype) + x @ bf16.astype(x.dtype)
            y = y * read(params["int"]).sum().astype(x.dtype)
            return jnp.mean(y**2) + jnp.mean(jnp.abs(x.astype(c64.dtype) @ c64) ** 2).astype(
                y.dtype
            )

        for how, mask in [("shard_map", None), ("pmap", True)]:
            run = gradients(loss_fn, policy="c=f64,r=f32", sharded=mask, use_mixed_precision=mixed)
            grads = over_devices(lambda *args, run=run: run(*args)[3], how, params, batch)
            expected = jax.grad(lambda p: loss_fn({**params, **p}, batch, lambda w: w))(
                {name: params[name] for name in ("f64", "c64", "bf16")}
            )
            assert grads["int"] is None and grads["none"] is None
            for name, tolerance in ("f64", 1e-6), ("c64", 1e-5), ("bf16", 0.02):
                found = np.concatenate(grads[name])
                assert found.dtype == params[name].dtype
                bound = tolerance * np.abs(expected[name]).max()
                np.testing.assert_allclose(
                    found.astype(np.complex128), expected[name].astype(np.complex128), 0, bound
                )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", MAPS)
def test_micro_batches(how, rng):
    params, batch = make_weights(rng), normal(rng, 16, 8)

    def run(params, x):
        if how == "shard_map":
            params["cast"] = everywhere(params["cast"])
        mask = None if how == "shard_map" else MASK
        loss_fn = lambda params, x: network(params, x, READS)  # noqa: E731
        return gradients(loss_fn, sharded=mask, batch=jmpx.Batch(microbatches=2))(params, x)

    grads = over_devices(run, how, params, batch, specs=(SPECS, P(AXIS)))[3]
    _, expected = in_float64(network, params, batch)
    for name, grad in grads.items():
        np.testing.assert_allclose(whole(name, grad), expected[name], 1e-4, 1e-6, err_msg=name)


# One decision


# JAX 0.7 warns of a pmap in a jit.
@pytest.mark.sampled(4)
@pytest.mark.filterwarnings("ignore:.*includes a pmap:UserWarning")
@pytest.mark.parametrize(("kind", "expected"), [("replica", 0), ("tiled", 1), ("jmpx", 1)])
@pytest.mark.parametrize("how", [how for how in MAPS if how != "vmap"])
def test_the_number_of_reductions_of_the_flag(how, kind, expected, rng):
    weights = {f"{kind} {i}": normal(rng, 8, 4) for i in range(3)}
    reads = dict.fromkeys(weights, READS[kind])
    run = gradients(
        lambda params, x: network(params, x, reads),
        jmpx.DynamicLossScale(8.0),
        sharded=MASK[kind],
    )
    lowered = lambda *args: over_devices(run, how, *args, specs=(SPECS[kind], P(AXIS)))  # noqa: E731
    text = jax.jit(lowered).lower(weights, normal(rng, 12, 8)).as_text()
    assert flag_reductions(text) == expected


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("how", "bad"), [*((how, "overflow") for how in MAPS), ("shard_map", "nan"), ("pmap", "nan")]
)
def test_what_overflows_in_one_shard_is_skipped_everywhere(how, bad, rng):
    """Three steps, whose second plants it in the gradient of the third device alone."""
    params = {"shard": normal(rng, 8, 4).at[5].set(0), "replica": normal(rng, 8, 4) / 4}
    batches = normal(rng, 3, 12, 8).at[:, :, 5].set(0.0)
    batches = batches.at[1, :, 5].set(60000.0 if bad == "overflow" else 1.0)
    optimizer = optax.sgd(0.1, momentum=0.5)

    @jax.custom_vjp
    def planted(row, x):
        return row

    # Only the gradient of row 5 gets the NaN: forward, and on other devices, all is finite.
    spoil = lambda x, g: jnp.where((x[:, 5].max() > 0) & (jnp.arange(8)[:, None] == 5), jnp.nan, g)  # noqa: E731
    planted.defvjp(lambda w, x: (w, x), lambda x, g: (spoil(x, g).astype(g.dtype), 0 * x))

    def loss_fn(params, x):
        w = gather(params["shard"])
        w = planted(w, x) if bad == "nan" else w
        return jnp.mean((x @ w + x @ params["replica"].at[5].set(0)).astype(jnp.float32) ** 2)

    def run(params, batches):
        state, scaling, history = optimizer.init(params), jmpx.DynamicLossScale(64.0, period=2), []
        for i in range(3):
            before = params
            _, scaling, finite, grads = gradients(
                loss_fn, scaling, policy="c=f16", sharded={"shard": True, "replica": False}
            )(params, batches[:, i])
            params, state = jmpx.optimizer_update(params, optimizer, state, grads, finite)
            same = [jnp.all(a == b) for a, b in zip(before.values(), params.values(), strict=True)]
            own = jnp.stack([jmpx.all_finite(grads["shard"]), jmpx.all_finite(grads["replica"])])
            history.append((finite, scaling.loss_scale, scaling.counter, jnp.stack(same), own))
        return history

    specs = ({"shard": P(AXIS), "replica": P()}, P(AXIS))
    history = over_devices(run, how, params, batches.swapaxes(0, 1), specs=specs)
    for step, (finite, scale, counter, same, own) in enumerate(history):
        assert (finite == (step != 1)).all() and (same == (step == 1)).all()
        assert (scale == (64, 32, 32)[step]).all() and (counter == (1, 0, 1)[step]).all()
        # The gradients of the shard on one device are not finite, and all others are.
        expected = np.ones((DEVICES, 2), bool)
        expected[2, 0] = step != 1
        np.testing.assert_array_equal(own, expected)
