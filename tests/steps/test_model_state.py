"""Model state comes back as it was where gradients are not finite, and as it is made elsewhere."""

from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
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
SCALES = {
    "dynamic": jmpx.DynamicLossScale(2.0**4),
    "static": jmpx.StaticLossScale(2.0**4),
    "none": jmpx.NoOpLossScale(),
}
pytestmark = pytest.mark.usefixtures("standard_promotion")


def squared(y):
    return jnp.mean(jnp.square(y))


def linen():
    """The arguments of a loss with state, and the loss."""
    network = nn.Sequential([nn.Dense(8), nn.BatchNorm(use_running_average=False), nn.Dense(2)])
    variables = network.init(jax.random.key(0), jnp.ones((8, 3)))

    def loss_fn(params, stats, x):
        with jmpx.flax.policies(MAP):
            variables = {"params": params, "batch_stats": stats}
            y, updates = network.apply(variables, x, mutable=["batch_stats"])
        return squared(y), updates["batch_stats"]

    return variables["params"], variables["batch_stats"], loss_fn


def haiku():
    network = hk.transform_with_state(
        lambda x: hk.Linear(2)(hk.BatchNorm(True, True, 0.9)(hk.Linear(8)(x), True))
    )

    def loss_fn(params, state, x):
        with jmpx.haiku.policies(MAP):
            y, state = network.apply(params, state, None, x)
        return squared(y), state

    return *network.init(jax.random.key(0), jnp.ones((8, 3))), loss_fn


class WithNorm(eqx.Module):
    inner: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self, key):
        self.inner = eqx.nn.Linear(3, 2, key=key)
        self.norm = eqx.nn.BatchNorm(2, axis_name="batch", mode="batch")

    def __call__(self, x, state):
        return self.norm(self.inner(x), state)


def equinox():
    def loss_fn(model, state, x):
        each = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        y, state = each(x, state)
        return squared(y), (state, y)

    return *eqx.nn.make_with_state(WithNorm)(jax.random.key(0)), loss_fn


def grad_fn(loss_fn, scale, **options):
    options = {"has_aux": True, "policy": MAP, "state_argnum": 1, **options}
    return jmpx.filter_value_and_grad(loss_fn, SCALES[scale], **options)


def state_in(aux):
    return aux[0] if type(aux) is tuple else aux


def input_of(rng, overflows):
    x = normal(rng, 8, 3)
    return x * 1e6 if overflows else x


@pytest.mark.parametrize(
    ("framework", "scale", "microbatches"),
    [(linen, "dynamic", 1), (haiku, "static", 2), (equinox, "dynamic", 2)],
)
def test_state_comes_back_as_it_was_where_gradients_overflow(framework, scale, microbatches, rng):
    params, state, loss_fn = framework()
    step = eqx.filter_jit(grad_fn(loss_fn, scale, batch=jmpx.Batch(microbatches=microbatches)))
    (_, aux), _, grads_finite, _ = step(params, state, input_of(rng, overflows=True))
    assert not grads_finite
    assert_same_bits(state_in(aux), state)
    (_, aux), _, grads_finite, _ = step(params, state, input_of(rng, overflows=False))
    pairs = zip(jax.tree.leaves(state_in(aux)), jax.tree.leaves(state), strict=True)
    assert grads_finite and not all(np.array_equal(new, old) for new, old in pairs)


@pytest.mark.thorough
def test_a_finite_step_makes_the_same_bits_as_without_a_scale(rng):
    params, state, loss_fn = equinox()
    x, made = input_of(rng, overflows=False), []
    for scale in ("dynamic", "none"):
        (_, aux), *_ = eqx.filter_jit(grad_fn(loss_fn, scale))(params, state, x)
        made.append(state_in(aux))
    assert_same_bits(*made)


def test_without_a_scale_nothing_is_added(rng):
    params, x = normal(rng, 3, 2), input_of(rng, overflows=True)

    def cast(params, state, x):
        loss, state = averaged(params.astype(jnp.float16), state, x.astype(jnp.float16))
        return loss.astype(jnp.float32), state

    def by_hand(params, state, x):
        (value, aux), grads = jax.value_and_grad(cast, has_aux=True)(params, state, x)
        return value, aux, grads

    def taken(params, state, x):
        (value, aux), _, _, grads = grad_fn(averaged, "none", policy="c=f16")(params, state, x)
        return value, aux, grads

    lowered = [jax.jit(f).lower(params, STATE, x) for f in (taken, by_hand)]
    texts = [each.as_text().count("stablehlo.select") for each in lowered]
    compiled: list[Any] = [each.compile().as_text() for each in lowered]
    assert texts == [0, 0] and compiled[0].count(" = ") == compiled[1].count(" = ")
    assert not jmpx.all_finite(jax.jit(taken)(params, STATE, x)[1])


