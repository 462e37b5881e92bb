"""Policy strings and mappings: their grammar, which those of policy maps share."""

from collections.abc import Iterable
from typing import Any, TypeAlias

from jmpx._base.dtypes import (
    DTypeLike,
    ScalarType,
    as_dtype,
    check_reduces,
    describe_dtypes,
    dtype_names,
    is_dtype,
    no_dtype,
    parse_dtype,
)
from jmpx._base.mappings import (
    Located,
    MappingLike,
    at,
    child,
    is_mapping,
    quote,
    read_keys,
    refuse_value,
    unknown_key,
)
from jmpx._base.matmul import describe_matmuls, matmul_names, parse_matmul
from jmpx._base.messages import describe, did_you_mean, position
from jmpx._policies.policy import ATTRIBUTES, Policy, given_fields

# What `get_policy` takes.
PolicyLike: TypeAlias = str | Policy | MappingLike | DTypeLike

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

# What the default part of a policy map may say besides: how the map is applied.
HOW: dict[str, tuple[str, ...]] = {
    "by": ("arguments", "modules", "operations"),
    "save": ("products",),
}

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
    "jmpx.apply_policy, policy= of the gradient functions, jmpx.autocast, the policies and "
    "with_policies of the adapters, and jmpx.flags.DEFINE_policy_map"
)
NO_LOSS_SCALE = (
    "a loss scale is no part of a policy or of a policy map, so give the whole to "
    "jmpx.get_mixed_precision, which takes both, from a mapping as 'policy' and 'loss_scale'"
)
NO_HOW = (
    "how a policy is applied stands in the default part of a policy map, the one without a "
    "selector, which jmpx.apply_policy and the gradient functions take"
)
_NO_POLICY = "write the keys of the policy themselves, as {'compute': 'bfloat16'}"
DESCRIBED_KEYS = "'params' (p, param), 'compute' (c), 'output' (o), 'matmul' (m) or 'reduce' (r)"


