"""`jmpx.optimizer_update` takes an `nnx.Optimizer`, and updates it and its model in place."""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_same_bits

import jmpx

pytestmark = pytest.mark.usefixtures("standard_promotion")  # as Optax asks for


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.inner = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(4, 4, rngs=rngs)])

    def __call__(self, x):
        return self.blocks[0](self.norm(self.inner(x)))


X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32)


def loss_fn(model, x):
    return jnp.mean(model(x) ** 2)


def leaves(*objects):
    """The arrays of objects and of pytrees of variables, as they are now."""
    states = [nnx.state(each) if isinstance(each, nnx.Module) else each for each in objects]
    return [*map(np.asarray, jax.tree.leaves(states))]


def by_split(step):
    """A step under `jax.jit`, between `nnx.split` and `nnx.merge`."""

    @jax.jit
    def pure(graphdef, state, grads, finite):
        model, optimizer = nnx.merge(graphdef, state)
        step(model, optimizer, grads, finite)
        return nnx.state((model, optimizer))

    def run(model, optimizer, grads, finite):
        new = pure(*nnx.split((model, optimizer)), grads, finite)
        nnx.update((model, optimizer), new)

    return run


def at_once(step):
    return step


OPTIMIZERS = {
    "adam": lambda: optax.adam(optax.cosine_decay_schedule(1e-2, 10)),
    "counting": lambda: jmpx.skip_nonfinite(optax.adam(1e-2)),
    "sums": lambda: jmpx.skip_nonfinite(optax.MultiSteps(optax.sgd(0.1), 2)),
}


@pytest.mark.sampled(2)
@pytest.mark.versions
@pytest.mark.parametrize("around", [at_once, nnx.jit, by_split])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_steps_as_the_optimizer_does_and_skips_to_the_bit(name, around):
    @around
    def step(model, optimizer, grads, finite):
        new = jmpx.optimizer_update(model, optimizer, grads=grads, grads_finite=finite)
        assert new[0] is model and new[1] is optimizer

    model, expected = Net(), Net()
    optimizer = nnx.Optimizer(model, OPTIMIZERS[name](), wrt=nnx.Param)
    reference = nnx.Optimizer(expected, OPTIMIZERS[name](), wrt=nnx.Param)
    counts = name in ("counting", "sums")

    def parts(optimizer):
        return optimizer.opt_state.inner_state if counts else optimizer.opt_state, optimizer.step

    for taken in (1, 2):
        grads = nnx.state(nnx.grad(loss_fn)(Net(), X))
        step(model, optimizer, grads, jnp.array(True))
        reference.update(expected, grads)
        pairs = zip(
            leaves(model, parts(optimizer)), leaves(expected, parts(reference)), strict=True
        )
        assert all(np.allclose(new, old, 1e-5, 1e-7) for new, old in pairs)
        before = leaves(model, parts(optimizer))
        bad = jax.tree.map(lambda grad: jnp.full_like(grad, jnp.nan), grads)
        step(model, optimizer, bad, jnp.array(False))
        assert_same_bits(leaves(model, parts(optimizer)), before)
        if counts:
            state = optimizer.opt_state
            assert not state.grads_finite[...] and state.total_skipped[...] == taken


def test_a_float16_step_overflows_and_recovers():
    model = Net()
    optimizer = nnx.Optimizer(model, jmpx.skip_nonfinite(optax.sgd(0.1)), wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer, loss_scale, x):
        result = jmpx.value_and_grad(loss_fn, loss_scale, policy="c=f16")(model, x)
        jmpx.optimizer_update(
            model, optimizer, grads=result.grads, grads_finite=result.grads_finite
        )
        return result.loss_scale, result.grads_finite

    loss_scale = jmpx.DynamicLossScale(2.0**30)
    taken = 0
    for _ in range(30):
        before = leaves(nnx.state(model, nnx.Param))
        loss_scale, finite = train_step(model, optimizer, loss_scale, X)
        taken += int(finite)
        if not finite:
            assert_same_bits(leaves(nnx.state(model, nnx.Param)), before)
    assert 0 < taken < 30 and optimizer.step[...] == taken
    assert optimizer.opt_state.total_skipped[...] == 30 - taken


class Adapter(nnx.Param):
    pass


def test_it_updates_what_the_optimizer_is_for():
    """Also with 16-bit parameters, which their optimizer rounds."""
    model = nnx.Dict(base=nnx.Param(jnp.ones(3)), adapter=Adapter(jnp.ones(3)))
    rounding = jmpx.optim.low_precision_params(optax.sgd(2.0**-10), "split")
    optimizer = nnx.Optimizer(model, rounding, wrt=Adapter)
    grads = jax.tree.map(jnp.ones_like, nnx.state(model))
    model["adapter"] = Adapter(jnp.ones(3, jnp.bfloat16))
    for _ in range(8):
        jmpx.optimizer_update(model, optimizer, grads=grads, grads_finite=True)
    assert model["base"][...].tolist() == [1, 1, 1] and optimizer.step[...] == 8
    assert model["adapter"].dtype == jnp.bfloat16
    assert model["adapter"][...].tolist() == [1 - 2.0**-7] * 3  # each step alone rounds to nothing
