"""Lock files: which rows a program has, and which of them a changed dtype changes."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BF16, F32
from helpers.four_frameworks import FRAMEWORKS, WIDTHS, X

from jmpx._inspect.audit.api import audit
from jmpx._inspect.audit.entries import entries
from jmpx._inspect.audit.lock import differences, text, write
from jmpx._inspect.graph import Graph
from jmpx._inspect.programs import traced_program
from jmpx._jaxprs.places import Place


def entries_of(fn, *args):
    return entries(Graph(traced_program(fn, args)))


def rows_of(fn, *args):
    return {(each.scope, each.operation, each.dtypes) for each in entries_of(fn, *args)}


def shape(*sizes, dtype=BF16):
    return jax.ShapeDtypeStruct(sizes, dtype)


# Which rows a program has


def mlp(params, x):
    with jax.named_scope("mlp"):
        return jnp.tanh(x @ params["up"]) @ params["down"]


def block(params, x, mlp=mlp):
    with jax.named_scope("attention"):
        scores = jnp.einsum("td,sd->ts", x @ params["q"], x).astype(F32)
        mixed = jnp.einsum("ts,sd->td", jax.nn.softmax(scores).astype(BF16), x)
    return x + mlp(params, jax.checkpoint(jnp.sin)(mixed))


def loss_fn(params, tokens, y, block=block):
    def body(x, params):
        with jax.named_scope("blocks"):
            return block(params, x), x[0, 0].astype(F32)

    with jax.named_scope("table"):
        x = params["table"][tokens]
    x, firsts = jax.lax.scan(body, x, params["blocks"])  # carry
    with jax.named_scope("head"):
        logits = jnp.sum(x, axis=0, dtype=BF16).astype(F32) @ params["head"]
        return ((logits - y) ** 2).sum() + firsts.sum()


BLOCKS = {"q": shape(3, 4, 4), "up": shape(3, 4, 8), "down": shape(3, 8, 4)}
ARGUMENTS = (
    {"table": shape(7, 4), "blocks": BLOCKS, "head": shape(4, 2, dtype=F32)},
    shape(5, dtype=np.dtype(np.int32)),
    shape(2, dtype=F32),
)
EXPECTED = """\
# jmpx precision lock 1
# The dtypes of products, convolutions, reductions and loop carries, by scope, without counts.
# To accept those that the program has now, delete this file and write it again.

[(outermost)]
carry: bfloat16
carry, backward: bfloat16

[blocks/attention]
dot_general: bfloat16 x bfloat16
dot_general, backward: bfloat16 x bfloat16
reduce_sum: float32
reduce_sum, backward: float32

[blocks/mlp]
dot_general: bfloat16 x bfloat16
dot_general, backward: bfloat16 x bfloat16

[head]
dot_general: float32 x float32
dot_general, backward: float32 x float32
reduce_sum: bfloat16
reduce_sum: float32

[table]
scatter_add, backward: bfloat16

