"""Each rule that an audit prints mends what it is for in the program; models that need none."""

import re
import string

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import BF16, F32, zoo
from helpers.findings_of import found, shape
from helpers.planted_layer import outlined, planted
from llama import Llama
from models import Transformer, ViT

import jmpx
import jmpx.equinox
import jmpx.flax

pytestmark = [pytest.mark.usefixtures("standard_promotion"), pytest.mark.versions]
ROWS = 300
LEAKS = ("float32-product", "mixed-product", "promotion", "saved-float32")
SEVERITIES = ("high", "medium", "low")
OUTERMOST = ("LinenNet", "NNXNet", "EquinoxNet", "HaikuNet", "MLP", "*/haiku_net", "haiku_net")

# Layers that need a rule.


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
FOR_NORM = f"c=f16,o=f32; */plant: full; {HEAD}"


# Each takes a policy, and returns a loss and its arguments.


def in_framework(framework, layer):
    return lambda policy: planted(framework, layer, policy, rows=ROWS)


def under_autocast(layer):
    def loss(w, x):
        with jax.named_scope("first"):
            x = x @ w
        with jax.named_scope("plant"):
            x = layer(x)
        with jax.named_scope("head"):
            return jnp.mean((x @ w).astype(F32))

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
    return jmpx.filter_value_and_grad(loss, jmpx.NoOpLossScale(), policy=policy), args


def of_zoo(framework, body, x, ends=jnp.mean):
    net = outlined(framework, body, x)

    def make(policy):
        run = net.under(policy)
        return lambda *args: ends(jnp.asarray(run(*args))), (net.model, x)

    return make


def tied_head(m, tokens):
    table = m.param("table", 50, 8)
    return m.norm("norm")(m.linear("hidden", 8)(table[tokens])) @ table.T


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
CAST = "cast it where it is made, with .astype(x.dtype)"
ALIKE = of_zoo("haiku", layers_alike, jnp.ones((2, 4)))
FOR_ALIKE = f"{HALF}; LayerNorm: full; */wide_*: full"
# What makes a program, its policy map without a rule that would mend it, and the most precise rule.
PROGRAMS = {
    "linen-norm": (in_framework("linen", norm), FOR_NORM, OUT_OF_NORM),
    "haiku-long_sum": (in_framework("haiku", long_sum), HALF, None),
    "equinox-attention": (in_framework("equinox", attention), HALF, ("low-exp", IN_CODE)),
    "autocast-softmax": (under_autocast(softmax), AUTOCAST, None),
    "nnx-softmax": (in_framework("nnx", softmax), HALF, ("low-exp", "*/plant: full")),
    "autocast-mean": (under_autocast(mean), AUTOCAST, None),
    "autocast-scan": (scan_under_autocast, "c=bf16", ("promotion", "op.scan: bf16")),
    "equinox-long_sum": (in_framework("equinox", long_sum), HALF, ("low-sum", "*/plant: full")),
    "linen-positions": (in_framework("linen", positions), HALF, ("promotion", CAST)),
    "gradient-norm": (in_gradient_function, FOR_NORM, OUT_OF_NORM),
    "autocast-attention": (under_autocast(attention), AUTOCAST, None),
    "nnx-mean": (in_framework("nnx", mean), HALF, ("low-sum", "*/plant: full")),
    "tied-head": (
        of_zoo("linen", tied_head, jnp.zeros((2, 4), jnp.int32), mean_logsumexp),
        f"{HALF}; LayerNorm: c=f32,o=f32",
        None,
    ),
    "two-maps": (two_maps, f"{HALF}; */layers/1: c=bf16,o=f32", None),
    "haiku-positions": (in_framework("haiku", positions), HALF, None),
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


@pytest.mark.sampled(3)
@pytest.mark.parametrize("program", PROGRAMS)
def test_each_rule_that_is_printed_mends_its_finding(program):
    make, policy, most_precise = PROGRAMS[program]
    before = audited(make, policy)
    assert most_precise in {None, *((each.name, each.rule) for each in before.findings)}
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


def test_a_rule_for_an_outermost_call_is_no_leak():
    """Without a module around the layers, each is an outermost call, and nothing is rounded."""
    assert not audited(in_framework("haiku", norm), FOR_NORM).findings


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
    assert left == (
        "x.astype(jnp.float32) before exp; rules for it were not tried, after 12 others"
    )


def test_a_program_without_a_policy_map_gets_no_rule():
    def loss(w, x):
        with jax.named_scope("plant"):
            return jnp.sum(softmax(x @ w).astype(F32))

    scale = jmpx.NoOpLossScale()
    for fn in (
        lambda *args: loss(*jmpx.cast_tree(args, jnp.bfloat16)),
        jmpx.filter_value_and_grad(loss, scale, policy="c=bf16"),
    ):
        (finding,) = found(fn, shape(4, 4), shape(2, 4))
        assert (finding.name, finding.rule) == ("low-exp", "x.astype(jnp.float32) before exp")


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
    assert finding.rule == IN_CODE


# Models without a leak have no finding at all, of any kind.


def shapes(tree, dtype):
    """The shapes of a tree, its floating arrays in a dtype."""
    is_floating = lambda leaf: jnp.issubdtype(leaf.dtype, jnp.floating)  # noqa: E731
    one = lambda leaf: shape(*leaf.shape, dtype=dtype if is_floating(leaf) else leaf.dtype)  # noqa: E731
    return jax.tree.map(one, tree)


def transformer(cls, dtype, **options):
    """A transformer of the benchmarks, its parameters and a batch."""
    sizes = {"layers": 2, "width": 16, "heads": 2, "hidden": 32, "classes": 10}
    model = cls(**sizes, **({"image": 8} if cls is ViT else {}), **options)
    rng = np.random.default_rng(0)
    batch = (2,) if cls is ViT else (2, 5)
    return model.loss, *shapes((model.init(rng), *model.batch(rng, *batch)), dtype)


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
def test_transformers_of_16_bits_have_rounded_logits_alone(cls, dtype, policy):
    is_scanned = dtype == BF16 or "scan" in (policy or "")
    loss, *args = transformer(cls, dtype, scanned=is_scanned, islands=policy is None)
    findings = found(jmpx.autocast(loss, policy) if policy else loss, *args)
    is_low = dtype == BF16 or policy is not None
    assert [each.name for each in findings] == ["rounded-logits"] * is_low


@pytest.mark.thorough
def test_autocast_carries_float32_unless_told():
    loss, *args = transformer(ViT, F32, scanned=True)
    logits, finding = found(jmpx.autocast(loss), *args)
    assert logits.name == "rounded-logits"
    assert (finding.name, finding.severity) == ("promotion", "medium")
    assert finding.place is not None and finding.place.function == "_blocks"
    assert finding.rule.endswith("op.scan: bf16")


def softmax_loss(logits):
    return -jax.nn.log_softmax(logits.astype(F32))[..., 0].mean()


KEPT = "*/head: product=float32"  # logits stay in float32, and products multiply in 16 bits


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "framework, compute",
    [("haiku", "bf16"), ("linen", "f16"), ("nnx", "f16"), ("nnx", "f32"), ("equinox", "bf16")],
)
def test_policy_maps(framework, compute):
    net = outlined(framework, zoo.normed, jnp.ones((2, 5, 8)))
    head = "*/head: full" if compute == "f32" else KEPT
    run = net.under(f"c={compute},o=f32; LayerNorm: full; {head}")
    loss = lambda model, x: softmax_loss(jnp.asarray(run(model, x)))  # noqa: E731
    assert found(loss, net.model, shape(2, 5, 8)) == []


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.gelu(nn.LayerNorm()(nn.Dense(8)(x)))
        x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Dense(8)(x)))
        return nn.Dense(3, name="head")(x + nn.Dense(8)(x))


