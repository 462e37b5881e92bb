"""What docs/checkpoints.md promises of libraries holds."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import serialization
from helpers import assert_same_bits, normal

import jmpx


def as_half(tree):
    return jmpx.cast_tree(tree, jnp.bfloat16)


@pytest.mark.filterwarnings("ignore")  # Orbax's own
def test_what_orbax_casts_without_a_word_is_refused(tmp_path, rng):
    state = {"w": normal(rng, 8)}
    description = jmpx.inspect.describe_precision(state)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "single", state)
        checkpointer.save(tmp_path / "half", as_half(state))
        checkpointer.wait_until_finished()
        narrowed = checkpointer.restore(tmp_path / "single", as_half(state))
        widened = checkpointer.restore(tmp_path / "half", state)
    assert narrowed["w"].dtype == jnp.bfloat16 and widened["w"].dtype == jnp.float32
    with pytest.raises(ValueError, match="w in bfloat16 instead of float32"):
        jmpx.inspect.check_restored(narrowed, description)
    with pytest.raises(ValueError, match="w in float32 instead of bfloat16"):
        jmpx.inspect.check_restored(widened, jmpx.inspect.describe_precision(as_half(state)))
    with pytest.raises(ValueError, match="values of bfloat16 alone"):  # saved in 16 bits
        jmpx.inspect.check_restored(widened, description)


def test_equinox_refuses_another_dtype_itself(tmp_path, rng):
    state = {"w": normal(rng, 8)}
    eqx.tree_serialise_leaves(tmp_path / "state.eqx", state)
    with pytest.raises(RuntimeError, match="changed dtype"):
        eqx.tree_deserialise_leaves(tmp_path / "state.eqx", as_half(state))


def test_flax_gives_the_dtype_that_was_saved(rng):
    state = {"w": normal(rng, 8)}
    restored = serialization.from_bytes(as_half(state), serialization.to_bytes(state))
    assert_same_bits(restored, jax.tree.map(np.asarray, state))
    jmpx.inspect.check_restored(restored, jmpx.inspect.describe_precision(state))


def test_npz_forgets_bfloat16_and_the_description_brings_it_back(tmp_path, rng):
    state = as_half({"w": normal(rng, 8), "scalar": jnp.float32(0.1)})
    description = jmpx.inspect.describe_precision(state)
    np.savez(tmp_path / "state.npz", **state)
    with np.load(tmp_path / "state.npz") as saved:
        arrays = dict(saved)
    with pytest.raises(ValueError, match=r"2 of 2 .* scalar in \|V2 instead of bfloat16"):
        jmpx.inspect.check_restored(arrays, description)
    restored = {path: arrays[path].view(dtype) for path, dtype in description["dtypes"].items()}
    jmpx.inspect.check_restored(restored, description)
    assert_same_bits(restored, state)
