"""Policies: what their strings and constructors give, how they cast, and that they are values."""

import copy
import dataclasses
import itertools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.policies import MATMULS
from hypothesis import given, strategies as st

import jmpx

F16, BF16, F32, F64 = jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64
HALF = jmpx.half_dtype()
FLOAT8 = sorted(name for name in vars(jnp) if name.startswith("float8_"))
GRAMMAR = [
    # JMP's own strings.
    ("float32", F32, F32, F32),
    ("full", F32, F32, F32),
    ("half", HALF, HALF, HALF),
    ("c=f16", F32, F16, F16),
    ("p=f16", F16, F16, F16),
    ("params=f16", F16, F16, F16),
    ("o=f16", F32, F32, F16),
    ("c=bf16,o=full", F32, BF16, F32),
    ("params=float32,compute=float16,output=float32", F32, F16, F32),
    ("c=half,o=f32", F32, HALF, F32),
    # Beyond JMP: order, white space, case, more names, a semicolon at the end.
    ("o=f32,c=bf16,p=f64", F64, BF16, F32),
    ("  Params = FLOAT32 ,\tCompute = BF16 , OUTPUT=Float32\n", F32, BF16, F32),
    ("param=fp32,compute=fp16,o=fp64", F32, F16, F64),
    (" BF16 ", BF16, BF16, BF16),
    ("c=float8_e4m3fn,o=bf16 ; ", F32, jnp.float8_e4m3fn, BF16),
    # Lightning's and Keras's presets.
    ("bf16-mixed", F32, BF16, F32),
    (" 16-MIXED ", F32, F16, F32),
    ("bf16-true", BF16, BF16, BF16),
    ("16-true", F16, F16, F16),
    ("32-true", F32, F32, F32),
    ("64-true", F64, F64, F64),
    ("mixed_bfloat16", F32, BF16, BF16),
    ("mixed_float16", F32, F16, F16),
]


@pytest.mark.parametrize(("text", "params", "compute", "output"), GRAMMAR)
def test_get_policy(text, params, compute, output):
    policy = jmpx.get_policy(text)
    assert policy == jmpx.Policy(params, compute, output)
    assert policy.param_dtype is params
    assert policy.compute_dtype is compute
    assert policy.output_dtype is output
    assert jmpx.get_policy(str(policy)) == policy
    assert jmpx.get_policy(policy) is policy


SPELLINGS = {
    F16: ["f16", "Float16", np.float16, np.dtype("float16"), np.half, F16],
    BF16: ["bf16", np.dtype(BF16), BF16.dtype.type, BF16],
    F32: ["full", " fp32 ", np.float32, np.dtype("float32"), jnp.ones(2).dtype, F32],
    F64: ["f64", np.float64, np.dtype("float64"), np.double, F64],
    jnp.float8_e4m3fn: [np.dtype(jnp.float8_e4m3fn), jnp.float8_e4m3fn],
}


@pytest.mark.parametrize("dtype", SPELLINGS)
def test_every_spelling_of_a_dtype_means_its_name(dtype):
    name = np.dtype(dtype).name
    for spelling in SPELLINGS[dtype]:
        policy = jmpx.Policy(spelling, F32, spelling)
        assert len({policy, jmpx.Policy(name, F32, name)}) == 1
        assert policy.param_dtype is dtype and policy.param_dtype == np.dtype(dtype)
        assert {dtype: "found"}[policy.output_dtype] == "found"
        assert str(policy) == f"params={name},compute=float32,output={name}"
        assert jmpx.get_policy(spelling) == jmpx.Policy(name, name, name)
        assert jmpx.get_policy_map(spelling) == jmpx.get_policy_map(name)
        assert jmpx.get_mixed_precision(spelling) == jmpx.get_mixed_precision(name)
        assert jmpx.get_policy({"compute": spelling}) == jmpx.get_policy(f"compute={name}")
        assert jmpx.get_policy({"output": spelling}) == jmpx.get_policy(f"output={name}")


