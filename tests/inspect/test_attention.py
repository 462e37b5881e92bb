"""An attention that a GPU could fuse is found, if that platform is given; and JAX's error is."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from helpers import normal
from helpers.findings_of import found, line_of
from jax import lax

import jmpx

NAMES = ("unfused-attention",)


def split(w, x):
    return (jnp.reshape(x @ w[i], (*x.shape[:2], 2, -1)) for i in range(3))


def written(w, x):
    q, k, v = split(w, x)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)  # scores
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


def gated(w, x):
    """Experts: two products of a batch, with an exponential between them that nothing sums."""
    h = jnp.einsum("ebd,edf->ebf", jnp.stack([x[0]] * 4), w)
    return jnp.einsum("ebf,efd->ebd", jax.nn.softplus(h), w)


def loss(fn, w, x):
    return jnp.square(fn(w, x).astype(jnp.float32)).sum()


def audited(fn, rng, policy="by=operations,c=bf16", platform="gpu"):
    w, x = normal(rng, 4, 8, 8), normal(rng, 2, 6, 8)
    run = lambda w, x: loss(fn, w, x)  # noqa: E731
    run = jmpx.apply_policy(run, policy) if policy else run
    return found(NAMES, run, w, x, platform=platform)


@pytest.mark.usefixtures("standard_promotion")  # which JAX's own attention needs in float16
@pytest.mark.parametrize("policy", ["by=operations,c=bf16", "by=arguments,c=f16"])
@pytest.mark.parametrize("fn", [written, by_hand, of_jax, scanned])
def test_an_attention_is_found_once_with_the_bytes_of_its_scores(fn, policy, rng):
    (finding,) = audited(fn, rng, policy)
    turns = 3 if fn is scanned else 1
    # JAX's own attention asks for float32 scores of 16-bit operands.
    nbytes = 4 if fn is of_jax and "arguments" in policy else 2
    assert finding.nbytes == turns * 2 * 2 * 6 * 6 * nbytes
    assert finding.severity == "low" and "cudnn" in finding.rule
    if fn is written:
        assert finding.place.line == line_of(__file__, "scores")


@pytest.mark.parametrize(
    ("fn", "policy", "platform"),
    [
        (written, "by=operations,c=bf16", "tpu"),
        (written, "by=operations,c=bf16", None),
        (written, None, "gpu"),
        (gated, "by=operations,c=bf16", "gpu"),
    ],
)
def test_what_is_no_attention_of_16_bits_on_a_gpu_is_not_found(fn, policy, platform, rng):
    assert audited(fn, rng, policy, platform) == []


def test_the_error_of_cudnns_attention_is_followed_by_the_edit(rng):
    w, x = normal(rng, 4, 8, 8), normal(rng, 2, 6, 8)
    # What JAX says where cuDNN is installed.
    refused = NotImplementedError("Q must be fp16/bf16/fp8_e4m3fn/fp8_e5m2, got float32")
    with mock.patch.object(jax.nn, "dot_product_attention", side_effect=refused):
        attend = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
        run = jmpx.autocast(lambda w, x: attend(*split(w, x)))
        with pytest.raises(NotImplementedError) as error:
            run(w, x)
    assert sum("astype(jnp.bfloat16)" in note for note in error.value.__notes__) == 1
