"""The commands of `python -m jmpx` that look at a program; one line about wrong usage."""

import json
import os
import re
import sys

import jax
import jax.numpy as jnp
import pytest
from absl import flags
from helpers import BF16, F32, error_of, run_jmpx, run_python

# Programs, named as `THIS:name`


def loss_fn(w, x):
    with jax.named_scope("encoder"):
        h = jnp.tanh(x @ w.astype(BF16))
    return h.astype(F32).sum()


ARRAYS = (jnp.ones((4, 3)), jnp.ones((2, 4), BF16))
SHAPES = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in ARRAYS)


shapes, arrays = lambda: (loss_fn, SHAPES), lambda: (loss_fn, [*ARRAYS])


def run(*arguments):
    return run_jmpx(*(each.replace("THIS", __name__) for each in arguments))


# audit


def test_audit_prints_the_report(capsys):
    assert run("audit", "THIS:arrays") == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("Audit of loss_fn and its gradient\n") and printed.err == ""
    assert "bfloat16 x bfloat16" in printed.out


def test_audit_prints_json_about_a_platform(capsys):
    for platform, expected in (("tpu", "tpu"), ("cuda", "gpu"), ("cpu", "cpu")):
        assert run("audit", "THIS:shapes", "--json", f"--platform={platform}") == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["title"], found["platform"]) == ("loss_fn", expected)
        assert {each["dtypes"] for each in found["products"]} == {"bfloat16 x bfloat16"}


# Commands that run the program


def exp_fn(w, x):
    with jax.named_scope("scores"):
        h = x @ w
    with jax.named_scope("weights"):
        return jnp.exp(h).mean()


def exp_of(number):
    return exp_fn, (jnp.full((4, 3), number, "float16"), jnp.ones((2, 4), "float16"))


large, small = lambda: exp_of(4), lambda: exp_of(0.5)


