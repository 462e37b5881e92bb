"""Flax is imported by those alone that use it."""

import pytest
from helpers import run_python


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
