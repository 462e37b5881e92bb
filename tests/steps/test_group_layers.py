"""Groups of examples and stacked layers: the mean of each layer is taken inside of the loop."""

import functools
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import partitioned, read
from flax import nnx
from helpers import normal
from helpers.groups import assert_near, in_float64, make_mesh, over, value_and_grad
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jmpx
from jmpx._jaxprs.core import evaluate
from jmpx._jaxprs.inner import all_equations
from jmpx._steps import differentiation
from jmpx._steps.groups import Groups

LAYERS, SIZE, GROUPS, EXAMPLES = 3, 16, 8, 8


def params_of(rng):
    return {
        "w": normal(rng, LAYERS, SIZE, SIZE) / 4,
        "b": normal(rng, LAYERS, SIZE),
        "out": normal(rng, SIZE, SIZE) / 4,
    }


def body(h, layer):
    return h + jnp.tanh(h @ layer["w"] + layer["b"]), None


def layers_of(params):
    return {"w": params["w"], "b": params["b"]}


def loss_of(params, h):
    y = h @ params["out"]
    return jnp.mean((y if y.dtype == jnp.float64 else y.astype(jnp.float32)) ** 2)


def looped(run=lambda body, x, layers: jax.lax.scan(body, x, layers)[0]):
    return lambda params, x: loss_of(params, run(body, x, layers_of(params)))


def checkpointed(body, x, layers):
    return jax.lax.scan(jax.checkpoint(body), x, layers)[0]


def jitted(body, x, layers):
    return jax.jit(lambda layers, x: checkpointed(body, x, layers))(layers, x)


def all_checkpointed(body, x, layers):
    return jax.checkpoint(lambda layers, x: jax.lax.scan(body, x, layers)[0])(layers, x)


def nested(body, x, layers):
    layers = jax.tree.map(lambda w: w.reshape(LAYERS, 1, *w.shape[1:]), layers)
    inner = jax.checkpoint(lambda h, layers: (jax.lax.scan(body, h, layers)[0], None))
    return jax.lax.scan(inner, x, layers)[0]


def in_parts(body, x, layers):
    for part in slice(0, 1), slice(1, LAYERS):
        x, _ = jax.lax.scan(body, x, jax.tree.map(lambda w, part=part: w[part], layers))
    return x


def stacked(body, x, layers):
    single = [jax.tree.map(lambda w, i=i: w[i], layers) for i in range(LAYERS)]
    return jax.lax.scan(body, x, jax.tree.map(lambda *ws: jnp.stack(ws), *single))[0]


def transposed(body, x, layers):
    def other(h, layer):
        return body(h, {"w": layer["w"].T, "b": layer["b"]})

    return jax.lax.scan(other, x, {"w": layers["w"].transpose(0, 2, 1), "b": layers["b"]})[0]


def backward(body, x, layers):
    return jax.lax.scan(body, x, layers, reverse=True, unroll=2)[0]


# Of these the gradients are the same bits as after the loop.
RUNS = [
    checkpointed,
    jitted,
    all_checkpointed,
    nested,
    in_parts,
    stacked,
    transposed,
    backward,
]


def twice(body, x, layers):
    return checkpointed(body, checkpointed(body, x, layers), layers)


def and_outside(body, x, layers):
    return checkpointed(body, jnp.tanh(x @ layers["w"][0]), layers)


def with_norms(params, x):
    return looped()(params, x) + 1e-2 * sum((w**2).sum() for w in jax.tree.leaves(params))


def largest_stack(grad_fn, *args):
    """Returns the number of elements of the largest array that a scan stacks."""
    found = [0]
    for eqn in all_equations(jax.make_jaxpr(lambda *args: tuple(grad_fn(*args))[::3])(*args)):
        if eqn.primitive.name == "scan":
            found += [var.aval.size for var in eqn.outvars]
    return max(found)


def assert_means_in_loops(grad_fn, *args):
    assert largest_stack(grad_fn, *args) <= LAYERS * SIZE * SIZE


def after_the_loop(monkeypatch):
    """Has the mean wait for the whole stack, as it does where no loop reads a parameter."""

    def unchanged(jaxpr, axis, dtype):
        return functools.partial(evaluate, jaxpr), []

    monkeypatch.setattr(differentiation, "with_layer_means", unchanged)


