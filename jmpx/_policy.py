"""Policies: which dtype parameters are stored, computation runs and results leave in."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import jax.numpy as jnp

from jmpx._casts import cast_tree
from jmpx._dtypes import (
    DTypeLike,
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
    """The dtypes that a piece of a program stores, computes and returns in.

    A frozen, hashable, picklable value (not a pytree), so it serves as a static argument of
    `jax.jit` and as a static field of a module. Follows JMP's `Policy`. Subclasses may add fields
    and override the casts: jmpx casts through nothing else.

    Args:
        param_dtype: the dtype in which parameters are stored.
        compute_dtype: the dtype in which computation runs; one of 8 bits, which is for storage
            alone, is refused when it is first used.
        output_dtype: the dtype in which results are returned.

    A dtype is given as a name, a `np.dtype` or a scalar type, and kept as JAX's scalar type.

    Raises:
        TypeError: if a dtype is not one.
        ValueError: if a dtype is not a floating one.

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
            ValueError: if the compute dtype is one of 8 bits, which are for storage.
        """
        check_computes(self.compute_dtype)
        return cast_tree(tree, self.compute_dtype)

    def cast_to_output(self, tree: T) -> T:
        """Casts the floating leaves of a pytree to `output_dtype`; see `jmpx.cast_tree`."""
        return cast_tree(tree, self.output_dtype)

    def with_output_dtype(self, output_dtype: DTypeLike) -> "Policy":
        """Returns this policy with another `output_dtype`."""
        return dataclasses.replace(self, output_dtype=output_dtype)

    def __str__(self) -> str:
        """Returns the policy string, which `get_policy` parses back to an equal policy."""
        return (
            f"params={dtype_name(self.param_dtype)},compute={dtype_name(self.compute_dtype)},"
            f"output={dtype_name(self.output_dtype)}"
        )

    def __repr__(self) -> str:
        """Returns the constructor call, the dtypes by name."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        dtypes = {name: dtype_name(values.pop(name)) for name in list(values)[:3]}
        fields = {**dtypes, **values}
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in fields.items())})"


KEYS = {
    "p": "params", "param": "params", "params": "params",
    "c": "compute", "compute": "compute",
    "o": "output", "output": "output",
}  # fmt: skip

# Mixed ones of Lightning output float32, those of Keras what was computed.
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

    The grammar is JMP's: `key=dtype` parts with commas between them, the keys being `p`, `param`
    or `params`, `c` or `compute`, `o` or `output`; or one bare dtype for all three. Params left out
    are float32, compute follows params, output follows compute. White space and case do not count.
    Beyond JMP it knows Lightning's precision strings (`bf16-mixed`, `16-mixed`, `bf16-true`,
    `16-true`, `32-true`, `64-true`) and Keras's (`mixed_bfloat16`, `mixed_float16`). One semicolon
    at the end does not count.

    The dtype `half` is float16, on TPU bfloat16: it alone asks JAX for its backend when it is
    parsed, so in a multi-host program parse it after `jax.distributed.initialize`.

    Args:
        policy: a policy string, or a policy, which is returned as it is.

    Returns:
        The policy.

    Raises:
        TypeError: if `policy` is neither a string nor a policy; a policy map is none.
        ValueError: if the string is not of the grammar, or has rules, as a policy map may; the
            message says where.

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
    if hasattr(policy, "rules"):  # a PolicyMap, whose file imports this one
        raise TypeError(
            f"Expected a policy, got the policy map {str(policy)!r}: {_NO_RULES}; its .default is "
            "a policy."
        )
    if not isinstance(policy, str):
        raise TypeError(
            f"Expected a policy string or a jmpx.Policy, got {policy!r}: write for example "
            "'params=float32,compute=bfloat16,output=float32'."
        )
    part = without_last_semicolon(policy)
    _refuse_rules(part, policy)
    fields = parse_fields(part, policy, 0, bare=("params", "compute", "output"))
    params = fields.get("params", jnp.float32)
    compute = fields.get("compute", params)
    return Policy(params, compute, fields.get("output", compute))


def without_last_semicolon(text: str) -> str:
    """Returns a policy or policy map without the semicolon that may end it."""
    return text.rstrip().removesuffix(";")


