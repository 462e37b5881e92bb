"""Types of policies, casts and wrapped functions. They are run here, and checked by pyright."""

# An ignored error must be there: it is what this file asserts.
# pyright: reportUnnecessaryTypeIgnoreComment=true

from collections import UserDict
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, assert_type

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import DTypeLike
from typed_models import Params, make_params, ones, predict

import jmpx


@pytest.mark.parametrize("dtype", ["bf16", jnp.bfloat16, np.dtype("float32"), np.float16])
def test_dtypes(dtype: DTypeLike) -> None:
    policy = jmpx.Policy(dtype, compute_dtype=dtype, output_dtype="half")
    assert_type(policy.compute_dtype, DTypeLike)
    assert_type(policy.with_output_dtype(dtype), jmpx.Policy)
    assert_type(jmpx.half_dtype(), type[Any])
    assert ones(2).astype(policy.param_dtype).dtype == np.dtype(policy.compute_dtype)
    with pytest.raises(TypeError):
        jmpx.Policy(None, "bf16", "bf16")  # pyright: ignore[reportArgumentType]


def test_policies() -> None:
    policy = assert_type(jmpx.get_policy("bf16-mixed"), jmpx.Policy)
    assert_type(jmpx.get_policy(policy), jmpx.Policy)
    for given in ("c=bf16; Linear: full", policy, jmpx.PolicyMap(policy)):
        policy_map = assert_type(jmpx.get_policy_map(given), jmpx.PolicyMap)
        assert_type(policy_map.default, jmpx.Policy)
        assert_type(policy_map.rules, tuple[jmpx.types.Rule, ...])
    rule = jmpx.types.Rule("Linear", compute="f32", optional=True)
    assert_type(rule.compute, DTypeLike | None)
    assert_type(rule.resolve(policy, None), jmpx.Policy)
    policy_map = jmpx.PolicyMap(policy, (rule,))
    assert_type(policy_map.rule_for(dict, ""), jmpx.types.Rule | None)
    with pytest.raises(TypeError):
        jmpx.get_policy(policy_map)  # pyright: ignore[reportArgumentType]


class Config:
    """A mapping that is no `Mapping`, as `ml_collections.ConfigDict`."""

    def keys(self) -> list[str]:
        return ["policy", "rules"]

    def __getitem__(self, key: str, /) -> object:
        return {"policy": "bf16", "rules": ["Linear: full"]}[key]


def test_policies_from_mappings_and_dtypes() -> None:
    given: dict[str, Any] = {"compute": "bf16", "output": jnp.float32}
    for spec in (
        given,
        MappingProxyType(given),
        UserDict(given),
        jnp.bfloat16,
        np.dtype("float32"),
    ):
        assert_type(jmpx.get_policy(spec), jmpx.Policy)
        assert_type(jmpx.get_policy_map(spec), jmpx.PolicyMap)
        assert_type(jmpx.get_mixed_precision(spec), jmpx.MixedPrecision)
    policy_map = assert_type(jmpx.get_policy_map(Config()), jmpx.PolicyMap)
    assert_type(policy_map.to_dict(), dict[str, Any])
    assert_type(policy_map.rules[0].to_dict(), dict[str, str])
    assert_type(policy_map.default.to_dict(), dict[str, str])
    with pytest.raises(TypeError):
        jmpx.get_policy(None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError):
        jmpx.get_policy_map(3)  # pyright: ignore[reportArgumentType]


def test_mixed_precision() -> None:
    precision = jmpx.MixedPrecision("c=f16", {"type": "dynamic", "init": 2**10})
    assert_type(precision.policy_map, jmpx.PolicyMap)
    assert_type(precision.loss_scale, jmpx.LossScale)
    assert_type(precision.policy, jmpx.Policy)
    assert_type(precision.to_dict(), dict[str, Any])
    for spec in ("c=f16 | dynamic", precision, precision.policy, precision.policy_map):
        assert_type(jmpx.get_mixed_precision(spec), jmpx.MixedPrecision)
    jmpx.MixedPrecision(jnp.bfloat16, loss_scale=jmpx.NoOpLossScale())
    with pytest.raises(TypeError):
        jmpx.MixedPrecision("c=f16", None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError):
        jmpx.get_mixed_precision(precision.loss_scale)  # pyright: ignore[reportArgumentType]


