"""The grammar of policies, in strings and in mappings.

Both forms are first read as entries: keys and values that know their places. Then the same
functions check the keys and read the fields.
"""

import contextlib
import re
from collections.abc import Iterable
from typing import Any, TypeAlias

from jmpx._base.dtypes import (
    ScalarType,
    as_dtype,
    check_product,
    check_reduces,
    describe_dtypes,
    describe_matmuls,
    dtype_names,
    is_dtype,
    matmul_names,
    no_dtype,
    parse_dtype,
    parse_matmul,
)
from jmpx._base.messages import (
    Found,
    Located,
    Text,
    by_name,
    is_mapping,
    read_entries,
    refuse_value,
    unknown,
    whole_text,
)
from jmpx._policies.maps import HOW, PolicyMap, read_how
from jmpx._policies.policy import ATTRIBUTES, Policy, PolicyLike, given_fields, of_jmp

Field: TypeAlias = Any  # the value of a key: a dtype or a word

DTYPES = ("params", "compute", "output")
# The fields that a policy without keys sets; the output dtype follows from them.
BARE = ("params", "compute")

# The keys of a policy string, and the fields that they set.
KEYS = {
    "p": "params", "param": "params", "params": "params",
    "c": "compute", "compute": "compute",
    "o": "output", "output": "output",
    "m": "matmul", "matmul": "matmul",
    "r": "reduce", "reduce": "reduce",
}  # fmt: skip
MAP_KEYS = KEYS | {name: name for name in HOW}  # of the default part of a policy map

# Lightning's precision strings, then Keras's. Lightning's mixed ones return float32, Keras's return
# the compute dtype, like a policy without an output dtype.
_PRESETS = {
    "bf16-mixed": ("float32", "bfloat16", "float32"),
    "16-mixed": ("float32", "float16", "float32"),
    "bf16-true": ("bfloat16", "bfloat16"),
    "16-true": ("float16", "float16"),
    "32-true": ("float32", "float32"),
    "64-true": ("float64", "float64"),
    "mixed_bfloat16": ("float32", "bfloat16"),
    "mixed_float16": ("float32", "float16"),
}

_NO_RULES = (
    "a policy has no rules, which are for what takes a policy map: jmpx.get_policy_map, "
    "jmpx.apply_policy, policy= of the gradient functions, jmpx.autocast, the policies and "
    "with_policies of the adapters, and jmpx.flags.DEFINE_policy_map"
)
_WHOLE = "policies and policy maps have no loss scale, so give the whole to"
NO_LOSS_SCALE = f"{_WHOLE} jmpx.get_mixed_precision, which returns .policy_map and .loss_scale"
_NO_HOW = (
    "how a policy is applied stands in the default part of a policy map, the one without a "
    "selector, which jmpx.apply_policy and the gradient functions take"
)
_NO_REDUCE = (
    "gradients are summed over devices in one dtype, so give it in the default policy, the one "
    "without a selector"
)
_NO_PRODUCT = (
    "products that hand out float32 belong to a part of a model, so give the key in a rule for a "
    "module or a scope, as '*/head: product=float32'"
)
# Keys that users write in the wrong place, and the remedies.
ELSEWHERE = {
    **dict.fromkeys(
        ("param_dtype", "params_dtype"),
        "write params= for the dtype in which parameters are stored; FSDP2's param_dtype is the "
        "one in which they compute, compute= here",
    ),
    "rules": _NO_RULES,
    "loss_scale": f"{_WHOLE} jmpx.get_mixed_precision, under the keys 'policy' and 'loss_scale'",
    "policy": "write the keys of the policy themselves, as {'compute': 'bfloat16'}",
    **dict.fromkeys(HOW, _NO_HOW),
    **dict.fromkeys(("r", "reduce"), _NO_REDUCE),
    "product": _NO_PRODUCT,
}


