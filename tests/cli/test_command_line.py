"""`python -m jmpx`: what a policy string means, what the doctor finds."""

import importlib.metadata
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import pytest
from helpers import error_of, run_jmpx, run_python

import jmpx

# The table of a policy map


def lines_of(capsys, policy):
    assert run_jmpx(policy) == 0
    return capsys.readouterr().out.splitlines()


def test_the_table_shows_what_each_rule_means(capsys):
    lines = lines_of(capsys, "by=modules,c=bf16,o=f32; BatchNorm: full; */head/*: o=f16")
    words = [line.split() for line in lines]
    assert words[0] == ["params", "compute", "output"]
    assert words[1] == ["default", "float32", "bfloat16", "float32"]
    assert words[2] == ["BatchNorm", "float32", "float32", "bfloat16", "*"]
    assert words[3] == ["*/head/*", "float32", "bfloat16", "*", "float16"]
    end = "of what surrounds the call: here, of the default"
    assert lines[4] == f"* the compute dtype, or matmul, {end}"


@pytest.mark.parametrize(("output", "shown"), [("", []), (",o=f32", ["float32"])])
def test_by_operations_the_table_has_the_output_dtype_that_widens_results(capsys, output, shown):
    lines = lines_of(capsys, f"c=bf16{output}; BatchNorm: full")
    assert lines[1].split() == ["default", "float32", "bfloat16", *shown]
    assert lines[2].split() == ["BatchNorm", "float32", "float32"]
    assert "*" not in "".join(lines)


def test_the_table_shows_the_algorithm_and_the_reduction_where_they_are_set(capsys):
    rules = "BatchNorm: full; */router: c=f32,o=f32,m=highest"
    lines = lines_of(capsys, f"by=modules,c=bf16,o=f32,m=high,r=bf16; {rules}")
    words = [line.split() for line in lines]
    assert words[0] == ["params", "compute", "output", "matmul", "reduce"]
    assert words[1] == ["default", "float32", "bfloat16", "float32", "high", "bfloat16"]
    assert words[2] == ["BatchNorm", "float32", "float32", "bfloat16", "*", "high", "*"]
    assert words[3] == ["*/router", "float32", "float32", "float32", "highest"]
    assert lines[4].startswith("* the compute dtype, or matmul, of what surrounds")


def test_a_rule_for_an_operation_has_no_more_than_it_says(capsys):
    lines = lines_of(capsys, "c=bf16; op.exp: f32; op.dot_general: m=high")
    assert [line.split() for line in lines[2:4]] == [
        ["op.exp", "float32"],
        ["op.dot_general", "high"],
    ]


def test_the_table_shows_the_mark_of_optional_rules(capsys):
    lines = lines_of(capsys, "by=modules,c=bf16; BatchNorm?: full; */head: o=f32;")
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
        "c=bf16; Linear: full": "operations (by=modules or by=arguments would say otherwise)",
        "c=bf16,by=arguments": "arguments (by= says so)",
        "by=modules,c=bf16": "modules (by= says so)",
    }.items(),
)
def test_the_way_is_shown_and_whether_it_is_written(string, line, capsys):
    assert lines_of(capsys, string)[-2] == f"applied by: {line}"


@pytest.mark.parametrize(
    ("string", "by", "keeps"),
    [
        ("c=bf16,save=products; */a: full", "operations", "products, but none of two activations"),
        ("by=modules,c=bf16,save=products+attention", "modules", "all products"),
    ],
)
def test_what_the_backward_pass_keeps_is_shown(string, by, keeps, capsys):
    way, saved, _ = lines_of(capsys, string)[-3:]
    assert way.startswith(f"applied by: {by} (")
    assert saved.startswith(f"backward pass: keeps the results of {keeps} (save=products")


# Wrong usage


def fails():
    raise RuntimeError("no\nsuch  file")


