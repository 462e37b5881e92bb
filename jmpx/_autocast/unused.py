"""Warnings of policy rules that have no effect, and what the user may have meant."""

import warnings
from collections.abc import Iterable

import numpy as np

from jmpx._autocast.multiplied import CONVOLUTION, PRODUCTS
from jmpx._autocast.pieces import Kind
from jmpx._autocast.regions import Used
from jmpx._autocast.rules import is_registered, overridable
from jmpx._autocast.wide import REMEDY
from jmpx._base.messages import did_you_mean
from jmpx._jaxprs.marks import Module, module_of, without_marks
from jmpx._policies.maps import PolicyMap, Rule as PolicyRule, warn_of

# On the right, functions and layers that users take for operations. No jaxpr holds one: it holds
# the primitives on the left, which decide about the precision, and which policy rules should name.
_FUNCTIONS = {
    ("dot_general",): """
        matmul dot vdot inner einsum tensordot linear dense multi_dot batch_matmul
    """,
    ("conv_general_dilated",): "conv conv1d conv2d conv3d conv_transpose convolve correlate",
    ("dot_general", "exp", "reduce_sum"): "attention dot_product_attention",
    ("exp", "reduce_sum"): "softmax",
    ("exp", "reduce_sum", "log"): "log_softmax logsumexp cross_entropy softmax_cross_entropy",
    ("exp", "log1p"): "softplus log_sigmoid logaddexp",
    ("expm1",): "elu selu celu",
    ("tanh", "erfc"): "gelu",  # approximate, and exact
    ("logistic",): "sigmoid silu swish glu",
    ("max",): "relu maximum",
    ("min",): "minimum",
    ("max", "min"): "relu6 clip",
    ("reduce_sum",): "sum mean average",
    ("reduce_sum", "square"): "var",
    ("reduce_sum", "square", "sqrt"): "std",
    ("reduce_sum", "sqrt"): "norm",
    ("reduce_sum", "rsqrt"): """
        layer_norm layernorm batch_norm batchnorm group_norm groupnorm instance_norm
        rms_norm rmsnorm
    """,
    ("reduce_prod",): "prod",
    ("reduce_max",): "amax",
    ("reduce_min",): "amin",
    ("reduce_window_max",): "max_pool",
    ("reduce_window_sum",): "avg_pool",
    ("select_n",): "where select",
    ("gather",): "take take_along_axis embed embedding",
    ("scatter_add",): "segment_sum",
    ("div",): "divide true_divide reciprocal",
    ("mul",): "multiply",
    ("sub",): "subtract",
    ("neg",): "negative",
    ("abs",): "absolute",
    ("pow",): "power",
    ("log",): "log10",
    ("asin",): "arcsin",
    ("acos",): "arccos",
    ("atan",): "arctan",
    ("atan2",): "arctan2",
    ("asinh",): "arcsinh",
    ("acosh",): "arccosh",
    ("atanh",): "arctanh",
}
# Why `save=` left something as it was, and what to do.
_LEFT = {
    None: "it takes a gradient itself, so run what is differentiated under autocast, as in "
    "jax.grad(jmpx.autocast(f))",
    Kind.CHECKPOINT: "it is under jax.checkpoint, so leave that out where save= shall decide",
    Kind.EFFECTS: "it has effects, such as a callback, so move these out of it",
}
# Why a rule that gives 16 bits to an operation has no effect.
_HOLDS = (
    "it holds other operations: write rules for these, such as 'op.dot_general', or for a scope"
)
_WITHOUT_EFFECT = {
    **dict.fromkeys("call closed_call jit remat2 cond shard_map custom_jvp_call".split(), _HOLDS),
    "custom_vjp_call": f"JAX cannot trace such a function again: {REMEDY}",
    "convert_element_type": "a cast keeps the dtype that was written: leave the rule out",
}
INSTEAD = {name: ops for ops, names in _FUNCTIONS.items() for name in names.split()}


def instead_of(name: str) -> str | None:
    """Returns the selectors to write for a function that is no primitive, as part of a sentence.

    Args:
        name: the name after `op.` in a policy rule, such as `softmax`.

    Returns:
        The selectors, such as `"'op.exp' and 'op.reduce_sum'"`; None for any other name.
    """
    if name.lower() not in INSTEAD:
        return None
    *others, last = (f"'op.{operation}'" for operation in INSTEAD[name.lower()])
    return f"{', '.join(others)} and {last}" if others else last


def warn_unused(policy_map: PolicyMap, used: Used, seen: Iterable[Module], stacklevel: int) -> None:
    """Warns of each policy rule that no equation and no module met, and names what is near.

    Args:
        policy_map: the policy map.
        used: what the evaluation met.
        seen: the modules that the arguments hold.
        stacklevel: that of `warnings.warn` in the caller.
    """
    modules = _modules(used, seen)
    for rule in policy_map.rules:
        if rule in used.rules or any(rule.matches(*module) for module in modules):
            continue
        if rule.is_operation:
            kind, near = "operation", near_operation(rule.selector, used.operations)
        else:
            kind, near = _near_scope(rule, used, modules)
        warn_of(rule, policy_map, kind, near, stacklevel + 1)


