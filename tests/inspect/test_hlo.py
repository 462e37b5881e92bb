"""`jmpx.inspect.compiled`: how it reads programs, and the collectives that it finds and prints."""

import contextlib
import functools
import io
import json
import re
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tpu
from compiled_step import partitioned
from helpers import ROOT
from helpers.findings_of import shape as f32
from jax import lax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jmpx

HAS_FRAMES = jax.__version_info__ >= (0, 9)  # older programs name a line alone, of the call
needs_frames = pytest.mark.skipif(not HAS_FRAMES, reason="HLO names no stack of calls")
look = jmpx.inspect.compiled
MESH = Mesh(np.array(jax.devices()), ("data",))
ROWS = P("data")


def mapped(fn, spec: Any = ROWS, out: Any = None, mesh=MESH):
    out = spec if out is None else out
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=out, check_vma=False))


def lowered(fn, *shapes, **options):
    return mapped(fn, **options).lower(*(f32(*shape) for shape in shapes))


def readings(program):
    """The reports on a program as JAX wrote it, after XLA's partitioner, and compiled."""
    text, compiled = partitioned(program)
    return [look(each).collectives for each in (program, text, compiled)]


def bf16(x):
    return x.astype(jnp.bfloat16)


def gathered(x):
    return lax.all_gather(x, "data", tiled=True)


# Bytes and groups


EXCHANGES = {  # of f32[1024] on each of eight devices, with the bytes sent
    "all-reduce": (lambda x: lax.psum(x, "data"), 2 * 4096 * 7 / 8),
    "all-gather": (lambda x: lax.all_gather(x, "data", tiled=True), 8 * 4096 * 7 / 8),
    "reduce-scatter": (lambda x: lax.psum_scatter(x, "data", tiled=True), 4096 * 7 / 8),
    "all-to-all": (lambda x: lax.all_to_all(x, "data", 0, 0, tiled=True), 4096 * 7 / 8),
    "collective-permute": (
        lambda x: lax.ppermute(x, "data", [(i, (i + 1) % 8) for i in range(8)]),
        4096,
    ),
}


@pytest.mark.parametrize("kind", EXCHANGES)
def test_the_bytes_of_a_collective(kind):
    exchange, sent = EXCHANGES[kind]
    for found in readings(lowered(exchange, (8192,))):
        assert {(one.kind, one.dtype, one.times) for one in found} == {(kind, "f32", 1)}
        assert sum(one.sent for one in found) == sent  # a CPU's all-to-all has eight parts
        assert {one.group for one in found} == {8} and not any(one.is_scalar for one in found)
        place = str(found[0].place)  # older versions of JAX compile programs without functions
        assert re.fullmatch(r".*test_hlo\.py:\d+ \((<lambda>)?\)", place)


def test_a_ragged_exchange_counts_what_it_may_send():
    step = lambda *arrays: lax.ragged_all_to_all(*arrays, axis_name="data")  # noqa: E731
    sizes = [jax.ShapeDtypeStruct((64,), jnp.int32)] * 4
    (one,) = look(mapped(step).lower(f32(128, 4), f32(128, 4), *sizes)).collectives
    assert one[:4] == ("ragged-all-to-all", "f32", 16 * 4 * 4, 8)  # XLA:CPU cannot compile it
    assert one.sent == 16 * 4 * 4 * 7 / 8 and one.parameter == "arrays[0]"


DTYPES = {"bfloat16": "bf16", "float16": "f16", "float8_e4m3fn": "f8e4m3fn", "int8": "s8"}
DTYPES |= {"uint16": "u16", "bool": "pred", "complex64": "c64"}


def test_dtypes_have_the_names_of_hlo():
    shapes = [jax.ShapeDtypeStruct((64,), dtype) for dtype in DTYPES]
    program = mapped(lambda arrays: [gathered(x) for x in arrays]).lower(shapes)
    expected = [(DTYPES[x.dtype.name], 64 * x.dtype.itemsize) for x in shapes]
    for found in readings(program)[:2]:
        assert [(one.dtype, one.bytes) for one in found] == expected


