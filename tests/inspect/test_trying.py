"""Each rule that an audit prints is pasted into the program's policy, and mends what it is for."""

import re

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import F32
from helpers.planted_layer import FRAMEWORKS, planted

import jmpx
import jmpx.equinox
import jmpx.flax
import jmpx.haiku
from jmpx._inspect.audit import leaks, trying
from jmpx._inspect.audit.data import SEVERITIES

pytestmark = pytest.mark.usefixtures("standard_promotion")
ROWS = 300
LEAKS = [kind.name for kind in leaks.KINDS]
OUTERMOST = ("LinenNet", "NNXNet", "EquinoxNet", "Tied", "Deep", "deep", "*/deep", "MLP")


def softmax(x):
    return jax.nn.softmax(x) * x


def long_sum(x):
    return x + jnp.sum(x, 0, keepdims=True, dtype=x.dtype)


def mean(x):
    return x - jnp.mean(x, 0, keepdims=True, dtype=x.dtype)


def norm(x):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)


def positions(x):
    x = x + jnp.asarray(np.sin(np.arange(len(x)))[:, None], F32)
    return x @ x.T @ x  # a layer would cast what it reads


def attention(x):
    return jax.nn.softmax(x @ x.T) @ x


HALF = "c=bf16,o=f32"
HEAD = "*/head: c=f32,o=f32"
# layer -> the policy map without a rule that would mend it
LAYERS = dict.fromkeys((softmax, long_sum, mean, positions, attention), HALF)
LAYERS[norm] = f"c=f16,o=f32; */plant: full; {HEAD}"


def within_framework(framework, layer):
    return lambda policy: planted(framework, layer, policy, rows=ROWS), LAYERS[layer]


def under_autocast(layer, policy="c=bf16; */plant/low: bf16; op.exp: bf16; op.reduce_sum: bf16"):
    def loss(w, x):
        with jax.named_scope("first"):
            x = x @ w
        with jax.named_scope("plant"):
            x = layer(x)
        with jax.named_scope("head"):
            return jnp.mean((x @ w).astype(F32))

    args = jnp.ones((4, 4)), jnp.ones((ROWS, 4))
    return lambda policy: (jmpx.autocast(loss, policy), args), policy


def scan_under_autocast():
    def loss(w, x):
        def body(x, _):
            with jax.named_scope("layer"):
                return x + jnp.tanh(x @ w) @ w, None

        return jnp.mean(jax.lax.scan(body, x @ w, length=3)[0])

    return lambda policy: (jmpx.autocast(loss, policy), (jnp.ones((4, 4)),) * 2), "c=bf16"


def within_gradient_function(layer):
    def make(policy):
        loss, args = planted("linen", layer, policy, rows=ROWS)
        scale = jmpx.NoOpLossScale()
        return jmpx.filter_value_and_grad(loss, scale, policy=policy), args

    return make, LAYERS[layer]


