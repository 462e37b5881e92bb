"""Rules of policy maps: the modules that they match, and the fields of a policy that they set."""

import dataclasses
import functools
import re

import jax.numpy as jnp

from jmpx._base.dtypes import DTypeLike, as_dtype, check_product, dtype_name
from jmpx._base.matmul import SUMMED_IN_FLOAT32, as_matmul, matmul_of
from jmpx._policies.policy import Policy, written

# The fields that a rule may set.
_FIELDS = ("params", "compute", "output", "matmul", "product")
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
        product: float32 for matrix products that multiply in the 16-bit dtype of what is around, or
            in `compute` where it is given, and hand out float32, forward and backward; all else in
            the part is float32, as are its inputs and results. None for products as the others say.

    Raises:
        TypeError: if a field is neither None nor a dtype, or `matmul` is not a name.
        ValueError: if a dtype is unknown or not floating, or the algorithm is unknown; or if
            `product` is not float32, is for an operation, or stands beside what contradicts it.
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
        object.__setattr__(self, "matmul", as_matmul(self.matmul))
        if self.product is not None:
            check_product(self.product)
            self._check_beside_product()

    def _check_beside_product(self) -> None:
        """Refuses what cannot hold beside `product`."""
        remedy = ""
        if self.is_operation:
            remedy = "select the module or scope around the operation, at whose edges float32 ends"
        elif self.compute is not None and dtype_name(self.compute) not in SUMMED_IN_FLOAT32:
            remedy = "compute is the dtype of the operands, so write bfloat16, float16 or nothing"
        elif self.output not in (None, jnp.float32):
            remedy = "it returns float32, so leave output out"
        elif self.matmul is not None:
            remedy = "it is an algorithm of products itself, so leave matmul out"
        if remedy:
            raise ValueError(f"Cannot follow product=float32 in rule {str(self)!r}: {remedy}.")

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
        rule = self.spelled_out(compute, default.compute_dtype)
        return Policy(
            default.param_dtype if rule.params is None else rule.params,
            compute if rule.compute is None else rule.compute,
            output if rule.output is None else rule.output,
            matmul_precision=matmul_of(around) if rule.matmul is None else rule.matmul,
        )

    def spelled_out(self, *around: DTypeLike | None) -> "Rule":
        """Returns the rule that says by compute, output and matmul what `product` means.

        Args:
            around: the compute dtypes around what the rule selects, the innermost first.

        Raises:
            ValueError: if none of them, nor that of the rule, has 16 bits.
        """
        if self.product is None:
            return self
        given = [dtype_name(dtype) for dtype in (self.compute, *around) if dtype is not None]
        algorithms = [SUMMED_IN_FLOAT32[name] for name in given if name in SUMMED_IN_FLOAT32]
        if not algorithms:
            raise ValueError(
                f"Cannot follow rule {str(self)!r} where the compute dtype is {given[0]}: its "
                "operands have the 16 bits of what is around, so write compute=bfloat16 in the "
                "policy or beside product, or leave the rule out."
            )
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
        return written({key: getattr(self, key) for key in _FIELDS})


def is_selector(name: str) -> bool:
    """Whether a rule may have this selector: in a policy map string, it stands before a colon."""
    if re.search(r"[\s=,:;|]", name):
        return False
    return "/" in name or "*" in name or _CLASS.fullmatch(name) is not None


def _matches_path(glob: str, path: str) -> bool:
    whole = f"/{path}/"
    return any(map(_pattern(glob).fullmatch, (path, whole, whole[1:], whole[:-1])))


@functools.lru_cache(maxsize=4096)
def _pattern(glob: str) -> re.Pattern[str]:
    """Returns the regular expression of a glob.

    Each inner piece is taken at its first occurrence, which leaves the most text for the pieces
    after it. So its group is atomic: there is no backtracking, which would make it slow.
    """
    first, *rest = map(re.escape, glob.split("*"))
    middle = "".join(f"(?>.*?{piece})" for piece in rest[:-1])
    return re.compile(first + middle + "".join(f".*{piece}" for piece in rest[-1:]), re.DOTALL)


def _matches_class(selector: str, cls: type) -> bool:
    module, _, name = selector.rpartition(".")
    if selector in (cls.__name__, cls.__qualname__):
        return True
    return name == cls.__name__ and f"{cls.__module__}.".startswith(f"{module}.") and bool(module)
