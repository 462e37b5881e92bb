"""Which rule of a policy map each module of a model has; `python -m jmpx --model` prints it.

The model is looked at in the way in which the map is applied: by modules, operations or arguments.
Nothing is computed: models are viewed and functions are traced with abstract arrays.
"""

import contextlib
import dataclasses
import functools
import sys
import warnings
from collections.abc import Iterator

import jax
import numpy as np

from jmpx._adapters.dtype_fields import reading_policy
from jmpx._adapters.scopes import ModuleRecord, PolicyScope, inherited_policy, listening, pooled
from jmpx._base.dtypes import dtype_name
from jmpx._base.leaves import PyTree
from jmpx._base.matmul import matmul_of
from jmpx._cli.made import (
    RETURNS as RETURNS,
    forward_call,
    function_and_arguments,
    initializer,
    models_in,
    trace_abstractly,
)
from jmpx._cli.model_tables import OUTERMOST, Report, Row, Table, texts_of
from jmpx._cli.operations import by_operations
from jmpx._cli.targets import attempt
from jmpx._policies.frameworks import imported_adapters
from jmpx._policies.maps import PolicyMap, Rule
from jmpx._policies.policy import Policy, given_fields
from jmpx._policies.registry import policy_of

_NO_MODULES = "no module is called that by=modules could cast; by operations it would be:"
_SETS_FIELD = "sets its dtype field"


def report(policy_map: PolicyMap, made: object) -> Report:
    """Returns which rule each module has, in the way in which the policy map is applied.

    Args:
        policy_map: the policy map.
        made: what the user's function returned.

    Raises:
        ValueError: if it is nothing that can be viewed or traced, or if tracing fails.
    """
    fn, args = function_and_arguments(made)
    if policy_map.way == "arguments":
        return Report([], list(_by_arguments(policy_map)))
    title = "by operations, under autocast:"
    if policy_map.way == "modules":
        found = _by_modules(fn, args, dataclasses.replace(policy_map, by=None))
        if found is not None:
            return found
        title = _NO_MODULES
    fn, args = forward_call(fn, args)
    policy_map = dataclasses.replace(policy_map, by="operations")
    trying = lambda: by_operations(fn, args, policy_map, title)  # noqa: E731
    return attempt("Tracing under autocast failed", trying)


def _by_arguments(policy_map: PolicyMap) -> Iterator[str]:
    """Yields what a policy map does that casts arguments, and which rules have no effect there."""
    default = policy_map.default
    compute, output = np.dtype(default.compute_dtype), np.dtype(default.output_dtype)
    widens = f", and results to {output.name} where they are narrower"
    yield (
        f"by arguments: all floating arguments are cast to {compute.name} before the call"
        f"{widens if output.itemsize > compute.itemsize else ''}; no rules hold"
    )
    for rule in policy_map.rules:
        what, way = ("optional " * rule.optional), "operations" if rule.is_operation else "modules"
        yield (
            f"The {what}rule {str(rule)!r} has no effect by arguments: write by={way}, or leave by "
            "out."
        )


def _by_modules(fn: PyTree, args: tuple[PyTree, ...], policy_map: PolicyMap) -> Report | None:
    """Returns what each module of the frameworks has; None if there is none."""
    models = models_in(fn, args)
    with (
        warnings.catch_warnings(record=True) as caught,
        listening() as sessions,
        pooled(policy_map, "explain --model"),
    ):
        warnings.simplefilter("always")
        for model in models:
            attempt("Viewing the model failed", functools.partial(_view, model, policy_map))
        if not models:
            attempt("Tracing the model failed", lambda: _trace(fn, args, policy_map))
    own = [session for session in sessions if session.policy_map == policy_map and session.met]
    _refuse_others(sessions, policy_map)
    if not own:
        return None
    header = ("path", "class", "rule")
    tables = [Table(f"under {s.name}:", header, list(_rows(s, policy_map))) for s in own]
    about_rules = _notes(policy_map, [each for session in own for each in session.met])
    about_casts = [text for session in own for text in _note_on_casts(session, policy_map)]
    return Report(tables, [*texts_of(caught, policy_map), *about_rules, *about_casts[:1]])


def _view(model: PyTree, policy_map: PolicyMap) -> None:
    """Makes the view of a model, with abstract arrays in place of its own."""
    if "flax.nnx" in sys.modules and isinstance(model, sys.modules["flax.nnx"].Module):
        from flax import nnx

        from jmpx._adapters.nnx.views import with_policies

        graph, state = nnx.split(model)
        trace_abstractly(lambda state: with_policies(nnx.merge(graph, state), policy_map), (state,))
        return
    from jmpx._adapters.equinox.views import with_policies

    trace_abstractly(lambda model: with_policies(model, policy_map), (model,))