class MyPolicy(jmpx.Policy):
    pass


def test_a_subclass_of_policy_stays_one() -> None:
    policy = MyPolicy("f32", "bf16", "f32")
    assert isinstance(assert_type(policy.with_output_dtype("bf16"), MyPolicy), MyPolicy)


def test_casts_keep_the_type_of_the_tree() -> None:
    params = make_params()
    policy = jmpx.get_policy("bf16-mixed")
    casts = [
        assert_type(jmpx.cast_tree(params, "bf16"), Params),
        assert_type(jmpx.cast_tree(params, jnp.bfloat16), Params),
        assert_type(jmpx.cast_to_full(params), Params),
        assert_type(jmpx.cast_to_half(params), Params),
        assert_type(policy.cast_to_param(params), Params),
        assert_type(policy.cast_to_compute(params), Params),
        assert_type(policy.cast_to_output(params), Params),
        assert_type(jmpx.select_tree(True, params, params), Params),
        assert_type(jmpx.select_tree(jmpx.all_finite(params), params, params), Params),
    ]
    assert all(isinstance(tree, Params) for tree in casts)
    assert_type(jmpx.cast_tree({"a": ones(2)}, "bf16"), dict[str, jax.Array])


def test_all_finite() -> None:
    def all_finite(x: jax.Array) -> jax.Array:
        return jmpx.all_finite(x, axis_name="i")

    assert_type(jmpx.all_finite([1.0, make_params()]), jax.Array)
    assert jax.vmap(all_finite, axis_name="i")(ones(2)).all()


def test_the_registry() -> None:
    class Model: ...

    jmpx.set_policy(Model, "bf16-mixed")
    assert_type(jmpx.policy_of(Model), jmpx.Policy | None)
    assert_type(jmpx.current_policy(), jmpx.Policy | None)
    with jmpx.push_policy(Model, jmpx.get_policy("f32")):
        pass
    jmpx.clear_policy(Model)
    with pytest.raises(TypeError):
        jmpx.set_policy(Model, None)  # pyright: ignore[reportArgumentType]


@pytest.fixture
def x() -> jax.Array:
    return ones(4, 2)


def test_remat_keeps_the_signature(x: jax.Array) -> None:
    @jmpx.remat
    def plain(params: Params, x: jax.Array, *, scale: float = 1.0) -> dict[str, jax.Array]:
        return predict(params, x, scale=scale)

    @jmpx.remat(save="products+attention")
    def decorated(params: Params, x: jax.Array, *, scale: float = 1.0) -> dict[str, jax.Array]:
        return predict(params, x, scale=scale)

    assert_type(plain(make_params(), x, scale=2.0), dict[str, jax.Array])
    assert_type(decorated(make_params(), x), dict[str, jax.Array])
    assert_type(jmpx.remat(predict, "products")(make_params(), x), dict[str, jax.Array])
    with pytest.raises(TypeError):
        plain(make_params())  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError):
        jmpx.remat(3)  # pyright: ignore[reportArgumentType, reportCallIssue]
    with pytest.raises(ValueError):
        jmpx.remat(predict, "all")  # pyright: ignore[reportArgumentType, reportCallIssue]
    with pytest.raises(ValueError):
        jmpx.remat(predict, None)  # pyright: ignore[reportArgumentType, reportCallIssue]


