"""Warnings of policy rules and options without effect; each function yields their texts."""

from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jmpx._autocast.regions import Used
from jmpx._autocast.rules import ENTRIES
from jmpx._base.messages import did_you_mean
from jmpx._jaxprs.marks import Module, module_of, without_marks
from jmpx._policies.maps import PolicyMap, Rule as PolicyRule

_FUNCTIONS = (jax.nn, jnp, jax.lax)  # whose functions users take for operations


def unused_rules(policy_map: PolicyMap, used: Used, modules: Iterable[Module]) -> Iterator[str]:
    """Yields what to say of each policy rule that met nothing, or changes nothing.

    The modules are those that the arguments hold.
    """
    called = (module_of(scope) for scope in used.scopes)
    modules = {*modules, *(module for module in called if module)}
    ranks = {algorithm.rank for algorithm in used.algorithms}
    for rank, rule in enumerate(policy_map.rules):
        if rule.optional:
            continue
        the_rule = f"rule {str(rule)!r} of policy map {str(policy_map)!r}"
        if rule not in used.rules:
            if not any(rule.matches(*module) for module in modules):
                yield f"The {the_rule} matched no {_near(rule, used, modules)}"
            continue
        if _is_without_dtype(rule):
            yield (
                f"The {the_rule} has no effect, because an operation of that name holds others or "
                "keeps its dtypes: write rules for those inside, such as 'op.dot_general', or cast "
                "the operands before the call."
            )
        if rule.matmul is not None and rank not in ranks:
            yield (
                f"The matmul of the {the_rule} has no effect, because no float32 product gets it: "
                "leave it out, or write compute=float32 beside it."
            )


def _is_without_dtype(rule: PolicyRule) -> bool:
    """Whether a policy rule gives 16 bits to a primitive that runs in no dtype of its own."""
    name = rule.selector.removeprefix("op.")
    if not rule.is_operation or rule.compute is None or np.dtype(rule.compute).itemsize > 2:
        return False
    return name not in ("scan", "while") and name in ENTRIES and ENTRIES[name].everywhere


def unused_saving(used: Used) -> Iterator[str]:
    """Yields what to say where `save=` left something as it was."""
    if used.left:
        places = ", ".join(sorted(str(place) for place in used.left if place is not None))
        yield (
            f"save='products' leaves a part of the function as it is{places and f' ({places})'}, "
            "because it is under jax.checkpoint, has effects such as a callback, or takes a "
            "gradient itself: leave the checkpoint out, move the effects out of it, or run what is "
            "differentiated under autocast, as in jax.grad(jmpx.autocast(f))."
        )


def _near(rule: PolicyRule, used: Used, modules: set[Module]) -> str:
    """Returns the end of a warning: what a rule did not match, and what is near to it."""
    if rule.is_operation:
        name = rule.selector.removeprefix("op.")
        if name not in ENTRIES and any(hasattr(module, name) for module in _FUNCTIONS):
            return (
                f"operation, as {name!r} is a function: write rules for the primitives that it "
                "runs, which jax.make_jaxpr shows, such as 'op.dot_general' and 'op.exp'."
            )
        # What ran is nearer to what the user means than any other primitive.
        ran = did_you_mean(name, {n: f"op.{n}" for n in sorted(used.operations) if n != name})
        if ran != "." or name in ENTRIES:
            return f"operation{ran}"
        return f"operation{did_you_mean(name, {n: f'op.{n}' for n in sorted(ENTRIES)})}"
    known = _by_name(used.scopes, modules, rule.is_path)
    near = did_you_mean(rule.selector.strip("*/"), known)
    return f"{'module or scope' if modules else 'scope'}{near}"


def _by_name(scopes: Iterable[str], modules: Iterable[Module], is_glob: bool) -> dict[str, str]:
    """Returns selectors that would match something, by the names that a user may write for them."""
    paths = {without_marks(scope) for scope in scopes} - {""}
    if is_glob:
        paths |= {module.path for module in modules}
        classes = set[str]()
    else:
        classes = {base.__name__ for module in modules for base in module.cls.__mro__[:-1]}
    last = {path.rpartition("/")[2]: path for path in sorted(paths)}
    return {name: name for name in (*sorted(classes), *sorted(paths))} | last