def _trace(fn: PyTree, args: tuple[PyTree, ...], policy_map: PolicyMap) -> None:
    """Traces a function under the contexts of the frameworks that are imported."""
    init = initializer(fn)

    def run(*args: PyTree) -> PyTree:
        return fn(*args) if init is None else init(jax.random.key(0), *args)

    with contextlib.ExitStack() as stack:
        for adapter in imported_adapters():
            stack.enter_context(adapter.applied(policy_map))
        trace_abstractly(run, args)


def _refuse_others(sessions: list[PolicyScope], policy_map: PolicyMap) -> None:
    """Refuses a model that runs under a policy map of its own, which goes before the one given."""
    for session in sessions:
        if session.met and session.policy_map != policy_map:
            raise ValueError(
                f"Cannot tell which rules the modules have, because the function of --model runs "
                f"them under its own {session.name}('{session.policy_map or ''}'), which goes "
                "before the policy map given: let it return the model without that."
            )


def _rows(session: PolicyScope, policy_map: PolicyMap) -> Iterator[Row]:
    """Yields the rows of a session, in the order of the modules' first calls."""
    creates = session.name.endswith(".policies")  # a view takes parameters as they are stored
    for met in session.met:
        origin, policy = _origin(met, session, policy_map)
        fields = given_fields(policy)
        if not creates:
            del fields["params"]
        if met.rule is not None:
            del fields["output"]  # an array is stored, and returns nothing
        kind = met.module.cls.__name__ if met.rule is None else "array"
        yield Row((met.module.path or OUTERMOST, kind, origin), fields)


def _rule_of(met: ModuleRecord, policy_map: PolicyMap) -> Rule | None:
    """Returns the rule that is in force for a module or an array, None without one."""
    return policy_map.rule_for(*met.module) if met.rule is None else met.rule


def _origin(met: ModuleRecord, session: PolicyScope, policy_map: PolicyMap) -> tuple[str, Policy]:
    """Returns where the policy of a module is from, and what holds in it."""
    module, boundary, surrounding, _ = met
    around = policy_map.default if surrounding is None else surrounding
    policy = _known_fields(inherited_policy(around) if boundary is None else boundary)
    field, rule = session.census.fields.get(module), _rule_of(met, policy_map)
    sets = f" ({_SETS_FIELD})" if module in session.census.changed else ""
    if rule is not None:
        return f"{rule.label}{sets}", policy
    if policy_of(module.cls) is not None:
        return f"class policy{sets}", policy
    # At a boundary, or of what is never called, the field of a module without parameters is for the
    # modules inside alone.
    is_called_inside = boundary is None and surrounding is not None
    decides = is_called_inside or module in session.census.sizes
    if field is not None and decides and field != np.dtype(policy.compute_dtype):
        policy = reading_policy(policy, field)
        return "its dtype field", policy.with_output_dtype(field) if boundary is None else policy
    if policy.compute_dtype != np.dtype(around.compute_dtype):
        return "its state", policy
    return ("default" if surrounding is None else "inherited") + sets, policy


def _note_on_casts(session: PolicyScope, policy_map: PolicyMap) -> Iterator[str]:
    """Yields how to keep a layer wide, if results are to be wide and no module inside hands on so.

    A layer casts its inputs, also those that the user's code has cast before it.
    """
    compute, output = policy_map.default.compute_dtype, np.dtype(policy_map.default.output_dtype)
    inside = [met for met in session.met if met.surrounding is not None and met.rule is None]
    policies = [_origin(met, session, policy_map)[1] for met in inside]
    is_kept = any(output == p.compute_dtype and output == p.output_dtype for p in policies)
    if inside and output.itemsize > np.dtype(compute).itemsize and not is_kept:
        path, name = inside[-1].module.path, dtype_name(output)
        yield (
            f"A cast to {name} in front of a layer, as by x.astype(), does not keep the layer in "
            f"{name}: a rule does, such as '{path if '/' in path else f'*/{path}'}: "
            f"compute={name},output={name}'."
        )


def _known_fields(policy: Policy) -> Policy:
    """Returns what holds for a module of a policy, which may be JMP's: all but `reduce_dtype`."""
    dtypes = policy.param_dtype, policy.compute_dtype, policy.output_dtype
    return Policy(*dtypes, matmul_precision=matmul_of(policy))


def _notes(policy_map: PolicyMap, met: list[ModuleRecord]) -> Iterator[str]:
    """Yields a sentence about each rule without effect of which no session warns."""
    found = [each.module for each in met]
    winners = {id(_rule_of(each, policy_map)) for each in met}
    for rule in policy_map.rules:
        matched = any(rule.matches(*module) for module in found)
        if matched and id(rule) not in winners:
            yield f"The rule {str(rule)!r} is never the last one that matches a module."
        if rule.optional and not matched:
            yield f"The optional rule {str(rule)!r} matched no module."