class Tied(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(50, 8, name="embed")
        x = nn.LayerNorm(name="norm")(nn.Dense(8, name="hidden")(embed(tokens)))
        return x @ embed.embedding.T


def tied_head():
    model, tokens = Tied(), jnp.zeros((2, 4), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)

    def make(policy):
        def loss(params, tokens):
            with jmpx.flax.policies(policy):
                logits = model.apply(params, tokens)
            return jnp.mean(jax.nn.logsumexp(jnp.asarray(logits), axis=-1))

        return loss, (params, tokens)

    return make, "c=bf16,o=f32; LayerNorm: c=f32,o=f32"


class Deep(hk.Module):
    """Layers that are alike, each with a norm before a float32 layer."""

    def __call__(self, x):
        for i in range(3):
            x = hk.LayerNorm(-1, True, True, name=f"norm_{i}")(hk.Linear(4, name=f"low_{i}")(x))
            x = hk.Linear(4, name=f"wide_{i}")(x)
        return x


def layers_alike():
    net = hk.without_apply_rng(hk.transform(lambda x: Deep(name="deep")(x)))
    params = jax.eval_shape(net.init, jax.random.key(0), jnp.ones((2, 4)))

    def make(policy):
        def loss(params, x):
            with jmpx.haiku.policies(policy):
                return jnp.mean(net.apply(params, x))

        return loss, (params, jnp.ones((2, 4)))

    return make, "c=bf16,o=f32; LayerNorm: full; */wide_*: full"


def two_maps():
    """A model of two parts, each a view of its own."""
    parts = [eqx.nn.MLP(4, 4, 8, 1, key=jax.random.key(i)) for i in range(2)]

    def make(policy):
        def loss(parts, x):
            for part in parts:
                x = jax.vmap(jmpx.equinox.with_policies(part, policy))(x)
            return jnp.mean(x)

        return loss, (parts, jnp.ones((2, 4)))

    return make, "c=bf16,o=f32; */layers/1: c=bf16,o=f32"


PROGRAMS = {
    **{
        f"{framework}-{layer.__name__}": within_framework(framework, layer)
        for layer in LAYERS
        for framework in FRAMEWORKS
    },
    **{f"autocast-{layer.__name__}": under_autocast(layer) for layer in LAYERS},
    "autocast-scan": scan_under_autocast(),
    "gradient-softmax": within_gradient_function(softmax),
    "gradient-norm": within_gradient_function(norm),
    "tied-head": tied_head(),
    "layers-alike": layers_alike(),
    "two-maps": two_maps(),
}


IN_CODE = "no rule fixes it and keeps all 16-bit matmuls: x.astype(jnp.float32) before"
EXPECTED = {
    **{
        f"{framework}-{layer}": (name, rule)
        for framework in ("linen", "nnx", "equinox")
        for layer, name, rule in (
            ("softmax", "low-exp", "*/plant: full"),
            ("long_sum", "low-sum", "*/plant: full"),
            ("mean", "low-sum", "*/plant: full"),
            ("norm", "cast-to-and-fro", "*/plant: c=f32,o=f32"),
            ("attention", "low-exp", f"{IN_CODE} exp"),
            ("positions", "promotion", "cast it where it is made, with .astype(x.dtype)"),
        )
    },
    "autocast-scan": ("promotion", "op.scan: bf16"),
    "gradient-softmax": ("low-exp", "*/plant: full"),
    "gradient-norm": ("cast-to-and-fro", "*/plant: c=f32,o=f32"),
}


def audited(make, policy):
    loss, args = make(policy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *args, **kwargs: None)
        return jmpx.inspect.audit(loss)(*args)


def half(report):
    dtypes = {f"{a} x {b}" for a in ("bfloat16", "float16") for b in ("bfloat16", "float16")}
    return sum(each.flops for each in report.products if each.dtypes in dtypes)


def rank(finding):
    return SEVERITIES.index(finding.severity)


def key(finding):
    return finding.name, finding.place, finding.scope


@pytest.mark.sampled(8)
@pytest.mark.parametrize("program", PROGRAMS)
def test_each_rule_that_is_printed_mends_its_finding(program):
    make, policy = PROGRAMS[program]
    before = audited(make, policy)
    for finding in before.findings:
        if not re.match(r"\S+: ", finding.rule):  # advice in words
            assert ": full" not in finding.rule and "op." not in finding.rule
            continue
        assert finding.rule.partition(":")[0] not in OUTERMOST
        after = audited(make, f"{policy}; {finding.rule}")
        assert key(finding) not in map(key, after.findings)
        new = [each for each in after.findings if key(each) not in map(key, before.findings)]
        assert not [each for each in new if rank(each) < rank(finding)]
        assert half(after) >= half(before) - finding.flops * (finding.name not in LEAKS)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("program", EXPECTED)
def test_the_rule_is_the_most_precise_one(program):
    report = audited(*PROGRAMS[program])
    assert EXPECTED[program] in {(each.name, each.rule) for each in report.findings}


def test_a_rule_for_an_outermost_call_is_no_leak():
    """Without a module around the layers, each is an outermost call, and nothing is rounded."""
    assert not audited(*PROGRAMS["haiku-norm"]).findings


def test_layers_that_are_alike_share_a_rule():
    report = audited(*PROGRAMS["layers-alike"])
    (rule,) = {each.rule for each in report.findings}
    assert len(report.findings) == 3 and rule == "deep/norm_*: c=f32,o=f32"
    assert rule in str(report)


def test_a_program_without_a_policy_map_gets_no_rule():
    def loss(w, x):
        with jax.named_scope("plant"):
            return jnp.sum(softmax(x @ w).astype(F32))

    args = jnp.ones((4, 4)), jnp.ones((2, 4))
    scale = jmpx.NoOpLossScale()
    for fn in (
        lambda *args: loss(*jmpx.cast_tree(args, jnp.bfloat16)),
        jmpx.filter_value_and_grad(loss, scale, policy="c=bf16"),
    ):
        (finding,) = jmpx.inspect.audit(fn)(*args).findings
        assert (finding.name, finding.rule) == ("low-exp", "x.astype(jnp.float32) before exp")


def counted(make, calls):
    def counting(policy):
        loss, args = make(policy)
        return lambda *args: calls.append(1) or loss(*args), args

    return counting


def test_a_rule_is_traced_once(monkeypatch):
    calls, (make, policy) = [], PROGRAMS["layers-alike"]
    audited(counted(make, calls), policy)
    alike = len(calls)
    monkeypatch.setattr(trying, "MOST", 0)
    calls.clear()
    report = audited(counted(make, calls), policy)
    assert alike == len(calls) + 1
    assert {each.rule for each in report.findings} == {
        "read the float32 value, or leave out the cast back; rules for it were not tried, after 0 "
        "others"
    }


def test_a_jitted_step_is_traced_anew_under_the_rule():
    make, policy = PROGRAMS["linen-norm"]

    def jitted(policy):
        loss, args = make(policy)
        return jax.jit(jax.value_and_grad(loss)), args

    (finding,) = audited(jitted, policy).findings
    assert finding.rule == "*/plant: c=f32,o=f32"
    with jax.checking_leaks():
        assert not audited(jitted, f"{policy}; {finding.rule}").findings


def test_a_rule_under_which_a_program_cannot_be_traced_is_not_printed():
    def make(policy):
        def body(x, _):
            return jmpx.autocast(lambda x: jnp.exp(x), policy, output=None)(x), None

        return lambda x: jnp.sum(jax.lax.scan(body, x, length=2)[0].astype(F32)), (
            jnp.ones(4, jnp.bfloat16),
        )

    (finding,) = audited(make, "c=bf16; op.exp: bf16").findings
    assert finding.rule == "no rule fixes it and keeps all 16-bit matmuls: x.astype(jnp.float32) before exp"


def test_the_first_program_of_the_readme():
    """A norm in float32 before a head in float32 returns float32."""

    class Network(hk.Module):
        def __call__(self, x):
            h = hk.LayerNorm(-1, True, True)(jax.nn.relu(hk.Linear(32)(x)))
            return hk.Linear(1, name="head")(h)

    net, x = hk.transform(lambda x: Network()(x)), jnp.ones((64, 3))

    def make(policy):
        def loss(params, x):
            with jmpx.haiku.policies(policy):
                return jnp.mean(net.apply(params, None, x) ** 2)

        return loss, (jax.eval_shape(net.init, jax.random.key(0), x), x)

    policy = f"{HALF}; LayerNorm: full; {HEAD}"
    (finding,) = audited(make, policy).findings
    assert finding.rule == "network/layer_norm: c=f32,o=f32"
    assert not audited(make, f"{policy}; {finding.rule}").findings
