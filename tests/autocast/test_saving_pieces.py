"""Between which arrays `jmpx.autocast(save=)` cuts, what it leaves alone, and what it warns of."""

import itertools
from typing import Any

import autocast as benchmark
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal, warns_once
from helpers.jaxprs import equations, equations_of, trace
from hypothesis import given, strategies as st
from jax import lax
from jax.experimental import io_callback

import jmpx
import jmpx.equinox
from jmpx._autocast import cuts


def pieces(fn, *args, **options):
    """Returns how many products each checkpointed piece has, innermost functions included."""
    cast = jmpx.autocast(fn, save="products", **options)
    remats = [e for e in equations(trace(cast, *args)) if e.primitive.name == "remat2"]
    inner = [list(equations(e.params["jaxpr"])) for e in remats]
    return [sum(e.primitive.name == "dot_general" for e in eqns) for eqns in inner]


def blocks(x, w, count=3, wrap=lambda f: f):
    def block(x):
        return x + jnp.tanh(x @ w) @ w

    for _ in range(count):
        x = wrap(block)(x)
    return x


@pytest.fixture
def short_pieces(monkeypatch):
    """As if all that is computed again lived at once; small models have one piece otherwise."""
    monkeypatch.setattr(cuts, "_AGAIN", 1)


@pytest.mark.usefixtures("short_pieces")
def test_cuts(pair):
    def scanned(x, w):
        return lax.scan(lambda x, _: (blocks(x, w, 2), None), x, None, 3)[0]

    def decoder(x, w):  # in which the encoder's output lives all along
        encoded = blocks(x, w, 2)
        for _ in range(9):
            x = blocks(x, w, 1) + jnp.sin(encoded)
        return x

    # An input is no activation: after the first product, the product alone lives.
    assert pieces(blocks, *pair) == [1, 1, 2, 2]
    assert pieces(lambda x, w: blocks(x, w, 2, jax.jit), *pair) == [1, 1] * 2
    assert pieces(jax.jit(lambda x, w: blocks(x, w, 2)), *pair) == [1, 1, 2]
    assert pieces(scanned, *pair) == [1, 1, 2]
    assert pieces(decoder, *pair) == [1, 1, 6, *[2] * 7]  # whose blocks repeat
    assert pieces(lambda x, w: jnp.sin(x) + w[0, 0], *pair) == []  # without a product


def llama(x, w):
    """A block in which several products read the result of one norm."""
    h = jnp.sin(x) * 2
    x = x + jnp.tanh((h @ w) * (h @ w) * (h @ w)) @ w
    h = jnp.sin(x) * 2
    return x + jnp.tanh((h @ w) * (h @ w)) @ w


def scanned(x, w, body=llama, length=6):
    return lax.scan(lambda x, _: (body(x, w), None), x, None, length)[0]


def test_no_cut_between_products_of_one_activation(pair):
    """What depends on a carry, or on an operand that is an activation outside, has to be saved."""
    jitted = jax.jit(llama)
    assert pieces(scanned, *pair) == pieces(lambda x, w: scanned(x, w, jitted), *pair) == [4, 3]
    assert pieces(lambda x, w: jitted(jitted(x @ w, w), w), *pair) == [1, 4, 3, 4, 3]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["inline", "jit"])
def test_products_of_experts_are_saved(rng, wrap):
    x, w = normal(rng, 2, 4, 8), normal(rng, 8, 8)
    weights = normal(rng, 3, 8, 16), normal(rng, 3, 16, 8)

    def experts(x, up, down):
        gates = jax.nn.softmax(x @ w[:, :3])
        sent = jnp.einsum("bse,bsd->ebd", gates, x)
        h = jnp.einsum("ebf,efd->ebd", jnp.tanh(jnp.einsum("ebd,edf->ebf", sent, up)), down)
        return x + jnp.einsum("bse,ebd->bsd", gates, h)

    def grad_of(**options):
        cast = jmpx.autocast(lambda weights: wrap(experts)(x @ w, *weights), **options)
        return jax.grad(lambda weights: jnp.square(cast(weights)).sum())

    grads = [grad_of(save=save) for save in (None, "products", "products+attention")]
    plain, *saving = (jax.jit(g).lower(weights).as_text().count("dot_general") for g in grads)
    assert saving == [plain + 1, plain]  # what is sent to experts is a product of activations
    results = [grad(weights) for grad in grads]
    for expected, *found in zip(*results, strict=True):
        for each in found:
            np.testing.assert_array_equal(each, expected)


def attention(x, w, wrap=lambda f: f):
    """A block of an attention, whose two products are of activations."""
    q, k, v = (jnp.tanh(x @ w[i]) for i in range(3))
    scores = wrap(lambda q, k: jnp.einsum("btd,bsd->bts", q, k))(q, k)
    return x + wrap(lambda p, v: jnp.einsum("bts,bsd->btd", p, v))(jax.nn.softmax(scores), v) @ w[3]


def dotted(x, w):
    q, k, v = (jnp.tanh(x @ w[i])[:, :, None] for i in range(3))
    return x + jax.nn.dot_product_attention(q, k, v)[:, :, 0] @ w[3]


