import copy
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

import jmpx

F16, BF16, F32, F64 = jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64
HALF = jmpx.half_dtype()
FLOAT8 = [name for name in vars(jnp) if name.startswith("float8_")]

GRAMMAR = [
    # JMP's own strings.
    ("float32", F32, F32, F32),
    ("full", F32, F32, F32),
    ("f16", F16, F16, F16),
    ("bfloat16", BF16, BF16, BF16),
    ("half", HALF, HALF, HALF),
    ("c=f16", F32, F16, F16),
    ("p=f16", F16, F16, F16),
    ("params=f16", F16, F16, F16),
    ("p=f16,c=bf16", F16, BF16, BF16),
    ("o=f16", F32, F32, F16),
    ("c=bf16,o=full", F32, BF16, F32),
    ("params=float32,compute=float16,output=float32", F32, F16, F32),
    ("c=half,o=f32", F32, HALF, F32),
    # Beyond JMP: order, white space, case, more names.
    ("o=f32,c=bf16,p=f64", F64, BF16, F32),
    ("  Params = FLOAT32 ,\tCompute = BF16 , OUTPUT=Float32\n", F32, BF16, F32),
    ("param=fp32,compute=fp16,o=fp64", F32, F16, F64),
    (" BF16 ", BF16, BF16, BF16),
    ("c=float8_e4m3fn,o=bf16", F32, jnp.float8_e4m3fn, BF16),
    # Lightning's and Keras's presets.
    ("bf16-mixed", F32, BF16, F32),
    ("16-mixed", F32, F16, F32),
    ("bf16-true", BF16, BF16, BF16),
    ("16-true", F16, F16, F16),
    ("32-true", F32, F32, F32),
    ("64-true", F64, F64, F64),
    ("mixed_bfloat16", F32, BF16, BF16),
    ("mixed_float16", F32, F16, F16),
    (" BF16-Mixed ", F32, BF16, F32),
]


@pytest.mark.parametrize(("text", "params", "compute", "output"), GRAMMAR)
def test_get_policy(text, params, compute, output):
    policy = jmpx.get_policy(text)
    assert policy == jmpx.Policy(params, compute, output)
    assert policy.param_dtype is params
    assert policy.compute_dtype is compute
    assert policy.output_dtype is output
    assert jmpx.get_policy(str(policy)) == policy


@pytest.mark.parametrize("name", FLOAT8)
def test_get_policy_knows_every_float8_of_jax(name):
    assert jmpx.get_policy(name).compute_dtype is getattr(jnp, name)
    assert jmpx.get_policy(str(jmpx.get_policy(name))) == jmpx.get_policy(name)


BAD = [
    ("", "Missing dtype at position 0"),
    ("compute_float16", "Unknown dtype 'compute_float16' at position 0"),
    ("c=bf61,o=f32", "Unknown dtype 'bf61' at position 2 .*did you mean 'bf16'"),
    ("c=bf16, o = flaot32", "Unknown dtype 'flaot32' at position 12 .*did you mean 'float32'"),
    ("c=", "Missing dtype at position 2"),
    ("c=f16,", "Empty part at position 6"),
    (",c=f16", "Empty part at position 0"),
    ("c=f16,,o=f32", "Empty part at position 6"),
    ("comptue=f16", "Unknown key 'comptue' at position 0 .*did you mean 'compute'"),
    ("c=f16,x=f16", "Unknown key 'x' at position 6 "),
    ("=f16", "Missing key at position 0"),
    ("c=f16,f32", "Missing key for 'f32' at position 6"),
    ("c=f16,c=bf16", "Duplicate key 'compute' at position 6"),
    ("c=f16,compute=bf16", "Duplicate key 'compute' at position 6"),
    ("c==f16", "Unknown dtype '=f16' at position 2"),
    ("c=int32", "Unknown dtype 'int32' at position 2"),
    ("bf16-mixd", "Unknown dtype 'bf16-mixd' at position 0 .*did you mean 'bf16-mixed'"),
    ("c=bf16-mixed", "Unknown dtype 'bf16-mixed' at position 2"),
]


@pytest.mark.parametrize(("text", "message"), BAD)
def test_bad_policy_strings_say_what_where_and_what_is_accepted(text, message):
    with pytest.raises(ValueError, match=message) as error:
        jmpx.get_policy(text)
    sentence = str(error.value)
    assert repr(text) in sentence
    assert "expected one of" in sentence or "write " in sentence or "at most once" in sentence
    assert "\n" not in sentence and sentence[-1] in ".?"


@pytest.mark.parametrize("thing", [None, 3, True, b"f32", ["c=f16"], jnp.ones(2), object(), str])
def test_get_policy_refuses_what_is_no_policy(thing):
    message = r"^Expected a policy string, a mapping, a dtype or a jmpx\.Policy, got .* write for "
    with pytest.raises(TypeError, match=message):
        jmpx.get_policy(thing)


def test_get_policy_returns_a_policy_as_it_is():
    policy = jmpx.get_policy("c=bf16")
    assert jmpx.get_policy(policy) is policy


SPELLINGS = [
    pytest.param(F16, ["f16", "Float16", np.float16, np.dtype("float16"), F16], id="float16"),
    pytest.param(BF16, ["bf16", BF16, np.dtype(BF16), BF16.dtype.type], id="bfloat16"),
    pytest.param(F32, ["full", " fp32 ", np.float32, np.dtype("float32"), F32], id="float32"),
    pytest.param(F64, ["f64", np.float64, np.dtype("float64"), F64], id="float64"),
]


