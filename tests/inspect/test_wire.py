"""`jmpx.inspect.collectives`: what a user asks it, and what it prints."""

import contextlib
import io
import json
import re
from importlib.util import find_spec
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tpu
from collectives import partitioned
from flax import nnx
from helpers import ROOT
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jmpx

HAS_FRAMES = jax.__version_info__ >= (0, 9)  # older programs name a line alone, of the call
needs_frames = pytest.mark.skipif(not HAS_FRAMES, reason="HLO names no stack of calls")

BITS = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()), ("data",))


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


PARAMS = {"layers": f32(3, 16, 16), "head": {"w": f32(16, 24)}}
SPECS = {"layers": P(None, "data"), "head": {"w": P("data")}}
X = f32(16, 16)


def train_step(loss_fn):
    def step(params, x):
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step


def by_hand(mesh, dtype):
    """Fully sharded training under shard_map: gathers and their transposes in a dtype."""

    def gather(shard):
        return lax.all_gather(shard.astype(dtype), "data", tiled=True)

    def loss_fn(params, x):
        layer = lambda h, w: (jnp.tanh(h @ gather(w)), None)  # noqa: E731
        h, _ = lax.scan(layer, x.astype(dtype), params["layers"])
        return jnp.sum((h @ gather(params["head"]["w"])).astype(jnp.float32) ** 2)

    def step(params, x):
        params, loss = train_step(loss_fn)(params, x)
        return params, lax.psum(loss, "data")

    specs: Any = {"in_specs": (SPECS, P("data")), "out_specs": (SPECS, P())}
    return jax.jit(jax.shard_map(step, mesh=mesh, check_vma=False, **specs)).lower(PARAMS, X)


def under_jit(mesh, dtype=jnp.bfloat16, platforms=None):
    """The same under jit, where XLA's partitioner inserts what shardings need."""

    def loss_fn(params, x):
        layer = lambda h, w: (jnp.tanh(h @ w.astype(dtype)), None)  # noqa: E731
        h, _ = lax.scan(layer, x.astype(dtype), params["layers"])
        return jnp.sum((h @ params["head"]["w"].astype(dtype)).astype(jnp.float32) ** 2)

    split = jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS)
    shardings = {
        "in_shardings": (split, NamedSharding(mesh, P("data"))),
        "out_shardings": (split, None),
    }
    return jax.jit(train_step(loss_fn), **shardings).lower(PARAMS, f32(512, 16))


def summary(found):
    return {
        (one.kind, one.dtype, one.bytes, one.times, one.parameter, one.results[:1])
        for one in found
        if not one.is_scalar
    }


@pytest.mark.parametrize("dtype", BITS)
def test_a_lowered_step_has_the_dtypes_of_the_program(mesh, dtype):
    wire = jmpx.inspect.collectives(by_hand(mesh, dtype))
    bits, size = BITS[dtype], np.dtype(dtype).itemsize
    layer, head = 16 * 16 * size, 16 * 24 * size
    assert summary(wire.collectives) == {
        ("all-gather", bits, layer, 3, "params['layers']", ()),
        ("all-gather", bits, head, 1, "params['head']['w']", ()),
        ("reduce-scatter", bits, layer, 3, "", ("result[0]['layers']",)),
        ("reduce-scatter", bits, head, 1, "", ("result[0]['head']['w']",)),
    }
    loss = 2 * 4 * 7 / 8
    assert wire.sent == 2 * (3 * layer + head) * 7 / 8 + loss
    assert (wire.program, wire.devices, wire.platform) == ("jit_step", 8, None)
    (note,) = wire.notes  # nothing is left to XLA's partitioner here
    assert note.startswith("Outside of shard_map, XLA may insert more")
    functions = {one.place and one.place.function for one in wire.collectives}
    assert functions == ({"gather", "step"} if HAS_FRAMES else {""})


