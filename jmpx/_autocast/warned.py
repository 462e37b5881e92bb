"""Notes on errors of tracing; warnings of rules without effect and of products in float32."""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jmpx._autocast import eight_bits
from jmpx._autocast.rules import ENTRIES, Operation, is_float32, is_precise, lookup, low_dtype
from jmpx._autocast.value import FLOAT32, Regions, Used, written_scope
from jmpx._base.messages import did_you_mean, share_text
from jmpx._base.trees import PyTree
from jmpx._jaxprs import core
from jmpx._jaxprs.core import Equation, Jaxpr, operation_name
from jmpx._jaxprs.equations import FOREIGN, flops_of, place_of
from jmpx._jaxprs.inner import PRODUCTS, is_outer
from jmpx._jaxprs.marks import Module, module_of
from jmpx._policies.frameworks import imported_adapters, out_of_sight
from jmpx._policies.maps import PolicyMap, Rule as PolicyRule, text_of
from jmpx._policies.unused import nearest

# The errors in `core.UNREAD` that `jax.grad` alone raises, too.
_UNDERIVED = (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError)
# The message of a TypeError for the same reason.
_UNREAD_TEXT = re.compile(r"Tracer\.__format__|Shapes must be .*Tracer")
_TRACED = "traced by jmpx's autocast"  # a part of the name that JAX knows
_WAYS = "by=arguments or by=modules"


def traced_name(fn: Callable[..., PyTree]) -> str:
    """Returns the name that a function which autocast traces has in JAX's errors."""
    kept = f"return what it keeps, as in a list, or write {_WAYS}"
    return f"{getattr(fn, '__name__', type(fn).__name__)} ({_TRACED}: {kept})"


@contextlib.contextmanager
def tracing_explained(by: str, name: str) -> Iterator[None]:
    """Adds a note to an error that tracing a function causes; JAX knows the function by `name`."""
    before = _held()
    around = [*core.enclosing_bodies(), *["vmap"] * core.in_vmap()]
    try:
        yield
        for key, array in _held().items():
            if key not in before:
                jnp.ravel(array)  # JAX raises its error, unless in a body, where it does later
    except Exception as error:
        note = _note(error, name, by, around)
        if note:
            error.add_note(note)
        raise


def _held() -> dict[int, jax.Array]:
    """Returns the traced arrays that frameworks keep for the functions around this one."""
    arrays = (array for adapter in imported_adapters() for array in adapter.held())
    return {id(array): array for array in arrays if isinstance(array, jax.core.Tracer)}


def _note(error: Exception, name: str, by: str, around: Sequence[str | None]) -> str:
    """Returns the note for an error; empty if the function fails without autocast, too.

    `around` names the bodies around the call, which JAX traces or maps, and the derivatives.
    """
    text = str(error)
    use = "use jmpx.apply_policy with" if by == "jmpx.autocast" else "write"
    as_it_is = f"{use} {_WAYS}, which run the function as it is"
    if isinstance(error, NotImplementedError) and "must be fp16" in text:
        return (
            "Autocast changes dtypes after JAX has traced this: cast q, k and v before "
            "jax.nn.dot_product_attention, as in `q.astype(jnp.bfloat16)`, or write by=modules, "
            "under which layers hand out 16-bit arrays."
        )
    if isinstance(error, jax.errors.UnexpectedTracerError) and _TRACED in text:
        return (
            f"{by} traces the function, so that arrays are lost which it keeps elsewhere than in "
            "its result, such as parameters that Haiku creates in it: return them, wrap "
            f"`transformed.apply` in place of a part of the model, or {as_it_is}."
        )
    is_unread = isinstance(error, core.UNREAD)
    is_unread |= isinstance(error, TypeError) and _UNREAD_TEXT.search(text) is not None
    # JAX names the innermost function that it traces, which may be in a `jax.jit` of the user.
    is_ours = "while tracing the function" not in text or name in text
    has_numbers = is_ours and {*around} <= {"derivative"}
    if is_unread and has_numbers:
        but = ", but for `float` and NumPy on what is differentiated"
        return (
            f"{by} traces the function to cast its operations, so that Python reads no number of "
            f"an array in it: {as_it_is}{but if around and type(error) in _UNDERIVED else ''}."
        )
    if type(error).__name__ == "TraceContextError" and has_numbers:  # of Flax
        return (
            f"{by} traces the function, which therefore cannot change an object of NNX from "
            "outside: pass the object as an argument, so that it gets its new state."
        )
    return ""


