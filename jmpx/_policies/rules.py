"""Rules of policy maps: the modules that they match, and the fields of a policy that they set."""

import dataclasses
import re
from collections.abc import Mapping

from jmpx._base.dtypes import DTypeLike, as_dtype, dtype_name
from jmpx._base.mappings import (
    Located,
    MappingLike,
    is_mapping,
    quote,
    read_keys,
    refuse_value,
    unknown_key,
)
from jmpx._base.matmul import as_matmul, matmul_of
from jmpx._base.messages import describe, did_you_mean, position
from jmpx._policies.policy import ATTRIBUTES, Policy
from jmpx._policies.strings import (
    DESCRIBED_KEYS,
    HOW,
    KEYS,
    NO_HOW,
    parse_fields,
    read_field,
    read_fields,
    refuse_bar,
    refuse_colons,
    refuse_how,
    without_last_semicolon,
)

# The fields that a rule may set.
_FIELDS = ("params", "compute", "output", "matmul")

# The keys of a rule's mapping.
_KEYS = KEYS | {name: name for name in ("select", "optional", "policy")} | {"selector": "select"}

_NO_REDUCE = (
    "gradients are summed over devices in one dtype, so give it in the default policy, the one "
    "without a selector"
)
_DESCRIBED_KEYS = f"'select', 'optional', 'policy', {DESCRIBED_KEYS}"
_EXAMPLE = "'LayerNorm: full' or {'select': 'LayerNorm', 'compute': 'float32'}"
_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclasses.dataclass(frozen=True)
class Rule:
    """One rule of a policy map: a selector, and the dtypes for what it matches.

    Args:
        selector: a class name (`BatchNorm`, `haiku.BatchNorm`), a glob of paths (`*/head/*`) or an
            operation (`op.exp`).
        params: the dtype in which parameters are stored; None inherits it from the default.
        compute: the dtype in which computation runs; None inherits the compute dtype of the
            surrounding call.
        output: the dtype in which results are returned; None means the compute dtype of the
            surrounding call.
        optional: whether the rule may match nothing without a warning. In a string, a question
            mark at the end of the selector makes a rule optional: `BatchNorm?: full`.
        matmul: the algorithm of float32 matrix products; None inherits that of the surrounding
            call. See `Policy`.

    Raises:
        TypeError: if a field is neither None nor a dtype, or `matmul` is no name.
        ValueError: if a dtype is unknown or not floating, or the algorithm is unknown.
    """

    __module__ = "jmpx.types"

    selector: str
    params: DTypeLike | None = None
    compute: DTypeLike | None = None
    output: DTypeLike | None = None
    optional: bool = False
    _: dataclasses.KW_ONLY
    matmul: str | None = None

    def __post_init__(self) -> None:
        for key in ("params", "compute", "output"):
            dtype = getattr(self, key)
            object.__setattr__(self, key, None if dtype is None else as_dtype(dtype))
        object.__setattr__(self, "matmul", as_matmul(self.matmul))

    @property
    def label(self) -> str:
        """The selector as it is written in a string, with the question mark if it is optional."""
        return f"{self.selector}?" if self.optional else self.selector

    @property
    def is_operation(self) -> bool:
        """Whether the selector is an operation. Only autocast follows such rules."""
        return self.selector.startswith("op.")

    @property
    def is_path(self) -> bool:
        """Whether the selector is a glob of paths."""
        return "/" in self.selector or "*" in self.selector

    def matches(self, cls: type, path: str) -> bool:
        """Tells whether the rule matches a module of class `cls` at `path`.

        A class name matches the class and its subclasses. A glob must match the whole path, and
        its `*` matches any text, including slashes. A slash may be added to either end of the
        path, so that `*/head/*` also matches the path `head`.
        """
        if self.is_operation:
            return False
        if self.is_path:
            return _matches_path(self.selector, path)
        return any(_matches_class(self.selector, base) for base in cls.__mro__)

    def matches_scope(self, scope: str) -> bool:
        """Tells whether the rule matches a scope of autocast, such as `lm/eqx.nn.Linear`.

        A glob matches a scope like a path. A class name matches the last name of the scope or,
        because Equinox names scopes after classes, its end after a dot: `Linear` in the example.
        """
        if self.is_operation:
            return False
        if self.is_path:
            return _matches_path(self.selector, scope)
        return f".{scope.rpartition('/')[2]}".endswith(f".{self.selector}")

    def resolve(self, default: Policy, surrounding: Policy | None) -> Policy:
        """Returns the complete policy of a call that the rule matches.

        Args:
            default: the default of the policy map.
            surrounding: the policy of the surrounding call; None for the outermost call, which
                returns the default's output dtype unless the rule sets its own.
        """
        around = default if surrounding is None else surrounding
        compute = around.compute_dtype
        output = default.output_dtype if surrounding is None else compute
        return Policy(
            default.param_dtype if self.params is None else self.params,
            compute if self.compute is None else self.compute,
            output if self.output is None else self.output,
            matmul_precision=matmul_of(around) if self.matmul is None else self.matmul,
        )

    def to_dict(self) -> dict[str, str]:
        """Returns the rule as a dict of strings, which a policy map's mapping may have as a rule.

        Example:
            >>> import jmpx
            >>> jmpx.get_policy_map("BatchNorm?: full").rules[0].to_dict()
            {'select': 'BatchNorm?', 'compute': 'float32'}
        """
        return {"select": self.label, **self._given_fields()}

    def __str__(self) -> str:
        """Returns the rule as it is written in a policy map string."""
        fields = ",".join(f"{key}={value}" for key, value in self._given_fields().items())
        return f"{self.label}: {fields}"

    def _given_fields(self) -> dict[str, str]:
        values = {key: getattr(self, key) for key in _FIELDS}
        return {
            key: value if key == "matmul" else dtype_name(value)
            for key, value in values.items()
            if value is not None
        }


