"""Logits that are rounded before the softmax of a loss: they are found, and the rules mend them."""

from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import BF16, F16, F32
from helpers.findings_of import found, line_of

import jmpx
import jmpx.equinox
import jmpx.flax
import jmpx.haiku

pytestmark = pytest.mark.usefixtures("standard_promotion")

NAMES = ("rounded-logits", "low-exp", "mixed-product", "float32-product")
ALGORITHM = {"bfloat16": "BF16_BF16_F32", "float16": "F16_F16_F32"}
DTYPES = [BF16, F16]
ROWS, WIDTH, CLASSES = 8, 64, 50


def kl(logits, teacher):
    """The divergence of a teacher's probabilities from the model's."""
    log_p, log_q = jax.nn.log_softmax(teacher), jax.nn.log_softmax(logits.astype(F32))
    return jnp.mean(jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1))


def findings(loss, *args):
    return jmpx.inspect.audit(loss)(*args).findings


# Heads in four frameworks and plain JAX, with the same weights: a model, and its loss of the model,
# the inputs, the logits of a teacher and a policy. Half of the inputs keeps all their digits.


class HaikuNet(hk.Module):
    def __call__(self, x):
        return hk.Linear(CLASSES, with_bias=False, name="head")(x / 2)


def haiku(w):
    net = hk.without_apply_rng(hk.transform(lambda x: HaikuNet(name="net")(x)))

    def loss(params, x, teacher, policy):
        with jmpx.haiku.policies(policy):
            return kl(net.apply(params, x), teacher)

    return {"net/head": {"w": w}}, loss


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(CLASSES, use_bias=False, name="head")(x / 2)


def linen(w):
    def loss(params, x, teacher, policy):
        with jmpx.flax.policies(policy):
            return kl(jnp.asarray(LinenNet().apply({"params": params}, x)), teacher)

    return {"head": {"kernel": w}}, loss


class NNXNet(nnx.Module):
    def __init__(self, w):
        self.head = nnx.Linear(WIDTH, CLASSES, use_bias=False, rngs=nnx.Rngs(0))
        self.head.kernel[...] = w

    def __call__(self, x):
        return self.head(x / 2)


def of_nnx(w):
    def loss(net, x, teacher, policy):
        return kl(jmpx.flax.with_policies(net, policy)(x), teacher)

    return NNXNet(w), loss


class EquinoxNet(eqx.Module):
    head: eqx.nn.Linear

    def __call__(self, x):
        return jax.vmap(self.head)(x / 2)


def equinox(w):
    head = eqx.nn.Linear(WIDTH, CLASSES, use_bias=False, key=jax.random.key(0))

    def loss(net, x, teacher, policy):
        return kl(jmpx.equinox.with_policies(net, policy)(x), teacher)

    return EquinoxNet(eqx.tree_at(lambda head: head.weight, head, w.T)), loss


def autocast(w):
    def loss(w, x, teacher, policy):
        def inside(w, x):
            with jax.named_scope("head"):
                logits = x / 2 @ w
            return kl(logits, teacher)

        return jmpx.autocast(inside, policy)(w, x)

    return w, loss


ROADS = {each.__name__: each for each in (haiku, linen, of_nnx, equinox, autocast)}


def near_teacher(rng, dtype):
    """Weights, inputs and the logits of a close teacher; what a 16-bit dtype holds."""
    x = 2 * rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
    w = rng.normal(size=(WIDTH, CLASSES)).astype(np.float32)
    w, x = (jnp.asarray(each, dtype).astype(F32) for each in (w, x))
    return w, x, x / 2 @ w + 0.02 * rng.normal(size=(ROWS, CLASSES)).astype(np.float32)


def error(grads, exact):
    """The largest relative error of the gradients in the weights and in the inputs."""
    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(exact), strict=True)
    return max(float(jnp.linalg.norm(a.astype(F32) - b) / jnp.linalg.norm(b)) for a, b in pairs)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("road", ROADS)
def test_the_rule_mends_the_gradient_of_a_close_teacher(road, dtype, rng):
    """The gradient is a difference of probabilities; both factors of its products are exact."""
    w, x, teacher = near_teacher(rng, dtype)
    made: tuple[Any, Any] = ROADS[road](w)
    model, loss = made
    policy = f"c={dtype.name},o=f32"
    (finding,) = findings(loss, model, x, teacher, policy)
    assert (finding.name, finding.severity) == ("rounded-logits", "high")
    rule = "head: product=float32"
    assert finding.rule.endswith(rule)
    mended = f"{policy}; */{rule}"
    report = jmpx.inspect.audit(loss)(model, x, teacher, mended)
    assert report.findings == ()
    assert {each.dtypes for each in report.products} == {f"{dtype.name} x {dtype.name}"}

    def gradients(policy):
        """As they are written: a CPU does not round operands, and has no product of float16."""
        run = lambda both: loss(*both, teacher, policy)  # noqa: E731
        return jax.jit(jmpx.inspect.emulate(jax.grad(run, allow_int=True)))((model, x))

    exact, unit = gradients("full"), float(jnp.finfo(dtype).eps)
    assert error(gradients(policy), exact) > 40 * unit
    assert error(gradients(mended), exact) < unit / 2


def plain(w, x, teacher):
    return kl(x @ w, teacher)  # rounded


def cast(w, x, teacher):
    return kl((x @ w).astype(F32), teacher)  # rounded, then cast


def with_bias(w, x, teacher):
    return kl(x @ w + jnp.ones(CLASSES, x.dtype), teacher)  # rounded, biased


def scaled(w, x, teacher):
    return kl(x @ w / 0.7, teacher)  # rounded, scaled


def capped(w, x, teacher):
    return kl(30 * jnp.tanh(x @ w / 30), teacher)  # rounded, capped


