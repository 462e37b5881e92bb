"""The grammar of policy maps and of their rules, in strings and in mappings."""

import dataclasses
import re
from collections.abc import Iterable

import numpy as np

from jmpx._base.dtypes import dtype_name, is_dtype
from jmpx._base.messages import (
    Entry,
    Found,
    Located,
    Text,
    by_name,
    child,
    did_you_mean,
    is_list,
    is_mapping,
    read_entries,
    refuse_value,
    unknown,
    whole_text,
)
from jmpx._policies.maps import HOW, PolicyMap, PolicyMapLike, Rule, is_selector, with_text
from jmpx._policies.policy import Policy, of_jmp
from jmpx._policies.strings import (
    BARE,
    ELSEWHERE,
    KEYS,
    MAP_KEYS,
    NO_LOSS_SCALE,
    Field,
    complete,
    get_policy,
    missing_policy,
    parse_fields,
    read_field,
    read_fields,
    refuse_colon,
)

# The keys of the sections of a map's mapping, of a rule, and of a rule's mapping.
_SECTIONS = {name: name for name in ("policy", "rules")}
_RULE_KEYS = {key: name for key, name in KEYS.items() if name != "reduce"} | {"product": "product"}
_RULE_MAPPING_KEYS = {"select": "select", "policy": "policy", **_RULE_KEYS}
_RULE_EXAMPLE = "'LayerNorm: full' or {'select': 'LayerNorm', 'compute': 'float32'}"


def get_policy_map(policy_map: PolicyMapLike) -> PolicyMap:
    """Parses a policy map string, such as `"c=bf16,o=f32; BatchNorm: full; */head/*: c=f32"`.

    Semicolons separate the parts. The part without a selector is the default: the policy of the
    outermost call as a whole, float32 if left out. `jmpx.apply_policy` and the gradient functions
    cast operations by it, unless it says `by=modules` or `by=arguments`. `save=products`,
    `products+mixed` or `products+attention` saves memory in the backward pass, with each `by`; see
    `jmpx.remat`.

    Every other part is a rule, `selector: policy`. A selector is a class name such as `BatchNorm`
    or `haiku.BatchNorm`, which also matches subclasses; a glob of paths, which contains `/` or `*`;
    or an operation such as `op.exp`. If several rules match, the last one applies. A question mark
    after a selector (`BatchNorm?: full`) makes the rule optional: no warning if it matches nothing.
    A rule sets only the fields that it names, and a dtype without a key sets compute;
    `jmpx.types.Rule` says how the others are inherited, and what `product=float32` does.

    In a mapping, the default is under `policy` and the list of rules under `rules`; `by` and `save`
    stand beside these. The keys of a rule are `select` and those of a policy. Each value may also
    be its string, and `policy` the string of a whole map. A mapping with only the keys of a policy
    is the default.

    Args:
        policy_map: a policy map string; or a mapping; or a policy or a dtype, which gives a map
            without rules; or a policy map, which is returned as it is.

    Raises:
        TypeError: if `policy_map` is of another type, or a value of the mapping is.
        ValueError: if the string or the mapping does not follow the grammar, or has a loss scale.
            The message gives the position in the string, or the path in the mapping.

    Example:
        >>> import jmpx
        >>> policy_map = jmpx.get_policy_map("c=bf16; LayerNorm: full; */logits: c=f32,o=f32")
        >>> print(policy_map.default)
        params=float32,compute=bfloat16,output=bfloat16
        >>> print(*policy_map.rules, sep="; ")
        LayerNorm: compute=float32; */logits: compute=float32,output=float32
        >>> rules = [{"select": "LayerNorm", "compute": "f32"}, "*/logits: c=f32,o=f32"]
        >>> policy_map == jmpx.get_policy_map({"policy": {"compute": "bf16"}, "rules": rules})
        True
    """
    return _read_map(Located(policy_map))


def output_without_effect(policy_map: PolicyMap, name: str) -> str | None:
    """Returns the sentence that the output dtype changes nothing by operations, if it is so.

    `name` is the function that applies the map, as the user calls it.
    """
    dtype = policy_map.default.output_dtype
    is_narrow = policy_map.writes_output and np.dtype(dtype).itemsize < 4
    if not is_narrow or policy_map.way != "operations":
        return None
    return (
        f"The output dtype {dtype_name(dtype)} of policy map {str(policy_map)!r} has no effect: "
        f"{name} casts operations by it, and returns results in the dtypes that they have without "
        "a policy: leave o= out, or write by=modules or by=arguments."
    )


