"""`save="products"`: the same numbers and dtypes, pieces and cuts."""

import collections
import functools
import gc
import itertools
import weakref
from typing import Any

import autocast as benchmark
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, exactly, normal, warns_once
from helpers.autocast import LOW_DTYPES, eleven, rows, seven
from helpers.jaxprs import equations, equations_of, trace
from hypothesis import given, strategies as st
from jax import export, lax
from jax.experimental import io_callback

import jmpx
from jmpx._remat import cuts  # which cuts are best is said by no public name

# Small models of every make.


def transformer_model(rng):
    model = benchmark.Transformer(2, 8, 2, 16, classes=4, scanned=True)
    x, labels = model.batch(rng, 2, 6)
    return model.apply, model.init(rng), x, labels


def mlp_of(step, layers=3, width=8):
    """Makes a model of residual blocks `step(x, w1, w2, i)`."""

    def make(rng):
        params = [(normal(rng, width, 16) / 3, normal(rng, 16, width) / 4) for _ in range(layers)]

        def apply(params, x):
            for i, (w1, w2) in enumerate(params):
                x = step(x, w1, w2, i)
            return x

        return apply, params, normal(rng, 4, width), jnp.arange(4) % width

    return make


def block_model(x, w1, w2, _):
    return x + jax.nn.gelu(x @ w1) @ w2


def integers_model(x, w1, w2, _):
    """Chooses activations by their own indices, and adds a float32 statistic that is fixed."""
    h = x @ w1
    best = jnp.argmax(h, axis=-1)
    mask = jax.nn.one_hot(best, h.shape[-1], dtype=bool)
    with jmpx.full_precision():
        norm = jnp.sqrt((x @ jnp.ones((x.shape[1], 1))) ** 2 + 1e-8)
    return x + jnp.where(mask, h, 0.1) @ w2 / (1 + norm)


def custom_model(x, w1, w2, i):
    return x + jnp.tanh((seven, eleven)[i % 2](x, w1)) @ w2


def convolution_model(x, w1, w2, _):
    h = lax.conv(x[None, None], w1[None, None], (1, 1), "SAME")[0, 0]
    return x + jnp.tanh(h) * w2[0]


def branches_model(x, w1, w2, i):
    def deep(x):
        return block_model(block_model(x, w1, w2, i), w1, w2, i)

    return lax.cond(x[0, 0] > 0, deep, lambda x: x @ w1 @ w2, x)


def recurrence_model(x, w1, w2, _):
    def body(h, _):
        h = jnp.tanh(h @ w1 @ w2)
        return h, h.sum(axis=-1)

    h, sums = lax.scan(body, x, None, 2)
    return x + h * sums.mean(axis=0)[:, None]


MODELS = {
    "transformer": transformer_model,
    "jitted layers": mlp_of(jax.jit(block_model, static_argnums=3)),
    "integers": mlp_of(integers_model),
    "convolution": mlp_of(convolution_model),
    "custom": mlp_of(custom_model),
    "branches": mlp_of(branches_model, 2),
    "recurrence": mlp_of(recurrence_model, 2),
}


# In these, two pieces cast the same array, so that its cotangents are summed in its own dtype.
SHARED = ("branches", "recurrence")

# Equations that hold a jaxpr, names, which compute nothing, and casts, which each piece makes.
_AROUND = {"jit", "remat2", "custom_vjp_call", "convert_element_type", "copy", "name"}
SAVES: list[Any] = ["products", "products+mixed", "products+attention"]


def dtypes_of_operations(fn, *args):
    """Counts operations by name and dtypes of operands."""
    found = [eqn for eqn in equations_of(fn, *args) if eqn.primitive.name not in _AROUND]
    return collections.Counter(
        (
            eqn.primitive.name,
            *(str(getattr(atom.aval, "dtype", "")) for atom in (*eqn.invars, *eqn.outvars)),
        )
        for eqn in found
    )


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:JAX cannot trace")  # other tests are about that
@pytest.mark.parametrize("name", rows(MODELS, "custom", "recurrence"))
def test_nothing_changes(rng, name):
    """Only under XLA's optimizations do gradients differ, by the order of float32 sums."""
    apply, params, x, labels = MODELS[name](rng)
    policy, save = rng.choice(list(LOW_DTYPES)), SAVES[len(name) % 3]

    def loss_of(**options):
        cast = jmpx.autocast(apply, policy, **options)
        return lambda params: benchmark.cross_entropy(cast(params, x), labels)

    plain, saving = loss_of(), loss_of(save=save)
    assert any(eqn.primitive.name == "remat2" for eqn in equations_of(saving, params))
    assert dtypes_of_operations(saving, params) == dtypes_of_operations(plain, params)
    values, grads = zip(
        *(exactly(jax.value_and_grad(f))(params) for f in (plain, saving)), strict=True
    )
    assert_same_bits(*values)
    assert any(np.abs(g).max() > 0 for g in jax.tree.leaves(grads[0]))
    if name in SHARED:
        a, b = (np.concatenate([*map(np.ravel, jax.tree.leaves(each))]) for each in grads)
        assert np.linalg.norm(b - a) < 1e-2 * np.linalg.norm(a)
    else:
        assert_same_bits(*grads)
    assert benchmark.residual_bytes(saving, params) < benchmark.residual_bytes(plain, params)


