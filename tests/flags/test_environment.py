"""JMPX_POLICY and JMPX_LOSS_SCALE, the defaults of the flags of `define_mp_flags`."""

import textwrap

import pytest
from absl import flags
from helpers import run_python

import jmpx
import jmpx.flags

Dynamic, Static, NoOp = jmpx.DynamicLossScale, jmpx.StaticLossScale, jmpx.NoOpLossScale


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for name in ("JMPX_POLICY", "JMPX_LOSS_SCALE"):
        monkeypatch.delenv(name, raising=False)


def define(*arguments, **options):
    values = flags.FlagValues()
    mp = jmpx.flags.define_mp_flags(flag_values=values, **options)
    values(["program", *arguments])
    return mp, values


@pytest.mark.parametrize("text", ["c=bf16,o=f32", " 16-mixed ;", "c=bf16; BatchNorm: full"])
def test_the_policy_goes_before_the_programs_and_after_the_command_line(text, monkeypatch):
    monkeypatch.setenv("JMPX_POLICY", text)
    expected = jmpx.get_policy_map(text)
    for options in ({}, {"default_policy": "f16"}, {"prefix": "student"}):
        mp, _ = define(**options)
        assert mp.policy_map == expected
    mp, values = define("--mp_policy=f64", default_policy="f16")
    assert mp.policy == jmpx.get_policy("f64")
    values.mp_policy = "f32"
    assert mp.policy == jmpx.get_policy("f32")
    monkeypatch.setenv("JMPX_POLICY", "f16")  # read where the flags are defined
    values.unparse_flags()
    values(["program"])
    assert mp.policy_map == expected


@pytest.mark.parametrize("name", ["JMPX_POLICY", "JMPX_LOSS_SCALE"])
@pytest.mark.parametrize("text", ["", "  "])
def test_empty_variables_are_unset(name, text, monkeypatch):
    monkeypatch.setenv(name, text)
    mp, _ = define(default_policy="16-mixed")
    assert mp.policy == jmpx.get_policy("16-mixed") and mp.loss_scale() == Dynamic()


ENV = "dynamic,init=64,period=7,max=1024,hysteresis=2"
WHOLE = Dynamic(64, period=7, max_loss_scale=1024, hysteresis=2)


@pytest.mark.parametrize(
    ("text", "arguments", "expected"),
    [
        (ENV, [], WHOLE),
        (ENV, ["--mp_policy=16-mixed"], WHOLE),
        (ENV, ["--mp_loss_scale=static=8"], Static(8)),
        (ENV, ["--mp_loss_scale=none"], NoOp()),
        (ENV, ["--mp_scale_type=Static"], Static(2**15)),
        (ENV, ["--mp_scale_type=Static", "--mp_scale_value=4"], Static(4)),
        (ENV, ["--mp_scale_type=NoOp"], NoOp()),
        (ENV, ["--mp_scale_type=auto", "--mp_policy=f16"], WHOLE),  # its default
        (ENV, ["--mp_scale_type=Dynamic"], Dynamic()),
        (ENV, ["--mp_scale_value=128", "--mp_policy=f16"], Dynamic(128)),
        ("static=16", ["--mp_scale_type=Static", "--mp_scale_value=8"], Static(8)),
        ("auto,init=16", [], NoOp()),
        ("auto,init=16", ["--mp_policy=f16"], Dynamic(16)),
    ],
)
def test_the_command_line_goes_before_the_loss_scale(
    text, arguments, expected, monkeypatch, tmp_path
):
    monkeypatch.setenv("JMPX_LOSS_SCALE", text)
    mp, values = define(*arguments)
    assert mp.loss_scale() == expected
    path = tmp_path / "flags.txt"
    path.write_text(values.flags_into_string())
    again, _ = define(f"--flagfile={path}")
    assert again.loss_scale() == expected
    monkeypatch.setenv("JMPX_LOSS_SCALE", "")
    if any("--mp_scale" in each for each in arguments) and expected != WHOLE:
        with pytest.raises(flags.IllegalFlagValueError, match="contradict"):
            define(f"--flagfile={path}")
    else:  # what is written does not need the variable
        again, _ = define(f"--flagfile={path}")
        assert again.loss_scale() == expected


def test_programs_go_before_the_loss_scale(monkeypatch):
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


def test_one_policy_from_the_variable_decides_auto(monkeypatch):
    monkeypatch.setenv("JMPX_POLICY", "16-mixed")
    assert define()[0].loss_scale() == Dynamic()
    monkeypatch.setenv("JMPX_LOSS_SCALE", "auto=8")
    assert define()[0].loss_scale() == Dynamic(8)
    assert define("--mp_policy=f32")[0].loss_scale() == NoOp()


BAD = [
    ("JMPX_POLICY", "c=f17", "Unknown dtype 'f17' at position 2 of policy"),
    ("JMPX_POLICY", "c=bf16;; BatchNorm: full", "Empty rule at position 7"),
    ("JMPX_LOSS_SCALE", "dynamc", "Unknown kind 'dynamc' at position 0"),
    ("JMPX_LOSS_SCALE", "dynamic,init=1+1", "Expected the number of 'init', got '1+1'"),
    ("JMPX_LOSS_SCALE", "auto,max=1,min=2", "Cannot make the loss scale at position 0"),
]


@pytest.mark.parametrize(("name", "text", "message"), BAD)
def test_a_wrong_variable_is_an_error_that_names_it(name, text, message, monkeypatch):
    monkeypatch.setenv(name, text)
    with pytest.raises(flags.IllegalFlagValueError) as error:
        define("--mp_policy=f16", "--mp_loss_scale=static=8")
    assert str(error.value).startswith(f"environment variable {name}={text}: {message}")
    assert "\n" not in str(error.value)


PROGRAM = """
    import sys
    from absl import app, flags
    import jmpx.flags

    MP = jmpx.flags.define_mp_flags(default_policy="f32")

    def main(_):
        print(MP.policy_map, "|", MP.loss_scale())

    app.run(main)
"""


def run(tmp_path, *arguments, **environment):
    program = tmp_path / "train.py"
    program.write_text(textwrap.dedent(PROGRAM))
    return run_python(str(program), *arguments, **environment)


@pytest.mark.thorough
def test_a_program_that_nobody_edits(tmp_path):
    variables = {"JMPX_POLICY": "c=f16,o=f32", "JMPX_LOSS_SCALE": "auto, init=2**10"}
    result = run(tmp_path, **variables)
    mixed = "params=float32,compute=float16,output=float32"
    assert result.stdout == f"{mixed} | dynamic,init=1024\n", result.stderr
    result = run(tmp_path, "--help", **variables)
    text = " ".join(result.stdout.split())
    assert f"(default: '{mixed}')" in text and "(default: 'auto, init=2**10')" in text
    result = run(tmp_path, JMPX_POLICY="c=f17")
    assert result.returncode == 1 and result.stdout == ""
    message = "environment variable JMPX_POLICY=c=f17: Unknown dtype 'f17' at position 2"
    assert message in " ".join(result.stderr.splitlines()[-1].split())
