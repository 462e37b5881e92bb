"""The rules that follow from ranges: float16 overflows in two layers without them, and not with."""

import functools

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import normal

import jmpx
import jmpx.equinox
import jmpx.flax
import jmpx.haiku
from jmpx._inspect.ranges.report import Ranges

SIZE = 8


# Two layers compute what float16 cannot hold, and return what it can.


def gauge(x, w):
    return (x * 300.0) @ (w * 300.0) / 9e4


def energy(x, w):
    squares = jnp.sum((x * 1000.0) ** 2, axis=-1, keepdims=True)
    return x * 1000.0 / jnp.sqrt(squares + 1.0) @ w


def plain(x, w):
    return jnp.tanh(x @ w)


LAYERS = {"first": plain, "gauge": gauge, "middle": plain, "energy": energy, "head": plain}


class HaikuLayer(hk.Module):
    def __call__(self, x):
        w = hk.get_parameter("w", (SIZE, SIZE), init=jnp.zeros)
        return LAYERS[self.name](x, w)


class HaikuNet(hk.Module):
    def __call__(self, x):
        for name in LAYERS:
            x = HaikuLayer(name=name)(x)
        return x


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.zeros, (SIZE, SIZE))
        return LAYERS[self.name or ""](x, w)


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        for name in LAYERS:
            x = LinenLayer(name=name)(x)
        return x


class NNXLayer(nnx.Module):
    def __init__(self, w, name):
        self.w, self.name = nnx.Param(w), name

    def __call__(self, x):
        return LAYERS[self.name](x, self.w[...])


class NNXNet(nnx.Module):
    def __init__(self, ws):
        for name, w in ws.items():
            setattr(self, name, NNXLayer(w, name))

    def __call__(self, x):
        for name in LAYERS:
            x = getattr(self, name)(x)
        return x


class EquinoxLayer(eqx.Module):
    w: jax.Array
    name: str = eqx.field(static=True)

    def __call__(self, x):
        return LAYERS[self.name](x, self.w)


class EquinoxNet(eqx.Module):
    first: EquinoxLayer
    gauge: EquinoxLayer
    middle: EquinoxLayer
    energy: EquinoxLayer
    head: EquinoxLayer

    def __call__(self, x):
        for name in LAYERS:
            x = getattr(self, name)(x)
        return x


HAIKU = hk.without_apply_rng(hk.transform(lambda x: HaikuNet(name="net")(x)))


def weights(rng):
    return {name: normal(rng, SIZE, SIZE) / SIZE**0.5 for name in LAYERS}


def within(policies, apply, rules):
    def wrapper(*args):
        with policies(rules):
            return apply(*args)

    return wrapper


def viewing(with_policies, _, rules):
    return lambda model, x: with_policies(model, rules)(x)


def call(model, x):
    return model(x)


# By framework: a function to call, its model of weights, and its adapter.
FRAMEWORKS = {
    "haiku": (
        HAIKU.apply,
        lambda ws: {f"net/{name}": {"w": w} for name, w in ws.items()},
        functools.partial(within, jmpx.haiku.policies),
    ),
    "linen": (
        LinenNet().apply,
        lambda ws: {"params": {name: {"w": w} for name, w in ws.items()}},
        functools.partial(within, jmpx.flax.policies),
    ),
    "nnx": (call, NNXNet, functools.partial(viewing, jmpx.flax.with_policies)),
    "equinox": (
        call,
        lambda ws: EquinoxNet(**{name: EquinoxLayer(w, name) for name, w in ws.items()}),
        functools.partial(viewing, jmpx.equinox.with_policies),
    ),
}


def loss_of(apply, x, scale=1.0):
    return lambda model: jnp.mean(apply(model, x).astype(jnp.float32) ** 2) * scale


def gradients(apply, model, x, scale=1.0):
    grad = nnx.grad if isinstance(model, nnx.Module) else jax.grad
    leaves = jax.tree.leaves(grad(loss_of(apply, x, scale))(model))
    return np.concatenate([np.ravel(leaf).astype(np.float64) / scale for leaf in leaves])


def error(found, expected):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.thorough
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_rules_keep_what_would_overflow(framework, rng, standard_promotion):
    apply, make, adapter = FRAMEWORKS[framework]
    model, x = make(weights(rng)), normal(rng, 4, SIZE)
    expected = gradients(apply, model, x)
    found = jmpx.inspect.ranges(lambda model, x: loss_of(apply, x)(model))(model, x)
    rules, scale = found.rules("float16"), found.loss_scale()
    kept = {rule.selector.rpartition("/")[2] for rule in jmpx.get_policy_map(rules).rules}
    assert kept == {"gauge", "energy"}
    assert found.rules("float16", scale) == rules
    for road in (jmpx.autocast, adapter):
        without = road(apply, "compute=float16,output=float32")
        assert not np.isfinite(gradients(without, model, x, scale)).all()
        assert error(gradients(road(apply, rules), model, x, scale), expected) < 3e-3


def test_named_scopes_have_rules_of_autocast(rng):
    ws, x = weights(rng), normal(rng, 4, SIZE)

    def apply(ws, x):
        for name, layer in LAYERS.items():
            with jax.named_scope(name):
                x = layer(x, ws[name])
        return x

    found = jmpx.inspect.ranges(lambda ws, x: loss_of(apply, x)(ws))(ws, x)
    assert found.rules() == "compute=float16,output=float32; " + "; ".join(
        f"*/{name}: compute=float32,output=float32" for name in ("gauge", "energy")
    )
    mended = jmpx.autocast(apply, found.rules())
    expected, scale = gradients(apply, ws, x), found.loss_scale()
    assert not np.isfinite(gradients(jmpx.autocast(apply, "c=f16"), ws, x, scale)).all()
    assert error(gradients(mended, ws, x, scale), expected) < 3e-3


