"""Policy maps: a default policy, rules for parts that differ from it, and how it is applied."""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp

from jmpx._base.contexts import Context, entered, opened
from jmpx._base.dtypes import (
    SUMMED_IN_FLOAT32,
    DTypeLike,
    as_dtype,
    as_matmul,
    check_product,
    dtype_name,
    eight_bits,
    matmul_of,
)
from jmpx._base.messages import SAVES, Found, Located, refuse_value, unknown
from jmpx._policies.policy import Policy, PolicyLike, given_fields, overrides_casts, written

# The fields that a rule may set.
_FIELDS = ("params", "compute", "output", "matmul", "product")
_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclasses.dataclass(frozen=True)
class Rule:
    """One rule of a policy map: a selector, and the dtypes of the parts that it matches.

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
            call. See `Policy`. Or "fp8" or "mxfp8", by which products of 16 bits multiply in 8
            bits, by operations alone; see docs/eight_bits.md.
        product: float32 for matrix products that multiply in the 16-bit dtype of the surrounding
            call, or in `compute` if that is given, and return float32, forward and backward; all
            else in the part is float32, as are its inputs and results. None leaves products to the
            other fields.

    Raises:
        TypeError: if a field is neither None nor a dtype, or `matmul` is not a name.
        ValueError: if a dtype is unknown or not floating, or the algorithm is unknown; if `product`
            is not float32; if `product` or products in 8 bits contradict the selector or a field.
    """

    __module__ = "jmpx.types"

    selector: str
    params: DTypeLike | None = None
    compute: DTypeLike | None = None
    output: DTypeLike | None = None
    optional: bool = False
    _: dataclasses.KW_ONLY
    matmul: str | None = None
    product: DTypeLike | None = None

    def __post_init__(self) -> None:
        for key in ("params", "compute", "output", "product"):
            dtype = getattr(self, key)
            object.__setattr__(self, key, None if dtype is None else as_dtype(dtype))
        object.__setattr__(self, "matmul", as_matmul(self.matmul, in_rule=True))
        if self.product is not None:
            check_product(self.product)
            self._check("product=float32", is_product=True)
        if self.is_in_eight_bits:
            self._check(f"matmul={self.matmul}")

    def _check(self, field: str, is_product: bool = False) -> None:
        """Refuses fields and selectors that contradict `product`, or a `matmul` in 8 bits."""
        remedy = ""
        if self.is_operation:
            end = ", at whose edges float32 ends" if is_product else ""
            remedy = f"select the module or scope around the operation{end}"
        elif self.compute is not None and dtype_name(self.compute) not in SUMMED_IN_FLOAT32:
            remedy = "compute is the dtype of the operands, so write bfloat16, float16 or nothing"
        elif is_product and self.output not in (None, jnp.float32):
            remedy = "it returns float32, so leave output out"
        elif is_product and self.matmul is not None:
            remedy = "it is an algorithm of products itself, so leave matmul out"
        if remedy:
            raise ValueError(f"Cannot follow {field} in rule {str(self)!r}: {remedy}.")

    @property
    def is_in_eight_bits(self) -> bool:
        """Whether `matmul` is for products of operands in 8 bits."""
        return eight_bits(self.matmul) is not None

    @property
    def label(self) -> str:
        """The selector as written in a string, with a question mark if the rule is optional."""
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
            return matches_path(self.selector, path)
        return any(_matches_class(self.selector, base) for base in cls.__mro__)

    def matches_scope(self, scope: str) -> bool:
        """Tells whether the rule matches a scope of autocast, such as `lm/eqx.nn.Linear`.

        A glob matches a scope like a path. A class name matches the last name of the scope or,
        because Equinox names scopes after classes, its end after a dot: `Linear` in the example.
        """
        if self.is_operation:
            return False
        if self.is_path:
            return matches_path(self.selector, scope)
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
        rule = self.spelled_out(compute, default.compute_dtype)
        if rule.is_in_eight_bits:  # which no policy says
            rule = dataclasses.replace(rule, matmul=None)
        return Policy(
            default.param_dtype if rule.params is None else rule.params,
            compute if rule.compute is None else rule.compute,
            output if rule.output is None else rule.output,
            matmul_precision=matmul_of(around) if rule.matmul is None else rule.matmul,
        )

    def spelled_out(self, *around: DTypeLike | None) -> "Rule":
        """Returns the rule with compute, output and matmul in place of `product`.

        Args:
            around: the compute dtypes around the selected part, the innermost first.

        Raises:
            ValueError: if the rule needs 16 bits, and neither these nor its compute dtype have any.
        """
        if self.product is None and not self.is_in_eight_bits:
            return self
        given = [dtype_name(dtype) for dtype in (self.compute, *around) if dtype is not None]
        algorithms = [SUMMED_IN_FLOAT32[name] for name in given if name in SUMMED_IN_FLOAT32]
        if not algorithms:
            raise ValueError(
                f"Cannot follow rule {str(self)!r} where the compute dtype is {given[0]}: its "
                "operands have the 16 bits of what is around, so write compute=bfloat16 in the "
                "policy or in the rule, or leave the rule out."
            )
        if self.product is None:
            return self
        wide = {"compute": jnp.float32, "output": jnp.float32}
        return dataclasses.replace(self, **wide, matmul=algorithms[0], product=None)

    def convolution_error(self, name: str) -> ValueError:
        """Returns the error of a rule with `product` that selects a convolution."""
        return ValueError(
            f"Cannot follow rule {str(self)!r} in {name}: it is for matrix products, as GPUs turn "
            "the operands of a convolution that hands out float32 into float32 themselves, so "
            "select the layers after it, or add a rule for it with compute=float32."
        )

    def to_dict(self) -> dict[str, str]:
        """Returns the rule as a dict of strings, as in the mapping of a policy map.

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
        return written({key: getattr(self, key) for key in _FIELDS})


def with_text(rule: Rule, text: str) -> Rule:
    """Notes what the user wrote for a rule: no field, so that a changed copy is without it."""
    object.__setattr__(rule, "_text", " ".join(text.split()))
    return rule


def text_of(rule: Rule) -> str:
    """Returns a rule as the user wrote it in a string; one of a mapping in the long form."""
    return vars(rule).get("_text", str(rule))


def is_selector(name: str) -> bool:
    """Whether a rule may have this selector: in a policy map string, it stands before a colon."""
    if re.search(r"[\s=,:;|]", name):
        return False
    return "/" in name or "*" in name or _CLASS.fullmatch(name) is not None


def matches_path(glob: str, path: str) -> bool:
    """Whether a glob matches the whole path, to either end of which a slash may be added."""
    whole = f"/{path}/"
    return any(map(_pattern(glob).fullmatch, (path, whole, whole[1:], whole[:-1])))


@functools.lru_cache(maxsize=4096)
def _pattern(glob: str) -> re.Pattern[str]:
    """Returns the regular expression of a glob.

    Each inner piece matches at its first occurrence, which leaves the most text for the pieces
    after it. So its group is atomic, which avoids slow backtracking.
    """
    first, *rest = map(re.escape, glob.split("*"))
    middle = "".join(f"(?>.*?{piece})" for piece in rest[:-1])
    return re.compile(first + middle + "".join(f".*{piece}" for piece in rest[-1:]), re.DOTALL)


def _matches_class(selector: str, cls: type) -> bool:
    module, _, name = selector.rpartition(".")
    if selector in (cls.__name__, cls.__qualname__):
        return True
    return name == cls.__name__ and f"{cls.__module__}.".startswith(f"{module}.") and bool(module)


# Policy maps.


# The default part of a policy map may have these keys besides a policy's, with these words.
HOW: dict[str, tuple[str, ...]] = {
    "by": ("arguments", "modules", "operations"),
    "save": SAVES,
}


def read_how(name: str, found: Found) -> str:
    """Returns the word for `by` or `save`, whose case and space do not count.

    Raises:
        TypeError: if it is not a string.
        ValueError: if the word is unknown.
    """
    words = ", ".join(HOW[name])
    if not isinstance(found.value, str):
        raise refuse_value("a word", found, f"write one of {words}")
    word = found.value.strip().lower()
    if word not in HOW[name]:
        raise unknown("word", found, words, HOW[name])
    return word


@dataclasses.dataclass(frozen=True)
class PolicyMap:
    """A default policy, rules for the parts of a model that differ from it, and a way to apply it.

    A frozen, hashable, picklable value. `str()` gives a string that parses back to an equal map.
    Make one with `get_policy_map`, which explains the grammar.

    Args:
        default: the policy of the outermost call as a whole.
        rules: the rules. If several match a call, the last one of them applies.
        by: how `jmpx.apply_policy` and the gradient functions apply the map: "arguments",
            "modules" or "operations"; None means operations, see `way`.
        save: "products", "products+mixed" or "products+attention": what the backward pass keeps,
            see `jmpx.remat`; None leaves that to JAX. It goes with each `by`.
        writes_output: whether the string or the mapping of the default has `o=`, or its output
            dtype is another than its compute dtype. By operations, only then are results widened.

    Raises:
        ValueError: if `by` or `save` is unknown; if a rule has `product` or multiplies in 8 bits,
            and nothing in the map computes in 16 bits; if one multiplies in 8 bits by arguments or
            by modules.

    Example:
        >>> import jmpx
        >>> policy_map = jmpx.get_policy_map("c=bf16,o=f32; BatchNorm: full")
        >>> str(policy_map)
        'params=float32,compute=bfloat16,output=float32; BatchNorm: compute=float32'
        >>> policy_map.way
        'operations'
    """

    __module__ = "jmpx"

    default: Policy
    rules: tuple[Rule, ...] = ()
    by: str | None = None
    save: str | None = None
    writes_output: bool = dataclasses.field(default=False, compare=False)

    def __post_init__(self) -> None:
        if self.default.output_dtype != self.default.compute_dtype:
            object.__setattr__(self, "writes_output", True)
        for name, word in self._how().items():
            object.__setattr__(self, name, read_how(name, Located(word, "jmpx.PolicyMap")))
        others = [rule.compute for rule in self.rules]
        for rule in self.rules:
            rule.spelled_out(self.default.compute_dtype, *others)  # refuses what it cannot follow
        self._refuse_eight_bits(self.way)

    @property
    def way(self) -> str:
        """The way in which the map is applied, `"arguments"`, `"modules"` or `"operations"`.

        That is `by`. Without `by`, it is operations, or arguments for a subclass of `Policy` that
        overrides casts, because no other way calls these.
        """
        if self.by is not None:
            return self.by
        return "arguments" if overrides_casts(self.default) else "operations"

    def applied_by(self, way: str, name: str) -> "PolicyMap":
        """Returns the map without `by` and `save`, for a function that applies maps in one way.

        Args:
            way: the way of the function.
            name: the function, as the user calls it.

        Raises:
            ValueError: if the map is written for another way, or has `save` for a function that
                has no backward pass to change; or if a rule multiplies in 8 bits.
        """
        self._refuse_eight_bits(way)
        if self.by not in (None, way):
            raise ValueError(
                f"Cannot apply policy map {str(self)!r} by {name}, which is for by={way}: give the "
                "map to jmpx.apply_policy, or as policy= to the gradient function, which do what "
                "it says, or leave by out."
            )
        if self.save is not None and way != "operations":
            raise ValueError(
                f"Cannot apply save={self.save} of policy map {str(self)!r} by {name}, which has "
                "no function whose backward pass it could change: leave save out, and wrap what is "
                "differentiated in jmpx.remat, or give the map to jmpx.apply_policy."
            )
        return dataclasses.replace(self, by=None, save=None)

    def _refuse_eight_bits(self, way: str) -> None:
        """Refuses products in 8 bits where no operation is cast."""
        for rule in (rule for rule in self.rules if rule.is_in_eight_bits and way != "operations"):
            raise ValueError(
                f"Cannot follow rule {str(rule)!r} by {way}, where products are not changed: leave "
                "by out, and give the map to jmpx.apply_policy, or as policy= to the gradient "
                "function."
            )

    def alone(self, source: str) -> Policy:
        """Returns the default of a map that has nothing else.

        Args:
            source: where the map is from, for the message.

        Raises:
            ValueError: if the map has rules or `by`, which a policy cannot hold.
        """
        if self.rules or self.by is not None:
            raise ValueError(
                f"Cannot read one policy from {source}'{self}', whose "
                f"{'rules' if self.rules else 'by'} it would drop: read policy_map, whose .default "
                "is the policy alone."
            )
        return self.default

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
            ...     "policy": {"params": "float32", "compute": "float32"},
            ...     "rules": [{"select": "op.exp", "compute": "bfloat16"}],
            ... }
            True
        """
        rules = [rule.to_dict() for rule in self.rules]
        return {"policy": self._fields(), "rules": rules, **self._how()}

    def __str__(self) -> str:
        """Returns the policy map string."""
        fields = {"by": self.by, **self._fields(), "save": self.save}
        default = ",".join(f"{key}={value}" for key, value in fields.items() if value is not None)
        return "; ".join([default, *map(str, self.rules)])

    def _fields(self) -> dict[str, str]:
        """Returns the fields of the default in the string; the output dtype only if written."""
        fields = given_fields(self.default)
        return {k: v for k, v in fields.items() if k != "output" or self.writes_output}

    def _how(self) -> dict[str, str]:
        words = {name: getattr(self, name) for name in HOW}
        return {name: word for name, word in words.items() if word is not None}


# What `get_policy_map` takes.
PolicyMapLike: TypeAlias = PolicyLike | PolicyMap


class _OnTrial(NamedTuple):
    """Rules on trial, and the functions that took a policy map meanwhile."""

    rules: tuple[Rule, ...]
    functions: set[str]


@contextlib.contextmanager
def trial_rules(rules: Sequence[Rule]) -> Generator[set[str], None, None]:
    """Adds rules to the end of each policy map that a function takes while the context lasts.

    The rules are part of the key of JAX's caches, so that jitted functions are traced anew.

    Yields:
        The names of the functions that took a policy map, such as `jmpx.autocast`.
    """
    on_trial = _OnTrial(tuple(rules), set())
    with entered(Context("trial_rules", on_trial, key=on_trial.rules)):
        yield on_trial.functions


def with_trial_rules(policy_map: PolicyMap, by: str) -> PolicyMap:
    """Returns the map, plus the rules on trial; `by` is the function as the user calls it."""
    rules: tuple[Rule, ...] = ()
    for each in opened(_OnTrial):
        each.functions.add(by)
        rules += each.rules
    if not rules or policy_map.rules[-len(rules) :] == rules:
        return policy_map
    return dataclasses.replace(policy_map, rules=(*policy_map.rules, *rules))
