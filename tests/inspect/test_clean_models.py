"""Models without a leak have no finding at all, of any kind."""

import functools

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from models import Transformer, ViT

import jmpx
import jmpx.equinox
import jmpx.flax
import jmpx.haiku
from examples.equinox.vit import VisionTransformer

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
SIZES = {"layers": 2, "width": 16, "heads": 2, "hidden": 32, "classes": 10}
ISLANDS = "LayerNorm: full; BatchNorm: full"
X = jax.ShapeDtypeStruct((2, 5, 8), F32)


def findings(fn, *args):
    return jmpx.inspect.audit(fn)(*args).findings


def shapes(tree, dtype):
    """The shapes of a tree, its floating arrays in a dtype."""

    def one(leaf):
        is_floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        return jax.ShapeDtypeStruct(leaf.shape, dtype if is_floating else leaf.dtype)

    return jax.tree.map(one, tree)


def transformer(cls, dtype, **options):
    """A transformer of the benchmarks, its parameters and a batch."""
    sizes = SIZES | ({"image": 8} if cls is ViT else {})
    model = cls(**sizes, **options)
    rng = np.random.default_rng(0)
    batch = (2,) if cls is ViT else (2, 5)
    return model.loss, *shapes((model.init(rng), *model.batch(rng, *batch)), dtype)


# Keeps the logits in float32, whose products multiply in 16 bits.
HEADS = {
    "bf16": "*/head: product=float32",
    "f16": "*/head: product=float32",
    "f32": "*/head: full",
}


def names(found):
    return [finding.name for finding in found]


def softmax_loss(logits):
    return -jax.nn.log_softmax(logits.astype(F32))[..., 0].mean()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("cls", "scanned", "dtype"),
    [(ViT, False, F32), (ViT, False, BF16), (ViT, True, BF16), (Transformer, True, BF16)],
)
def test_cast_by_hand(cls, scanned, dtype):
    found = findings(*transformer(cls, dtype, scanned=scanned, islands=True))
    assert names(found) == ["rounded-logits"] * (dtype == BF16)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("cls", "policy"),
    [(ViT, "c=bf16"), (Transformer, "c=f16"), (Transformer, "c=bf16; op.scan: bf16")],
)
def test_autocast(cls, policy):
    loss, *args = transformer(cls, F32, scanned="scan" in policy, islands=False)
    found = findings(jmpx.autocast(loss, policy=policy), *args)
    assert names(found) == ["rounded-logits"]


def test_autocast_carries_float32_unless_told():
    loss, *args = transformer(ViT, F32, scanned=True)
    logits, finding = findings(jmpx.autocast(loss), *args)
    assert logits.name == "rounded-logits"
    assert (finding.name, finding.severity) == ("promotion", "medium")
    assert finding.place is not None and finding.place.function == "_blocks"
    assert finding.rule.endswith("op.scan: bf16")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "policy_map",
    [
        "c=bf16,o=f32; LayerNorm: full; Softmax: full; */head: c=f32,o=f32",  # the example's own
        f"c=bf16,o=f32; LayerNorm: full; Softmax: full; {HEADS['bf16']}",
        f"c=f16,o=f32; LayerNorm: full; Softmax: full; {HEADS['f16']}",
    ],
)
def test_equinox_example(policy_map):
    model = VisionTransformer(
        (4, 4, 1), 3, patch=2, width=8, depth=2, heads=2, key=jax.random.key(0)
    )

    def loss(model, images):
        view = jmpx.equinox.with_policies(model, policy_map)
        return softmax_loss(jax.vmap(view)(images))

    assert findings(loss, model, jax.ShapeDtypeStruct((2, 4, 4, 1), F32)) == ()


class HaikuNet(hk.Module):
    def __call__(self, x):
        x = jax.nn.gelu(hk.LayerNorm(-1, True, True)(hk.Linear(8)(x)))
        x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(hk.Linear(8)(x), is_training=True))
        return hk.Linear(3, name="head")(x + hk.Linear(8)(x))


def haiku():
    network = hk.without_apply_rng(hk.transform_with_state(lambda x: HaikuNet(name="net")(x)))
    params, state = jax.eval_shape(network.init, jax.random.key(0), X)

    def loss(params, state, x, policy_map):
        with jmpx.haiku.policies(policy_map):
            logits, state = network.apply(params, state, x)
        return softmax_loss(logits), state

    return loss, params, state


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.gelu(nn.LayerNorm()(nn.Dense(8)(x)))
        x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Dense(8)(x)))
        return nn.Dense(3, name="head")(x + nn.Dense(8)(x))


def linen():
    network = LinenNet()
    variables = jax.eval_shape(network.init, jax.random.key(0), X)

    def loss(params, state, x, policy_map):
        with jmpx.flax.policies(policy_map):
            logits, state = network.apply(
                {"params": params, "batch_stats": state}, x, mutable=["batch_stats"]
            )
        return softmax_loss(logits), state

    return loss, variables["params"], variables["batch_stats"]


