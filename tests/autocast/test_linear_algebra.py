"""Factorizations, solvers and Fourier transforms run in float32."""

import jax
import jax.numpy as jnp
import pytest
from helpers import F32
from helpers.autocast import assert_near, both, dtypes_of, values
from jax import lax

import jmpx


def spd(h):
    """A positive matrix of a product."""
    return jnp.tanh(h) @ jnp.tanh(h).T + 4 * jnp.eye(4, dtype=F32)


def cube_root(h):
    y = 1 + h**2

    def newton(f, z):
        return lax.fori_loop(0, 20, lambda i, z: z - f(z) / (3 * z**2), z)

    return lax.custom_root(lambda z: z**3 - y, y, newton, lambda g, y: y / g(jnp.ones_like(y)))


def linear_solve(h):
    a = spd(h)
    return lax.custom_linear_solve(
        lambda v: a @ v, h[0], lambda _, b: jnp.linalg.solve(a, b), symmetric=True
    )


LINALG = {
    "inv": lambda h: jnp.linalg.inv(spd(h)),
    "slogdet": lambda h: jnp.linalg.slogdet(spd(h))[1],
    "cholesky": lambda h: jnp.linalg.cholesky(spd(h)),
    "eigvalsh": lambda h: jnp.linalg.eigvalsh(spd(h)),
    "svdvals": lambda h: jnp.linalg.svdvals(spd(h)),
    "qr": lambda h: jnp.abs(jnp.linalg.qr(spd(h)).R),
    "norm": lambda h: jnp.linalg.norm(h, axis=1),
    "fft": lambda h: jnp.abs(jnp.fft.rfft(h)) + jnp.fft.irfft(jnp.fft.rfft(h))[:, :3],
    "custom_root": cube_root,
    "custom_linear_solve": linear_solve,
    "conjugate gradients": lambda h: jax.scipy.sparse.linalg.cg(spd(h), h[0], maxiter=9)[0],
}
FACTORIZATIONS = "cholesky eigh fft geqrf householder_product lu qr svd triangular_solve".split()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", LINALG)
def test_linear_algebra_runs_in_float32(pair, name):
    def fn(x, w):
        return LINALG[name](x @ w)

    cast = jmpx.autocast(fn)
    assert_near(*values(pair, cast, fn))
    found = dtypes_of(cast, *pair)
    assert "bfloat16" in found["dot_general"]
    in_float32 = [found[name] for name in FACTORIZATIONS if name in found]
    assert in_float32 or name in ("norm", "custom_root", "conjugate gradients")
    assert all(dtypes <= {"float32", "complex64"} for dtypes in in_float32)


@pytest.mark.parametrize("name", ["custom_root", "custom_linear_solve"])
def test_gradients_of_linear_algebra(pair, name):
    def f(x, w):
        return (LINALG[name](x @ w) ** 2).sum()

    cast = both(jmpx.autocast(f))
    assert_near(*values(pair, cast, both(f)))
    assert "bfloat16" in dtypes_of(cast, *pair)["dot_general"]
