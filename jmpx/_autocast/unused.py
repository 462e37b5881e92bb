"""What autocast warns of: policy rules and options without effect, and what the user may mean.

Each function yields the texts of warnings.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from jmpx._autocast.multiplied import PRODUCTS
from jmpx._autocast.pieces import Kind
from jmpx._autocast.regions import Used
from jmpx._autocast.rules import is_registered, overridable
from jmpx._autocast.wide import REMEDY
from jmpx._base.messages import did_you_mean
from jmpx._jaxprs.marks import Module, module_of, without_marks
from jmpx._policies.maps import PolicyMap, Rule as PolicyRule

# On the right, functions and layers that users take for operations. No jaxpr holds them: it holds
# the primitives on the left, which decide about the precision, and which policy rules should name.
_FUNCTIONS = {
    "dot_general": "matmul dot vdot inner einsum tensordot linear dense multi_dot batch_matmul",
    "conv_general_dilated": "conv conv1d conv2d conv3d conv_transpose convolve correlate",
    "dot_general exp reduce_sum": "attention dot_product_attention",
    "exp reduce_sum": "softmax",
    "exp reduce_sum log": "log_softmax logsumexp cross_entropy softmax_cross_entropy",
    "exp log1p": "softplus log_sigmoid logaddexp",
    "expm1": "elu selu celu",
    "tanh erfc": "gelu",  # approximate, and exact
    "logistic": "sigmoid silu swish glu",
    "max": "relu maximum",
    "min": "minimum",
    "max min": "relu6 clip",
    "reduce_sum": "sum mean average",
    "reduce_sum square": "var",
    "reduce_sum square sqrt": "std",
    "reduce_sum sqrt": "norm",
    "reduce_sum rsqrt": """
        layer_norm layernorm batch_norm batchnorm group_norm groupnorm instance_norm
        rms_norm rmsnorm
    """,
    "reduce_prod": "prod",
    "reduce_max": "amax",
    "reduce_min": "amin",
    "reduce_window_max": "max_pool",
    "reduce_window_sum": "avg_pool",
    "select_n": "where select",
    "gather": "take take_along_axis embed embedding",
    "scatter_add": "segment_sum",
    "div": "divide true_divide reciprocal",
    "mul": "multiply",
    "sub": "subtract",
    "neg": "negative",
    "abs": "absolute",
    "pow": "power",
    "log": "log10",
    **{f"a{name}": f"arc{name}" for name in "sin cos tan tan2 sinh cosh tanh".split()},
}
INSTEAD = {name: ops.split() for ops, names in _FUNCTIONS.items() for name in names.split()}
# Why `save=` left something as it was, and what to do.
_LEFT = {
    None: "it takes a gradient itself, so run what is differentiated under autocast, as in "
    "jax.grad(jmpx.autocast(f))",
    Kind.CHECKPOINT: "it is under jax.checkpoint, so leave that out where save= should decide",
    Kind.EFFECTS: "it has effects, such as a callback, so move these out of it",
}
_HOLDS = (
    "it holds other operations: write rules for these, such as 'op.dot_general', or for a scope"
)
# Why a rule that gives 16 bits to an operation has no effect.
_WITHOUT_EFFECT = {
    **dict.fromkeys("call closed_call jit remat2 cond shard_map custom_jvp_call".split(), _HOLDS),
    "custom_vjp_call": f"JAX cannot trace such a function again: {REMEDY}",
    "convert_element_type": "a cast keeps the dtype that was written: leave the rule out",
}


def unused_rules(policy_map: PolicyMap, used: Used, modules: Iterable[Module]) -> Iterator[str]:
    """Yields what to say of each policy rule that met nothing, or changes nothing.

    The modules are those that the arguments hold.
    """
    modules = _modules(used, modules)
    ranks = {algorithm.rank for algorithm in used.algorithms}
    for rank, rule in enumerate(policy_map.rules):
        if rule.optional:
            continue
        the_rule = f"rule {str(rule)!r} of policy map {str(policy_map)!r}"
        if rule not in used.rules and not any(rule.matches(*module) for module in modules):
            yield f"The {the_rule} matched no {_near(rule, used, modules)}"
        if rule not in used.rules:
            continue
        why = _WITHOUT_EFFECT.get(rule.selector.removeprefix("op.")) if rule.is_operation else None
        if why is not None and rule.compute is not None and np.dtype(rule.compute).itemsize <= 2:
            yield f"The {the_rule} has no effect, because {why}."
        if rule.matmul is not None and rank not in ranks:
            yield f"The matmul of the {the_rule} has no effect, because {_why_lost(rule)}"


def unused_saving(
    selectors: Iterable[PolicyRule], used: Used, modules: Iterable[Module]
) -> Iterator[str]:
    """Yields what to say of selectors of pieces that matched nothing, and of what is not saved."""
    reasons = {reason for reason, _ in used.left}
    for rule in () if None in reasons else selectors:
        if rule not in used.rules and not rule.optional:
            near = _near(rule, used, _modules(used, modules))
            yield f"{rule.selector!r} of pieces= matched no {near}"
    remedies = [text for reason, text in _LEFT.items() if reason in reasons]
    if remedies:
        places = ", ".join(sorted({str(place) for _, place in used.left if place is not None}))
        yield (
            f"save='products' leaves a part of the function as it is{places and f' ({places})'}: "
            f"{'; '.join(remedies)}."
        )


def _why_lost(rule: PolicyRule) -> str:
    """Returns why no product has the algorithm of a rule, and what to do."""
    if rule.is_operation and rule.selector.removeprefix("op.") not in PRODUCTS:
        return f"{rule.selector!r} multiplies no matrices: leave it out."
    remedy = "leave it out" if rule.compute is not None else "write compute=float32 beside it"
    return (
        f"no float32 product gets it: {remedy}, or '{rule.selector}?' where one string serves "
        "several functions."
    )


def _modules(used: Used, modules: Iterable[Module]) -> set[Module]:
    return {*modules, *(module for scope in used.scopes if (module := module_of(scope)))}


def _near(rule: PolicyRule, used: Used, modules: set[Module]) -> str:
    """Returns the end of a warning: what a rule did not match, and what is near to it."""
    if rule.is_operation:
        return f"operation{near_operation(rule.selector, used.operations)}"
    known = _by_name(used.scopes, modules, rule.is_path)
    near = did_you_mean(rule.selector.strip("*/"), known)
    return f"{'module or scope' if modules else 'scope'}{near}"


def near_operation(selector: str, met: Iterable[str]) -> str:
    """Returns the end of a warning: what a selector such as `op.expp` may mean."""
    name = selector.removeprefix("op.")
    if name.lower() in INSTEAD:
        *others, last = (f"'op.{operation}'" for operation in INSTEAD[name.lower()])
        instead = f"{', '.join(others)} and {last}" if others else last
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
