"""Each rule that an audit prints fixes its finding in the program; models that need none."""

import re
import string
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import BF16, F32, zoo
from helpers.findings_of import found, shape
from helpers.planted_layer import planted
from models import Transformer, ViT

import jmpx
import jmpx.equinox

pytestmark = [pytest.mark.usefixtures("standard_promotion"), pytest.mark.versions]
ROWS = 300
LEAKS = ("float32-product", "mixed-product", "promotion", "saved-float32")
SEVERITIES = ("high", "medium", "low")
OUTERMOST = ("LinenNet", "NNXNet", "EquinoxNet", "HaikuNet", "MLP", "*/haiku_net", "haiku_net")

# Layers that need a rule.


def softmax(x):
    return jax.nn.softmax(x) * x


def norm(x):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)


def positions(x):
    x = x + jnp.asarray(np.sin(np.arange(len(x)))[:, None], F32)
    return x @ x.T @ x  # a layer would cast its inputs


def attention(x):
    return jax.nn.softmax(x @ x.T) @ x


HALF = "c=bf16,o=f32"
HEAD = "*/head: c=f32,o=f32"
FOR_NORM = f"c=f16,o=f32; */plant: full; {HEAD}"


# Each takes a policy, and returns a loss and its arguments.


def in_framework(framework, layer):
    return lambda policy: planted(framework, layer, policy, rows=ROWS)


def under_autocast(layer, ends=jnp.mean):
    def loss(w, x):
        with jax.named_scope("first"):
            x = x @ w
        with jax.named_scope("plant"):
            x = layer(x)
        with jax.named_scope("head"):
            return ends((x @ w).astype(F32))

    return lambda policy: (jmpx.autocast(loss, policy), (shape(4, 4), shape(ROWS, 4)))


def scan_under_autocast(policy):
    def loss(w, x):
        def body(x, _):
            with jax.named_scope("layer"):
                return x + jnp.tanh(x @ w) @ w, None

        return jnp.mean(jax.lax.scan(body, x @ w, length=3)[0])

    return jmpx.autocast(loss, policy), (shape(4, 4), shape(4, 4))


def in_gradient_function(policy):
    loss, args = planted("linen", norm, policy, rows=ROWS)
    return jmpx.value_and_grad(loss, jmpx.NoOpLossScale(), policy=f"by=modules,{policy}"), args


def of_zoo(framework, body, x, ends=jnp.mean):
    net = zoo.outlined(framework, body, x)

    def make(policy):
        run = net.under(policy)
        return lambda *args: ends(jnp.asarray(run(*args))), (net.model, x)

    return make


def tied_head(m, tokens):
    table = m.param("table", 50, 8)
    return m.norm("norm")(m.linear("hidden", 8)(table[tokens])) @ table.T


def head(m, x):
    return m.linear("head", 50)(x)


def mean_logsumexp(x):
    return jnp.mean(jax.nn.logsumexp(x, axis=-1))


def layers_alike(m, x):
    """Each with a norm before a float32 layer."""
    for i in range(3):
        x = m.linear(f"wide_{i}", 4)(m.norm(f"norm_{i}")(m.linear(f"low_{i}", 4)(x)))
    return x


def two_maps(policy):
    """A model of two parts, each a view of its own."""
    parts = [eqx.nn.MLP(4, 4, 8, 1, key=jax.random.key(i)) for i in range(2)]

    def loss(parts, x):
        for part in parts:
            x = jax.vmap(jmpx.equinox.with_policies(part, policy))(x)
        return jnp.mean(x)

    return loss, (parts, shape(2, 4))


