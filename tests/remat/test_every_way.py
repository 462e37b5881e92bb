"""`save=` in every way, and `jmpx.remat`: values keep their bits, and less is kept."""

import functools

import autocast as benchmark
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_same_bits, exactly, normal, warns_once
from helpers.autocast import rows
from helpers.jaxprs import equations_of
from jax import lax

import jmpx
from jmpx._remat import cuts

WAYS = ("full", "by=arguments,c=bf16", "by=modules,c=bf16", "c=bf16", "c=f16")


@pytest.fixture
def short_pieces(monkeypatch):
    """Counts all recomputed bytes as live together; else, small models have one piece."""
    monkeypatch.setattr(cuts, "_AGAIN", 1)


# Programs that are hard to cut. Each takes weights and an array of their width.


def blocks(ws, x):
    for w in ws:
        x = x + jnp.tanh(x @ w)
    return x


@jax.custom_vjp
def with_backward(x, w):
    return jnp.tanh(x @ w)


def _forward(x, w):
    y = with_backward(x, w)
    return y, (x, w, y)


def _backward(kept, g):
    x, w, y = kept
    slope = g * (1 - y**2)
    return slope @ w.T, x.T @ slope


with_backward.defvjp(_forward, _backward)


@jax.custom_vjp
def over_devices(x, w):
    return with_backward(x, w) * lax.axis_size("i")


def _backward_over_devices(kept, g):
    x, w, y = kept
    slope = g * (2 - y**2 / 2)
    return slope @ w.T, lax.psum(x.T @ slope, "i")


over_devices.defvjp(
    lambda x, w: (over_devices(x, w), (x, w, over_devices(x, w))), _backward_over_devices
)


@jax.custom_jvp
def with_rule(x, w):
    return jnp.sin(x @ w)


@with_rule.defjvp
def _(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return with_rule(x, w), jnp.cos(x @ w) * (dx @ w + x @ dw)


def chain(part):
    def run(ws, x):
        for w in ws:
            x = part(x, w)
        return x

    return run


def branches(ws, x):
    for w in ws:
        x = lax.cond(x[0, 0] > 0, lambda x, w=w: jnp.sin(x @ w) + x, lambda x, w=w: x @ w, x)
    return x


def scans_in_scans(ws, x):
    def outer(h, _):
        return lax.scan(lambda h, w: (jnp.tanh(h @ w) + jnp.sin(h), None), h, jnp.stack(ws))

    return lax.scan(lambda h, _: (outer(h, None)[0], None), x, None, 2)[0]


def on_devices(ws, x):
    mesh, spec = jax.sharding.Mesh(jax.devices()[:2], ("i",)), jax.sharding.PartitionSpec

    def local(x, *ws):
        for w in ws:
            x = jnp.sin(over_devices(x, w)) + jnp.tanh(x @ w)
        return lax.pmean(x, "i")

    specs = spec("i"), *[spec()] * len(ws)
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=spec())(x, *ws)


def solves(ws, x):
    for w in ws:
        a, b = (w @ w.T).astype(jnp.float32) + jnp.eye(8), jnp.tanh(x @ w).astype(jnp.float32)
        x = jnp.linalg.solve(a, b.T).T.astype(x.dtype)
    return x


def of_integers(ws, x):
    ones = jnp.ones((8, 8), jnp.int32)
    for w in ws:
        x = x + jnp.tanh(x @ w) * (jnp.sign(x).astype(jnp.int32) @ ones).astype(x.dtype)
    return x


def ragged(ws, x):
    for w in ws:
        x = x + jnp.tanh(lax.ragged_dot(x, jnp.stack([w, w.T]), jnp.array([1, 3], jnp.int32)))
    return x


def dropped(ws, x):
    for i, w in enumerate(ws):
        mask = jax.random.bernoulli(jax.random.key(i), 0.5, x.shape)
        x = x + jnp.where(mask, jnp.tanh(x @ w), jnp.zeros_like(x))
    return x