def _refuse_rules(part: str, text: str) -> None:
    """Refuses the semicolons and rules of a policy map, but for a colon that is to be `=`."""
    start = 0
    for piece in part.split(";"):
        selector, colon, _ = piece.partition(":")
        if colon and "=" not in selector and selector.strip().lower() not in KEYS:
            raise ValueError(
                f"Unexpected rule {piece.strip()!r} {place(piece, start)} of policy {text!r}: "
                f"{_NO_RULES}."
            )
        start += len(piece) + 1
    if ";" in part:
        raise ValueError(
            f"Unexpected ';' at position {part.index(';')} of policy {text!r}: write commas "
            "between the parts of a policy."
        )


def refuse_colons(part: str, text: str, start: int, end: str = "") -> None:
    """Refuses `compute:bf16`, in which a colon stands where an equals sign belongs.

    Args:
        part: the policy's own text.
        text: all of what the user wrote, for error messages.
        start: where in it `part` begins.
        end: what the error message says besides.
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


def parse_fields(part: str, text: str, start: int, bare: tuple[str, ...]) -> dict[str, Any]:
    """Parses a policy that stands in `text` from offset `start`.

    Args:
        part: the policy's own text.
        text: all of what the user wrote, for error messages.
        start: where in it `part` begins.
        bare: the keys that a bare dtype stands for.

    Returns:
        The dtypes of those of "params", "compute" and "output" that it names.
    """
    preset = _PRESETS.get(part.strip().lower())
    if preset is not None:
        return parse_fields(preset, preset, 0, bare=("params", "compute", "output"))
    refuse_colons(part, text, start)
    if "=" not in part:
        dtype = _parse_dtype(part, text, start, presets=_PRESETS)
        return dict.fromkeys(bare, dtype)
    fields: dict[str, Any] = {}
    for field in part.split(","):
        key, dtype = _parse_field(field, text, start)
        if key in fields:
            raise ValueError(
                f"Duplicate key {key!r} {place(field, start)} of policy {text!r}: give each of "
                "'params', 'compute' and 'output' at most once."
            )
        fields[key] = dtype
        start += len(field) + 1
    return fields


def _parse_field(field: str, text: str, start: int) -> tuple[str, Any]:
    """Parses one `key=dtype` of `text`, which begins at offset `start`."""
    if not field.strip():
        raise ValueError(
            f"Empty part {place(field, start)} of policy {text!r}: write 'key=dtype' on both sides "
            "of each comma."
        )
    key, equals, value = field.partition("=")
    if not equals:
        raise ValueError(
            f"Missing key for {field.strip()!r} {place(field, start)} of policy {text!r}: write "
            "'params=', 'compute=' or 'output=' before it."
        )
    name = KEYS.get(key.strip().lower())
    if name is None:
        raise ValueError(
            f"Unknown key {key.strip()!r} {place(key, start)} of policy {text!r}: expected one of "
            f"'params' (p, param), 'compute' (c) or 'output' (o){did_you_mean(key, KEYS)}"
        )
    return name, _parse_dtype(value, text, start + len(key) + 1)


def _parse_dtype(value: str, text: str, start: int, presets: Iterable[str] = ()) -> Any:
    try:
        return parse_dtype(value)
    except KeyError:
        pass
    accepted = ", ".join([describe_dtypes(), *presets])
    what = f"Unknown dtype {value.strip()!r}" if value.strip() else "Missing dtype"
    near = did_you_mean(value, [*dtype_names(), *presets])
    raise ValueError(
        f"{what} {place(value, start)} of policy {text!r}: expected one of {accepted}{near}"
    )


def place(part: str, start: int) -> str:
    """Says where `part` begins, white space skipped, counted from 0 as Python does."""
    return f"at position {start + len(part) - len(part.lstrip())}"


def did_you_mean(word: str, choices: Iterable[str] | Mapping[str, str]) -> str:
    """Returns the end of an error message: a near choice, or what that stands for, if any."""
    import difflib  # here, because only errors need it

    known = choices if isinstance(choices, Mapping) else {choice: choice for choice in choices}
    word = word.strip()
    near = [n for w in (word, word.lower()) for n in difflib.get_close_matches(w, known, n=1)]
    return f"; did you mean {known[near[0]]!r}?" if near else "."