class NNXNet(nnx.Module):
    def __init__(self, rngs):
        linear = functools.partial(nnx.Linear, rngs=rngs)
        self.first, self.norm = linear(8, 8), nnx.LayerNorm(8, rngs=rngs)
        self.second, self.batch_norm = linear(8, 8), nnx.BatchNorm(8, rngs=rngs)
        self.third, self.head = linear(8, 8), linear(8, 3)

    def __call__(self, x):
        x = nnx.gelu(self.norm(self.first(x)))
        x = nnx.relu(self.batch_norm(self.second(x)))
        return self.head(x + self.third(x))


def of_nnx():
    def loss(model, state, x, policy_map):
        return softmax_loss(jmpx.flax.with_policies(model, policy_map)(x))

    return loss, NNXNet(nnx.Rngs(0)), None


FRAMEWORKS = {"haiku": haiku, "linen": linen, "nnx": of_nnx}


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("compute", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_policy_maps(framework, compute):
    loss, params, state = FRAMEWORKS[framework]()
    policy_map = f"c={compute},o=f32; {ISLANDS}; {HEADS[compute]}"
    assert findings(lambda *args: loss(*args, policy_map), params, state, X) == ()


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("framework", ["haiku", "linen"])
def test_step_in_float16_with_a_loss_scale(framework):
    loss, params, state = FRAMEWORKS[framework]()
    policy_map = jmpx.get_policy_map(f"c=f16,o=f32; {ISLANDS}; {HEADS['f16']}")
    optimizer = optax.adamw(1e-3)
    scale = jmpx.DynamicLossScale(jnp.float32(2**15))

    def step(params, state, opt_state, scale, x):
        def scaled(params):
            return loss(params, state, x, policy_map)

        (value, state), scale, finite, grads = jmpx.filter_value_and_grad(
            scaled, scale, has_aux=True, policy=policy_map
        )(params)
        params, opt_state = jmpx.optimizer_update(params, optimizer, opt_state, grads, finite)
        return params, state, opt_state, scale, value

    opt_state = jax.eval_shape(optimizer.init, params)
    assert findings(step, params, state, opt_state, scale, X) == ()


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

    square = jax.ShapeDtypeStruct((8, 8), BF16)
    params = {"w": square, "router": jax.ShapeDtypeStruct((8, 8), F32)}
    assert findings(loss, params, shapes(X, BF16)) == ()


def rms_norm(x, scale):
    wide = x.astype(F32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
    return (wide * scale).astype(x.dtype)


def rotated(x):
    angles = jnp.arange(x.shape[1]).astype(F32)[:, None] / 100 ** jnp.linspace(
        0, 1, x.shape[-1] // 2
    )
    left, right = (part.astype(F32) for part in jnp.split(x, 2, axis=-1))
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    both = [left * cos - right * sin, left * sin + right * cos]
    return jnp.concatenate(both, axis=-1).astype(x.dtype)


def decoder_block(params, x):
    h = rms_norm(x, params["scale"])
    q, k, v = rotated(h @ params["q"]), rotated(h @ params["k"]), h @ params["v"]
    distances = jnp.abs(jnp.arange(5)[:, None] - jnp.arange(5)).astype(F32)
    scores = (q @ k.swapaxes(1, 2)).astype(F32) * x.shape[-1] ** -0.5 - distances
    x = x + jax.nn.softmax(jnp.where(jnp.tri(5, dtype=bool), scores, -1e9)).astype(x.dtype) @ v
    h = rms_norm(x, params["scale"])
    return x + (jax.nn.silu(h @ params["q"]) * (h @ params["k"])) @ params["v"]


def decoder_loss(params, x):
    for _ in range(2):
        x = decoder_block(params, x)
    return softmax_loss(jnp.matmul(x, params["q"], preferred_element_type=F32))


def test_decoder_whose_optimizer_multiplies_in_float32():
    """Islands by hand, rotary positions, and products of gradients, as Muon has them."""

    def step(params, x):
        loss, grads = jax.value_and_grad(decoder_loss)(params, x)
        wide = jax.tree.map(lambda grad: grad.astype(F32), grads)
        updates = jax.tree.map(lambda grad: grad @ grad.T @ grad if grad.ndim > 1 else grad, wide)
        return jax.tree.map(lambda p, u: (p.astype(F32) - u).astype(p.dtype), params, updates), loss

    params = {name: jax.ShapeDtypeStruct((8, 8), BF16) for name in "qkv"}
    params["scale"] = jax.ShapeDtypeStruct((8,), F32)
    assert findings(step, params, shapes(X, BF16)) == ()