def called_back(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
        jax.debug.callback(lambda total: None, x.sum())
    return x


def mapped(ws, x):
    return jax.vmap(lambda w: blocks([w, w.T], x))(jnp.stack(ws)).sum(0)


HARD = {
    "blocks": blocks,
    "custom_vjp": chain(with_backward),
    "custom_vjp, jitted": chain(jax.jit(lambda x, w: with_backward(jnp.sin(x), w))),
    "custom_jvp": chain(with_rule),
    "jitted": chain(jax.jit(lambda x, w: blocks([w, w.T], x))),
    "branches": branches,
    "scans in scans": scans_in_scans,
    "devices": on_devices,
    "solves": solves,
    "integers": of_integers,
    "ragged": ragged,
    "dropout": dropped,
    "callbacks": called_back,
    "mapped": mapped,
}


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.filterwarnings("ignore:JAX cannot trace", "ignore:.*casts nothing by policy map")
@pytest.mark.parametrize("name", rows(HARD, "custom_vjp, jitted", "devices", "scans in scans"))
def test_hard_programs(rng, name):
    """Only under XLA's optimizations do gradients differ, by the order of float32 sums."""
    ws, x = [normal(rng, 8, 8) / 3 for _ in range(4)], normal(rng, 4, 8)

    def loss_fn(ws, x):
        return jnp.sin(HARD[name](ws, x)).astype(jnp.float32).sum()

    for policy in WAYS:
        plain = jmpx.apply_policy(loss_fn, policy)
        saving = jmpx.apply_policy(loss_fn, f"{policy},save=products")
        found = [eqn for eqn in equations_of(saving, ws, x) if eqn.primitive.name == "remat2"]
        assert len(found) >= 1
        (value, grads), (saved, found) = (
            exactly(jax.value_and_grad(fn))(ws, x) for fn in (plain, saving)
        )
        np.testing.assert_allclose(saved, value, rtol=1e-6)
        sizes = np.linalg.norm(grads), np.linalg.norm(np.subtract(grads, found))
        # The cotangents of weights that pieces share are summed in float32, not in 16 bits.
        assert sizes[1] <= sizes[0] * (1e-5 if policy == "full" else 1e-2)


def test_products_under_a_vmap_outside_are_saved(rng):
    """Each example has its own weights, so that products have batch axes."""
    ws, x = [normal(rng, 3, 8, 8) for _ in range(3)], normal(rng, 3, 4, 8)
    counts = []
    for fn in (blocks, jmpx.remat(blocks), jax.checkpoint(blocks)):
        grad = jax.grad(lambda ws, x, fn=fn: jnp.square(jax.vmap(fn)(ws, x)).sum())
        counts.append(sum(eqn.primitive.name == "dot_general" for eqn in equations_of(grad, ws, x)))
    assert counts[0] == counts[1] < counts[2]


# The bytes that each way keeps.


def layer(x, w):
    return x + jnp.tanh(jnp.sin(x) @ w) @ w.T


def in_a_scan(ws, x):
    return lax.scan(lambda x, w: (layer(x, w), None), x, jnp.stack(ws))[0]


def in_a_scan_of_layers(ws, x):
    pairs = jnp.stack(ws).reshape(3, 2, *ws[0].shape)
    inner = jax.jit(lambda x, pair: layer(layer(x, pair[0]), pair[1]))
    return lax.scan(lambda x, pair: (inner(x, pair), None), x, pairs)[0]


@pytest.mark.parametrize(
    "apply", [chain(layer), chain(jax.jit(layer)), in_a_scan, in_a_scan_of_layers]
)
def test_no_way_keeps_copies_of_weights(rng, apply):
    """Casts of inputs move to their readers, also into jitted layers and scans."""
    ws, x = [normal(rng, 32, 32) for _ in range(6)], normal(rng, 4, 32)
    kept = {}
    for policy in ("full", "by=arguments,c=bf16", "by=arguments,c=bf16,save=products"):
        fn = jmpx.apply_policy(lambda ws, x: apply(ws, x).astype(jnp.float32).sum(), policy)
        kept[policy] = benchmark.residual_bytes(lambda ws, fn=fn: fn(ws, x), ws)
    full, plain, saving = kept.values()
    weights = sum(w.size for w in ws) * 2
    # The stacked weights of a scan are no argument: the backward pass keeps them in float32.
    of_scan = 2 * weights if apply in (in_a_scan, in_a_scan_of_layers) else 0
    assert plain >= weights
    assert saving - of_scan < 6 * 3 * x.size * 2 + weights / 4


# `jmpx.remat`.


def test_remat_of_a_function_without_a_policy(rng):
    ws, x = [normal(rng, 8, 8) / 3 for _ in range(6)], normal(rng, 4, 8)
    for remat in (jmpx.remat, jmpx.remat(save="products+attention")):
        fn = remat(blocks)
        assert fn.__name__ == "blocks"
        plain, saving = (lambda ws, f=f: f(ws, x).sum() for f in (blocks, fn))
        assert_same_bits(jax.grad(saving)(ws), jax.grad(plain)(ws))
        kept = [benchmark.residual_bytes(f, ws) for f in (plain, saving)]
        assert kept[1] < kept[0]


def test_an_eager_call_is_not_traced(rng):
    def fn(w, x):
        if x.sum() > 0:  # which a trace has no number for
            x = -x
        return x @ w

    w, x = normal(rng, 8, 8), normal(rng, 4, 8)
    for run in (jmpx.remat(fn), jmpx.apply_policy(fn, "full,save=products")):
        np.testing.assert_array_equal(run(w, x), fn(w, x))
        with pytest.raises(jax.errors.TracerBoolConversionError):
            jax.grad(lambda w, run=run: run(w, x).sum())(w)


def test_what_remat_leaves_is_told(rng):
    w, x = normal(rng, 8, 8), normal(rng, 4, 8)
    marked = chain(jax.checkpoint(lambda x, w: jnp.tanh(x @ w)))
    grad = jax.grad(lambda x: blocks([w], x).sum())
    for fn, words in (
        (lambda x: marked([w], x), "under jax.checkpoint"),
        (grad, "takes a gradient"),
    ):
        with warns_once(__file__, f"save= leaves .*{words}"):
            jax.make_jaxpr(lambda x, fn=fn: jmpx.remat(fn)(x))(x)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((3,), TypeError, "Expected a function whose backward pass keeps less, got 3"),
        ((blocks, "product"), ValueError, "did you mean 'products'"),
        (
            (blocks, None),
            ValueError,
            "Expected 'products', 'products.mixed' or 'products.attention' as save=",
        ),
    ],
)
def test_what_remat_refuses(arguments, error, text):
    with pytest.raises(error, match=text):
        jmpx.remat(*arguments)