ATTENTIONS = {
    "inline": attention,
    "jitted parts": lambda x, w: attention(x, w, jax.jit),
    "jitted": jax.jit(attention),
    "scanned": lambda x, w: lax.scan(lambda x, _: (attention(x, w), None), x, None, 1)[0],
    "vmapped": lambda x, w: jax.vmap(lambda x: attention(x[None], w)[0])(x),
    "jax.nn": dotted,
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_products_of_attention_are_made_again_unless_they_are_saved(name, rng):
    x, weights = normal(rng, 2, 5, 8), [normal(rng, 4, 8, 8) / 3 for _ in range(2)]

    def grad_of(save):
        def model(x, weights):
            for w in weights:
                x = ATTENTIONS[name](x, w)
            return x

        cast = jmpx.autocast(model, save=save)
        return jax.jit(jax.grad(lambda weights: jnp.square(cast(x, weights)).sum()))

    plain, saving, more = map(grad_of, (None, "products", "products+attention"))
    products = [g.lower(weights).as_text().count("dot_general") for g in (plain, saving, more)]
    assert products[0] == products[2] < products[1]
    # Else XLA:CPU keeps a result of 16 bits in float32 where it fuses what reads it.
    exact: Any = {"xla_allow_excess_precision": False}
    wanted, *found = (g.lower(weights).compile(exact)(weights) for g in (plain, saving, more))
    # A cut in a jitted block changes the order in which the cotangents of its operand are summed.
    bound = 0.02 if name == "jitted" else 0
    for pair in zip(jax.tree.leaves(found), jax.tree.leaves([wanted] * 2), strict=True):
        np.testing.assert_allclose(*pair, rtol=0, atol=bound * np.abs(pair[1]).max())


@pytest.mark.usefixtures("short_pieces")
def test_a_loop_saves_for_each_turn(pair):
    """So a cut that keeps an array may pay in a short loop alone."""

    def count(turns):
        return pieces(lambda x, w: scanned(x, w, lambda x, w: llama(llama(x, w), w), turns), *pair)

    assert [count(turns) for turns in (1, 2, 50)] == [[4, 3, 4, 3], [4, 7, 3], [4, 10]]


@pytest.mark.usefixtures("short_pieces")
def test_what_depends_on_no_product_is_no_activation(rng):
    """A mask, tables of angles and a cast of each parameter live all along, and hinder no cut."""
    x, ws = normal(rng, 4, 8), [normal(rng, 8, 8) for _ in range(3)]

    def fn(x, ws):
        mask = x > 0
        angles = jnp.outer(x[:, 0], jnp.arange(8.0))
        transposed = [w.T * 2 for w in ws]
        for w in transposed:
            x = jnp.where(mask, jnp.tanh(x @ w), jnp.cos(angles) * x)
        return x

    assert pieces(fn, x, ws) == [1, 1, 1]


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"save": "product"}, ValueError, "got 'product'; did you mean 'products'"),
        ({"save": "products+attn"}, ValueError, "did you mean 'products\\+attention'"),
        ({"save": ["products"]}, ValueError, r"got \['products'\]"),
        ({"save": True}, ValueError, "got True"),
    ],
)
def test_bad_arguments(options, error, words):
    with pytest.raises(error, match=words):
        jmpx.autocast(jnp.sin, **options)
    with pytest.raises(error, match=words):
        jmpx.autocast(**options)(jnp.sin)


# What is left as it was.


def test_the_users_checkpoints(pair):
    def fn(x, w):
        return blocks(blocks(x, w, 2, jax.checkpoint), w, 2)

    with warns_once(__file__, r"as it is \(.*test_saving_pieces.py:\d+ .*leave the checkpoint out"):
        saving = jmpx.autocast(fn, save="products")
        assert jax.eval_shape(saving, *pair).shape == pair[0].shape


def test_a_gradient_inside(pair):
    def fn(x, w):
        return jax.grad(lambda x: blocks(x, w).sum())(x)

    for f in (fn, jax.jit(fn)):
        with warns_once(__file__, "takes a gradient itself"):
            cast = jmpx.autocast(f, save="products")
            found = [e.primitive.name for e in equations_of(lambda *a, f=cast: f(*a), *pair)]
        assert "remat2" not in found


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["inline", "jitted"])
def test_effects_happen_once_and_in_order(pair, log, ordered, wrap):
    x, w = pair

    @wrap
    def block(x, i):
        h = x @ w
        io_callback(lambda i: log.append(int(i)), None, i, ordered=ordered)
        return x + jnp.tanh(h) @ w

    def fn(x):
        for i in range(3):
            x = block(x, i)
        return x.sum()

    assert len(pieces(fn, x)) >= 3
    jax.block_until_ready(jax.jit(jax.grad(jmpx.autocast(fn, save="products")))(x))
    jax.effects_barrier()
    assert log == [0, 1, 2] if ordered else sorted(log) == [0, 1, 2]


