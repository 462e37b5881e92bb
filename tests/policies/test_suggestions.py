"""Rules of names that do not exist, and what is suggested instead."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers.adapters import ADAPTERS, X, every_adapter, warnings_of

import jmpx
import jmpx.equinox
import jmpx.flax
import jmpx.haiku


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


def test_near_operations():
    near = {
        "expp": "; did you mean 'op.exp'?",  # that ran
        "tanhh": "; did you mean 'op.tanh'?",  # that JAX has
        "exp2": "; did you mean 'op.exp'?",  # another that ran
        "cosh": ".",  # right, and did not run
        "while": ".",
        "qqqq": ".",
        "softmax": "'op.dot_general' and 'op.exp'.",
        "matmul": "'op.dot_general' and 'op.exp'.",
    }
    for name, end in near.items():
        (warning,) = warnings_of(jmpx.autocast(jnp.exp, f"c=bf16; op.{name}: full"), X)
        assert "matched no operation" in warning and warning.endswith(end), warning


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