def parse_rule(part: str, quoted: str, start: int) -> Rule:
    """Parses a rule, `selector: policy`, which may be a part of a longer string.

    Args:
        part: the rule's part of the user's string.
        quoted: the whole string as error messages quote it.
        start: the index of `part` in that string.

    Raises:
        ValueError: if the rule does not follow the grammar.
    """
    selector, _, policy = part.partition(":")
    name = selector.strip()
    if name.rpartition(",")[2].strip() in (*KEYS, *HOW):
        refuse_colons(part, quoted, start, f", or '*/{name}' for a path" if name in KEYS else "")
    optional = name.endswith("?")
    name = name.removesuffix("?").rstrip()
    if not _is_selector(name):
        raise _unknown_selector(name, f"{position(selector, start)} of policy map {quoted}")
    if not policy.strip():
        raise ValueError(
            f"Missing policy for {name!r} {position(selector, start)} of policy map {quoted}: "
            f"write for example '{name}: full'."
        )
    fields = parse_fields(policy, quoted, start + len(selector) + 1, bare=("compute",))
    refuse_how(fields, f"the rule {part.strip()!r} {position(part, start)} of policy map {quoted}")
    if "reduce" in fields:
        raise ValueError(
            f"Unexpected 'reduce' in the rule {part.strip()!r} {position(part, start)} of policy "
            f"map {quoted}: {_NO_REDUCE}."
        )
    return Rule(name, **fields, optional=optional)


def _is_selector(name: str) -> bool:
    """Whether a rule may have this selector: in a policy map string, it stands before a colon."""
    if re.search(r"[\s=,:;|]", name):
        return False
    return "/" in name or "*" in name or _CLASS.fullmatch(name) is not None


def _unknown_selector(name: str, place: str) -> ValueError:
    return ValueError(
        f"Unknown selector {name!r} {place}: expected a class name such as 'BatchNorm' or "
        "'haiku.BatchNorm', a glob of paths such as '*/head/*', or an operation such as 'op.exp'."
    )


def read_rule(found: Located) -> Rule:
    """Reads a rule of a mapping: a string, a mapping or a rule, and its path.

    Raises:
        TypeError: if it is of another type, or one of its values is.
        ValueError: if it does not follow the grammar.
    """
    rule, path = found
    if isinstance(rule, Rule):
        return rule
    if isinstance(rule, str):
        part, quoted = without_last_semicolon(rule), quote(rule, path)
        refuse_bar(rule, f"policy map {quoted}")
        if ":" not in part or ";" in part:
            raise ValueError(f"Expected one rule, got {quoted}: write {_EXAMPLE}.")
        return parse_rule(part, quoted, 0)
    if is_mapping(rule):
        return _read_mapping(rule, path)
    raise refuse_value("a rule", rule, path, f"write {_EXAMPLE}")