def test_ranges_are_printed_and_drawn(capsys, tmp_path):
    plot = tmp_path / "ranges.png"
    assert run("ranges", "THIS:large", "--plot", str(plot)) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("Ranges of exp_fn")
    assert printed.err == f"wrote {plot}\n" and plot.read_bytes().startswith(b"\x89PNG")

    assert run("ranges", "THIS:large", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert {each["scope"] for each in found["activations"]} >= {"scores", "weights"}


def test_the_first_nonfinite_is_printed(capsys):
    assert run("first-nonfinite", "THIS:large") == 1
    printed = capsys.readouterr().out
    assert printed.startswith("exp makes an infinity") and "test_commands.py:" in printed
    assert run("first-nonfinite", "THIS:large", "--json") == 1
    assert json.loads(capsys.readouterr().out)["scope"] == "weights"

    assert run("first-nonfinite", "THIS:small") == 0
    assert capsys.readouterr().out == "no operation makes an inf or NaN\n"
    assert run("first-nonfinite", "THIS:small", "--json") == 0
    assert json.loads(capsys.readouterr().out) is None


# One `make` for all commands


TRAIN = """
def loss_fn(params, x):
    h = jnp.tanh(x @ params["w"])
    with jax.named_scope("head"):
        return jnp.mean((h @ params["head"]) ** 2)

def batch(seed):
    keys = jax.random.split(jax.random.key(seed), 3)
    params = {"w": jax.random.normal(keys[0], (8, 16)), "head": jax.random.normal(keys[1], (16, 1))}
    return params, jax.random.normal(keys[2], (4, 8))

def make_step(policy):
    import jmpx
    grad_fn = jax.grad(jmpx.apply_policy(loss_fn, policy))
    step = lambda params, x: jax.tree.map(lambda p, g: p - g, params, grad_fn(params, x))
    return jax.jit(step, donate_argnums=0), make_shapes()[1]

make = lambda: (loss_fn, batch(0))
make_batches = lambda: (loss_fn, [batch(0), batch(1)])
make_with_step = lambda: (loss_fn, [batch(0)], make_step)
make_of_forces = lambda: (lambda params, x: jnp.sum(jax.grad(loss_fn, 1)(params, x) ** 2), batch(0))
make_of_step = lambda: (make_step("c=f32")[0], batch(0))
make_shapes = lambda: (loss_fn, jax.eval_shape(lambda: batch(0)))
"""
SHAPE = "Expected arrays, got a shape as params['head']: jmpx.inspect."
NO_LOSS = "Expected a loss, which each policy casts, got <lambda>, which is none: return behind its"
COMMANDS = {  # what each prints, and its exit code
    "audit": ("Audit of loss_fn and its gradient", 0),
    "audit --check compute=bf16 --at-least 0.99": ("Audit of loss_fn and its gradient", 1),
    "audit --check compute=f32 --at-least 0.99": ("Audit of loss_fn and its gradient", 0),
    "ranges": ("Ranges of loss_fn and its gradient", 0),
    "first-nonfinite": ("no operation makes an inf or NaN", 0),
    "choose --error 0.5": ("Error of the gradients of loss_fn", 0),
    "plan": ("Plan of the gradients of loss_fn: counts of the trace", 0),
    "plan --policy c=bf16 --chip v5e": ("Plan of the gradients of loss_fn on v5e", 1),
}


@pytest.mark.usefixtures("standard_promotion")  # as in a user's program
@pytest.mark.parametrize("command", COMMANDS)
def test_one_make_serves_all_commands(command, program, capsys, monkeypatch):
    program(TRAIN, "train.py")
    monkeypatch.syspath_prepend(".")
    monkeypatch.setattr("jmpx._inspect.plan.chips.find_spec", lambda name: None)
    name, *options = command.split()
    for target in ("train.py:make", "train:make_batches", "train.py:make_with_step"):
        start, code = COMMANDS[command]
        if target == "train.py:make_with_step":
            start = start.replace("the gradients of loss_fn:", "<lambda>:")
            start = start.replace("the gradients of loss_fn on", "<lambda> on")
        assert run(name, target, *options) == code
        printed = capsys.readouterr().out
        assert printed.startswith(start)
        if name == "plan":
            rows = re.findall(r"^(c=\S+) .* f?bf16 100.0 %| f32 100.0 %", printed, re.MULTILINE)
            assert len(rows) == (1 if options else 3)
            assert ("make_step behind" in printed) == (target != "train.py:make_with_step")
            assert "donate_argnums" not in printed
    if command == "plan":  # a derivative inside makes no step of a loss
        assert run(name, "train:make_of_forces") == 0
        assert capsys.readouterr().out.startswith("Plan of the gradients of <lambda>:")
    for other, told in {"make_shapes": SHAPE, "make_of_step": NO_LOSS}.items():
        refuses = name == "plan" if other == "make_of_step" else name not in ("audit", "plan")
        if refuses:
            line = error_of(capsys, name, f"train:{other}", *options)
            assert told in line and line.count("\n") == 0
        elif name != "choose" and "--check" not in command:
            assert run(name, f"train:{other}", *options) == COMMANDS[command][1]
            capsys.readouterr()


# The flags of a program


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Returns a function that writes a script, whose absl flags are removed after the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before, modules = set(flags.FLAGS), set(sys.modules)

    def write(text, file="program.py"):
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(HEAD + text)
        return path

    yield write
    for name in set(flags.FLAGS) - before:
        delattr(flags.FLAGS, name)
    flags.FLAGS.unparse_flags()
    for name in set(sys.modules) - modules:
        if name in ("program", "neighbour", "train"):
            del sys.modules[name]


HEAD = "import sys, jax, jax.numpy as jnp, numpy as np\ngram = lambda x: x.T @ x\n"
ABSL = """
from absl import flags
SIZE = flags.DEFINE_integer("program_size", 3, "The size.", lower_bound=1)

def make():
    assert flags.FLAGS.is_parsed()
    return gram, (jax.ShapeDtypeStruct((SIZE.value, 2), "float32"),)
"""
ARGPARSE = """
import argparse

def make():
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=3)
    given = parser.parse_args()
    return gram, (jax.ShapeDtypeStruct((given.size, 2), "float32"),)
"""
NEIGHBOUR = "from neighbour import shape\nmake = lambda: (gram, (shape,))\n"


def flops_of(capsys, *arguments):
    before = list(sys.argv)
    assert run("audit", *arguments) == 0
    assert sys.argv == before
    return json.loads(capsys.readouterr().out)["products"][0]["flops"]


@pytest.mark.parametrize(
    ("text", "flag", "target"),
    [(ABSL, "program_size", "program:make"), (ARGPARSE, "size", "./program.py:make")],
)
def test_what_follows_two_dashes_are_flags_of_the_program(text, flag, target, program, capsys):
    sys.path.insert(0, str(program(text).parent))
    small = flops_of(capsys, target, "--json")
    assert flops_of(capsys, target, "--json", "--", f"--{flag}=300") > 50 * small


def test_flags_of_libraries_are_not_those_of_the_program(program, capsys):
    program(ARGPARSE + "import optax\nfrom absl import logging\n")
    assert flops_of(capsys, "program.py:make", "--json", "--", "--size=5") > 0


def test_a_script_finds_its_neighbours(program, capsys):
    program("shape = jax.ShapeDtypeStruct((3, 2), 'float32')", "folder/neighbour.py")
    program(NEIGHBOUR, "folder/program.py")
    assert flops_of(capsys, "folder/program.py:make", "--json") > 0


# Wrong usage


def fails_at_length():
    raise TypeError("all arrays\ndiffer  " * 10_000)


untraceable = lambda: ((lambda w, x: w @ x), SHAPES[:1] * 2)  # noqa: E731
no_arguments = lambda: (loss_fn, SHAPES[0])  # noqa: E731
WRONG = {
    "fails_at_length": "The function THIS:fails_at_length failed: TypeError: all arrays differ all",
    "untraceable": "The audit of THIS:untraceable failed: TypeError: ",
    "no_arguments": "of a policy, got (function, ShapeDtypeStruct): write `return loss_fn, (param",
}


@pytest.mark.parametrize("target", WRONG)
def test_a_wrong_target_is_one_line(target, capsys):
    line = error_of(capsys, "audit", f"{__name__}:{target}")
    assert WRONG[target].replace("THIS", __name__) in line and len(line) < 800
    assert target == "no_arguments" or "test_commands.py:" in line


def test_another_module_of_the_name_of_a_script(program, capsys):
    program("", "json.py")
    line = error_of(capsys, "audit", "json.py:make")
    assert "Cannot import 'json.py': ImportError: another module has the name 'json'" in line
    line = error_of(capsys, "audit", "no/such/file.py:make")
    assert "Cannot import 'no/such/file.py': FileNotFoundError: there is" in line


HELP = {
    (): ["explain", "audit", "ranges", "first-nonfinite", "plan", "doctor", "--version", "exit c"],
    ("audit",): ["--platform {cpu,cuda,gpu,tpu}", "--json", "--"],
    ("ranges",): ["--plot PATH", "--json"],
}


def test_the_help_of_reports(capsys):
    for command, parts in HELP.items():
        assert run(*command, "-h") == 0
        printed = capsys.readouterr().out
        assert all(part in printed for part in parts)


def test_explain_may_be_left_out(capsys):
    outputs = []
    for arguments in [["c=bf16; BatchNorm: full"], ["explain", "c=bf16; BatchNorm: full"]]:
        assert run(*arguments) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != ""


# As a user runs it


@pytest.mark.thorough
def test_a_process(tmp_path):
    (tmp_path / "program.py").write_text(HEAD + ABSL)
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    arguments = ["-m", "jmpx", "audit", "program:make"]
    result = run_python("-W", "error", *arguments, "--", "--program_size=3", **environment)
    assert result.returncode == 0 and result.stderr == ""
    assert result.stdout.startswith("Audit of ")