def parse_rule(text: str) -> Rule:
    """Parses one rule of a policy map, such as `LayerNorm: full`."""
    return _read_rule(Located(text))


def _read_map(found: Found) -> PolicyMap:
    """Reads a policy map from any value that `get_policy_map` takes."""
    value = of_jmp(found.value)
    if isinstance(value, PolicyMap):
        return value
    if isinstance(value, str):
        return parse_policy_map(whole_text(value, "policy map", found.at))
    if isinstance(value, Policy):
        return PolicyMap(value)
    if is_mapping(value):
        return map_of(read_entries(value, found.path), found)
    if is_dtype(value):
        return PolicyMap(get_policy(value))
    what = "a policy map string, a mapping, a dtype, a jmpx.Policy or a jmpx.PolicyMap"
    remedy = (
        "write for example 'c=bf16,o=f32; BatchNorm: full', or give the .policy_map of a "
        "jmpx.MixedPrecision"
    )
    if is_list(value):
        remedy = "write one string, in which semicolons divide rules, as 'c=bf16; LayerNorm: full'"
    elif type(value).__name__.endswith("LossScale"):
        remedy = "write for example 'c=f16', and give the loss scale beside it"
    raise refuse_value(what, found, remedy)


def parse_policy_map(text: Text) -> PolicyMap:
    """Parses the string of a policy map, or the first part of a mixed precision's."""
    default, rules = _parse_parts(text)
    return _make_map(default or {}, rules)


def map_of(entries: list[Entry], found: Found) -> PolicyMap:
    """Returns the policy map of a mapping's entries; a nested mapping has no sections."""
    given = by_name(entries, MAP_KEYS | ({} if found.path else _SECTIONS), ELSEWHERE)
    sections = [name for name in _SECTIONS if name in given]
    fields = {name: read_field(name, given[name]) for name in given if name not in sections}
    how = {name: fields.pop(name) for name in HOW if name in fields}
    if fields and sections:
        name = next(iter(fields))
        raise ValueError(
            f"Unexpected key {name!r}{given[name].at} beside {sections[0]!r}: the keys of the "
            "default policy stand under 'policy' there, as {'policy': {'compute': 'bfloat16'}}."
        )
    rules = _read_rules(given["rules"]) if "rules" in given else []
    if "policy" not in given and not fields and not rules:
        raise missing_policy(found)
    whole = _read_map(given["policy"]) if "policy" in given else _make_map(fields, ())
    more = how | ({"rules": tuple(rules)} if "rules" in given else {})
    for name in more:
        if getattr(whole, name):
            raise ValueError(
                f"Duplicate key {name!r}{given[name].at}: the value of 'policy' has {name}, too, "
                "so write one of them."
            )
    return dataclasses.replace(whole, **more)


def _make_map(fields: dict[str, Field], rules: Iterable[Rule]) -> PolicyMap:
    """Returns the policy map of the fields in its default part, and of rules."""
    how = {name: fields.pop(name) for name in HOW if name in fields}
    return PolicyMap(complete(fields), tuple(rules), **how, writes_output="output" in fields)


def _parse_parts(text: Text) -> tuple[dict[str, Field] | None, list[Rule]]:
    """Parses the default part of a policy map string, None without one, and its rules."""
    text.refuse("|", NO_LOSS_SCALE)
    default: dict[str, Field] | None = None
    rules: list[Rule] = []
    for part in text.split(";"):
        if not part.value and text.value:
            raise ValueError(
                f"Empty rule{part.at}: write a policy or 'selector: policy' there, or leave the "
                "semicolon out."
            )
        if ":" in part.text:
            rules.append(_parse_rule(part))
        elif default is None:
            default = parse_fields(part, BARE, MAP_KEYS)
        else:
            parse_fields(part, BARE, MAP_KEYS)  # which refuses a rule without a colon
            raise ValueError(
                f"Second default {part.value!r}{part.at}: write 'selector: policy' for all "
                "policies but one, and commas between the parts of a policy."
            )
    return default, rules