def warn_of_operations(policy_map: PolicyMap, used: Used, stacklevel: int) -> None:
    """Warns of policy rules that give 16 bits to operations that have no dtype of their own.

    Args:
        policy_map: the policy map.
        used: what the evaluation met.
        stacklevel: that of `warnings.warn` in the caller.
    """
    for rule in policy_map.rules:
        why = _WITHOUT_EFFECT.get(rule.selector.removeprefix("op.")) if rule.is_operation else None
        is_low = rule.compute is not None and np.dtype(rule.compute).itemsize <= 2
        if why is not None and is_low and rule in used.rules and not rule.optional:
            warnings.warn(
                f"The rule {str(rule)!r} of policy map {str(policy_map)!r} has no effect, because "
                f"{why}.",
                stacklevel=stacklevel + 1,
            )


def _modules(used: Used, seen: Iterable[Module]) -> set[Module]:
    return {*seen, *(module for scope in used.scopes if (module := module_of(scope)))}


def _near_scope(rule: PolicyRule, used: Used, modules: set[Module]) -> tuple[str, str]:
    """Returns what a selector could have matched, and the end of a warning that it did not."""
    known = _by_name(used.scopes, modules, rule.is_path)
    near = did_you_mean(rule.selector.strip("*/"), known)
    return "module or scope" if modules else "scope", near


def warn_of_saving(
    selectors: Iterable[PolicyRule], used: Used, seen: Iterable[Module], stacklevel: int
) -> None:
    """Warns of selectors of pieces that matched nothing, and once of what is left as it was.

    Args:
        selectors: the selectors.
        used: what the evaluation met.
        seen: the modules that the arguments hold.
        stacklevel: that of `warnings.warn` in the caller.
    """
    reasons = {reason for reason, _ in used.left}
    modules = _modules(used, seen)
    for rule in () if None in reasons else selectors:
        if rule not in used.rules and not rule.optional:
            kind, near = _near_scope(rule, used, modules)
            message = f"{rule.selector!r} of pieces= matched no {kind}{near}"
            warnings.warn(message, stacklevel=stacklevel + 1)
    remedies = [text for reason, text in _LEFT.items() if reason in reasons]
    if remedies:
        places = ", ".join(sorted({str(place) for _, place in used.left if place is not None}))
        warnings.warn(
            f"save='products' leaves a part of the function as it is{places and f' ({places})'}: "
            f"{'; '.join(remedies)}.",
            stacklevel=stacklevel + 1,
        )


def warn_of_algorithms(policy_map: PolicyMap, used: Used, stacklevel: int) -> None:
    """Warns of algorithms that no product gets: those of policy rules, and those of convolutions.

    Args:
        policy_map: the policy map.
        used: what the evaluation met.
        stacklevel: that of `warnings.warn` in the caller.
    """
    ranks = {algorithm.rank for algorithm in used.algorithms}
    for rank, rule in enumerate(policy_map.rules):
        is_lost = rule.matmul is not None and rule in used.rules and rank not in ranks
        if is_lost and not rule.optional:
            warnings.warn(
                f"The matmul of the rule {str(rule)!r} of policy map {str(policy_map)!r} has no "
                f"effect, {_why_lost(rule)}",
                stacklevel=stacklevel + 1,
            )
    optional = {rank for rank, rule in enumerate(policy_map.rules) if rule.optional}
    names = sorted({name for name, rank in used.ignored if rank not in optional})
    if names:
        warnings.warn(
            f"JAX ignores {', '.join(map(repr, names))} for convolutions, so those in float32 run "
            f"in JAX's default precision: add '; op.{CONVOLUTION}: matmul=highest', or another "
            f"word, to the end of policy map {str(policy_map)!r}.",
            stacklevel=stacklevel + 1,
        )


def _why_lost(rule: PolicyRule) -> str:
    """Returns the end of a warning: why no product gets the algorithm of a rule."""
    if rule.is_operation and rule.selector.removeprefix("op.") not in PRODUCTS:
        return f"because {rule.selector!r} multiplies no matrices: leave it out."
    remedy = "leave it out" if rule.compute is not None else "write compute=float32 beside it"
    return (
        f"because no float32 product gets it: {remedy}, or '{rule.selector}?' where one string "
        "serves several functions."
    )


def near_operation(selector: str, met: Iterable[str]) -> str:
    """Returns the end of a warning: the operations that a policy rule may mean.

    Args:
        selector: the selector of a policy rule that met no operation, such as `op.expp`.
        met: the names of the operations that ran.
    """
    name = selector.removeprefix("op.")
    instead = instead_of(name)
    if instead is not None:
        return f", as {name!r} is none of JAX's primitives: write {instead}."
    near = did_you_mean(name, {n: f"op.{n}" for n in sorted(met) if n != name})
    if near != "." or is_registered(name):
        return near  # a primitive that did not run is spelled as it should be
    return did_you_mean(name, {n: f"op.{n}" for n in overridable()})


def _by_name(scopes: Iterable[str], modules: Iterable[Module], is_glob: bool) -> dict[str, str]:
    """Returns selectors that would match something, by the names that a user may write for them.

    A scope has its last name, the part of it after its last dot, and the whole; so has the path of
    a module, if the selector is a glob. A class has its name and those of its bases.
    """
    known = {without_marks(scope) for scope in scopes}
    classes = set()
    if is_glob:
        known |= {module.path for module in modules}
    else:
        classes = {base.__name__ for module in modules for base in module.cls.__mro__[:-1]}
    names = {scope: scope.rpartition("/")[2] for scope in sorted(known) if scope}
    return {name: name for name in sorted(classes)} | {
        key: scope
        for scope, name in names.items()
        for key in (name.rpartition(".")[2], name, scope)
    }