def test_groups_of_some_of_the_devices():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    for axes, size in (("data", 4), ("model", 2), (("data", "model"), 8)):
        program = lowered(lambda x, axes=axes: lax.psum(x, axes), (64,), spec=P(), mesh=mesh)
        for found in readings(program):
            assert [(one.group, one.bytes) for one in found] == [(size, 256)]


# Loops, functions and branches


def test_collectives_in_loops_and_functions_count_as_often_as_they_run():
    called = jax.jit(lambda x: lax.psum(x * x, "data"))

    def outer(x, _):
        x, _ = lax.scan(lambda x, _: (x + called(x), None), x, length=3)
        return x + lax.all_gather(x, "data").sum(0).astype(jnp.float32), None

    def step(x):
        return lax.scan(outer, called(x), length=5)[0]

    for found in readings(lowered(step, (64,))):
        times = sorted((one.kind, one.times, one.in_while) for one in found)
        expected = [("all-gather", 5, False), ("all-reduce", 1, False), ("all-reduce", 15, False)]
        assert times == expected
        assert sum(one.sent for one in found) == 16 * 2 * 32 * 7 / 8 + 5 * 256 * 7 / 8


def looped(holds, start, step=1):
    def loop(x):
        body = lambda c: (c[0] + step, lax.psum(c[1], "data") / 8)  # noqa: E731
        return lax.while_loop(holds, body, (start, x))[1]

    return lowered(loop, (64,))


def test_the_trips_of_a_loop_that_counts(rng):
    start, stop, step = (int(rng.integers(*limits)) for limits in ((-9, 9), (-9, 30), (1, 5)))
    for holds in (lambda c: c[0] < stop), (lambda c: stop > c[0]):
        for found in readings(looped(holds, start, step))[:2]:
            expected = [(len(range(start, stop, step)), False)]
            assert [(one.times, one.in_while) for one in found] == expected


UNCOUNTED = {
    "data": lambda c: c[1][0] > 0,
    "data and a counter": lambda c: (c[0] < 5) & (c[1][0] > 0),
    "a bound that is an input": lambda c: c[0] < c[1][0].astype(int),
    "downwards": lambda c: c[0] >= 5,
}


def test_a_loop_whose_trips_are_unknown_counts_one_and_is_marked():
    for holds in UNCOUNTED.values():
        for found in readings(looped(holds, 0))[:2]:
            assert [(one.times, one.in_while) for one in found] == [(1, True)]
    text = str(look(looped(holds, 0)))
    assert "1+" in text and "of unknown length" in text


def test_all_branches_of_a_conditional_count_and_are_marked():
    def step(x):
        y = lax.cond(x[0] > 0, lambda x: lax.psum(x, "data"), lambda x: x, x)
        return lax.psum(y, "data")

    program = lowered(step, (64,))
    for found in readings(program)[:2]:
        assert sorted(one.in_branch for one in found) == [False, True]
    assert "All branches" in str(look(program))


# Sources and results of collectives


@jax.custom_vjp
def custom(x):
    return bf16(x)


custom.defvjp(lambda x: (bf16(x), None), lambda _, g: (g.astype(jnp.float32),))

# Gathers of two parameters: `w`, of shape (3, 16, 8) on a device, and `v`, of (16, 8).
COPIES = {
    "as it is": lambda w, v: w,
    "sliced": lambda w, v: w[1],
    "transposed": lambda w, v: bf16(w).T,
    "reshaped": lambda w, v: w.reshape(48, 8),
    "scaled by a constant": lambda w, v: (w * 4).astype(jnp.float16),
    "masked": lambda w, v: jnp.where(jnp.arange(8) < 4, w, 0),
    "in a jitted function": lambda w, v: jax.jit(bf16)(w),  # converted, too
    "with a custom derivative": lambda w, v: custom(w),
    "behind a barrier": lambda w, v: lax.optimization_barrier((w, v))[0],
    "copied into zeros": lambda w, v: lax.dynamic_update_index_in_dim(w * 0, w[0], 0, 0),
    "stacked by a loop": lambda w, v: lax.scan(lambda c, x: (c, bf16(x)), 0, w)[1],
    "gathered before": lambda w, v: gathered(bf16(w)),
    "chosen by a branch": lambda w, v: lax.cond(v.sum() > 0, lambda: bf16(w), lambda: bf16(w) * 2),
}
OTHERS = {
    "an activation": lambda w, v: w[0].T @ v,
    "two parameters": lambda w, v: w[0] + v,
    "the square": lambda w, v: w * w,
    "a function": lambda w, v: jnp.tanh(w),
    "a sum": lambda w, v: w.sum(0),
    "the sum of a loop": lambda w, v: lax.scan(lambda c, x: (c + x, None), v, w)[0],
    "either of two": lambda w, v: jnp.where(v > 0, w[0], v),
    "a constant": lambda w, v: jnp.ones((8, 8)),
}
PARAMS = {"w": f32(3, 128, 8), "b": {"v": f32(128, 8)}}


