"""Model state comes back as it was where gradients are not finite, and as it is made elsewhere."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_same_bits, normal
from helpers.maps import AXIS, everywhere, mesh_of
from helpers.nnx_net import make, squares, state_of
from jax.sharding import PartitionSpec as P

import jmpx
import jmpx.equinox
import jmpx.flax
import jmpx.haiku

MAP = jmpx.get_policy_map("c=f16,o=f32; BatchNorm: full")
DYNAMIC = jmpx.DynamicLossScale(2.0**4)
SCALES = {"dynamic": DYNAMIC, "static": jmpx.StaticLossScale(2.0**4), "none": jmpx.NoOpLossScale()}
pytestmark = pytest.mark.usefixtures("standard_promotion")


def squared(y):
    return jnp.mean(jnp.square(y))


def equinox():
    def loss_fn(model, state, x):
        each = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        y, state = each(x, state)
        return squared(y), (state, y)

    def make(key):
        norm = eqx.nn.BatchNorm(2, axis_name="batch", mode="batch")
        return eqx.nn.Sequential([eqx.nn.Linear(3, 2, key=key), norm])

    return *eqx.nn.make_with_state(make)(jax.random.key(0)), loss_fn


def grad_fn(loss_fn, scale, **options):
    options = {"has_aux": True, "policy": MAP, "state_argnum": 1, **options}
    return jmpx.value_and_grad(loss_fn, SCALES[scale], **options)


def input_of(rng, overflows):
    x = normal(rng, 8, 3)
    return x * 1e6 if overflows else x


def test_state_comes_back_as_it_was_where_gradients_overflow(rng):
    params, state, loss_fn = equinox()
    step = eqx.filter_jit(grad_fn(loss_fn, "static", batch=jmpx.Batch(microbatches=2)))
    (_, (new, _)), _, grads_finite, _ = step(params, state, input_of(rng, overflows=True))
    assert not grads_finite
    assert_same_bits(new, state)
    (_, (new, _)), _, grads_finite, _ = step(params, state, input_of(rng, overflows=False))
    pairs = zip(jax.tree.leaves(new), jax.tree.leaves(state), strict=True)
    assert grads_finite and not all(np.array_equal(new, old) for new, old in pairs)


def test_without_a_scale_nothing_is_added(rng):
    params, x = normal(rng, 3, 2), input_of(rng, overflows=True)

    def cast(params, state, x):
        loss, state = averaged(params.astype(jnp.float16), state, x.astype(jnp.float16))
        return loss.astype(jnp.float32), state

    def taken(scale):
        return lambda *args: tuple(grad_fn(averaged, scale, policy="by=arguments,c=f16")(*args))[
            ::3
        ]

    by_hand = jax.value_and_grad(cast, has_aux=True)
    lowered = [jax.jit(f).lower(params, STATE, x) for f in (taken("none"), by_hand)]
    assert [each.as_text().count("stablehlo.select") for each in lowered] == [0, 0]
    compiled: list[Any] = [each.compile() for each in lowered]
    assert len({each.as_text().count(" = ") for each in compiled}) == 1
    (_, state), _ = compiled[0](params, STATE, x)
    assert not jmpx.all_finite(state)
    # A finite step makes the same bits with a scale.
    (_, state), _ = compiled[0](params, STATE, x / 1e6)
    (_, scaled), _ = jax.jit(taken("dynamic"))(params, STATE, x / 1e6)
    assert_same_bits(scaled, state)


@pytest.mark.thorough
@pytest.mark.parametrize("by", ["gradient function", "view"])
def test_variables_of_nnx_come_back_and_random_counters_go_on(by, rng):
    model = make(rng)
    in_view = lambda model, x: squared(jmpx.flax.with_policies(model, MAP)(x))  # noqa: E731
    loss_fn, policy = (in_view, "full") if by == "view" else (squares, "c=f16")

    @nnx.jit
    def step(model, x):
        found = jmpx.value_and_grad(loss_fn, DYNAMIC, policy=policy)(model, x)
        return found.grads_finite

    before = state_of(model)
    assert not step(model, input_of(rng, overflows=True))
    after = state_of(model)
    counter = "dropout/rngs/count"
    assert {path for path in before if not np.array_equal(before[path], after[path])} == {counter}
    assert after[counter] == before[counter] + 1
    assert step(model, input_of(rng, overflows=False))
    assert not np.array_equal(state_of(model)["norm/mean"], before["norm/mean"])


def test_an_overflow_in_one_micro_batch_skips_them_all(rng):
    rngs = nnx.Rngs(0)  # a model that creates no variables, so that its state may be handed on
    layers = nnx.Linear(3, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
    model = nnx.Sequential(*layers)
    before = state_of(model)
    x = normal(rng, 8, 3).at[7].mul(1e6)
    options = {"policy": "c=f16", "batch": jmpx.Batch(microbatches=4)}
    step = nnx.jit(jmpx.value_and_grad(squares, DYNAMIC, **options))
    assert not step(model, x).grads_finite
    after = state_of(model)
    changed = {path for path in before if not np.array_equal(before[path], after[path])}
    (counter,) = changed
    assert counter.endswith("rngs/count") and after[counter] == 4


def averaged(params, state, x):
    """A loss with state, without a framework; the state is the mean of the inputs."""
    mean = jnp.mean(x, 0, dtype=jnp.float32)
    return squared(x @ params), {"mean": mean, "steps": state["steps"] + 1}


STATE = {"mean": jnp.zeros(3), "steps": jnp.zeros((), jnp.int32)}


def test_a_scan_over_steps_keeps_the_state_of_the_last_finite_one(rng):
    xs = jnp.stack([normal(rng, 8, 3), input_of(rng, overflows=True), normal(rng, 8, 3)])
    params = normal(rng, 3, 2)

    def body(carry, x):
        options = {"has_aux": True, "policy": "c=f16", "state_argnum": 1}
        f = jmpx.value_and_grad(averaged, carry[1], **options)
        (_, state), scale, finite, _ = f(params, carry[0], x)
        return (state, scale), (finite, state)

    _, (finite, states) = jax.jit(lambda: jax.lax.scan(body, (STATE, DYNAMIC), xs))()
    assert finite.tolist() == [True, False, True] and states["steps"].tolist() == [1, 1, 2]
    np.testing.assert_array_equal(states["mean"][1], states["mean"][0])
    assert jmpx.all_finite(states)


@pytest.mark.parametrize("axis_name", [AXIS, None])
def test_devices_that_share_their_state_keep_it_together(axis_name, rng):
    """Without the axis each device has a flag of its own, but what they share stays shared."""
    x = normal(rng, 16, 3).at[3].mul(1e6)

    def loss_fn(params, state, x):
        loss, state = averaged(params, state, x)
        return loss, {**state, "mean": jax.lax.pmean(state["mean"], AXIS)}

    def step(params, x):
        over = None if axis_name is None else jmpx.Over(axis_name)
        f = grad_fn(loss_fn, "dynamic", policy="c=f16", over=over)
        (_, state), _, finite, _ = f(params if axis_name else everywhere(params), STATE, x)
        return state, finite[None] if axis_name is None else everywhere(finite[None])

    specs = (P(), P(AXIS))
    mapped = jax.shard_map(step, mesh=mesh_of(4), in_specs=specs, out_specs=specs)
    state, finite = jax.jit(mapped)(normal(rng, 3, 2), x)
    assert finite.any() != (axis_name is not None)
    assert_same_bits(state, STATE)


def test_state_that_is_split_anew_on_an_explicit_mesh_is_selected(rng):
    mesh = jax.make_mesh((4,), (AXIS,), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x, state = normal(rng, 8, 3).at[3].mul(1e6), {"h": jnp.zeros((8, 2))}

        def loss_fn(params, state, x):
            h = x @ params
            return squared(h), {"h": h.astype(jnp.float32)}

        f = jax.jit(grad_fn(loss_fn, "dynamic", policy="c=f16"))
        (_, new), _, finite, _ = f(
            jax.device_put(normal(rng, 3, 2), P()), state, jax.device_put(x, P(AXIS))
        )
    assert not finite
    assert_same_bits(new, state)
