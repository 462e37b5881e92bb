"""Flags of policies: parsed, set by programs, saved and restored, defaults of the environment."""

# Optax types states as pytrees of arrays, which have no fields.
# pyright: reportAttributeAccessIssue=false

import copy
import io
import itertools

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl import flags
from absl.testing import flagsaver

import jmpx
import jmpx.flags

Dynamic, Static, NoOp = jmpx.DynamicLossScale, jmpx.StaticLossScale, jmpx.NoOpLossScale
HALF, MIXED = jmpx.get_policy("c=f16"), jmpx.get_policy("16-mixed")


def test_defaults(define):
    mp, values = define()
    assert mp.policy == jmpx.get_policy("float32")
    assert mp.loss_scale() == NoOp()
    assert mp.skip_nonfinite is True
    assert not [name for name in flags.FLAGS if name.startswith("mp_")]  # importing defines none
    owners = {name: values.find_module_defining_flag(name) for name in values}
    assert len(owners) == 6 and set(owners.values()) == {"conftest"}  # which calls


def test_prefix_and_default_policy():
    values = flags.FlagValues()
    student = jmpx.flags.define_mp_flags("student", flag_values=values)
    dtype = np.dtype("bfloat16")
    teacher = jmpx.flags.define_mp_flags("teacher", default_policy=dtype, flag_values=values)
    values(["program", "--student_policy=f16", "--student_max_skips=1"])
    assert student.policy == jmpx.get_policy("f16")
    assert teacher.policy == jmpx.get_policy("bf16")
    state = jmpx.skip_nonfinite(optax.sgd(0.1)).init(jnp.ones(2))
    state = state._replace(consecutive_skipped=jnp.int32(2))
    with pytest.raises(FloatingPointError, match="more than max_consecutive=1, with"):
        student.check_progress(state, jmpx.NoOpLossScale())
    with pytest.raises(flags.DuplicateFlagError):
        jmpx.flags.define_mp_flags("student", flag_values=values)


# Values that programs set


@pytest.mark.parametrize("given", [" C = fp16 ;", HALF, jmpx.get_policy_map("c=f16")], ids=str)
def test_a_policy_that_is_set_is_parsed(define, given, saved):
    mp, values = define()
    values.mp_policy = given
    assert mp.policy == HALF and mp.policy_map == jmpx.PolicyMap(HALF)
    assert values.mp_policy == values["mp_policy"].value == mp.policy_map
    assert mp.loss_scale() == Dynamic(2.0**15)
    values.mp_policy = "bf16"
    assert mp.policy == jmpx.get_policy("bf16") and mp.loss_scale() == NoOp()
    with flagsaver.flagsaver(saved_policy=given, saved_scale_value="64"):
        assert saved.policy == HALF and saved.loss_scale() == Dynamic(64.0)
        with flagsaver.flagsaver(saved_policy="c=f32; BatchNorm: f16"):
            assert saved.policy_map.rules and saved.loss_scale() == Dynamic(64.0)
        assert saved.policy == HALF
    assert saved.policy == jmpx.get_policy("bf16-mixed") and saved.loss_scale() == NoOp()


def test_flagsaver_in_its_other_forms(saved):
    before = jmpx.get_policy("bf16-mixed")

    @flagsaver.flagsaver(saved_policy="16-mixed")
    def test():
        return saved.policy

    assert test() == MIXED and saved.policy == before
    with flagsaver.as_parsed(saved_policy="c=f16;"):
        assert saved.policy == HALF and flags.FLAGS["saved_policy"].present
    assert saved.policy == before and not flags.FLAGS["saved_policy"].present
    with pytest.raises(RuntimeError), flagsaver.flagsaver():
        flags.FLAGS.saved_policy = "f16"
        raise RuntimeError
    assert saved.policy == before and flags.FLAGS["saved_policy"].using_default_value


