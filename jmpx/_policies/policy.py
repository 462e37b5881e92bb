"""Policies: the dtypes of parameters, of computation, of results and of sums over devices."""

import dataclasses
from collections.abc import Mapping
from typing import Self, TypeAlias, TypeVar

from jmpx._base.dtypes import (
    DTypeLike,
    as_dtype,
    as_matmul,
    check_computes,
    check_reduces,
    dtype_name,
)
from jmpx._base.messages import MappingLike
from jmpx._base.trees import cast_tree

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, repr=False)
class Policy:
    """The dtypes of stored parameters, of computation and of results, and two more precisions.

    A frozen, hashable, picklable value (not a pytree), so it serves as a static argument of
    `jax.jit` and as a static field of a module. Follows JMP's `Policy`, which has the first three
    arguments. Subclasses may add fields, which `str()` and `to_dict()` leave out, and override the
    casts: jmpx never casts to a policy's dtypes in another way.

    Args:
        param_dtype: the dtype in which parameters are stored.
        compute_dtype: the dtype in which computation runs. Dtypes of 8 bits are for storage only:
            the first use of one as a compute dtype is an error.
        output_dtype: the dtype in which results are returned.
        matmul_precision: the algorithm of float32 matrix products and convolutions, a name that
            `jax.default_matmul_precision` takes, in any case. None leaves it to what surrounds the
            policy's region; JAX's own default multiplies in bfloat16 on a TPU. A product that has a
            `precision=` of its own keeps that.
        reduce_dtype: the dtype in which gradients are summed. With float32, they also leave their
            products unrounded. None leaves them as their products round them, and sums them over
            mapped axes in float32, or the wider dtype of a parameter.

    A dtype may be given as a name, a `np.dtype` or a scalar type. The policy keeps it as JAX's
    scalar type, such as `jnp.float32`.

    Raises:
        TypeError: if an argument is not a dtype, or `matmul_precision` is not a name.
        ValueError: if a dtype is unknown or not floating, the algorithm is unknown, or
            `reduce_dtype` has 8 bits.

    Example:
        >>> import jax.numpy as jnp, jmpx
        >>> policy = jmpx.Policy("float32", jnp.bfloat16, jnp.float32)
        >>> policy.compute_dtype is jnp.bfloat16
        True
        >>> str(policy)
        'params=float32,compute=bfloat16,output=float32'
        >>> policy.cast_to_compute({"w": jnp.ones(2)})
        {'w': Array([1, 1], dtype=bfloat16)}
    """

    __module__ = "jmpx"

    param_dtype: DTypeLike
    compute_dtype: DTypeLike
    output_dtype: DTypeLike
    # By keyword only, so that a subclass may add fields without a default.
    _: dataclasses.KW_ONLY
    matmul_precision: str | None = None
    reduce_dtype: DTypeLike | None = None

    def __post_init__(self) -> None:
        for name in ("param_dtype", "compute_dtype", "output_dtype"):
            object.__setattr__(self, name, as_dtype(getattr(self, name)))
        object.__setattr__(self, "matmul_precision", as_matmul(self.matmul_precision))
        if self.reduce_dtype is not None:
            check_reduces(as_dtype(self.reduce_dtype))
            object.__setattr__(self, "reduce_dtype", as_dtype(self.reduce_dtype))

    def cast_to_param(self, tree: T) -> T:
        """Casts the floating leaves of a pytree to `param_dtype`; see `jmpx.cast_tree`."""
        return cast_tree(tree, self.param_dtype)

    def cast_to_compute(self, tree: T) -> T:
        """Casts the floating leaves of a pytree to `compute_dtype`; see `jmpx.cast_tree`.

        Raises:
            ValueError: if the compute dtype has 8 bits, or is float64 while JAX's 64-bit types
                are disabled.
        """
        check_computes(self.compute_dtype)
        return cast_tree(tree, self.compute_dtype)

    def cast_to_output(self, tree: T) -> T:
        """Casts the floating leaves of a pytree to `output_dtype`; see `jmpx.cast_tree`."""
        return cast_tree(tree, self.output_dtype)

    def with_output_dtype(self, output_dtype: DTypeLike) -> Self:
        """Returns a copy of this policy with another `output_dtype`."""
        return dataclasses.replace(self, output_dtype=output_dtype)

    def to_dict(self) -> dict[str, str]:
        """Returns the fields that are set, as a dict of strings, which `get_policy` reads back.

        Like `str()`, it leaves out fields that a subclass adds.

        Example:
            >>> import jmpx
            >>> jmpx.get_policy("c=bf16,o=f32").to_dict()
            {'params': 'float32', 'compute': 'bfloat16', 'output': 'float32'}
        """
        return given_fields(self)

    def __str__(self) -> str:
        """Returns the policy string, which `get_policy` parses back to an equal policy."""
        return ",".join(f"{key}={value}" for key, value in given_fields(self).items())

    def __repr__(self) -> str:
        """Returns the constructor call, with the names of the dtypes."""
        given = {ATTRIBUTES[key]: text for key, text in given_fields(self).items()}
        names = [field.name for field in dataclasses.fields(self)]
        others = {name: getattr(self, name) for name in names if name not in ATTRIBUTES.values()}
        fields = ", ".join(f"{name}={value!r}" for name, value in (given | others).items())
        return f"{type(self).__name__}({fields})"


def of_jmp(value: T) -> T | Policy:
    """Returns a policy of JMP, or one like it with its three dtypes, as jmpx's; others as is."""
    names = ("param_dtype", "compute_dtype", "output_dtype")
    if isinstance(value, type | Policy) or not all(hasattr(value, name) for name in names):
        return value
    return Policy(*(getattr(value, name) for name in names))


def overrides_casts(policy: Policy) -> bool:
    """Whether the class of a policy overrides casts."""
    names = ("cast_to_param", "cast_to_compute", "cast_to_output")
    return any(getattr(type(policy), name) is not getattr(Policy, name) for name in names)


# What `get_policy` takes.
PolicyLike: TypeAlias = str | Policy | MappingLike | DTypeLike

# The keys of policy strings -> the attributes of policies.
ATTRIBUTES = {
    "params": "param_dtype",
    "compute": "compute_dtype",
    "output": "output_dtype",
    "matmul": "matmul_precision",
    "reduce": "reduce_dtype",
}


def given_fields(policy: Policy) -> dict[str, str]:
    """Returns the fields that a policy sets, as names, by their keys in policy strings."""
    return written({key: getattr(policy, name) for key, name in ATTRIBUTES.items()})


def written(fields: Mapping[str, DTypeLike | None]) -> dict[str, str]:
    """Returns the fields that are not None, as policy strings spell them."""
    return {
        key: str(value) if key == "matmul" else dtype_name(value)
        for key, value in fields.items()
        if value is not None
    }