@pytest.mark.parametrize("dtype", BITS)
def test_compiled_for_a_cpu_it_says_that_dtypes_were_widened(mesh, dtype):
    wire = jmpx.inspect.collectives(by_hand(mesh, dtype).compile())
    assert wire.platform == "cpu"
    widened = {one.dtype for one in wire.collectives if not one.is_scalar}
    assert widened == {"f16" if dtype == "float16" else "f32"}
    (note,) = wire.notes
    assert note.startswith("Compiled for a CPU") and "bfloat16 to float32" in note
    assert note in str(wire).replace("\n", " ")
    parameters = {one.parameter for one in wire.collectives if one.kind == "all-gather"}
    assert parameters == {"params['layers']", "params['head']['w']"}


def test_under_jit_a_lowered_step_says_where_its_collectives_are(mesh):
    lowered = under_jit(mesh)
    wire = jmpx.inspect.collectives(lowered)
    assert wire.collectives == () and wire.sent == 0
    assert str(wire) == (
        "jit_step on 8 devices: no collectives\n\n"
        "Outside of shard_map, XLA may insert more: lowered.compile() has them."
    )
    text, compiled = partitioned(lowered)  # as the note on CPUs says
    for given, size in ((text, 2), (compiled, 4)):
        wire = jmpx.inspect.collectives(given)
        found = {one[:5] for one in summary(wire.collectives)}
        bits = {2: "bf16", 4: "f32"}[size]
        for name, elements, times in (("layers", 256, 3), ("head", 384, 1)):
            leaf = "params['layers']" if name == "layers" else "params['head']['w']"
            assert ("all-gather", bits, elements * size, times, leaf) in found
            assert ("all-reduce", bits, elements * size, times, "") in found
        results = {one.results for one in wire.collectives if one.kind == "all-reduce"}
        names = ("output 0", "output 1") if given is text else (
            "result[0]['head']['w']", "result[0]['layers']")  # fmt: skip
        assert results == {(), *((name,) for name in names)}


@pytest.mark.slow  # a compiler of its own
@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")
def test_compiled_for_a_tpu_the_dtypes_are_the_programs():
    wire = jmpx.inspect.collectives(
        under_jit(Mesh(tpu.devices(), ("data",)), platforms=("tpu",)).compile()
    )
    assert (wire.platform, wire.devices) == ("tpu", 8)
    found = {(one.dtype, one.parameter, one.times) for one in wire.collectives}
    assert {("bf16", "params['layers']", 3), ("bf16", "params['head']['w']", 1)} <= found
    for name in ("result[0]['layers']", "result[0]['head']['w']"):
        assert {one.dtype for one in wire.collectives if one.results == (name,)} == {"bf16"}
    assert "Compiled for a CPU" not in str(wire)


def test_what_is_outside_of_shard_map_is_left_to_the_partitioner(mesh):
    rows: Any = {"mesh": mesh, "in_specs": P("data"), "out_specs": P()}
    inner = jax.shard_map(lambda x: lax.psum(x, "data"), **rows)
    two = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    some = jax.shard_map(lambda x: lax.psum(x, "data"), axis_names={"data"}, **rows | {"mesh": two})
    for step in inner, some, lambda x: inner(x) * 2:
        wire = jmpx.inspect.collectives(jax.jit(step).lower(f32(64)))
        assert len(wire.collectives) == 1 and wire.devices == 8
        assert str(wire).endswith(
            "Outside of shard_map, XLA may insert more: lowered.compile() has them."
        )


def test_one_device_sends_nothing():
    lowered = jax.jit(jnp.sin).lower(1.0)
    assert str(jmpx.inspect.collectives(lowered)) == "jit_sin on 1 device: no collectives"
    compiled = "jit_sin on 1 device, compiled for cpu: no collectives"
    assert str(jmpx.inspect.collectives(lowered.compile())) == compiled