# Warnings: of rules and options without effect, and of products that stay in float32.
#
# JAX traces the backward pass of a `jax.custom_vjp` only when it differentiates, in the dtypes of
# the forward pass: autocast cannot evaluate it in others. The same holds for a function with its
# own partitioning, and for a kernel.


_PRECISE = "`precision=` or jax.default_matmul_precision asks for more digits"
_FUNCTIONS = (jax.nn, jnp, jax.lax)  # whose functions users take for operations


def note_products(operation: Operation) -> None:
    """Notes how a product, or an operation that holds some, runs where the policy says 16 bits."""
    equation, dtype = operation.equation, operation.dtype
    if dtype.itemsize > 2 or operation.region.is_fixed:
        return
    used = operation.interpreter.regions.used
    if operation.name in PRODUCTS:
        asked, why = operation.region.eight_bits, eight_bits.why_not(operation)
        if asked is not None and why is not None:
            used.eight_bits.add((asked[1], why))
        used.kept.update(_why_kept(operation))
    elif operation.name == "custom_vjp_call" or lookup(equation) is None:
        regions = operation.interpreter.fresh().regions  # a rule that matches inside has no effect
        is_rounded = any(value.dtype.itemsize <= 2 for value in operation.float32_values)
        if _has_wide_product(equation, operation.scope, regions, is_rounded):
            used.wide.add(equation)


def _why_kept(operation: Operation) -> Iterator[str]:
    """Yields why a product keeps its dtypes, "" if it does not, and nothing if it may keep them.

    It may as an outer product, without floats, and where the policy asks for precision.
    """
    equation, regions = operation.equation, operation.interpreter.regions
    dtypes = {atom.aval.dtype for atom in equation.invars}
    dtypes = {dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)}
    if not dtypes or is_outer(equation):
        return
    is_low = max(dtype.itemsize for dtype in dtypes) <= 2
    is_low |= low_dtype(equation, operation.dtype) != FLOAT32
    if is_low or operation.override is not None:
        yield ""
    elif not is_precise(equation):
        yield f"operands of {' and '.join(sorted(map(str, dtypes)))} keep their dtype"
    else:
        algorithm = regions.algorithm(operation.name, operation.region)
        if algorithm is None or algorithm.name == "default":
            yield _PRECISE


def _has_wide_product(equation: Equation, scope: str, regions: Regions, is_rounded: bool) -> bool:
    """Whether a product in an equation runs in float32 instead of 16 bits.

    A foreign kernel, which shows no product, counts if an operand `is_rounded`, to 16 bits.
    """
    if is_rounded and operation_name(equation.primitive.name) == FOREIGN:
        return any(map(is_float32, equation.invars))
    for inner in (inner for jaxpr in core.inner_jaxprs(equation.params) for inner in jaxpr.eqns):
        within = core.scope_within(scope, inner)
        is_product = operation_name(inner.primitive.name) in PRODUCTS
        is_wide = is_product and all(map(is_float32, inner.invars[:2]))
        is_wide = is_wide and not (is_precise(inner) or is_outer(inner))
        if is_wide and not regions.region(within).is_full:
            return True
        if _has_wide_product(inner, within, regions, is_rounded):
            return True
    return False


def wide_products(policy_map: PolicyMap, used: Used, jaxpr: Jaxpr) -> Iterator[str]:
    """Yields a warning of functions that stay float32, and one if no product runs in 16 bits."""
    if used.wide:
        found = sorted({f"{e.primitive.name} at {place_of(e) or 'a library'}" for e in used.wide})
        whole, part = flops_of(jaxpr, used.wide)
        share = f", {share_text(part, whole)} of all FLOPs of products" if part else ""
        yield (
            f"JAX cannot trace {' and '.join(found)} again in 16 bits, so autocast leaves float32 "
            f"there{share}: cast the operands before the call, as in `q.astype(jnp.bfloat16)`, "
            "write by=modules, under which layers hand out 16-bit arrays, or mark it with "
            "jmpx.full_precision where float32 is meant."
        )
    if used.kept and "" not in used.kept:
        remedy = "leave that out, or write compute=float32,matmul=highest where it is meant"
        if _PRECISE not in used.kept:
            remedy = "cast them where 16 bits are meant, as in `x.astype(jnp.float32)`"
        yield (
            f"No product runs in 16 bits under autocast with policy map {str(policy_map)!r}, "
            f"because {' and '.join(sorted(used.kept))}: {remedy}."
        )


