"""Modules under autocast as parts of models: attributes, methods, copies, NNX parents, scopes."""

import copy
import pickle

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from helpers import BF16, F32, assert_same_bits, leniently, normal, warns_once
from helpers.autocast import assert_near, assert_ran
from helpers.jaxprs import FULL, LOW, dots
from helpers.nnx_net import Net

import jmpx


def test_creation_of_parameters(rng):
    x = normal(rng, 2, 3)
    assert dots(jmpx.autocast(nn.Dense(2).init), jax.random.key(0), x) == [LOW]
    with pytest.raises(jax.errors.UnexpectedTracerError):
        jax.jit(hk.transform(jmpx.autocast(lambda x: hk.Linear(2)(x))).init)(jax.random.key(0), x)
    inner = hk.transform(lambda x: jmpx.autocast(jnp.matmul)(x, hk.Linear(2)(x)))  # creates none
    assert inner.init(jax.random.key(0), normal(rng, 2, 2))["linear"]["w"].dtype == F32


def test_gradients_of_a_module_of_equinox_that_is_mapped(pair):
    x, _ = pair
    model = eqx.nn.Linear(4, 4, key=jax.random.key(0))

    def gradient(wrap):
        def loss_fn(model, x):
            remat = eqx.filter_checkpoint(lambda x: jnp.tanh(eqx.filter_vmap(model)(x)))
            return wrap(remat)(x).sum()

        return eqx.filter_jit(eqx.filter_grad(loss_fn))(model, x)

    assert_near(gradient(jmpx.autocast), gradient(lambda f: f))
    assert_ran(jax.vmap(jmpx.autocast(model)), x, dot_general="bfloat16")


def mlp(key=0):
    return eqx.nn.MLP(3, 2, 4, 2, key=jax.random.key(key))


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


def test_a_part_of_a_model_is_replaced_and_has_a_gradient(rng):
    x = normal(rng, 4, 3)
    model = eqx.tree_at(lambda m: m.layers[1], mlp(), replace_fn=jmpx.autocast)
    assert dots(jax.vmap(model), x) == [FULL, LOW, FULL]
    slope = eqx.filter_jit(eqx.filter_grad(lambda m: jnp.mean(jax.vmap(m)(x) ** 2)))
    grads = slope(model)
    assert isinstance(grads.layers[1], jmpx.types.Autocast)
    assert jnp.abs(grads.layers[1].weight).max() > 0 and grads.layers[1].weight.dtype == F32
    weight = normal(rng, 4, 4)
    new = eqx.tree_at(lambda m: m.layers[1].weight, model, weight)
    assert new.layers[1].weight is weight and model.layers[1].weight is not weight
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(new)]
    assert ".layers[1]._jmpx_fn.weight" in paths
    assert jax.tree.structure(new) == jax.tree.structure(model)
    assert len(jax.tree.leaves(new, is_leaf=lambda m: isinstance(m, eqx.nn.Linear))) == 5
    other = eqx.tree_at(lambda m: m.layers[1], mlp(), jmpx.autocast(mlp().layers[1], "c=f16"))
    assert jax.tree.structure(other) != jax.tree.structure(model)


def test_a_decorated_method(rng):
    class Decorated(eqx.Module):
        w: jax.Array

        @jmpx.autocast(output=None)
        def __call__(self, x):
            return x @ self.w

    model, x = Decorated(normal(rng, 3, 3)), normal(rng, 2, 3)
    assert model(x).dtype == BF16
    assert eqx.filter_grad(lambda m: m(x).astype(F32).sum())(model).w.dtype == F32


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


@pytest.mark.parametrize(
    "make_copy", [lambda m: pickle.loads(pickle.dumps(m)), copy.deepcopy, copy.copy]
)
@leniently
def test_copies(rng, make_copy):
    wrapped = jmpx.autocast(eqx.nn.Linear(3, 2, key=jax.random.key(0)), "c=bf16; op.tanh: full")
    new = make_copy(wrapped)
    assert_same_bits(new, wrapped)
    assert new.weight.shape == (2, 3) and new is not wrapped
    norm, x = nnx.RMSNorm(3, rngs=nnx.Rngs(0)), normal(rng, 2, 3)
    norm.scale_init = None  # pyright: ignore[reportAttributeAccessIssue]  # older versions of Flax keep a function here that pickle refuses
    wrapped = jmpx.autocast(norm)
    new = make_copy(wrapped)
    assert type(new) is type(wrapped)
    assert (new.scale is norm.scale) == (make_copy is copy.copy)
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


@pytest.mark.thorough
@leniently
def test_it_takes_the_place_of_an_nnx_module(rng):
    model, x = Net(nnx.Rngs(0)), normal(rng, 6, 3)
    kernel, norm = model.inner.kernel, model.norm
    for name in ("inner", "norm"):
        setattr(model, name, jmpx.autocast(getattr(model, name)))
    assert isinstance(model.inner, jmpx.types.Autocast) and isinstance(model.inner, nnx.Module)
    assert model.inner.kernel is kernel and model.norm.__wrapped__ is norm  # pyright: ignore[reportAttributeAccessIssue]
    paths = {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    assert paths == {
        *("inner/_jmpx_fn/kernel", "inner/_jmpx_fn/bias", "head/kernel", "head/bias"),
        *("norm/_jmpx_fn/scale", "norm/_jmpx_fn/bias"),
    }
    graph, state = nnx.split(model)
    assert_same_bits(nnx.clone(model)(x), nnx.merge(graph, state)(x))
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
    assert "bf16[6,8] = dot_general" in text and "f32[6,2] = dot_general" in text


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


class Model(nnx.Module):
    def __init__(self, w):
        self.w = nnx.Param(w)
        self.count = nnx.Variable(jnp.array(0))

    def encode(self, x):
        self.count[...] += 1
        return x @ self.w[...]

    def __call__(self, x):
        return self.encode(x)


class NoPytree(Model, pytree=False):
    pass


@leniently
@pytest.mark.parametrize("cls", [Model, NoPytree])
def test_methods_of_an_nnx_module(rng, cls):
    model, x = cls(normal(rng, 3, 3)), normal(rng, 2, 3)
    wrapped = jmpx.autocast(model, output=None)
    assert wrapped.encode(x).dtype == wrapped(x).dtype == BF16
    assert int(model.count[...]) == 2
    grad_fn = jmpx.grad(lambda m, x: m(x).sum(), jmpx.NoOpLossScale(), policy="c=f16")
    assert grad_fn(model, x)[2]["w"][...].dtype == F32 and int(model.count[...]) == 3
