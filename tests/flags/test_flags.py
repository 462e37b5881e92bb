# Optax types states as pytrees of arrays, which have no fields.
# pyright: reportAttributeAccessIssue=false

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl import flags

import jmpx
import jmpx.flags


def define(*arguments, **options):
    values = flags.FlagValues()
    mp = jmpx.flags.define_mp_flags(flag_values=values, **options)
    values(["program", *arguments])
    return mp, values


def test_defaults():
    mp, _ = define()
    assert mp.policy == jmpx.get_policy("float32")
    assert mp.loss_scale() == jmpx.NoOpLossScale()
    assert mp.skip_nonfinite is True


@pytest.mark.parametrize(
    ("policy", "what"), [("c=bf16; Linear: full", "rules"), ("by=modules,c=bf16", "by")]
)
def test_one_policy_is_not_read_from_a_map_that_says_more(policy, what):
    mp, _ = define(f"--mp_policy={policy}")
    with pytest.raises(ValueError, match=f"whose {what} it would drop"):
        _ = mp.policy


@pytest.mark.parametrize(
    ("policy", "scale_type", "expected"),
    [
        ("f32", "auto", jmpx.NoOpLossScale()),
        ("bf16-mixed", "auto", jmpx.NoOpLossScale()),
        ("16-mixed", "auto", jmpx.DynamicLossScale(2.0**15)),
        ("p=f16,c=f32", "auto", jmpx.NoOpLossScale()),
        ("c=bf16; BatchNorm: full", "auto", jmpx.NoOpLossScale()),
        ("c=bf16; BatchNorm: f16", "auto", jmpx.DynamicLossScale(2.0**15)),
        ("16-mixed", "NoOp", jmpx.NoOpLossScale()),
        ("bf16-mixed", "Static", jmpx.StaticLossScale(2.0**15)),
        ("bf16-mixed", "dynamic", jmpx.DynamicLossScale(2.0**15)),
    ],
)
def test_loss_scale(policy, scale_type, expected):
    mp, _ = define(f"--mp_policy={policy}", f"--mp_scale_type={scale_type}")
    assert mp.policy_map == jmpx.get_policy_map(policy)
    assert mp.loss_scale() == expected


def test_every_flag_arrives():
    mp, _ = define(
        "--mp_policy=c=f16,o=f32",
        "--mp_scale_value=256",
        "--nomp_skip_nonfinite",
    )
    assert mp.loss_scale() == jmpx.DynamicLossScale(256.0)
    assert mp.skip_nonfinite is False
    mp, _ = define("--mp_scale_type=Static", "--mp_scale_value=0.5")
    assert mp.loss_scale() == jmpx.StaticLossScale(0.5)


def test_prefix_and_default_policy():
    values = flags.FlagValues()
    student = jmpx.flags.define_mp_flags("student", flag_values=values)
    teacher = jmpx.flags.define_mp_flags("teacher", default_policy="bf16", flag_values=values)
    values(["program", "--student_policy=f16"])
    assert student.policy == jmpx.get_policy("f16")
    assert teacher.policy == jmpx.get_policy("bf16")
    with pytest.raises(flags.DuplicateFlagError):
        jmpx.flags.define_mp_flags("student", flag_values=values)


def test_flags_survive_strings_and_flag_files(tmp_path):
    policy = "--mp_policy=c=f16,o=bf16; BatchNorm: full; */head/*: c=f32,o=f32"
    arguments = [policy, "--mp_scale_type=Static", "--mp_scale_value=0.1"]
    before, values = define(*arguments)
    path = tmp_path / "flags.txt"
    path.write_text(values.flags_into_string())
    after, _ = define(f"--flagfile={path}")
    assert after.policy_map == before.policy_map and len(after.policy_map.rules) == 2
    assert after.loss_scale() == before.loss_scale()
    # None is written in no way that reads back, so it is left out.
    values = flags.FlagValues()
    jmpx.flags.DEFINE_policy("p", None, "A policy.", flag_values=values)
    values(["program"])
    assert "--p" not in values.flags_into_string()


BAD = [
    ("--mp_policy=c=bf61", "Unknown dtype 'bf61' at position 2 .*did you mean 'bf16'"),
    ("--mp_policy=", "Empty rule at position 0"),
    ("--mp_policy=c=bf16; BatchNorm: bf61", "Unknown dtype 'bf61' at position 19"),
    ("--mp_scale_type=Sometimes", "one of <auto|NoOp|Static|Dynamic>"),
    ("--mp_scale_value=0", "Expected 'init' to be within 'min' and 'max', got 0"),
    ("--mp_scale_value=0.5", "Expected 'init' to be within 'min' and 'max', got 0.5"),
    ("--mp_scale_value=-1", "not a non-negative number"),
    ("--mp_scale_value=nan", "Expected the number of 'init', got 'nan'"),
    ("--mp_scale_value=1e39", "Expected 'init' to be a number between 0"),
    ("--mp_scale_value=many", "mp_scale_value"),
    ("--mp_max_skips=-1", "not an integer in the range"),
    ("--mp_max_skips=2147483648", "not an integer in the range"),
    ("--mp_max_skips=often", "mp_max_skips"),
]


