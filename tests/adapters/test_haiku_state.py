"""Under `jmpx.haiku.policies`, state keeps the dtype in which it is stored."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import enable_x64, leniently

import jmpx
import jmpx.haiku

MAPS = ["c=bf16", "c=f16,o=f32; */inner: full", "bf16", "f16"]


class Counts(hk.Module):
    """Sets state of several dtypes, from what it computes."""

    def __call__(self, x):
        steps = hk.get_state("steps", (), jnp.int32, init=jnp.zeros)
        mean = hk.get_state("mean", x.shape[-1:], jnp.float32, init=jnp.zeros)
        cache = hk.get_state("cache", x.shape, jnp.bfloat16, init=jnp.zeros)
        hk.set_state("steps", steps + 1)
        hk.set_state("mean", mean + x.mean(0))
        hk.set_state("cache", cache + x)
        hk.set_state("last", x)  # never created: the first value defines it
        hk.set_state("pair", {"x": x, "positive": x > 0, "none": None})
        return x * 2


class Outer(hk.Module):
    def __call__(self, x):
        return Counts(name="inner")(hk.Linear(3)(x))


class Method(hk.Module):
    """State that a public method sets, and a private one."""

    def __call__(self, x):
        self._keep(x)
        return self.keep(x)

    def keep(self, x):
        hk.set_state("kept", x.sum())
        return x

    def _keep(self, x):
        hk.set_state("hidden", x.sum())


def quantize(x):
    out = hk.nets.VectorQuantizerEMA(3, 4, 0.25, 0.9)(x, is_training=True)
    return out["quantize"]


def at_the_top(x):
    y = hk.Linear(3)(x)
    count = hk.get_state("count", (), jnp.float32, init=jnp.zeros)
    hk.set_state("count", count + y.sum())
    hk.set_state("last", y)
    return y


def scanned(x):
    counts = Counts()

    def body(carry, _):
        return carry, counts(x).sum()

    return hk.scan(body, jnp.zeros(()), None, length=2)[1]


def within(module, transform):
    """The module in another one, under a transform of Haiku's."""

    class Wrapper(hk.Module):
        def __call__(self, x):
            inner = module()
            if hk.running_init():
                return inner(x)
            return transform(inner, x)

    return lambda x: Wrapper()(x)


def conditional(inner, x):
    return hk.cond(True, inner, lambda x: inner(x + 1), x)


def looped(inner, x):
    return hk.fori_loop(0, 2, lambda i, x: inner(x), x)


MODULES = {
    "batch_norm": lambda x: hk.BatchNorm(True, True, 0.9)(x, is_training=True),
    "batch_norm_in_a_module": within(
        lambda: functools.partial(hk.BatchNorm(True, True, 0.9), is_training=True),
        lambda inner, x: inner(x),
    ),
    "moving_average": lambda x: hk.ExponentialMovingAverage(0.999)(x.sum(0)),
    "moving_average_warmup": lambda x: hk.ExponentialMovingAverage(0.9, False, 3)(x.sum(0)),
    "spectral_norm": lambda x: hk.SpectralNorm()(x),
    "ema_of_a_tree": lambda x: hk.EMAParamsTree(0.9)({"linear": {"w": x}})["linear"]["w"],
    "spectral_norm_of_a_tree": lambda x: hk.SNParamsTree()({"linear": {"w": x}})["linear"]["w"],
    "quantizer": quantize,
    "counts": lambda x: Counts()(x),
    "counts_within": lambda x: Outer()(x),
    "methods": lambda x: Method()(x),
    "at_the_top": at_the_top,
    "scan": scanned,
    "remat": within(Counts, lambda inner, x: hk.remat(inner)(x)),
    "cond": within(Counts, conditional),
    "fori_loop": within(Counts, looped),
    "switch": within(Counts, lambda inner, x: hk.switch(0, [inner, inner], x)),
}


