"""What a TPU's compiler makes of train steps of one layer: memory, dtypes, casts and collectives.

The first layer of the ViT-Base of MPX's paper, in a batch of 32: a smaller one holds more in
parameters than in activations, where precision says less of its memory.
"""

import functools
import importlib.util
import re
from typing import Any

import compiled_step
import fsdp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tpu
from helpers import by_hand, heads
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from models import ViT

import jmpx

MISSING = [name for name in ("libtpu", "jmp", "mpx") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,  # half a minute of a free core for each program
    pytest.mark.usefixtures("standard_promotion"),  # as in a user's program
    pytest.mark.skipif(MISSING != [], reason=f"without {MISSING}: pip install -e '.[bench,tpu]'"),
]
LOW = {"bf16 x bf16"}
WIDTH = 128  # of the model of the adapters


@functools.cache
def step(way):
    """Returns a train step of one layer, compiled for one chip."""
    import model_steps  # which imports JMP and MPX

    point = model_steps.Point("vit", way, layers=1, batch=32)
    lowered = model_steps.trace(point, tpu.devices()).lower(lowering_platforms=("tpu",))
    return lowered.compile()


def peak(way):
    return step(way).memory_analysis().peak_memory_in_bytes


def dtypes_of_products(program):
    return {" x ".join(one.operands) for one in jmpx.inspect.compiled(program).products}


def costs(program):
    """Returns what each cast costs. A prefetch (`copy-start`) moves an array, and copies none."""
    found = compiled_step.counts(program)
    return {name: found[name] for name in ("converts", "copies", "bytes_accessed")}


def assert_no_more(found, expected):
    for name, number in found.items():
        assert number <= 1.01 * expected[name], name


def test_peak_memory_falls_from_float32_to_autocast_that_saves_products():
    ways = "float32", "by hand", "autocast", "autocast, save"
    float32, hand, autocast, save = map(peak, ways)
    assert float32 > hand >= autocast > save


@pytest.mark.parametrize("way", ["by hand", "autocast", "autocast, save"])
def test_products_read_bfloat16(way):
    assert dtypes_of_products(step(way)) == LOW


def test_products_of_float32_are_not_all_in_bfloat16():
    assert dtypes_of_products(step("float32")) > LOW


def test_autocast_has_no_more_casts_and_copies_than_casts_by_hand():
    assert_no_more(costs(step("autocast")), costs(step("by hand")))


def test_a_module_policy_has_no_more_casts_and_copies_than_casts_by_hand():
    """In Haiku; `test_four_frameworks.py` compares all adapters before compiling."""
    x = jax.ShapeDtypeStruct((32, 64, WIDTH), jnp.float32)
    params, _, hand, with_policy = by_hand.FRAMEWORKS["haiku"](WIDTH, jnp.zeros(x.shape))
    found, expected = (
        tpu.compiled(jax.value_and_grad(loss_fn), (params, x))
        for loss_fn in (by_hand.loss_with(with_policy), by_hand.loss_by_hand(hand))
    )
    assert dtypes_of_products(found) == LOW
    assert_no_more(costs(found), costs(expected))


@pytest.mark.parametrize(("reduce", "dtype"), [("", "bf16"), (",r=f32", "f32")])
def test_chips_sum_gradients_in_the_dtype_of_the_policy(reduce, dtype):
    model = ViT(1, WIDTH, 2, 2 * WIDTH, 16, image=32, patch=16)
    mesh = Mesh(np.array(tpu.devices()), ("data",))
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    rng = np.random.default_rng(0)
    arguments = model.init(rng), *model.batch(rng, 64)
    grads_of = fsdp.with_jmpx(model.loss, f"c=bf16{reduce}")
    shardings = jax.tree.map(lambda _: whole, arguments[0]), rows, rows

    def grads(*args):
        return jax.lax.with_sharding_constraint(grads_of(*args)[1], whole)

    hlo = tpu.compiled(grads, arguments, shardings).as_text()
    sent = compiled_step.mib_by_kind(compiled_step.sends(hlo))
    assert [*sent] == [f"all-reduce {dtype}"]
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(arguments[0])) / 2**20
    expected = 2 * 7 / 8 * size / (2 if dtype == "bf16" else 1)  # to each other chip, and back
    assert 0.9 * expected < sent[f"all-reduce {dtype}"] < 1.1 * expected


def test_a_head_that_hands_out_float32_multiplies_in_bfloat16():
    """Its logits are not rounded, and the step costs next to nothing more.

    A TPU rounds the float32 operands of a product of default precision itself, as it reads them.
    """

    def compiled(policy):
        program = heads.traced(policy, tpu.chip()).lower(lowering_platforms=("tpu",))
        hlo: Any = program.compile().as_text()
        products = [p for p in jmpx.inspect.compiled(hlo).products if "head" in p.scope]
        return products, sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', hlo)))

    products, cycles = compiled(heads.ROUNDED)
    assert {p.dtypes for p in products} == {"bf16 x bf16 -> bf16"}
    kept, kept_cycles = compiled(heads.KEPT)
    assert {(p.result, p.algorithm) for p in kept} == {("f32", "")}
    assert len(kept) == len(products)
    assert kept_cycles < 1.08 * cycles