BAD = [
    ("policy", "c=bf61", "Unknown dtype 'bf61' at position 2 of policy"),
    ("policy", "", "Empty policy at position 0"),
    ("policy", None, "must have a value"),
    ("loss_scale", "", "Missing kind at position 0"),
    ("loss_scale", "dynamic,init=1+1", "got '1+1' at position 13"),
    ("loss_scale", "auto, max=1, min=2", "max_loss_scale to be at least min"),  # also if none
    ("scale_type", "sometimes", "one of <auto|NoOp|Static|Dynamic>"),
    ("scale_type", None, "must have a value"),
    ("scale_value", "-1", "not a non-negative number"),
    ("scale_value", "1e39", "Expected 'init' to be a number between 0"),
    ("skip_nonfinite", "perhaps", "skip_nonfinite=perhaps"),
    ("max_skips", None, "must have a value"),
    ("max_skips", "2147483648", "not an integer in the range"),
]


@pytest.mark.parametrize(("name", "given", "message"), BAD)
def test_a_bad_value_is_one_sentence_and_changes_nothing(define, saved, name, given, message):
    def refused(act):
        with pytest.raises(flags.IllegalFlagValueError) as error:
            act()
        assert message in str(error.value) and "\n" not in str(error.value)

    if isinstance(given, str):
        refused(lambda: define(f"--mp_{name}={given}"))
    name = f"saved_{name}"
    before = flags.FLAGS.flag_values_dict()
    override = {"saved_policy": "c=f16", name: given}
    refused(flagsaver.flagsaver(**override).__enter__)
    assert flags.FLAGS.flag_values_dict() == before
    with flagsaver.flagsaver():  # absl 2.0 keeps what a validator refuses, 2.5 does not
        refused(lambda: setattr(flags.FLAGS, name, given))


def test_every_flag_parses_what_is_set(define):
    mp, values = define("--mp_policy=f16")
    values.mp_scale_type = "static"
    assert values.mp_scale_type == "Static" and mp.loss_scale() == Static(2.0**15)
    values.mp_scale_type = "noop"
    assert values["mp_scale_type"].value == "NoOp" and mp.loss_scale() == NoOp()
    values.mp_scale_value = "256"
    assert values["mp_scale_value"].value == 256.0
    for given, expected in (("false", False), (1, True)):
        values.mp_skip_nonfinite = given
        assert mp.skip_nonfinite is values["mp_skip_nonfinite"].value is expected


def test_flags_survive_strings_flag_files_and_copies(define, tmp_path):
    mp, values = define("--nomp_skip_nonfinite", "--mp_scale_type=Static", "--mp_scale_value=0.1")
    values.mp_policy = "c=f16,o=f32; BatchNorm?: full; */head/*: c=f32;"
    path = tmp_path / "flags.txt"
    path.write_text(values.flags_into_string())
    again, _ = define(f"--flagfile={path}")
    assert again.policy_map == mp.policy_map and again.policy_map.rules[0].optional
    assert again.skip_nonfinite is False and again.loss_scale() == mp.loss_scale() == Static(0.1)
    other = copy.deepcopy(values)
    other.mp_policy = "bf16"
    assert other.mp_policy == jmpx.get_policy_map("bf16")
    assert values.mp_policy == mp.policy_map == again.policy_map
    values.unparse_flags()
    values(["program"])
    assert mp.policy == jmpx.get_policy("f32")
    page = io.StringIO()
    other.write_help_in_xml_format(page)
    assert "<current>params=bfloat16,compute=bfloat16</current>" in page.getvalue()


def test_defaults_aliases_and_validators_see_the_parsed_value(define):
    mp, values = define()
    values.set_default("mp_policy", "16-mixed")
    assert mp.policy == MIXED
    flags.DEFINE_alias("precision", "mp_policy", flag_values=values)
    values.precision = "c=f16"
    assert mp.policy == HALF and values.precision == mp.policy_map
    seen = []
    flags.register_validator("mp_policy", lambda v: seen.append(v) or True, flag_values=values)
    values.mp_policy = "bf16; Linear: full"
    assert seen == [jmpx.get_policy_map("bf16; Linear: full")]


# Single flags


DEFINES = {
    "policy": ("c=bf16,o=f32", "bf16-mixed"),
    "policy_map": ("c=bf16; BatchNorm: full", "a policy map such as"),
    "loss_scale": ("dynamic,period=3", "a loss scale such as"),
}