def get_policy(policy: PolicyLike) -> Policy:
    """Parses a policy string, or reads a policy from a mapping.

    A policy string consists of `key=value` parts, separated by commas, or of one dtype for
    parameters, computation and results. The keys are `p`, `param` or `params`; `c` or `compute`;
    `o` or `output`; `m` or `matmul`; `r` or `reduce`. Without its key, params is float32, compute
    is the dtype of params, and output is the dtype of compute; matmul and reduce are not set. The
    value of `matmul` is a name of `jax.default_matmul_precision`, such as `highest`; all others are
    dtypes. `Policy` says what each field means. White space, case and one semicolon at the end are
    ignored. The first three keys are JMP's grammar; Lightning's precision strings (`bf16-mixed`,
    `16-mixed`, `bf16-true`, `16-true`, `32-true`, `64-true`) and Keras's (`mixed_bfloat16`,
    `mixed_float16`) are accepted, too. `matmul` and `reduce` may follow one of these, or a dtype
    without a key: `full,m=highest`.

    A mapping has the same keys: a dict, or a node of a configuration, such as an
    `ml_collections.ConfigDict` or an `omegaconf.DictConfig`.

    The dtype `half` is bfloat16 on TPU and float16 elsewhere. Parsing it starts JAX's backend, so
    a multi-host program must call `jax.distributed.initialize` first.

    Args:
        policy: a policy string; or a mapping; or a dtype such as `jnp.bfloat16`, which means the
            same as its name; or a policy, which is returned as it is.

    Returns:
        The policy.

    Raises:
        TypeError: if `policy` is of another type, or a value of the mapping is. A policy map is not
            a policy.
        ValueError: if the string or the mapping does not follow the grammar, or has rules or a loss
            scale. The message gives the position in the string, or the path in the mapping.

    Example:
        >>> import jax.numpy as jnp
        >>> import jmpx
        >>> str(jmpx.get_policy("c=bf16, o=f32"))
        'params=float32,compute=bfloat16,output=float32'
        >>> jmpx.get_policy("bf16-mixed") == jmpx.get_policy({"compute": "bf16", "output": "f32"})
        True
        >>> jmpx.get_policy(jnp.bfloat16) == jmpx.get_policy("bfloat16")
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
    if not is_mapping(policy):
        _refuse_policy_map(policy)
    return complete(read_fields(Located(policy, ""), bare=DTYPES))


def _refuse_policy_map(value: object) -> None:
    """Refuses a `PolicyMap` and a `MixedPrecision`, which this file cannot import."""
    if hasattr(value, "rules"):
        raise TypeError(
            f"Expected a policy, got the policy map {str(value)!r}: {_NO_RULES}; its .default is "
            "a policy."
        )
    if hasattr(value, "policy_map"):
        raise TypeError(
            f"Expected a policy, got {describe(value)}: its .policy_map is a policy map, whose "
            ".default is a policy."
        )


def read_fields(found: Located, bare: tuple[str, ...]) -> dict[str, Any]:
    """Reads the fields of a policy that a user gave, or that a mapping has at a path.

    Args:
        found: a policy string, a mapping, a dtype or a policy; and its path, empty for what is not
            in a mapping.
        bare: the fields that a dtype without a key sets.

    Returns:
        The value of each field that is set, as `parse_fields` does.

    Raises:
        TypeError: if the value is of another type, or one in the mapping is.
        ValueError: if it does not follow the grammar.
    """
    policy, path = found
    if isinstance(policy, Policy):
        return {key: getattr(policy, ATTRIBUTES[key]) for key in given_fields(policy)}
    if isinstance(policy, str):
        part, quoted = without_last_semicolon(policy), quote(policy, path)
        refuse_bar(policy, f"policy {quoted}")
        _refuse_rules(part, quoted)
        fields = parse_fields(part, quoted, 0, bare)
        refuse_how(fields, f"policy {quoted}")
        return fields
    if is_mapping(policy):
        return _read_mapping(policy, path)
    if is_dtype(policy):
        return dict.fromkeys(bare, as_dtype(policy, at(path)))
    what = "a policy string, a mapping, a dtype or a jmpx.Policy"
    remedy = "write for example 'params=float32,compute=bfloat16,output=float32'"
    raise refuse_value(what, policy, path, remedy)


def _read_mapping(policy: MappingLike, path: str) -> dict[str, Any]:
    """Reads the mapping of a policy."""
    given = read_keys(policy, path, KEYS)
    for name in given:
        if name not in ATTRIBUTES:
            raise _unknown_key(name, path)
    if not given:
        raise ValueError(
            f"Empty mapping{at(path)} in place of a policy: give at least one key, as "
            "{'compute': 'bfloat16'}."
        )
    return {name: read_field(name, found) for name, found in given.items()}


def read_field(name: str, found: Located) -> Any:
    """Reads the value of one field of a policy, by its key in `ATTRIBUTES`.

    Raises:
        TypeError: if the value is of another type than that field takes.
        ValueError: if it is unknown.
    """
    value, path = found
    if name == "matmul":
        if not isinstance(value, str):
            remedy = f"write one of {describe_matmuls()}"
            raise refuse_value("the name of an algorithm of matrix products", value, path, remedy)
        try:
            return parse_matmul(value)
        except KeyError:
            raise _unknown_matmul(value, f"at {path}") from None
    if isinstance(value, str):
        try:
            dtype = parse_dtype(value)
        except KeyError:
            raise _unknown_dtype(value, f"at {path}") from None
    elif is_dtype(value):
        dtype = as_dtype(value, at(path))
    else:
        raise refuse_value("a dtype", value, path, "write its name, such as 'bfloat16'")
    if name == "reduce":
        check_reduces(dtype, at(path))
    return dtype


def _unknown_key(key: str, path: str) -> ValueError:
    """Returns the error for a key that a policy's mapping cannot have."""
    reasons = {"rules": _NO_RULES, "loss_scale": NO_LOSS_SCALE, "policy": _NO_POLICY}
    reasons |= dict.fromkeys(HOW, NO_HOW)
    reason = reasons.get(key.strip().lower())
    if reason is not None:
        return ValueError(f"Unexpected key at {child(path, key)}: {reason}.")
    return unknown_key(key, path, DESCRIBED_KEYS, KEYS)


def complete(fields: dict[str, Any]) -> Policy:
    """Returns the policy with these fields, in which those that are left out have defaults."""
    params = fields.get("params", parse_dtype("float32"))
    compute = fields.get("compute", params)
    fields = {"params": params, "compute": compute, "output": compute, **fields}
    return Policy(**{ATTRIBUTES[key]: value for key, value in fields.items()})