@pytest.mark.parametrize(("takes", "parameter"), [(COPIES, "params['w']"), (OTHERS, "")])
@pytest.mark.usefixtures("standard_promotion")
def test_which_parameter_a_gather_carries(takes, parameter):
    def step(params):
        return [gathered(take(params["w"], params["b"]["v"])) for take in takes.values()]

    program = mapped(step, ({"w": P(None, "data"), "b": {"v": ROWS}},), P()).lower(PARAMS)
    written, partitioned, _ = readings(program)  # the compiler may sum before it gathers
    assert len(written) == len(takes) + (takes is COPIES)
    for found in (written, partitioned):
        assert {one.parameter for one in found if one.kind == "all-gather"} == {parameter}


def test_operations_that_carry_functions_or_odd_constants():
    # A sum or a sort is no copy of its operand, whatever its function does; and no value of a
    # constant may be asked for that JAX cannot return.
    def step(x):
        values = [
            jnp.sort(x, 0), lax.top_k(x, 2)[0], jnp.cumsum(x, 0), jnp.fft.fft(x) * 1j,
            lax.reduce_window(x, 0.0, lax.add, (2, 1), (1, 1), "SAME"), x.at[0].add(1.0),
            jax.random.normal(jax.random.key(0), (3,)), lax.associative_scan(jnp.add, x),
            lax.erf_inv(x / 9), jax.pure_callback(lambda x: x, f32(4, 4), x), x.sum(0),
        ]  # fmt: skip
        return [lax.psum(value.real, "data") for value in values]

    found = look(lowered(step, (32, 4))).collectives
    assert len(found) == 11
    assert {(one.kind, one.parameter) for one in found} == {("all-reduce", "")}
    assert [one.results for one in found] == [(f"result[{i}]",) for i in range(11)]


def test_parameters_are_named_also_if_others_are_unused():
    for found in readings(lowered(lambda a, b, c: gathered(c), (8,), (8,), (8,))):
        assert [one.parameter for one in found] == ["c"]


# Fully sharded training of three layers and a head

MODEL = {"layers": f32(3, 16, 16), "head": f32(16, 24)}
SPECS = {"layers": P(None, "data"), "head": ROWS}
BITS = {"bfloat16": "bf16", "float16": "f16"}


def step_of(gather, dtype=jnp.float32):
    def loss_fn(params, x):
        layer = lambda h, w: (jnp.tanh(h @ gather(w.astype(dtype))), None)  # noqa: E731
        h, _ = lax.scan(layer, x.astype(dtype), params["layers"])
        return jnp.sum((h @ gather(params["head"].astype(dtype))).astype(jnp.float32) ** 2)

    def step(params, x):
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss, grads

    return step


@functools.cache
def by_hand(dtype):
    """The step under shard_map: gathers and their transposes in a dtype."""

    def step(params, x):
        params, loss, _ = step_of(gathered, dtype)(params, x)
        return params, lax.psum(loss, "data")

    return mapped(step, (SPECS, ROWS), (SPECS, P())).lower(MODEL, f32(16, 16))


def under_jit(mesh=MESH):
    """The same under jit, where XLA's partitioner inserts the collectives that shardings need."""
    split = jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS)
    rows = NamedSharding(mesh, ROWS)
    step = lambda params, x: step_of(lambda w: w, jnp.bfloat16)(params, x)[:2]  # noqa: E731
    jitted = jax.jit(step, in_shardings=(split, rows), out_shardings=(split, None))
    return jitted.lower(MODEL, f32(512, 16))