def test_the_page_s_recipe_for_state_that_is_not_known(rng):
    step = jax.jit(grad_fn(averaged, "dynamic", policy="c=f16", state_argnum=None))
    (_, new), _, grads_finite, _ = step(normal(rng, 3, 2), STATE, input_of(rng, overflows=True))
    assert not jmpx.all_finite(new)
    assert_same_bits(jmpx.select_tree(grads_finite, new, STATE), STATE)


@pytest.mark.parametrize("by", ["gradient function", "view"])
def test_variables_of_nnx_come_back_and_random_counters_go_on(by, rng):
    model = make(rng)
    if by == "view":
        loss_fn = lambda model, x: squared(jmpx.flax.with_policies(model, MAP)(x))  # noqa: E731
    else:
        loss_fn = squares
    policy = "full" if by == "view" else "c=f16"

    @nnx.jit
    def step(model, x):
        found = jmpx.filter_value_and_grad(loss_fn, SCALES["dynamic"], policy=policy)(model, x)
        return found.grads_finite

    before = state_of(model)
    assert not step(model, input_of(rng, overflows=True))
    after = state_of(model)
    counter = "dropout/rngs/count"
    assert {path for path in before if not np.array_equal(before[path], after[path])} == {counter}
    assert after[counter] == before[counter] + 1
    assert step(model, input_of(rng, overflows=False))
    assert not np.array_equal(state_of(model)["norm/mean"], before["norm/mean"])


class Averaging(nnx.Module):
    """Creates no variables, so that micro-batches may hand its state on."""

    def __init__(self, rngs):
        self.inner, self.norm = nnx.Linear(3, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.inner(x)))


def test_an_overflow_in_one_micro_batch_skips_them_all(rng):
    model = Averaging(nnx.Rngs(0))
    before = state_of(model)
    x = normal(rng, 8, 3).at[7].mul(1e6)
    options = {"policy": "c=f16", "batch": jmpx.Batch(microbatches=4)}
    step = nnx.jit(jmpx.filter_value_and_grad(squares, SCALES["dynamic"], **options))
    assert not step(model, x).grads_finite
    after = state_of(model)
    changed = {path for path in before if not np.array_equal(before[path], after[path])}
    assert changed == {"dropout/rngs/count"} and after["dropout/rngs/count"] == 4


def averaged(params, state, x):
    """A loss with state, without a framework; the state is the mean of the inputs."""
    return squared(x @ params), {
        "mean": jnp.mean(x, 0, dtype=jnp.float32),
        "steps": state["steps"] + 1,
    }


STATE = {"mean": jnp.zeros(3), "steps": jnp.zeros((), jnp.int32)}


def test_a_scan_over_steps_keeps_the_state_of_the_last_finite_one(rng):
    xs = jnp.stack([normal(rng, 8, 3), input_of(rng, overflows=True), normal(rng, 8, 3)])
    params = normal(rng, 3, 2)

    def body(carry, x):
        state, scale = carry
        f = jmpx.filter_value_and_grad(
            averaged, scale, has_aux=True, policy="c=f16", state_argnum=1
        )
        (_, state), scale, finite, _ = f(params, state, x)
        return (state, scale), (finite, state)

    _, (finite, states) = jax.jit(lambda: jax.lax.scan(body, (STATE, SCALES["dynamic"]), xs))()
    assert finite.tolist() == [True, False, True] and states["steps"].tolist() == [1, 1, 2]
    np.testing.assert_array_equal(states["mean"][1], states["mean"][0])
    assert jmpx.all_finite(states)


def test_each_of_a_mapped_stack_has_its_own_flag(rng):
    xs = jnp.stack([input_of(rng, overflows=True), normal(rng, 8, 3)])
    f = grad_fn(averaged, "dynamic", policy="c=f16")
    mapped = jax.jit(jax.vmap(f, in_axes=(None, None, 0)))
    (_, state), _, finite, _ = mapped(normal(rng, 3, 2), STATE, xs)
    assert finite.tolist() == [False, True] == state["mean"].any(1).tolist()
    assert state["steps"].tolist() == [0, 1]


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
        (_, new), _, finite, _ = f(normal(rng, 3, 2), state, jax.device_put(x, P(AXIS)))
    assert not finite
    assert_same_bits(new, state)
