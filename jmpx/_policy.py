"""Policies: the dtypes of stored parameters, of computation and of results."""

import dataclasses
import re
from collections.abc import Iterable
from typing import Self, TypeVar

from jmpx._casts import cast_tree
from jmpx._dtypes import (
    DTypeLike,
    ScalarType,
    as_dtype,
    check_computes,
    describe_dtypes,
    dtype_name,
    dtype_names,
    parse_dtype,
)

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, repr=False)
class Policy:
    """The dtypes of stored parameters, of computation and of results.

    A frozen, hashable, picklable value (not a pytree), so it serves as a static argument of
    `jax.jit` and as a static field of a module. Follows JMP's `Policy`. Subclasses may add fields
    and override the casts: jmpx never casts to a policy's dtypes in another way.

    Args:
        param_dtype: the dtype in which parameters are stored.
        compute_dtype: the dtype in which computation runs. Dtypes of 8 bits are for storage only:
            the first use of one as a compute dtype is an error.
        output_dtype: the dtype in which results are returned.

    A dtype may be given as a name, a `np.dtype` or a scalar type. The policy keeps it as JAX's
    scalar type, such as `jnp.float32`.

    Raises:
        TypeError: if an argument is not a dtype.
        ValueError: if a dtype is unknown or not floating.

    Example:
        >>> import jax.numpy as jnp
        >>> import jmpx
        >>> policy = jmpx.Policy("float32", jnp.bfloat16, jnp.float32)
        >>> policy.compute_dtype is jnp.bfloat16
        True
        >>> str(policy)
        'params=float32,compute=bfloat16,output=float32'
        >>> policy.cast_to_compute({"w": jnp.ones(2)})
        {'w': Array([1, 1], dtype=bfloat16)}
    """

    param_dtype: DTypeLike
    compute_dtype: DTypeLike
    output_dtype: DTypeLike

    def __post_init__(self) -> None:
        for name in ("param_dtype", "compute_dtype", "output_dtype"):
            object.__setattr__(self, name, as_dtype(getattr(self, name)))

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

    def __str__(self) -> str:
        """Returns the policy string, which `get_policy` parses back to an equal policy."""
        return (
            f"params={dtype_name(self.param_dtype)},compute={dtype_name(self.compute_dtype)},"
            f"output={dtype_name(self.output_dtype)}"
        )

    def __repr__(self) -> str:
        """Returns the constructor call, with the names of the dtypes."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        dtypes = {name: dtype_name(values.pop(name)) for name in list(values)[:3]}
        fields = {**dtypes, **values}
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in fields.items())})"


FIELDS = ("params", "compute", "output")

# The keys of a policy string, and the fields that they set.
KEYS = {
    "p": "params", "param": "params", "params": "params",
    "c": "compute", "compute": "compute",
    "o": "output", "output": "output",
}  # fmt: skip

# Lightning's precision strings, then Keras's. The mixed ones of Lightning return float32, those of
# Keras return the compute dtype.
_PRESETS = {
    "bf16-mixed": "params=float32,compute=bfloat16,output=float32",
    "16-mixed": "params=float32,compute=float16,output=float32",
    "bf16-true": "bfloat16",
    "16-true": "float16",
    "32-true": "float32",
    "64-true": "float64",
    "mixed_bfloat16": "params=float32,compute=bfloat16,output=bfloat16",
    "mixed_float16": "params=float32,compute=float16,output=float16",
}

_NO_RULES = (
    "a policy has no rules, which are for what takes a policy map: jmpx.get_policy_map, "
    "jmpx.autocast, the policies and with_policies of the adapters, and "
    "jmpx.flags.DEFINE_policy_map"
)


def get_policy(policy: str | Policy) -> Policy:
    """Parses a policy string.

    A policy string consists of `key=dtype` parts, separated by commas, or of one dtype for all
    three fields. The keys are `p`, `param` or `params`; `c` or `compute`; `o` or `output`. Without
    its key, params is float32, compute is the dtype of params, and output is the dtype of compute.
    White space, case and one semicolon at the end are ignored. This is JMP's grammar; Lightning's
    precision strings (`bf16-mixed`, `16-mixed`, `bf16-true`, `16-true`, `32-true`, `64-true`) and
    Keras's (`mixed_bfloat16`, `mixed_float16`) are accepted, too.

    The dtype `half` is bfloat16 on TPU and float16 elsewhere. Parsing it starts JAX's backend, so
    a multi-host program must call `jax.distributed.initialize` first.

    Args:
        policy: a policy string, or a policy, which is returned as it is.

    Returns:
        The policy.

    Raises:
        TypeError: if `policy` is neither a string nor a policy. A policy map is not a policy.
        ValueError: if the string does not follow the grammar, or has rules, which only policy maps
            may have. The message gives the position.

    Example:
        >>> import jmpx
        >>> str(jmpx.get_policy("c=bf16, o=f32"))
        'params=float32,compute=bfloat16,output=float32'
        >>> jmpx.get_policy("bf16-mixed") == jmpx.get_policy("c=bf16,o=f32")
        True
        >>> jmpx.get_policy("compute=bflaot16")
        Traceback (most recent call last):
        ...
        ValueError: Unknown dtype 'bflaot16' at position 8 of policy 'compute=bflaot16': expected \
