"""Policy maps: a default policy, rules for parts that differ from it, and how it is applied."""

import dataclasses
import warnings
from collections.abc import Collection, Iterable
from typing import Any, TypeAlias, cast

from jmpx._base.dtypes import is_dtype
from jmpx._base.mappings import (
    Located,
    MappingLike,
    is_list,
    is_mapping,
    quote,
    read_keys,
    read_list,
    refuse_value,
    unknown_key,
)
from jmpx._base.messages import describe, did_you_mean, position
from jmpx._policies.policy import ATTRIBUTES, Policy
from jmpx._policies.rules import Rule, parse_rule, read_rule
from jmpx._policies.strings import (
    DESCRIBED_KEYS,
    DTYPES,
    HOW,
    KEYS,
    NO_LOSS_SCALE,
    PolicyLike,
    complete,
    get_policy,
    parse_fields,
    parse_how,
    read_fields,
    refuse_bar,
    without_last_semicolon,
)

# The keys of a mapping that holds more than one policy.
_SECTIONS = {name: name for name in ("policy", "rules", "loss_scale")}
_DESCRIBED_KEYS = (
    f"'policy', 'rules', 'loss_scale', 'by' and 'save', or of a policy's {DESCRIBED_KEYS}"
)


@dataclasses.dataclass(frozen=True)
class PolicyMap:
    """A default policy, rules for the parts of a model that differ from it, and a way to apply it.

    A frozen, hashable, picklable value. `str()` gives a string that parses back to an equal map.
    Make one with `get_policy_map`, which explains the grammar.

    Args:
        default: the policy of the outermost call as a whole.
        rules: the rules. If several match a call, the last one of them applies.
        by: how `jmpx.apply_policy` and the gradient functions apply the map: "arguments",
            "modules" or "operations"; None leaves it to the rules, see `way`.
        save: "products" saves memory where the map is applied by operations, see `jmpx.autocast`.

    Raises:
        ValueError: if `by` or `save` is unknown, or `save` stands beside another way than
            operations.

    Example:
        >>> import jmpx
        >>> policy_map = jmpx.get_policy_map("c=bf16,o=f32; BatchNorm: full")
        >>> str(policy_map)
        'params=float32,compute=bfloat16,output=float32; BatchNorm: compute=float32'
        >>> policy_map.way
        'modules'
    """

    __module__ = "jmpx"

    default: Policy
    rules: tuple[Rule, ...] = ()
    by: str | None = None
    save: str | None = None

    def __post_init__(self) -> None:
        for name in HOW:
            word = getattr(self, name)
            if word is not None and word not in HOW[name]:
                parse_how(name, str(word), "of a policy map")
        if self.save is not None and self.way != "operations":
            raise ValueError(
                f"Cannot apply save={self.save} of policy map {str(self)!r} by {self.way}: it says "
                "what operations keep for the backward pass, so write by=operations beside it, or "
                "leave it out."
            )

    @property
    def way(self) -> str:
        """How the map is applied: "arguments", "modules" or "operations".

        That is `by`. Without it, rules for classes or paths mean modules, rules for operations
        alone mean operations, and no rules mean arguments.
        """
        if self.by is not None:
            return self.by
        if not self.rules:
            return "arguments"
        return "operations" if all(rule.is_operation for rule in self.rules) else "modules"

    def applied_by(self, way: str, name: str) -> "PolicyMap":
        """Returns the map without `by` and `save`, for a function that applies maps in one way.

        Args:
            way: the way of the function.
            name: the function, as the user calls it.

        Raises:
            ValueError: if the map is written for another way.
        """
        if self.by not in (None, way) or (self.save is not None and way != "operations"):
            raise ValueError(
                f"Cannot apply policy map {str(self)!r} by {name}, which is for by={way}: give the "
                "map to jmpx.apply_policy, or as policy= to the gradient function, which do what "
                "it says, or leave by out."
            )
        return dataclasses.replace(self, by=None, save=None)

    def rule_for(self, cls: type, path: str) -> Rule | None:
        """Returns the last rule that matches a module, or None.

        Args:
            cls: the class of the module.
            path: the path of the module: names joined by slashes, empty for the root.
        """
        return next((rule for rule in reversed(self.rules) if rule.matches(cls, path)), None)

    def to_dict(self) -> dict[str, Any]:
        """Returns dicts and lists of strings, which `get_policy_map` reads back to an equal map.

        Example:
            >>> import jmpx
            >>> jmpx.get_policy_map("f32; op.exp: bf16").to_dict() == {
            ...     "policy": {"params": "float32", "compute": "float32", "output": "float32"},
            ...     "rules": [{"select": "op.exp", "compute": "bfloat16"}],
            ... }
            True
        """
        rules = [rule.to_dict() for rule in self.rules]
        return {"policy": self.default.to_dict(), "rules": rules, **self._how()}

    def __str__(self) -> str:
        """Returns the policy map string."""
        how = [f"{name}={word}" for name, word in self._how().items()]
        return "; ".join([",".join([*how[:1], str(self.default), *how[1:]]), *map(str, self.rules)])

    def _how(self) -> dict[str, str]:
        words = {name: getattr(self, name) for name in HOW}
        return {name: word for name, word in words.items() if word is not None}


