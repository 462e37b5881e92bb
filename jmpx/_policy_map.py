"""Policy maps: a default policy, and rules for the parts of a model that differ from it."""

import dataclasses
import re
import warnings
from collections.abc import Iterable

from jmpx._dtypes import DTypeLike, dtype_name
from jmpx._matmul import as_matmul, matmul_of
from jmpx._messages import did_you_mean, position
from jmpx._policy import Policy
from jmpx._policy_strings import (
    DTYPES,
    KEYS,
    get_policy,
    parse_fields,
    refuse_colons,
    without_last_semicolon,
)

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
    """

    selector: str
    params: DTypeLike | None = None
    compute: DTypeLike | None = None
    output: DTypeLike | None = None
    optional: bool = False
    _: dataclasses.KW_ONLY
    matmul: str | None = None

    def __post_init__(self) -> None:
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

    def __str__(self) -> str:
        """Returns the rule as it is written in a policy map string."""
        fields = [(key, getattr(self, key)) for key in DTYPES]
        given = [f"{key}={dtype_name(dtype)}" for key, dtype in fields if dtype is not None]
        if self.matmul is not None:
            given.append(f"matmul={self.matmul}")
        return f"{self.label}: {','.join(given)}"


@dataclasses.dataclass(frozen=True)
class PolicyMap:
    """A default policy, and rules for the parts of a model that differ from it.

    A frozen, hashable, picklable value. `str()` gives a string that parses back to an equal map.
    Make one with `get_policy_map`, which explains the grammar.

    Args:
        default: the policy of the outermost call as a whole.
        rules: the rules. If several match a call, the last one of them applies.

    Example:
        >>> import jmpx
        >>> policy_map = jmpx.get_policy_map("c=bf16,o=f32; BatchNorm: full")
        >>> str(policy_map)
        'params=float32,compute=bfloat16,output=float32; BatchNorm: compute=float32'
    """

    default: Policy
    rules: tuple[Rule, ...] = ()

    def rule_for(self, cls: type, path: str) -> Rule | None:
        """Returns the last rule that matches a module, or None.

        Args:
            cls: the class of the module.
            path: the path of the module: names joined by slashes, empty for the root.
        """
        return next((rule for rule in reversed(self.rules) if rule.matches(cls, path)), None)

    def __str__(self) -> str:
        """Returns the policy map string."""
        return "; ".join(map(str, (self.default, *self.rules)))


def get_policy_map(policy_map: str | Policy | PolicyMap) -> PolicyMap:
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

    A rule sets only the fields that it names, and a dtype without a key sets compute. The other
    fields are inherited: params from the default, compute and output from the compute dtype of the
    surrounding call, matmul from that call. Only the default may set reduce.

    Args:
        policy_map: a policy map string; or a policy, which gives a map without rules; or a policy
            map, which is returned as it is.

    Returns:
        The policy map.

    Raises:
        TypeError: if `policy_map` is of another type.
        ValueError: if the string does not follow the grammar. The message gives the position.

    Example:
        >>> import jmpx
        >>> policy_map = jmpx.get_policy_map("c=bf16; LayerNorm: full; */logits: c=f32,o=f32")
        >>> print(policy_map.default)
        params=float32,compute=bfloat16,output=bfloat16
        >>> print(*policy_map.rules, sep="; ")
        LayerNorm: compute=float32; */logits: compute=float32,output=float32
    """
    if isinstance(policy_map, PolicyMap):
        return policy_map
    if isinstance(policy_map, Policy):
        return PolicyMap(policy_map)
    if not isinstance(policy_map, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"Expected a policy map string, a jmpx.Policy or a jmpx.PolicyMap, got {policy_map!r}: "
            "write for example 'c=bf16,o=f32; BatchNorm: full'."
        )
    default: Policy | None = None
    rules: list[Rule] = []
    start = 0
    for part in without_last_semicolon(policy_map).split(";"):
        if not part.strip():
            raise ValueError(
                f"Empty rule {position(part, start)} of policy map {policy_map!r}: write a policy "
                "or 'selector: policy' on both sides of each semicolon."
            )
        if ":" in part:
            rules.append(_parse_rule(part, policy_map, start))
        elif default is None:
            default = _parse_default(part, policy_map, start)
        else:
            raise ValueError(
                f"Second default {part.strip()!r} {position(part, start)} of policy map "
                f"{policy_map!r}: write 'selector: policy' for all policies but one."
            )
        start += len(part) + 1
    return PolicyMap(get_policy("float32") if default is None else default, tuple(rules))


