"""Rules of names that do not exist, and what is suggested instead."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.adapters import ADAPTERS, X, every_adapter, shape_of, warnings_of

import jmpx
import jmpx.equinox
import jmpx.flax
import jmpx.haiku
from jmpx._autocast.rules import overridable, registered
from jmpx._autocast.unused import INSTEAD, near_operation


@every_adapter
def test_rules_for_operations_are_autocasts(adapter):
    run = ADAPTERS[adapter]
    (warning,) = warnings_of(run, "c=bf16; op.exp: full; *: c=f32")
    assert "The rule 'op.exp: compute=float32'" in warning
    assert (
        "matched no module, as rules for operations hold by=operations and in jmpx.autocast alone"
        in warning
    )
    assert "or 'op.exp?' where the map is for modules, too." in warning
    assert warnings_of(run, "c=bf16; op.exp?: full; *: c=f32") == []
    assert len(warnings_of(run, "c=bf16; op.exp: full; op.tanh: full")) == 2


@pytest.mark.parametrize("policies", [jmpx.haiku.policies, jmpx.flax.policies])
def test_they_are_where_no_module_ran_too(policies):
    with pytest.warns(UserWarning, match="'op.exp: compute=float32'") as caught:
        with policies("c=bf16; op.exp: full; Linear: full"):
            pass
    (warning,) = [w for w in caught if "The rule" in str(w.message)]  # of Linear nothing is known
    assert warning.filename == __file__
    with policies("c=bf16; op.exp?: full"):
        pass


FUNCTIONS = {
    "matmul": lambda x: jnp.matmul(x, x),
    "dot": lambda x: jnp.dot(x, x),
    "einsum": lambda x: jnp.einsum("ij,jk", x, x),
    "tensordot": lambda x: jnp.tensordot(x, x, 1),
    "inner": lambda x: jnp.inner(x, x),
    "vdot": lambda x: jnp.vdot(x, x),
    "convolve": lambda x: jnp.convolve(x[0], x[1]),
    "dot_product_attention": lambda x: jax.nn.dot_product_attention(*[x[None, :, None]] * 3),
    "softmax": jax.nn.softmax,
    "log_softmax": jax.nn.log_softmax,
    "logsumexp": jax.nn.logsumexp,
    "softplus": jax.nn.softplus,
    "logaddexp": lambda x: jnp.logaddexp(x, x),
    "elu": jax.nn.elu,
    "celu": jax.nn.celu,
    "gelu": lambda x: jax.nn.gelu(x) + jax.nn.gelu(x, approximate=False),
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "clip": lambda x: jnp.clip(x, 0.0, 1.0),
    "maximum": lambda x: jnp.maximum(x, 2 * x),
    "sum": jnp.sum,
    "mean": jnp.mean,
    "average": jnp.average,
    "var": jnp.var,
    "std": jnp.std,
    "norm": jnp.linalg.norm,
    "prod": jnp.prod,
    "amax": jnp.max,
    "where": lambda x: jnp.where(x > 0, x, -x),
    "take": lambda x: jnp.take(x, jnp.arange(2), axis=0),
    "segment_sum": lambda x: jax.ops.segment_sum(x, jnp.arange(2), num_segments=2),
    "divide": lambda x: x / (x + 1),
    "power": lambda x: jnp.power(x, x),
    "log10": jnp.log10,
    "arcsin": jnp.arcsin,
    "arctan2": lambda x: jnp.arctan2(x, x),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_that_is_no_operation_names_what_to_write(name):
    function, x = FUNCTIONS[name], np.full((2, 2), 0.5, np.float32)
    for call in (function, jax.jit(function)):
        (warning,) = warnings_of(shape_of, jmpx.autocast(call, f"c=bf16; op.{name}: full"), x)
        assert f"matched no operation, as '{name}' is none of JAX's primitives: write" in warning
    advice = re.findall(r"'(op\.\w+)'", warning)
    assert advice and f"op.{name}" not in advice
    for selector in advice:  # whoever does as told hears no more of it
        text = f"c=bf16; {selector}: full"
        assert warnings_of(shape_of, jmpx.autocast(function, text), x) == []


def test_what_is_named_instead_is_an_operation_and_its_name_none():
    assert not INSTEAD.keys() & set(registered())
    assert {name for names in INSTEAD.values() for name in names} <= set(overridable())
    assert near_operation("op.SoftMax", ()).endswith("write 'op.exp' and 'op.reduce_sum'.")


@pytest.mark.parametrize("name", sorted({*registered(), *INSTEAD, "matmull", "exq", "jit", "foo"}))
def test_no_operation_suggests_itself(name):
    for met in ((), overridable(), INSTEAD, ("matmul", "softmax", "foo", "jit", name)):
        assert f"'op.{name}'" not in near_operation(f"op.{name}", met)


def test_near_operations():
    near = {
        "expp": "; did you mean 'op.exp'?",  # that ran
        "tanhh": "; did you mean 'op.tanh'?",  # that JAX has
        "exp2": "; did you mean 'op.exp'?",  # another that ran
        "cosh": ".",  # right, and did not run
        "while": ".",
        "qqqq": ".",
    }
    for name, end in near.items():
        (warning,) = warnings_of(jmpx.autocast(jnp.exp, f"c=bf16; op.{name}: full"), X)
        assert warning.endswith(f"matched no operation{end}"), warning


# The last name of a path, as a class.


@pytest.mark.parametrize(
    ("adapter", "selector"),
    [
        ("haiku", "linear_1"),
        ("haiku", "mlp.linear_1"),
        ("haiku", "linaer_1"),
        ("linen", "layers_1"),
        ("nnx", "Linera"),
        ("equinox", "Linera"),
    ],
)
def test_the_name_of_a_module_suggests_its_path(adapter, selector):
    run = ADAPTERS[adapter]
    (warning,) = warnings_of(run, f"c=bf16; {selector}: full")
    (meant,) = re.findall("matched no class; did you mean '(.*)'", warning)
    assert meant == {"haiku": "*/linear_1", "linen": "*/layers_1"}.get(adapter, "Linear")
    assert warnings_of(run, f"c=bf16; {meant}: full") == []


def test_attributes_suggest_their_path_in_views():
    class Net(nnx.Module):
        def __init__(self):
            self.decoder = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.decoder(x)

    class Module(eqx.Module):
        decoder: eqx.nn.Linear

        def __call__(self, x):
            return self.decoder(x)

    models = [
        (jmpx.flax.with_policies, Net()),
        (jmpx.equinox.with_policies, Module(eqx.nn.Linear(3, 2, key=jax.random.key(0)))),
    ]
    for with_policies, model in models:
        (warning,) = warnings_of(with_policies, model, "c=bf16; decoder: full")
        assert warning.endswith("matched no class; did you mean '*/decoder'?")
        assert warnings_of(with_policies, model, "c=bf16; */decoder: full") == []