POLICIES = ["c=bf16", "c=f16", "c=bf16,r=bf16", "c=f16,r=f16", "by=operations,c=bf16", "c=f32"]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("run", RUNS)
def test_gradients_have_the_bits_of_a_mean_after_the_loop(run, policy, rng, monkeypatch):
    args = params_of(rng), normal(rng, EXAMPLES, SIZE)
    grad_fn = value_and_grad(looped(run), policy=policy, scaling=jmpx.DynamicLossScale(2.0**6))
    assert_means_in_loops(grad_fn, *args)
    result = jax.jit(lambda *args: grad_fn(*args))(*args)
    after_the_loop(monkeypatch)
    assert largest_stack(grad_fn, *args) >= GROUPS * SIZE * SIZE
    expected = jax.jit(lambda *args: grad_fn(*args))(*args)
    # XLA of JAX 0.12 joins float32 sums over examples and over groups, in an order of its own.
    tolerance = 1e-6 * (policy == "c=f32")
    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


@pytest.mark.thorough
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("loss", [*map(looped, [twice, and_outside]), with_norms])
def test_other_reads_of_a_stacked_parameter_count(loss, microbatches, rng):
    # Where a loss reads a parameter several times, the reads are summed after their means.
    args = params_of(rng), normal(rng, 4 * EXAMPLES, SIZE)
    grad_fn = value_and_grad(loss, batch={"microbatches": microbatches})
    assert_near(grad_fn(*args), in_float64(*args, loss=loss), 5e-6)


@pytest.mark.thorough
def test_means_of_three_groups_are_taken_once(rng):
    args = params_of(rng), normal(rng, 6, SIZE)
    for reduce in ("", ",r=bf16", ",r=f16"):
        sizes = {"": 2e-6, ",r=bf16": 3 * 2.0**-8, ",r=f16": 3 * 2.0**-10}
        result = value_and_grad(looped(), 3, policy=f"c=f32{reduce}")(*args)
        value, grads = in_float64(*args, loss=looped())
        np.testing.assert_allclose(result.value, value, rtol=1e-6)
        for name, grad in result.grads.items():
            error = np.abs(grad - grads[name]).max() / np.abs(grads[name]).max()
            assert error < sizes[reduce]


@pytest.mark.thorough
def test_a_constant_of_a_loop_is_averaged_after_it(rng):
    params, x = params_of(rng), normal(rng, EXAMPLES, SIZE)

    def loss(params, x):
        again = lambda h, layer: (jnp.tanh(body(h, layer)[0] @ params["out"]), None)  # noqa: E731
        return loss_of(params, jax.lax.scan(again, x, layers_of(params))[0])

    assert_near(value_and_grad(loss)(params, x), in_float64(params, x, loss=loss), 5e-6)


# Frameworks


def by_haiku(rng):
    def net(x):
        stack = hk.layer_stack(LAYERS)
        return stack(lambda x: x + jnp.tanh(hk.Linear(SIZE)(x)))(x)

    transformed = hk.without_apply_rng(hk.transform(net))
    params = transformed.init(jax.random.key(0), jnp.zeros((1, SIZE)))
    return params, transformed.apply


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + jnp.tanh(nn.Dense(SIZE)(x)), None


def by_linen(rng):
    scanned = nn.scan(
        nn.remat(Layer, prevent_cse=False),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=LAYERS,
    )()
    params = scanned.init(jax.random.key(0), jnp.zeros((1, SIZE)), None)
    return params, lambda params, x: scanned.apply(params, x, None)[0]


def by_nnx(rng):
    @nnx.vmap(in_axes=0, out_axes=0)
    def create(key):
        return nnx.Linear(SIZE, SIZE, rngs=nnx.Rngs(key))

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def forward(x, layer):
        return x + jnp.tanh(layer(x))

    graph, params = nnx.split(create(jax.random.split(jax.random.key(0), LAYERS)))
    return params, lambda params, x: forward(x, nnx.merge(graph, params))


def by_equinox(rng):
    create = eqx.filter_vmap(lambda key: eqx.nn.Linear(SIZE, SIZE, key=key))
    layers = create(jax.random.split(jax.random.key(0), LAYERS))
    arrays, rest = eqx.partition(layers, eqx.is_array)

    def apply(arrays, x):
        def step(x, arrays):
            layer = eqx.combine(arrays, rest)
            return x + jnp.tanh(jax.vmap(layer)(x)), None

        return jax.lax.scan(jax.checkpoint(step), x, arrays)[0]

    return arrays, apply