def test_a_callback_that_returns_something(pair):
    x, w = pair

    def fn(x):
        h = jnp.tanh(x @ w)
        size = io_callback(lambda: np.float32(3), jax.ShapeDtypeStruct((), jnp.float32))
        return ((x + h @ w * size) @ w).sum()

    casts = jmpx.autocast(fn), jmpx.autocast(fn, save="products")
    plain, saving = (jax.jit(jax.grad(cast)) for cast in casts)
    np.testing.assert_array_equal(saving(x), plain(x))


# With other transformations.


def test_under_vmap_and_nested(pair):
    x, w = pair
    saving = jmpx.autocast(blocks, save="products")
    plain = jmpx.autocast(blocks)
    vmapped = [jax.vmap(f, (0, None))(x[:, None], w) for f in (saving, plain)]
    np.testing.assert_array_equal(*vmapped)
    outer = jmpx.autocast(lambda x, w: saving(x, w) @ w)
    np.testing.assert_array_equal(outer(x, w), jmpx.autocast(lambda x, w: plain(x, w) @ w)(x, w))


@pytest.mark.usefixtures("short_pieces")
def test_in_shard_map(pair):
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("i",))
    specs = jax.sharding.PartitionSpec("i"), jax.sharding.PartitionSpec()

    def local(x, w):
        return lax.pmean(blocks(x, w), "i")

    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs[1])
    assert pieces(mapped, *pair) == [1, 1, 2, 2]
    plain, saving = jmpx.autocast(mapped), jmpx.autocast(mapped, save="products")
    grads = [
        jax.jit(jax.grad(lambda w, f=f: f(pair[0], w).sum()))(pair[1]) for f in (plain, saving)
    ]
    np.testing.assert_allclose(*grads, rtol=2e-2, atol=2e-2)


def test_output_and_decorators(pair):
    @jmpx.autocast(policy="c=f16", output=None, save="products")
    def fn(x, w):
        return blocks(x, w)

    assert (
        fn(*pair).dtype == jmpx.autocast(blocks, "c=f16", output=None)(*pair).dtype == jnp.float16
    )


@pytest.mark.thorough
def test_the_cost_of_tracing(rng):
    """Equations of the traced gradients: those that are computed again come on top."""
    model = benchmark.Transformer(4, 8, 2, 16, classes=4)
    params, ways = model.init(rng), benchmark.losses(model, model.batch(rng, 2, 6))

    def count(way):
        return len(equations_of(jax.grad(ways[way]), params))

    assert count("autocast, save") < 1.6 * count("autocast")


def test_a_head_larger_than_what_it_reads_is_in_no_piece(rng):
    """The backward pass begins with the head's results: a piece would save nothing of them."""
    x, w = normal(rng, 4, 8), normal(rng, 8, 8)

    def logits(x, w, head):
        return jnp.tanh(blocks(x, w)) @ head + 1.0

    def loss(x, w, head):
        return jnp.square(logits(x, w, head)).sum()

    for classes, outside in ((4, 0), (64, 1)):
        head = normal(rng, 8, classes)
        assert sum(pieces(logits, x, w, head)) == 7 - outside
        assert sum(pieces(loss, x, w, head)) == 7  # its results are read in the function


@pytest.mark.usefixtures("short_pieces")
def test_first_pieces_are_long_and_the_last_ones_short(pair):
    """When the backward pass comes to the first pieces, the products of later ones are gone."""
    functions = jnp.tanh, jnp.sin, jnp.cos, jnp.sinh, jnp.arctan, jnp.abs, jax.nn.sigmoid
    functions += jax.scipy.special.erf, jnp.floor, jnp.ceil, jnp.arcsinh, jnp.sign

    def fn(x, w):
        for function in functions:  # blocks that do not repeat
            x = x + function(x @ w) @ w
        return x

    # Where a product alone lives, a cut keeps nothing more.
    assert pieces(fn, *pair) == [1, 1, 10, 6, 4, 2]


def test_once_in_each_of_repeated_blocks(pair):
    assert pieces(lambda x, w: blocks(x, w, 12), *pair) == [1, 1, *[2] * 11]


SIZE = st.integers(0, 9)


@given(st.lists(st.tuples(SIZE, SIZE, SIZE), min_size=1, max_size=7))
def test_the_cuts_that_need_the_least_memory(sizes):
    """Against all subsets of the places."""
    kept, made, others = (list(column) for column in zip(*sizes, strict=True))
    products, again = ([*itertools.accumulate([*column, 3])] for column in (made, others))

    def peak(chosen):
        peaks, total, begun = [], 0, 0
        for end in [*chosen, len(kept)]:
            peaks.append(total + products[end] + again[end] - begun)
            begun = again[end]
            total += kept[end] if end < len(kept) else 0
        return max(peaks)

    every = [c for n in range(len(kept) + 1) for c in itertools.combinations(range(len(kept)), n)]
    found = cuts.Part(range(len(kept)), kept, products, again).cuts()
    bound = (products[-1] + again[-1] + sum(kept)) / 1000
    assert peak(found) <= min(map(peak, every)) + bound