@pytest.mark.parametrize("dtype", BITS)
def test_a_lowered_step_has_the_dtypes_of_the_program_which_a_cpu_widens(dtype):
    report = look(by_hand(dtype))
    bits, size = BITS[dtype], np.dtype(dtype).itemsize
    layer, head = 16 * 16 * size, 16 * 24 * size
    arrays = [one for one in report.collectives if not one.is_scalar]
    assert {(*one[:3], one.times, one.parameter, one.results[:1]) for one in arrays} == {
        ("all-gather", bits, layer, 3, "params['layers']", ()),
        ("all-gather", bits, head, 1, "params['head']", ()),
        ("reduce-scatter", bits, layer, 3, "", ("result[0]['layers']",)),
        ("reduce-scatter", bits, head, 1, "", ("result[0]['head']",)),
    }
    loss = 2 * 4 * 7 / 8
    assert report.sent == 2 * (3 * layer + head) * 7 / 8 + loss
    assert (report.program, report.devices, report.platform) == ("jit_step", 8, None)
    (note,) = report.notes  # nothing is left to XLA's partitioner here
    assert note.startswith("Outside of shard_map, XLA may insert more")
    functions = {one.place and one.place.function for one in report.collectives}
    assert functions == ({"gathered", "step"} if HAS_FRAMES else {""})
    report = look(by_hand(dtype).compile())
    assert report.platform == "cpu"
    widened = {one.dtype for one in report.collectives if not one.is_scalar}
    assert widened == {"f16" if dtype == "float16" else "f32"}
    products, note = report.notes
    assert products.startswith("Compiled for a CPU") and "multiplies in float32" in products
    assert note.startswith("Compiled for a CPU") and "bfloat16 to float32" in note
    assert note in str(report).replace("\n", " ")
    parameters = {one.parameter for one in report.collectives if one.kind == "all-gather"}
    assert parameters == {"params['layers']", "params['head']"}


def test_the_outputs_that_a_gradient_becomes():
    def step(params, state, x):
        *_, grads = step_of(gathered)(params, x)
        norm = jnp.sqrt(lax.psum(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)), "data"))
        grads = jax.tree.map(lambda g: g / jnp.maximum(norm, 1), grads)  # all outputs have the norm
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mean"], grads)
        square = jax.tree.map(lambda s, g: 0.9 * s + 0.1 * g * g, state["square"], grads)
        update = lambda p, m, s: p - 0.1 * m / (jnp.sqrt(s) + 1e-8)  # noqa: E731
        return jax.tree.map(update, params, mean, square), {"mean": mean, "square": square}

    states = {"mean": SPECS, "square": SPECS}
    step = mapped(step, (SPECS, states, ROWS), (SPECS, states))
    program = step.lower(MODEL, {"mean": MODEL, "square": MODEL}, f32(64, 16))
    for given in (program, program.compile()):
        report = look(given)
        for name, times in (("layers", 3), ("head", 1)):
            after = ("[0]", "[1]['mean']", "[1]['square']")
            outputs = tuple(f"result{each}['{name}']" for each in after)
            (gradient,) = (one for one in report.collectives if one.results == outputs)
            assert gradient.kind == "reduce-scatter" and gradient.is_backward
            assert gradient.times == times and gradient.parameter == ""
            gathers = [one for one in report.collectives if one.parameter == f"params['{name}']"]
            found = [(one.kind, one.times, one.is_backward) for one in gathers]
            assert found == [("all-gather", times, False)]
        (norm,) = (one for one in report.collectives if one.kind == "all-reduce")
        assert norm.is_scalar and norm.results == ()
        assert "grad -> result[0]['head']" in str(report)


# Collectives that XLA inserts

OUTSIDE = "Outside of shard_map, XLA may insert more collectives: partitioned=True has them."