@pytest.mark.parametrize(("dtype", "spellings"), SPELLINGS)
def test_every_spelling_of_a_dtype_makes_the_same_policy(dtype, spellings):
    policies = [jmpx.Policy(spelling, F32, spelling) for spelling in spellings]
    assert len(set(policies)) == 1
    for policy in policies:
        assert policy.param_dtype is dtype
        assert policy.param_dtype == np.dtype(dtype)
        assert {dtype: "found"}[policy.output_dtype] == "found"
        assert str(policy) == str(policies[0])


@pytest.mark.parametrize("dtype", ["int32", jnp.int32, np.bool_, np.complex64, "nonsense", int])
def test_a_policy_of_other_dtypes_is_refused(dtype):
    with pytest.raises(ValueError, match="expected a floating dtype"):
        jmpx.Policy(F32, dtype, F32)


@pytest.mark.parametrize("dtype", [None, float, 3, object()])
def test_a_policy_of_what_is_no_dtype_is_refused(dtype):
    with pytest.raises(TypeError, match="Unknown dtype .* expected a floating dtype"):
        jmpx.Policy(F32, dtype, F32)


def test_arguments_by_keyword_in_any_order():
    policy = jmpx.Policy(output_dtype=F32, param_dtype=F64, compute_dtype=BF16)
    assert policy == jmpx.Policy(F64, BF16, F32)
    assert dataclasses.astuple(policy) == (F64, BF16, F32, None, None)


def test_with_output_dtype():
    policy = jmpx.get_policy("full").with_output_dtype("bf16")
    assert policy == jmpx.Policy(F32, F32, BF16)


def test_frozen_hashable_picklable_copyable_and_no_pytree():
    policy = jmpx.get_policy("c=bf16,o=f32")
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.compute_dtype = F32  # pyright: ignore[reportAttributeAccessIssue]
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert copy.deepcopy(policy) == policy
    assert hash(copy.deepcopy(policy)) == hash(policy)
    assert jax.tree.leaves(policy) == [policy]
    assert repr(policy) == (
        "Policy(param_dtype='float32', compute_dtype='bfloat16', output_dtype='float32')"
    )
    assert eval(repr(policy), {"Policy": jmpx.Policy}) == policy


def test_static_argument_of_jit(rng):
    traces = []

    def run(policy, x):
        traces.append(policy)
        return policy.cast_to_compute(x)

    run = jax.jit(run, static_argnums=0)
    x = rng.normal(size=3).astype(np.float32)
    assert run(jmpx.get_policy("c=bf16"), x).dtype == BF16
    assert run(jmpx.Policy(np.float32, "bf16", np.dtype(BF16)), x).dtype == BF16
    assert len(traces) == 1


def test_dataclass_default():
    @dataclasses.dataclass
    class Config:
        policy: jmpx.Policy = jmpx.get_policy("c=bf16")

    assert Config().policy.compute_dtype is BF16


@dataclasses.dataclass(frozen=True)
class SoftmaxPolicy(jmpx.Policy):
    softmax_dtype: str  # required, and by position, too

    def cast_to_compute(self, tree):
        return {name: x if name == "bias" else super(SoftmaxPolicy, self).cast_to_compute(x)
                for name, x in tree.items()}  # fmt: skip


def test_subclass_with_a_field_and_a_cast_of_its_own(rng):
    policy = SoftmaxPolicy("f32", np.float16, "f32", "float64")
    params = {name: rng.normal(size=3).astype(np.float32) for name in ("weight", "bias")}
    cast = policy.cast_to_compute(params)
    assert (cast["weight"].dtype, cast["bias"].dtype) == (F16, F32)
    other = policy.with_output_dtype(F16)
    assert isinstance(other, SoftmaxPolicy) and other.softmax_dtype == "float64"
    assert policy != SoftmaxPolicy("f32", F16, "f32", softmax_dtype="float32")
    assert jmpx.get_policy(policy) is policy
    both = dataclasses.replace(policy, matmul_precision="HIGHEST", reduce_dtype="bf16")
    assert str(both) == f"{policy},matmul=highest,reduce=bfloat16"
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert "softmax_dtype='float64'" in repr(policy)


@given(*[st.sampled_from(["float16", "bfloat16", "float32", "float64", *FLOAT8])] * 3)
def test_str_round_trips(params, compute, output):
    policy = jmpx.Policy(params, compute, output)
    assert jmpx.get_policy(str(policy)) == policy
    assert str(jmpx.get_policy(str(policy))) == str(policy)
    assert str(policy) == f"params={params},compute={compute},output={output}"


@given(st.text(st.sampled_from("pco=,f1632b -_;halfulxed"), max_size=24))
def test_any_text_is_a_policy_or_a_one_sentence_error(text):
    try:
        policy = jmpx.get_policy(text)
    except ValueError as error:
        assert repr(text) in str(error) and "\n" not in str(error)
    else:
        assert jmpx.get_policy(str(policy)) == policy


CASTS = ["param", "compute", "output"]


@pytest.mark.parametrize("cast", CASTS)
def test_each_cast_goes_to_its_own_dtype(cast, rng):
    policy = jmpx.Policy(F16, BF16, F32)
    x = rng.normal(size=(2, 3))
    result = getattr(policy, f"cast_to_{cast}")({"x": (x,)})["x"][0]
    assert result.dtype == getattr(policy, f"{cast}_dtype")
    np.testing.assert_array_equal(result, x.astype(result.dtype))