def _read_mapping(rule: MappingLike, path: str) -> Rule:
    given = read_keys(rule, path, _KEYS)
    if _is_short(given):  # as YAML reads `- LayerNorm: full`
        ((selector, policy),) = given.items()
        given = {"select": Located(selector, policy.path), "policy": policy}
    if "select" not in given:
        raise ValueError(
            f"Missing key 'select' at {path}, got {describe(list(given))}: write {_EXAMPLE}."
        )
    for name, found in given.items():
        if name in HOW:
            raise ValueError(f"Unexpected key at {found.path}: {NO_HOW}.")
        if name not in _KEYS.values():
            raise unknown_key(name, path, _DESCRIBED_KEYS, _KEYS)
    name, optional = _read_selector(given["select"], given.get("optional"))
    own = {key: found for key, found in given.items() if key in ATTRIBUTES}
    if "policy" not in given:
        fields = {key: read_field(key, found) for key, found in own.items()}
    elif not own:
        fields = read_fields(given["policy"], bare=("compute",))
    else:
        raise ValueError(
            f"Unexpected key at {next(iter(own.values())).path} beside 'policy': write all fields "
            "of the rule under 'policy', or none."
        )
    if "reduce" in fields:
        place = given["reduce" if own else "policy"].path
        raise ValueError(f"Unexpected 'reduce' at {place}: {_NO_REDUCE}.")
    if not fields:
        raise ValueError(
            f"Missing policy for {name!r} at {path}: write for example "
            f"{{'select': {name!r}, 'compute': 'float32'}}."
        )
    return Rule(name, **fields, optional=optional)


def _is_short(given: Mapping[str, Located]) -> bool:
    """Whether a mapping is a selector and its policy, and no key of a rule that is misspelt."""
    if len(given) != 1:
        return False
    (word,) = given
    return word not in _KEYS.values() and did_you_mean(word, list(_KEYS)) == "."


def _read_selector(select: Located, optional: Located | None) -> tuple[str, bool]:
    """Reads the selector of a rule, and whether the rule is optional."""
    if not isinstance(select.value, str):
        raise refuse_value("a selector", *select, "write for example 'LayerNorm'")
    name = select.value.strip()
    marked = name.endswith("?")
    name = name.removesuffix("?").rstrip()
    if not _is_selector(name):
        raise _unknown_selector(name, f"at {select.path}")
    if optional is None:
        return name, marked
    if not isinstance(optional.value, bool):
        remedy = "write true for a rule that may match nothing without a warning"
        raise refuse_value("true or false", *optional, remedy)
    if marked and not optional.value:
        raise ValueError(
            f"Expected true at {optional.path}, got False: the question mark at {select.path} "
            "makes the rule optional, so leave one of the two out."
        )
    return name, optional.value


def _matches_path(glob: str, path: str) -> bool:
    pieces = glob.split("*")
    whole = f"/{path}/"
    return any(_matches(pieces, text) for text in (path, whole, whole[1:], whole[:-1]))


def _matches(pieces: list[str], text: str) -> bool:
    """Tells whether `text` consists of the pieces of a glob in order, with any text between them.

    Each inner piece is taken at its first occurrence, which leaves the most text for the pieces
    after it. So there is no backtracking, which makes a regular expression slow.
    """
    first, *rest = pieces
    if not rest:
        return text == first
    *middle, last = rest
    start, end = len(first), len(text) - len(last)
    if start > end or not (text.startswith(first) and text.endswith(last)):
        return False
    for piece in middle:
        found = text.find(piece, start, end)
        if found < 0:
            return False
        start = found + len(piece)
    return True


def _matches_class(selector: str, cls: type) -> bool:
    module, _, name = selector.rpartition(".")
    if selector in (cls.__name__, cls.__qualname__):
        return True
    return name == cls.__name__ and f"{cls.__module__}.".startswith(f"{module}.") and bool(module)
