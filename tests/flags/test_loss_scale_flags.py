"""--mp_loss_scale: beside the flags for its parts, set by programs, in flag files, by variables."""

import copy

import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

import jmpx
import jmpx.flags

Dynamic, Static, NoOp = jmpx.DynamicLossScale, jmpx.StaticLossScale, jmpx.NoOpLossScale


ENV = "dynamic,init=64,period=7,max=1024,hysteresis=2"
WHOLE = Dynamic(64, period=7, max_loss_scale=1024, hysteresis=2)
# What the variable is, what the command line says, and the loss scale that they give.
GIVE = [
    ("", "--mp_loss_scale=dynamic,init=2**10,hysteresis=2", Dynamic(1024, hysteresis=2)),
    ("", "--mp_policy=16-mixed --mp_loss_scale=STATIC=2**3;", Static(8)),
    ("", "--mp_policy=bf16-mixed --mp_loss_scale=auto,init=8", NoOp()),
    ("", "--mp_policy=c=bf16;BatchNorm:f16 --mp_loss_scale=AUTO=8", Dynamic(8)),
    # Defaults beside it are no contradiction.
    ("", "--mp_loss_scale=static=0.1 --mp_scale_type=auto --mp_scale_value=32768", Static(0.1)),
    # The parts, as in JMP's examples.
    ("", "--mp_policy=16-mixed --mp_scale_value=8", Dynamic(8)),
    ("", "--mp_policy=16-mixed --mp_scale_type=NoOp", NoOp()),
    ("", "--mp_policy=bf16 --mp_scale_type=dynamic --mp_scale_value=64", Dynamic(64)),
    ("", "--mp_scale_type=Static --mp_scale_value=0.5", Static(0.5)),
    ("", "--mp_policy=f16 --mp_scale_value=1e10", Dynamic(np.float32(1e10))),
    (ENV, "", WHOLE),
    (ENV, "--mp_loss_scale=static=8", Static(8)),
    (ENV, "--mp_scale_type=Static", Static(2**15)),
    (ENV, "--mp_scale_type=Static --mp_scale_value=4", Static(4)),
    (ENV, "--mp_scale_type=auto --mp_policy=f16", WHOLE),  # its default
    (ENV, "--mp_scale_type=Dynamic", Dynamic()),
    (ENV, "--mp_scale_value=128 --mp_policy=f16", Dynamic(128)),
    ("auto,init=16", "", NoOp()),
    ("auto,init=16", "--mp_policy=f16", Dynamic(16)),
]


@pytest.mark.parametrize(("variable", "arguments", "expected"), GIVE)
def test_what_the_flags_give_and_flag_files_give_again(
    define, variable, arguments, expected, monkeypatch, tmp_path
):
    monkeypatch.setenv("JMPX_LOSS_SCALE", variable)
    mp, values = define(*arguments.split())
    assert mp.loss_scale() == expected
    assert values.mp_loss_scale == values["mp_loss_scale"].value
    path = tmp_path / "flags.txt"
    path.write_text(values.flags_into_string())
    again, values_again = define(f"--flagfile={path}")
    assert again.loss_scale() == expected
    assert values_again.flags_into_string() == values.flags_into_string()
    has_whole = variable or "--mp_loss_scale=" in arguments
    assert ("--mp_loss_scale=" in path.read_text()) == bool(has_whole)
    monkeypatch.setenv("JMPX_LOSS_SCALE", "")
    if variable and "--mp_scale" in arguments and expected != WHOLE:
        with pytest.raises(flags.IllegalFlagValueError, match="contradict"):
            define(f"--flagfile={path}")
    else:  # what is written does not need the variable
        again, _ = define(f"--flagfile={path}")
        assert again.loss_scale() == expected


def test_flags_that_are_not_parsed_give_nothing(define):
    mp, values = define("--mp_policy=f16")
    values.unparse_flags()
    with pytest.raises(flags.UnparsedFlagAccessError):
        mp.loss_scale()


# Values that programs set