def without_last_semicolon(text: str) -> str:
    """Returns the string of a policy or policy map without the semicolon that may end it."""
    return text.rstrip().removesuffix(";")


def _refuse_rules(part: str, quoted: str) -> None:
    """Refuses rules and semicolons, but leaves mistakes such as `c:bf16` to `refuse_colons`."""
    start = 0
    for piece in part.split(";"):
        selector, colon, _ = piece.partition(":")
        if colon and "=" not in selector and selector.strip().lower() not in (*KEYS, *HOW):
            raise ValueError(
                f"Unexpected rule {piece.strip()!r} {position(piece, start)} of policy {quoted}: "
                f"{_NO_RULES}."
            )
        start += len(piece) + 1
    if ";" in part:
        raise ValueError(
            f"Unexpected ';' at position {part.index(';')} of policy {quoted}: write commas "
            "between the parts of a policy."
        )


def refuse_bar(text: str, whole: str) -> None:
    """Refuses a bar, which separates a loss scale from a policy map.

    Args:
        text: the user's string.
        whole: what the string is, and the string, as the message quotes it.
    """
    if "|" in text:
        raise ValueError(
            f"Unexpected '|' at position {text.index('|')} of {whole}: {NO_LOSS_SCALE}."
        )


def refuse_colons(part: str, quoted: str, start: int, end: str = "") -> None:
    """Refuses a colon in place of an equals sign, as in `compute:bf16`.

    Args:
        part: the policy's part of the user's string.
        quoted: the whole string as the message quotes it.
        start: the index of `part` in that string.
        end: words to add to the end of the message.
    """
    for field in part.split(","):
        key, colon, _ = field.partition(":")
        if colon and key.strip().lower() in (*KEYS, *HOW):
            meant = ",".join(map(_with_equals_sign, part.strip().split(",")))
            raise ValueError(
                f"Unexpected ':' at position {start + len(key)} of policy {quoted}: write "
                f"{meant!r}, with an equals sign{end}."
            )
        start += len(field) + 1


def _with_equals_sign(field: str) -> str:
    """Returns `key: value` and `key := value` as `key=value`."""
    key, colon, value = field.partition(":")
    return f"{key.rstrip()}={value.lstrip().removeprefix('=').lstrip()}" if colon else field


def parse_fields(part: str, quoted: str, start: int, bare: tuple[str, ...]) -> dict[str, Any]:
    """Parses a policy, which may be a part of a longer string.

    Args:
        part: the policy's part of the user's string.
        quoted: the whole string as error messages quote it, see `jmpx._base.mappings.quote`.
        start: the index of `part` in that string.
        bare: the fields that a dtype without a key sets.

    Returns:
        The value of each field that the policy sets, by the keys of `ATTRIBUTES`: a dtype, or the
        name of an algorithm.

    Raises:
        ValueError: if the policy does not follow the grammar.
    """
    preset = _PRESETS.get(part.strip().lower())
    if preset is not None:
        return parse_fields(preset, repr(preset), 0, bare=DTYPES)
    refuse_colons(part, quoted, start)
    if "=" not in part:
        dtype = _parse_dtype(part, quoted, start, presets=_PRESETS)
        return dict.fromkeys(bare, dtype)
    fields: dict[str, Any] = {}
    pieces = _pieces(part, start)
    dtypes = [piece for piece in pieces if "=" not in piece[0]]
    others = [piece for piece in pieces if "=" in piece[0]]
    if len(dtypes) == 1 and dtypes[0][0].strip() and not any(map(_sets_dtype, others)):
        text, at = dtypes[0]
        fields, pieces = parse_fields(text, quoted, at, bare), others
    for field, at in pieces:
        key, value = _parse_field(field, quoted, at)
        if key in fields:
            known = ", ".join(map(repr, (*ATTRIBUTES, *HOW)))
            raise ValueError(
                f"Duplicate key {key!r} {position(field, at)} of policy {quoted}: give each of "
                f"{known} at most once."
            )
        fields[key] = value
    return fields