@pytest.mark.parametrize("package", ["haiku", "equinox", "flax"])
def test_a_missing_framework(package, capsys, monkeypatch):
    for name in [*sys.modules]:
        if name.split(".")[0] == package or name.startswith((f"jmpx.{package}", "jmpx._adapters.")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    line = error_of(capsys, "audit", f"jmpx.{package}:make")
    assert f"pip install 'jmpx[{package}]'" in line


def test_half_where_jax_cannot_start(capsys, monkeypatch):
    monkeypatch.setattr(jax, "local_devices", fails)
    for policy in ("half", "c=half"):
        assert error_of(capsys, policy) == "no such file"


# The doctor


def examined(capsys):
    """Returns what the doctor prints by section, in lines without their spaces."""
    code = run_jmpx("doctor")
    blocks = capsys.readouterr().out.split("\n\n")
    sections = {}
    for block in blocks:
        title, *lines = block.splitlines()
        sections[title] = [" ".join(line.split()) for line in lines]
    assert list(sections) == ["versions", "device", "settings", "environment", "warnings"]
    assert code == (sections["warnings"] != ["none"])
    return sections


def test_the_doctor_lists_versions_and_settings(capsys):
    found = examined(capsys)
    assert f"jax {jax.__version__}" in found["versions"]
    assert found["versions"][0].startswith(f"jmpx {jmpx.__version__} in ")
    assert "jax_numpy_dtype_promotion strict" in found["settings"]
    assert found["device"] == [
        *("devices 8 x cpu", "half float16", "multiplies unknown for this device"),
        "float32 products float32",
    ]
    assert found["environment"] == found["warnings"] == ["none"]


UNKNOWN = "unknown for this device"
BOTH = "float16 and bfloat16"
DEVICES = {
    # (platform, kind, capability) -> half, 16 bits, products of float32
    ("gpu", "NVIDIA A100", "8.0"): ("float16", BOTH, "TF32"),
    ("gpu", "NVIDIA H100", "9.0"): ("float16", "float16, bfloat16 and fp8", "TF32"),
    ("gpu", "NVIDIA B200", "10.0"): ("float16", "float16, bfloat16, fp8 and mxfp8", "TF32"),
    ("gpu", "Tesla V100", "7.0"): ("float16", "float16", "float32"),
    ("gpu", "Tesla P100", "6.0"): ("float16", UNKNOWN, "float32"),
    ("gpu", "AMD Instinct MI300X", "gfx942"): ("float16", UNKNOWN, UNKNOWN),
    ("tpu", "TPU v4", None): ("bfloat16", "bfloat16", "bfloat16"),
    ("tpu", "TPU7x", None): ("bfloat16", "bfloat16 and fp8", "bfloat16"),
    ("other", "A chip", None): ("float16", UNKNOWN, UNKNOWN),
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
    names = ("half", "multiplies", "float32 products")
    lines = [f"{name} {value}" for name, value in zip(names, DEVICES[device], strict=True)]
    assert examined(capsys)["device"] == [f"devices 2 x {device[1]}", *lines]
    with jax.default_matmul_precision("highest"):
        assert "float32 products highest" in examined(capsys)["device"]


def test_the_doctor_where_jax_cannot_start(capsys, monkeypatch):
    monkeypatch.setattr(jax, "local_devices", fails)
    monkeypatch.setenv("JMPX_POLICY", "half")  # cannot be read then
    found = examined(capsys)
    assert found["device"] == ["devices none"]
    (text,) = found["warnings"]
    assert text.startswith("JAX cannot start, so that no program runs here: RuntimeError: no such")


VARIABLES = {
    ("JMPX_POLICY", "c=bf16,o=f32; LayerNorm: full"): None,
    ("JMPX_POLICY", "c=bf61"): "The variables JMPX_* are wrong: Unknown dtype 'bf61' at position 2",
    ("JMPX_POLICY", "c=f64"): "JMPX_* are wrong: Cannot cast to float64 while",
    ("JMPX_POLICY", "bf16; A: c=float8_e5m2"): "are wrong: Cannot compute in float8_e5m2",
    ("JMPX_POLICY", "bf16; A: f16"): "JMPX_POLICY computes in float16, and this device multiplies "
    "bfloat16: write compute=bfloat16.",
    ("JMPX_POLICY", "bf16; */mlp: m=fp8"): "Cannot follow rule '*/mlp: matmul=fp8': TPU v4 has no "
    "units for matmul=fp8: GPUs of NVIDIA since compute capability 8.9",
    ("JMPX_POLICY", "bf16; */mlp: m=fp8+emulate"): None,
    ("JMPX_LOSS_SCALE", "auto"): None,
    ("JMPX_LOSS_SCALE", "dynamik"): "The variables JMPX_* are wrong: Unknown kind 'dynamik'",
    ("JMPX_POLCY", "full"): "JMPX_POLCY does nothing: jmpx reads JMPX_POLICY and JMPX_LOSS_SCALE; "
    "did you mean 'JMPX_POLICY'?",
}


@pytest.mark.parametrize("variable", VARIABLES)
def test_the_doctor_reads_the_environment(variable, capsys, monkeypatch, on):
    on("tpu", "TPU v4", None)
    monkeypatch.setenv(*variable)
    monkeypatch.setenv("JMPX_", " ")  # as good as unset
    found = examined(capsys)
    assert found["environment"] == [" ".join(variable)]
    expected = VARIABLES[variable] or "none"
    assert len(found["warnings"]) == 1 and expected in found["warnings"][0]


def test_the_doctor_warns_of_settings(capsys):
    with jax.debug_nans(True):
        (text,) = examined(capsys)["warnings"]
    assert text.startswith("jax_debug_nans stops")


def test_the_doctor_says_what_is_not_installed(capsys, monkeypatch):
    real = importlib.metadata.version

    def found(package):
        if package == "flax":
            raise importlib.metadata.PackageNotFoundError(package)
        return real(package)

    monkeypatch.setattr(importlib.metadata, "version", found)
    assert "flax not installed" in examined(capsys)["versions"]


def test_the_version(capsys):
    assert run_jmpx("--version") == 0 and capsys.readouterr().out == f"jmpx {jmpx.__version__}\n"


@pytest.mark.thorough
def test_a_command_imports_what_it_needs():
    optional = "haiku equinox flax optax absl matplotlib orbax".split()
    heavy = "_cli.doctor _autocast _adapters _inspect.graph _inspect.programs _steps".split()
    run = f"import sys; sys.modules |= dict.fromkeys({optional}); from jmpx.__main__ import main; "
    result = run_python("-c", f"{run}print(main(['doctor']))")
    assert result.returncode == 0 and result.stdout.endswith("0\n"), result.stderr
    names = [f"jmpx.{name}" for name in heavy]
    code = f"{run}main(['c=bf16; A: full | dynamic']); print({{*sys.modules}} & {{*{names}}})"
    result = run_python("-c", code)
    assert result.stdout.endswith("set()\n"), result.stdout


PROGRAM = """
import jax, jax.numpy as jnp
def make():
    return lambda w, x: jnp.mean((x.astype({0}) @ w.astype({0})).astype("float32")), [
        jax.ShapeDtypeStruct((8, 8), "float32")] * 2
"""


@pytest.mark.parametrize(("dtype", "code"), [("bfloat16", 0), ("float32", 1)])
def test_an_audit_ends_with_the_code_of_its_check(dtype, code, tmp_path, capsys):
    file = tmp_path / f"program_of_{dtype}.py"
    file.write_text(PROGRAM.format(repr(dtype)))
    check = ["--check", "compute=bf16", "--at-least", "0.99"]
    assert run_jmpx("audit", f"{file}:make", *check) == code
    printed = capsys.readouterr()
    assert printed.out.startswith("Audit of <lambda>")
    assert ("0 % of the FLOPs" in printed.err) == bool(code)


def test_without_a_command_there_is_the_help(capsys):
    assert run_jmpx() == 0
    assert "python -m jmpx audit" in capsys.readouterr().out


REPLACED = {  # two rules, and whether the second takes the place of the first
    "MultiHeadAttention: full; MultiHeadAttention: c=bf16": True,
    "*/head: c=bf16; Other: full; */head: c=bf16": True,
    "op.exp: f32; op.exp: bf16,m=highest": True,
    "Dense?: full; Dense: bf16": True,
    "Linear: m=highest; Linear: c=f32": False,  # both hold by operations
    "Linear: full; haiku.Linear: c=bf16": False,  # a part of the first
    "Linear: full; */linear: c=bf16": False,
    "Norm: full; LayerNorm: c=bf16": False,
    "op.exp: f32; op.log: f32": False,
}


@pytest.mark.parametrize("rules", REPLACED)
def test_it_names_a_rule_that_a_later_one_replaces(capsys, rules):
    first, *_, last = jmpx.get_policy_map(f"c=bf16; {rules}").rules
    said = f"The rule {str(first)!r} has no effect, because {str(last)!r} follows."
    lines = lines_of(capsys, f"c=bf16; {rules}")
    assert (lines[-1] == said) == any("no effect" in line for line in lines) == REPLACED[rules]


@pytest.mark.parametrize("by", ["", "by=modules,", "by=arguments,", "by=operations,"])
@pytest.mark.parametrize(
    ("policy", "output", "params"),
    [
        ("p=f32,c=f16,o=f16", True, False),
        ("c=bf16,o=f16; LayerNorm: full", True, False),
        ("bf16", False, True),
        ("p=f16,o=f16", True, True),
        ("c=bf16,o=f32", False, False),
        ("c=bf16", False, False),
        ("f32", False, False),
    ],
)
def test_it_ends_with_what_has_no_effect_as_a_run_warns(capsys, by, policy, output, params):
    if "arguments" in by:
        policy = policy.partition(";")[0]
    lines = lines_of(capsys, by + policy)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jmpx.apply_policy(jnp.sum, by + policy)
    said = [str(each.message) for each in caught]
    is_by_operations = by in ("", "by=operations,")
    assert len(said) == (output and is_by_operations)
    assert lines[-1 - params * is_by_operations :][: len(said)] == said
    end = "By operations, parameters and gradients keep the dtypes in which parameters are stored"
    assert lines[-1].startswith(end) == (params and is_by_operations)