def test_a_policy_is_a_value():
    policy = jmpx.Policy(output_dtype=F32, param_dtype=F64, compute_dtype=BF16)
    assert policy == jmpx.Policy(F64, BF16, F32)
    assert dataclasses.astuple(policy) == (F64, BF16, F32, None, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.compute_dtype = F32  # pyright: ignore[reportAttributeAccessIssue]
    assert jax.tree.leaves(policy) == [policy]
    assert repr(policy) == (
        "Policy(param_dtype='float64', compute_dtype='bfloat16', output_dtype='float32')"
    )
    assert policy.with_output_dtype("bf16") == jmpx.Policy(F64, BF16, BF16)
    with pytest.raises(TypeError, match="positional"):
        jmpx.Policy("f32", "f32", "f32", "highest")  # pyright: ignore[reportCallIssue]


@given(
    *[st.sampled_from(["float16", "bfloat16", "float32", "float64", *FLOAT8])] * 3,
    st.sampled_from([None, *MATMULS]),
    st.sampled_from([None, "float16", "bfloat16", "float32", "float64"]),
)
def test_every_policy_comes_back(params, compute, output, matmul, reduce):
    policy = jmpx.Policy(params, compute, output, matmul_precision=matmul, reduce_dtype=reduce)
    text = f"params={params},compute={compute},output={output}"
    text += "" if matmul is None else f",matmul={matmul}"
    text += "" if reduce is None else f",reduce={reduce}"
    assert str(policy) == text
    for other in (
        jmpx.get_policy(text),
        pickle.loads(pickle.dumps(policy)),
        copy.deepcopy(policy),
        eval(repr(policy), {"Policy": jmpx.Policy}),
        policy.with_output_dtype(output),
    ):
        assert other == policy and hash(other) == hash(policy)


@dataclasses.dataclass(frozen=True)
class SoftmaxPolicy(jmpx.Policy):
    softmax_dtype: str  # required, and by position, too

    def cast_to_compute(self, tree):
        return {name: x if name == "bias" else super(SoftmaxPolicy, self).cast_to_compute(x)
                for name, x in tree.items()}  # fmt: skip


def test_a_subclass_has_a_field_and_a_cast_of_its_own():
    policy = SoftmaxPolicy("f32", np.float16, "f32", "float64")
    cast = policy.cast_to_compute({name: np.ones(3, np.float32) for name in ("weight", "bias")})
    assert (cast["weight"].dtype, cast["bias"].dtype) == (F16, F32)
    other = policy.with_output_dtype(F16)
    assert isinstance(other, SoftmaxPolicy) and other.softmax_dtype == "float64"
    assert policy != SoftmaxPolicy("f32", F16, "f32", softmax_dtype="float32")
    assert jmpx.get_policy(policy) is policy
    both = dataclasses.replace(policy, matmul_precision="HIGHEST", reduce_dtype="bf16")
    assert str(both) == f"{policy},matmul=highest,reduce=bfloat16"
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert "softmax_dtype='float64'" in repr(policy)
    assert policy.to_dict() == jmpx.get_policy("c=f16,o=f32").to_dict()


@pytest.mark.parametrize("cast", ["param", "compute", "output"])
def test_each_cast_goes_to_its_own_dtype(cast, rng):
    policy = jmpx.Policy(F16, BF16, F32)
    x = rng.normal(size=(2, 3))
    result = getattr(policy, f"cast_to_{cast}")({"x": (x,)})["x"][0]
    assert result.dtype == getattr(policy, f"{cast}_dtype")
    np.testing.assert_array_equal(result, x.astype(result.dtype))


# The keys `matmul` and `reduce`


def test_every_algorithm_of_jax_in_any_case():
    for name, spell in zip(MATMULS, itertools.cycle([str.lower, str.upper, " {} ".format])):
        policy = jmpx.get_policy(f"c=bf16, m={spell(name)}")
        assert policy.matmul_precision == name
        with jax.default_matmul_precision(policy.matmul_precision):
            pass
        assert jmpx.Policy("f32", "bf16", "bf16", matmul_precision=spell(name)) == policy


def test_keys_that_are_not_set_differ_from_set_ones():
    policy = jmpx.get_policy("c=bf16,o=f32")
    assert (policy.matmul_precision, policy.reduce_dtype) == (None, None)
    assert policy != jmpx.get_policy("c=bf16,o=f32,m=default")
    assert policy != jmpx.get_policy("c=bf16,o=f32,r=f32")
    assert jmpx.get_policy("o=f32,reduce=bf16").reduce_dtype is BF16


@pytest.mark.parametrize("dtypes", ["full", "bfloat16", " F16 ", "bf16-mixed", "mixed_float16"])
def test_other_keys_follow_a_dtype_or_a_preset(dtypes):
    policy = jmpx.get_policy(f"{dtypes}, m=highest,r=bf16")
    assert policy == jmpx.get_policy(f"{jmpx.get_policy(dtypes)},matmul=highest,reduce=bfloat16")
    with_dtypes, with_both = (
        jmpx.get_policy_map(f"*/router: {dtypes}{end}").rules[0] for end in ("", ",m=highest")
    )
    assert with_both == dataclasses.replace(with_dtypes, matmul="highest")


# 8 bits


@pytest.mark.parametrize("name", FLOAT8)
def test_8_bits_are_a_dtype_to_parse_and_to_store_in(name):
    policy = jmpx.get_policy(f"p={name},c=bf16,o={name}")
    assert policy.param_dtype is policy.output_dtype is getattr(jnp, name)
    stored = policy.cast_to_param({"w": np.ones(3, np.float32)})
    assert stored["w"].dtype.name == name
    assert policy.cast_to_compute(stored)["w"].dtype == BF16
    assert policy.cast_to_output(stored)["w"].dtype.name == name
    assert jmpx.cast_tree(np.ones(3, np.float32), name).dtype.name == name
    whole = jmpx.get_policy(name)
    assert whole.compute_dtype is getattr(jnp, name)
    for nothing in (None, {"w": np.ones(3, np.float32)}):
        with pytest.raises(ValueError, match=f"^Cannot compute in {name}, where .*, as"):
            whole.cast_to_compute(nothing)
    assert str(jmpx.get_policy_map(f"Linear: {name}")).endswith(f"Linear: compute={name}")


def test_a_policy_that_casts_in_its_own_way_may_compute_in_8_bits():
    class Scaled(jmpx.Policy):
        def cast_to_compute(self, tree):
            return jmpx.cast_tree(jax.tree.map(lambda x: x / 4, tree), self.compute_dtype)

    cast = Scaled("f32", "float8_e4m3fn", "f32").cast_to_compute(jnp.ones(2))
    assert cast.dtype == jnp.float8_e4m3fn and float(cast[0]) == 0.25
