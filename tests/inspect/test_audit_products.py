"""Findings about products: of float32 on hardware, rounded logits of a loss, unfused attention."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import BF16, F16, F32
from helpers.findings_of import found, line_of, shape
from helpers.planted_layer import planted
from jax import lax

import jmpx

pytestmark = pytest.mark.versions

# Float32 products that hardware multiplies in fewer bits: found if a platform is given.

on_platform = functools.partial(found, names=("platform-product",))
HALF = "c=bf16,o=f32"


def doubled(x):
    return x @ (2 * jnp.eye(4, dtype=x.dtype))  # <-


def of_model(framework, policy, platform, layer=doubled):
    loss, args = planted(framework, layer, policy)
    return on_platform(loss, *args, platform=platform)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "framework, platform, inside",
    [
        ("haiku", "tpu", "bfloat16"),
        ("linen", "gpu", "TF32"),
        ("nnx", "gpu", "TF32"),
        ("equinox", "tpu", "bfloat16"),
    ],
)
def test_a_model_in_float32_has_one_finding(framework, platform, inside):
    (finding,) = of_model(framework, "c=f32", platform)
    assert finding.severity == "high" and f"in {inside}" in finding.message
    assert (finding.count, finding.scope) == (3, "")  # three products: first, plant, head
    assert finding.flops == 2 * 2 * 4 * (4 + 4 + 1)
    rule = finding.advice.partition(" ")[0]
    assert not of_model(framework, f"c=f32,{rule}", platform)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("framework", ["haiku", "linen", "equinox"])
def test_a_rule_for_float32_asks_for_what_it_does_not_get(framework):
    policy = f"{HALF}; */plant: c=f32"
    (finding,) = of_model(framework, policy, "tpu")
    assert (finding.severity, finding.rule) == ("high", "*/plant: m=highest")
    assert finding.place.line == line_of(doubled) and finding.flops == 2 * 2 * 4 * 4
    assert not of_model(framework, f"{policy}; {finding.rule}", "tpu")
    # Leaks of a 16-bit model are less severe.
    leak = lambda x: doubled(x.astype(F32)).astype(x.dtype)  # noqa: E731
    (finding,) = of_model(framework, HALF, "tpu", leak)
    assert (finding.severity, finding.scope.endswith("plant")) == ("low", True)
    assert not of_model(framework, HALF, "tpu")


def test_without_such_a_platform_there_is_none():
    for platform in (None, "cpu"):
        assert not of_model("haiku", "c=f32", platform)
    assert not of_model("haiku", f"{HALF}; */plant: c=f32", None)
    assert not of_model("haiku", f"{HALF}; */plant: c=f32,m=highest", "tpu")


def test_a_product_that_says_its_precision_is_none():
    def convolved(precision):
        def loss(w, x):
            out = lax.conv_general_dilated(x, w, (1,), "SAME", precision=precision)
            return jnp.mean(out**2)

        return on_platform(loss, shape(3, 2, 2), shape(1, 2, 5), platform="gpu")

    (finding,) = convolved(None)
    assert finding.flops == 2 * 3 * 2 * (2 * 5 - 1)  # one tap of the last number lies outside
    for precision in ("highest", "float32", "default", lax.Precision.HIGH):
        assert not convolved(precision)
    with jax.default_matmul_precision("highest"):
        assert not convolved(None)
    # Another finding says that dtypes are mixed.
    mixed = lambda w, x: jnp.mean(lax.dot(x, w, preferred_element_type=F32))  # noqa: E731
    assert not on_platform(mixed, shape(4, 4), shape(4, 4, dtype=BF16), platform="tpu")


def test_under_autocast_a_rule_for_a_scope_mends_it():
    def loss(w, x):
        with jax.named_scope("trunk"):
            x = jnp.tanh(x @ w)
        with jax.named_scope("head"):
            return jnp.mean(x @ w)  # <-

    def of_policy(policy):
        return on_platform(jmpx.autocast(loss, policy), shape(4, 4), shape(4, 4), platform="tpu")

    (finding,) = of_policy("c=bf16; */head: c=f32")
    assert (finding.severity, finding.place.line) == ("high", line_of(loss))
    assert finding.rule == "*/head: m=highest"
    assert not of_policy(f"c=bf16; */head: c=f32; {finding.rule}")


# Attention that a GPU could fuse.


def split(w, x):
    return (jnp.reshape(x @ w[i], (*x.shape[:2], 2, -1)) for i in range(3))


def written(w, x):
    q, k, v = split(w, x)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)  # <-
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores / 2), v)


def by_hand(w, x):
    q, k, v = split(w, x)
    exps = jnp.exp(jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32))
    weights = (exps / exps.sum(-1, keepdims=True)).astype(x.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def of_jax(w, x):
    return jax.nn.dot_product_attention(*split(w, x))


def scanned(w, x):
    body = lambda x, w: (x + written(w, x).reshape(x.shape), None)  # noqa: E731
    return lax.scan(body, x, jnp.stack([w] * 3))[0]


def experts(w, x):
    """Two products of a batch, with an exponential between them that nothing sums."""
    h = jnp.einsum("ebd,edf->ebf", jnp.stack([x[0]] * 4), w)
    return jnp.einsum("ebf,efd->ebd", jax.nn.softplus(h), w)


def unfused(fn, policy, platform: str | None = "gpu"):
    loss = lambda w, x: jnp.square(fn(w, x).astype(jnp.float32)).sum()  # noqa: E731
    run = jmpx.apply_policy(loss, policy) if policy else loss
    names = ("unfused-attention",)
    return found(run, shape(4, 8, 8), shape(2, 6, 8), names=names, platform=platform)


OPERATIONS, ARGUMENTS = "by=operations,c=bf16", "by=arguments,c=f16"


@pytest.mark.usefixtures("standard_promotion")  # which JAX's own attention needs in float16
@pytest.mark.parametrize(
    "fn, policy, nbytes",
    [
        (written, OPERATIONS, 2),
        (by_hand, ARGUMENTS, 2),
        (of_jax, OPERATIONS, 2),
        (of_jax, ARGUMENTS, 4),  # it asks for float32 scores of 16-bit operands
        (scanned, OPERATIONS, 3 * 2),
    ],
)
def test_an_attention_is_found_once_with_the_bytes_of_its_scores(fn, policy, nbytes):
    (finding,) = unfused(fn, policy)
    assert finding.nbytes == 2 * 2 * 6 * 6 * nbytes
    assert finding.severity == "low" and "cudnn" in finding.advice
    if fn is written:
        assert finding.place.line == line_of(written)


def test_what_is_no_attention_of_16_bits_on_a_gpu_is_not_found():
    assert not unfused(written, OPERATIONS, "tpu") and not unfused(written, OPERATIONS, None)
    assert not unfused(written, None) and not unfused(experts, OPERATIONS)


# Logits that are rounded before the softmax of a loss.

ABOUT_LOGITS = ("rounded-logits", "low-exp", "mixed-product", "float32-product")
ROWS, WIDTH, CLASSES = 8, 64, 50


def kl(logits, teacher):
    """The divergence of a teacher's probabilities from the model's."""
    log_p, log_q = jax.nn.log_softmax(teacher), jax.nn.log_softmax(logits.astype(F32))
    return jnp.mean(jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1))


def plain(w, x, teacher):
    return kl(x @ w, teacher)  # <-


def masked(w, x, teacher):
    mask = jnp.arange(CLASSES) < CLASSES - 3
    return kl(jnp.where(mask, x @ w, jnp.finfo(x.dtype).min), teacher)  # <-


def in_16_bits(w, x, teacher):
    labels = jnp.argmax(teacher, axis=-1)
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ w, labels)  # <-
    return losses.mean(dtype=F32)


def log_of_softmax(w, x, teacher):
    q = jax.nn.softmax((x @ w).astype(F32))  # <-
    return -jnp.mean(jnp.sum(jax.nn.softmax(teacher) * jnp.log(q + 1e-6), axis=-1))


def rounded_later(w, x, teacher):
    wide = jnp.matmul(x, w, preferred_element_type=F32)  # <-
    return kl(wide.astype(x.dtype), teacher)


def in_chunks(w, x, teacher):
    def chunk(total, pair):
        x, teacher = pair
        return total + kl(x @ w, teacher), None  # <-

    pairs = jax.tree.map(lambda each: each.reshape(2, ROWS // 2, -1), (x, teacher))
    return lax.scan(jax.checkpoint(chunk), F32.type(0), pairs)[0]


def of_images_and_texts(w, x, teacher):
    texts = (x @ w) @ w.T
    return kl(x @ texts.T, teacher[:, :ROWS])  # <-


def pairs(w, x, teacher):
    logits = x @ w * jnp.exp(teacher[0, 0]).astype(x.dtype) - 2  # <-
    signs = jnp.where(teacher > 0, 1, -1).astype(x.dtype)
    return -jnp.mean(jnp.sum(jax.nn.log_sigmoid(signs * logits).astype(F32), -1))


def binary(w, x, teacher):
    labels = (teacher > 0).astype(x.dtype)
    return optax.sigmoid_binary_cross_entropy(x @ w, labels).mean(dtype=F32)  # <-


ROUNDED = [
    *(
        pairs,
        binary,
        plain,
        masked,
        in_16_bits,
        log_of_softmax,
        rounded_later,
        in_chunks,
        of_images_and_texts,
    ),
    lambda w, x, teacher: kl(x @ w + jnp.ones(CLASSES, x.dtype), teacher),
    lambda w, x, teacher: kl(x @ w / 0.7, teacher),
    lambda w, x, teacher: kl(30 * jnp.tanh(x @ w / 30), teacher),
]


def about_logits(losses, dtype):
    total = lambda *args: sum(loss(*args) for loss in losses)  # noqa: E731
    args = shape(WIDTH, CLASSES, dtype=dtype), shape(ROWS, WIDTH, dtype=dtype), shape(ROWS, CLASSES)
    return found(total, *args, names=ABOUT_LOGITS)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_rounded_logits_are_found_once_at_the_product(dtype):
    findings = about_logits(ROUNDED, dtype)
    assert sorted(each.place.line for each in findings) == sorted(map(line_of, ROUNDED))
    assert {each.name for each in findings} == {"rounded-logits"}
    assert all(each.flops > 0 for each in findings)


def product(x, w):
    return jnp.matmul(x, w, preferred_element_type=F32)


def kept_by_algorithm(w, x, teacher):
    names = {"bfloat16": "BF16_BF16_F32", "float16": "F16_F16_F32"}
    algorithm = lax.DotAlgorithmPreset[names[x.dtype.name]]
    return kl(jnp.matmul(x.astype(F32), w.astype(F32), precision=algorithm), teacher)


def attention_by_logsumexp(w, x, teacher):
    scores = (x @ x.T).astype(F32)
    weights = jnp.exp(scores - jax.nn.logsumexp(scores, axis=-1, keepdims=True))
    return kl(product(weights.astype(x.dtype) @ x, w), teacher)


def routed(w, x, teacher):
    gates = jax.nn.softmax((x @ w).astype(F32)).astype(x.dtype)
    best, experts = lax.top_k(gates, 2)
    return jnp.mean(((gates @ w.T) * best.sum() + experts.sum().astype(x.dtype)).astype(F32) ** 2)


def deviation(w, x, teacher):
    mean = std = jax.nn.softplus((x @ w).astype(F32))
    return jnp.mean(jnp.log(std) + ((teacher - mean) / std) ** 2)


KEPT = [
    routed,
    deviation,
    lambda w, x, teacher: jnp.mean((jax.nn.softplus((x @ w).astype(F32)) - teacher) ** 2),
    kept_by_algorithm,
    attention_by_logsumexp,
    lambda w, x, teacher: kl(product(x, w), teacher),
    lambda w, x, teacher: kl(product(x, w) + jnp.ones(CLASSES), teacher),
    lambda w, x, teacher: jnp.sum(product(x, w) * teacher),
    lambda w, x, teacher: jnp.mean((product(x, w) - teacher) ** 2),
    lambda w, x, teacher: jnp.mean(((x @ w).astype(F32) - teacher) ** 2),
    lambda w, x, teacher: kl(
        product(jax.nn.softmax((x @ x.T).astype(F32)).astype(x.dtype) @ x, w), teacher
    ),
]


def scores_of_a_search(w, x, teacher):
    return jax.nn.log_softmax(x @ w) + teacher.astype(x.dtype)  # no loss


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_what_reads_float32_logits_is_not_found(dtype):
    """A product whose float32 result a loss reads is right: no advice says to leave that out."""
    assert not about_logits(KEPT, dtype)
    assert {each.name for each in about_logits([scores_of_a_search], dtype)} <= {"low-exp"}
