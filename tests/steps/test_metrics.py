"""`jmpx.metrics`: the scalars of a step that a logger plots."""

# Optax types states as pytrees of arrays, which have no fields.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

import flax.serialization
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import lenient
from jax.sharding import Mesh, PartitionSpec as P

import jmpx

KEYS = ["loss_scale", "total_skipped", "consecutive_skipped"]
PARAMS = {"w": jnp.ones(2)}


def state_after(total, consecutive=0, optimizer=None):
    state = jmpx.skip_nonfinite(optimizer or optax.sgd(0.1)).init(PARAMS)
    counts = jnp.int32(total), jnp.int32(consecutive)
    return state._replace(total_skipped=counts[0], consecutive_skipped=counts[1])


def numbers(metrics):
    """Returns the numbers of metrics, which are what they say they are."""
    for name, value in metrics.items():
        assert isinstance(value, jax.Array) and value.shape == () and not value.weak_type
        assert value.dtype == ("float32" if name == "loss_scale" else "int32")
    return {name: value.item() for name, value in metrics.items()}


SCALES = {
    "none": (jmpx.NoOpLossScale(), 1),
    "static": (jmpx.StaticLossScale(1024), 1024),
    "dynamic": (jmpx.DynamicLossScale(2.0**15), 2**15),
    "below 1": (jmpx.DynamicLossScale(2.0**-3, min_loss_scale=2.0**-5), 2**-3),
    # What is restored from a checkpoint may be beyond the bounds, of which the nearer one counts.
    "beyond": (
        jax.tree.unflatten(
            jax.tree.structure(jmpx.DynamicLossScale(max_loss_scale=64.0)),
            [jnp.float32(2**15), jnp.int32(0)],
        ),
        64,
    ),
    "jmp": (jmp.DynamicLossScale(jnp.float32(512)), 512),
    "jmp, none": (jmp.NoOpLossScale(), 1),
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("scale", SCALES)
def test_the_scale_is_the_one_that_the_next_step_scales_by(scale, jit):
    scaling, expected = SCALES[scale]
    func = jax.jit(jmpx.metrics) if jit and not scale.startswith("jmp") else jmpx.metrics
    assert numbers(func(loss_scale=scaling)) == {"loss_scale": expected}
    found = func(state_after(3, 2), scaling)
    assert list(found) == (KEYS if func is jmpx.metrics else sorted(KEYS))  # jax.jit sorts keys
    expected = {"loss_scale": expected, "total_skipped": 3, "consecutive_skipped": 2}
    assert numbers(found) == expected


def test_they_are_those_of_a_run_at_each_step(rng):
    optimizer, scaling = jmpx.skip_nonfinite(lenient(optax.adam(0.1))), jmpx.DynamicLossScale(8.0)
    params, opt_state = PARAMS, optimizer.init(PARAMS)
    flags = rng.random(12) < 0.6

    @jax.jit
    def train_step(params, opt_state, scaling, x):
        grad_fn = jmpx.filter_value_and_grad(
            lambda params, x: jnp.sum(params["w"] * x), scaling, policy="full"
        )
        loss, scaling, finite, grads = grad_fn(params, x)
        params, opt_state = jmpx.optimizer_update(params, optimizer, opt_state, grads, finite)
        return params, opt_state, scaling, {"loss": loss} | jmpx.metrics(opt_state, scaling)

    total = row = 0
    for finite in flags:
        x = jnp.where(finite, jnp.ones(2), jnp.nan)
        params, opt_state, scaling, found = train_step(params, opt_state, scaling, x)
        total, row = total + (not finite), 0 if finite else row + 1
        del found["loss"]
        assert numbers(found) == dict(
            zip(KEYS, (float(scaling.loss_scale), total, row), strict=True)
        )
    assert 0 < total < len(flags)


def optimizer_of_nnx():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, jmpx.skip_nonfinite(optax.sgd(0.1)), wrt=nnx.Param)
    optimizer.update(model, jax.tree.map(lambda p: p * jnp.nan, nnx.state(model, nnx.Param)))
    return optimizer


