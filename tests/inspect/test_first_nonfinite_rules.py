"""Each rule that `first_nonfinite` prints is pasted into the program's policy, and mends it."""

import jax
import jax.numpy as jnp
import pytest
from helpers.planted_layer import FRAMEWORKS, planted

import jmpx

pytestmark = pytest.mark.usefixtures("standard_promotion")
ONES = jnp.ones((2, 4))


def saturated(w, x):
    return -jnp.mean(jnp.log(1 - jax.nn.sigmoid(x @ w)))


def exponential(w, x):
    return jnp.mean(jnp.exp(x * w[0]) / 1000)


def readout(w, x):
    with jax.named_scope("readout"):
        return jnp.mean(jnp.exp(x * w[0]) / 1000)


def in_a_scan(w, x):
    def layer(x, _):
        with jax.named_scope("layer"):
            return jnp.exp(x * w[0]) / 1e5, None

    return jnp.mean(jax.lax.scan(layer, x, length=2)[0])


def division(w, x):
    return jnp.mean(x @ w / (x - x))


def mask(w, x):
    return jnp.mean(jax.nn.softmax(jnp.where(x > 99, x @ w, -jnp.inf)))


def energy(x):
    return jnp.log1p(jnp.sum(x * x, -1, keepdims=True) * x)


def gate(x):
    return jnp.exp(x) / 1000


def large(x):
    return x * x


# What overflows: the function, the policy map, and the rule that mends it.
AUTOCAST = {
    saturated: ("c=bf16; op.logistic: bf16", "op.logistic: f32"),
    exponential: ("c=f16; op.exp: f16", "op.exp: f32"),
    readout: ("c=f16; op.exp: f16", "*/readout: f32"),
    in_a_scan: ("c=f16; op.exp: f16", "*/layer: f32"),
    division: ("c=f16", ""),
    mask: ("c=f16", ""),
}


FACTORS = {energy: 40, gate: 0.3, large: 12}
# What `large` returns is beyond float16, too.
RULES = {energy: "*/plant: f32", gate: "*/plant: f32", large: "*/plant: c=f32,o=f32"}


def ran(fn, policy, *args):
    return jmpx.inspect.first_nonfinite(jmpx.autocast(fn, policy))(*args)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fn", AUTOCAST)
def test_the_rule_for_autocast_is_replayed(fn):
    policy, rule = AUTOCAST[fn]
    args = jnp.full((4, 4), 3.0), ONES * (1 if fn is saturated else 4)
    found = ran(fn, policy, *args)
    assert found is not None and found.rule == rule
    assert not rule or ran(fn, f"{policy}; {rule}", *args) is None


def test_what_an_earlier_operation_lost_is_mended_there():
    """The result of `log` is infinite in float32, too: what `logistic` rounds to 1 is the cause."""
    found = ran(saturated, AUTOCAST[saturated][0], jnp.full((4, 4), 3.0), ONES)
    assert found is not None and found.operation == "log"
    assert "because of numbers that 16 bits lost before" in found.cause


@pytest.mark.sampled(4)
@pytest.mark.parametrize("layer", RULES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_rule_for_a_module_is_replayed(framework, layer):
    def found(policy):
        loss, (model, x) = planted(framework, layer, policy)
        model = jax.tree.map(lambda x: jnp.full(x.shape, 6.0, x.dtype), model)
        return jmpx.inspect.first_nonfinite(loss)(model, x * FACTORS[layer])

    policy = "c=f16,o=f32; */head: c=f32,o=f32" if layer is large else "c=f16,o=f32"
    first = found(policy)
    is_outermost = framework == "haiku"  # a call that returns the output dtype of the map
    rule = "*/plant: f32" if is_outermost else RULES[layer]
    assert first is not None and first.rule == rule
    assert found(f"{policy}; {first.rule}") is None


@pytest.mark.parametrize("policy", ["c=f16; op.exp: f16", None])
def test_without_a_rule_that_mends_it_the_code_is_told(policy):
    """Autocast makes nothing wider than the code has it, and plain code has no rules."""

    def loss(w, x):
        return jnp.exp((x @ w).astype(jnp.float16)).astype(jnp.float32).sum()

    fn = loss if policy is None else jmpx.autocast(loss, policy)
    found = jmpx.inspect.first_nonfinite(fn)(jnp.full((4, 4), 2.0), 2 * ONES)
    assert found is not None and found.rule == ""
    tried = "" if policy is None else ", but no rule mends it"
    end = f"In float32 it is finite{tried}: cast what it reads with .astype(jnp.float32)."
    assert found.cause.endswith(end)


def test_a_rule_at_the_floor_of_the_scale_is_replayed_there():
    def make(policy):
        def step(w, scale, x):
            fn = jmpx.autocast(exponential, policy)
            return jmpx.filter_value_and_grad(fn, scale, policy="full")(w, x)

        return step

    args = jnp.full((4, 4), 3.0), jmpx.DynamicLossScale(2.0**10), 4 * ONES
    found = jmpx.inspect.first_nonfinite(make("c=f16; op.exp: f16"))(*args)
    assert found is not None and (found.rule, found.is_at_floor) == ("op.exp: f32", True)
