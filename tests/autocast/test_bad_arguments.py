"""Wrong arguments of autocast are refused in one sentence that says what to write."""

import jax.numpy as jnp
import numpy as np
import pytest

import jmpx


@pytest.mark.parametrize(
    "wrong, error, words",
    [
        (lambda: jmpx.autocast("c=f16"), TypeError, "Expected a function .* got 'c=f16'"),  # pyright: ignore[reportArgumentType, reportCallIssue]
        (lambda: jmpx.autocast(jnp.float16), TypeError, "float16'>: write jmpx.autocast.f, policy"),
        (lambda: jmpx.autocast(np.dtype("f2")), TypeError, "'float16'.: write jmpx.autocast.f, po"),  # pyright: ignore[reportArgumentType, reportCallIssue]
        (lambda: jmpx.autocast(jnp.sin, "c=bf61"), ValueError, "did you mean 'bf16'"),
        (lambda: jmpx.autocast(jnp.sin, output="trace"), ValueError, "Unknown dtype 'trace'"),
        (lambda: jmpx.autocast(jnp.sin, "c=f64")(1.0), ValueError, "64-bit types are disabled"),
        (lambda: jmpx.full_precision(3), TypeError, "Expected a function to wrap, got 3"),  # pyright: ignore[reportArgumentType, reportCallIssue]
    ],
)
def test_errors(wrong, error, words):
    with pytest.raises(error, match=words):
        wrong()


@pytest.mark.parametrize("first", ["bf16", "cuda"])
def test_a_string_is_told_what_to_write(first):
    with pytest.raises(TypeError, match=f"got '{first}': write jmpx.autocast") as caught:
        with jmpx.autocast(first):
            pass
    assert str(caught.value).count("\n") == 0
