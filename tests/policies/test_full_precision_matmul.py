"""`full_precision(matmul=)`, also around `force_full_precision`, outside of autocast."""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from helpers.products import default_precision, products_of
from jax import lax

import jmpx

X3 = "bf16 f32 x3"
WORDS = {
    "highest": "HIGHEST", "HIGHEST": "HIGHEST", " float32 ": "HIGHEST",
    "High": "HIGH", "tensorfloat32": "HIGH", "default": "DEFAULT", "bfloat16": "DEFAULT",
    "BF16_BF16_F32_X3": X3, "bf16_bf16_f32_x3": X3, None: "HIGH",  # what surrounds holds
}  # fmt: skip


def dot(x, w):
    return x @ w


def as_context(f, matmul):
    def inside(*args):
        with jmpx.full_precision(matmul=matmul):
            return f(*args)

    return inside


def as_decorator(f, matmul):
    return jmpx.full_precision(matmul=matmul)(f)


def as_function(f, matmul):
    return jmpx.full_precision(f, matmul=matmul)


def forced(f, matmul):
    return jmpx.full_precision(jmpx.force_full_precision(f), matmul=matmul)


def forced_to_a_dtype(f, matmul):
    return jmpx.full_precision(jmpx.force_full_precision(f, jnp.float32), matmul=matmul)


FORMS = [as_context, as_decorator, as_function, forced, forced_to_a_dtype]
every_form = pytest.mark.parametrize("form", FORMS)


def gradient_ways(f, x, w):
    """Returns the algorithms of the products in a function and after it, forward and backward."""

    def loss(x, w):
        with jax.default_matmul_precision("high"):
            y = f(x, w)
        return (y * (jnp.tanh(x) @ w)).sum()

    return [product.how for product in products_of(jax.value_and_grad(loss, (0, 1)), x, w)]


WRAPS = [lambda f: f, jax.jit, jax.checkpoint]
CASES = list(zip(WORDS, itertools.cycle(FORMS), itertools.cycle(WRAPS), strict=False))


@pytest.mark.parametrize(("matmul", "form", "wrap"), CASES)
def test_products_inside_use_the_algorithm_forward_and_backward(matmul, form, wrap, pair):
    found = gradient_ways(wrap(form(dot, matmul)), *pair)
    # Three each; jax.checkpoint may recompute the first.
    assert found.count("DEFAULT") >= 3 and set(found) == {"DEFAULT", WORDS[matmul]}
    if WORDS[matmul] != "DEFAULT":
        assert found.count(WORDS[matmul]) >= 3 and found.count("DEFAULT") == 3


@every_form
def test_it_ends_with_the_scope(form, pair):
    def fail(x, w):
        raise RuntimeError("on purpose")

    with pytest.raises(ValueError, match="Unknown algorithm ''"):
        form(dot, "")(*pair)
    for matmul in ("highest", "BF16_BF16_F32_X3"):
        with pytest.raises(RuntimeError, match="on purpose"):
            form(fail, matmul)(*pair)
        assert default_precision() is None
        found = products_of(lambda x, w, m=matmul: form(dot, m)(x, w) @ x @ w, *pair)
        found = [product.how for product in found]
        assert found[1:] == ["DEFAULT", "DEFAULT"] != found[:1]


@every_form
def test_only_force_full_precision_casts(form, pair):
    x, w = (v.astype(jnp.bfloat16) for v in pair)
    if form in (forced, forced_to_a_dtype):
        found, expected = products_of(form(dot, "BF16_BF16_F32_X3"), x, w), ("f32", X3)
    else:
        found, expected = products_of(form(dot, "highest"), x, w), ("bf16", "HIGHEST")
    assert [(*p.dtypes, p.how) for p in found] == [expected]


@every_form
def test_the_innermost_one_holds_and_a_precision_of_ones_own(form, pair):
    inner, own = form(dot, "high"), functools.partial(jnp.dot, precision="high")
    with jmpx.full_precision(matmul="highest"):
        found = products_of(lambda x, w: inner(x, w) @ w, *pair)
    assert [product.how for product in found] == ["HIGH", "HIGHEST"]
    assert [product.how for product in products_of(form(own, "highest"), *pair)] == ["HIGH"]
    mixed = jmpx.autocast(lambda x, w: form(dot, "highest")(x, w) + x @ w, "c=bf16")
    found = [(*product.dtypes, product.how) for product in products_of(mixed, *pair)]
    assert sorted(found) == [("bf16", "DEFAULT"), ("f32", "HIGHEST")]


def test_a_scope_may_be_entered_again():
    decorated = jmpx.full_precision(matmul="highest")(dot)
    x = jnp.ones((2, 2))
    for _ in range(2):
        assert [product.how for product in products_of(decorated, x, x)] == ["HIGHEST"]


def test_a_function_of_convolutions():
    x, w = jnp.ones((3, 8)), jnp.ones((4, 3))
    convolve = lambda x, w: lax.conv(x[None], w[..., None], (1,), "SAME")  # noqa: E731
    inside = jmpx.full_precision(convolve, matmul="highest")
    found = products_of(jax.grad(lambda x, w: (inside(x, w) ** 2).sum(), (0, 1)), x, w)
    assert [(p.operation, p.how) for p in found] == [("convolution", "HIGHEST")] * 3