def get_policy(policy: PolicyLike) -> Policy:
    """Parses a policy string, or reads a policy from a mapping.

    A policy string is a list of `key=value` parts with commas between them, or one dtype for
    parameters, computation and results. The keys are `p`, `param` or `params`; `c` or `compute`;
    `o` or `output`; `m` or `matmul`; `r` or `reduce`. Without its key, params is float32, compute
    is the dtype of params, and output is the dtype of compute; matmul and reduce are not set.
    `Policy` explains the fields. Spaces and case don't matter. Lightning's precision strings, such
    as `bf16-mixed`, and Keras's, such as `mixed_float16`, work too. A mapping, such as a dict or an
    `ml_collections.ConfigDict`, has the same keys.

    The dtype `half` is bfloat16 on TPU and float16 elsewhere. Parsing it starts JAX's backend, so
    a multi-host program must call `jax.distributed.initialize` first.

    Args:
        policy: a policy string; or a mapping; or a dtype such as `jnp.bfloat16`, which means the
            same as its name; or a policy, which is returned as it is; or a `jmp.Policy`, whose
            three dtypes are taken.

    Raises:
        TypeError: if `policy` is of another type, or a value of the mapping is. A policy map is not
            a policy.
        ValueError: if the string or the mapping does not follow the grammar, or has rules or a loss
            scale. The message gives the position in the string, or the path in the mapping.

    Example:
        >>> import jax.numpy as jnp, jmpx
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
    policy = of_jmp(policy)
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, PolicyMap):
        raise TypeError(
            f"Expected a policy, got the policy map {str(policy)!r}: {_NO_RULES}; its .default is "
            "a policy."
        )
    return complete(read_fields(Located(policy), BARE, KEYS))


def read_fields(found: Found, bare: tuple[str, ...], keys: dict[str, str]) -> dict[str, Field]:
    """Reads the fields of a policy from any value that `get_policy` takes.

    A dtype without a key sets the fields in `bare`; `keys` maps accepted keys to their fields.
    """
    value = of_jmp(found.value)
    if isinstance(value, str):
        text = whole_text(value, "policy", found.at)
        text.refuse("|", NO_LOSS_SCALE)
        _refuse_rules(text)
        return parse_fields(text, bare, keys)
    if isinstance(value, Policy):
        value = given_fields(value)
    if is_mapping(value):
        given = by_name(read_entries(value, found.path), keys, ELSEWHERE)
        if not given:
            raise missing_policy(found)
        return {name: read_field(name, each, "product" in keys) for name, each in given.items()}
    if is_dtype(value):
        return dict.fromkeys(bare, as_dtype(value, found.at))
    what = "a policy string, a mapping, a dtype or a jmpx.Policy"
    remedy = "write for example 'params=float32,compute=bfloat16,output=float32'"
    if isinstance(value, type):
        remedy = "jmpx.policy_of returns the policy of a class"
    raise refuse_value(what, found, remedy)


def parse_fields(part: Text, bare: tuple[str, ...], keys: dict[str, str]) -> dict[str, Field]:
    """Parses the fields of a policy string; see `read_fields`."""
    if not part.value:
        raise ValueError(f"Empty policy{part.at}: write for example 'c=bf16'.")
    pieces = list(part.split(","))
    for piece in pieces:
        name, value = piece.cut("=")
        value.refuse("=", "write one equals sign in each part, and commas between the parts")
        if re.match(r"[A-Z]|.*[*/]", name.value) and name.value.lower() not in (*keys, *ELSEWHERE):
            rule = f"{name.value}: {value.value or 'full'}"
            piece.refuse("=", f"a rule has a colon, as {rule!r}, and follows a semicolon")
    without_key = [piece for piece in pieces if "=" not in piece.text]
    given = by_name((piece.cut("=") for piece in pieces if "=" in piece.text), keys, ELSEWHERE)
    in_rule = "product" in keys
    fields = {name: read_field(name, value, in_rule) for name, value in given.items()}
    if not without_key:
        return fields
    first = without_key[0]
    refuse_colon(first)
    if len(pieces) > 1 and not first.value:
        raise ValueError(f"Empty part{first.at}: write 'key=value' on both sides of each comma.")
    if len(without_key) > 1 or not fields.keys().isdisjoint(DTYPES):
        names = ", ".join(f"'{name}='" for name in dict.fromkeys(keys.values()))
        remedy = f"write one of {names} before it"
        if first.value in ("dynamic", "static", "none"):
            remedy = f"a loss scale follows a bar, as 'c=f16 | {first.value}'"
        raise ValueError(f"Missing key for {first.value!r}{first.at}: {remedy}.")
    preset = _PRESETS.get(first.value.lower())
    if preset is not None:
        return dict(zip(DTYPES, map(parse_dtype, preset), strict=False)) | fields
    return dict.fromkeys(bare, _read_dtype(first, _PRESETS)) | fields


def _refuse_rules(text: Text) -> None:
    """Refuses rules, which only a policy map may have."""
    for part in text.split(";"):
        refuse_colon(part)
        if ":" in part.text:
            raise ValueError(f"Unexpected rule {part.value!r}{part.at}: {_NO_RULES}.")
    text.refuse(";", "write commas between the parts of a policy")


def refuse_colon(part: Text) -> None:
    """Refuses `compute: bf16`, which would be a rule for a class named `compute`."""
    before, value = part.cut(":")
    word = before.text.rpartition(",")[2].strip()
    if ":" in part.text and word in MAP_KEYS:
        meant = f"{word}={value.value.partition(',')[0].lstrip('= ')}"
        part.refuse(":", f"write {meant!r}, with an equals sign, or '*/{word}' for a path")


def complete(fields: dict[str, Field]) -> Policy:
    """Returns the policy with these fields, and defaults for the others."""
    params = fields.get("params", parse_dtype("float32"))
    compute = fields.get("compute", params)
    fields = {"params": params, "compute": compute, "output": compute, **fields}
    return Policy(**{ATTRIBUTES[key]: value for key, value in fields.items()})


def missing_policy(found: Found) -> ValueError:
    return ValueError(f"Missing policy{found.at}: write for example {{'compute': 'bfloat16'}}.")


def read_field(name: str, found: Found, in_rule: bool = False) -> Field:
    """Reads the value of one key of a policy, of a rule, or of the default part of a policy map.

    Raises:
        TypeError: if the value is of a type that the key does not take.
        ValueError: if the value is unknown.
    """
    if name in HOW:
        return read_how(name, found)
    if name == "matmul":
        return _read_matmul(found, in_rule)
    dtype = _read_dtype(found)
    if name == "reduce":
        check_reduces(dtype, found.at)
    if name == "product":
        check_product(dtype, found.at)
    return dtype


def _read_matmul(found: Found, in_rule: bool) -> str:
    if not isinstance(found.value, str):
        remedy = f"write one of {describe_matmuls()}"
        raise refuse_value("the name of an algorithm of matrix products", found, remedy)
    with contextlib.suppress(KeyError):
        return parse_matmul(found.value, found.at, in_rule)
    near = {name: name for name in matmul_names()} | {"tf32": "tensorfloat32"}
    accepted = describe_matmuls()
    if in_rule:
        near |= dict.fromkeys(("fp8", "float8", "e4m3"), "fp8") | {"mx8": "mxfp8"}
        accepted += ", or fp8 or mxfp8, with +attention or +emulate behind it"
    raise unknown("algorithm", found, accepted, near)


def _read_dtype(found: Found, presets: Iterable[str] = ()) -> ScalarType:
    value = found.value
    if is_dtype(value):
        return as_dtype(value, found.at)
    if not isinstance(value, str):
        raise refuse_value("a dtype", found, "write its name, such as 'bfloat16'")
    with contextlib.suppress(KeyError):
        return parse_dtype(value)
    reason = no_dtype(value)
    if reason is not None:
        raise ValueError(f"Unknown dtype {value.strip()!r}{found.at}: {reason}.")
    if presets and re.match(r"[A-Z].*[a-z]|.*[*/]", value.strip()):
        rule = f"{value.strip()}: full"
        raise ValueError(f"Missing policy for {value.strip()!r}{found.at}: write {rule!r}.")
    accepted = ", ".join([describe_dtypes(), *presets])
    raise unknown("dtype", found, accepted, [*dtype_names(), *presets])