def _read_rules(found: Found) -> list[Rule]:
    """Reads the rules of a mapping: a list of rules, or the string of one or several."""
    value = found.value
    if isinstance(value, str):
        default, rules = _parse_parts(whole_text(value, "rules", found.at))
        if default is not None:
            raise ValueError(
                f"Unexpected policy without a selector in {value!r}{found.at}: write each rule as "
                "'selector: policy', and the default under the key 'policy'."
            )
        return rules
    if is_list(value):
        return [_read_rule(Located(each, child(found.path, i))) for i, each in enumerate(value)]
    remedy = "write [{'select': 'LayerNorm', 'compute': 'float32'}]"
    if is_mapping(value):
        remedy = f"the last rule that matches applies, so their order counts; {remedy}"
    raise refuse_value("a list of rules", found, remedy)


def _read_rule(found: Found) -> Rule:
    """Reads a rule: a string, a mapping or a `Rule`."""
    value = found.value
    if isinstance(value, Rule):
        return value
    if is_mapping(value):
        return _rule_of(read_entries(value, found.path), found)
    if not isinstance(value, str):
        raise refuse_value("a rule", found, f"write {_RULE_EXAMPLE}")
    text = whole_text(value, "rule", found.at)
    text.refuse("|", NO_LOSS_SCALE)
    if ":" not in text.text or ";" in text.text:
        raise ValueError(f"Expected one rule, got {value!r}{found.at}: write {_RULE_EXAMPLE}.")
    return _parse_rule(text)


def _parse_rule(part: Text) -> Rule:
    """Parses a rule, `selector: policy`, which may be a part of a longer string."""
    selector, policy = part.cut(":")
    refuse_colon(part)
    before, _, name = selector.value.rpartition(",")
    if before:
        rule = f"{before}; {name.strip()}:{policy.text}"
        selector.refuse(",", f"rules follow a semicolon, as {rule!r}")
    if not policy.value:
        example = f"{selector.value}: full"
        raise ValueError(
            f"Missing policy for {selector.value!r}{selector.at}: write for example {example!r}."
        )
    name, optional = _read_selector(selector)
    fields = parse_fields(policy, ("compute",), _RULE_KEYS)
    return with_text(Rule(name, **fields, optional=optional), part.value)


def _rule_of(entries: list[Entry], found: Found) -> Rule:
    """Returns the rule of a mapping's entries; `{"LayerNorm": "full"}` is one, too."""
    key, value = entries[0] if len(entries) == 1 else (Located("select"), found)
    if did_you_mean(key.value, [*_RULE_MAPPING_KEYS]) == ".":
        given: dict[str, Found] = {"select": key, "policy": value}
    else:
        given = by_name(entries, _RULE_MAPPING_KEYS, ELSEWHERE)
    if "select" not in given:
        raise ValueError(f"Missing key 'select'{found.at}: write {_RULE_EXAMPLE}.")
    name, optional = _read_selector(given["select"])
    own = {key: each for key, each in given.items() if key not in ("select", "policy")}
    fields = {key: read_field(key, each, in_rule=True) for key, each in own.items()}
    if "policy" in given and own:
        raise ValueError(
            f"Unexpected key{next(iter(own.values())).at} beside 'policy': write all fields of the "
            "rule under 'policy', or none."
        )
    if "policy" in given:
        fields = read_fields(given["policy"], ("compute",), _RULE_KEYS)
    if not fields:
        raise missing_policy(found)
    return Rule(name, **fields, optional=optional)


def _read_selector(found: Found) -> tuple[str, bool]:
    """Reads the selector of a rule, and whether a question mark makes the rule optional."""
    if not isinstance(found.value, str):
        raise refuse_value("a selector", found, "write for example 'LayerNorm'")
    text = found.value.strip()
    name = text.removesuffix("?").rstrip()
    if not is_selector(name):
        expected = (
            "a class name such as 'BatchNorm' or 'haiku.BatchNorm', a glob of paths such as "
            "'*/head/*', an operation such as 'op.exp'"
        )
        near = re.sub(r"[\[\].]+", "/", name).strip("/'\"").replace(" ", "")
        raise unknown("selector", found, expected, [near] if is_selector(near) else ())
    return name, text.endswith("?")
