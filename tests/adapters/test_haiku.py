"""`jmpx.haiku.policies`: what Haiku alone has, and arrays that are made inside of a model."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BF16, F16, F32, LOG, assert_same_bits, leniently, normal, zoo
from helpers.jaxprs import FULL, LOW, dots, equations

import jmpx
import jmpx.haiku

SIZE = 4
KEY = jax.random.key(0)
X = normal(np.random.default_rng(0), 2, SIZE)


class Outer(hk.Module):
    def __init__(self, run):
        super().__init__(name="outer")
        self.run = run

    def __call__(self, x):
        return self.run(x)


def network(run, outer=True):
    return hk.transform_with_state(lambda x: (Outer(run) if outer else run)(x))


# Haiku's registry, and its methods


@pytest.mark.parametrize("set_policy", [jmpx.set_policy, hk.mixed_precision.set_policy])
def test_an_island_in_a_class_with_a_policy_reads_the_stored_weights(set_policy):
    net = zoo.build("haiku", zoo.nested, X, rng=np.random.default_rng(1))
    policy = jmpx.get_policy("p=f32,c=bf16,o=f16")
    set_policy(zoo.HaikuInner, policy)
    run = net.under("full; */outer: full")
    assert dots(run, net.model, X) == [FULL, LOW, FULL, FULL]
    for policy_of in (jmpx.policy_of, hk.mixed_precision.get_policy):
        assert policy_of(zoo.HaikuInner) == policy

    def by_hand(params, x):
        def layer(name, x):
            own = params[f"haiku_net/{name}"]
            return x @ own["w"].astype(x.dtype) + own["b"].astype(x.dtype)

        x = jnp.tanh(layer("block/inner", layer("first", x).astype(BF16)))
        x = layer("block/outer", x.astype(F32)).astype(BF16).astype(F16)
        return layer("head", x.astype(F32))

    both = jax.jit(lambda *args: (run(*args), by_hand(*args)))
    assert_same_bits(*both(net.model, X))
    jmpx.clear_policy(zoo.HaikuInner)


def test_a_base_class_is_selected_and_the_last_rule_wins():
    net = zoo.build("haiku", zoo.mlp, X, rng=np.random.default_rng(1))
    run = net.under("c=bf16; Module: full; */first: c=f16")
    assert dots(run, net.model, X) == ["float16xfloat16", FULL]


def test_inside_of_the_context_both_registries_answer_through_jmpx(log):
    class Asks(hk.Module):
        def __call__(self, x):
            LOG.append((jmpx.policy_of(Asks), jmpx.current_policy()))
            return x

    policy = jmpx.get_policy("c=f16")
    with jmpx.push_policy(Asks, policy), jmpx.haiku.policies("c=bf16"):
        hk.transform(lambda x: Asks()(x)).apply({}, None, X)
        assert jmpx.policy_of(Asks) == policy
        assert jmpx.current_policy() is None
    assert log == [(policy, policy)]
    assert jmpx.policy_of(Asks) is None


@pytest.mark.parametrize("method", ["encode", "__call__"])
def test_public_methods_are_boundaries_and_private_ones_are_not(method, log):
    class Methods(hk.Module):
        def encode(self, x):
            return self._note(x)

        def _note(self, x):
            LOG.append(x.dtype)
            return x * 2

        def __call__(self, x):
            return self._note(self.encode(x))  # a call within the module: no cast in its middle

    network = hk.transform(lambda x: getattr(Methods(), method)(x))
    with jmpx.haiku.policies("c=bf16,o=f16"):
        assert jax.eval_shape(network.apply, {}, None, X).dtype == F16
    assert set(log) == {BF16}


# Arrays that are made inside: calls that read parameters cast them


def made(*shape):
    """An array that is made inside, in float32, as noise is."""
    return jnp.asarray(np.sin(np.arange(1, np.prod(shape) + 1)).reshape(shape), F32)


@leniently  # an LSTM joins its input and its state, which may be of two dtypes
def multiplied(run, x, policy_map, outer=True):
    """The operands of a network under a map; it has the parameters and states of any other."""
    net = network(run, outer)
    plain, state = jax.eval_shape(net.init, KEY, x)

    def apply(params, state):
        return net.apply(params, state, KEY, x)

    with jmpx.haiku.policies(policy_map):
        assert jax.eval_shape(net.init, KEY, x) == (plain, state)
        jaxpr, (_, new_state) = jax.make_jaxpr(apply, return_shape=True)(plain, state)
    assert new_state == state
    names = ("dot_general", "conv_general_dilated")
    products = [eqn for eqn in equations(jaxpr.jaxpr) if eqn.primitive.name in names]
    return {var.aval.dtype for eqn in products for var in eqn.invars}


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
    "after a norm": lambda layer, x, made: layer(hk.LayerNorm(-1, True, True)(made)),
    "remat": lambda layer, x, made: hk.remat(layer)(made),
    "vmap": lambda layer, x, made: hk.vmap(layer, split_rng=False)(made),
    "scan": lambda layer, x, made: hk.scan(
        lambda carry, _: (layer(carry), layer(carry)), made, None, length=2
    ),
    "while_loop": at_apply(
        lambda layer, x, made: hk.while_loop(
            lambda carry: carry[0] < 2, lambda carry: (carry[0] + 1, layer(carry[1])), (0, made)
        )
    ),
    "cond": at_apply(lambda layer, x, made: hk.cond(x[0, 0] < 9, layer, lambda made: made, made)),
    "JAX's scan": at_apply(
        lambda layer, x, made: jax.lax.scan(
            lambda carry, _: (layer(carry), None), made, None, length=2
        )[0]
    ),
}


@pytest.mark.parametrize(
    ("form", "dtype"), [(form, (BF16, F16)[n % 2]) for n, form in enumerate(FORMS)]
)
def test_what_is_made_inside_is_multiplied_in_16_bits(form, dtype):
    assert multiplied(with_layer(FORMS[form]), X, f"c={dtype.name},o=f32") == {dtype}


MODULES = {
    "attention": lambda x: hk.MultiHeadAttention(2, 4, w_init=hk.initializers.VarianceScaling())(
        made(2, SIZE), x, x
    ),
    "convolutions": lambda x: hk.Conv2DTranspose(2, 3)(hk.Conv2D(2, 3)(made(1, 4, 4, 2))),
    "batch norm": lambda x: hk.Linear(3)(hk.BatchNorm(True, True, 0.9)(made(2, SIZE), True)),
    "average": lambda x: hk.Linear(3)(hk.ExponentialMovingAverage(0.9)(made(2, SIZE))),
    "embedding": lambda x: hk.Linear(3)(hk.Embed(9, SIZE)(jnp.arange(2)).astype(F32)),
    "quantizer": lambda x: hk.nets.VectorQuantizer(SIZE, 8, 0.25)(made(2, SIZE), True)["loss"],
    "layer_stack": lambda x: hk.layer_stack(2)(hk.Linear(SIZE))(made(2, SIZE)),
    "per layer": lambda x: hk.layer_stack(2, with_per_layer_inputs=True)(
        lambda x, y: (hk.Linear(SIZE)(x), hk.Linear(SIZE)(y))
    )(made(2, SIZE), made(2, SIZE)),
}


def test_lifted_parameters_are_stored_ones(log):
    def run(x):
        inner = hk.transform(lambda x: hk.Linear(SIZE)(x))
        rng = hk.next_rng_key() if hk.running_init() else None
        params = hk.lift(inner.init, name="lifted")(rng, x)
        LOG.append({leaf.dtype for leaf in jax.tree.leaves(params)})
        return inner.apply(params, None, made(2, SIZE))

    assert multiplied(run, X, "c=bf16,o=f32") == {BF16}
    with jmpx.haiku.policies("bf16; Linear: full"):
        params, _ = jax.eval_shape(network(run, outer=False).init, KEY, X)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {BF16}
    log.clear()
    assert multiplied(run, X, "c=bf16; Linear: full", outer=False) == {F32}
    assert log == 3 * [{F32}]


@pytest.mark.parametrize("name", MODULES)
def test_modules_of_haiku(name):
    assert multiplied(MODULES[name], X, "c=bf16,o=f32") == {BF16}


def test_a_rule_goes_before_and_a_parent_without_parameters_is_not_cast(log):
    class Noted(hk.Linear):
        def __call__(self, x):
            LOG.append((self.name, x.dtype))
            return super().__call__(x)

    class Parent(hk.Module):
        def __call__(self, x):
            LOG.append((self.name, x.dtype))
            return Noted(SIZE, name="ruled")(x), Noted(SIZE, name="other")(x)

    net = network(lambda x: Parent(name="parent")(made(2, SIZE)))
    params, state = jax.eval_shape(net.init, KEY, X)
    log.clear()
    with jmpx.haiku.policies("c=bf16; */ruled: full"):
        jax.eval_shape(net.apply, params, state, None, X)
    assert log == [("parent", F32), ("ruled", F32), ("other", BF16)]


# Recurrent cores


CORES = {
    "LSTM": lambda: hk.LSTM(3),
    "GRU": lambda: hk.GRU(3),
    "VanillaRNN": lambda: hk.VanillaRNN(3),
    "Conv1DLSTM": lambda: hk.Conv1DLSTM((3,), 2, 3),
    "IdentityCore": lambda: hk.IdentityCore(),
    "DeepRNN": lambda: hk.DeepRNN([hk.LSTM(3), jax.nn.relu, hk.GRU(3), hk.Linear(2)]),
    "skip": lambda: hk.deep_rnn_with_skip_connections([hk.LSTM(3), hk.VanillaRNN(3)]),
}


def scanned(core, x, state):
    step = hk.remat(lambda state, x: core(x, state)[::-1])
    return hk.scan(step, state, x)


UNROLLS = [hk.dynamic_unroll, hk.static_unroll, scanned]
RULES = ["c=bf16; Linear?: full", "c=bf16; RNNCore: full", "c=f16,o=f32; GRU?: f32"]


def unrolled(core, unroll):
    def run(x):
        made = CORES[core]()
        return unroll(made, x, made.initial_state(x.shape[1]))

    return run


def sequence(core):
    shape = (3, 1) if core == "Conv1DLSTM" else (SIZE,)
    return normal(np.random.default_rng(0), 3, 2, *shape)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("unroll", range(3))
@pytest.mark.parametrize("core", CORES)
def test_recurrent_cores_multiply_in_16_bits_but_by_a_rule(core, unroll):
    policy_map = ["c=bf16,o=f32", "c=f16,o=f32", *RULES][(list(CORES).index(core) + unroll) % 5]
    run = unrolled(core, UNROLLS[unroll])
    found = multiplied(run, sequence(core), policy_map, outer=core != "GRU")
    if policy_map not in RULES:
        dtype = BF16 if "bf16" in policy_map else F16
        assert found == (set() if core == "IdentityCore" else {dtype})


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("core", ["LSTM", "GRU", "VanillaRNN"])
@pytest.mark.parametrize(
    ("dtype", "rule"), [(F32, ""), (BF16, "; LSTM?: full"), (F32, "; GRU?: c=f32,o=f16")]
)
def test_a_core_returns_its_state_as_it_came(dtype, rule, core, by_name):
    def run(x):
        step = CORES[core]()
        state = jax.tree.map(lambda h: h.astype(dtype), step.initial_state(2))
        names = "inputs", "state" if core == "GRU" else "prev_state"
        args = dict(zip(names, (x, state), strict=True))
        _, new = step(**args) if by_name else step(x, state)
        LOG.append({leaf.dtype for leaf in jax.tree.leaves(new)})
        return new

    with jmpx.haiku.policies(f"c=bf16{rule}"):
        for outer in (True, False):
            jax.eval_shape(leniently(network(run, outer).init), KEY, X)
    assert [{dtype}] * 2 == LOG


def test_a_core_in_float32_loses_no_digit_of_its_state(rng):
    """The state of an island does not go through the dtype of what surrounds it."""
    x = normal(rng, 4, 2, SIZE)
    net = network(lambda x: hk.dynamic_unroll(hk.GRU(3), x, made(2, 3))[1])
    shapes, _ = jax.eval_shape(net.init, KEY, x)
    params = jax.tree.map(lambda leaf: normal(rng, *leaf.shape), shapes)

    def both(params, x):
        expected, _ = net.apply(params, {}, None, x.astype(BF16).astype(F32))
        with jmpx.haiku.policies("c=bf16,o=f32; GRU: full"):
            return net.apply(params, {}, None, x)[0], expected

    assert_same_bits(*jax.jit(both)(params, x))