def test_an_exported_function_with_symbolic_sizes(rng):
    w = normal(rng, 8, 8)

    def loss(w, x, save: Any = "products"):
        cast = jmpx.autocast(lambda w, x: attend(attend(x, w) / 2, w), save=save)
        return jnp.mean(cast(w, x).astype(jnp.float32) ** 2)

    def attend(x, w):
        return x + jax.nn.softmax((x @ w) @ jnp.swapaxes(x, -1, -2) / 4) @ jnp.tanh(x @ w)

    x = jax.ShapeDtypeStruct(export.symbolic_shape("2*b, s + 1, 8"), jnp.float32)
    assert any(eqn.primitive.name == "remat2" for eqn in equations_of(loss, w, x))
    exported = export.export(jax.jit(jax.grad(loss)))(w, x)
    batch = normal(rng, 4, 6, 8)
    plain = jax.jit(jax.grad(functools.partial(loss, save=None)))(w, batch)
    assert np.abs(plain).max() > 0
    np.testing.assert_allclose(exported.call(w, batch), plain, rtol=0.05, atol=0.02)


# Only equal pieces share the function under their checkpoint.

LAYERS = 6


def block(x, w, i):
    del i
    return x + jnp.tanh(x @ w) @ w


def layered(block, x, ws):
    for i, w in enumerate(ws):
        with jax.named_scope(f"layer_{i}"):
            x = block(x, w, i)
    return x


@pytest.fixture
def arrays(rng):
    return normal(rng, 4, 8), [normal(rng, 8, 8) / 4 for _ in range(LAYERS)]


def shared(fn, *args, policy="c=bf16"):
    """Returns how many pieces there are, and how many functions they share."""
    found = equations(trace(jmpx.autocast(fn, policy, save="products"), *args))
    remats = [id(eqn.params["jaxpr"]) for eqn in found if eqn.primitive.name == "remat2"]
    return len(remats), len(set(remats))


def test_equal_layers_are_one_function(arrays):
    count, functions = shared(functools.partial(layered, block), *arrays)
    assert count >= LAYERS
    assert functions <= 4  # the first, whose input is no activation; the second; the others


def plus(bias):
    return jax.jit(lambda x: jnp.tanh(x + bias))


def sine_of_slope(i):
    sine = jax.custom_jvp(jnp.sin)
    sine.defjvp(lambda primals, tangents: (sine(*primals), tangents[0] * i))
    return sine