def test_pmap():
    step = jax.pmap(lambda x: lax.psum(x.astype(jnp.bfloat16), "i"), axis_name="i")
    lowered = step.lower(jnp.ones((8, 4)))
    for given, dtype in ((lowered, "bf16"), (lowered.compile(), "f32")):
        wire = jmpx.inspect.collectives(given)
        ((kind, found, _, group),) = (one[:4] for one in wire.collectives)
        assert (kind, found, group, wire.devices) == ("all-reduce", dtype, 8, 8)
        assert ("Compiled for a CPU" in str(wire)) == (given is not lowered)


def test_lowered_and_compiled_steps_of_equinox_and_nnx(mesh):
    x = jax.device_put(jnp.ones((64, 8)), NamedSharding(mesh, P("data")))
    linear = eqx.nn.Linear(8, 8, key=jax.random.key(0))
    grad_fn = eqx.filter_grad(lambda model, x: jnp.sum(jax.vmap(model)(x)))
    module = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    for lowered in (
        eqx.filter_jit(grad_fn).lower(linear, x),
        nnx.jit(lambda model, x: nnx.grad(lambda model: model(x).sum())(model)).lower(module, x),
    ):
        assert "no collectives\n\nOutside of shard_map" in str(jmpx.inspect.collectives(lowered))
        found = [
            one
            for one in jmpx.inspect.collectives(lowered.compile()).collectives
            if one.bytes == 8 * 8 * 4
        ]
        assert [(one.kind, one.is_backward, len(one.results)) for one in found] == [
            ("all-reduce", True, 1)
        ]


# Text and JSON.


def test_text_has_the_largest_arrays_first_with_the_ends_of_long_names(mesh, rng):
    names = ["".join(rng.choice(list("abcxyz"), 60)) for _ in range(30)]
    sizes = {name: int(rng.integers(1, 200)) for name in names}

    def gathers(params):
        return jax.tree.map(lambda x: lax.all_gather(x, "data", tiled=True), params)

    step = jax.shard_map(gathers, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False)
    lowered = jax.jit(step).lower({name: f32(8, size) for name, size in sizes.items()})
    wire = jmpx.inspect.collectives(lowered)
    lines = str(wire).splitlines()
    assert max(map(len, lines)) <= 110
    largest = max(sizes, key=lambda name: sizes[name])
    rows = lines[lines.index("") + 4 :]
    assert rows[0].startswith("sent") or rows[0].split()[0] == "sent"
    assert largest[-15:] in rows[1] and "test_wire.py:" in rows[1]
    assert rows[21].startswith("and 10 collectives more, ")
    total = sum(8 * size * 4 * 7 / 8 for size in sizes.values())
    assert wire.sent == total
    found = json.loads(wire.to_json())
    assert found["sent"] == total == sum(one["sent"] for one in found["collectives"])
    assert {one["parameter"] for one in found["collectives"]} == {
        f"params['{name}']" for name in names
    }


def test_layers_whose_names_differ_in_numbers_have_one_row(mesh):
    def step(params):
        return jax.tree.map(lambda x: lax.all_gather(x, "data", tiled=True), params)

    layers = {f"block{i}": [f32(8, 4), f32(8, 4)] for i in range(3)} | {"head7": f32(8, 4)}
    rows: Any = {"mesh": mesh, "in_specs": P("data"), "out_specs": P(), "check_vma": False}
    wire = jmpx.inspect.collectives(jax.jit(jax.shard_map(step, **rows)).lower(layers))
    table = str(wire).partition("\n\n")[2].splitlines()[4:]
    assert [row.split()[6:9] for row in table[:2]] == [
        ["6", "8", "params['block*'][*]"],
        ["1", "8", "params['head7']"],
    ]
    assert table[0].startswith("672 B") and len(wire.collectives) == 7


