"""`plan`: counts of the trace, and the answers of a compiler, here of CPUs in place of a chip."""

import itertools
import json
import logging
import math
import os
import re
import sys
import types
from typing import Any

import equinox as eqx
import jax
import jax.export
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers import enable_x64
from helpers.adam_step import ADAM, BATCH, WIDTH as N, shapes, step_under
from jax.experimental import topologies
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P

import jmpx

# No chip's compiler is here: the tests replace the functions that look for it and that ask it.
from jmpx._inspect.plan import api, chips, compiling
from jmpx._inspect.plan.chips import CHIPS, Chip

pytestmark = pytest.mark.usefixtures("standard_promotion")  # as in a user's program
SHAPE = jax.ShapeDtypeStruct
POLICIES = ["c=f32", "c=bf16,o=f32"]
EIGHT = SHAPE((8,), "float32")
CPU = Chip("cpu", "cpu", "cpu", 2**40, layouts="2x4")


def make_step(policy):
    return jax.jit(step_under(policy), donate_argnums=(0, 1)), shapes()


def plan(make_step, policies=POLICIES[1:], chip: str | None = "cpu"):
    return jmpx.inspect.plan(make_step, policies, chip=chip)


def row_of(step, *arguments):
    """Returns the plan of a step that has no policy, as a row."""
    (row,) = plan(lambda policy: (step, arguments)).rows
    return row