BLOCKS = {
    "number": lambda x, w, i: x + jnp.tanh(x @ w * [1.5, -0.0, 0.0, 0.25][i]) @ w,
    "constant": lambda x, w, i: x + jnp.tanh(x @ w + np.full(8, i, np.float32)) @ w,
    "jitted constant": lambda x, w, i: x + plus(jnp.full(8, float(i)))(x @ w) @ w,
    "derivative": lambda x, w, i: x + sine_of_slope(i)(x @ w) @ w,
    "scope": lambda x, w, i: jax.named_scope("wide" if i % 2 else "low")(block)(x, w, i),
    # Each reads its weight once: cotangents of two pieces are summed in float32, not in 16 bits.
    "output read later": lambda x, w, i: jnp.tanh(x + x @ w) + (0 if i else jnp.sin(x)),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_what_differs_is_not_shared(arrays, name):
    fn = functools.partial(layered, BLOCKS[name])
    count, functions = shared(fn, arrays[0], arrays[1][:4])
    # Two scopes take turns, and a later reader is of the first layer alone.
    assert functions == count or name in ("scope", "output read later")
    if name != "output read later":
        return

    def loss(ws, **options):
        cast = jmpx.autocast(fn, "c=bf16; layer_3: full", **options)
        return jnp.square(cast(arrays[0], ws)).sum()

    grads = jax.grad(functools.partial(loss, save="products")), jax.grad(loss)
    assert_same_bits(*(exactly(grad)(arrays[1][:4]) for grad in grads))


def test_each_layer_keeps_its_name_and_its_line(arrays):
    fn = jmpx.autocast(functools.partial(layered, block), save="products")
    text = jax.jit(jax.grad(lambda x, ws: fn(x, ws).sum())).lower(*arrays).as_text(debug_info=True)
    assert all(f"layer_{i}/" in text or f"layer_{i})" in text for i in range(LAYERS))

    def by_hand(x, w):
        x = block(x, w, 0)
        x = block(x, w, 1)
        return block(x, w, 2)

    functions = shared(by_hand, arrays[0], arrays[1][0])
    assert functions[0] == functions[1]  # their lines differ


@pytest.mark.thorough
def test_no_array_is_kept(arrays):
    x, ws = arrays
    del ws[2:]
    fn = jmpx.autocast(functools.partial(layered, block), save="products")
    jax.grad(lambda ws: fn(x, ws).sum())(ws)
    kept = [weakref.ref(w) for w in ws]
    ws.clear()
    gc.collect()
    assert all(ref() is None for ref in kept)


# The places of cuts.


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
    """Counts all recomputed bytes as live together; else, small models have one piece."""
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

    # An input is no activation: after the first product, only the product is live.
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
    """Arrays that depend on a carry, or on an activation from outside, have to be saved."""
    jitted = jax.jit(llama)
    assert pieces(scanned, *pair) == pieces(lambda x, w: scanned(x, w, jitted), *pair) == [4, 3]
    assert pieces(lambda x, w: jitted(jitted(x @ w, w), w), *pair) == [1, 4, 3, 4, 3]


@pytest.mark.usefixtures("short_pieces")
def test_a_loop_saves_for_each_turn(pair):
    """So a cut that keeps an array may only pay in a short loop."""

    def count(turns):
        return pieces(lambda x, w: scanned(x, w, lambda x, w: llama(llama(x, w), w), turns), *pair)

    assert [count(turns) for turns in (1, 2, 50)] == [[4, 3, 4, 3], [4, 7, 3], [4, 10]]


@pytest.mark.usefixtures("short_pieces")
def test_what_depends_on_no_product_is_no_activation(rng):
    """A mask, tables of angles and casts of parameters are live throughout, and hinder no cut."""
    x, ws = normal(rng, 4, 8), [normal(rng, 8, 8) for _ in range(3)]

    def fn(x, ws):
        mask = x > 0
        angles = jnp.outer(x[:, 0], jnp.arange(8.0))
        transposed = [w.T * 2 for w in ws]
        for w in transposed:
            x = jnp.where(mask, jnp.tanh(x @ w), jnp.cos(angles) * x)
        return x

    assert pieces(fn, x, ws) == [1, 1, 1]


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

    # Where only a product is live, a cut keeps nothing more.
    assert pieces(fn, *pair) == [1, 1, 10, 6, 4, 2]


def test_once_in_each_of_repeated_blocks(pair):
    assert pieces(lambda x, w: blocks(x, w, 12), *pair) == [1, 1, *[2] * 11]


SIZE = st.integers(0, 9)


@pytest.mark.thorough
@given(st.lists(st.tuples(SIZE, SIZE, SIZE), min_size=1, max_size=6))
def test_the_cuts_that_need_the_least_memory(sizes):
    """Compares with all subsets of the places."""
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


# Products of experts and of attention.


def grads_of(model, weights, saves=SAVES):
    """The gradients of a model of weights, without save= and with it, and their products."""
    grads, counts = [], []
    for save in (None, *saves):
        cast = jmpx.autocast(model, save=save)
        grad = exactly(jax.grad(lambda weights, f=cast: jnp.square(f(weights)).sum()))
        lowered = grad.lower(weights)
        counts.append(lowered.as_text().count("dot_general"))
        grads.append(lowered.compile()(weights))
    return grads, counts


def test_products_of_experts_are_saved(rng):
    x, w = normal(rng, 2, 4, 8), normal(rng, 8, 8)
    weights = normal(rng, 3, 8, 16), normal(rng, 3, 16, 8)

    @jax.jit
    def experts(x, up, down):
        gates = jax.nn.softmax(x @ w[:, :3])
        sent = jnp.einsum("bse,bsd->ebd", gates, x)
        h = jnp.einsum("ebf,efd->ebd", jnp.tanh(jnp.einsum("ebd,edf->ebf", sent, up)), down)
        return x + jnp.einsum("bse,ebd->bsd", gates, h)

    model = lambda weights: experts(x @ w, *weights)  # noqa: E731
    (plain, saving), (count, more) = grads_of(model, weights, SAVES[:1])
    assert more == count + 1  # what is sent to experts is a product of activations
    assert_same_bits(saving, plain)


def attention_in_parts(x, w):
    """A block of an attention, whose two products are of activations."""
    q, k, v = (jnp.tanh(x @ w[i]) for i in range(3))
    scores = jax.jit(lambda q, k: jnp.einsum("btd,bsd->bts", q, k))(q, k)
    out = jax.jit(lambda p, v: jnp.einsum("bts,bsd->btd", p, v))(jax.nn.softmax(scores), v)
    return x + out @ w[3]


def dotted(x, w):
    q, k, v = (jnp.tanh(x @ w[i])[:, :, None] for i in range(3))
    return x + jax.nn.dot_product_attention(q, k, v)[:, :, 0] @ w[3]


@pytest.mark.parametrize(
    ("block", "more"),
    [
        (attention_in_parts, [0, 2, 1, 0]),  # the scores and the values, then the scores alone
        pytest.param(dotted, [0, 1, 1, 0], marks=pytest.mark.thorough),  # one jitted function
    ],
)
def test_products_of_attention_are_made_again_unless_they_are_saved(block, more, rng):
    x, weights = normal(rng, 2, 6, 4), [normal(rng, 4, 4, 4) / 2]

    def model(weights):
        return functools.reduce(block, weights, x)

    (wanted, *found), counts = grads_of(model, weights)
    assert np.subtract(counts, counts[0]).tolist() == more
    for got in found:
        assert_same_bits(got, wanted)


# Parts that are left as they were.


def test_a_gradient_inside(pair):
    def fn(x, w):
        return jax.grad(lambda x: blocks(x, w).sum())(x)

    for f in (fn, jax.jit(fn)):
        with warns_once(__file__, "takes a gradient itself"):
            cast = jmpx.autocast(f, save="products")
            found = [e.primitive.name for e in equations_of(lambda *a, f=cast: f(*a), *pair)]
        assert "remat2" not in found


def test_effects_happen_once_and_in_order(pair, log):
    x, w = pair

    @jax.jit
    def block(x, i):
        h = x @ w
        io_callback(lambda i: log.append(int(i)), None, i, ordered=True)
        size = io_callback(lambda: np.float32(3), jax.ShapeDtypeStruct((), jnp.float32))
        return x + jnp.tanh(h) @ w * size

    def fn(x):
        for i in range(3):
            x = block(x, i)
        return x.sum()

    assert len(pieces(fn, x)) >= 3
    casts = jmpx.autocast(fn), jmpx.autocast(fn, save="products")
    plain, saving = (jax.block_until_ready(jax.jit(jax.grad(cast))(x)) for cast in casts)
    np.testing.assert_allclose(saving, plain, rtol=2e-2, atol=2e-2)  # all pieces read one weight
    jax.effects_barrier()
    assert log == [0, 1, 2] * 2


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("policy", ["c=bf16", "c=f32"])
def test_products_of_complex_numbers_are_made_again(pair, policy, save):
    """JAX cannot save a complex product under a checkpoint, because it fails to round it."""
    x, w = pair
    params = w, lax.complex(w, w.T)

    def loss_fn(params, x):
        h = jnp.tanh(x @ params[0])
        h = lax.complex(h, -h) @ params[1]
        for _ in range(2):
            h = jnp.tanh(h @ params[1]) @ params[1]
        return jnp.sum(jnp.tanh(jnp.abs(h) @ params[0]))

    found, expected = (
        jax.jit(jax.grad(jmpx.apply_policy(loss_fn, f"by=operations,{policy}{more}")))(params, x)
        for more in (f",save={save}", "")
    )
    for gradient, reference in zip(found, expected, strict=True):
        scale = np.abs(reference).max()
        np.testing.assert_allclose(gradient, reference, rtol=0, atol=1e-2 * scale)


def test_in_shard_map(pair):
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("i",))
    specs = jax.sharding.PartitionSpec("i"), jax.sharding.PartitionSpec()
    local = lambda x, w: lax.pmean(blocks(x, w, 2), "i")  # noqa: E731
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs[1])
    assert pieces(mapped, *pair) == [1, 1, 2]
    casts = jmpx.autocast(mapped), jmpx.autocast(mapped, save="products")
    grads = [jax.jit(jax.grad(lambda w, f=f: f(pair[0], w).sum()))(pair[1]) for f in casts]
    np.testing.assert_allclose(*grads, rtol=2e-2, atol=2e-2)
