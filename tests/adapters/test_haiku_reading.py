"""Haiku modules under a map: calls that read parameters cast what is made inside of the model."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BF16, F16, F32, assert_same_bits, enable_x64, leniently, normal
from helpers.jaxprs import equations

import jmpx
import jmpx.haiku

SIZE = 4


def made(*shape):
    """An array that is made inside, in float32, as noise is."""
    return jnp.asarray(np.sin(np.arange(1, np.prod(shape) + 1)).reshape(shape), F32)


class Outer(hk.Module):
    def __init__(self, run):
        super().__init__(name="outer")
        self.run = run

    def __call__(self, x):
        return self.run(x)


def network(run, outer=True):
    return hk.transform_with_state(lambda x: (Outer(run) if outer else run)(x))


def operands(f, *args):
    """The dtypes of the operands of all matrix products and convolutions."""
    names = ("dot_general", "conv_general_dilated")
    jaxpr = jax.make_jaxpr(f)(*args).jaxpr
    products = [eqn for eqn in equations(jaxpr) if eqn.primitive.name in names]
    return {var.aval.dtype for eqn in products for var in eqn.invars}


@leniently  # an LSTM joins its input and its state, which may be of two dtypes
def multiplied(run, x, policy_map, outer=True):
    """The operands of a network under a map; it has the parameters and states of any other."""
    net, key = network(run, outer), jax.random.key(0)
    plain, state = jax.eval_shape(net.init, key, x)
    with jmpx.haiku.policies(policy_map):
        assert jax.eval_shape(net.init, key, x) == (plain, state)
        new_state = jax.eval_shape(net.apply, plain, state, key, x)[1]
        found = operands(lambda params, state: net.apply(params, state, key, x), plain, state)
    assert new_state == state
    return found


@leniently
def assert_close(run, x, policy_map):
    """Compares what a network returns under a map with what it returns in float32."""
    net, key = network(run), jax.random.key(0)
    params, state = net.init(key, x)
    expected, _ = net.apply(params, state, key, x)
    with jmpx.haiku.policies(policy_map):
        result, _ = net.apply(params, state, key, x)
    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a, F32), b, atol=0.05 * (1 + np.abs(b).max()))


def with_layer(form):
    """A network that applies its layer to an array made inside, as `form` says."""

    def run(x):
        layer = hk.Linear(SIZE)
        if hk.running_init():  # JAX's own loops cannot create parameters
            layer(x)
        return form(layer, x, made(2, SIZE))

    return run


def at_apply(loop):
    return lambda layer, x, made: made if hk.running_init() else loop(layer, x, made)


FORMS = {
    "plain": lambda layer, x, made: layer(made),
    "numpy": lambda layer, x, made: layer(np.ones((2, SIZE), F32)),
    "one_hot": lambda layer, x, made: layer(jax.nn.one_hot(jnp.array([1, 2]), SIZE)),
    "after a norm": lambda layer, x, made: layer(hk.LayerNorm(-1, True, True)(made)),
    "remat": lambda layer, x, made: hk.remat(layer)(made),
    "vmap": lambda layer, x, made: hk.vmap(layer, split_rng=False)(made),
    "map": lambda layer, x, made: hk.map(layer, made),
    "scan": lambda layer, x, made: hk.scan(
        lambda carry, _: (layer(carry), layer(carry)), made, None, length=2
    ),
    "reversed": lambda layer, x, made: hk.scan(
        lambda carry, x: (layer(carry), carry), made, made, reverse=True
    ),
    "fori_loop": lambda layer, x, made: hk.fori_loop(0, 2, lambda i, carry: layer(carry), made),
    "while_loop": at_apply(
        lambda layer, x, made: hk.while_loop(
            lambda carry: carry[0] < 2, lambda carry: (carry[0] + 1, layer(carry[1])), (0, made)
        )
    ),
    "cond": at_apply(lambda layer, x, made: hk.cond(x[0, 0] < 9, layer, lambda made: made, made)),
    "switch": at_apply(lambda layer, x, made: hk.switch(0, [layer, lambda made: made], made)),
    "JAX's scan": at_apply(
        lambda layer, x, made: jax.lax.scan(
            lambda carry, _: (layer(carry), None), made, None, length=2
        )[0]
    ),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_made_inside_is_multiplied_in_16_bits(form, dtype, rng):
    run, x, policy_map = with_layer(FORMS[form]), normal(rng, 2, SIZE), f"c={dtype.name},o=f32"
    assert multiplied(run, x, policy_map) == {dtype}
    assert_close(run, x, policy_map)


def lifted(lift):
    def run(x):
        inner = hk.transform(lambda x: hk.Linear(SIZE)(x))
        init = lift(inner.init)
        params = init(hk.next_rng_key() if hk.running_init() else None, x)
        return inner.apply(params, None, made(2, SIZE))

    return run


MODULES = {
    "attention": lambda x: hk.MultiHeadAttention(2, 4, w_init=hk.initializers.VarianceScaling())(
        made(2, SIZE), x, x
    ),
    "convolutions": lambda x: hk.Conv2DTranspose(2, 3)(hk.Conv2D(2, 3)(made(1, 4, 4, 2))),
    "depthwise": lambda x: hk.DepthwiseConv2D(1, 3)(made(1, 4, 4, 2)),
    "mlp": lambda x: hk.nets.MLP([5, 3])(made(2, SIZE)),
    "batch norm": lambda x: hk.Linear(3)(hk.BatchNorm(True, True, 0.9)(made(2, SIZE), True)),
    "average": lambda x: hk.Linear(3)(hk.ExponentialMovingAverage(0.9)(made(2, SIZE))),
    "group norm": lambda x: hk.Linear(3)(hk.GroupNorm(2)(made(2, SIZE))),
    "embedding": lambda x: hk.Linear(3)(hk.Embed(9, SIZE)(jnp.arange(2)).astype(F32)),
    "quantizer": lambda x: hk.nets.VectorQuantizer(SIZE, 8, 0.25)(made(2, SIZE), True)["loss"],
    "lift": lifted(lambda init: hk.lift(init, name="lifted")),
    "transparent_lift": lifted(hk.transparent_lift),
    "layer_stack": lambda x: hk.layer_stack(2)(hk.Linear(SIZE))(made(2, SIZE)),
    "per layer": lambda x: hk.layer_stack(2, with_per_layer_inputs=True)(
        lambda x, y: (hk.Linear(SIZE)(x), hk.Linear(SIZE)(y))
    )(made(2, SIZE), made(2, SIZE)),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("policy_map", ["c=bf16,o=f32", "c=bf16"])
def test_modules_of_haiku(name, policy_map, rng):
    assert multiplied(MODULES[name], normal(rng, 2, SIZE), policy_map) == {BF16}


def test_a_rule_goes_before_and_a_parent_without_parameters_is_not_cast():
    seen = {}

    class Noted(hk.Linear):
        def __call__(self, x):
            seen[self.name] = x.dtype
            return super().__call__(x)

    class Parent(hk.Module):
        def __call__(self, x):
            seen[self.name] = x.dtype
            return Noted(SIZE, name="ruled")(x), Noted(SIZE, name="other")(x)

    net = network(lambda x: Parent(name="parent")(made(2, SIZE)))
    with jmpx.haiku.policies("c=bf16; */ruled: full"):
        params, state = net.init(jax.random.key(0), made(2, SIZE))
        seen.clear()
        net.apply(params, state, None, made(2, SIZE))
    assert seen == {"parent": F32, "ruled": F32, "other": BF16}


# Recurrent cores


class Resetting(hk.RNNCore):
    def __init__(self, core):
        super().__init__()
        self.core = hk.ResetCore(core)

    def initial_state(self, batch_size):
        return self.core.initial_state(batch_size)

    def __call__(self, x, state):
        return self.core((x, jnp.zeros(x.shape[0], bool)), state)


CORES = {
    "LSTM": lambda: hk.LSTM(3),
    "GRU": lambda: hk.GRU(3),
    "VanillaRNN": lambda: hk.VanillaRNN(3),
    "Conv1DLSTM": lambda: hk.Conv1DLSTM((3,), 2, 3),
    "Conv2DLSTM": lambda: hk.Conv2DLSTM((3, 3), 2, 3),
    "Conv3DLSTM": lambda: hk.Conv3DLSTM((3, 3, 3), 2, 3),
    "IdentityCore": lambda: hk.IdentityCore(),
    "ResetCore": lambda: Resetting(hk.LSTM(3)),
    "DeepRNN": lambda: hk.DeepRNN([hk.LSTM(3), jax.nn.relu, hk.GRU(3), hk.Linear(2)]),
    "skip": lambda: hk.deep_rnn_with_skip_connections([hk.LSTM(3), hk.VanillaRNN(3)]),
}


def reversed_unroll(core, x, state):
    return hk.dynamic_unroll(core, x, state, reverse=True)


def all_states(core, x, state):
    return hk.dynamic_unroll(core, x, state, return_all_states=True)


def scanned(core, x, state):
    step = hk.remat(lambda state, x: core(x, state)[::-1])
    return hk.scan(step, state, x)


UNROLLS = [hk.dynamic_unroll, hk.static_unroll, reversed_unroll, all_states, scanned]


def unrolled(core, unroll):
    def run(x):
        made = CORES[core]()
        return unroll(made, x, made.initial_state(x.shape[1]))

    return run


def sequence(rng, core):
    images = {"Conv1DLSTM": (3, 1), "Conv2DLSTM": (3, 3, 1), "Conv3DLSTM": (3, 3, 3, 1)}
    return normal(rng, 3, 2, *images.get(core, (SIZE,)))


@pytest.mark.sampled(29)
@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("unroll", UNROLLS)
@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_recurrent_cores_multiply_in_16_bits(core, unroll, outer, dtype, rng):
    policy_map = f"c={dtype.name},o=f32"
    found = multiplied(unrolled(core, unroll), sequence(rng, core), policy_map, outer)
    assert found == (set() if core == "IdentityCore" else {dtype})


@pytest.mark.thorough
@pytest.mark.parametrize("core", CORES)
def test_recurrent_cores_compute_what_they_do_in_float32(core, rng):
    assert_close(unrolled(core, hk.dynamic_unroll), sequence(rng, core), "c=bf16,o=f32")


RULES = ["c=bf16; Linear?: full", "c=bf16; RNNCore: full", "c=f16,o=f32; GRU?: f32"]


@pytest.mark.sampled(19)
@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("unroll", UNROLLS)
@pytest.mark.parametrize("policy_map", RULES)
def test_recurrent_cores_run_under_rules(core, unroll, policy_map, rng):
    multiplied(unrolled(core, unroll), sequence(rng, core), policy_map)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("rule", ["", "; LSTM?: full", "; GRU?: c=f32,o=f16"])
@pytest.mark.parametrize("core", ["LSTM", "GRU", "VanillaRNN"])
@pytest.mark.parametrize("by_name", [True, False])
def test_a_core_returns_its_state_as_it_came(dtype, rule, core, by_name, rng):
    seen = []

    def run(x):
        step = CORES[core]()
        state = jmpx.cast_tree(step.initial_state(2), dtype)
        names = "inputs", "state" if core == "GRU" else "prev_state"
        args = dict(zip(names, (x, state), strict=True))
        _, new = step(**args) if by_name else step(x, state)
        seen.append({leaf.dtype for leaf in jax.tree.leaves(new)})
        return new

    for outer in (True, False):
        net = network(run, outer)
        with jmpx.haiku.policies(f"c=bf16{rule}"):
            leniently(net.init)(jax.random.key(0), normal(rng, 2, SIZE))
    assert seen == [{dtype}] * 2


def test_a_core_in_float32_loses_no_digit_of_its_state(rng):
    """The state of an island does not go through the dtype of what surrounds it."""
    x = normal(rng, 20, 2, SIZE)

    def run(x):
        core = hk.GRU(3)
        return hk.dynamic_unroll(core, x, made(2, 3))[1]

    net = network(run)
    params, _ = net.init(jax.random.key(0), x)
    expected, _ = net.apply(params, {}, None, x.astype(BF16).astype(F32))
    with jmpx.haiku.policies("c=bf16,o=f32; GRU: full"):
        result, _ = net.apply(params, {}, None, x)
    assert_same_bits(result, expected)


def test_a_rule_mends_a_carry_that_cannot_be_kept(rng):
    net = hk.transform(lambda x: hk.layer_stack(2)(hk.Linear(SIZE))(x))
    with pytest.raises(TypeError, match="carry"), jmpx.haiku.policies("c=bf16"):
        net.init(jax.random.key(0), normal(rng, 2, SIZE))
    with jmpx.haiku.policies("c=bf16; Linear: compute=bfloat16,output=float32"):
        net.init(jax.random.key(0), normal(rng, 2, SIZE))


@pytest.mark.parametrize("lift", [lambda init: hk.lift(init, name="lifted"), hk.transparent_lift])
def test_lifted_parameters_are_stored_ones(lift, rng):
    seen = []

    def run(x):
        inner = hk.transform(lambda x: hk.Linear(SIZE)(x))
        params = lift(inner.init)(hk.next_rng_key() if hk.running_init() else None, x)
        seen.extend(leaf.dtype for leaf in jax.tree.leaves(params))
        return inner.apply(params, None, x)

    net, x = network(run, outer=False), normal(rng, 2, SIZE)
    with jmpx.haiku.policies("bf16; Linear: full"):
        params, state = net.init(jax.random.key(0), x)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {BF16}
    with jmpx.haiku.policies("c=bf16; Linear: full"):
        params, state = net.init(jax.random.key(0), x)
        seen.clear()
        net.apply(params, state, None, x)
    assert set(seen) == {F32}


# 64 bits


def test_islands_in_float64(rng):
    with enable_x64():
        x = jnp.asarray(rng.normal(size=(2, SIZE)), F32)
        net = network(lambda x: hk.Linear(3, name="solver")(hk.Linear(SIZE)(x)))
        with jmpx.haiku.policies("params=f32,c=f32; */solver: f64"):
            params, state = net.init(jax.random.key(0), x)
            result, _ = net.apply(params, state, None, x)
            found = operands(lambda params, x: net.apply(params, state, None, x)[0], params, x)
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {F32}
        assert found == {F32, np.dtype("float64")} and result.dtype == F32
        first, solver = (params[f"outer/{name}"] for name in ("linear", "solver"))
        inner = (x @ first["w"] + first["b"]).astype(jnp.float64)
        expected = inner @ solver["w"].astype(jnp.float64) + solver["b"].astype(jnp.float64)
        np.testing.assert_allclose(result, expected.astype(F32), rtol=1e-6)