@pytest.mark.sampled(5)
@pytest.mark.parametrize("policy", ["c=bf16", "by=operations,c=bf16", "by=modules,c=bf16"])
@pytest.mark.parametrize("make", [by_haiku, by_linen, by_nnx, by_equinox])
def test_frameworks(make, policy, rng):
    x = normal(rng, EXAMPLES, SIZE)
    with jax.numpy_dtype_promotion("standard"):
        params, apply = make(rng)
        loss = lambda params, x: jnp.mean(apply(params, x).astype(jnp.float32) ** 2)  # noqa: E731
        if policy.startswith("by=modules") and make in (by_nnx, by_equinox):
            pytest.skip("the modules are not among the arguments")
        grad_fn = value_and_grad(loss, policy=policy)
        assert_means_in_loops(grad_fn, params, x)
        grads = value_and_grad(loss, policy="c=f32")(params, x).grads
        expected = jax.grad(loss)(params, x)
    for a, b in zip(*map(jax.tree.leaves, (grads, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# What the partitioner makes of it


@pytest.mark.sampled(3)
@pytest.mark.parametrize("reduce", ["f32", "bf16"])
@pytest.mark.parametrize(
    ("sizes", "spec"),
    [((8,), P(None, "data")), ((8,), P()), ((4, 2), P(None, "data", "model"))],
)
def test_a_layer_is_summed_in_the_loop(sizes, spec, reduce, rng):
    size, mesh = 64, make_mesh(*sizes)
    params = {"w": normal(rng, LAYERS, size, size) / 8, "out": jnp.zeros((size, 1))}
    x, rows = normal(rng, 4096, size), NamedSharding(mesh, P("data"))
    split = {"w": NamedSharding(mesh, spec), "out": NamedSharding(mesh, P())}

    def loss(params, x):
        layer = jax.checkpoint(lambda h, w: (h + jnp.tanh(h @ w), None))
        return loss_of(params, jax.lax.scan(layer, x, params["w"])[0])

    def step(params, x):
        result = value_and_grad(loss, policy=f"c=bf16,r={reduce}", batch={"sharding": rows})(
            params, x
        )
        return jax.tree.map(lambda p, g: p - g, params, result.grads)

    jitted = jax.jit(step, in_shardings=(split, rows), out_shardings=split)
    found = read(partitioned(jitted.lower(params, x))[0])
    sums = [one for one in found if one.kind == "all-reduce" and one.group == sizes[0]]
    (layer,) = [one for one in sums if one.bytes > 4 * size]  # and no other of a whole stack
    assert layer.dtype == reduce and layer.times == LAYERS
    whole = size * size * (4 if reduce == "f32" else 2)
    assert layer.bytes == whole // (2 if len(sizes) > 1 else 1)
    gathers = {one.dtype for one in found if one.kind == "all-gather" and one.bytes > 4 * size}
    assert gathers == (set() if spec == P() else {"bf16"})


# Shardings of activations


def constrained(constrain):
    def step(h, layer):
        return constrain(body(h, layer)[0]), None

    return looped(lambda _, x, layers: checkpointed(step, constrain(x), layers))


SPECS = [P("data"), P(("data", "model")), P("data", P.UNCONSTRAINED), P(("model", "data"), None)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", SPECS)
def test_shardings_of_activations_may_name_the_axes_of_the_batch(spec, kind, jit, rng):
    mesh, args = make_mesh(4, 2, axis_type=kind), (params_of(rng), normal(rng, 16, SIZE))
    constrain: Any = lambda x: jax.lax.with_sharding_constraint(x, spec)  # noqa: E731
    loss = constrained(jax.jit(constrain) if jit else constrain)
    with jax.set_mesh(mesh):
        x = jax.device_put(args[1], NamedSharding(mesh, P("data")))
        params = jax.device_put(args[0], NamedSharding(mesh, P()))
        grad_fn = value_and_grad(loss, batch={"sharding": P("data")})
        result = jax.jit(lambda *args: grad_fn(*args))(params, x)
    assert_near(result, in_float64(*args, loss=looped()), 5e-6)


def test_what_the_other_axes_split_stays_split():
    mesh = make_mesh(4, 2)
    free = Groups(NamedSharding(mesh, P("data")))
    before = P(("data", "model"), P.UNCONSTRAINED, None)

    def fn(x):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, before))

    (eqn,) = free.freed(jax.make_jaxpr(fn)(jnp.zeros((8, 2, 2)))).eqns
    assert eqn.params["sharding"].spec == P("model", P.UNCONSTRAINED, None)


def test_a_sharding_in_a_derivative_rule_is_refused(rng):
    split = over(8)

    @jax.custom_vjp
    def sine(x):
        return jnp.sin(x)

    sine.defvjp(
        lambda x: (sine(x), x),
        lambda x, grad: (jax.lax.with_sharding_constraint(grad * jnp.cos(x), split),),
    )
    loss = looped(lambda body, x, layers: checkpointed(body, sine(x @ layers["w"][0]), layers))
    with pytest.raises(ValueError, match="leave them out of the shardings there") as error:
        value_and_grad(loss)(params_of(rng), normal(rng, EXAMPLES, SIZE))
    assert "\n" not in str(error.value)
