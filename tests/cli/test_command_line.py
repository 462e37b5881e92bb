"""`python -m jmpx`: what a policy string means; one line about wrong usage."""

import contextlib
import importlib.metadata
import json
import re
import sys
import types

import haiku as hk
import jax
import pytest
from absl import flags
from helpers import run_python
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
    assert lines[3].startswith("*/head  ") and lines[-3].startswith("? no warning where")
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


@pytest.mark.parametrize(
    ("string", "line"),
    {
        "c=bf16": "arguments (it has no rules; write by=... to choose)",
        "c=bf16; Linear: full; op.exp: f32": (
            "modules (it has rules for classes or paths; write by=... to choose)"
        ),
        "c=bf16; op.exp: f32": "operations (its rules are for operations; write by=... to choose)",
        "c=bf16,by=arguments": "arguments (by= says so)",
        "by=modules,c=bf16": "modules (by= says so)",
        "by=operations,c=bf16,save=products; */a: full": (
            "operations, save=products (by= says so)"
        ),
    }.items(),
)
def test_the_way_is_shown_and_whether_it_is_written(string, line, capsys):
    assert lines_of(capsys, string)[-2] == f"applied by: {line}"


# The policies of a file

ISLANDS = "c=bf16,o=f32; LayerNorm: full"
BARE = {"select": "LayerNorm", "compute": "f32"}
FILES = {
    # What a file holds -> the path and the string of each policy in it.
    "string": ({"train": {"policy": ISLANDS, "lr": 1}}, {"train.policy": f"{ISLANDS} | none"}),
    "names": (
        {name: "bf16" for name in ("mp_policy", "policy_map", "Precision", "student-policy")}
        | {name: "bf16" for name in ("matmul_precision", "dtype", "policies")},
        {"mp_policy": "bf16 | none", "policy_map": "bf16 | none"}
        | {"Precision": "bf16 | none", "['student-policy']": "bf16 | none"},
    ),
    "preset": ([{"precision": "16-mixed"}], {"[0].precision": "16-mixed | dynamic,init=32768"}),
    "mapping": (
        {"a": {"policy": {"compute": "bf16", "output": "f32"}, "lr": 1}},
        {"a.policy": "c=bf16,o=f32 | none"},
    ),
    "whole": (
        {"policy": {"compute": "bf16"}, "rules": [BARE], "loss_scale": "static=8", "by": "modules"},
        {"": "by=modules,c=bf16; LayerNorm: full | static=8"},
    ),
    "beside": (
        {"mp_policy": "c=f16", "mp_loss_scale": {"type": "none"}, "loss_scale": "dynamic", "lr": 1},
        {"mp_policy": "c=f16 | none"},
    ),
    "rules beside": (
        {"policy": {"compute": "bf16"}, "rules": ["LayerNorm: full"], "lr": 1},
        {"policy": "c=bf16; LayerNorm: full | none"},
    ),
    "mapping by stages": (
        {"precision": {"early": {"policy": "c=bf16"}, "late": {"mp_policy": {"compute": "f32"}}}},
        {"precision.early.policy": "c=bf16 | none", "precision.late.mp_policy": "full | none"},
    ),
    "not ours": (
        {"params": {"w": 1}, "output": "logs", "compute": {"nodes": 4}, "rules": "allow all"}
        | {"policy": "MlpPolicy", "x": {"precision": 0.1, "policy": {"type": "ppo"}}}
        | {"y_policy": "${a.b}", "precision": None, "command": "a=b; c | d", "mp_policy": "full"},
        {"mp_policy": "full | none"},
    ),
}