AUTOCAST = "c=bf16; */plant/low: bf16; op.exp: bf16; op.reduce_sum: bf16"
OUT_OF_NORM = ("cast-to-and-fro", "*/plant: c=f32,o=f32")
IN_CODE = "no rule that keeps 16-bit matmuls fixes it: x.astype(jnp.float32) before exp"
CAST = "cast it with .astype(jnp.bfloat16) where a bfloat16 array meets it"
KEPT = "*/head: product=float32"  # logits stay in float32, and products multiply in 16 bits
LOGITS = ("rounded-logits", KEPT)
ALIKE = of_zoo("haiku", layers_alike, jnp.ones((2, 4)))
FOR_ALIKE = f"{HALF}; LayerNorm: full; */wide_*: full"
# A function that makes a program, a policy map that lacks a rule, and the most precise rule for it.
PROGRAMS = {
    "autocast-softmax": (under_autocast(softmax), AUTOCAST, None),
    "linen-norm": (in_framework("linen", norm), FOR_NORM, OUT_OF_NORM),
    "autocast-scan": (scan_under_autocast, "c=bf16", ("promotion", "op.scan: bf16")),
    "linen-positions": (in_framework("linen", positions), HALF, ("promotion", CAST)),
    "gradient-norm": (in_gradient_function, FOR_NORM, OUT_OF_NORM),
    "equinox-attention": (in_framework("equinox", attention), HALF, ("low-exp", IN_CODE)),
    "nnx-head": (of_zoo("nnx", head, jnp.ones((2, 4)), mean_logsumexp), "c=f16,o=f32", LOGITS),
    "two-maps": (two_maps, f"{HALF}; */layers/1: c=bf16,o=f32", None),
    "autocast-head": (under_autocast(jnp.tanh, mean_logsumexp), "c=bf16", LOGITS),
    "nnx-softmax": (in_framework("nnx", softmax), HALF, ("low-exp", "*/plant: full")),
    "tied-head": (
        of_zoo("linen", tied_head, jnp.zeros((2, 4), jnp.int32), mean_logsumexp),
        f"{HALF}; LayerNorm: c=f32,o=f32",
        None,
    ),
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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("program", PROGRAMS)
def test_each_rule_that_is_printed_mends_its_finding(program):
    make, policy, most_precise = PROGRAMS[program]
    before = audited(make, policy)
    assert most_precise in {
        None,
        *((each.name, each.rule or each.advice) for each in before.findings),
    }
    for finding in before.findings:
        if not finding.rule:
            assert ": full" not in finding.advice and "op." not in finding.advice
            continue
        assert re.match(r"\S+: ", finding.rule) and finding.advice
        assert finding.rule.partition(":")[0] not in OUTERMOST
        after = audited(make, f"{policy}; {finding.rule}")
        assert key(finding) not in map(key, after.findings)
        new = [each for each in after.findings if key(each) not in map(key, before.findings)]
        assert not [each for each in new if rank(each) < rank(finding)]
        assert half(after) >= half(before) - finding.flops * (finding.name not in LEAKS)


def test_a_rule_for_an_outermost_call_is_no_leak():
    """Without a module around the layers, each is an outermost call, and nothing is rounded."""
    assert not audited(in_framework("haiku", norm), FOR_NORM).findings


def test_a_rule_for_the_whole_model_is_not_printed():
    whole = of_zoo("haiku", lambda m, x: jnp.exp(m.linear("first", 4)(x)), jnp.ones((2, 4)))
    (finding,) = audited(whole, HALF).findings
    advice = "x.astype(jnp.float32) before exp"
    assert (finding.name, finding.rule, finding.advice) == ("low-exp", "", advice)


def test_layers_that_are_alike_share_a_rule_which_is_traced_once():
    calls = []

    def counted(policy):
        loss, args = ALIKE(policy)
        return lambda *args: calls.append(1) or loss(*args), args

    report = audited(counted, FOR_ALIKE)
    (rule,) = {each.rule for each in report.findings}
    assert len(report.findings) == 3 and rule == "haiku_net/norm_*: c=f32,o=f32"
    assert rule in str(report)
    of_rule = len(calls)
    assert not audited(counted, f"{FOR_ALIKE}; {rule}").findings
    assert of_rule == len(calls) - of_rule + 1


def test_rules_behind_the_first_12_are_not_tried():
    def body(m, x):
        x = m.linear("first", 4)(x)
        for name in string.ascii_lowercase[:13]:
            x = m.inner(f"layer_{name}", lambda m, x: jnp.exp(x))(x)
        return x

    report = audited(of_zoo("haiku", body, jnp.ones((2, 4))), HALF)
    *rules, left = (each.rule for each in report.findings)
    assert len({*rules}) == 12 and all(re.match(r"\S+/layer_\w: full", rule) for rule in rules)
    assert left == "" and report.findings[-1].advice == (
        "x.astype(jnp.float32) before exp; rules for it were not tried, after 12 others"
    )


def test_a_program_without_a_policy_map_gets_no_rule():
    def loss(w, x):
        with jax.named_scope("plant"):
            return jnp.sum(softmax(x @ w).astype(F32))

    scale = jmpx.NoOpLossScale()
    fn = jmpx.value_and_grad(loss, scale, policy="by=arguments,c=bf16")
    (finding,) = found(fn, shape(4, 4), shape(2, 4))
    advice = "x.astype(jnp.float32) before exp"
    assert (finding.name, finding.rule, finding.advice) == ("low-exp", "", advice)


@pytest.mark.thorough
def test_a_jitted_step_is_traced_anew_under_the_rule():
    def jitted(policy):
        loss, args = planted("linen", norm, policy, rows=ROWS)
        return jax.jit(jax.value_and_grad(loss)), args

    (finding,) = audited(jitted, FOR_NORM).findings
    assert finding.rule == "*/plant: c=f32,o=f32"
    with jax.checking_leaks():
        assert not audited(jitted, f"{FOR_NORM}; {finding.rule}").findings


def test_a_rule_under_which_a_program_cannot_be_traced_is_not_printed():
    def loss(x):
        run = jmpx.autocast(jnp.exp, "c=bf16; op.exp: bf16", output=None)
        return jnp.sum(jax.lax.scan(lambda x, _: (run(x), None), x, length=2)[0].astype(F32))

    (finding,) = found(loss, shape(4, dtype=BF16))
    advice = "no rule that keeps 16-bit matmuls fixes it: with jmpx.full_precision(): around exp"
    assert (finding.rule, finding.advice) == ("", advice)


# Models without a leak have no finding at all, of any kind.


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "cls, dtype, policy",
    [
        (ViT, BF16, None),  # cast by hand
        (ViT, F32, None),
        (Transformer, BF16, None),
        (Transformer, F32, "c=bf16; op.scan: bf16"),
        (ViT, F32, "c=f16"),
    ],
)
def test_transformers_of_16_bits_have_rounded_logits_alone(cls, dtype, policy, rng):
    is_scanned = dtype == BF16 or "scan" in (policy or "")
    sizes = {"layers": 2, "width": 16, "heads": 2, "hidden": 32, "classes": 10}
    image: dict[str, Any] = {"image": 8} if cls is ViT else {}
    batch = (2,) if cls is ViT else (2, 5)
    model = cls(**sizes, **image, scanned=is_scanned, islands=policy is None)
    args = jmpx.cast_tree((model.init(rng), *model.batch(rng, *batch)), dtype)
    findings = found(jmpx.autocast(model.loss, policy) if policy else model.loss, *args)
    is_low = dtype == BF16 or policy is not None
    assert [each.name for each in findings] == ["rounded-logits"] * is_low