# Where states are: each has a step that was skipped.
PLACES = {
    "itself": lambda: state_after(1, 1),
    "chain": lambda: (optax.EmptyState(), (state_after(1, 1), optax.EmptyState())),
    "train state": lambda: {"params": PARAMS, "opt_state": state_after(1, 1), "step": 7},
    "state dict": lambda: flax.serialization.to_state_dict(state_after(1, 1)),
    "nnx.Optimizer": optimizer_of_nnx,
    "its opt_state": lambda: optimizer_of_nnx().opt_state,
    "nnx.state": lambda: nnx.state(optimizer_of_nnx()),
    "of two networks": lambda: {"actor": state_after(1, 0), "critic": state_after(0, 1)},
    "stack": lambda: jax.tree.map(lambda *x: jnp.stack(x), state_after(1, 0), state_after(0, 1)),
    "numpy": lambda: jax.device_get(state_after(1, 1)),
}


@pytest.mark.parametrize("place", PLACES)
def test_states_are_found_wherever_they_are(place):
    expected = {"total_skipped": 1, "consecutive_skipped": 1}
    assert numbers(jmpx.metrics(PLACES[place]())) == expected


def test_nothing_is_made_up():
    plain = optax.adam(0.1).init(PARAMS)  # optimizer_update skips its steps, but counts none
    assert numbers(jmpx.metrics(plain, jmpx.NoOpLossScale())) == {"loss_scale": 1}
    assert list(jmpx.metrics(state_after(0))) == KEYS[1:]


def test_of_a_stack_of_scales_the_smallest_is_told():
    scales = jax.vmap(jmpx.DynamicLossScale)(jnp.array([8.0, 2.0, 4.0]))
    assert numbers(jmpx.metrics(None, scales)) == {"loss_scale": 2}
    found = jax.vmap(lambda scaling: jmpx.metrics(None, scaling))(scales)
    assert found["loss_scale"].tolist() == [8, 2, 4]


@pytest.mark.parametrize("transform", ["shard_map", "shard_map, unchecked", "pmap"])
def test_each_device_tells_its_own_and_nothing_is_sent(transform):
    def of_device(total, scale):
        one = jmpx.DynamicLossScale(scale[0])
        states = state_after(0, 5), state_after(0)._replace(total_skipped=total[0])
        return jax.tree.map(lambda x: x[None], jmpx.metrics(states, one))

    args = jnp.array([3, 1], jnp.int32), jnp.array([8.0, 2.0])
    if transform == "pmap":
        func = lambda *args: jax.pmap(of_device, "d")(*(x[:, None] for x in args))  # noqa: E731
    else:
        mesh = Mesh(np.array(jax.devices()[:2]), "d")
        check = "unchecked" not in transform
        mapped = jax.shard_map(
            of_device, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=check
        )
        func = jax.jit(mapped)
        assert "all-" not in str(func.lower(*args).compile().as_text())
    found = {name: np.ravel(value).tolist() for name, value in func(*args).items()}
    assert found == {
        "loss_scale": [8, 2],
        "total_skipped": [3, 1],
        "consecutive_skipped": [5, 5],
    }


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((), "got a NoneType without one: jmpx.metrics takes"),
        ((optax.adam(0.1).init(PARAMS),), "got a tuple without one: jmpx.metrics takes"),
        ((jmpx.DynamicLossScale(), state_after(1)), "a loss scale as the second .* got Skip"),
        ((jmpx.NoOpLossScale(),), "got a NoOpLossScale without one: jmpx.metrics takes"),
        ((optax.adam(0.1), jmpx.NoOpLossScale()), "got a Gradient.* without one: jmpx.metrics"),
        ((state_after(1), 1024.0), "a loss scale as the second .* got 1024.0: jmpx.metrics takes"),
        ((state_after(1), jmpx.DynamicLossScale), "a loss scale as the second .* got <class"),
        ((None, PARAMS), "a loss scale as the second .* got {'w'"),
    ],
)
def test_bad_arguments(args, expected):
    with pytest.raises(TypeError, match=expected) as error:
        jmpx.metrics(*args)
    text = str(error.value)
    assert text.startswith("Expected ") and text.endswith(".") and "\n" not in text
    assert text.count(". ") == 0
