"""Modules under autocast as parts of models: attributes, methods, ties, copies, NNX parents."""

import copy
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_same_bits, leniently

import jmpx

BF16, F32 = jnp.bfloat16, jnp.float32


def normal(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), F32)


class Coder(eqx.Module):
    """Attributes with the names that a wrapper's own fields might have."""

    fn: jax.Array
    policy_map: str
    output: int

    def __call__(self, x):
        return x @ self.fn

    def encode(self, x, *, scale=1.0):
        return self(x) * scale

    def _private(self, x):
        return self(x)

    @property
    def size(self):
        return self.fn.size

    @staticmethod
    def double(x):
        return 2 * x


def test_attributes_are_those_of_the_module(rng):
    coder = Coder(normal(rng, 3, 3), "mine", 7)
    wrapped = jmpx.autocast(coder, output=None)
    assert wrapped.fn is coder.fn and (wrapped.policy_map, wrapped.output) == ("mine", 7)
    assert wrapped.size == 9 and wrapped.__wrapped__ is coder
    assert {"fn", "encode", "__call__"} <= set(dir(wrapped))
    assert getattr(wrapped, "missing", None) is None
    with pytest.raises(AttributeError, match="'Coder' object has no attribute 'missing'"):
        wrapped.missing  # noqa: B018


def test_methods_run_under_autocast(rng):
    coder, x = Coder(normal(rng, 3, 3), "", 0), normal(rng, 2, 3)
    wrapped = jmpx.autocast(coder, output=None)
    assert wrapped(x).dtype == wrapped.encode(x, scale=2.0).dtype == BF16
    assert jax.vmap(wrapped.encode)(x).dtype == BF16
    assert wrapped._private(x).dtype == wrapped.double(x).dtype == F32
    expected = jmpx.autocast(coder.encode, output=None)(x)
    assert_same_bits(wrapped.encode(x), expected)
    with pytest.warns(UserWarning, match="matched no operation") as caught:
        jmpx.autocast(coder, "c=bf16; op.tahn: full").encode(x)
    assert caught[0].filename == __file__


def test_a_weight_is_tied_through_it(rng):
    key = jax.random.key(0)
    embedding, linear = eqx.nn.Embedding(5, 4, key=key), eqx.nn.Linear(4, 5, key=key)

    def loss(shared, token):
        embedding, head = shared()
        return (jmpx.autocast(lambda t: head(embedding(t)))(token) ** 2).sum()

    def tie(head):
        where = lambda pair: pair[1].weight  # noqa: E731
        return eqx.nn.Shared((embedding, head), where, lambda pair: pair[0].weight)

    token = jnp.array(2)
    grads, expected = (
        eqx.filter_grad(loss)(tie(h), token) for h in (jmpx.autocast(linear), linear)
    )
    assert len(jax.tree.leaves(grads)) == len(jax.tree.leaves(expected)) == 2
    for ours, theirs in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0.05, atol=0.05)


def test_a_leaf_is_replaced_through_it(rng):
    mlp = eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))
    wrapped = eqx.tree_at(lambda m: m.layers[0], mlp, replace_fn=jmpx.autocast)
    weight = normal(rng, 4, 3)
    new = eqx.tree_at(lambda m: m.layers[0].weight, wrapped, weight)
    assert new.layers[0].weight is weight and wrapped.layers[0].weight is mlp.layers[0].weight
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(new)]
    assert paths[0] == ".layers[0]._jmpx_fn.weight"
    assert jax.tree.structure(new) == jax.tree.structure(wrapped)
    assert len(jax.tree.leaves(new, is_leaf=lambda m: isinstance(m, eqx.nn.Linear))) == 4
    other = eqx.tree_at(lambda m: m.layers[0], mlp, jmpx.autocast(mlp.layers[0], "c=f16"))
    assert jax.tree.structure(other) != jax.tree.structure(wrapped)


COPIES = [lambda w: pickle.loads(pickle.dumps(w)), copy.deepcopy, copy.copy]


@pytest.mark.parametrize("make_copy", COPIES)
def test_copies(rng, make_copy):
    wrapped = jmpx.autocast(eqx.nn.Linear(3, 2, key=jax.random.key(0)), "c=bf16; op.tanh: full")
    new = make_copy(wrapped)
    assert_same_bits(new, wrapped)
    assert new.weight.shape == (2, 3) and new is not wrapped


@pytest.mark.parametrize("make_copy", [lambda m: pickle.loads(pickle.dumps(m)), copy.deepcopy])
@leniently
def test_copies_of_nnx_modules(rng, make_copy):
    norm, x = nnx.RMSNorm(3, rngs=nnx.Rngs(0)), normal(rng, 2, 3)
    norm.scale_init = None  # older versions of Flax keep a function here that pickle refuses
    wrapped = jmpx.autocast(norm)
    new = make_copy(wrapped)
    assert type(new) is type(wrapped) and new.scale is not norm.scale
    assert_same_bits(new(x), wrapped(x))


