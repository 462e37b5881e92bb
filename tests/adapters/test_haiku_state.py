"""Under `jmpx.haiku.policies`, state keeps the dtype in which it is stored."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BF16, F16, F32, LOG, enable_x64, leniently

import jmpx
import jmpx.haiku

MAPS = ["c=bf16", "c=f16,o=f32; */inner: full", "bf16", "f16"]
X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)


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
            return inner(x) if hk.running_init() else transform(inner, x)

    return lambda x: Wrapper()(x)


MODULES = {
    "batch_norm": lambda x: hk.BatchNorm(True, True, 0.9)(x, is_training=True),
    "moving_average": lambda x: hk.ExponentialMovingAverage(0.999)(x.sum(0)),
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
    "cond": within(Counts, lambda f, x: hk.cond(True, f, lambda x: f(x + 1), x)),
}


def dtypes(state):
    return {path: leaf.dtype.name for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def shapes_of(network):
    """Lenient `init` and `apply` that compute shapes and dtypes alone."""
    return (functools.partial(jax.eval_shape, leniently(f)) for f in network)


@pytest.mark.parametrize(
    ("name", "policy_map"), [(name, MAPS[n % 4]) for n, name in enumerate(MODULES)]
)
@pytest.mark.filterwarnings("ignore:The rule")  # most modules hold no `inner`
def test_state_is_of_the_dtypes_that_it_has_without_policies(name, policy_map):
    network = hk.transform_with_state(MODULES[name])
    init, _ = shapes_of(network)
    shapes, plain = init(jax.random.key(0), X)
    expected = dtypes(plain)
    assert expected

    @functools.partial(jax.grad, argnums=2, has_aux=True)
    def step(params, state, x):
        y, state = leniently(network.apply)(params, state, None, x)
        return y.astype(jnp.float32).sum(), state

    with jmpx.haiku.policies(policy_map):
        created, state = init(jax.random.key(0), X)
        assert dtypes(state) == expected
        assert dtypes(jax.eval_shape(step, created, state, X)[1]) == expected
    assert jax.tree.structure(shapes) == jax.tree.structure(created)


def test_the_codebook_learns_as_in_float32(rng):
    network = hk.transform_with_state(quantize)
    apply = jax.jit(leniently(network.apply))
    data = rng.normal(size=(64, 3)).astype(np.float32)
    _, plain = jax.jit(leniently(network.init))(jax.random.key(0), data)
    mixed = plain
    for _ in range(20):
        _, plain = apply({}, plain, None, data)
        with jmpx.haiku.policies("c=bf16"):
            _, mixed = apply({}, mixed, None, data)
    assert dtypes(mixed) == dtypes(plain)
    codebook, expected = (s["vector_quantizer_ema"]["embeddings"] for s in (mixed, plain))
    # Only the inputs may be rounded, by the function's own caller; the codebook never is.
    np.testing.assert_allclose(codebook, expected, rtol=1e-5, atol=1e-6)
    rounded = jnp.asarray(codebook, jnp.bfloat16).astype(jnp.float32)
    assert np.abs(rounded - codebook).max() > 0


@pytest.mark.parametrize("rule", ["", "; BatchNorm: full", "; block/batch_norm/*: full"])
def test_moving_averages_are_kept_and_taken_in_float32(rule, rng, log):
    class Block(hk.Module):
        def __call__(self, x, is_training):
            x = hk.BatchNorm(True, True, 0.999)(x, is_training)
            LOG.append(x.dtype)
            return x

    network = hk.transform_with_state(lambda x, is_training: Block()(x, is_training))
    init, apply = network.init, leniently(network.apply)
    x = rng.normal(3, 2, size=(64, 3)).astype(np.float32)

    @jax.jit
    def run(x):
        with jmpx.haiku.policies(f"c=bf16,o=f32{rule}"):
            params, state = leniently(init)(jax.random.key(0), x, True)
            for _ in range(2):
                y, state = apply(params, state, None, x, True)
            return state, y, apply(params, state, None, x, False)[0]

    state, y, inference = run(x)
    assert set(log) == {BF16} and y.dtype == inference.dtype == F32
    floats = [leaf for leaf in jax.tree.leaves(state) if leaf.dtype != jnp.int32]
    assert floats and {leaf.dtype for leaf in floats} == {F32}
    (name,) = [name for name in state if "mean_ema" in name]
    np.testing.assert_allclose(state[name]["average"][0], x.mean(0), rtol=2e-2)
    np.testing.assert_allclose(inference, y, atol=0.1)


def test_a_rule_or_a_class_policy_about_a_module_with_statistics_goes_before(log):
    class Average(hk.ExponentialMovingAverage):
        def __call__(self, x, update_stats=True):
            LOG.append((x.dtype, jmpx.current_policy().compute_dtype))  # pyright: ignore[reportOptionalMemberAccess]
            return super().__call__(x, update_stats)

    init, apply = shapes_of(hk.transform_with_state(lambda x: Average(0.9)(x)))

    def run(policy_map):
        with jmpx.haiku.policies(policy_map):
            _, state = init(None, jnp.ones(2))
            y, after = apply({}, state, None, jnp.ones(2))
        assert dtypes(after) == dtypes(state)
        return y.dtype

    assert run("c=bf16") == BF16 and log[-1] == (F32, F32)
    assert run("c=bf16; Average: c=f16,o=bf16") == BF16 and log[-1] == (F16, F16)
    with jmpx.push_policy(Average, "p=f32,c=f16,o=f32"):
        assert run("c=bf16") == F32 and log[-1] == (F16, F16)


def test_state_in_16_bits_is_computed_in_and_stays():
    init, apply = shapes_of(hk.transform_with_state(lambda x: hk.ExponentialMovingAverage(0.9)(x)))
    _, state = init(None, jnp.ones(2, jnp.bfloat16))
    with jmpx.haiku.policies("c=f16,o=f32"):
        y, after = apply({}, state, None, jnp.ones(2))
    assert y.dtype == F32 and dtypes(after) == dtypes(state)


def test_what_the_users_own_getters_and_setters_do_is_left_to_them(log):
    def half(getter, value, context):
        return value.astype(jnp.bfloat16) if value.dtype == jnp.float32 else value

    def doubled(setter, value, context):
        LOG.append(context.full_name)
        return setter(value * 2)

    def net(x):
        with hk.custom_getter(half, params=False, state=True), hk.custom_setter(doubled):
            return Method()(x)

    network = hk.transform_with_state(net)
    _, plain = network.init(None, X)
    with jmpx.haiku.policies("c=bf16"):
        _, state = network.apply({}, plain, None, X)
    assert dtypes(state) == dtypes(plain) and len(log) == 4
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
        assert {leaf.dtype for leaf in state["changes"]["tree"]} == {F32}
        _, state = network.apply({}, state, None, jnp.ones(2))
        assert len(state["changes"]["tree"]) == 1


def test_float64_state_of_a_float64_map_is_float64():
    init, _ = shapes_of(hk.transform_with_state(MODULES["methods"]))
    with enable_x64(), jmpx.haiku.policies("p=f64,c=bf16"):
        assert set(dtypes(init(None, jnp.ones(2))[1]).values()) == {"float64"}


def test_nothing_is_kept_outside_of_the_context():
    init, apply = shapes_of(hk.transform_with_state(MODULES["methods"]))
    _, state = init(None, X)
    with jmpx.haiku.policies("c=bf16"):
        apply({}, state, None, X)
    _, after = apply({}, state, None, jnp.asarray(X, jnp.bfloat16))
    assert set(dtypes(after).values()) == {"bfloat16"}