def test_under_jit_a_lowered_step_says_where_its_collectives_are():
    program = under_jit()
    report = look(program)
    assert report.collectives == () and report.sent == 0
    assert str(report).startswith("jit__lambda on 8 devices\n\n12 products, 3.54 MFLOP\n\n")
    assert str(report).endswith(f"\n\nno collectives\n\n{OUTSIDE}")
    reports = look(program, partitioned=True), look(program.compile())
    for report, bits, size in zip(reports, ("bf16", "f32"), (2, 4), strict=True):
        assert report.devices == 8 and report.flops == look(program).flops / 8
        found = {(*one[:3], one.times, one.parameter) for one in report.collectives}
        for name, elements, times in (("layers", 256, 3), ("head", 384, 1)):
            assert ("all-gather", bits, elements * size, times, f"params['{name}']") in found
            assert ("all-reduce", bits, elements * size, times, "") in found
        reduced = (one.results for one in report.collectives if one.kind == "all-reduce")
        assert {*reduced} == {(), ("result[0]['head']",), ("result[0]['layers']",)}
        assert OUTSIDE not in str(report)
    assert reports[0].counts() == {"bf16 x bf16 -> bf16": 12}  # a CPU's compiler widens some
    notes = [" ".join(report.notes) for report in reports]
    assert "partitioned=True) shows those of the program" in notes[1]
    assert notes[0].startswith("The program as XLA's partitioner made it") and len(notes[0]) < 80


def test_what_is_not_lowered_cannot_be_partitioned():
    step = jax.jit(jnp.sin).lower(1.0)
    assert look(step, partitioned=True) == look(step)  # of one device
    for given in step.compile(), step.as_text("hlo"):
        with pytest.raises(TypeError, match="takes a lowered step, and got a (Compiled|str): pass"):
            look(given, partitioned=True)


def test_the_partitioned_program_is_read_though_jax_keeps_compiled_ones(tmp_path):
    settings: Any = {"compilation_cache_dir": str(tmp_path), "enable_compilation_cache": True}
    settings |= {"persistent_cache_min_compile_time_secs": 0}
    settings |= {"persistent_cache_min_entry_size_bytes": -1}
    before = {name: getattr(jax.config, f"jax_{name}") for name in settings}
    split, whole = NamedSharding(MESH, ROWS), NamedSharding(MESH, P())
    step = jax.jit(lambda x: bf16(x).T @ bf16(x), in_shardings=split, out_shardings=whole)
    program = step.lower(f32(64, 16))
    try:
        for name, value in settings.items():
            jax.config.update(f"jax_{name}", value)
        compilation_cache.reset_cache()
        program.compile()
        assert [*tmp_path.iterdir()]
        for _ in range(2):
            (one,) = look(program, partitioned=True).collectives
            assert one[:4] == ("all-reduce", "bf16", 16 * 16 * 2, 8)
    finally:
        for name, value in before.items():
            jax.config.update(f"jax_{name}", value)
        compilation_cache.reset_cache()


@pytest.mark.slow  # a compiler of its own
@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")
def test_compiled_for_a_tpu_the_dtypes_are_the_programs():
    report = look(under_jit(Mesh(tpu.devices(), ("data",))).compile())
    assert (report.platform, report.devices) == ("tpu", 8)
    found = {(one.dtype, one.parameter, one.times) for one in report.collectives}
    assert {("bf16", "params['layers']", 3), ("bf16", "params['head']", 1)} <= found
    for name in ("result[0]['layers']", "result[0]['head']"):
        assert {one.dtype for one in report.collectives if one.results == (name,)} == {"bf16"}
    assert "Compiled for a CPU" not in str(report)


def test_what_is_outside_of_shard_map_is_left_to_the_partitioner():
    inner = mapped(lambda x: lax.psum(x, "data"), ROWS, P())
    two = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    options = {"mesh": two, "in_specs": ROWS, "out_specs": P(), "axis_names": {"data"}}
    some = jax.shard_map(lambda x: lax.psum(x, "data"), **options)
    for step in inner, some, lambda x: inner(x) * 2:
        report = look(jax.jit(step).lower(f32(64)))
        assert len(report.collectives) == 1 and report.devices == 8
        assert str(report).endswith(OUTSIDE)


