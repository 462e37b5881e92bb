"""float16: what is finite in float32 stays finite."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BF16, F16, F32, normal
from helpers.autocast import LEAST, activation, assert_near, assert_ran, dtypes_of, together, values
from jax import lax

import jmpx

MASKS = {
    "where": lambda keep: lambda s: jnp.where(keep, s, -1e9),
    "where of the least": lambda keep: lambda s: jnp.where(keep, s, LEAST),
    "added": lambda keep: lambda s: s + (1 - keep.astype(F32)) * -1e9,
    "added least": lambda keep: lambda s: s + jnp.where(keep, 0.0, LEAST),
    "added twice": lambda keep: (
        lambda s: s + jnp.where(keep, 0.0, -1e9) + jnp.where(jnp.arange(4) < 3, 0, -1e9)
    ),
    "multiplied": lambda keep: lambda s: s * keep.astype(F32) - 1e9 * (1 - keep.astype(F32)),
    "in jit": lambda keep: lambda s: jax.jit(lambda s, keep: jnp.where(keep, s, -1e9))(s, keep),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", [*MASKS, "input", "least input", "in scan"])
def test_rows_that_are_masked_as_a_whole(rng, name):
    keep = jnp.tril(jnp.ones((4, 4), bool), -1)  # no key for the first row
    bias = jnp.where(keep, 0, LEAST if name == "least input" else jnp.float32(-1e9))

    def f(q, k, bias):
        mask = MASKS[name](keep) if name in MASKS else lambda s: s + bias
        if name == "in scan":
            logits = lax.scan(lambda c, b: (c, c + b), q @ k, bias[None])[1][0]
        else:
            logits = mask(q @ k)
        weights = jax.nn.softmax(logits)
        return (weights**2).sum(), weights

    policies = ("compute=f16", "compute=bf16") if "least" in name else ("compute=f16",)
    casts = [jmpx.autocast(f, policy) for policy in policies]
    args = normal(rng, 4, 4) / 2, normal(rng, 4, 4) / 2, bias
    gradients = [jax.grad(g, (0, 1), has_aux=True) for g in (*casts, f)]
    *results, reference = values(args, *gradients)
    for cast, result, low in zip(casts, results, ("float16", "bfloat16"), strict=False):
        assert_near(result, reference)
        assert_ran(cast, *args, dot_general=low, exp="float32")


def rms_norm(h, mean_of_squares):
    return h * lax.rsqrt(mean_of_squares(h) + 1e-6)


NORMS = {
    "power": lambda h: rms_norm(h, lambda h: jnp.mean(h**2, -1, keepdims=True)),
    "square": lambda h: rms_norm(h, lambda h: jnp.mean(jnp.square(h), -1, keepdims=True)),
    "product": lambda h: rms_norm(h, lambda h: jnp.mean(h * h, -1, keepdims=True)),
    "var": lambda h: (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-6),
    "norm": lambda h: h / (jnp.linalg.norm(h, axis=-1, keepdims=True) + 1e-12),
    "cast": lambda h: rms_norm(h, lambda h: jnp.mean(h.astype(F32) ** 2, -1, keepdims=True)),
    "squares of differences": lambda h: rms_norm(
        h - h.mean(-1, keepdims=True), lambda d: (d * d).mean(-1, keepdims=True)
    ),
    "softmax": lambda h: jax.nn.softmax(h / 300),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NORMS)
def test_squares_beyond_float16(rng, name):
    x, w = normal(rng, 4, 4) * 300, normal(rng, 4, 4)

    def f(x, w):
        out = NORMS[name](x @ w)
        return (out**2 * jnp.arange(out.size, dtype=F32).reshape(out.shape)).sum(), out

    assert np.abs(np.asarray(x) @ np.asarray(w)).max() ** 2 > 65504
    cast = jmpx.autocast(f, "compute=f16")
    gradients = [jax.grad(g, (0, 1), has_aux=True) for g in (cast, f)]
    assert_near(*values((x, w), *gradients))
    assert_ran(cast, x, w, dot_general="float16")


FREQUENCIES = np.float32(1e4) ** -np.linspace(0, 0.9, 4, dtype=np.float32)
POSITIONS = {
    "arange": lambda n: jnp.arange(70_000 - n, 70_000)[:, None].astype(F32) * FREQUENCIES,
    "float arange": lambda n: jnp.arange(4096.0, 4096 + n, dtype=F32)[:, None] * FREQUENCIES,
    "iota": lambda n: (lax.iota(F32, n) + 70_000)[:, None] * FREQUENCIES,
    "einsum": lambda n: jnp.einsum("i,j->ij", jnp.arange(n).astype(F32) + 4096, FREQUENCIES),
    "outer": lambda n: jnp.outer(jnp.arange(n).astype(F32) + 4096, FREQUENCIES),  # pyright: ignore[reportArgumentType]
    "product of one": lambda n: (jnp.arange(n).astype(F32) + 4096)[:, None] @ FREQUENCIES[None],
    "batch": lambda n: jnp.einsum(
        "bi,j->bij", (jnp.arange(n).astype(F32) + 4096)[None], FREQUENCIES
    )[0],
    "frequencies made inside": lambda n: (
        (jnp.arange(n).astype(F32) + 4096)[:, None] / 1e4 ** (jnp.arange(4).astype(F32) / 4)
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", POSITIONS)
def test_positions_keep_their_digits(pair, name):
    def rotated(x, w):
        q = x @ w
        angles = POSITIONS[name](4)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        return q * cos + jnp.roll(q, 2, -1) * sin, q + sin

    cast = jmpx.autocast(rotated, "compute=f16")
    assert_near(*values(pair, cast, rotated))
    assert_ran(cast, *pair, cos="float32", sin="float32")
    assert "float16" in dtypes_of(cast, *pair)["dot_general"]


# Constants that float16 cannot hold saturate where they are added or put in place.


def carried(loop):
    """Computes a running maximum in a loop that starts at a large negative number."""

    def f(h, big):
        start = jnp.full(h.shape[1:], big)
        largest = loop(lambda c, row: jnp.maximum(c, jnp.where(row > 100, row, big)), start, h)
        return h.at[0].set(largest)

    return f


def by_scan(step, start, rows):
    return lax.scan(lambda c, row: (step(c, row), None), start, rows)[0]


def by_while(step, start, rows):
    return lax.while_loop(
        lambda s: s[0] < len(rows),
        lambda s: (s[0] + 1, step(s[1], rows[s[0]])),
        (0, start),
    )[1]


OUT = np.array([9, 1, 2])  # beyond the rows that there are
# Functions of an activation with three rows and a large negative number, which fills the first row.
ROADS = {
    "add": lambda h, big: h + jnp.array([[1.0], [0], [0]], F32) * big,
    "add on the left": lambda h, big: jnp.where(np.arange(3)[:, None] == 0, big, 0.0) + h,
    "sub": lambda h, big: h - jnp.where(np.arange(3)[:, None] == 0, -big, 0.0),
    "where": lambda h, big: jnp.where(np.arange(3)[:, None] == 0, big, h),
    "select": lambda h, big: lax.select(np.arange(9).reshape(3, 3) < 3, jnp.full_like(h, big), h),
    "set": lambda h, big: h.at[0].set(big),
    "set of an input": lambda h, big: jnp.full((3, 3), big).at[1:].set(h[1:]),
    "min": lambda h, big: h.at[0].min(big),
    "dynamic_update_slice": lambda h, big: lax.dynamic_update_slice(
        h, jnp.full((1, 3), big), (0, 0)
    ),
    "into a constant": lambda h, big: lax.dynamic_update_slice(
        jnp.full((3, 3), big), h[1:], (1, 0)
    ),
    "pad": lambda h, big: jnp.pad(h[1:], ((1, 0), (0, 0)), constant_values=big),
    "lax.pad": lambda h, big: lax.pad(h[1:], jnp.asarray(big, F32), ((1, 0, 0), (0, 0, 0))),
    "take": lambda h, big: jnp.take(h, OUT, axis=0, mode="fill", fill_value=big),
    "get": lambda h, big: h.at[OUT].get(mode="fill", fill_value=big),
    "concatenate": lambda h, big: jnp.concatenate([jnp.full((1, 3), big), h[1:]]),
    "stack": lambda h, big: jnp.stack([jnp.full(3, big), h[1], h[2]]),
    "cond": lambda h, big: jnp.concatenate(
        [lax.cond(h[0, 0] > -999, lambda r: jnp.full_like(r, big), jnp.tanh, h[:1]), h[1:]]
    ),
    "switch": lambda h, big: (
        lax.switch(
            (h[0, 0] > -999).astype(int), [lambda h, m: h, lambda h, m: m], h, jnp.full_like(h, big)
        )
        .at[1:]
        .set(h[1:])
    ),
    "scan": carried(by_scan),
    "while": carried(by_while),
}
RULES = {"scan": "; op.scan: f16", "while": "; op.while: f16"}


DIFFERENTIATED = {"add", "where", "set", "min", "pad", "take", "concatenate", "cond", "scan"}
SIZES = [(name, size) for name in ROADS for size in ((-1e9, -1e30) if name in RULES else (-1e9,))]


@functools.cache
def of_roads():
    """Returns results and gradients of each function for each size, with autocast and without."""
    x, h = activation(np.random.default_rng(7).integers(-4, 5, size=(3, 3)) / 4)

    def both(name, size):
        policy = "c=f16" + RULES.get(name, "")

        def logits(x):
            return ROADS[name](h(x), size)

        def loss(x):
            return (jax.nn.softmax(logits(x)) ** 2).sum()

        low = jmpx.autocast(logits, policy, output=None)(x), logits(x)
        if name not in DIFFERENTIATED:
            return *low, []
        slopes = jax.grad(jmpx.autocast(loss, policy)), jmpx.autocast(jax.grad(loss), policy)
        return *low, [slope(x) for slope in (*slopes, jax.grad(loss))]

    return together({key: functools.partial(both, *key) for key in SIZES})


@pytest.mark.parametrize("name, size", SIZES)
def test_masks_stay_finite_on_every_road(name, size):
    low, expected, slopes = of_roads()[name, size]
    assert low.dtype == F16
    assert np.isfinite(low).all() and (low[0] < -3e4).all()
    np.testing.assert_array_equal(low[1:], expected[1:])
    for slope in slopes:
        assert np.isfinite(slope).all()
        np.testing.assert_allclose(slope[1:], slopes[-1][1:], atol=2e-3)


def test_masks_of_the_least_number_stay_finite_in_bfloat16():
    x, h = activation(np.ones((3, 3)))
    roads = {
        name: functools.partial(
            jmpx.autocast(lambda x, fn=fn: fn(h(x), LEAST), "c=bf16", output=None), x
        )
        for name, fn in ROADS.items()
        if name not in RULES
    }
    for name, low in together(roads).items():
        assert low.dtype == BF16 and np.isfinite(low.astype(F32)).all(), name
        assert (low[0] < -1e38).all(), name


def test_attention_by_blocks_carries_its_maximum_in_float16(rng):
    q, k, v = (normal(rng, 8, 4) for _ in range(3))
    visible = np.arange(8) >= 4  # the first block is masked as a whole

    def attention(q, k, v):
        def block(carry, inputs):
            largest, total, out = carry
            k, v, visible = inputs
            logits = jnp.where(visible, q @ k.T, -1e30)
            new = jnp.maximum(largest, logits.max(1))
            shrink, weights = jnp.exp(largest - new), jnp.exp(logits - new[:, None])
            return (new, total * shrink + weights.sum(1), out * shrink[:, None] + weights @ v), None

        start = jnp.full(8, -1e30), jnp.zeros(8), jnp.zeros((8, 4))
        blocks = k.reshape(2, 4, 4), v.reshape(2, 4, 4), visible.reshape(2, 4)
        _, total, out = lax.scan(block, start, blocks)[0]
        return out / total[:, None]

    got = jmpx.autocast(attention, "c=f16; op.scan: f16")(q, k, v)
    expected = jax.nn.softmax(jnp.where(visible, q @ k.T, -jnp.inf)) @ v
    np.testing.assert_allclose(got, expected, atol=2e-2)


def test_an_activation_that_overflows_is_not_hidden():
    x, h = activation([60_000.0, 1.0])
    got = jmpx.autocast(lambda x, b: h(x) + b, "c=f16")(x, jnp.full(2, 60_000.0, F32))
    np.testing.assert_array_equal(got, [[np.inf, 6e4]])
