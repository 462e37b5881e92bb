"""The benchmark of a Llama on many chips: its size, its arithmetic, and its steps."""

import dataclasses

import jax
import jax.numpy as jnp
import llama
import numpy as np
import pytest
import records
import steps
from test_tpu import needs_libtpu

import jmpx

pytestmark = pytest.mark.usefixtures("standard_promotion")  # as in a user's program
SMALL, _ = llama.SIZES["small"]


def test_the_models_have_as_many_parameters_as_their_names_say():
    for size, number in {"1B": 1_104_218_112, "8B": 8_030_261_248}.items():
        params, _ = steps.shapes(llama.SIZES[size][0], 1)
        assert sum(leaf.size for leaf in jax.tree.leaves(params)) == number


def test_attention_equals_that_of_numpy_in_float64(rng):
    layer = SMALL._layer(rng)
    x = rng.normal(size=(1, 8, SMALL.width))
    size, heads = SMALL.head_size, SMALL.heads
    q, k, v = ((x[0] @ np.asarray(layer[name], float)).reshape(8, -1, size) for name in "qkv")
    rates = 5e5 ** (-np.arange(size // 2) / (size // 2))
    turns = np.exp(1j * np.arange(8)[:, None, None] * rates)
    q, k = ((y[..., : size // 2] + 1j * y[..., size // 2 :]) * turns for y in (q, k))
    mixed = np.empty((8, heads, size))
    for head in range(heads):
        group = head * SMALL.groups // heads
        scores = (q[:, head] @ k[:, group].conj().T).real * size**-0.5
        weights = np.tril(np.exp(scores))
        mixed[:, head] = weights / weights.sum(axis=1, keepdims=True) @ v[:, group]
    expected = mixed.reshape(8, -1) @ np.asarray(layer["mix"], float)
    found = jax.jit(SMALL._attention)(layer, jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(found[0], expected, atol=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("way", llama.WAYS)
def test_a_step_returns_what_it_takes_and_multiplies_in_its_dtype(way):
    traced = llama.trace(way, SMALL, jax.devices())
    (leaves, *_), _ = traced.in_avals
    state, loss = traced.out_info
    types = lambda arrays: [(x.shape, x.dtype) for x in arrays]  # noqa: E731
    assert types(state) == types(leaves) and loss.dtype == jnp.float32
    dtype = "f32" if way == "float32" else "bf16"
    lowered = traced.lower(lowering_platforms=("tpu",))
    assert {one.operands for one in jmpx.inspect.compiled(lowered).products} == {(dtype, dtype)}


@pytest.mark.thorough
def test_the_body_of_the_loop_counts_as_often_as_it_runs():
    once, twice, thrice = (
        llama.teraflops(
            llama.trace("by hand", dataclasses.replace(SMALL, layers=n), jax.devices()), 8
        )
        for n in (1, 2, 3)
    )
    assert thrice - twice == pytest.approx(twice - once) and twice > 1.2 * once


def test_the_table_has_a_row_for_each_line():
    moved = {"all-gather bf16": 1234.4, "all-reduce f32": 3.0, "reduce-scatter f32": 2.0}
    fields = {"size": "1B", "status": "ok", "peak_mib": 9.0, "tflop": 1.0, "collectives": moved}
    found = [{**fields, "way": "by hand", "trace_cpu_s": 0.5, "compile_cpu_s": 70.0}]
    _, _, row = llama.table(found).splitlines()
    assert row == "| by hand | 9 | 1,234 bf16 | 5 f32 |  | 1.0 | 0.5 | 70 |"


@pytest.mark.slow  # a compiler of its own
@needs_libtpu
def test_a_step_is_compiled(tmp_path):
    out = tmp_path / "lines.jsonl"
    llama.main([f"--out={out}", "--small", "--only", "1B", "by hand"])
    (line,) = records.read(out)
    assert line["status"] == "ok" and line["peak_mib"] > 0
    assert {name.split()[1] for name in line["collectives"]} == {"bf16"}
