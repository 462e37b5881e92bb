"""Which rule of a policy map each module of a model has; `python -m jmpx --model` prints it.

The model is traced in the way in which the map is applied, with abstract arrays.
"""

import functools
import re
import warnings
from collections.abc import Iterator

import numpy as np

from jmpx._adapters.applying import apply_policy
from jmpx._adapters.dtype_fields import reading_policy
from jmpx._adapters.scopes import ModuleRecord, PolicyScope, inherited_policy, listening
from jmpx._base.dtypes import dtype_name
from jmpx._base.leaves import PyTree
from jmpx._base.matmul import matmul_of
from jmpx._cli.made import RETURNS, Call, call_of, is_call
from jmpx._cli.tables import Row, table
from jmpx._cli.targets import attempt
from jmpx._inspect.audit.summary import scopes
from jmpx._inspect.audit.text import scope_lines
from jmpx._inspect.graph import Graph
from jmpx._inspect.programs import trace_shapes, traced_program
from jmpx._policies.maps import PolicyMap
from jmpx._policies.policy import Policy, given_fields
from jmpx._policies.registry import policy_of


def report(policy_map: PolicyMap, made: PyTree) -> list[str]:
    """Returns lines that tell which rule each module has, in the way in which the map is applied.

    Args:
        policy_map: the policy map.
        made: what the user's function returned.

    Raises:
        ValueError: if it is nothing that can be traced, or without modules by modules.
    """
    if policy_map.way == "arguments":
        cast = f"all floating arguments are cast to {dtype_name(policy_map.default.compute_dtype)}"
        return ["", f"by arguments: {cast} before the call; no rules hold"]
    call = call_of(made)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if policy_map.way == "modules":
            lines = _by_modules(call, policy_map)
        elif is_call(call[0]):
            trying = functools.partial(_by_operations, call, policy_map)
            lines = attempt("Tracing under autocast failed", trying)
        else:
            raise ValueError(
                "Expected the function of --model to return a pair of the model and the tuple of "
                "its arguments, because operations are found by a call: return the pair, or write "
                "by=modules."
            )
    texts = [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
    notes = dict.fromkeys(re.sub(r" of policy map '[^']*'", "", text) for text in texts)
    return [*lines, *([""] if notes else []), *notes]


def _by_operations(call: Call, policy_map: PolicyMap) -> list[str]:
    """Returns in which dtypes each module and each scope computes."""
    fn, args = call
    run = lambda fn, *args: [apply_policy(fn, policy_map)(*args)]  # noqa: E731, a list is no loss
    found = scopes(Graph(traced_program(run, (fn, *args))))
    return ["", "by operations, under autocast:", *scope_lines(found, is_full=True)]


def _by_modules(call: Call, policy_map: PolicyMap) -> list[str]:
    """Returns what each module of the frameworks has."""
    run = lambda fn, *args: apply_policy(fn, policy_map)(*args)  # noqa: E731
    fn, args = call
    with listening() as sessions:
        attempt("Tracing the model failed", lambda: trace_shapes(run, (fn, *args), {}))
    lines, followed = [], policy_map.applied_by("modules", "explain")
    for scope in sessions:
        if scope.met and scope.policy_map != followed:
            raise ValueError(
                "Cannot tell which rules the modules have, because the function of --model runs "
                f"them under its own {scope.name}('{scope.policy_map or ''}'), which takes "
                "precedence: let it return the model without that."
            )
        if scope.met:
            rows = list(_rows(scope, followed))
            lines += ["", f"under {scope.name}:", *table(("path", "class", "rule"), rows)]
    if not lines:
        raise ValueError(
            f"Expected the function of --model to return {RETURNS}; none of the modules that jmpx "
            "knows ran: return the whole model, or write by=operations."
        )
    return lines


def _rows(scope: PolicyScope, policy_map: PolicyMap) -> Iterator[Row]:
    """Yields the rows of a scope, in the order of the modules' first calls."""
    creates = scope.name.endswith(".policies")  # a view takes parameters as they are stored
    for met in scope.met:
        origin, policy = _origin(met, scope, policy_map)
        fields = given_fields(policy)
        if not creates:
            del fields["params"]
        path, name = met.module.path or "(outermost)", met.module.cls.__name__
        yield Row((path, name, origin), fields)


def _origin(met: ModuleRecord, session: PolicyScope, policy_map: PolicyMap) -> tuple[str, Policy]:
    """Returns where the policy of a module is from, and what holds in it."""
    module, boundary, surrounding = met
    around = policy_map.default if surrounding is None else surrounding
    policy = _known_fields(inherited_policy(around) if boundary is None else boundary)
    field, rule = session.census.fields.get(module), policy_map.rule_for(*module)
    sets = " (sets its dtype field)" if module in session.census.changed else ""
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


def _known_fields(policy: Policy) -> Policy:
    """Returns what holds for a module of a policy, which may be JMP's: all but `reduce_dtype`."""
    dtypes = policy.param_dtype, policy.compute_dtype, policy.output_dtype
    return Policy(*dtypes, matmul_precision=matmul_of(policy))