def test_empty_shells_know_no_attributes():
    """As copy, pickle and JAX make them, before there are any fields."""
    shell = object.__new__(jmpx.Autocast)
    for name in ("_jmpx_fn", "weight", "__deepcopy__", "__array__"):
        assert not hasattr(shell, name)
    hollow = jax.tree.map(
        lambda leaf: None, jmpx.autocast(eqx.nn.Linear(3, 2, key=jax.random.key(0)))
    )
    assert hollow.weight is None
    assert not hasattr(hollow, "__array__")  # of JAX and NumPy the module is asked nothing


# NNX.


class Net(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.head = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        return self.head(self.norm(self.inner(x)))


def paths_of(state):
    return {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(state)}


@leniently
def test_it_takes_the_place_of_an_nnx_module(rng):
    model, x = Net(nnx.Rngs(0)), normal(rng, 6, 3)
    kernel, norm = model.inner.kernel, model.norm
    for name in ("inner", "norm"):
        setattr(model, name, jmpx.autocast(getattr(model, name)))
    assert isinstance(model.inner, jmpx.Autocast) and isinstance(model.inner, nnx.Module)
    assert model.inner.kernel is kernel and model.norm.__wrapped__ is norm
    assert paths_of(nnx.state(model, nnx.Param)) == {
        *("inner/_jmpx_fn/kernel", "inner/_jmpx_fn/bias", "head/kernel", "head/bias"),
        *("norm/_jmpx_fn/scale", "norm/_jmpx_fn/bias"),
    }
    graph, state = nnx.split(model)
    assert_same_bits(nnx.merge(graph, state)(x), nnx.clone(model)(x))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        grads = nnx.grad(lambda model: (model(x) ** 2).mean())(model)
        optimizer.update(model, grads)

    before, mean = kernel[...], norm.mean[...]
    step(model, optimizer)
    assert model.inner.kernel is kernel and model.norm.__wrapped__ is norm
    assert (kernel[...] != before).any() and (norm.mean[...] != mean).all()
    text = str(jax.make_jaxpr(lambda x: nnx.clone(model)(x))(x))
    assert "bf16[6,4] = dot_general" in text and "f32[6,2] = dot_general" in text


@leniently
def test_attributes_that_are_set_go_to_the_nnx_module(rng):
    norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    wrapped = jmpx.autocast(norm)
    wrapped.eval()
    assert norm.use_running_average and wrapped.use_running_average
    wrapped.train()
    wrapped.momentum = 0.5
    assert not norm.use_running_average and norm.momentum == 0.5
    wrapped.note = "text"
    del wrapped.note
    assert not hasattr(norm, "note")
    scale = nnx.Param(jnp.full(3, 2.0))
    wrapped.scale = scale
    assert norm.scale is scale
    x = normal(rng, 4, 3)
    wrapped(x)
    np.testing.assert_allclose(norm.mean[...], 0.5 * x.mean(0), rtol=1e-4)


@leniently
def test_methods_of_an_nnx_module(rng):
    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(normal(rng, 3, 3))
            self.count = nnx.Variable(jnp.array(0))

        def encode(self, x):
            self.count[...] += 1
            return x @ self.w[...]

        def __call__(self, x):
            return self.encode(x)

    model, x = Model(), normal(rng, 2, 3)
    wrapped = jmpx.autocast(model, output=None)
    assert wrapped.encode(x).dtype == wrapped(x).dtype == BF16
    assert int(model.count[...]) == 2


@leniently
def test_an_nnx_object_that_is_no_pytree(rng):
    class Model(nnx.Module, pytree=False):
        def __init__(self):
            self.w, self.calls = nnx.Param(normal(rng, 3, 3)), 0

        def __call__(self, x):
            self.calls += 1
            return x @ self.w[...]

    model, x = Model(), normal(rng, 2, 3)
    assert jmpx.autocast(model, output=None)(x).dtype == BF16 and model.calls == 1
    grads = jmpx.filter_grad(lambda m, x: m(x).sum(), jmpx.NoOpLossScale(), policy="c=f16")(
        model, x
    )
    assert grads[2]["w"][...].dtype == F32 and model.calls == 2


# The habit of torch.


@pytest.mark.parametrize(
    "block", [lambda: jmpx.autocast(policy="c=bf16"), lambda: jmpx.autocast(output=None)]
)
def test_a_with_block_is_told_what_to_write(block):
    with pytest.raises(TypeError, match=r"got a with block: write jmpx.autocast\(f, policy\) or"):
        with block():
            pass


@pytest.mark.parametrize("first", ["bf16", "cuda"])
def test_a_string_is_told_what_to_write(first):
    with pytest.raises(TypeError, match=f"got '{first}': write jmpx.autocast") as caught:
        with jmpx.autocast(first):
            pass
    assert str(caught.value).count("\n") == 0


def test_it_decorates_with_arguments(rng):
    @jmpx.autocast(policy="c=f16", rules={"tanh": "f32"}, output=None)
    def f(x):
        """Squares."""
        return x @ x, jnp.tanh(x @ x)

    assert [y.dtype for y in f(normal(rng, 2, 2))] == [jnp.float16, F32]
    assert (f.__name__, f.__doc__) == ("f", "Squares.")
