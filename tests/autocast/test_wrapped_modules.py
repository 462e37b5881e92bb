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
from helpers import BF16, F32, assert_same_bits, lenient, leniently, normal, warns_once
from helpers.jaxprs import FULL, LOW, dots

import jmpx


def mlp(key=0):
    return eqx.nn.MLP(3, 2, 4, 2, key=jax.random.key(key))


def test_part_of_a_model(rng):
    def where(model):
        return model.layers[1]

    model = eqx.tree_at(where, mlp(), jmpx.autocast(where(mlp()), "bf16"))
    assert dots(jax.vmap(model), normal(rng, 4, 3)) == [FULL, LOW, FULL]


def test_a_module_under_autocast_is_a_pytree_that_holds_it(tmp_path):
    model = mlp()
    wrapped = jmpx.autocast(model, "c=bf16; op.tanh: full", output="bf16")
    assert isinstance(wrapped, jmpx.types.Autocast)
    assert wrapped.__wrapped__ is model
    assert_same_bits(*(eqx.filter(tree, eqx.is_array) for tree in (wrapped.__wrapped__, model)))
    assert jax.tree.structure(wrapped) == jax.tree.structure(
        jmpx.autocast(model, "c=bf16; op.tanh: full", output="bf16")
    )
    eqx.tree_serialise_leaves(tmp_path / "model.eqx", wrapped)
    restored = eqx.tree_deserialise_leaves(tmp_path / "model.eqx", jmpx.autocast(mlp(key=1)))
    assert_same_bits(*(eqx.filter(tree, eqx.is_array) for tree in (restored.__wrapped__, model)))
    linear = jmpx.autocast(eqx.nn.Linear(2, 2, key=jax.random.key(0)))
    assert_same_bits(pickle.loads(pickle.dumps(linear)), linear)
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = jax.device_put(linear, sharding)
    assert placed.weight.sharding == sharding


def test_a_model_that_holds_one_trains(rng):
    x, y = normal(rng, 16, 3), normal(rng, 16, 2)
    model = eqx.tree_at(lambda m: m.layers[1], mlp(), jmpx.autocast(mlp().layers[1]))
    optimizer = lenient(optax.adam(1e-2))
    state = optimizer.init(eqx.filter(model, eqx.is_array))

    def loss_fn(model):
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    @eqx.filter_jit
    def step(model, state):
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
        updates, state = optimizer.update(grads, state)
        return eqx.apply_updates(model, updates), state, loss

    first = float(loss_fn(model))
    for _ in range(30):
        model, state, loss = step(model, state)
    assert float(loss) < 0.9 * first
    assert isinstance(model.layers[1], jmpx.types.Autocast)


@pytest.mark.thorough
def test_constant_loss_scaling_through_vjp(rng):
    """The recipe of Grampax's README."""
    x = normal(rng, 4, 3)
    linear = eqx.nn.Linear(3, 2, key=jax.random.key(0))

    def loss_fn(model, x):
        return jnp.mean(jax.vmap(model)(x) ** 2)

    loss, loss_vjp = jax.vjp(lambda m: loss_fn(m, x), jmpx.autocast(linear, "c=f16"))
    (grads,) = loss_vjp(jnp.float32(2**12))
    grads = jax.tree.map(lambda g: g / 2**12, grads)
    expected = jax.grad(loss_fn)(linear, x)
    assert grads.weight.dtype == jnp.float32
    np.testing.assert_allclose(loss, loss_fn(linear, x), rtol=2e-3)
    np.testing.assert_allclose(grads.weight, expected.weight, rtol=4e-3, atol=1e-3)


def test_methods_and_bound_methods(rng):
    class Model(eqx.Module):
        w: jax.Array

        @jmpx.autocast(output=None)
        def __call__(self, x):
            return x @ self.w

        def plain(self, x):
            return x @ self.w

    model = Model(normal(rng, 3, 3))
    x = normal(rng, 2, 3)
    assert model(x).dtype == jnp.bfloat16
    assert jmpx.autocast(model.plain, output=None)(x).dtype == jnp.bfloat16
    assert eqx.filter_grad(lambda m: m(x).astype(jnp.float32).sum())(model).w.dtype == jnp.float32


class Coder(eqx.Module):
    """Has attributes with names that a wrapper's own fields might have."""

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
    assert wrapped.size == 9 and wrapped.__wrapped__ is coder  # pyright: ignore[reportAttributeAccessIssue]
    assert getattr(wrapped, "missing", None) is None
    with pytest.raises(AttributeError, match="'Coder' object has no attribute 'missing'"):
        wrapped.missing  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_methods_run_under_autocast(rng):
    coder, x = Coder(normal(rng, 3, 3), "", 0), normal(rng, 2, 3)
    wrapped = jmpx.autocast(coder, output=None)
    assert wrapped(x).dtype == wrapped.encode(x, scale=2.0).dtype == BF16
    assert jax.vmap(wrapped.encode)(x).dtype == BF16
    assert wrapped._private(x).dtype == wrapped.double(x).dtype == F32
    expected = jmpx.autocast(coder.encode, output=None)(x)
    assert_same_bits(wrapped.encode(x), expected)
    with warns_once(__file__, "matched no operation"):
        jmpx.autocast(coder, "c=bf16; op.tahn: full").encode(x)


@pytest.mark.thorough
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
    norm.scale_init = None  # pyright: ignore[reportAttributeAccessIssue]  # older versions of Flax keep a function here that pickle refuses
    wrapped = jmpx.autocast(norm)
    new = make_copy(wrapped)
    assert type(new) is type(wrapped) and new.scale is not norm.scale
    assert_same_bits(new(x), wrapped(x))


def test_empty_shells_know_no_attributes():
    """`copy`, `pickle` and JAX make an object before it has any fields."""
    shell = object.__new__(jmpx.types.Autocast)
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
    assert isinstance(model.inner, jmpx.types.Autocast) and isinstance(model.inner, nnx.Module)
    assert model.inner.kernel is kernel and model.norm.__wrapped__ is norm  # pyright: ignore[reportAttributeAccessIssue]
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
    assert model.inner.kernel is kernel and model.norm.__wrapped__ is norm  # pyright: ignore[reportAttributeAccessIssue]
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
    wrapped.note = "text"  # pyright: ignore[reportAttributeAccessIssue]
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