def test_operations_have_rules_where_there_is_no_scope(rng):
    x, w = normal(rng, 4, SIZE), normal(rng, SIZE, SIZE)

    def apply(w, x):
        return jnp.tanh(x * 300.0 @ (w * 300.0) / 9e4)

    found = jmpx.inspect.ranges(lambda w, x: loss_of(apply, x)(w))(w, x)
    assert found.rules() == "compute=float16,output=float32; op.dot_general?: compute=float32"
    mended = gradients(jmpx.autocast(apply, found.rules()), w, x)
    assert error(mended, gradients(apply, w, x)) < 1e-6
    # The same string serves the adapters, which give no rules to operations.
    with jmpx.haiku.policies(found.rules()):
        HAIKU.apply(FRAMEWORKS["haiku"][1](weights(rng)), x)


def test_what_reads_an_overflowing_value_is_kept_too(rng):
    ws, x = weights(rng), normal(rng, 4, SIZE)

    def apply(ws, x):
        with jax.named_scope("large"):
            x = jnp.tanh(x @ ws["first"]) * 1e5
        with jax.named_scope("reader"):
            x = jnp.tanh(x @ ws["gauge"] / 1e5)
        with jax.named_scope("later"):
            return x @ ws["head"]

    found = jmpx.inspect.ranges(lambda ws, x: loss_of(apply, x)(ws))(ws, x)
    entering = {each.scope: each.entering for each in found.activations}
    assert entering["reader"] > 65504 > entering["later"]
    kept = [rule.selector for rule in jmpx.get_policy_map(found.rules()).rules]
    assert kept == ["*/large", "*/reader"]
    mended = gradients(jmpx.autocast(apply, found.rules()), ws, x)
    assert error(mended, gradients(apply, ws, x)) < 3e-3


def test_arguments_beyond_float16_are_seen_where_they_enter(rng):
    def apply(w, x):
        with jax.named_scope("first"):
            return jnp.tanh(x @ w / 1e6)

    found = jmpx.inspect.ranges(lambda w, x: jnp.mean(apply(w, x)))(
        normal(rng, 3, 3), jnp.full((2, 3), 1e5)
    )
    assert "*/first: compute=float32" in found.rules()


class Inner(hk.Module):
    def __call__(self, x):
        return hk.Linear(SIZE, name="linear")(x)


class Outer(hk.Module):
    def __call__(self, x):
        return Inner(name="inner")(x * 1e5 / 1e5) + 1.0


def test_the_modules_inside_of_a_kept_one_compute_in_float16(rng, standard_promotion):
    net = hk.without_apply_rng(hk.transform(lambda x: Outer(name="outer")(x)))
    x = normal(rng, 4, SIZE)
    params = net.init(jax.random.key(0), x)
    found = jmpx.inspect.ranges(lambda p, x: jnp.mean(net.apply(p, x)))(params, x)
    assert [str(rule) for rule in jmpx.get_policy_map(found.rules()).rules] == [
        "*/outer: compute=float32,output=float32",
        "outer/inner/linear: compute=float16",
    ]
    text = str(jax.make_jaxpr(jmpx.autocast(net.apply, found.rules()))(params, x))
    assert "f16[4,8] = dot_general" in text and "f32[4,8] = mul" in text


def test_gradients_that_overflow_at_a_scale_are_kept(rng):
    def loss_fn(w, x):
        with jax.named_scope("steep"):
            h = x @ w * 1000.0
        with jax.named_scope("flat"):
            return jnp.sum(jnp.tanh(h)) * 1e-3

    found = jmpx.inspect.ranges(loss_fn)(normal(rng, 3, 3) * 1e-4, normal(rng, 2, 3))
    assert found.rules() == "compute=float16,output=float32"
    assert "*/steep" in found.rules(scale=2**16)
    assert "float32" in found.rules("bfloat16") and ":" not in found.rules("bfloat16")


def huge_gradients(w, x):
    with jax.named_scope("steep"):
        h = x @ w
    return jnp.mean(h - jax.lax.stop_gradient(h)) * 1e10


def huge_argument(w, x):
    return jnp.mean(jnp.tanh(1e6 * x @ w))


def huge_scope(w, x):
    with jax.named_scope("steep"):
        return jnp.mean(jnp.tanh(1e6 * x @ w) * 1e-6)


def nothing_huge(w, x):
    return jnp.mean(jnp.tanh(x @ w))


def large_input(w, x):
    return jnp.mean(jnp.tanh(x @ (w * 1e-6)))


@pytest.mark.parametrize(
    ("loss_fn", "factor", "says"),
    [
        (huge_gradients, 1, "Nothing overflows in float16."),
        (huge_argument, 1, "op.mul?: compute=float32"),
        (huge_scope, 1, "*/steep: compute=float32"),
        (nothing_huge, 1, "Nothing overflows in float16."),
        (large_input, 1e6, "No rule keeps in float32 what overflows in (no scope):"),
    ],
)
def test_rules_are_told_where_something_overflows(loss_fn, factor, says):
    found = jmpx.inspect.ranges(loss_fn)(jnp.full((3, 3), 0.1), jnp.full((2, 3), 0.1 * factor))
    text, rules = str(found), found.rules()
    assert says in text
    assert ("Nothing overflows" in text) == (":" not in rules and "No rule" not in text)
    assert (rules in text) == (":" in rules)


@pytest.mark.parametrize("dtype", ["e4m3", "float8_e5m2", "float32"])
def test_rules_are_for_dtypes_to_compute_in(dtype):
    found = Ranges("f", (), ())
    with pytest.raises(ValueError, match="float16.*got.*"):
        found.rules(dtype)
