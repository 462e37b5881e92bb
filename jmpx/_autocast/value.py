"""Values of the program under autocast; the regions in which a policy map has it compute."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmpx._base.dtypes import EightBits, check_computes, eight_bits, matmul_of
from jmpx._base.trees import PyTree
from jmpx._jaxprs.core import Equation
from jmpx._jaxprs.marks import (
    FULL_PRECISION,
    class_policy_of,
    is_own_name,
    module_of,
    without_marks,
)
from jmpx._policies.frameworks import adapters_of
from jmpx._policies.maps import PolicyMap, Rule as PolicyRule

Array = jax.Array | np.ndarray  # a tracer, an array, or a constant of a jaxpr
FLOAT32 = np.dtype(np.float32)
BFLOAT16 = np.dtype(jnp.bfloat16)
LOW = (BFLOAT16, np.dtype(np.float16))


class Traits(NamedTuple):
    """The facts about an array that are known before it exists; a part of the keys of caches."""

    dtype: np.dtype
    # Whether it takes the dtype of an array that is not weak, where the two meet: a float32 bias
    # leaves a bfloat16 activation bfloat16. True until a 16-bit operation contributes. Unrelated to
    # JAX's `weak_type`.
    is_weak: bool
    # Whether it is a tangent, or computed from one: its casts are linear, so that JAX can transpose
    # them and an overflow shows.
    tangent: bool = False
    uniform: bool = False  # whether all its elements are the same number
    power: bool = False  # whether it is float32 only because a power in float16 could overflow
    # The 16-bit dtypes in which a constant other than 0, 1 and -1 becomes one of them.
    onto_bound: frozenset[np.dtype] = frozenset()
    # The 16-bit dtypes that hold all numbers of a constant; None where the numbers are not known.
    held_by: frozenset[np.dtype] | None = None
    number: bytes | None = None  # the number of a float32 constant of one element
    # Whether an input other than a parameter, or an array that is closed over, contributes to it
    # while it is weak; it is then weak only on the path to a product.
    data: bool = False
    statistic: int = 0  # the size of a sum of activations, or of a result of one; 0 of others
    pending: np.dtype | None = None  # the dtype for readers outside of a norm; see `read_pending`


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """An array while autocast evaluates, in the dtype that was traced or a narrower one.

    `Traits` describes what is not described here.

    Attributes:
        array: the array or the tracer.
        casts: the array in other dtypes, by the dtype and whether finite numbers stay finite.
        source: the value that holds the same numbers in another shape, and the function that makes
            this array of it; None without one. Casts of the source are reused for this array.
    """

    array: Array
    is_weak: bool
    tangent: bool = False
    uniform: bool = False
    power: bool = False
    onto_bound: frozenset[np.dtype] = frozenset()
    held_by: frozenset[np.dtype] | None = None
    number: bytes | None = None
    data: bool = False
    statistic: int = 0
    pending: np.dtype | None = None
    casts: dict[tuple[np.dtype, bool], Array] = dataclasses.field(default_factory=dict)
    source: "tuple[Value, Callable[[Array], Array]] | None" = None

    def __post_init__(self) -> None:
        self.uniform |= self.array.size == 1

    @classmethod
    def of(cls, array: Array, traits: Traits) -> "Value":
        """Returns the value of an array with known traits."""
        return cls(array, *traits[1:])

    @classmethod
    def of_constant(cls, array: Array) -> "Value":
        """Returns the value of a constant of a jaxpr."""
        value = cls(array, is_weak=True)
        if not isinstance(array, jax.core.Tracer) and getattr(array, "is_fully_addressable", True):
            value.note_constant(array)
        return value

    def note_constant(self, array: Array) -> None:
        """Notes which dtypes hold the numbers of a constant, given in any shape.

        Large arrays are not examined: weights that a function closes over are constants, too.
        """
        kinds = jnp.floating, jnp.integer, jnp.bool_
        if array.size > 2**16 or not any(jnp.issubdtype(array.dtype, kind) for kind in kinds):
            return
        with np.errstate(over="ignore", under="ignore"):
            numbers = np.asarray(array, FLOAT32)
            rounded = [(dtype, numbers.astype(dtype).astype(FLOAT32)) for dtype in LOW]
        self.onto_bound = frozenset(d for d, each in rounded if _moves_to_bound(numbers, each))
        self.held_by = frozenset(d for d, each in rounded if _holds(d, numbers, each))
        self.number = numbers.tobytes() if array.size == 1 else None

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    @property
    def traits(self) -> Traits:
        return Traits(self.dtype, *(getattr(self, name) for name in Traits._fields[1:]))

    def kept(self) -> "Value":
        """Returns the value for an equation that reaches no product, where data is not weak."""
        if not self.data:
            return self
        return dataclasses.replace(self, is_weak=False, data=False, source=None)

    def to(self, dtype: np.dtype) -> Array:
        """Returns the array in `dtype`; each cast is made once, however many equations read it."""
        return self._cast(dtype, saturate=False)

    def to_finite(self, dtype: np.dtype) -> Array:
        """Returns the array in `dtype`; finite numbers of weak arrays stay finite."""
        return self._cast(dtype, saturate=self.is_weak and not self.tangent)

    def _cast(self, dtype: np.dtype, saturate: bool) -> Array:
        if self.dtype == dtype:
            return self.array
        key = dtype, saturate
        if key not in self.casts:
            self.casts[key] = self._cast_anew(dtype, saturate)
        return self.casts[key]

    def _cast_anew(self, dtype: np.dtype, saturate: bool) -> Array:
        if self.source is not None:
            source, reshape = self.source
            return reshape(source._cast(dtype, saturate))
        if not saturate:
            return _cast(self.array, dtype)
        return _saturate(self.array, self._cast(dtype, saturate=False))

    def fits(self, dtype: np.dtype) -> bool:
        """Whether `dtype` holds the numbers of a weak array, with their digits.

        Numbers that are known only when the program runs, such as a count, may have any size.
        """
        if not self.is_weak or self.dtype == dtype:
            return True
        if self.held_by is not None:
            return dtype in self.held_by
        return jnp.finfo(dtype).maxexp >= jnp.finfo(FLOAT32).maxexp


def join(several: Sequence[Traits]) -> Traits:
    """Returns the traits of a result that is one of several arrays, as of two branches."""
    if all(traits == several[0] for traits in several):
        return several[0]
    several = [traits._replace(dtype=traits.pending or traits.dtype) for traits in several]
    return Traits(
        promoted(several),
        is_weak=all(traits.is_weak for traits in several),
        tangent=any(traits.tangent for traits in several),
        uniform=all(traits.uniform for traits in several),
        power=all(traits.power for traits in several),
        onto_bound=frozenset[np.dtype]().union(*(traits.onto_bound for traits in several)),
        data=any(traits.data for traits in several),
    )


def promoted(several: Sequence[Traits]) -> np.dtype:
    """Returns the widest dtype among arrays, or among those that are not weak, if there are any."""
    computed = {traits.dtype for traits in several if not traits.is_weak}
    dtypes = computed or {traits.dtype for traits in several}
    return dtypes.pop() if len(dtypes) == 1 else FLOAT32


def finite_constant(number: complex, dtype: np.dtype) -> Array:
    """Returns a constant in `dtype`; if it is finite, it stays finite."""
    array = np.asarray(number)
    return _saturate(array, _cast(array, dtype))


def _holds(dtype: np.dtype, numbers: np.ndarray, rounded: np.ndarray) -> bool:
    """Whether no number overflows in `dtype`, or is so small there that it loses digits."""
    normal = np.abs(rounded) >= float(jnp.finfo(dtype).smallest_normal)
    kept = (np.isfinite(rounded) & normal) | (rounded == numbers) | ~np.isfinite(numbers)
    return bool(kept.all())


def _moves_to_bound(numbers: np.ndarray, rounded: np.ndarray) -> bool:
    """Whether a number other than 0, 1 and -1 becomes one of them."""
    return bool((np.isin(rounded, (-1, 0, 1)) & (rounded != numbers)).any())


def _cast(array: Array, dtype: np.dtype) -> Array:
    if isinstance(array, jax.Array):
        return lax.convert_element_type(array, dtype)
    with np.errstate(over="ignore"):  # a constant of the jaxpr: cast now, staging no operation
        return np.asarray(array, dtype)


def _saturate(x: Array, y: Array) -> Array:
    """Returns `y`, the cast of `x`, with a large finite number where only `y` is infinite."""
    # A mask of -1e9 becomes half of float16's least number, so that a logit can be added to it. As
    # -inf it would turn a row that is masked as a whole into NaN.
    if isinstance(x, jax.Array):
        return _saturate_traced(x, y)
    with np.errstate(over="ignore"):
        return _saturated(np, np.asarray(x), y)


def _saturated(xp: ModuleType, x: Array, y: Array) -> Array:
    bound = np.asarray(float(jnp.finfo(y.dtype).max) / 2, y.dtype)
    lost = xp.isfinite(x) & ~xp.isfinite(y)
    return xp.where(lost, xp.where(x > 0, bound, -bound), y)


@jax.custom_jvp
def _saturate_with_jvp(x: Array, y: Array) -> Array:
    return _saturated(jnp, x, y)


_saturate_traced = jax.jit(_saturate_with_jvp)


@_saturate_with_jvp.defjvp
def _saturate_jvp(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    """Gives a saturated cast the derivative of a plain one."""
    return _saturate_with_jvp(*primals), tangents[1]


# Regions: the rules of a policy map about a scope, and about primitives in it.


class Algorithm(NamedTuple):
    """The algorithm of float32 products, and the position in the policy map of the rule for it."""

    name: str  # as `jax.default_matmul_precision` takes it
    rank: int  # -1 for the default, -2 for a context around the call


class Used:
    """Rules, scopes and operations that an evaluation met; warnings of unused rules read it."""

    def __init__(self) -> None:
        self.rules = set[PolicyRule]()  # that matched a scope or a primitive
        self.scopes = set[str]()  # of equations, and the scopes around these
        self.operations = set[str]()  # names of primitives
        self.algorithms = set[Algorithm]()  # of float32 products, even if they have one already
        # Why products that should run in 16 bits keep their dtypes; "" for those that do run so.
        self.kept = set[str]()
        # Why a product runs in 16 bits where a rule says 8 bits, by the rank of the rule; "" for
        # those that run in 8 bits.
        self.eight_bits = set[tuple[int, str]]()
        self.wide = set[Equation]()  # that hold products which should run in 16 bits, and cannot
        # Classes that their framework itself casts, to 16 bits, the dtype, and the policy map's.
        self.overriding = set[tuple[type, np.dtype, np.dtype]]()

    def add(self, inner: "Used") -> None:
        """Adds those of the evaluation of an inner jaxpr."""
        for name, met in vars(inner).items():
            getattr(self, name).update(met)


class Region(NamedTuple):
    """The dtype and the algorithm of a scope."""

    dtype: np.dtype  # in which it computes
    rank: int  # the position in the policy map of the rule that says so; -1 for the default
    is_weak: bool  # whether results that are computed in float32 here are weak outside
    is_fixed: bool = False  # by `jmpx.full_precision`: no policy rule changes the dtype
    algorithm: Algorithm | None = None  # of float32 products; None leaves them to JAX
    # How products in 16 bits multiply in 8 bits, and the rank of the rule; None leaves them so.
    eight_bits: tuple[EightBits, int] | None = None

    @property
    def is_full(self) -> bool:
        """Whether equations run in the dtypes in which they were traced."""
        return self.dtype.itemsize >= 4

    @property
    def policy(self) -> str:
        """The region as a policy string."""
        found = self.algorithm
        if self.eight_bits is not None and not self.is_full:
            found, _ = self.eight_bits
        algorithm = "" if found is None else f",matmul={found.name}"
        return f"compute={self.dtype.name}{algorithm}"

    def changed(self, rule: PolicyRule, rank: int, around: "Region") -> "Region":
        """Returns the region that a policy rule makes of this one, in a region around it."""
        algorithm, bits = around.algorithm, eight_bits(rule.matmul)
        in_eight_bits = around.eight_bits if bits is None else (bits, rank)
        if rule.matmul is not None and bits is None:
            algorithm, in_eight_bits = Algorithm(rule.matmul, rank), None
        says_only_that = rule.matmul is not None and rule.compute is None and rule.output is None
        if self.is_fixed or says_only_that:
            return Region(*self[:-2], algorithm, in_eight_bits)
        dtype = self.dtype if rule.compute is None else np.dtype(rule.compute)
        is_weak = rule.output is None or np.dtype(rule.output).itemsize < 4
        return Region(dtype, rank, is_weak, False, algorithm, in_eight_bits)


class Regions:
    """The regions of one evaluation under a policy map."""

    def __init__(
        self, policy_map: PolicyMap, surrounding: str | None = None, by_class: bool = True
    ) -> None:
        self.policy_map = policy_map
        self._by_class = by_class
        # The algorithm that jmpx has set around the call; the map's default takes precedence.
        self.surrounding = surrounding
        self.used = Used()
        rules = [rule for rule in policy_map.rules if not rule.is_in_eight_bits]
        given = (rule.product or rule.matmul for rule in rules)
        names = (surrounding, policy_map.default.matmul_precision, *given)
        self.give_algorithms = any(name is not None for name in names)
        ranked = (policy_map.default.matmul_precision, -1), (surrounding, -2)
        algorithms = (Algorithm(name, rank) for name, rank in ranked if name is not None)
        dtype = np.dtype(policy_map.default.compute_dtype)
        outermost = Region(dtype, -1, is_weak=True, algorithm=next(algorithms, None))
        self._regions = {"": outermost}  # by scopes
        self._overrides: dict[str, list[tuple[int, PolicyRule]]] = {}
        for rank, rule in enumerate(policy_map.rules):
            if rule.is_operation and (rule.compute is not None or rule.matmul is not None):
                name = rule.selector.removeprefix("op.")
                self._overrides.setdefault(name, []).append((rank, rule))

    def region(self, scope: str) -> Region:
        """Returns the region of a scope; the policy rules of outer scopes go first."""
        if scope not in self._regions:
            self._regions[scope] = self._region(scope)
            self.used.scopes.add(scope)
        return self._regions[scope]

    def _region(self, scope: str) -> Region:
        outer, _, name = scope.rpartition("/")
        region = self.region(outer)
        if name == FULL_PRECISION:
            return Region(FLOAT32, -1, False, is_fixed=True, algorithm=region.algorithm)
        level = [scope]
        if _is_one_module(outer, scope):  # a rule may match the mark or the name: the last one wins
            level.append(outer)
            region = self.region(outer.rpartition("/")[0])
        around, dtypes = region, (region.dtype, self.policy_map.default.compute_dtype)
        for each in level if self._by_class else ():
            policy: PyTree = class_policy_of(each)
            if policy is not None:
                region = region.changed(self._rule_of_class(policy), -1, around)
                with contextlib.suppress(ValueError):  # of a rule that needs the class policy
                    alone = self._without_classes.region(scope)
                    self._note_class(each, np.dtype(policy.compute_dtype), alone)
        for rank, rule in enumerate(self.policy_map.rules):
            if region.is_fixed and not self.give_algorithms:
                break  # no rule can change it
            if any(matches_scope(rule, each) for each in level):
                spelled_out = rule.spelled_out(*dtypes)
                region = region.changed(spelled_out, rank, around)
                if not region.is_fixed or spelled_out.matmul is not None:
                    self.used.rules.add(rule)
        return region

    @functools.cached_property
    def _without_classes(self) -> "Regions":
        """Those of the policy map alone, which tell where a class policy contradicts it."""
        return Regions(self.policy_map, self.surrounding, by_class=False)

    def _note_class(self, mark: str, dtype: np.dtype, alone: "Region") -> None:
        """Notes a module that its framework casts to 16 bits, where the policy map says another."""
        module = module_of(mark)
        if module is None or dtype.itemsize > 2 or alone.is_fixed or dtype == alone.dtype:
            return
        if any(adapter.class_policies for adapter in adapters_of(module.cls)):
            self.used.overriding.add((module.cls, dtype, alone.dtype))

    def _rule_of_class(self, policy: PyTree) -> PolicyRule:
        """Returns the policy of a class as a rule, which those of the policy map override."""
        check_computes(policy.compute_dtype)
        matmul = matmul_of(policy)
        self.give_algorithms |= matmul is not None
        return PolicyRule("*", None, policy.compute_dtype, policy.output_dtype, matmul=matmul)

    def note(self, algorithm: Algorithm) -> None:
        """Notes the algorithm of a product, and the policy rule that gives it."""
        self.used.algorithms.add(algorithm)
        rule = self.rule_of(algorithm)
        if rule is not None:
            self.used.rules.add(rule)

    def rule_of(self, algorithm: Algorithm) -> PolicyRule | None:
        """Returns the policy rule that gives an algorithm, None for the default or the call."""
        return self.policy_map.rules[algorithm.rank] if algorithm.rank >= 0 else None

    def override(self, name: str, region: Region) -> np.dtype | None:
        """Returns the dtype of a policy rule for a primitive, if no later rule is for its scope."""
        if name not in self._overrides:
            return None
        self.used.rules.update(rule for _, rule in self._overrides[name])
        ranked = [(rank, rule) for rank, rule in self._overrides[name] if rule.compute is not None]
        if not ranked or region.is_fixed or ranked[-1][0] <= region.rank:
            return None
        return np.dtype(ranked[-1][1].compute)

    def algorithm(self, name: str, region: Region) -> Algorithm | None:
        """Returns the algorithm of a float32 product: that of the later rule, None for JAX's."""
        found = region.algorithm
        for rank, rule in self._overrides.get(name, ()):
            if rule.matmul is not None and (found is None or rank > found.rank):
                found = Algorithm(rule.matmul, rank)
        return found


def matches_scope(rule: PolicyRule, scope: str) -> bool:
    """Whether a policy rule is about the last name of a scope, which may mark a module."""
    module = module_of(scope)
    if module is not None:
        return rule.matches(*module)
    return rule.matches_scope(written_scope(scope))


def written_scope(scope: str) -> str:
    """Returns a scope as users write it in a rule: without the names that jmpx enters."""
    return "/".join(name for name in without_marks(scope).split("/") if name != FULL_PRECISION)


def _is_one_module(outer: str, scope: str) -> bool:
    """Whether the last two names of a scope are the mark and the name of one module."""
    for mark, name in ((outer, scope), (scope, outer)):
        module = module_of(mark)
        if module is not None and module_of(name) is None:
            return is_own_name(module, name.rpartition("/")[2])
    return False