def write(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def told(capsys, *arguments):
    """Returns what is printed, without the note on what `auto` is."""
    assert main(list(arguments)) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return re.sub(r" \(auto: .*\)", "", printed.out).rstrip("\n")


@pytest.mark.parametrize("kind", ["json", "yaml"])  # JSON is YAML, too
@pytest.mark.parametrize("name", FILES)
def test_each_policy_of_a_file_is_explained_with_its_path(name, kind, capsys, tmp_path):
    content, expected = FILES[name]
    file = write(tmp_path / f"config.{kind}", content)
    sections = told(capsys, "explain", "--config", file).split("\n\n")
    assert sections[: len(expected)] == [
        f"{file}: {path}\n{told(capsys, string)}" if path else f"{file}\n{told(capsys, string)}"
        for path, string in expected.items()
    ]
    left = "".join(sections[len(expected) :]).splitlines()
    named = ["policy: 'MlpPolicy'", "x.precision: 0.1", "x.policy: {'type': 'ppo'}"]
    named = [*named, "y_policy: '${a.b}'"] if name == "not ours" else []
    named += ["precision: {"] if name == "mapping by stages" else []
    assert len(left) == len(named)
    for line, start in zip(left, named, strict=True):
        assert line.startswith(f"{file}: {start}")
        assert line.endswith(" is not a policy of jmpx, so it is left out")


def test_a_file_of_toml(capsys, tmp_path):
    text = '[train]\nprecision = "c=bf16"\n[[stage]]\npolicy = {compute = "f16"}\n'
    file = write(tmp_path / "config.toml", text)
    sections = told(capsys, "--config", file).split("\n\n")
    assert sections == [
        f"{file}: train.precision\n{told(capsys, 'c=bf16')}",
        f"{file}: stage[0].policy\n{told(capsys, 'c=f16')}",
    ]


WRONG_SECTIONS = {
    "a string": ({"a": {"policy": "c=bf61"}}, "a.policy: Unknown dtype 'bf61' at position 2 of"),
    "a word that is near": ({"precision": "bf61"}, "precision: Unknown dtype 'bf61'"),
    "a word of others": ({"precision": "fp8"}, "precision: Unknown dtype 'fp8'"),
    "a key": ({"precision": {"compute": "bf16", "outptu": "f32"}}, "precision: Unknown key 'outp"),
    "a mapping": ({"e_policy": {"compute": "bf61"}}, "e_policy: Unknown dtype 'bf61' at compute: "),
    "a rule": (
        {"x": {"policy": "bf16", "rules": [{"select": "A", "compute": "f61"}]}},
        "x: Unknown dtype 'f61' at rules[0].compute: ",
    ),
    "a rule beside": (
        {"x": {"policy": "bf16", "rules": ["A: f61"], "lr": 1}},
        "x.policy: Unknown dtype 'f61' at position 3 of ",
    ),
    "a loss scale": (
        {"mp_policy": "c=f16", "mp_loss_scale": "dynamik"},
        "mp_policy: Unknown kind 'dynamik'",
    ),
    "two loss scales": (
        {"policy": "c=f16 | none", "loss_scale": "dynamic", "lr": 1},
        "policy: Unexpected '|' at position 6",
    ),
}


@pytest.mark.parametrize("name", WRONG_SECTIONS)
def test_a_wrong_policy_of_a_file_is_a_line_with_its_path(name, capsys, tmp_path):
    content, start = WRONG_SECTIONS[name]
    file = write(tmp_path / "config.json", {"wrong": content, "right_policy": "full"})
    assert main(["--config", file, "--model", "no_such_module:make"]) == 2
    printed = capsys.readouterr()
    assert printed.out.startswith(f"{file}: right_policy\n")
    (line,) = printed.err.splitlines()
    assert line.startswith(f"{file}: wrong.{start}")


WRONG_FILES = {
    "none.yaml": ("a: {lr: 1}", "Found no policy in FILE: write it as a string under a key such"),
    "empty.yaml": ("", "Found no policy in FILE: "),
    "left.yaml": ("policy: Mlp", "Found no policy in FILE (FILE: policy: 'Mlp' is not a policy of"),
    "broken.json": ("{", "Cannot read 'FILE': JSONDecodeError: "),
    "broken.toml": ("a = = b", "Cannot read 'FILE': TOMLDecodeError: "),
    "broken.yaml": ("a: [", "Cannot read 'FILE': ParserError: "),
    "loop.yaml": ("a: &a\n  b: *a\n", "Cannot look through 'FILE', because a part of it holds"),
    "config.py": ("policy = 'full'", "Expected --config "),
    "two.json": (
        '{"a_policy": "full", "b_policy": "bf16"}',
        "Expected one policy for --model, got 2, at FILE: a_policy, FILE: b_policy: give",
    ),
}


@pytest.mark.parametrize("name", WRONG_FILES)
def test_a_wrong_file_is_one_line(name, capsys, tmp_path):
    content, start = WRONG_FILES[name]
    file = write(tmp_path / name, content)
    line = error_of(capsys, "--config", file, "--model", "no_such_module:make")
    assert line.startswith(start.replace("FILE", file))


def test_a_file_that_is_not_there_and_a_library_that_is_not(capsys, tmp_path, monkeypatch):
    assert "No such file" in error_of(capsys, "--config", str(tmp_path / "config.yaml"))
    file = write(tmp_path / "config.yaml", "policy: full")
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert error_of(capsys, "--config", file).endswith("not installed: pip install pyyaml.")


def test_the_policy_of_a_file_for_a_model(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "make", lambda: EQUINOX)
    policy = "c=bf16,o=f32; */head: c=f32,o=f32"
    file = write(tmp_path / "config.yaml", f"precision: '{policy}'")
    model = ("--model", f"{__name__}:make")
    lines = told(capsys, "--config", file, *model)
    assert lines == f"{file}: precision\n{told(capsys, policy, *model)}"


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
    line = error_of(capsys, "--model", target.replace("THIS", __name__), "by=modules,c=bf16")
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
    line = error_of(capsys, "--model", f"{__name__}:make", "by=modules,c=bf16")
    assert line.startswith("Tracing the model failed: TypeError: ") and "command_line.py:" in line


def by_flags(x):
    values = flags.FlagValues()
    flags.DEFINE_string("norm", "layer", "", flag_values=values)
    return x if values.norm == "layer" else x + 1


@pytest.mark.parametrize("made", [lambda: by_flags(X), lambda: (by_flags, (X,))])
def test_a_model_that_reads_flags_is_for_audit(made, capsys, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "make", made)
    line = error_of(capsys, "--model", f"{__name__}:make", "by=modules,c=bf16")
    assert "flag --norm before" in line and "use audit MODULE:FUNCTION -- FLAGS" in line


def test_flags_of_a_program_are_for_audit(capsys):
    line = error_of(capsys, "explain", "--model", "a:make", "c=bf16", "--", "--norm=layer")
    assert "use audit MODULE:FUNCTION -- FLAGS" in line
    assert main(["explain", "--", "c=bf16"]) == 0  # what follows may be the policy


@pytest.mark.parametrize("package", ["haiku", "equinox", "flax"])
def test_a_missing_framework(package, capsys, monkeypatch):
    for name in [*sys.modules]:
        if name.split(".")[0] == package or name.startswith((f"jmpx.{package}", "jmpx._adapters.")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    line = error_of(capsys, "--model", f"jmpx.{package}:make", "c=bf16")
    assert f"pip install 'jmpx[{package}]'" in line


NO_COMMANDS = {
    ("doctr",): "unknown command 'doctr'; did you mean 'doctor'?; usage: python -m jmpx",
    ("Explian",): "unknown command 'Explian'; did you mean 'explain'?; usage: ",
    ("audti", "pkg:f"): "unknown command 'audti'; did you mean 'audit'?; usage: ",
    ("lint", "pkg:f"): "unknown command 'lint', and no policy: Unknown dtype 'lint' at position 0 ",
    ("bf61",): "unknown command 'bf61', and no policy: Unknown dtype 'bf61' at position 0 of ",
    ("tf32",): "unknown command 'tf32', and no policy: Unknown dtype 'tf32' at position 0 of ",
    ("bf16", "bf16"): "unrecognized arguments: bf16; usage: python -m jmpx [explain]",
    ("16-mixd",): "Unknown dtype '16-mixd' at position 0 of policy '16-mixd': expected one of ",
    ("c=bf61",): "Unknown dtype 'bf61' at position 2 of policy 'c=bf61': expected one of ",
    ("explain",): "expected either a policy or --config FILE; usage: python -m jmpx [explain] ",
    ("full", "--config", "a.yaml"): "expected either a policy or --config FILE; usage: ",
    ("doctor", "full"): "unrecognized arguments: full; usage: python -m jmpx doctor",
}


@pytest.mark.parametrize("arguments", NO_COMMANDS)
def test_a_word_that_is_no_command_is_named_as_one(arguments, capsys):
    assert error_of(capsys, *arguments).startswith(NO_COMMANDS[arguments])


def test_half_where_jax_cannot_start(capsys, monkeypatch):
    monkeypatch.setattr(jax, "local_devices", fails)
    for policy in ("half", "c=half"):
        line = error_of(capsys, policy)
        assert line.startswith(f"Cannot read '{policy}', because JAX cannot start (RuntimeError)")


def test_wrong_arguments_are_one_line(capsys):
    assert "usage: python -m jmpx" in error_of(capsys)
    assert "unrecognized arguments: bf16" in error_of(capsys, "bf16", "bf16")
    with pytest.raises(ValueError, match="did you mean 'bf16'?") as error:
        jmpx.get_mixed_precision("c=f16; Linear: bf61")
    assert error_of(capsys, "c=f16; Linear: bf61") == str(error.value)


# The doctor


def examined(capsys):
    """Returns what the doctor finds, as JSON and as lines without their spaces."""
    code = main(["doctor"])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert main(["doctor", "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert code == bool(found["warnings"])
    assert lines[-len(found["warnings"] or "1") :] == (found["warnings"] or ["none"])
    return found, lines


def test_the_doctor_lists_versions_and_settings(capsys):
    found, lines = examined(capsys)
    assert {"versions", "device", "settings", "environment", "warnings"} == set(found)
    assert found["versions"]["jax"] == jax.__version__ and f"jax {jax.__version__}" in lines
    assert found["versions"]["jmpx"] == jmpx.__version__
    assert found["settings"]["jax_numpy_dtype_promotion"] == "strict"
    assert found["device"] == {
        **{"devices": ["8 x cpu"], "platform": "cpu", "half": "float16"},
        **{"native_16_bits": None, "native_8_bits": None},
        **{"float32_products": "float32", "skip_by": "cond"},
    }
    assert "native 16 bits unknown for this device" in lines and "devices 8 x cpu" in lines
    assert found["environment"] == {} and found["warnings"] == []


EIGHT = ["float8_e4m3fn", "float8_e5m2"]
DEVICES = {
    # (platform, kind, capability) -> half, 16 bits, 8 bits, products of float32, skip_by
    ("gpu", "NVIDIA H100", "9.0"): ("float16", ["float16", "bfloat16"], EIGHT, "TF32", "cond"),
    ("gpu", "NVIDIA L4", "8.9"): ("float16", ["float16", "bfloat16"], EIGHT, "TF32", "cond"),
    ("gpu", "NVIDIA A100", "8.0"): ("float16", ["float16", "bfloat16"], [], "TF32", "cond"),
    ("gpu", "NVIDIA B200", "10.0"): ("float16", ["float16", "bfloat16"], EIGHT, "TF32", "cond"),
    ("gpu", "Tesla V100", "7.0"): ("float16", ["float16"], [], "float32", "cond"),
    ("gpu", "Tesla P100", "6.0"): ("float16", None, None, "float32", "cond"),
    ("gpu", "AMD Instinct MI300X", "gfx942"): ("float16", None, None, None, "cond"),
    ("tpu", "TPU v4", None): ("bfloat16", ["bfloat16"], None, "bfloat16", "where"),
    ("other", "A chip", None): ("float16", None, None, None, "cond"),
}


@pytest.fixture
def on(monkeypatch):
    """Has JAX say that it runs on two devices of a kind."""

    def pretend(platform, kind, capability):
        device = types.SimpleNamespace(platform=platform, device_kind=kind)
        if capability is not None:
            device.compute_capability = capability
        for name in ("devices", "local_devices"):
            monkeypatch.setattr(jax, name, lambda: [device, device])

    return pretend


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device[1])
def test_the_doctor_says_what_a_device_multiplies(device, capsys, on):
    on(*device)
    found, lines = examined(capsys)
    names = ("half", "native_16_bits", "native_8_bits", "float32_products", "skip_by")
    assert tuple(found["device"][name] for name in names) == DEVICES[device]
    assert (
        found["device"]["devices"] == [f"2 x {device[1]}"] and f"devices 2 x {device[1]}" in lines
    )
    with jax.default_matmul_precision("highest"):
        assert examined(capsys)[0]["device"]["float32_products"] == "highest"


def test_the_doctor_where_jax_cannot_start(capsys, monkeypatch):
    monkeypatch.setattr(jax, "local_devices", fails)
    monkeypatch.setenv("JMPX_POLICY", "half")  # cannot be read then
    found, lines = examined(capsys)
    assert found["device"] == {"devices": None} and "devices none" in lines
    (text,) = found["warnings"]
    assert text.startswith("JAX cannot start, so that no program runs here (RuntimeError: no such")


VARIABLES = {
    ("JMPX_POLICY", "c=bf16,o=f32; LayerNorm: full"): None,
    ("JMPX_POLICY", "c=bf61"): "JMPX_POLICY is wrong: Unknown dtype 'bf61' at position 2",
    ("JMPX_POLICY", "c=f64"): "JMPX_POLICY does not fit: Cannot cast to float64 while",
    ("JMPX_POLICY", "bf16; A: c=float8_e5m2"): "does not fit: Cannot compute in float8_e5m2",
    ("JMPX_POLICY", "bf16; A: f16"): "JMPX_POLICY computes in float16, and this device multiplies "
    "bfloat16: write compute=bfloat16.",
    ("JMPX_LOSS_SCALE", "auto"): None,
    ("JMPX_LOSS_SCALE", "dynamik"): "JMPX_LOSS_SCALE is wrong: Unknown kind 'dynamik'",
    ("JMPX_POLCY", "full"): "JMPX_POLCY does nothing: jmpx reads JMPX_POLICY and JMPX_LOSS_SCALE; "
    "did you mean 'JMPX_POLICY'?",
}


@pytest.mark.parametrize("variable", VARIABLES)
def test_the_doctor_reads_the_environment(variable, capsys, monkeypatch, on):
    on("tpu", "TPU v4", None)
    monkeypatch.setenv(*variable)
    monkeypatch.setenv("JMPX_", " ")  # as good as unset
    found, lines = examined(capsys)
    way = found["environment"].pop("applied_by", None)
    assert found["environment"] == dict([variable]) and " ".join(variable) in lines
    is_read = variable[0] == "JMPX_POLICY" and variable[1] != "c=bf61"
    assert way == (jmpx.get_policy_map(variable[1]).way if is_read else None)
    expected = VARIABLES[variable]
    assert len(found["warnings"]) == (expected is not None)
    assert all(expected in text for text in found["warnings"])


def test_the_doctor_warns_of_settings(capsys):
    with jax.debug_nans(True):
        assert ["jax_debug_nans stops" in text for text in examined(capsys)[0]["warnings"]] == [
            True
        ]


def test_the_doctor_says_what_is_not_installed(capsys, monkeypatch):
    real = importlib.metadata.version

    def found(package):
        if package == "flax":
            raise importlib.metadata.PackageNotFoundError(package)
        return real(package)

    monkeypatch.setattr(importlib.metadata, "version", found)
    report, lines = examined(capsys)
    assert report["versions"]["flax"] is None
    assert "flax not installed: pip install 'jmpx[flax]'" in lines


def test_the_version(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--version"])
    assert exit.value.code == 0 and capsys.readouterr().out == f"jmpx {jmpx.__version__}\n"


@pytest.mark.thorough
def test_a_command_imports_what_it_needs():
    optional = "haiku equinox flax optax absl matplotlib yaml orbax".split()
    heavy = "_models _doctor _config_files _autocast _adapters _audit _gradient".split()
    run = "import sys; sys.modules |= dict.fromkeys({optional}); from jmpx.__main__ import main; "
    run = run.format(optional=optional)
    result = run_python("-c", f"{run}print(main(['doctor']))")
    assert result.returncode == 0 and result.stdout.endswith("0\n"), result.stderr
    names = [f"jmpx.{name}" for name in heavy]
    code = f"{run}main(['c=bf16; A: full | dynamic']); print({{*sys.modules}} & {{*{names}}})"
    result = run_python("-c", code)
    assert result.stdout.endswith("set()\n"), result.stdout


def test_help(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--help"])
    assert exit.value.code == 0 and "--model" in capsys.readouterr().out