def _parse_default(part: str, text: str, start: int) -> Policy:
    # This gives an error that quotes the whole map; get_policy knows of `part` only.
    parse_fields(part, text, start, bare=DTYPES)
    return get_policy(part)


def _parse_rule(part: str, text: str, start: int) -> Rule:
    selector, _, policy = part.partition(":")
    name = selector.strip()
    if name.rpartition(",")[2].strip() in KEYS:
        refuse_colons(part, text, start, f", or '*/{name}' for a path" if name in KEYS else "")
    optional = name.endswith("?")
    name = name.removesuffix("?").rstrip()
    if not (_CLASS.fullmatch(name) or "/" in name or "*" in name) or re.search(r"[\s=,]", name):
        raise ValueError(
            f"Unknown selector {name!r} {position(selector, start)} of policy map {text!r}: "
            "expected a class name such as 'BatchNorm' or 'haiku.BatchNorm', a glob of paths such "
            "as '*/head/*', or an operation such as 'op.exp'."
        )
    if not policy.strip():
        raise ValueError(
            f"Missing policy for {name!r} {position(selector, start)} of policy map {text!r}: "
            f"write for example '{name}: full'."
        )
    fields = parse_fields(policy, text, start + len(selector) + 1, bare=("compute",))
    if "reduce" in fields:
        raise ValueError(
            f"Unexpected 'reduce' in the rule {part.strip()!r} {position(part, start)} of policy "
            f"map {text!r}: gradients are summed over devices in one dtype, so give it in the "
            "default policy, the part without a selector."
        )
    return Rule(name, **fields, optional=optional)


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


def warn_unused(policy_map: PolicyMap, seen: Iterable[tuple[type, str]], stacklevel: int) -> None:
    """Warns of each rule that matched no module of an adapter, unless the rule is optional.

    The warning suggests the nearest class or path that exists. Rules for operations never match a
    module, because only autocast follows them.

    Args:
        policy_map: the policy map.
        seen: the class and path of every module that asked for its policy. If there is none, only
            rules for operations are reported.
        stacklevel: the `stacklevel` that the caller would give to `warnings.warn`.
    """
    seen = list(seen)
    for rule in policy_map.rules:
        if rule.is_operation:
            end = (
                ", as rules for operations are those of jmpx.autocast: give it the string, and "
                f"write '{rule.selector}?' where one string serves both."
            )
            warn_of(rule, policy_map, "module", end, stacklevel + 1)
        elif seen and not any(rule.matches(cls, path) for cls, path in seen):
            kind = "path" if rule.is_path else "class"
            warn_of(rule, policy_map, kind, _near(rule, seen), stacklevel + 1)


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


def _near(rule: Rule, seen: Iterable[tuple[type, str]]) -> str:
    """Returns the end of a warning, which suggests the nearest class or path to a rule."""
    paths = sorted({path for _, path in seen})
    if rule.is_path:
        return did_you_mean(rule.selector.strip("*/"), _by_last_name(paths))
    names = {path.rpartition("/")[2] for path in paths} - {""}
    classes = {base.__name__ for cls, _ in seen for base in cls.__mro__[:-1]}
    choices = {name: f"*/{name}" for name in sorted(names)} | {
        name: name for name in sorted(classes)
    }
    return did_you_mean(rule.selector.rpartition(".")[2], choices)


def _by_last_name(paths: Iterable[str]) -> dict[str, str]:
    """Returns a dict to each path from itself and from its last name, which users may write."""
    return {name: path for path in paths for name in (path, path.rpartition("/")[2]) if name}