def test_a_step_in_float16_with_a_loss_scale_and_the_state_of_a_model():
    policy = jmpx.get_policy_map(f"c=f16,o=f32; LayerNorm: full; BatchNorm: full; {KEPT}")
    optimizer, scale = optax.adamw(1e-3), jmpx.DynamicLossScale(jnp.float32(2**15))

    def step(variables, opt_state, scale, x):
        def loss(params):
            with jmpx.flax.policies(policy):
                logits, state = Normed().apply(
                    {**variables, "params": params}, x, mutable=["batch_stats"]
                )
            return softmax_loss(logits), state

        params = variables["params"]
        result = jmpx.filter_value_and_grad(loss, scale, has_aux=True, policy=policy)(params)
        (value, state), scale, finite, grads = result
        params, opt_state = jmpx.optimizer_update(params, optimizer, opt_state, grads, finite)
        return {**state, "params": params}, opt_state, scale, value

    x = shape(2, 5, 8)
    variables = jax.eval_shape(Normed().init, jax.random.key(0), x)
    opt_state = jax.eval_shape(optimizer.init, variables["params"])
    assert found(step, variables, opt_state, scale, x) == []


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


def test_a_decoder_whose_optimizer_multiplies_in_float32():
    """Islands by hand, rotary positions, and products of gradients, as Muon has them."""
    sizes = {"layers": 2, "width": 16, "heads": 4, "groups": 2, "hidden": 32, "classes": 11}
    model = Llama(**sizes, length=5, scanned=False, checkpointed=False, islands=True)

    def step(params, *batch):
        value, grads = jax.value_and_grad(model.loss)(params, *batch)
        wide = jax.tree.map(lambda grad: grad.astype(F32), grads)
        updates = jax.tree.map(lambda grad: grad @ grad.T @ grad if grad.ndim > 1 else grad, wide)
        return jax.tree.map(
            lambda p, u: (p.astype(F32) - u).astype(p.dtype), params, updates
        ), value

    rng = np.random.default_rng(0)
    (finding,) = found(step, *shapes((model.init(rng), *model.batch(rng, 2)), BF16))
    assert finding.name == "rounded-logits"