def masked(w, x, teacher):
    mask = jnp.arange(CLASSES) < CLASSES - 3
    return kl(jnp.where(mask, x @ w, jnp.finfo(x.dtype).min), teacher)  # rounded, masked


def in_16_bits(w, x, teacher):
    labels = jnp.argmax(teacher, axis=-1)
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ w, labels)  # rounded, throughout
    return losses.mean(dtype=F32)


def log_of_softmax(w, x, teacher):
    q = jax.nn.softmax((x @ w).astype(F32))  # rounded, log of softmax
    return -jnp.mean(jnp.sum(jax.nn.softmax(teacher) * jnp.log(q + 1e-6), axis=-1))


def rounded_later(w, x, teacher):
    wide = jnp.matmul(x, w, preferred_element_type=F32)  # rounded, later
    return kl(wide.astype(x.dtype), teacher)


def in_chunks(w, x, teacher):
    def chunk(total, pair):
        x, teacher = pair
        return total + kl(x @ w, teacher), None  # rounded, in chunks

    pairs = jax.tree.map(lambda each: each.reshape(2, ROWS // 2, -1), (x, teacher))
    return jax.lax.scan(jax.checkpoint(chunk), F32.type(0), pairs)[0]


def of_images_and_texts(w, x, teacher):
    texts = (x @ w) @ w.T
    return kl(x @ texts.T, teacher[:, :ROWS])  # rounded, contrastive


ROUNDED = {
    plain: "rounded",
    cast: "rounded, then cast",
    with_bias: "rounded, biased",
    scaled: "rounded, scaled",
    capped: "rounded, capped",
    masked: "rounded, masked",
    in_16_bits: "rounded, throughout",
    log_of_softmax: "rounded, log of softmax",
    rounded_later: "rounded, later",
    in_chunks: "rounded, in chunks",
    of_images_and_texts: "rounded, contrastive",
}


def shapes(dtype):
    sizes = ((WIDTH, CLASSES), dtype), ((ROWS, WIDTH), dtype), ((ROWS, CLASSES), F32)
    return [jax.ShapeDtypeStruct(*each) for each in sizes]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss", ROUNDED, ids=lambda loss: loss.__name__)
def test_it_is_found_once_at_the_product(loss, dtype):
    (finding,) = found(NAMES, loss, *shapes(dtype))
    assert (finding.name, finding.place.line) == (
        "rounded-logits",
        line_of(__file__, ROUNDED[loss]),
    )
    assert finding.flops > 0


def kept(w, x, teacher):
    return kl(jnp.matmul(x, w, preferred_element_type=F32), teacher)


def kept_with_bias(w, x, teacher):
    return kl(jnp.matmul(x, w, preferred_element_type=F32) + jnp.ones(CLASSES), teacher)


def kept_by_algorithm(w, x, teacher):
    algorithm = jax.lax.DotAlgorithmPreset[ALGORITHM[x.dtype.name]]
    return kl(jnp.matmul(x.astype(F32), w.astype(F32), precision=algorithm), teacher)


def kept_and_summed(w, x, teacher):
    return jnp.sum(jnp.matmul(x, w, preferred_element_type=F32) * teacher)


def kept_in_squares(w, x, teacher):
    return jnp.mean((jnp.einsum("bi,ij->bj", x, w, preferred_element_type=F32) - teacher) ** 2)


def attention(w, x, teacher):
    weights = jax.nn.softmax((x @ x.T).astype(F32)).astype(x.dtype)
    logits = jnp.matmul(weights @ x, w, preferred_element_type=F32)
    return kl(logits, teacher)


def attention_by_logsumexp(w, x, teacher):
    scores = (x @ x.T).astype(F32)
    weights = jnp.exp(scores - jax.nn.logsumexp(scores, axis=-1, keepdims=True))
    return kl(jnp.matmul(weights.astype(x.dtype) @ x, w, preferred_element_type=F32), teacher)


def regression(w, x, teacher):
    return jnp.mean(((x @ w).astype(F32) - teacher) ** 2)


def scores_of_a_search(w, x, teacher):
    return jax.nn.log_softmax(x @ w) + teacher.astype(x.dtype)  # no loss


def routed(w, x, teacher):
    gates = jax.nn.softmax((x @ w).astype(F32)).astype(x.dtype)
    best, experts = jax.lax.top_k(gates, 2)
    return jnp.mean(((gates @ w.T) * best.sum() + experts.sum().astype(x.dtype)).astype(F32) ** 2)


KEPT = (
    scores_of_a_search,
    routed,
    kept,
    kept_with_bias,
    kept_by_algorithm,
    kept_and_summed,
    kept_in_squares,
    attention,
    attention_by_logsumexp,
    regression,
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss", KEPT, ids=lambda loss: loss.__name__)
def test_what_reads_float32_logits_is_not_found(loss, dtype):
    """A product whose float32 result a loss reads is right: nothing tells to leave it out."""
    names = [each.name for each in found(NAMES, loss, *shapes(dtype))]
    assert set(names) <= ({"low-exp"} if loss is scores_of_a_search else set())


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_preferred_dtype_mends_plain_code(dtype, rng):
    w, x, teacher = near_teacher(rng, dtype)

    def gradients(loss, dtype):
        return jax.grad(lambda both: loss(*both, teacher))((w.astype(dtype), x.astype(dtype) / 2))

    exact = gradients(kept, F32)
    assert error(gradients(plain, dtype), exact) > {"bfloat16": 0.2, "float16": 0.02}[dtype.name]
    assert error(gradients(kept, dtype), exact) < float(jnp.finfo(dtype).eps)
    if dtype == BF16:
        assert error(gradients(kept_by_algorithm, dtype), exact) < float(jnp.finfo(dtype).eps)