# end of lock
"""


def test_the_text_is_the_same_on_all_lines_of_jax():
    assert text(entries_of(loss_fn, *ARGUMENTS)) == EXPECTED


HELPERS = {
    "mlp": functools.partial(block, mlp=jax.jit(mlp)),
    "mlp, twice": functools.partial(block, mlp=jax.jit(jax.jit(mlp))),
    "block": jax.jit(block),
    "both": jax.jit(functools.partial(block, mlp=jax.jit(mlp))),
    "checkpoint": functools.partial(block, mlp=jax.checkpoint(mlp)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", HELPERS)
def test_code_may_move_into_a_helper(name):
    def helped(*args):
        return loss_fn(*args, block=HELPERS[name])

    for fn in (helped, jax.jit(helped), jax.value_and_grad(helped)):
        assert text(entries_of(fn, *ARGUMENTS)) == EXPECTED


def test_there_are_no_counts():
    def often(params, x, y):
        return loss_fn(params, x, y) + loss_fn(params, x, y + 1)

    def longer(leaf):
        return shape(2 * leaf.shape[0], *leaf.shape[1:], dtype=leaf.dtype)

    params, x, y = ARGUMENTS
    params = {**params, "blocks": jax.tree.map(longer, params["blocks"])}
    assert text(entries_of(often, params, longer(x), y)) == EXPECTED


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_scopes_are_the_paths_of_modules(framework):
    _, model, adapter, _ = FRAMEWORKS[framework]
    run = adapter("c=bf16,o=f32; */block/*: c=f16")
    rows = rows_of(lambda model, x: run(model, x).sum(), model, X)
    root = "net/" if framework == "haiku" else ""
    dtypes = {"block/inner": "float16", "block/outer": "float16"}
    assert {row for row in rows if row[1].startswith("dot_general")} == {
        (f"{root}{path}", operation, f"{dtype} x {dtype}")
        for name in WIDTHS
        for path in [f"block/{name}" if name in ("inner", "outer") else name]
        for dtype in [dtypes.get(path, "bfloat16")]
        for operation in ("dot_general", "dot_general, backward")
    }


def test_products_convolutions_reductions_and_carries():
    def fn(x, kernel, key):
        x = jax.lax.conv_general_dilated(x, kernel, (1,), "SAME", preferred_element_type=F32)
        x = jax.lax.while_loop(lambda c: c[1] < 3, lambda c: (c[0] * 2, c[1] + 1), (x, 0))[0]
        key, _ = jax.lax.scan(lambda key, _: (jax.random.split(key)[0], None), key, length=2)
        return x.cumsum(0), x.max(), jnp.arange(3).sum(), jax.random.uniform(key)

    key = jax.eval_shape(jax.random.key, 0)
    assert rows_of(fn, shape(2, 3, 4), shape(5, 3, 3), key) == {
        ("", "conv_general_dilated", "bfloat16 x bfloat16 -> float32"),
        ("", "carry", "float32"),
        ("", "cumsum", "float32"),
    }


@pytest.mark.parametrize(
    ("precision", "shown"),
    [(None, ""), ("default", ""), ("highest", ", highest"), ("float32", ", highest")]
    + [("BF16_BF16_F32_X3", ", BF16_BF16_F32_X3")],
)
def test_the_algorithm_of_a_float32_product(precision, shown):
    def fn(x):
        with jax.default_matmul_precision(precision):
            return x @ x

    float32 = {("", "dot_general", f"float32 x float32{shown}")}
    assert rows_of(fn, shape(3, 3, dtype=F32)) == float32
    if precision in (None, "highest"):  # It changes nothing of a product in 16 bits.
        assert rows_of(fn, shape(3, 3)) == {("", "dot_general", "bfloat16 x bfloat16")}


def test_sums_over_devices_have_one_name_on_all_lines_of_jax():
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    spec = jax.sharding.PartitionSpec("data")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)
    def fn(x):
        scattered = jax.lax.psum_scatter(x.astype(F32), "data", tiled=True)
        return scattered + jax.lax.psum(x, "data").mean().astype(F32)

    rows = rows_of(fn, shape(8, 2))
    assert rows >= {("", "psum", "bfloat16"), ("", "reduce_scatter", "float32")}


# What differs


def wide_mlp(params, x):
    with jax.named_scope("mlp"):
        h = jnp.tanh(x.astype(F32) @ params["up"].astype(F32))  # forward
        return h.astype(BF16) @ params["down"]


@jax.custom_vjp
def product(x, w):
    return x @ w


def product_backward(saved, g):
    x, w = saved
    dx = g.astype(F32) @ w.T.astype(F32)
    return dx.astype(BF16), x.T @ g


product.defvjp(lambda x, w: (x @ w, (x, w)), product_backward)


def wide_backward_mlp(params, x):
    with jax.named_scope("mlp"):
        return product(jnp.tanh(x @ params["up"]), params["down"])  # backward


def low_block(params, x):
    with jax.named_scope("attention"):
        scores = jnp.einsum("td,sd->ts", x @ params["q"], x)
        weights = jnp.exp(scores)
        weights = weights / weights.sum(axis=1, dtype=BF16)[:, None]  # reduction
        mixed = jnp.einsum("ts,sd->td", weights, x)
    return x + mlp(params, jnp.sin(mixed))


def wide_carry_block(params, x):
    return block(params, x.astype(BF16)).astype(F32)


def wide_carry(params, x, y):
    return loss_fn(params | {"table": params["table"].astype(F32)}, x, y, block=wide_carry_block)


F32_PRODUCT = ("float32 x float32",)
# By name: the changed loss; by operation of a scope, what is gone and what is new.
PLANTED = {
    "forward": (
        functools.partial(loss_fn, block=functools.partial(block, mlp=wide_mlp)),
        {
            ("blocks/mlp", "dot_general"): ((), F32_PRODUCT),
            ("blocks/mlp", "dot_general, backward"): ((), F32_PRODUCT),
        },
    ),
    "backward": (
        functools.partial(loss_fn, block=functools.partial(block, mlp=wide_backward_mlp)),
        {("blocks/mlp", "dot_general, backward"): ((), F32_PRODUCT)},
    ),
    "reduction": (
        functools.partial(loss_fn, block=low_block),
        {
            ("blocks/attention", "reduce_sum"): (("float32",), ("bfloat16",)),
            ("blocks/attention", "reduce_sum, backward"): (("float32",), ("bfloat16",)),
        },
    ),
    "carry": (
        wide_carry,
        {
            ("", "carry"): (("bfloat16",), ("float32",)),
            ("", "carry, backward"): (("bfloat16",), ("float32",)),
            ("table", "scatter_add, backward"): (("bfloat16",), ("float32",)),
        },
    ),
}


def line_of(marker):
    lines = Path(__file__).read_text().splitlines()
    return 1 + next(i for i, line in enumerate(lines) if line.endswith(f"  # {marker}"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PLANTED)
def test_a_changed_dtype_is_found_with_its_line(name, tmp_path):
    changed, expected = PLANTED[name]
    path = tmp_path / "precision.lock"
    write(entries_of(loss_fn, *ARGUMENTS), path)
    found = differences(entries_of(changed, *ARGUMENTS), path)
    assert {(each.scope, each.operation): (each.locked, each.found) for each in found} == expected
    assert found[0].place.startswith(f"{Place(__file__, line_of(name), '')}".removesuffix(")"))


# As users call it


def test_a_report_locks_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = audit(loss_fn)(*ARGUMENTS)
    report.lock("precision.lock")
    assert Path("precision.lock").read_text() == EXPECTED
    assert report.check_lock("precision.lock") is report
    changed = audit(PLANTED["forward"][0])(*ARGUMENTS)
    with pytest.raises(AssertionError) as error:
        changed.check_lock("precision.lock")
    first, empty, *lines = str(error.value).splitlines()
    assert first.endswith("differs from its lock 'precision.lock'.") and empty == ""
    assert lines == list(map(str, differences(changed.entries, "precision.lock")))
    with pytest.raises(FileNotFoundError, match="no.lock"):
        report.check_lock("no.lock")