# What `get_policy_map` takes.
PolicyMapLike: TypeAlias = PolicyLike | PolicyMap


def get_policy_map(policy_map: PolicyMapLike) -> PolicyMap:
    """Parses a policy map string, such as `"c=bf16,o=f32; BatchNorm: full; */head/*: c=f32"`.

    The parts are separated by semicolons; one at the end of the string is ignored. The part
    without a selector is the default, the policy of the outermost call as a whole: inputs and
    parameters are cast to its compute dtype, and the result, once, to its output dtype. Without
    such a part, the default is float32.

    Every other part is a rule, `selector: policy`. A selector is

    - a class name, such as `BatchNorm` or, more precisely, `haiku.BatchNorm`; it also matches
      subclasses,
    - a glob of paths, which contains `/` or `*`,
    - or an operation, such as `op.exp`, which only autocast follows.

    If several rules match, the last one applies. A question mark at the end of a selector
    (`BatchNorm?: full`) makes the rule optional: no warning is given if it matches nothing.

    How `jmpx.apply_policy` and the gradient functions apply the map stands in the default part:

    - `by=arguments` casts the floating arguments of the function, and nothing inside of it,
    - `by=modules` casts at the calls of modules, as rules for classes and paths need it,
    - `by=operations` casts each operation, as `jmpx.autocast` does; `save=products` may stand
      beside it, which saves memory.

    Without `by`, rules for classes or paths mean modules, rules for operations alone mean
    operations, and no rules mean arguments.

    A rule sets only the fields that it names, and a dtype without a key sets compute. The other
    fields are inherited: params from the default, compute and output from the compute dtype of the
    surrounding call, matmul from that call. Only the default may set reduce.

    A mapping, of any kind that `get_policy` takes, has the default under `policy` and the list of
    rules under `rules`; `by` and `save` stand beside these. The keys of a rule are `select`, those
    of a policy, and `optional: true`, which says the same as a question mark. Each of these values
    may also be its string, and `policy` the string of a whole map. A mapping that has the keys of a
    policy is the default.

    Args:
        policy_map: a policy map string; or a mapping; or a policy or a dtype, which gives a map
            without rules; or a policy map, which is returned as it is.

    Returns:
        The policy map.

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
    if isinstance(policy_map, PolicyMap):
        return policy_map
    if is_mapping(policy_map):
        sections = read_sections(policy_map)
        if "loss_scale" in sections:
            path = sections["loss_scale"].path
            raise ValueError(f"Unexpected key at {path}: {NO_LOSS_SCALE}.")
        return read_policy_map(sections)
    return _read_whole(Located(policy_map, ""))


def parse_policy_map(text: str, quoted: str) -> PolicyMap:
    """Parses the string of a policy map.

    Args:
        text: the string, with which the user's whole string begins.
        quoted: the whole string as error messages quote it.

    Raises:
        ValueError: if the string does not follow the grammar.
    """
    fields, rules = _parse_parts(text, quoted)
    return _with_fields(fields or {}, rules)


def _with_fields(fields: dict[str, Any], rules: Iterable[Rule]) -> PolicyMap:
    """Returns the policy map of what its default part sets, and of rules."""
    how = {name: fields.get(name) for name in HOW}
    own = {name: value for name, value in fields.items() if name not in HOW}
    return PolicyMap(complete(own), tuple(rules), **how)


def _parse_parts(text: str, quoted: str) -> tuple[dict[str, Any] | None, list[Rule]]:
    """Parses the default part, None if there is none, and the rules of a policy map string."""
    refuse_bar(text, f"policy map {quoted}")
    default: dict[str, Any] | None = None
    rules: list[Rule] = []
    start = 0
    for part in without_last_semicolon(text).split(";"):
        if not part.strip():
            raise ValueError(
                f"Empty rule {position(part, start)} of policy map {quoted}: write a policy "
                "or 'selector: policy' on both sides of each semicolon."
            )
        if ":" in part:
            rules.append(parse_rule(part, quoted, start))
        elif default is None:
            default = parse_fields(part, quoted, start, bare=DTYPES)
        else:
            raise ValueError(
                f"Second default {part.strip()!r} {position(part, start)} of policy map "
                f"{quoted}: write 'selector: policy' for all policies but one."
            )
        start += len(part) + 1
    return default, rules


def read_sections(mapping: MappingLike) -> dict[str, Located]:
    """Returns the policy, the rules and the like of a mapping, by their names in `get_policy_map`.

    A mapping that has no section is a policy, beside which `by` and `save` may stand.

    Raises:
        TypeError: if a key is not a string.
        ValueError: if a key is unknown, or stands beside others that exclude it.
    """
    given, how = _without_how(mapping, "", _SECTIONS | KEYS)
    sections = {name: found for name, found in given.items() if name in _SECTIONS}
    for name, found in given.items():
        if name not in _SECTIONS and name not in ATTRIBUTES:
            raise unknown_key(name, "", _DESCRIBED_KEYS, [*_SECTIONS, *KEYS, *HOW])
        if name in ATTRIBUTES and sections:
            raise ValueError(
                f"Unexpected key at {found.path} beside {list(sections)[0]!r}: a policy's keys "
                "stand under 'policy' there, as {'policy': {'compute': 'bfloat16'}}."
            )
    if not sections and (given or not how):
        sections = {"policy": Located({name: found.value for name, found in given.items()}, "")}
    return sections | how


def _without_how(
    mapping: MappingLike, path: str, keys: dict[str, str]
) -> tuple[dict[str, Located], dict[str, Located]]:
    """Returns what a mapping has under keys, and what it has under `by` and `save`."""
    given = read_keys(mapping, path, {**keys, **{name: name for name in HOW}})
    how = {name: given.pop(name) for name in HOW if name in given}
    return given, how


def _read_how(given: dict[str, Located]) -> dict[str, str]:
    """Reads what a mapping has under `by` and `save`.

    Raises:
        TypeError: if a value is no string.
        ValueError: if it is no known word.
    """
    for name, (value, path) in given.items():
        if not isinstance(value, str):
            raise refuse_value("a word", value, path, f"write one of {', '.join(HOW[name])}")
    return {name: parse_how(name, found.value, f"at {found.path}") for name, found in given.items()}


def read_policy_map(sections: dict[str, Located]) -> PolicyMap:
    """Reads a policy map from what `read_sections` returns.

    Raises:
        TypeError: if a value is of a wrong type.
        ValueError: if a value does not follow the grammar, or there are none.
    """
    whole = PolicyMap(get_policy("float32"))
    how = _read_how({name: sections[name] for name in HOW if name in sections})
    if "policy" in sections:
        whole = _read_whole(sections["policy"])
    rules = tuple(_read_rules(sections["rules"])) if "rules" in sections else ()
    if not rules and "policy" not in sections:
        raise ValueError(
            "Missing key 'policy': write for example {'policy': {'compute': 'bfloat16'}}."
        )
    if whole.rules and "rules" in sections:
        raise ValueError(
            f"Unexpected rule {str(whole.rules[0])!r} at policy: write all rules under 'rules', "
            "which is given, too."
        )
    for name in how:
        if getattr(whole, name) is not None:
            raise ValueError(
                f"Unexpected key at {sections[name].path}: {name}={getattr(whole, name)} stands in "
                "'policy', too; write one of them."
            )
    return PolicyMap(
        whole.default, whole.rules or rules, how.get("by", whole.by), how.get("save", whole.save)
    )


def _read_whole(found: Located) -> PolicyMap:
    """Reads a policy map from a value without keys for its parts."""
    value, path = found
    if isinstance(value, PolicyMap):
        return value
    if isinstance(value, str):
        return parse_policy_map(value, quote(value, path))
    if isinstance(value, Policy):
        return PolicyMap(value)
    if is_mapping(value):
        given, how = _without_how(value, path, KEYS)
        plain = {name: each.value for name, each in given.items()}
        return _with_fields(read_fields(Located(plain, path), bare=DTYPES) | _read_how(how), ())
    if is_dtype(value):
        return PolicyMap(get_policy(cast(Any, value)))
    if hasattr(value, "policy_map"):  # a MixedPrecision, which no import here can name
        raise TypeError(f"Expected a policy map, got {describe(value)}: its .policy_map is one.")
    what = "a policy map string, a mapping, a dtype, a jmpx.Policy or a jmpx.PolicyMap"
    raise refuse_value(what, value, path, "write for example 'c=bf16,o=f32; BatchNorm: full'")


def _read_rules(found: Located) -> list[Rule]:
    """Reads the rules of a mapping: a list of rules, or the string of one or several."""
    value, path = found
    if isinstance(value, str):
        default, rules = _parse_parts(value, quote(value, path))
        if default is not None:
            raise ValueError(
                f"Unexpected policy without a selector in {quote(value, path)}: write each rule as "
                "'selector: policy', and the default under the key 'policy'."
            )
        return rules
    if is_list(value):
        return [read_rule(item) for item in read_list(value, path)]
    remedy = "write [{'select': 'LayerNorm', 'compute': 'float32'}]"
    if is_mapping(value):
        remedy = f"the last rule that matches applies, so their order counts; {remedy}"
    raise refuse_value("a list of rules", value, path, remedy)


def warn_unused(
    policy_map: PolicyMap,
    seen: Iterable[tuple[type, str]],
    stacklevel: int,
    arrays: Collection[str] = (),
) -> None:
    """Warns of each rule that matched no module of an adapter, unless the rule is optional.

    The warning suggests the nearest class or path that exists. Rules for operations never match a
    module, because only autocast follows them.

    Args:
        policy_map: the policy map.
        seen: the class and path of every module that asked for its policy. If there is none, only
            rules for operations are reported.
        stacklevel: the `stacklevel` that the caller would give to `warnings.warn`.
        arrays: the paths of the arrays that a glob may select, too.
    """
    seen = list(seen)
    for rule in policy_map.rules:
        if rule.is_operation:
            end = (
                ", as rules for operations hold by=operations and in jmpx.autocast alone: write "
                f"by=operations, or '{rule.selector}?' where the map is for modules, too."
            )
            warn_of(rule, policy_map, "module", end, stacklevel + 1)
        elif seen and not (
            any(rule.matches(cls, path) for cls, path in seen)
            or (rule.is_path and any(rule.matches(object, path) for path in arrays))
        ):
            kind = "path" if rule.is_path else "class"
            warn_of(rule, policy_map, kind, _near(rule, seen, arrays), stacklevel + 1)


def warn_of(rule: Rule, policy_map: PolicyMap, kind: str, near: str, stacklevel: int) -> None:
    """Warns that a rule matched nothing, unless the rule is optional.

    Args:
        rule: the rule.
        policy_map: the policy map of the rule.
        kind: what the rule could have matched, such as "class" or "path".
        near: the end of the message, which suggests another selector.
        stacklevel: the `stacklevel` that the caller would give to `warnings.warn`.
    """
    if not rule.optional:
        warnings.warn(
            f"The rule {str(rule)!r} of policy map {str(policy_map)!r} matched no {kind}{near}",
            stacklevel=stacklevel + 1,
        )


def _near(rule: Rule, seen: Iterable[tuple[type, str]], arrays: Iterable[str]) -> str:
    """Returns the end of a warning, which suggests the nearest class or path to a rule."""
    paths = sorted({path for _, path in seen})
    if rule.is_path:
        return did_you_mean(rule.selector.strip("*/"), _by_last_name([*sorted(arrays), *paths]))
    names = {path.rpartition("/")[2] for path in paths} - {""}
    classes = {base.__name__ for cls, _ in seen for base in cls.__mro__[:-1]}
    choices = {name: f"*/{name}" for name in sorted(names)} | {
        name: name for name in sorted(classes)
    }
    return did_you_mean(rule.selector.rpartition(".")[2], choices)


def _by_last_name(paths: Iterable[str]) -> dict[str, str]:
    """Returns a dict to each path from itself and from its last name, which users may write."""
    return {name: path for path in paths for name in (path, path.rpartition("/")[2]) if name}
