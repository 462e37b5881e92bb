"""Sums over devices in 16 bits are found, with their axis and what mends them."""

import jax
import jax.numpy as jnp
import pytest
from helpers import BF16, F32
from helpers.findings_of import found, line_of
from helpers.planted_layer import FRAMEWORKS, planted
from jax import lax
from jax.sharding import PartitionSpec as P

import jmpx

NAMES = ("low-collective", "low-sum")
MANY = 300  # more terms than bfloat16 counts


def mesh():
    return jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def summed(dtype):
    def local(x):
        return lax.psum(x.astype(dtype), "data").astype(F32)  # psum

    return jax.shard_map(local, mesh=mesh(), in_specs=P("data"), out_specs=P())


def test_a_collective_in_16_bits_is_found_with_its_axis():
    x = jax.ShapeDtypeStruct((4, 3), F32)
    (finding,) = found(NAMES, lambda x: jnp.mean(summed(BF16)(x)), x)
    assert finding.name == "low-collective" and "'data'" in finding.message
    assert finding.place.line == line_of(__file__, "psum")
    assert finding.rule.startswith("r=f32")
    assert not found(NAMES, lambda x: jnp.mean(summed(F32)(x)), x)


def add_over_devices(x):
    return lax.psum(x, "data")  # in a module


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_collective_in_a_module_is_found_with_its_path(framework):
    layer = jax.shard_map(add_over_devices, mesh=mesh(), in_specs=P("data"), out_specs=P())
    loss, args = planted(framework, layer, "c=bf16,o=f32")
    (finding,) = found(NAMES, loss, *args)
    assert finding.name == "low-collective" and finding.scope.endswith("plant")
    assert finding.place.line == line_of(__file__, "in a module")
    loss, args = planted(framework, layer, "c=bf16,o=f32; */plant: full")
    assert not found(NAMES, loss, *args)


def step(policy):
    """A step that averages its gradients over devices, by a policy."""

    def loss(w, x):
        return jnp.mean((x @ w.astype(x.dtype)).astype(F32))

    def local(w, x):
        result = jmpx.filter_value_and_grad(
            loss, jmpx.NoOpLossScale(), policy=policy, over=jmpx.Over("data")
        )(w, x)
        return result.value, result.grads

    return jax.shard_map(
        local, mesh=mesh(), in_specs=(P(), P("data")), out_specs=(P(), P()), check_vma=False
    )


def test_the_rule_for_a_collective_mends_it():
    w, x = jax.ShapeDtypeStruct((3, 2), F32), jax.ShapeDtypeStruct((4, 3), F32)
    (finding,) = found(NAMES, step("c=bf16,o=f32,r=bf16"), w, x)
    assert finding.name == "low-collective"
    rule = finding.rule.partition(" ")[0]
    assert not found(NAMES, step(f"c=bf16,o=f32,{rule}"), w, x)


def test_a_sum_over_a_mapped_axis_is_a_sum():
    def loss(x):
        total = jax.vmap(lambda row: lax.psum(row, "rows"), axis_name="rows")(x)
        return jnp.mean(total.astype(F32))

    (finding,) = found(NAMES, loss, jax.ShapeDtypeStruct((MANY, 2), BF16))
    assert finding.name == "low-sum" and "300 terms" in finding.message
    assert not found(NAMES, loss, jax.ShapeDtypeStruct((4, 2), BF16))


def test_a_gather_in_16_bits_is_no_finding():
    def local(x):
        return lax.all_gather(x.astype(BF16), "data", tiled=True).astype(F32)

    fn = jax.shard_map(local, mesh=mesh(), in_specs=P("data"), out_specs=P(), check_vma=False)
    assert not found(NAMES, fn, jax.ShapeDtypeStruct((4, 3), F32))
