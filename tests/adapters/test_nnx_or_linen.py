"""Which of Flax's two libraries a policy map is for."""

import flax.linen as nn
import jax
import pytest
from flax import nnx
from helpers import BF16, normal, run_python, warns_once

import jmpx
import jmpx.flax

pytestmark = pytest.mark.usefixtures("standard_promotion")


def test_policies_around_an_nnx_model_say_so_once(rng):
    model, x = nnx.Linear(3, 2, rngs=nnx.Rngs(0)), normal(rng, 4, 3)
    with warns_once(__file__, "No Linen module ran .*apply_policy"):
        with jmpx.flax.policies("c=bf16; Dense: c=bf16"):
            model(x)
    with jmpx.flax.policies("c=bf16; Dense: c=bf16"):
        model(x)


@pytest.mark.filterwarnings("error:No Linen module ran")
def test_policies_of_a_linen_program_say_nothing(rng):
    model, x = nnx.Linear(3, 2, rngs=nnx.Rngs(0)), normal(rng, 4, 3)  # it exists, that is all
    params = nn.Dense(2).init(jax.random.key(0), x)
    apply = jax.jit(nn.Dense(2).apply)
    for _ in range(3):  # the second one runs compiled
        with jmpx.flax.policies("c=bf16; Dense: c=f32,o=bf16"):
            assert apply(params, x).dtype == BF16
    with jmpx.flax.policies("c=f16; Dense: c=f32,o=f16"), jmpx.flax.policies("c=f16"):
        apply(params, x)  # the outer one casts nothing, but a Linen module ran
    with pytest.raises(KeyError), jmpx.flax.policies("c=f16; Dense: c=f32,o=bf16"):
        raise KeyError
    assert model is not None


@pytest.mark.thorough
def test_without_flax_nothing_is_imported():
    program = """
import sys, jax.numpy as jnp, jmpx
jmpx.autocast(lambda x: x @ x)(jnp.eye(2))
jmpx.filter_grad(lambda x: x.sum(), jmpx.NoOpLossScale(), policy="c=bf16")(jnp.ones(2))
jmpx.mpx.cast_function(lambda x: x, "bf16")(jnp.ones(2))
assert not any(name.partition(".")[0] == "flax" for name in sys.modules)
"""
    result = run_python("-c", program)
    assert result.returncode == 0, result.stderr