def dtypes(state):
    return {path: leaf.dtype.name for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


@pytest.fixture
def x(rng):
    return rng.normal(size=(4, 3)).astype(np.float32)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("policy_map", MAPS)
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.filterwarnings("ignore:The rule")  # most modules hold no `inner`
def test_state_is_of_the_dtypes_that_it_has_without_policies(name, policy_map, x):
    network = hk.transform_with_state(MODULES[name])
    init, apply = leniently(network.init), leniently(network.apply)
    key = jax.random.key(0)
    shapes, plain = jax.eval_shape(init, key, x)
    expected = dtypes(plain)
    assert expected

    def step(params, state, x):
        y, state = apply(params, state, None, x)
        return y.astype(jnp.float32).sum(), state

    with jmpx.haiku.policies(policy_map):
        created, state = jax.eval_shape(init, key, x)
        assert dtypes(state) == expected
        for start in (plain, state):
            _, after = jax.eval_shape(step, created, start, x)
            differentiated = jax.grad(step, argnums=2, has_aux=True)
            _, after_grad = jax.eval_shape(differentiated, created, start, x)
            assert dtypes(after) == dtypes(after_grad) == expected
    assert jax.tree.structure(shapes) == jax.tree.structure(created)


@pytest.mark.parametrize("policy_map", ["c=bf16", "f16"])
def test_the_codebook_learns_as_in_float32(policy_map, rng):
    network = hk.transform_with_state(quantize)
    init, apply = jax.jit(leniently(network.init)), jax.jit(leniently(network.apply))
    data = rng.normal(size=(64, 3)).astype(np.float32)
    _, plain = init(jax.random.key(0), data)
    mixed = plain
    for _ in range(20):
        _, plain = apply({}, plain, None, data)
        with jmpx.haiku.policies(policy_map):
            _, mixed = apply({}, mixed, None, data)
    assert dtypes(mixed) == dtypes(plain)
    codebook, expected = (s["vector_quantizer_ema"]["embeddings"] for s in (mixed, plain))
    # Only the inputs may be rounded, by the function's own caller; the codebook never is.
    np.testing.assert_allclose(codebook, expected, rtol=1e-5, atol=1e-6)
    rounded = jnp.asarray(codebook, jnp.bfloat16).astype(jnp.float32)
    assert np.abs(rounded - codebook).max() > 0


def test_a_moving_average_moves_by_steps_that_16_bits_cannot_hold():
    network = hk.transform_with_state(lambda x: hk.ExponentialMovingAverage(0.9999, False)(x))
    with jmpx.haiku.policies("c=bf16"):
        _, state = network.init(None, jnp.zeros(1))
        apply = jax.jit(network.apply)
        for _ in range(50):
            _, state = apply({}, state, None, jnp.ones(1))
    average = state["exponential_moving_average"]["average"]
    np.testing.assert_allclose(average, 1 - 0.9999**50, rtol=1e-3)


def test_a_rule_or_a_class_policy_about_a_module_with_statistics_goes_before():
    seen = []

    class Average(hk.ExponentialMovingAverage):
        def __call__(self, x, update_stats=True):
            seen.append((x.dtype, jmpx.current_policy().compute_dtype))  # pyright: ignore[reportOptionalMemberAccess]
            return super().__call__(x, update_stats)

    network = hk.transform_with_state(lambda x: Average(0.9)(x))

    def run(policy_map):
        with jmpx.haiku.policies(policy_map):
            _, state = jax.eval_shape(leniently(network.init), None, jnp.ones(2))
            y, after = jax.eval_shape(leniently(network.apply), {}, state, None, jnp.ones(2))
        assert dtypes(after) == dtypes(state)
        return y.dtype

    assert run("c=bf16") == jnp.bfloat16 and seen[-1] == (np.float32, jnp.float32)
    assert run("c=bf16; Average: c=f16,o=bf16") == jnp.bfloat16
    assert seen[-1] == (np.float16, jnp.float16)
    with jmpx.push_policy(Average, "p=f32,c=f16,o=f32"):
        assert run("c=bf16") == np.float32 and seen[-1] == (np.float16, jnp.float16)


def test_state_in_16_bits_is_computed_in_and_stays():
    network = hk.transform_with_state(lambda x: hk.ExponentialMovingAverage(0.9)(x))
    _, state = jax.eval_shape(leniently(network.init), None, jnp.ones(2, jnp.bfloat16))
    with jmpx.haiku.policies("c=f16,o=f32"):
        y, after = jax.eval_shape(leniently(network.apply), {}, state, None, jnp.ones(2))
    assert y.dtype == np.float32 and dtypes(after) == dtypes(state)


def test_what_the_users_own_getters_and_setters_do_is_left_to_them(x):
    def half(getter, value, context):
        return value.astype(jnp.bfloat16) if value.dtype == jnp.float32 else value

    order = []

    def doubled(setter, value, context):
        order.append(context.full_name)
        return setter(value * 2)

    def net(x):
        with hk.custom_getter(half, params=False, state=True), hk.custom_setter(doubled):
            return Method()(x)

    network = hk.transform_with_state(net)
    _, plain = network.init(None, x)
    with jmpx.haiku.policies("c=bf16"):
        _, state = network.apply({}, plain, None, x)
    assert dtypes(state) == dtypes(plain) and len(order) == 4
    np.testing.assert_allclose(state["method"]["kept"], plain["method"]["kept"], rtol=0.1, atol=0.1)


def test_a_state_may_change_its_structure_and_numbers_are_left_alone():
    class Changes(hk.Module):
        def __call__(self, x):
            hk.set_state("number", 0.5)
            hk.set_state("tree", [x, x] if hk.running_init() else [x])
            return x

    network = hk.transform_with_state(lambda x: Changes()(x))
    with jmpx.haiku.policies("c=bf16"):
        _, state = network.init(None, jnp.ones(2))
        assert state["changes"]["number"] == 0.5
        assert {leaf.dtype for leaf in state["changes"]["tree"]} == {np.dtype("float32")}
        _, state = network.apply({}, state, None, jnp.ones(2))
        assert len(state["changes"]["tree"]) == 1


def test_float64_state_of_a_float64_map_is_float64():
    network = hk.transform_with_state(lambda x: Method()(x))
    with enable_x64(), jmpx.haiku.policies("p=f64,c=bf16"):
        _, state = network.init(None, jnp.ones(2))
        assert set(dtypes(state).values()) == {"float64"}


def test_nothing_is_kept_outside_of_the_context(x):
    network = hk.transform_with_state(lambda x: Method()(x))
    _, state = network.init(None, x)
    with jmpx.haiku.policies("c=bf16"):
        network.apply({}, state, None, x)
    _, after = network.apply({}, state, None, jnp.asarray(x, jnp.bfloat16))
    assert set(dtypes(after).values()) == {"bfloat16"}
