"""`import jmpx as jmp`: what JMP's users hold on to, and what was broken there."""

import jax
import jax.numpy as jnp
import jmp as theirs
import numpy as np
import pytest
from helpers import run_python

import jmpx as jmp


def test_all_names_exactly_what_is_public():
    public = {name for name in dir(jmp) if not name.startswith("_")}
    submodules = "distributed equinox flags flax haiku inspect mpx optim types".split()
    assert public == {*jmp.__all__, *submodules} and set(theirs.__all__) <= set(jmp.__all__)
    assert all(hasattr(jmp, name) for name in jmp.__all__)
    with pytest.raises(AttributeError, match="module 'jmpx' has no attribute 'autocats'"):
        jmp.autocats  # pyright: ignore[reportAttributeAccessIssue]  # noqa: B018
    assert list(jmp.__all__) == sorted(jmp.__all__)


@pytest.mark.thorough
def test_haiku_runs_with_jmpx_in_jmps_place():
    code = """if True:
        import sys
        import jmpx
        sys.modules["jmp"] = jmpx
        import haiku as hk, jax, jax.numpy as jnp
        hk.mixed_precision.set_policy(hk.nets.MLP, jmpx.get_policy("c=bf16,o=f32"))
        network = hk.transform(lambda x: hk.nets.MLP([8, 2])(x))
        params = network.init(jax.random.key(0), jnp.ones((4, 3)))
        y = network.apply(params, None, jnp.ones((4, 3)))
        dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(params)}
        print(y.dtype, dtypes, jmpx.policy_of(hk.nets.MLP), sys.modules["jmp"] is jmpx)
        """
    result = run_python("-W", "error", "-c", code)
    assert result.returncode == 0, result.stderr
    policy = "params=float32,compute=bfloat16,output=float32"
    assert result.stdout == f"float32 {{'float32'}} {policy} True\n"


def test_scales_of_3_and_selection_of_none():
    for loss_scale in (jmp.StaticLossScale(3), jmp.DynamicLossScale(3.0)):
        assert loss_scale.scale({"a": jnp.array(1.0)}) == {"a": 3}
        assert loss_scale.unscale({"a": jnp.array(3.0)}) == {"a": 1}
    assert jax.tree.leaves(jmp.StaticLossScale(0)) == []
    assert jmp.select_tree(jnp.bool_(True), None, None) is None


def test_a_hand_serialised_loss_scale():
    loss_scale = jmp.DynamicLossScale(jnp.float32(8), jnp.int32(3), 10, 4, jnp.float32(0.5))
    record = {"type": type(loss_scale).__name__, "loss_scale": float(loss_scale.loss_scale)}
    for name in ("counter", "period", "factor", "min_loss_scale"):
        record[name] = np.asarray(getattr(loss_scale, name)).item()
    restored = getattr(jmp, record.pop("type"))(**record)
    assert restored == loss_scale


def test_defects_of_jmp_are_mended():
    assert str(jmp.Policy(np.dtype("float32"), np.dtype("float16"), "f32"))  # was a KeyError
    loss_scale = jmp.DynamicLossScale(8.0, min_loss_scale=4.0)
    shrunk = jax.jit(lambda s: s.adjust(False))(loss_scale)  # jmp#44, and adjust(False)
    assert shrunk.min_loss_scale == 4.0
    integers = {"n": jnp.arange(2)}
    assert loss_scale.scale(integers)["n"].dtype == jnp.int32  # was a float
    functions = {"f": jnp.tanh}
    assert jmp.select_tree(jnp.bool_(True), functions, functions) == functions  # was an error