def test_one_device_sends_nothing():
    step = jax.jit(jnp.sin).lower(1.0)
    assert str(look(step)) == "jit_sin on 1 device\n\nno products\n\nno collectives"
    compiled = (
        "jit_sin on 1 device, compiled for cpu\n\nno products\n\nno collectives\n\nmemory of "
    )
    assert str(look(step.compile())).startswith(compiled)


def test_pmap():
    step = jax.pmap(lambda x: lax.psum(bf16(x), "i"), axis_name="i").lower(jnp.ones((8, 4)))
    for given, dtype in ((step, "bf16"), (step.compile(), "f32")):
        report = look(given)
        ((kind, found, _, group),) = (one[:4] for one in report.collectives)
        assert (kind, found, group, report.devices) == ("all-reduce", dtype, 8, 8)
        assert ("Compiled for a CPU" in str(report)) == (given is not step)


# Text and JSON


def gathers(params):
    return look(mapped(lambda params: jax.tree.map(gathered, params), ROWS, P()).lower(params))


def test_text_has_the_largest_arrays_first_with_the_ends_of_long_names(rng):
    names = ["".join(rng.choice(list("abcxyz"), 60)) for _ in range(30)]
    sizes = {name: int(rng.integers(1, 200)) for name in names}
    report = gathers({name: f32(8, size) for name, size in sizes.items()})
    title, none, sent, *_ = str(report).split("\n\n")
    assert (title, none) == ("jit__lambda on 8 devices", "no products")
    assert sent.startswith("a device sends ")
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 110
    largest = max(sizes, key=lambda name: sizes[name])
    rows = lines[lines.index(sent) + 5 :]
    assert rows[0].split()[0] == "sent"
    assert largest[-15:] in rows[1] and "test_hlo.py:" in rows[1]
    assert rows[21] == "... and 10 more, which to_dict() holds"
    assert report.to_html().count(".py:") == 30
    total = sum(8 * size * 4 * 7 / 8 for size in sizes.values())
    assert report.sent == total
    found = json.loads(report.to_json())
    assert found["sent"] == total == sum(one["sent"] for one in found["collectives"])
    parameters = {one["parameter"] for one in found["collectives"]}
    assert parameters == {f"params['{name}']" for name in names}


def test_layers_whose_names_differ_in_numbers_have_one_row():
    layers = {f"block{i}": [f32(8, 4), f32(8, 4)] for i in range(3)} | {"head7": f32(8, 4)}
    report = gathers(layers)
    table = str(report).split("\n\n")[4].splitlines()[1:]
    assert [row.split()[6:9] for row in table[:2]] == [
        ["6", "8", "params['block*'][*]"],
        ["1", "8", "params['head7']"],
    ]
    assert table[0].startswith("672 B") and len(report.collectives) == 7


def test_json_has_every_field():
    report = look(by_hand("bfloat16"))
    found = json.loads(report.to_json())
    assert (found["program"], found["devices"], found["platform"]) == ("jit_step", 8, None)
    for row, one in zip(found["collectives"], report.collectives, strict=True):
        assert one.place is not None and row["place"] == one.place._asdict()
        fields = {name: value for name, value in one._asdict().items() if name != "place"}
        assert {**row, "results": tuple(row["results"])}.items() >= fields.items()
        assert row["sent"] == one.sent


@needs_frames
@pytest.mark.usefixtures("standard_promotion")  # as in a reader's program
def test_the_page_shows_what_its_program_prints():
    page = (ROOT / "docs" / "compiled.md").read_text()
    blocks = re.findall(r"^```(python|text)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    names, printed, compared = {}, None, 0
    for kind, block in blocks:
        if kind == "python" and ">>> " in block:  # tests/docs and test_audit_pages.py run these
            printed = None
        elif kind == "python":
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile(block, "train.py", "exec"), names)
            printed = output.getvalue()
        elif printed is not None:
            # Rows of products have the names that JAX gives them, which differ by version.
            start, left_out, end = block.partition("...\n")
            assert printed.startswith(start) and printed.endswith(end)
            assert left_out or block == printed
            compared += 1
    assert compared == 3