one of float16 (f16, fp16), bfloat16 (bf16), float32 (f32, fp32, full), float64 (f64, fp64), half, \
float8_*; did you mean 'bfloat16'?
    """
    if isinstance(policy, Policy):
        return policy
    if hasattr(policy, "rules"):  # a PolicyMap, which this file cannot import
        raise TypeError(
            f"Expected a policy, got the policy map {str(policy)!r}: {_NO_RULES}; its .default is "
            "a policy."
        )
    if not isinstance(policy, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"Expected a policy string or a jmpx.Policy, got {policy!r}: write for example "
            "'params=float32,compute=bfloat16,output=float32'."
        )
    part = without_last_semicolon(policy)
    _refuse_rules(part, policy)
    fields = parse_fields(part, policy, 0, bare=FIELDS)
    params = fields.get("params", parse_dtype("float32"))
    compute = fields.get("compute", params)
    return Policy(params, compute, fields.get("output", compute))


def without_last_semicolon(text: str) -> str:
    """Returns the string of a policy or policy map without the semicolon that may end it."""
    return text.rstrip().removesuffix(";")


def _refuse_rules(part: str, text: str) -> None:
    """Refuses rules and semicolons, but leaves mistakes such as `c:bf16` to `refuse_colons`."""
    start = 0
    for piece in part.split(";"):
        selector, colon, _ = piece.partition(":")
        if colon and "=" not in selector and selector.strip().lower() not in KEYS:
            raise ValueError(
                f"Unexpected rule {piece.strip()!r} {position(piece, start)} of policy {text!r}: "
                f"{_NO_RULES}."
            )
        start += len(piece) + 1
    if ";" in part:
        raise ValueError(
            f"Unexpected ';' at position {part.index(';')} of policy {text!r}: write commas "
            "between the parts of a policy."
        )


def refuse_colons(part: str, text: str, start: int, end: str = "") -> None:
    """Refuses a colon in place of an equals sign, as in `compute:bf16`.

    Args:
        part: the policy's part of `text`.
        text: the user's whole string, which the message quotes.
        start: the index of `part` in `text`.
        end: words to add to the end of the message.
    """
    for field in part.split(","):
        key, colon, _ = field.partition(":")
        if colon and key.strip().lower() in KEYS:
            meant = re.sub(r"\s*:\s*=?\s*", "=", part.strip())
            raise ValueError(
                f"Unexpected ':' at position {start + len(key)} of policy {text!r}: write "
                f"{meant!r}, with an equals sign{end}."
            )
        start += len(field) + 1


def parse_fields(part: str, text: str, start: int, bare: tuple[str, ...]) -> dict[str, ScalarType]:
    """Parses a policy, which may be a part of a longer string.

    Args:
        part: the policy's part of `text`.
        text: the user's whole string, which error messages quote.
        start: the index of `part` in `text`.
        bare: the fields that a dtype without a key sets.

    Returns:
        The dtype of each field that the policy sets. The fields are "params", "compute" and
        "output".

    Raises:
        ValueError: if the policy does not follow the grammar.
    """
    preset = _PRESETS.get(part.strip().lower())
    if preset is not None:
        return parse_fields(preset, preset, 0, bare=FIELDS)
    refuse_colons(part, text, start)
    if "=" not in part:
        dtype = _parse_dtype(part, text, start, presets=_PRESETS)
        return dict.fromkeys(bare, dtype)
    fields: dict[str, ScalarType] = {}
    for field in part.split(","):
        key, dtype = _parse_field(field, text, start)
        if key in fields:
            raise ValueError(
                f"Duplicate key {key!r} {position(field, start)} of policy {text!r}: give each of "
                "'params', 'compute' and 'output' at most once."
            )
        fields[key] = dtype
        start += len(field) + 1
    return fields


def _parse_field(field: str, text: str, start: int) -> tuple[str, ScalarType]:
    """Parses the `key=dtype` that begins at index `start` of `text`."""
    if not field.strip():
        raise ValueError(
            f"Empty part {position(field, start)} of policy {text!r}: write 'key=dtype' on both "
            "sides of each comma."
        )
    key, equals, value = field.partition("=")
    if not equals:
        raise ValueError(
            f"Missing key for {field.strip()!r} {position(field, start)} of policy {text!r}: write "
            "'params=', 'compute=' or 'output=' before it."
        )
    name = KEYS.get(key.strip().lower())
    if name is None:
        raise ValueError(
            f"Unknown key {key.strip()!r} {position(key, start)} of policy {text!r}: expected one "
            f"of 'params' (p, param), 'compute' (c) or 'output' (o){did_you_mean(key, KEYS)}"
        )
    return name, _parse_dtype(value, text, start + len(key) + 1)


def _parse_dtype(value: str, text: str, start: int, presets: Iterable[str] = ()) -> ScalarType:
    try:
        return parse_dtype(value)
    except KeyError:
        pass
    accepted = ", ".join([describe_dtypes(), *presets])
    what = f"Unknown dtype {value.strip()!r}" if value.strip() else "Missing dtype"
    near = did_you_mean(value, [*dtype_names(), *presets])
    raise ValueError(
        f"{what} {position(value, start)} of policy {text!r}: expected one of {accepted}{near}"
    )


def position(part: str, start: int) -> str:
    """Returns `at position n`: the index of the first character of `part` that is not a space.

    Args:
        part: a part of the user's string.
        start: its index in that string.
    """
    return f"at position {start + len(part) - len(part.lstrip())}"


def did_you_mean(word: str, choices: list[str] | dict[str, str]) -> str:
    """Returns the end of an error message: `; did you mean 'x'?`, or a full stop.

    Args:
        word: the word that the user wrote.
        choices: the words that it may mean, or a dict from such words to what to suggest for them.
    """
    import difflib  # here, because only errors need it

    known = choices if isinstance(choices, dict) else {choice: choice for choice in choices}
    word = word.strip()
    near = [n for w in (word, word.lower()) for n in difflib.get_close_matches(w, known, n=1)]
    return f"; did you mean {known[near[0]]!r}?" if near else "."
