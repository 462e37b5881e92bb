"""`r=f32`: gradients that leave their products in float32, and that nothing rounds on their way.

The numbers are whole, so that float32 is exact, and too large for 16 bits. `jmpx.inspect.emulate`
rounds wherever the program says so, also where XLA:CPU keeps more digits.
"""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import normal
from helpers.jaxprs import equations
from helpers.maps import mesh_of
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jmpx
from jmpx._steps import widening

NO_SCALE = jmpx.NoOpLossScale()
N = 8


def whole(rng, *shape, largest=15):
    return jnp.asarray(rng.integers(-largest, largest + 1, shape), jnp.float32)


def gradients(loss, policy, *args, scale=NO_SCALE, **options):
    grad_fn = jmpx.value_and_grad(loss, scale, policy=policy, **options)
    result = jax.jit(jmpx.inspect.emulate(lambda *args: grad_fn(*args)[::3]))(*args)
    return jax.device_get(result)


# Each case reads whole parameters and inputs, and returns an array, which is weighed and summed.


def dense(p, x):
    return x @ p["w"] + p["b"]


def einsums(p, x):
    return jnp.einsum("hed,bte->bhtd", p["w"].reshape(2, N, N // 2), x)


def transposed(p, x):
    return jax.vmap(lambda row: p["w"] @ row)(x.reshape(-1, N))


def convolution(p, x):
    kernel = p["w"].reshape(2, N // 2, N)
    return lax.conv_general_dilated(
        x[..., : N // 2], kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )


def scaled(p, x):
    return x @ jnp.eye(N) * p["b"]


def looked_up(p, x):
    return p["w"][jnp.abs(x[..., 0]).astype(jnp.int32) % 2]


def stacked_layers(p, x):
    layers = p["w"].reshape(2, N // 2, N)
    _, y = lax.scan(lambda h, w: (h, h[..., : N // 2] @ w), x, layers)
    return y


def turns(p, x):
    return lax.scan(lambda total, row: (total, row @ p["w"] + p["b"]), 0.0, x)[1]


def turns_that_may_go_either_way(p, x):
    def turn(total, row):
        return total, lax.cond(row.sum() > 0, lambda: row @ p["w"], lambda: row @ p["w"] + p["b"])

    return lax.scan(turn, 0.0, x)[1]


def recomputed(p, x):
    return jax.checkpoint(dense)(p, x)


def jitted_twice(p, x):
    layer = jax.jit(dense)
    return layer(p, x) + layer(p, x[::-1])


def tied(p, x):
    return jnp.concatenate([x @ p["w"], x @ p["w"].T, x @ p["w"][:, ::-1]], -1)


def parts(p, x):
    left, right = jnp.split(p["w"], 2, axis=1)
    return x @ jnp.where(left > 0, left, 2 * left) - x @ jnp.stack([right, right])[0]


def grouped(p, x):
    sizes = jnp.array([3, N * N - 3])
    return lax.ragged_dot(x.reshape(-1, N), jnp.stack([p["w"], -p["w"]]), sizes)


def batched(p, x):
    return jnp.einsum("bte,bed->btd", x, jnp.broadcast_to(p["w"], (len(x), N, N)))


def mapped_over_shards(p, x):
    specs = {"in_specs": (P(), P("data")), "out_specs": P("data")}
    return jax.shard_map(dense, mesh=mesh_of(2), **specs)(p, x)


CASES = [dense, einsums, transposed, convolution, scaled, looked_up, stacked_layers, turns]
CASES += [turns_that_may_go_either_way, recomputed, jitted_twice, tied, parts, batched, grouped]
CASES += [mapped_over_shards]


def weighed(case):
    """Returns the loss of a case, whose cotangents are whole, small numbers."""

    def loss(p, x):
        y = case(p, x)
        weights = np.random.default_rng(y.size).integers(-15, 16, y.shape)
        return jnp.sum(y.astype(jnp.float32) * weights.astype(np.float32))

    return loss


@pytest.mark.filterwarnings("ignore:save= leaves a part")
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    "policy",
    [
        "c=bf16",
        pytest.param("c=f16", marks=pytest.mark.thorough),
        "by=arguments,c=bf16",
        pytest.param("c=bf16,save=products", marks=pytest.mark.thorough),
    ],
)
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_exact(case, policy, rng):
    loss, p, x = (
        weighed(case),
        {"w": whole(rng, N, N), "b": whole(rng, N)},
        whole(rng, N, N, N, largest=127),
    )
    exact = jax.grad(loss)(p, x)
    value, grads = gradients(loss, f"{policy},r=f32", p, x)
    jax.tree.map(np.testing.assert_array_equal, grads, exact)
    # Without r=f32 they are rounded, unless the product hands out float32 by itself.
    before, rounded = gradients(loss, policy, p, x)
    assert value == before  # the loss has the same bits
    is_exact = jax.tree.map(np.array_equal, rounded, exact)
    assert case in (grouped, looked_up) or not all(jax.tree.leaves(is_exact))


# Options, and what is around the gradient.


def sharded(explicit):
    """Runs a gradient function under jit on a batch that is split over eight devices."""

    def run(loss, policy, p, x):
        mesh = mesh_of(8, axis_type=AxisType.Explicit if explicit else AxisType.Auto)
        with jax.set_mesh(mesh):
            x = jax.device_put(x, NamedSharding(mesh, P("data")))
            return gradients(loss, policy, p, x)[1]

    return run


def over_an_axis(loss, policy, p, x):
    def run(p, x):
        return gradients(loss, policy, p, x, over="data")[1]

    grads = jax.vmap(run, axis_name="data", in_axes=(None, 0))(p, x.reshape(2, -1, *x.shape[1:]))
    return jax.tree.map(lambda g: 2 * g[0], grads)


def with_options(**options):
    def run(loss, policy, p, x):
        grads = gradients(loss, policy, p, x, **options)[1]
        return jax.tree.map(lambda g: g * options.get("microbatches", 1), grads)

    return run


def with_grad_dtype(loss, policy, p, x):
    p = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), p)
    policy = policy.replace("r=f32", "p=bf16")
    return gradients(loss, policy, p, x, grad_dtype=jnp.float32)[1]


WAYS = {
    "a static scale": with_options(scale=jmpx.StaticLossScale(2.0**8)),
    "a dynamic scale": with_options(scale=jmpx.DynamicLossScale(2.0**8)),
    "micro-batches": with_options(microbatches=2),
    "grad_dtype": with_grad_dtype,
    "over": over_an_axis,
    "jit over devices": sharded(explicit=False),
}
# JAX 0.7 asks for out_sharding= in the gradient of a dense layer.
TRANSPOSES = pytest.mark.skipif(jax.__version_info__ < (0, 8), reason="of JAX 0.7")
EXPLICIT = pytest.param("explicit axes", marks=TRANSPOSES)


@pytest.mark.parametrize("policy", ["c=bf16", "by=arguments,c=bf16"])
@pytest.mark.parametrize("way", [*WAYS, EXPLICIT])
def test_gradients_are_exact_with_each_option(way, policy, rng):
    loss, p, x = weighed(dense), {"w": whole(rng, N, N), "b": whole(rng, N)}, whole(rng, N, N, N)
    if way in ("micro-batches", "over"):  # the weights of both halves have to be the same

        def loss(p, x):
            weights = np.arange(N) - 3
            return jnp.sum(dense(p, x) * weights.astype(np.float32), dtype=jnp.float32)

    exact = jax.grad(loss)(p, x)
    with jax.numpy_dtype_promotion("standard"):
        run = WAYS.get(way) or sharded(explicit=True)
        grads = run(loss, f"{policy},r=f32", p, x)
    jax.tree.map(np.testing.assert_array_equal, grads, exact)


@pytest.mark.thorough
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_loss_that_looks_at_the_whole_batch_is_the_same_over_devices(microbatches, rng, key):
    """A contrastive loss, a masked mean, noise from a key, a count and a moving average."""

    def loss(p, batch, key, state):
        x, mask = batch["x"], batch["mask"]
        h = jnp.tanh(x @ p["w"]) + 0.1 * jax.random.normal(key, x.shape)
        scores = (h @ h.T).astype(jnp.float32)
        each = -jax.nn.log_softmax(scores)[jnp.arange(len(x)), jnp.arange(len(x))]
        state = {"count": state["count"] + mask.sum(), "mean": 0.9 * state["mean"] + x.mean(0)}
        return jnp.sum(each * mask) / mask.sum(), state

    options = {"policy": "c=bf16,r=f32", "has_aux": True, "state_argnum": 3}
    batch = jmpx.Batch(argnums=1, microbatches=microbatches)
    grad_fn = jmpx.value_and_grad(loss, NO_SCALE, batch=batch, **options)
    arrays = {"x": normal(rng, 16, N), "mask": jnp.asarray(rng.integers(0, 2, 16)).at[:2].set(1)}
    args = {"w": normal(rng, N, N) / 3}, arrays, key, {"count": jnp.int32(0), "mean": jnp.zeros(N)}
    with jax.numpy_dtype_promotion("standard"):
        expected = jax.jit(grad_fn)(*args)
        split = jax.device_put(arrays, NamedSharding(mesh_of(8), P("data")))
        found = jax.jit(grad_fn)(args[0], split, *args[2:])
    assert found.value[1]["count"] == expected.value[1]["count"]
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-3)  # noqa: E731
    jax.tree.map(close, (found.value, found.grads), (expected.value, expected.grads))


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(N)(nn.tanh(nn.Dense(N)(x)))


def of_linen(rng, key, x):
    module = Linen()
    return lambda p, x: module.apply(p, x), module.init(key, x)


def of_haiku(rng, key, x):
    made = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([N, N], activation=jnp.tanh)(x)))
    return made.apply, made.init(key, x)


def of_equinox(rng, key, x):
    return lambda model, x: jax.vmap(jax.vmap(model))(x), eqx.nn.MLP(N, N, N, 1, key=key)


def of_nnx(rng, key, x):
    first, second = (nnx.Linear(N, N, rngs=nnx.Rngs(seed)) for seed in (0, 1))
    return lambda model, x: model(x), nnx.Sequential(first, jnp.tanh, second)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("by", ["operations", "modules", "arguments"])
@pytest.mark.parametrize("make", [of_linen, of_haiku, of_equinox, of_nnx])
def test_no_gradient_of_a_framework_is_rounded(make, by, rng, key):
    x = normal(rng, 64, 16, N)
    apply, model = make(rng, key, x)

    def loss(model, x, state):
        return jnp.mean(apply(model, x).astype(jnp.float32) ** 2), state + 1

    exact, errors = jmpx.grad(loss, NO_SCALE, True, policy="full")(model, x, 0.0).grads, {}
    for reduce in "", ",r=f32":
        options = {"policy": f"by={by},c=bf16{reduce}", "has_aux": True, "state_argnum": 2}
        grad_fn = jmpx.grad(loss, NO_SCALE, **options)
        result = grad_fn(model, x, jnp.zeros(()))  # eagerly: each operation rounds its result
        assert result.aux == 1
        pairs = [*zip(*map(jax.tree.leaves, (result.grads, exact)), strict=True)]
        assert {grad.dtype for grad, _ in pairs} == {jnp.dtype("float32")}
        errors[reduce] = sum(float(jnp.sum((grad - right) ** 2)) for grad, right in pairs)
        rounded = [float(jnp.mean(grad == grad.astype(jnp.bfloat16))) for grad, _ in pairs]
        assert max(rounded) < 0.2 if reduce else max(rounded) == 1
    assert errors[",r=f32"] < 0.9 * errors[""]


def test_float16_gradients_may_be_larger_than_float16(rng):
    p, x = {"w": whole(rng, N, N), "b": whole(rng, N)}, whole(rng, N, N, N)
    finite = {}
    for reduce in "", ",r=f32":
        for exponent in range(0, 40):
            scale = jmpx.StaticLossScale(2.0**exponent)
            grad_fn = jmpx.grad(weighed(dense), scale, policy=f"c=f16{reduce}")
            if not grad_fn(p, x).grads_finite:
                break
            finite[reduce] = exponent
    assert finite[",r=f32"] >= finite[""] + 4


# What stays as it is.


def marked(loss, policy, *args):
    """Returns the primitives that made what `r=f32` has widened too late."""
    grad_fn = jmpx.grad(loss, NO_SCALE, policy=policy)
    jaxpr = jax.make_jaxpr(lambda *args: grad_fn(*args).grads)(*args)
    return [e for e in equations(jaxpr) if "jmpx.rounded_gradient" in str(e.source_info.name_stack)]


@pytest.mark.parametrize("case", CASES)
def test_no_gradient_is_marked_as_rounded(case, rng):
    p, x = {"w": whole(rng, N, N), "b": whole(rng, N)}, whole(rng, N, N, N)
    with jax.numpy_dtype_promotion("standard"):
        assert not marked(weighed(case), "c=bf16,r=f32", p, x)


@jax.custom_vjp
def own(w, x):
    return x @ w


def own_bwd(residuals, g):
    w, x = residuals
    # A rule that wants 16 bits: what it returns went through an operation without a rule.
    return jnp.cbrt(jnp.einsum("bti,bto->io", x, g)).astype(w.dtype), g @ w.T


own.defvjp(lambda w, x: (own(w, x), (w, x)), own_bwd)


@pytest.mark.parametrize("around", [lambda f: f, jax.checkpoint, jax.jit])
def test_a_gradient_that_cannot_be_wide_is_marked(around, rng):
    p, x = {"w": whole(rng, N, N)}, whole(rng, N, N, N)
    loss = lambda p, x: jnp.sum(around(own)(p["w"], x), dtype=jnp.float32)  # noqa: E731
    policy = "by=arguments,c=bf16,r=f32"
    assert len(marked(loss, policy, p, x)) == 1
    report = jmpx.inspect.audit(jmpx.grad(loss, NO_SCALE, policy=policy))(p, x)
    (finding,) = (each for each in report.findings if each.name == "rounded-gradient")
    assert finding.message.startswith("cbrt makes a gradient in bfloat16")
    assert finding.place is not None and "test_widening.py" in str(finding.place)
    value, grads = gradients(loss, policy, p, x)
    before, same = gradients(loss, policy.replace(",r=f32", ""), p, x)
    assert value == before
    np.testing.assert_array_equal(grads["w"], same["w"])


def test_large_sums_stay_in_16_bits(monkeypatch, rng):
    p, x = {"w": whole(rng, N, N), "b": whole(rng, N)}, whole(rng, N, N, N)

    def sums():
        grad_fn = jmpx.grad(weighed(dense), NO_SCALE, policy="c=bf16,r=f32")
        jaxpr = jax.make_jaxpr(lambda *args: grad_fn(*args).grads)(p, x)
        found = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "reduce_sum"]
        return [eqn.outvars[0].aval.dtype.name for eqn in found if eqn.outvars[0].aval.shape]

    assert {*sums()} == {"float32"}
    monkeypatch.setattr(widening, "LARGEST_SUM", 4 * x.size - 1)
    assert "bfloat16" in sums()
    with jax.set_mesh(mesh_of(2)):  # on two devices, each sums half
        assert {*sums()} == {"float32"}


def test_products_that_xla_cannot_run_on_a_cpu_run_there(rng):
    # A product of bfloat16 that is summed in float32 and stored transposed.
    p, x = {"w": whole(rng, N, N), "b": whole(rng, N)}, whole(rng, N, N, N)
    grad_fn = jmpx.grad(weighed(transposed), NO_SCALE, policy="c=bf16,r=f32")
    with jax.numpy_dtype_promotion("standard"):
        grads = jax.jit(grad_fn)(p, x).grads
    exact = jax.grad(weighed(transposed))(p, x)
    np.testing.assert_array_equal(grads["w"], exact["w"])


def test_reduce_that_sums_nothing_is_refused():
    loss, policy = weighed(dense), "c=bf16,r=f16"
    with pytest.raises(ValueError, match=r"Cannot sum gradients in float16.*computed in bfloat16"):
        jmpx.grad(loss, NO_SCALE, policy=policy)
    with pytest.raises(ValueError, match=r"Cannot sum gradients in bfloat16.*computed in float32"):
        jmpx.grad(loss, NO_SCALE, policy="full,r=bf16")
    jmpx.grad(loss, NO_SCALE, policy="c=bf16,r=bf16")
    jmpx.grad(loss, NO_SCALE, policy=policy, over="data")


def test_apply_policy_says_that_it_does_not_see_the_gradient():
    with pytest.warns(UserWarning, match="does not see the program of its gradient"):
        jmpx.apply_policy(weighed(dense), "c=bf16,r=f32")


def test_a_loss_may_read_numbers(rng):
    p, x = {"w": whole(rng, N, N), "b": whole(rng, N)}, whole(rng, N, N, N)

    def loss(p, x):
        return weighed(dense)(p, x) if float(x[0, 0, 0]) == 1 else jnp.sum(p["b"])

    grad_fn = jmpx.grad(loss, NO_SCALE, policy="by=arguments,c=bf16,r=f32")
    x = x.at[0, 0, 0].set(1)
    jax.tree.map(np.testing.assert_array_equal, grad_fn(p, x).grads, jax.grad(loss)(p, x))