@needs_frames
def test_the_place_of_a_gather_of_jmpx_is_the_users(mesh):
    def loss_fn(params, x):
        whole = jmpx.distributed.gather(params, "data", "c=bf16")  # this line
        return jnp.mean((x @ whole["w"]).astype(jnp.float32) ** 2)

    def step(params, x):
        grad_fn = jmpx.filter_grad(
            loss_fn, jmpx.NoOpLossScale(), policy="c=bf16,r=f32",
            over=jmpx.Over("data", sharded={"w": True}), uncast=0,
        )  # fmt: skip
        return grad_fn(params, x).grads

    rows: Any = {"mesh": mesh, "in_specs": P("data"), "out_specs": P("data")}
    wire = jmpx.inspect.collectives(
        jax.jit(jax.shard_map(step, **rows)).lower({"w": f32(64, 4)}, f32(64, 64))
    )
    line = loss_fn.__code__.co_firstlineno + 1
    found = {(one.kind, one.dtype): str(one.place) for one in wire.collectives if not one.is_scalar}
    where = f"tests/inspect/test_wire.py:{line} (loss_fn)"
    assert found[("all-gather", "bf16")].endswith(where)
    assert found[("reduce-scatter", "f32")].endswith(where)


def test_json_has_every_field(mesh):
    wire = jmpx.inspect.collectives(by_hand(mesh, "bfloat16"))
    found = json.loads(wire.to_json())
    assert (found["program"], found["devices"], found["platform"]) == ("jit_step", 8, None)
    for row, one in zip(found["collectives"], wire.collectives, strict=True):
        assert one.place is not None and row["place"] == one.place._asdict()
        assert row["sent"] == one.sent
        assert {**row, "results": tuple(row["results"])}.items() >= {
            name: value for name, value in one._asdict().items() if name != "place"
        }.items()


def test_shares_are_those_of_kinds_and_dtypes(mesh):
    text = str(jmpx.inspect.collectives(by_hand(mesh, "bfloat16")))
    rows = [line.split() for line in text.splitlines()[3:5]]
    assert [row[:2] for row in rows] == [["50.0", "%"], ["50.0", "%"]]
    assert {tuple(row[-3:]) for row in rows} == {
        ("all-gather", "bf16", "2"), ("reduce-scatter", "bf16", "2"),
    }  # fmt: skip
    assert "1 collective of single numbers, such as a loss or a flag: 7 B" in text
    assert "grad -> result[0]['head']['w']" in text and "params['head']['w']" in text


# Wrong arguments.


def plain(x):
    return x


WRONG = {
    "None": (lambda: None, TypeError, r"a NoneType: pass jax.jit\(step\).lower\(\*args\)"),
    "a function": (lambda: plain, TypeError, r"a function: pass jax.jit\(step\).lower\(\*args\)"),
    "a jitted function": (lambda: jax.jit(plain), TypeError, r"pass jax.jit\(step\).lower"),
    "a traced step": (lambda: jax.jit(plain).trace(1.0), TypeError, r"a Traced: pass jax.jit"),
    "half a text": (lambda: "HloModule jit_f\n\n%a (", ValueError, r"has no `ENTRY`"),
    "StableHLO": (lambda: jax.jit(plain).lower(1.0).as_text(), ValueError, r"pass the lowered"),
}


@pytest.mark.parametrize("look", [jmpx.inspect.collectives, jmpx.inspect.products])
@pytest.mark.parametrize("make, error, match", WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_refused_in_one_sentence(make, error, match, look):
    with pytest.raises(error, match=match) as caught:
        look(make())
    text = str(caught.value)
    assert "\n" not in text and text.endswith(".") and ": pass" in text


@needs_frames
@pytest.mark.usefixtures("standard_promotion")  # as in a reader's program
def test_the_page_shows_what_its_program_prints():
    page = (ROOT / "docs" / "collectives.md").read_text()
    blocks = re.findall(r"^```(python|text)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    names, printed = {}, ""
    for kind, block in blocks:
        if kind == "python":
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile(block, "train.py", "exec"), names)
            printed = output.getvalue()
        else:
            assert block == printed
    assert [kind for kind, _ in blocks].count("text") == 3
