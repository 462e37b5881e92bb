"""Advice is tried: what raises the error is not proposed; outer products are no leaks."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from helpers import BF16, F32
from helpers.findings_of import found

import jmpx

pytestmark = [pytest.mark.usefixtures("standard_promotion"), pytest.mark.versions]
WIDTH, ROWS = 16, 24


# --- Outer products, which sum nothing ---


def angles(x, w):
    place = jnp.einsum("i,j->ij", jnp.arange(len(x), dtype=F32), jnp.exp(w[0]))
    return x + jnp.sin(place).astype(x.dtype)


def decays(x, w):
    step = jax.nn.softplus(x.astype(F32))
    decay = jnp.exp(-jnp.einsum("ld,dn->ldn", step, jnp.exp(w)))
    return jnp.sum(decay, axis=-1).astype(x.dtype)


def one_feature(x, w):
    time = jnp.exp(x[:, :1].astype(F32)) @ jnp.exp(w[:1])
    return x + jnp.cos(time).astype(x.dtype)


class Net(nn.Module):
    plant: object
    dtype: object = None

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.normal(0.1), (WIDTH, WIDTH))
        x = nn.Dense(WIDTH, dtype=self.dtype)(x)
        x = nn.Dense(WIDTH, dtype=self.dtype)(self.plant(x, w.astype(F32)))
        return jnp.mean(x.astype(F32) ** 2)


@pytest.mark.parametrize("policy", ["", "c=bf16", "by=modules,c=bf16", "by=arguments,c=bf16"])
@pytest.mark.parametrize("plant", [angles, decays, one_feature])
def test_an_outer_product_in_float32_is_no_leak(plant, policy):
    model = Net(plant, None if policy else BF16)
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), F32)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    loss = jmpx.apply_policy(model.apply, policy) if policy else model.apply
    products = jmpx.inspect.audit(loss)(params, x).products
    assert any(each.dtypes == "float32 x float32" for each in products)
    assert not found(loss, params, x, names=("float32-product", "mixed-product"))
