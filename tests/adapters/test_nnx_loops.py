"""The carries of loops in a model of NNX: of JAX's loops, of NNX's, and of recurrent cells."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import BF16, F32, LOG, MIXED, assert_same_bits, normal
from helpers.jaxprs import LOW
from helpers.nnx_net import Model, Square, linear, products_of, pure, traced

import jmpx
import jmpx.flax

standard_promotion = pytest.mark.usefixtures("standard_promotion")
X = normal(np.random.default_rng(0), 2, 4)
LOOPS = {
    "scan": lambda f, h: jax.lax.scan(lambda h, _: (f(h), None), h, None, length=3)[0],
    "fori": lambda f, h: jax.lax.fori_loop(0, 3, lambda _, h: f(h), h),
    "while": lambda f, h: jax.lax.while_loop(lambda h: h.sum() > 1e9, f, h),
    "cond": lambda f, h: jax.lax.cond(True, f, lambda h: h, h),
    "nnx.scan": lambda m, h: nnx.scan(
        lambda m, h: m(h), in_axes=(None, nnx.Carry), out_axes=nnx.Carry, length=3
    )(m, h),
    "nnx.while": lambda m, h: nnx.while_loop(
        lambda c: c[1].sum() > 1e9, lambda c: (c[0], c[0](c[1])), (m, h)
    )[1],
    "nnx.cond": lambda m, h: nnx.cond(True, lambda m, h: m(h), lambda m, h: h, m, h),
}
CARRIES = [(MIXED, F32), (MIXED, BF16), ("c=f16", F32), ("c=f16; Square: c=bf16,o=f32", F32)]


@standard_promotion
@pytest.mark.parametrize(
    ("loop", "policy", "dtype"), [(loop, *CARRIES[n % 4]) for n, loop in enumerate(LOOPS)]
)
def test_loops_and_branches_keep_the_dtype_of_a_carry(loop, policy, dtype, log):
    def call(model, x):
        h = LOOPS[loop](model.layer, jnp.ones((2, 4), dtype))
        LOG.append(h.dtype)
        return h

    products = products_of(Model(call, layer=Square()), policy, X)
    assert log[-1] == dtype and products and "float32" not in "".join(products)


@standard_promotion
@pytest.mark.parametrize(("dtype", "cast"), [(F32, True), (F32, False), (BF16, False)])
def test_stacked_layers_beside_a_float32_argument(dtype, cast):
    """A mask or a cache in float32 does not widen a carry of another shape."""

    def call(model, x):
        step = lambda m, h: m(h, jnp.ones(4))  # noqa: E731
        scan = nnx.scan(step, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        h = scan(model.layers, jnp.ones((2, 4), dtype))
        assert h.dtype == dtype
        return h

    model = Model(call, layers=nnx.vmap(lambda _: Square(cast))(jnp.arange(3)))
    assert traced(model, MIXED, X) == {LOW}


# Recurrent cells

CELLS = ("LSTMCell", "OptimizedLSTMCell", "GRUCell", "SimpleCell")


def cell(name):
    return getattr(nnx, name)(4, 4, dtype=None, rngs=nnx.Rngs(0))  # that of `SimpleCell` is float32


def decode(model, x):
    """A decoder that reads its own predictions, with a carry that is made inside."""

    def step(state, _):
        carry, last = state
        carry, y = model.layer(carry, last)
        y = model.head(y)
        return (carry, y), y

    carry = model.layer.initialize_carry(x.shape, nnx.Rngs(0))
    return jax.lax.scan(step, (carry, jnp.zeros(x.shape)), None, length=3)[1]


def unrolled(model, x):
    carry = model.layer.initialize_carry(x.shape, nnx.Rngs(0))
    for _ in range(3):
        carry, y = model.layer(carry=carry, inputs=x)
    return model.head(y)


def in_a_layer(model, x):
    return model.head(nnx.RNN(model.layer)(jnp.stack(3 * [x], 1)))


def both_ways(model, x):
    rnn = nnx.Bidirectional(nnx.RNN(model.layer), nnx.RNN(model.layer, time_major=False))
    return rnn(jnp.stack(3 * [x], 1))


@standard_promotion
@pytest.mark.versions
@pytest.mark.thorough
@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("run", [decode, unrolled, in_a_layer, both_ways])
def test_cells_multiply_in_16_bits_in_all_loops(run, name):
    policies = ["c=bf16,o=f32", "c=f16", "c=bf16; {}: c=bf16,o=f32"]
    policy = policies[(CELLS.index(name) + len(run.__name__)) % 3].format(name)
    model = Model(run, layer=cell(name), head=linear())
    low = "float16" if "c=f16" in policy else "bfloat16"
    assert traced(model, policy, X) == {f"{low}x{low}"}


@pytest.mark.parametrize(("name", "dtype"), [(c, (F32, BF16)[n % 2]) for n, c in enumerate(CELLS)])
def test_a_cell_inside_returns_its_carry_as_it_came(name, dtype):
    """The same numbers as of a view of the cell alone."""
    model = cell(name)
    shape = jax.tree.map(jnp.shape, model.initialize_carry(X.shape, nnx.Rngs(0)))
    carry = jax.tree.map(lambda s: X.astype(dtype), shape, is_leaf=lambda s: s == X.shape)
    around = Model(lambda m, x: m.layer(carry, x), layer=model)

    def both(around):
        alone = jmpx.flax.with_policies(around.layer, "c=bf16")(carry, X)
        return jmpx.flax.with_policies(around, "c=bf16")(X), alone

    run, state = pure(both, around)
    is_run = (name, dtype) == ("GRUCell", F32)
    (new, y), alone = (jax.jit if is_run else lambda f: lambda *a: jax.eval_shape(f, *a))(run)(
        state
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(alone[0])} == {dtype}
    assert {leaf.dtype for leaf in jax.tree.leaves((new, y, alone[1]))} == {BF16}
    if is_run:
        assert_same_bits((jmpx.cast_tree(alone[0], BF16), alone[1]), (new, y))