GIVEN = [" STATIC = 2**3;", Static(8), {"type": "static", "init": 8}]


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_what_a_program_sets_is_parsed(define, given):
    mp, values = define()
    values.mp_loss_scale = given
    assert mp.loss_scale() == Static(8)
    values.mp_loss_scale = None
    assert mp.loss_scale() == NoOp()
    values.mp_loss_scale = Dynamic(1024, 5, hysteresis=2).adjust(True)
    assert mp.loss_scale() == Dynamic(1024, 6, hysteresis=2)
    values.set_default("mp_loss_scale", given)
    values.mp_loss_scale = "dynamic"
    assert mp.loss_scale() == Dynamic()


def test_a_program_that_contradicts_the_command_line_is_refused(define):
    for name, value in (("scale_type", "Dynamic"), ("scale_value", 16.0)):
        mp, values = define("--mp_loss_scale=static=8")
        with pytest.raises(flags.IllegalFlagValueError, match="contradict"):
            setattr(values, f"mp_{name}", value)


def test_flagsaver_sets_and_restores(saved):
    given = {"type": "static", "init": 8}
    before = saved.loss_scale()
    with flagsaver.flagsaver(saved_loss_scale=given):
        assert saved.loss_scale() == Static(8)
        with flagsaver.flagsaver(saved_loss_scale="auto,init=4", saved_policy="f16"):
            assert saved.loss_scale() == Dynamic(4)
        with flagsaver.flagsaver(saved_loss_scale=None, saved_scale_value=64.0, saved_policy="f16"):
            assert saved.loss_scale() == Dynamic(64)
        assert saved.loss_scale() == Static(8)
    with flagsaver.as_parsed(saved_loss_scale="static=8"):
        assert saved.loss_scale() == Static(8) and flags.FLAGS["saved_loss_scale"].present
    assert saved.loss_scale() == before and flags.FLAGS.saved_loss_scale is None
    with (
        pytest.raises(flags.IllegalFlagValueError, match="contradict"),
        flagsaver.flagsaver(saved_loss_scale=given, saved_scale_type="Dynamic"),
    ):
        pass
    assert saved.loss_scale() == before


def test_copies_and_help(define):
    _, values = define("--mp_loss_scale=static=8")
    text = " ".join(values.get_help().split())
    assert "--mp_loss_scale: The loss scale." in text and "JMPX_LOSS_SCALE" in text
    other = copy.deepcopy(values)
    other.mp_loss_scale = None
    other.mp_scale_type = "Dynamic"  # no contradiction in the copy
    assert "--mp_scale_type=Dynamic" in other.flags_into_string()
    assert "--mp_loss_scale=static=8" in values.flags_into_string()
    with pytest.raises(flags.IllegalFlagValueError, match="contradict"):
        values.mp_scale_type = "Dynamic"
    for flag in other._flags().values():
        assert flag is not values[flag.name]


def test_mixed_precision(define):
    mp, _ = define("--mp_policy=c=f16; BatchNorm: full", "--mp_loss_scale=auto,period=500")
    mixed = mp.mixed_precision()
    assert mixed.policy_map == jmpx.get_policy_map("c=f16; BatchNorm: full")
    assert mixed.loss_scale == Dynamic(period=500)
    assert str(mixed).endswith("; BatchNorm: compute=float32 | dynamic,init=32768,period=500")


# JMPX_LOSS_SCALE


def test_programs_go_before_the_loss_scale(define, monkeypatch):
    monkeypatch.setenv("JMPX_LOSS_SCALE", "static=8")
    mp, values = define()
    values.mp_loss_scale = "static=4"
    assert mp.loss_scale() == Static(4)
    with pytest.raises(flags.IllegalFlagValueError, match="must have a value"):
        values.mp_loss_scale = None
    values.mp_loss_scale = "auto"
    assert mp.loss_scale() == NoOp()
    mp, values = define("--mp_policy=f16")
    values.mp_scale_type = "Dynamic"
    assert mp.loss_scale() == Dynamic()


def test_one_policy_from_the_variable_decides_auto(define, monkeypatch):
    monkeypatch.setenv("JMPX_POLICY", "16-mixed")
    assert define()[0].loss_scale() == Dynamic()
    monkeypatch.setenv("JMPX_LOSS_SCALE", "auto=8")
    assert define()[0].loss_scale() == Dynamic(8)
    assert define("--mp_policy=f32")[0].loss_scale() == NoOp()
