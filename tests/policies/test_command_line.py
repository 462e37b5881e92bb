"""`python -m jmpx`: what a policy string means; one line about wrong usage."""

import contextlib
import sys

import haiku as hk
import pytest
from absl import flags
from helpers.four_frameworks import FRAMEWORKS, HAIKU, LINEN, X

import jmpx
import jmpx.equinox
import jmpx.haiku
from jmpx.__main__ import main

EQUINOX = FRAMEWORKS["equinox"][1]


# The table of a policy map


def lines_of(capsys, policy):
    assert main([policy]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_table_shows_what_each_rule_means(capsys):
    lines = lines_of(capsys, "c=bf16,o=f32; BatchNorm: full; */head/*: o=f16")
    words = [line.split() for line in lines]
    assert words[0] == ["params", "compute", "output"]
    assert words[1] == ["default", "float32", "bfloat16", "float32"]
    assert words[2] == ["BatchNorm", "float32", "float32", "bfloat16", "*"]
    assert words[3] == ["*/head/*", "float32", "bfloat16", "*", "float16"]
    assert lines[4] == "* the compute dtype of what surrounds the call: here, of the default"


def test_the_table_shows_the_algorithm_and_the_reduction_where_they_are_set(capsys):
    policy = "c=bf16,o=f32,m=high,r=bf16; BatchNorm: full; */router: c=f32,o=f32,m=highest"
    lines = lines_of(capsys, policy)
    words = [line.split() for line in lines]
    assert words[0] == ["params", "compute", "output", "matmul", "reduce"]
    assert words[1] == ["default", "float32", "bfloat16", "float32", "high", "bfloat16"]
    assert words[2] == ["BatchNorm", "float32", "float32", "bfloat16", "*", "high", "*"]
    assert words[3] == ["*/router", "float32", "float32", "float32", "highest"]
    assert lines[4].startswith("* the compute dtype, or matmul, of what surrounds")

    words = [line.split() for line in lines_of(capsys, "c=bf16; */a: m=high; */b: full")]
    assert words[0] == ["params", "compute", "output", "matmul"]
    assert words[1] == ["default", "float32", "bfloat16", "bfloat16", "-"]
    assert words[3] == ["*/b", "float32", "float32", "bfloat16", "*", "-", "*"]


def test_a_rule_for_an_operation_has_no_more_than_it_says(capsys):
    lines = lines_of(capsys, "c=bf16; op.exp: f32; op.dot_general: m=high")
    assert [line.split() for line in lines[2:4]] == [
        ["op.exp", "float32"],
        ["op.dot_general", "high"],
    ]


def test_the_table_shows_the_mark_of_optional_rules(capsys):
    lines = lines_of(capsys, "c=bf16; BatchNorm?: full; */head: o=f32;")
    assert lines[2].split() == ["BatchNorm?", "float32", "float32", "bfloat16", "*"]
    assert lines[3].startswith("*/head  ") and lines[-2].startswith("? no warning where")
    assert "?" not in "".join(lines_of(capsys, "c=bf16; BatchNorm: full"))


@pytest.mark.parametrize(
    ("string", "line"),
    {
        "c=bf16": "none (auto: no policy computes in float16)",
        "c=bf16; */x: f16 | auto": "dynamic,init=32768 (auto: a policy computes in float16)",
        "c=f16 | none": "none",
        "c=bf16|Static = 1e3": "static=1000",
        "c=f16; Linear: full | dynamic, init=2**10, hysteresis=2": (
            "dynamic,init=1024,hysteresis=2"
        ),
    }.items(),
)
def test_the_loss_scale_is_shown(string, line, capsys):
    assert lines_of(capsys, string)[-1] == f"loss scale: {line}"


# Wrong usage


def product(w, x):
    return x @ w


def fails():
    raise RuntimeError("no\nsuch  file")


def leaves():
    sys.exit("--data is missing")


def own_haiku():
    def run(x):
        with jmpx.haiku.policies("c=f16"):
            return hk.Linear(3)(x)

    return hk.transform(run), (X,)


def own_autocast():
    return jmpx.autocast(EQUINOX), (X,)


def own_equinox():
    return lambda x: jmpx.equinox.with_policies(EQUINOX)(x), (X,)


RESULTS = "to return a module of Equinox or NNX, or a pair of"
WRONG = {
    "model": ("Expected --model pkg.module:make, got 'model'",),
    ":make": ("Expected --model pkg.module:make, got ':make'",),
    "no_such_module:make": ("Cannot import 'no_such_module' of --model", "ModuleNotFoundError"),
    "THIS:mkae": ("has no 'mkae'; did you mean 'make'?",),
    "THIS:RETURNED": ("Expected --model to name a function", "got a value of type dict."),
    "THIS:fails": (
        "'fails' of --model",
        "failed: RuntimeError: no such file (",
        "command_line.py:",
    ),
    "THIS:leaves": ("failed: SystemExit: --data is missing (",),
    "THIS:product": ("failed: TypeError", "missing 2 required positional arguments"),
    "THIS:own_haiku": (
        "runs them under its own jmpx.haiku.policies('params=float32,compute=float16",
    ),
    "THIS:own_autocast": ("returns what jmpx.autocast has made under a policy map of its own",),
    "THIS:own_equinox": ("runs them under its own jmpx.equinox.with_policies('')",),
}
RETURNED = {
    "a value of type NoneType": None,
    "a value of type list": [1],
    "a value of type tuple": (1, 2, 3),
    "a LinenNet and no arguments": LINEN,
    "a Transformed and no arguments": HAIKU,
    "a function and no arguments": lambda: product,
    "a function and arguments of type ArrayImpl": (product, X),
}


def make():
    return None


def error_of(capsys, *arguments):
    """Returns the one line of an error."""
    with contextlib.suppress(SystemExit):
        assert main(list(arguments)) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.endswith("\n")
    (line,) = printed.err.splitlines()
    return line


@pytest.mark.parametrize("target", WRONG)
def test_a_wrong_model_is_one_line(target, capsys):
    line = error_of(capsys, "--model", target.replace("THIS", __name__), "c=bf16")
    assert all(part in line for part in WRONG[target])


@pytest.mark.parametrize("got", RETURNED)
def test_a_function_that_returns_something_else(got, capsys, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "make", lambda: RETURNED[got])
    if got == "a function and no arguments":
        monkeypatch.setattr(sys.modules[__name__], "make", RETURNED[got])
    line = error_of(capsys, "--model", f"{__name__}:make", "c=bf16")
    assert RESULTS in line and line.endswith(f"got {got}.")


def test_an_error_while_the_model_is_traced(capsys, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "make", lambda: (product, (X, X)))
    line = error_of(capsys, "--model", f"{__name__}:make", "c=bf16")
    assert line.startswith("Tracing the model failed: TypeError: ") and "command_line.py:" in line


def by_flags(x):
    values = flags.FlagValues()
    flags.DEFINE_string("norm", "layer", "", flag_values=values)
    return x if values.norm == "layer" else x + 1


@pytest.mark.parametrize("made", [lambda: by_flags(X), lambda: (by_flags, (X,))])
def test_a_model_that_reads_flags_is_for_audit(made, capsys, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "make", made)
    line = error_of(capsys, "--model", f"{__name__}:make", "c=bf16")
    assert "flag --norm before" in line and "use audit MODULE:FUNCTION -- FLAGS" in line


def test_flags_of_a_program_are_for_audit(capsys):
    line = error_of(capsys, "explain", "--model", "a:make", "c=bf16", "--", "--norm=layer")
    assert "use audit MODULE:FUNCTION -- FLAGS" in line
    assert main(["explain", "--", "c=bf16"]) == 0  # what follows may be the policy


@pytest.mark.parametrize("package", ["haiku", "equinox", "flax"])
def test_a_missing_framework(package, capsys, monkeypatch):
    for name in [*sys.modules]:
        if name.split(".")[0] == package or name.startswith(
            (f"jmpx.{package}", f"jmpx._{package}")
        ):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    line = error_of(capsys, "--model", f"jmpx.{package}:make", "c=bf16")
    assert f"pip install 'jmpx[{package}]'" in line


def test_wrong_arguments_are_one_line(capsys):
    assert "usage: python -m jmpx" in error_of(capsys)
    assert "unrecognized arguments: bf16" in error_of(capsys, "bf16", "bf16")
    with pytest.raises(ValueError, match="did you mean 'bf16'?") as error:
        jmpx.get_mixed_precision("c=f16; Linear: bf61")
    assert error_of(capsys, "c=f16; Linear: bf61") == str(error.value)


def test_help(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--help"])
    assert exit.value.code == 0 and "--model" in capsys.readouterr().out
