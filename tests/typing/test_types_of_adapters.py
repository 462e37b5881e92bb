"""Types of the adapters and flags. They are run here, and checked by pyright."""

# An ignored error must be there: it is what this file asserts.
# pyright: reportUnnecessaryTypeIgnoreComment=true

from contextlib import AbstractContextManager
from typing import assert_type

import equinox as eqx
import jax
import numpy as np
from absl import flags
from flax import nnx
from typed_models import ones

import jmpx
import jmpx.equinox
import jmpx.flags
import jmpx.flax
import jmpx.haiku


class Model(eqx.Module):
    w: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.w


class Layer(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(ones(2, 3))


def test_contexts() -> None:
    for given in ("c=bf16", jmpx.get_policy("bf16"), jmpx.get_policy_map("bf16")):
        haiku: AbstractContextManager[None] = jmpx.haiku.policies(given)
        with haiku:
            pass
        flax: AbstractContextManager[None] = jmpx.flax.policies(given)
        with flax:
            pass


def test_views_are_models() -> None:
    model = Model(ones(2, 3))
    view = assert_type(jmpx.equinox.with_policies(model, "c=bf16"), Model)
    assert_type(view(ones(4, 2)), jax.Array)
    assert_type(jmpx.equinox.with_policies(model), Model)
    assert isinstance(assert_type(jmpx.flax.with_policies(Layer(), "c=bf16"), Layer), Layer)


def test_an_autocast_model_is_called_as_the_model_is() -> None:
    wrapped = jmpx.autocast(Model(ones(2, 3)))
    assert_type(wrapped(ones(4, 2)), jax.Array)


def test_flags() -> None:
    values = flags.FlagValues()
    policy = jmpx.flags.DEFINE_policy("policy", "bf16", "A policy.", values)
    policy_map = jmpx.flags.DEFINE_policy_map("map", jmpx.get_policy("f32"), "A map.", values)
    optional = jmpx.flags.DEFINE_policy("optional", None, "A policy.", values)
    optional_map = jmpx.flags.DEFINE_policy_map("optional_map", None, "A map.", values)
    needed = jmpx.flags.DEFINE_policy("needed", None, "A policy.", values, required=True)
    needed_map = jmpx.flags.DEFINE_policy_map("needed_map", None, "A.", values, required=True)
    of_dtype = jmpx.flags.DEFINE_policy("of_dtype", np.dtype("float16"), "A policy.", values)
    scale = jmpx.flags.DEFINE_loss_scale("scale", "static=8", "A scale.", values)
    needed_scale = jmpx.flags.DEFINE_loss_scale("needed_scale", None, "A.", values, required=True)
    mp = jmpx.flags.define_mp_flags(default_policy="16-mixed", flag_values=values)
    needed_flags = ["--needed=f16", "--needed_map=c=bf16; Linear: full", "--needed_scale=dynamic"]
    values(["program", *needed_flags])
    assert_type(of_dtype, flags.FlagHolder[jmpx.Policy])
    assert_type(scale, flags.FlagHolder[jmpx.LossScale])
    assert_type(needed_scale.value, jmpx.LossScale)
    assert_type(policy, flags.FlagHolder[jmpx.Policy])
    assert_type(policy.value, jmpx.Policy)
    assert_type(policy_map.value, jmpx.PolicyMap)
    assert_type(needed.value, jmpx.Policy)
    assert_type(needed_map.value, jmpx.PolicyMap)
    assert_type(mp, jmpx.flags.MixedPrecisionFlags)
    assert_type(mp.policy, jmpx.Policy)
    assert_type(mp.policy_map, jmpx.PolicyMap)
    assert_type(mp.skip_nonfinite, bool)
    assert_type(mp.loss_scale(), jmpx.LossScale)
    assert_type(mp.mixed_precision(), jmpx.MixedPrecision)
    values.optional = "f16"
    assert optional.value == needed.value and optional_map.value is None