def tiny(policy):
    """A step that compiles soonest."""
    dtype = jmpx.get_policy_map(policy).default.compute_dtype
    return (lambda x: jnp.sin(x.astype(dtype))), (EIGHT,)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """The folder in which results are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "jmpx" / "plan"


@pytest.fixture
def asked(monkeypatch):
    """Has this process compile for its CPUs, as another one does for chips; has the requests."""
    requests = []

    def compiled(request, exported, chip):
        requests.append(request)
        return json.loads(json.dumps(compiling.answer(json.loads(json.dumps(request)), exported)))

    devices = types.SimpleNamespace(devices=jax.devices())
    monkeypatch.setattr(topologies, "get_topology_desc", lambda **names: devices)
    monkeypatch.setattr(api, "missing", lambda chip: "")
    monkeypatch.setattr(compiling, "_asked", compiled)
    monkeypatch.setitem(CHIPS, "cpu", CPU)
    return requests


# Counts of the trace.


def test_the_trace_tells_flops_by_dtype_and_saved_bytes():
    report = plan(make_step, POLICIES, chip=None)
    flops = 2 * BATCH * N * N * 5  # the first layer has no gradient of its input
    for row, dtype, size in zip(report.rows, ("float32", "bfloat16"), (4, 2), strict=True):
        (products,) = row.products
        assert (products.dtypes, products.flops) == (f"{dtype} x {dtype}", flops)
        assert row.saved[dtype] >= BATCH * N * size
        assert (row.peak, row.fits, row.error) == (None, None, "")
    assert [row.policy for row in report.rows] == POLICIES
    assert str(report).startswith("Plan of step: counts of the trace\n\n")


def test_without_a_compiler_a_sentence_names_the_extra_and_the_trace_is_counted(monkeypatch):
    monkeypatch.setattr(chips, "find_spec", lambda name: None)
    monkeypatch.setattr(chips, "GPU_VERSIONS", (jax.__version__,))
    for chip, extra in {"v6e": "tpu", "A100": "cuda"}.items():
        report = plan(make_step, POLICIES, chip)
        assert f"pip install 'jmpx[{extra}]'" in report.notes[0]
        assert str(report).count("pip install") == 1
        assert all(row.products and row.peak is None for row in report.rows)
    monkeypatch.setattr(chips, "GPU_VERSIONS", ("0.1.2",))
    monkeypatch.setitem(sys.modules, "tqdm", None)  # the bar does not need it
    assert "use JAX 0.1.2" in plan(make_step, chip="h100").notes[0]


def in_eight_bits(policy):
    def loss_fn(w, x):
        with jax.named_scope("mlp"):
            return jnp.mean((x @ w).astype(jnp.float32) ** 2)

    shape = SHAPE((256, 256), "float32")
    return jax.grad(jmpx.apply_policy(loss_fn, policy)), (shape, shape)


LACKING = {("v5e", "fp8"): "bfloat16", ("a100", "fp8"): "float16 and bfloat16"}
LACKING |= {("h100", "mxfp8"): "float16, bfloat16 and fp8"}


@pytest.mark.parametrize("matmul", ["fp8", "mxfp8"])
@pytest.mark.parametrize("chip", CHIPS)
def test_products_in_eight_bits_need_a_chip_with_units_for_them(chip, matmul, monkeypatch):
    monkeypatch.setattr(api, "missing", lambda chip: "No compiler is here.")
    policies = [f"c=bf16; */mlp: m={matmul}{more}" for more in ("", "+emulate")]
    report = plan(in_eight_bits, policies, chip)
    refused, emulated = report.rows
    has_units = chip == "b200" or (chip, matmul) == ("h100", "fp8")
    told = f"'*/mlp: matmul={matmul}': {chip} has no units for matmul={matmul}: GPUs of NVIDIA"
    assert has_units == (refused.error == "") and (has_units or told in refused.error)
    assert "float8_e4m3fn" in refused.products[0].dtypes and emulated.error == ""
    formats = LACKING.get((chip, matmul))
    assert formats is None or report.notes[-1] == f"{chip} multiplies {formats}."


def test_a_program_that_a_chip_has_no_units_for_is_not_compiled(asked):
    policies = [f"c=bf16; */mlp: m=fp8{more}" for more in ("", "+emulate")]
    refused, emulated = plan(in_eight_bits, policies).rows
    assert refused.peak is None and "cpu has no units" in refused.error
    assert len(asked) == 1 and emulated.peak


def test_topologies_have_as_many_chips_or_more():
    for chip, count in itertools.product(CHIPS.values(), (1, 8, 12, 256)):
        place = chip.topology(count)
        layout = place["topology" if chip.platform == "cuda" else "topology_name"]
        assert math.prod(map(int, layout.rpartition(":")[2].split("x"))) >= count
        assert chip.platform != "cuda" or chip.device in place["target_config"]


# Answers of the compiler.


def with_equinox(policy):
    def step(x, params, state):
        return step_under(policy)(params, state, x)

    params, state, x = shapes()
    return eqx.filter_jit(donate="all-except-first")(step), (x, params, state)


def with_shardings_of_jit(policy):
    mesh = AbstractMesh((2, 4), ("data", "model"))
    rows, whole = NamedSharding(mesh, P(("data", "model"))), NamedSharding(mesh, P())
    jitted = jax.jit(step_under(policy), donate_argnums=(0, 1), in_shardings=(whole, whole, rows))
    return jitted, shapes()


def with_shardings_of_arguments(mesh):
    def placed(tree, spec):
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(lambda x: SHAPE(x.shape, x.dtype, sharding=sharding), tree)

    *whole, x = shapes()
    arguments = *placed(whole, P()), placed(x, P("data"))
    return lambda policy: (make_step(policy)[0], arguments)


def compiled(step, arguments, donated=()):
    return jax.jit(step, donate_argnums=donated).lower(*arguments).compile()


def peak(program):
    return program.memory_analysis().peak_memory_in_bytes


@pytest.mark.thorough
def test_peaks_are_those_of_a_direct_compilation(asked):
    ways = {(): lambda policy: (step_under(policy), shapes()), (0, 1): make_step}
    reports: dict[Any, Any] = {donated: plan(way) for donated, way in ways.items()}
    for donated, report in reports.items():
        direct = compiled(step_under(POLICIES[1]), shapes(), donated)
        assert report.rows[0].peak == peak(direct)
    assert reports[0, 1].rows[0].peak < reports[()].rows[0].peak
    assert "donate_argnums" in reports[()].notes[0] and reports[0, 1].notes == ()
    assert plan(with_equinox).rows[0].peak == reports[0, 1].rows[0].peak


# JAX 0.7.2 wants an explicit mesh in the context, too.
KINDS = [AxisType.Auto, AxisType.Explicit][: 1 + (jax.__version_info__ >= (0, 10))]


@pytest.mark.parametrize("kind", KINDS)
def test_shardings_say_how_many_chips_and_what_they_send(asked, kind):
    mesh = Mesh(jax.devices(), "data", axis_types=(kind,))
    made = with_shardings_of_arguments(mesh)
    step, arguments = made(POLICIES[1])
    program = compiled(step, arguments, (0, 1))
    sent = jmpx.inspect.compiled(program).sent
    assert sent > 0
    makers = [made, with_shardings_of_arguments(mesh.abstract_mesh)]
    makers += [with_shardings_of_jit] if kind == AxisType.Auto else []
    for make in makers:
        report = plan(make)
        (row,) = report.rows
        assert row.error == ""
        assert (row.chips, row.peak, sum(row.sent.values())) == (8, peak(program), sent)
        assert "on 8 x cpu" in str(report)


def test_arguments_of_a_shard_map_without_shardings_are_on_all_chips(asked):
    mesh = Mesh(jax.devices(), "data")

    def step(w, x):
        total = lambda w, x: jax.lax.psum(x @ w, "data")  # noqa: E731
        return jax.shard_map(total, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())(w, x)

    row = row_of(step, SHAPE((N, N), "float32"), SHAPE((64, N), "float32"))
    assert (row.chips, row.error) == (8, "") and row.sent


def test_objects_of_nnx_are_arguments_with_a_state(asked):
    def make_step(policy):
        def make():
            model = nnx.BatchNorm(N, rngs=nnx.Rngs(0))
            return model, nnx.Optimizer(model, ADAM, wrt=nnx.Param)

        def step(model, optimizer, x):
            grads = nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)
            optimizer.update(model, grads)

        return nnx.jit(step), (*nnx.eval_shape(make), SHAPE((BATCH, N), "float32"))

    (row,) = plan(make_step).rows
    # The state and the moments of the model, old and new, and the input.
    assert row.error == "" and row.peak
    assert row.peak > 4 * (2 * (4 + 2 * 2) * N + BATCH * N)


def test_what_is_static_goes_in_as_it_is(asked):
    step = jax.jit(lambda x, n, scale: x * n * scale, static_argnums=1, donate_argnums=0)
    x = SHAPE((BATCH, N), "float32")
    report = plan(lambda policy: (step, (x, 3, 0.5)))
    assert report.rows[0].peak == 4 * BATCH * N and report.notes == ()


@pytest.mark.thorough
def test_keys_and_loss_scales_are_no_arrays_to_refuse(asked):
    def step(key, scale, x):
        grad = scale.scale(x.sum()) + jax.random.normal(key)
        return grad, scale.adjust(jnp.isfinite(grad))

    assert row_of(step, jax.random.key(0), jmpx.DynamicLossScale(), EIGHT).error == ""
    jitted = jax.jit(step, in_shardings=NamedSharding(AbstractMesh((8,), ("data",)), P()))
    # JAX 0.7.2 cannot export a sharded key.
    row = row_of(jitted, jax.random.PRNGKey(0), jmpx.DynamicLossScale(), EIGHT)
    assert (row.chips, row.error) == (8, "")


def test_64_bits(asked):
    with enable_x64():
        row = row_of(jnp.sin, SHAPE((1024,), "float64"))
    assert (row.error, row.peak) == ("", 2 * 8 * 1024)


# Answers are kept.


def test_a_program_is_compiled_once(asked, cache, monkeypatch):
    first = plan(tiny)
    assert (len(asked), plan(tiny), len(asked)) == (1, first, 1)
    plan(tiny, ["c=f16"])
    assert len(asked) == 2
    monkeypatch.setattr(compiling, "_version", lambda package: "another")
    assert (plan(tiny).rows[0].peak, len(asked)) == (first.rows[0].peak, 3)
    files = [*cache.iterdir()]
    assert [file.suffix for file in files] == [".json"] * 3
    for file in files:
        file.write_text(file.read_text()[:9])  # as if a disk was full
    assert (plan(tiny).rows[0].peak, len(asked)) == (first.rows[0].peak, 4)


def test_donation_and_lines_of_code(asked):
    row_of(jnp.sin, EIGHT)
    row_of(jax.jit(jnp.sin, donate_argnums=0), EIGHT)
    assert len(asked) == 2
    for lines in ("", "\n\n"):
        names = {}
        exec(lines + "def step(x):\n    return x * 2", names)
        row_of(names["step"], EIGHT)
    assert len(asked) == 3


def test_a_folder_that_cannot_be_made_is_no_error(asked, cache):
    cache.parent.parent.mkdir()
    cache.parent.write_text("a file")
    assert plan(tiny).rows[0].error == ""


# A failure is a row.


def refusing(policy):
    def step(x):
        if "f16" in policy and "bf16" not in policy:
            raise NotImplementedError("no float16 here")
        return x * 2

    return step, (EIGHT,)


def test_a_policy_that_cannot_be_traced_is_a_row(asked):
    report = plan(refusing, ["c=f16", "c=bf16"])
    assert [row.error for row in report.rows] == ["NotImplementedError: no float16 here", ""]
    assert "c=f16: NotImplementedError: no float16 here" in str(report)
    with pytest.raises(NotImplementedError, match="no float16"):
        plan(refusing, ["c=f16"])


def test_what_no_compiler_can_be_asked_is_a_row(asked):
    def step(x):
        jax.debug.print("{}", x[0])
        return x

    assert "calls Python" in row_of(step, EIGHT).error
    whole = NamedSharding(AbstractMesh((4096,), ("data",)), P())
    row = row_of(jnp.sin, SHAPE((8, 8), "float32", sharding=whole))
    assert "make the mesh smaller" in row.error


OUT_OF_MEMORY = """RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO
temporaries (19.50G) exceeds available HBM (15.75G). """
OTHER_WORDS = "RESOURCE_EXHAUSTED: Ran out of memory. Used 512.5M of 15.75G hbm. Exceeded by 8M."


@pytest.mark.parametrize(
    ("text", "size", "fits"),
    [(OUT_OF_MEMORY, 19.5 * 2**30, False), (OTHER_WORDS, 512.5 * 2**20, False)]
    + [("RESOURCE_EXHAUSTED: no registers", None, False), ("INTERNAL: oh", None, None)],
)
def test_what_a_compiler_refuses_is_a_row(asked, monkeypatch, text, size, fits):
    def refuse(self, compiler_options=None):
        raise jax.errors.JaxRuntimeError(text)

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    report = plan(tiny)
    (row,) = report.rows
    assert (row.peak, row.fits) == (size, fits)
    assert row.error in text.replace("\n", " ") and row.error in str(report)


def test_a_gpu_takes_what_does_not_fit_and_the_row_says_so(asked, monkeypatch):
    monkeypatch.setitem(CHIPS, "cpu", Chip("cpu", "cpu", "cpu", 10, "2x4"))
    assert plan(tiny).rows[0].fits is False
    assert "  no  " in str(plan(tiny))


SCRIPT = """#!{python}
import json, os, sys
head, body = sys.stdin.buffer.read().split(b"\\n", 1)
assert sys.argv[1:4] == ["-P", "-m", "jmpx._inspect.plan.compiling"] and body == b"program"
if json.loads(head)["dies"]:
    print("I0000 a note", file=sys.stderr)
    os.kill(os.getpid(), 9)