def softmax_loss(logits):
    return -jax.nn.log_softmax(logits.astype(F32))[..., 0].mean()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "framework, compute",
    [
        ("haiku", "bfloat16"),
        ("linen", "float16"),
        ("nnx", "float16"),
        ("nnx", "float32"),
        ("equinox", "bfloat16"),
    ],
)
def test_policy_maps(framework, compute):
    net = zoo.outlined(framework, zoo.normed, jnp.ones((2, 5, 8)))
    rule = "*/head: full" if compute == "float32" else KEPT
    run = net.under(f"c={compute},o=f32; LayerNorm: full; {rule}")
    loss = lambda model, x: softmax_loss(jnp.asarray(run(model, x)))  # noqa: E731
    report = jmpx.inspect.audit(loss)(net.model, shape(2, 5, 8))
    assert report.findings == ()
    assert {each.dtypes for each in report.products} == {f"{compute} x {compute}"}


def test_a_step_in_float16_with_a_loss_scale():
    net, x = zoo.outlined("linen", zoo.normed, jnp.ones((2, 5, 8))), shape(2, 5, 8)
    policy, optimizer = f"c=f16,o=f32; LayerNorm: full; {KEPT}", optax.adamw(1e-3)
    gradient = jmpx.value_and_grad(
        lambda model, x: softmax_loss(jnp.asarray(net.under(policy)(model, x))),
        jmpx.DynamicLossScale(jnp.float32(2**15)),
        policy=policy,
    )

    def step(model, opt_state, x):
        value, scale, finite, grads = gradient(model, x)
        model, opt_state = jmpx.optimizer_update(model, optimizer, opt_state, grads, finite)
        return model, opt_state, scale, value

    assert found(step, net.model, jax.eval_shape(optimizer.init, net.model), x) == []


def test_asked_float32_is_no_finding():
    """A router in float32 by a rule, a product with a precision, and a norm's inner product."""

    def loss(params, x):
        h = x @ params["w"]
        with jmpx.full_precision():
            gates = jax.nn.softmax(h.astype(F32) @ params["router"])
        precise = jnp.matmul(h.astype(F32), params["router"], precision="highest")
        penalty = jnp.vdot(params["router"], params["router"])
        h = h * (gates + precise).astype(h.dtype)
        return jnp.mean((h @ params["w"]).astype(F32) ** 2) + penalty

    params = {"w": shape(8, 8, dtype=BF16), "router": shape(8, 8)}
    assert found(loss, params, shape(2, 5, 8, dtype=BF16)) == []


def test_an_optimizer_multiplies_gradients_in_float32():
    """As in Muon: operations that read a gradient are no part of the model."""

    def step(w, x):
        grad = jax.grad(lambda w: jnp.mean((jnp.tanh(x @ w) @ w).astype(F32) ** 2))(w).astype(F32)
        return (w.astype(F32) - grad @ grad.T @ grad).astype(w.dtype)

    assert found(step, shape(8, 8, dtype=BF16), shape(2, 8, dtype=BF16)) == []
