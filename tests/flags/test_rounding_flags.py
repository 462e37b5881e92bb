"""The flag `--mp_params_rounding`, and the optimizer that it makes."""

# Optax types states as pytrees of arrays, which have no fields.
# pyright: reportAttributeAccessIssue=false

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl import flags
from helpers import dtypes, lenient

import jmpx
import jmpx.flags


def define(*arguments, **options):
    values = flags.FlagValues()
    mp = jmpx.flags.define_mp_flags(flag_values=values, **options)
    values(["program", *arguments])
    return mp, values


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "nearest"),
        (["--mp_policy=bf16-true"], "nearest"),
        (["--mp_params_rounding=nearest"], "nearest"),
        (["--mp_policy=bf16-true", "--mp_params_rounding=stochastic"], "stochastic"),
        (["--mp_policy=p=f16,c=f32", "--mp_params_rounding=Stochastic"], "stochastic"),
        (["--mp_policy=c=bf16; */head: params=bf16", "--mp_params_rounding=split"], "split"),
        (["--mp_params_rounding=split", "--mp_policy=p=bf16; */head: full"], "split"),
    ],
)
def test_values(arguments, expected):
    mp, values = define(*arguments)
    assert mp.params_rounding == expected
    again, _ = define(*values.flags_into_string().splitlines())
    assert again.params_rounding == expected and again.policy_map == mp.policy_map


@pytest.mark.parametrize(
    ("policy", "rounding", "message"),
    [
        ("f32", "split", "rounds parameters of 16 bits, .* write params=bfloat16 in --mp_policy"),
        ("c=bf16", "stochastic", "rounds parameters of 16 bits, .* write params=bfloat16"),
        ("c=bf16; */head: c=f32", "stochastic", "of which --mp_policy has none"),
        (
            "f16",
            "split",
            "=split keeps the low bits of bfloat16 .* --mp_params_rounding=stochastic",
        ),
        ("bf16; */head: p=f16", "split", "keeps the low bits of bfloat16 .* has float16 ones"),
        ("bf16", "up", "one of <nearest|stochastic|split>"),
    ],
)
def test_what_contradicts_the_policy_is_absls_one_line_error(policy, rounding, message):
    with pytest.raises(flags.IllegalFlagValueError, match=message) as error:
        define(f"--mp_policy={policy}", f"--mp_params_rounding={rounding}")
    assert "\n" not in str(error.value)


def test_what_a_program_sets_is_checked():
    mp, values = define("--mp_policy=bf16-true")
    values.mp_params_rounding = "SPLIT"
    assert mp.params_rounding == "split"
    for name, bad in ("params_rounding", None), ("params_rounding", "up"), ("policy", "c=bf16"):
        with pytest.raises(flags.IllegalFlagValueError):
            setattr(values, f"mp_{name}", bad)


def test_it_has_the_prefix():
    values = flags.FlagValues()
    student = jmpx.flags.define_mp_flags("student", default_policy="bf16", flag_values=values)
    values(["program", "--student_params_rounding=stochastic"])
    assert student.params_rounding == "stochastic"
    message = "--student_params_rounding=stochastic rounds .* in --student_policy"
    with pytest.raises(flags.IllegalFlagValueError, match=message):
        values["student_policy"].value = None
        values(["program", "--student_policy=f32"])


def test_nearest_leaves_the_optimizer_alone():
    mp, _ = define("--mp_policy=bf16-true")
    optimizer = optax.sgd(0.1)
    assert mp.low_precision_params(optimizer) is optimizer


@pytest.mark.parametrize("rounding", ["stochastic", "split"])
def test_others_wrap_it(rounding, rng):
    """The nearest bfloat16 of 1 + 2**-10 is 1, so that plain SGD would stay there."""
    mp, _ = define("--mp_policy=bf16-true", f"--mp_params_rounding={rounding}")
    options = {"seed": int(rng.integers(99)), "state_dtype": "bfloat16"}
    inner = optax.sgd(2.0**-10, momentum=0.0)
    optimizer = jmpx.skip_nonfinite(mp.low_precision_params(lenient(inner), **options))
    wide = {"w": jnp.ones(100)}
    state, (params, _) = optimizer.init(wide), jmpx.optim.split_master(wide)
    assert set(dtypes(state.inner_state.inner_state)) == {"bfloat16", "int32"}  # no float32
    for _ in range(8):
        grads = {"w": jnp.full(100, -1.0)}
        params, state = jmpx.optimizer_update(params, optimizer, state, grads, True)
    assert params["w"].dtype == jnp.bfloat16
    moved = np.unique(np.asarray(params["w"], np.float32))
    assert moved.tolist() == [1 + 2.0**-7] if rounding == "split" else len(moved) > 1
    with pytest.raises(TypeError, match="rounding"):
        mp.low_precision_params(inner, rounding="split")