names = "JAX_PLATFORMS", "TPU_WORKER_ID", "JAX_ENABLE_COMPILATION_CACHE", "PYTHONPATH"
print("a note of the compiler")
print(json.dumps({{name: os.environ.get(name) for name in names}}))
"""


def test_the_compiler_runs_in_a_process_that_may_die(monkeypatch, tmp_path):
    script = tmp_path / "python"
    script.write_text(SCRIPT.format(python=sys.executable))
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    program: Any = types.SimpleNamespace(serialize=lambda: bytearray(b"program"))
    settings = compiling._asked({"dies": False}, program, CHIPS["v5e"])
    assert settings.pop("PYTHONPATH").split(":") == [each or os.getcwd() for each in sys.path]
    assert [*settings.values()] == ["cpu", "0", "false"]
    found = compiling._asked({"dies": True}, program, CHIPS["v5e"])
    assert found == {"error": "The compiler ended with status -9: I0000 a note"}


def test_a_process_that_died_is_asked_again(asked, monkeypatch):
    answers = [{"error": "The compiler ended with status -9: "}, {"chips": 1, "peak": 5, "fits": 1}]
    monkeypatch.setattr(compiling, "_asked", lambda *_: answers.pop(0))
    assert [plan(tiny).rows[0].peak for _ in range(3)] == [None, 5, 5]


def test_the_real_process_says_why_there_is_no_compiler():
    pytest.importorskip("flatbuffers")
    exported = jax.export.export(jax.jit(jnp.sin))(EIGHT)
    request = {"topology": {"platform": "nothing"}}
    found = compiling._asked(request, exported, CHIPS["h100"])
    assert list(found) == ["error"] and "nothing" in found["error"]
    assert found["error"].startswith(f"{compiling.BROKEN} (") and "Error: " in found["error"]
    assert found["error"].endswith("): pip install 'jmpx[cpu]' into an environment of its own.")


def test_a_compiler_that_does_not_start_is_one_sentence_and_asked_once(asked, monkeypatch):
    asks, sentence = [], f"{compiling.BROKEN} (RuntimeError: no plugin): pip install it."
    monkeypatch.setattr(compiling, "_asked", lambda *_: asks.append(1) or {"error": sentence})
    report = plan(tiny, ["c=f32", "c=bf16", "c=f16"])
    assert len(asks) == 1 and [row.error for row in report.rows] == [""] * 3
    assert str(report).count("no plugin") == 1
    assert report.notes[0] == f"{sentence} These are counts of the trace."


@pytest.mark.parametrize("with_tqdm", [True, False])
def test_each_row_is_written_when_it_is_there(asked, monkeypatch, capsys, with_tqdm):
    compile, seen = compiling._asked, []

    def some(policy):  # a row says why `make_step` itself refuses a policy, too
        if policy == "c=f16":
            raise NotImplementedError("no float16 here")
        return tiny(policy)

    def slowly(*arguments):
        seen.append(capsys.readouterr())
        return compile(*arguments)

    monkeypatch.setattr(compiling, "_asked", slowly)
    if not with_tqdm:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    report = plan(some, ["c=f32", "c=f16", "c=bf16"])
    seen.append(capsys.readouterr())
    assert [each.out for each in seen] == ["", "", ""] and seen[0].err == ""
    first, refused = re.findall(r"c=\w+: .*", seen[1].err)
    assert re.fullmatch(r"c=f32: peak 64 B, fits yes, accessed 64 B, compiled \d s", first)
    assert refused == "c=f16: NotImplementedError: no float16 here"
    assert "c=bf16: peak 48 B" in seen[2].err and len(report.rows) == 3
    plan(tiny, ["c=f32"], chip=None)
    assert capsys.readouterr().err == ""  # the counts of a trace are there at once


def test_the_stack_trace_of_a_plugin_without_its_chip_is_hidden(asked, monkeypatch, caplog):
    real, logger = jax.devices, logging.getLogger("jax.plugins")

    def start(*names):
        try:
            raise RuntimeError("Unable to load CUDA. Is it installed?")
        except RuntimeError:
            logger.exception("Jax plugin configuration error")
        return real(*names)

    monkeypatch.setattr(jax, "devices", start)
    plan(tiny)
    assert caplog.records == []
    logger.error("another")
    assert [record.message for record in caplog.records] == ["another"]


# The report.


def test_the_report(asked, tmp_path):
    policies = ["c=f32", jmpx.get_policy_map("c=bf16; op.tanh: f32"), jmpx.get_policy("c=f16")]
    report = plan(make_step, policies)
    assert [row.policy for row in report.rows] == ["c=f32", "c=bf16; op.tanh: c=f32", "c=f16"]
    head, table, *_ = str(report).split("\n\n")
    assert head.startswith("Plan of step on cpu, 1.00 TiB (jax")
    names, *rows = table.splitlines()
    assert names.split() == ["peak", "fits", "FLOP", "products", "accessed", "compiled"]
    assert [row.split("  ")[0] for row in rows] == [row.policy for row in report.rows]
    assert "f32 100.0 %" in rows[0] and "bf16 100.0 %" in rows[1]
    data = json.loads(report.to_json())
    assert data["rows"][1]["products"][0]["dtypes"] == "bfloat16 x bfloat16"
    assert data == json.loads(json.dumps(report.to_dict()))
    assert report.to_html().count("<tr>") == 4 and "&lt;" not in report.to_html()
    report.plot(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 5000
