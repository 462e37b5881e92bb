"""Policy strings: their grammar, which those of policy maps share."""

import re
from collections.abc import Iterable
from typing import Any

from jmpx._dtypes import (
    ScalarType,
    check_reduces,
    describe_dtypes,
    dtype_names,
    parse_dtype,
)
from jmpx._matmul import describe_matmuls, matmul_names, parse_matmul
from jmpx._messages import did_you_mean, position
from jmpx._policy import ATTRIBUTES, Policy

# The fields that a policy without keys sets.
DTYPES = ("params", "compute", "output")

# The keys of a policy string, and the fields that they set.
KEYS = {
    "p": "params", "param": "params", "params": "params",
    "c": "compute", "compute": "compute",
    "o": "output", "output": "output",
    "m": "matmul", "matmul": "matmul",
    "r": "reduce", "reduce": "reduce",
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

    A policy string consists of `key=value` parts, separated by commas, or of one dtype for
    parameters, computation and results. The keys are `p`, `param` or `params`; `c` or `compute`;
    `o` or `output`; `m` or `matmul`; `r` or `reduce`. Without its key, params is float32, compute
    is the dtype of params, and output is the dtype of compute; matmul and reduce are not set. The
    value of `matmul` is a name of `jax.default_matmul_precision`, such as `highest`; all others are
    dtypes. `Policy` says what each field means. White space, case and one semicolon at the end are
    ignored. The first three keys are JMP's grammar; Lightning's precision strings (`bf16-mixed`,
    `16-mixed`, `bf16-true`, `16-true`, `32-true`, `64-true`) and Keras's (`mixed_bfloat16`,
    `mixed_float16`) are accepted, too.

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
    return complete(parse_fields(part, policy, 0, bare=DTYPES))


def complete(fields: dict[str, Any]) -> Policy:
    """Returns the policy with these fields, in which those that are left out have defaults."""
    params = fields.get("params", parse_dtype("float32"))
    compute = fields.get("compute", params)
    fields = {"params": params, "compute": compute, "output": compute, **fields}
    return Policy(**{ATTRIBUTES[key]: value for key, value in fields.items()})


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


def parse_fields(part: str, text: str, start: int, bare: tuple[str, ...]) -> dict[str, Any]:
    """Parses a policy, which may be a part of a longer string.

    Args:
        part: the policy's part of `text`.
        text: the user's whole string, which error messages quote.
        start: the index of `part` in `text`.
        bare: the fields that a dtype without a key sets.

    Returns:
        The value of each field that the policy sets, by the keys of `ATTRIBUTES`: a dtype, or the
        name of an algorithm.

    Raises:
        ValueError: if the policy does not follow the grammar.
    """
    preset = _PRESETS.get(part.strip().lower())
    if preset is not None:
        return parse_fields(preset, preset, 0, bare=DTYPES)
    refuse_colons(part, text, start)
    if "=" not in part:
        dtype = _parse_dtype(part, text, start, presets=_PRESETS)
        return dict.fromkeys(bare, dtype)
    fields: dict[str, Any] = {}
    for field in part.split(","):
        key, value = _parse_field(field, text, start)
        if key in fields:
            raise ValueError(
                f"Duplicate key {key!r} {position(field, start)} of policy {text!r}: give each of "
                "'params', 'compute', 'output', 'matmul' and 'reduce' at most once."
            )
        fields[key] = value
        start += len(field) + 1
    return fields


def _parse_field(field: str, text: str, start: int) -> tuple[str, Any]:
    """Parses the `key=value` that begins at index `start` of `text`."""
    if not field.strip():
        raise ValueError(
            f"Empty part {position(field, start)} of policy {text!r}: write 'key=value' on both "
            "sides of each comma."
        )
    key, equals, value = field.partition("=")
    if not equals:
        raise ValueError(
            f"Missing key for {field.strip()!r} {position(field, start)} of policy {text!r}: write "
            "'params=', 'compute=', 'output=', 'matmul=' or 'reduce=' before it."
        )
    name = KEYS.get(key.strip().lower())
    if name is None:
        raise ValueError(
            f"Unknown key {key.strip()!r} {position(key, start)} of policy {text!r}: expected one "
            "of 'params' (p, param), 'compute' (c), 'output' (o), 'matmul' (m) or 'reduce' "
            f"(r){did_you_mean(key, KEYS)}"
        )
    start += len(key) + 1
    if name == "matmul":
        return name, _parse_matmul(value, text, start)
    dtype = _parse_dtype(value, text, start)
    if name == "reduce":
        check_reduces(dtype, f" {position(value, start)} of policy {text!r}")
    return name, dtype


def _parse_matmul(value: str, text: str, start: int) -> str:
    try:
        return parse_matmul(value)
    except KeyError:
        pass
    what = f"Unknown algorithm {value.strip()!r}" if value.strip() else "Missing algorithm"
    near = did_you_mean(value, matmul_names())
    raise ValueError(
        f"{what} {position(value, start)} of policy {text!r}: expected one of "
        f"{describe_matmuls()}{near}"
    )


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