def overriding_classes(policy_map: PolicyMap, used: Used, by: str) -> Iterator[str]:
    """Yields a warning of the classes that run in 16 bits by their own policies, if there are.

    `"full"` alone, which casts nothing, is how a program leaves the casts to its classes.
    """
    found = sorted((cls.__name__, str(own), str(said)) for cls, own, said in used.overriding)
    if found and not (policy_map.default.compute_dtype == FLOAT32 and not policy_map.rules):
        runs = " and ".join(f"{name} in {own} in place of {said}" for name, own, said in found)
        calls = " and ".join(f"jmpx.set_policy({name}, ...)" for name in {n: 0 for n, *_ in found})
        write = "use jmpx.apply_policy with" if by == "jmpx.autocast" else "write"
        yield (
            f"Policies of classes override policy map {str(policy_map)!r}, because Haiku itself "
            f"casts by them: {runs}: remove {calls}, or {write} by=modules, whose rules win over "
            "them."
        )


def unused_rules(
    policy_map: PolicyMap, used: Used, modules: Iterable[Module], given: PyTree = None
) -> Iterator[str]:
    """Yields a warning of each policy rule that met nothing, or changes nothing.

    `modules` are those in the arguments, and `given` is what may hold the parts of others.
    """
    called = (module_of(scope) for scope in used.scopes)
    modules = {*modules, *(module for module in called if module)}
    ranks = {algorithm.rank for algorithm in used.algorithms}
    for rank, rule in enumerate(policy_map.rules):
        if rule.optional:
            continue
        the_rule = f"rule {text_of(rule)!r} of policy map {str(policy_map)!r}"
        if rule not in used.rules:
            if not any(rule.matches(*module) for module in modules):
                near = _near(rule, used, modules, out_of_sight(given))
                yield f"The {the_rule} matched no {near}"
            continue
        if _is_without_dtype(rule):
            yield (
                f"The {the_rule} has no effect, because an operation of that name holds others or "
                "keeps its dtypes: write rules for those inside, such as 'op.dot_general', or cast "
                "the operands before the call."
            )
        if rule.is_in_eight_bits:
            yield from _unused_eight_bits(the_rule, rank, used)
        elif rule.matmul is not None and rank not in ranks:
            yield (
                f"The matmul of the {the_rule} has no effect, because no float32 product gets it: "
                "leave it out, or write compute=float32 beside it."
            )
        if rule.product is not None and rank not in ranks:
            yield (
                f"The product of the {the_rule} has no effect, because no matrix product of "
                "float32 arrays without a precision= of its own runs there: write compute=float32 "
                "instead, or select the module or scope of the product."
            )


def _unused_eight_bits(the_rule: str, rank: int, used: Used) -> Iterator[str]:
    why = {why for of_rule, why in used.eight_bits if of_rule == rank}
    if "" in why:
        return
    end = f" on the products there ({'; '.join(sorted(why))})"
    yield (
        f"The matmul of the {the_rule} has no effect"
        f"{end if why else ', because no matrix product in 16 bits runs there'}: leave it out, or "
        "select the layers whose products are to run in 8 bits."
    )


def _is_without_dtype(rule: PolicyRule) -> bool:
    """Whether a policy rule gives 16 bits to a primitive that runs in no dtype of its own."""
    name = rule.selector.removeprefix("op.")
    if not rule.is_operation or rule.compute is None or np.dtype(rule.compute).itemsize > 2:
        return False
    return name not in ("scan", "while") and name in ENTRIES and ENTRIES[name].everywhere


def _near(rule: PolicyRule, used: Used, modules: set[Module], unseen: str) -> str:
    """Returns the end of a warning: the kind that a rule did not match, and similar names."""
    if rule.is_operation:
        name = rule.selector.removeprefix("op.")
        if name not in ENTRIES and any(hasattr(module, name) for module in _FUNCTIONS):
            return (
                f"operation, as {name!r} is a function: write rules for the primitives that it "
                "runs, which jax.make_jaxpr shows, such as 'op.dot_general' and 'op.exp'."
            )
        # A primitive that ran is more likely to be meant than another one.
        ran = did_you_mean(name, {n: f"op.{n}" for n in sorted(used.operations) if n != name})
        if ran != "." or name in ENTRIES:
            return f"operation{ran}"
        return f"operation{did_you_mean(name, {n: f'op.{n}' for n in sorted(ENTRIES)})}"
    kind = "module or scope" if modules else "scope"
    near = nearest(rule, modules, map(written_scope, used.scopes), used.operations)
    return f"{kind}: {unseen}." if unseen and not near.startswith(";") else f"{kind}{near}"