def test_autocast_keeps_the_signature(x: jax.Array) -> None:
    @jmpx.autocast
    def plain(params: Params, x: jax.Array, *, scale: float = 1.0) -> dict[str, jax.Array]:
        return predict(params, x, scale=scale)

    @jmpx.autocast(policy="c=bf16; op.mul: bf16", output=None)
    def decorated(params: Params, x: jax.Array, *, scale: float = 1.0) -> dict[str, jax.Array]:
        return predict(params, x, scale=scale)

    @jmpx.autocast(save="products")
    def saving(params: Params, x: jax.Array, *, scale: float = 1.0) -> dict[str, jax.Array]:
        return predict(params, x, scale=scale)

    called = jmpx.autocast(predict, jmpx.get_policy_map("c=bf16"), output=jnp.float32)
    assert_type(saving(make_params(), x, scale=2.0), dict[str, jax.Array])
    assert_type(jmpx.autocast(predict, save="products")(make_params(), x), dict[str, jax.Array])
    jmpx.autocast(predict, save="products+attention")
    with pytest.raises(ValueError):
        jmpx.autocast(predict, save="all")  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert_type(plain(make_params(), x, scale=2.0), dict[str, jax.Array])
    assert_type(decorated(make_params(), x, scale=2.0), dict[str, jax.Array])
    assert_type(called(make_params(), x, scale=2.0), dict[str, jax.Array])
    with pytest.raises(TypeError):
        plain(make_params())  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError):
        decorated(make_params(), x, size=2.0)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError):
        called(make_params())  # pyright: ignore[reportCallIssue]


def test_methods_keep_their_signature(x: jax.Array) -> None:
    class Model:
        @jmpx.autocast
        def predict(self, x: jax.Array) -> jax.Array:
            return x @ x.T

        @jmpx.full_precision
        def loss(self, x: jax.Array) -> jax.Array:
            return self.predict(x).sum()

        @jmpx.force_full_precision
        def square(self, x: jax.Array) -> jax.Array:
            return (x * x).sum()

    model = Model()
    assert_type(model.predict(x), jax.Array)
    assert_type(model.loss(x), jax.Array)
    assert_type(model.square(x), jax.Array)


def test_full_precision_keeps_the_signature(x: jax.Array) -> None:
    @jmpx.full_precision
    def decorated(params: Params, x: jax.Array, *, scale: float = 1.0) -> dict[str, jax.Array]:
        return predict(params, x, scale=scale)

    assert_type(decorated(make_params(), x, scale=2.0), dict[str, jax.Array])
    with pytest.raises(TypeError):
        decorated(make_params())  # pyright: ignore[reportCallIssue]
    context: AbstractContextManager[object] = jmpx.full_precision()
    with context, jmpx.full_precision(matmul="highest"):
        pass

    @jmpx.full_precision(matmul="highest")
    def precise(x: jax.Array) -> jax.Array:
        return x @ x.T

    assert_type(precise(x), jax.Array)
    assert_type(jmpx.full_precision(precise, matmul="high")(x), jax.Array)
    with pytest.raises(TypeError):
        jmpx.full_precision(precise, "highest")  # pyright: ignore[reportCallIssue]


def test_casts_of_functions_keep_the_signature(x: jax.Array) -> None:
    @jmpx.force_full_precision
    def decorated(params: Params, x: jax.Array, *, scale: float = 1.0) -> dict[str, jax.Array]:
        return predict(params, x, scale=scale)

    full = jmpx.force_full_precision(predict, jnp.bfloat16)
    half = jmpx.mpx.cast_function(predict, "bf16", return_dtype=jnp.float32)
    for function in (decorated, full, half):
        assert_type(function(make_params(), x, scale=2.0), dict[str, jax.Array])
    with pytest.raises(TypeError):
        decorated(make_params())  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError):
        full(make_params(), x, size=2.0)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError):
        half(make_params(), x, x)  # pyright: ignore[reportCallIssue]


def test_autocast_of_a_pytree(x: jax.Array) -> None:
    wrapped = jmpx.autocast(jax.tree_util.Partial(predict, make_params()))
    assert isinstance(wrapped, jmpx.types.Autocast)
    assert wrapped(x)["y"].shape == (4, 3)  # pyright: ignore[reportUnknownMemberType]


def test_a_policy_that_is_applied_keeps_the_signature(x: jax.Array) -> None:
    @jmpx.apply_policy(policy="c=bf16")
    def decorated(params: Params, x: jax.Array, *, scale: float = 1.0) -> dict[str, jax.Array]:
        return predict(params, x, scale=scale)

    precision = jmpx.get_mixed_precision("by=operations,c=bf16")
    applied = jmpx.apply_policy(predict, precision, uncast="x")
    for function in (decorated, applied):
        assert_type(function(make_params(), x, scale=2.0), dict[str, jax.Array])
    with pytest.raises(TypeError):
        applied(make_params())  # pyright: ignore[reportCallIssue]