class Batched(nnx.Module):
    def __init__(self, rngs):
        self.linears = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(3)])
        self.norm = nnx.BatchNorm(8, rngs=rngs)

    def __call__(self, x):
        for linear in self.linears:
            x = self.norm(jnp.tanh(linear(x)))
        return x


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", [None, *WAYS[:4]])
def test_state_of_nnx_modules_is_carried(rng, policy):
    """The running statistics and gradients are the same as without `save=`."""
    x, models, grads = normal(rng, 4, 8), [], []
    for save in ("", ",save=products"):
        model = Batched(nnx.Rngs(0))

        def loss_fn(model, x):
            return jnp.square(model(x).astype(jnp.float32)).mean()

        if policy is not None:
            loss_fn = jmpx.apply_policy(loss_fn, policy + save)
        elif save:
            loss_fn = jmpx.remat(loss_fn)
        with jax.numpy_dtype_promotion("standard"):
            grads.append(nnx.state(nnx.grad(loss_fn)(model, x)))
        models.append(nnx.state(model))
    for a, b in (models, grads):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-2, atol=1e-3), a, b)
    assert np.abs(models[1]["norm"]["mean"][...]).max() > 0


def test_a_step_of_equinox_trains(rng):
    model, x = eqx.nn.MLP(4, 1, 16, 3, key=jax.random.key(0)), normal(rng, 32, 4)

    def loss_fn(model, x):
        return jnp.mean(jnp.square(jax.vmap(model)(x)[:, 0].astype(x.dtype) - jnp.tanh(x.sum(-1))))

    @eqx.filter_jit
    def step(model, x):
        fn = jmpx.apply_policy(loss_fn, "by=modules,c=bf16,save=products")
        loss, grads = eqx.filter_value_and_grad(fn)(model, x)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.2 * g, grads)), loss

    losses = []
    for _ in range(100):
        model, loss = step(model, x)
        losses.append(float(loss))
    assert losses[-1] < losses[0] / 4


def test_contexts_and_views_refuse_it():
    """They have no function whose backward pass they could change."""
    policy = "c=bf16,save=products"
    for use in (
        lambda: jmpx.haiku.policies(policy).__enter__(),
        lambda: jmpx.equinox.with_policies(eqx.nn.Linear(2, 2, key=jax.random.key(0)), policy),
    ):
        with pytest.raises(ValueError, match="jmpx.remat"):
            use()