@pytest.mark.parametrize(("argument", "message"), BAD)
def test_a_bad_value_is_absls_one_line_error(argument, message):
    with pytest.raises(flags.IllegalFlagValueError, match=message) as error:
        define(argument)
    assert "\n" not in str(error.value)
    assert argument.split("=")[0].removeprefix("--") in str(error.value)


def test_define_policy():
    values = flags.FlagValues()
    given = jmpx.get_policy("c=bf16,o=f32")
    holder = jmpx.flags.DEFINE_policy("p", given, "A policy.", flag_values=values)
    jmpx.flags.DEFINE_policy("q", None, "Another.", flag_values=values, required=True)
    with pytest.raises(flags.IllegalFlagValueError, match="q"):
        values(["program"])
    values(["program", "--q=half"])
    assert holder.value is given and holder.default is given
    assert values.q == jmpx.get_policy("half")
    text = values.get_help()
    assert "A policy." in text and "bf16-mixed" in text
    assert "default: 'params=float32,compute=bfloat16,output=float32'" in " ".join(text.split())
    with pytest.raises(flags.IllegalFlagValueError, match="f17"):
        jmpx.flags.DEFINE_policy("r", "f17", "Bad.", flag_values=values)


def test_define_policy_map():
    values = flags.FlagValues()
    given = jmpx.get_policy_map("c=bf16; BatchNorm: full")
    holder = jmpx.flags.DEFINE_policy_map("m", given, "A map.", flag_values=values)
    values(["program"])
    assert holder.value is given
    values(["program", "--m=bf16-mixed"])
    assert holder.value == jmpx.get_policy_map("bf16-mixed")
    assert "a policy map such as" in values.get_help()


def test_flags_belong_to_the_module_that_defines_them():
    values = flags.FlagValues()
    jmpx.flags.define_mp_flags(flag_values=values)
    owners = {name: values.find_module_defining_flag(name) for name in values}
    assert len(owners) == 6 and set(owners.values()) == {__name__}


def test_importing_registers_nothing():
    assert not [name for name in flags.FLAGS if name.startswith("mp_")]


def test_the_scale_of_the_flags_is_float32():
    mp, _ = define("--mp_policy=f16", "--mp_scale_value=1e10")
    assert mp.loss_scale().loss_scale.dtype == np.float32


# --mp_max_skips


@pytest.mark.parametrize(
    ("arguments", "limit"),
    [
        ([], 50),
        (["--mp_max_skips=7"], 7),
        (["--mp_max_skips=0"], None),
        (["--nomp_skip_nonfinite"], None),
        (["--nomp_skip_nonfinite", "--mp_max_skips=7"], None),
    ],
)
def test_how_many_steps_in_a_row_may_be_skipped(arguments, limit):
    _, values = define(*arguments)
    mp, _ = define(*values.flags_into_string().split())
    optimizer = jmpx.skip_nonfinite(optax.sgd(0.1))
    state, scaling = optimizer.init(jnp.ones(2)), jmpx.DynamicLossScale(2.0)
    mp.check_progress(state._replace(consecutive_skipped=jnp.int32(limit or 99)), scaling)
    if limit is None:
        mp.check_progress((), scaling)  # nothing counts, and nothing is refused
        return
    beyond = state._replace(consecutive_skipped=jnp.int32(limit + 1))
    message = rf"^Skipped {limit + 1} .*, more than max_consecutive={limit}, with .*init=2"
    with pytest.raises(FloatingPointError, match=message):
        mp.check_progress(beyond, scaling)
    with pytest.raises(FloatingPointError, match=r"infinities or NaN in grads\[0\]"):
        mp.check_progress(beyond, scaling, [jnp.array([1, jnp.nan])])
    with pytest.raises(TypeError, match="jmpx.skip_nonfinite"):
        mp.check_progress((), scaling)


def test_a_bad_limit_that_a_program_sets_is_refused():
    _, values = define()
    for bad in (None, -1, "often"):
        with pytest.raises(flags.IllegalFlagValueError):
            values.mp_max_skips = bad


def test_a_limit_has_the_prefix():
    values = flags.FlagValues()
    student = jmpx.flags.define_mp_flags("student", flag_values=values)
    values(["program", "--student_max_skips=1"])
    state = jmpx.skip_nonfinite(optax.sgd(0.1)).init(jnp.ones(2))
    state = state._replace(consecutive_skipped=jnp.int32(2))
    with pytest.raises(FloatingPointError, match="more than max_consecutive=1, with"):
        student.check_progress(state, jmpx.NoOpLossScale())