def _pieces(part: str, start: int) -> list[tuple[str, int]]:
    """Returns what stands between the commas of a part, each with its index in the string."""
    pieces: list[tuple[str, int]] = []
    for text in part.split(","):
        pieces.append((text, start))
        start += len(text) + 1
    return pieces


def _sets_dtype(piece: tuple[str, int]) -> bool:
    """Whether a dtype without a key cannot stand beside a piece, because that sets a dtype, too."""
    key = piece[0].partition("=")[0].strip().lower()
    return KEYS.get(key) not in ("matmul", "reduce") and key not in HOW


def _parse_field(field: str, quoted: str, start: int) -> tuple[str, Any]:
    """Parses the `key=value` that begins at index `start` of the user's string."""
    if not field.strip():
        raise ValueError(
            f"Empty part {position(field, start)} of policy {quoted}: write 'key=value' on both "
            "sides of each comma."
        )
    key, equals, value = field.partition("=")
    if not equals:
        raise ValueError(
            f"Missing key for {field.strip()!r} {position(field, start)} of policy {quoted}: write "
            "'params=', 'compute=', 'output=', 'matmul=' or 'reduce=' before it."
        )
    name = key.strip().lower()
    if name in HOW:
        return name, parse_how(name, value, f"{position(value, start + len(key) + 1)} of {quoted}")
    name = KEYS.get(name)
    if name is None:
        raise ValueError(
            f"Unknown key {key.strip()!r} {position(key, start)} of policy {quoted}: expected one "
            f"of {DESCRIBED_KEYS}{did_you_mean(key, [*KEYS, *HOW])}"
        )
    start += len(key) + 1
    if name == "matmul":
        return name, _parse_matmul(value, quoted, start)
    dtype = _parse_dtype(value, quoted, start)
    if name == "reduce":
        check_reduces(dtype, f" {position(value, start)} of policy {quoted}")
    return name, dtype


def parse_how(name: str, value: str, place: str) -> str:
    """Returns the word that says how a policy map is applied.

    Args:
        name: the key, `by` or `save`.
        value: the word as the user wrote it.
        place: where it stands, for the message.

    Raises:
        ValueError: if there is no such word.
    """
    word = value.strip().lower()
    if word in HOW[name]:
        return word
    what = f"Unknown word {value.strip()!r}" if word else "Missing word"
    words = ", ".join(HOW[name])
    raise ValueError(
        f"{what} for {name!r} {place}: expected one of {words}{did_you_mean(word, [*HOW[name]])}"
    )


def refuse_how(fields: dict[str, Any], where: str) -> None:
    """Refuses words about how a policy is applied, where there is no map that could say it.

    Args:
        fields: what was parsed.
        where: what the fields are of, and their place, for the message.

    Raises:
        ValueError: if they hold such a word.
    """
    name = next((name for name in HOW if name in fields), None)
    if name is not None:
        raise ValueError(f"Unexpected {name!r} in {where}: {NO_HOW}.")


def _parse_matmul(value: str, quoted: str, start: int) -> str:
    try:
        return parse_matmul(value)
    except KeyError:
        pass
    raise _unknown_matmul(value, f"{position(value, start)} of policy {quoted}")


def _unknown_matmul(value: str, place: str) -> ValueError:
    what = f"Unknown algorithm {value.strip()!r}" if value.strip() else "Missing algorithm"
    near = did_you_mean(value, {name: name for name in matmul_names()} | {"tf32": "tensorfloat32"})
    return ValueError(f"{what} {place}: expected one of {describe_matmuls()}{near}")


def _parse_dtype(value: str, quoted: str, start: int, presets: Iterable[str] = ()) -> ScalarType:
    try:
        return parse_dtype(value)
    except KeyError:
        pass
    raise _unknown_dtype(value, f"{position(value, start)} of policy {quoted}", presets)


def _unknown_dtype(value: str, place: str, presets: Iterable[str] = ()) -> ValueError:
    reason = no_dtype(value)
    if reason is not None:
        return ValueError(f"Unknown dtype {value.strip()!r} {place}: {reason}.")
    accepted = ", ".join([describe_dtypes(), *presets])
    what = f"Unknown dtype {value.strip()!r}" if value.strip() else "Missing dtype"
    near = did_you_mean(value, [*dtype_names(), *presets])
    return ValueError(f"{what} {place}: expected one of {accepted}{near}")