@pytest.mark.parametrize("kind", DEFINES)
def test_a_single_flag(kind):
    define_it, read = getattr(jmpx.flags, f"DEFINE_{kind}"), getattr(jmpx, f"get_{kind}")
    text, help = DEFINES[kind]
    values, other = flags.FlagValues(), "none" if kind == "loss_scale" else "f16"
    holder = define_it("p", read(text), "A flag.", values)
    needed = define_it("r", None, "Needed.", values, required=True)
    maybe = define_it("m", None, "Maybe.", values, module_name="there", short_name="n")
    written = define_it("w", text, "Written.", values)
    with pytest.raises(flags.IllegalFlagValueError, match="r"):
        values(["program"])
    values(["program", f"--r={other};"])
    assert holder.value == holder.default == written.value == read(text)
    assert needed.value == read(other) and maybe.value is None
    assert "--m" not in values.flags_into_string()  # None is written in no way that reads back
    values(["program", "--r=" + other, f"-n={text}"])
    assert maybe.value == read(text) and f"--m={read(text)}\n" in values.flags_into_string()
    assert "m" in [flag.name for flag in values.flags_by_module_dict()["there"]]
    assert values.find_module_defining_flag("p") == __name__
    shown = " ".join(values.get_help().split())
    assert "A flag." in shown and help in shown and f"default: '{read(text)}'" in shown
    values.p = other
    assert holder.value == read(other)
    values.m = None  # none was asked for
    assert maybe.value is None
    for bad in ("f17", 8, *(["auto"] if kind == "loss_scale" else [])):
        with pytest.raises(flags.IllegalFlagValueError):
            define_it("q", bad, "Bad.", values)
        with pytest.raises(flags.IllegalFlagValueError):
            values.p = bad
    assert holder.value == read(other) and "q" not in values


def test_a_flag_of_a_policy_takes_no_rules():
    values = flags.FlagValues()
    policy = jmpx.flags.DEFINE_policy("p", np.dtype("bfloat16"), "A policy.", values)
    values(["program"])
    for given in ("c=f16; Linear: full", jmpx.get_policy_map("c=f16; Linear: full")):
        with pytest.raises(flags.IllegalFlagValueError, match="a policy has no rules"):
            values.p = given
    with pytest.raises(flags.IllegalFlagValueError, match="--p=c=f16; Linear: full: Unexpected"):
        values(["program", "--p=c=f16; Linear: full"])
    with pytest.raises(flags.IllegalFlagValueError, match="a policy has no rules"):
        jmpx.flags.DEFINE_policy("q", "f16; Linear: full", "Bad.", values)
    assert policy.value == jmpx.get_policy("bf16") and "q" not in values


# --mp_max_skips


@pytest.mark.parametrize(
    ("arguments", "limit"),
    [
        ([], 50),
        (["--mp_max_skips=7"], 7),
        (["--mp_max_skips=0"], None),
        (["--nomp_skip_nonfinite", "--mp_max_skips=7"], None),
    ],
)
def test_how_many_steps_in_a_row_may_be_skipped(define, arguments, limit):
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


# JMPX_POLICY


def test_the_variable_goes_before_the_programs_policy_and_after_the_command_line(
    define, monkeypatch
):
    for text in (" 16-mixed ;", "c=bf16; BatchNorm: full"):
        monkeypatch.setenv("JMPX_POLICY", text)
        expected = jmpx.get_policy_map(text)
        for options in ({}, {"default_policy": "f16"}, {"prefix": "student"}):
            mp, _ = define(**options)
            assert mp.policy_map == expected
        assert f"(default: '{expected}')" in " ".join(define()[1].get_help().split())
        mp, values = define("--mp_policy=f64", default_policy="f16")
        assert mp.policy == jmpx.get_policy("f64")
        values.mp_policy = "f32"
        assert mp.policy == jmpx.get_policy("f32")
        monkeypatch.setenv("JMPX_POLICY", "f16")  # read where the flags are defined
        values.unparse_flags()
        values(["program"])
        assert mp.policy_map == expected


def test_empty_variables_are_unset(define, monkeypatch):
    for name, text in itertools.product(["JMPX_POLICY", "JMPX_LOSS_SCALE"], ["", "  "]):
        monkeypatch.setenv(name, text)
        mp, _ = define(default_policy="16-mixed")
        assert mp.policy == MIXED and mp.loss_scale() == Dynamic()
