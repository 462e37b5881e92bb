"""Which rule of a policy map each module of a model has; `python -m jmpx --model` prints it.

The model is traced in the way in which the map is applied, with abstract arrays.
"""

import re
import warnings
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np

from jmpx._adapters.applying import apply_policy
from jmpx._adapters.dtype_fields import reading_policy
from jmpx._adapters.scopes import ModuleRecord, PolicyScope, inherited_policy, listening
from jmpx._base.dtypes import dtype_name
from jmpx._base.leaves import PyTree
from jmpx._base.matmul import matmul_of
from jmpx._base.messages import describe
from jmpx._cli.tables import Row, table
from jmpx._cli.targets import attempt
from jmpx._inspect.audit.summary import scopes
from jmpx._inspect.audit.text import scope_lines
from jmpx._inspect.graph import Graph
from jmpx._inspect.programs import trace_shapes, traced_program
from jmpx._policies.maps import PolicyMap
from jmpx._policies.policy import Policy, given_fields
from jmpx._policies.registry import policy_of

Run: TypeAlias = Callable[..., PyTree]
Given: TypeAlias = tuple[PyTree, ...]  # what it is called with: a function, and its arguments


def report(policy_map: PolicyMap, made: PyTree) -> list[str]:
    """Returns lines that tell which rule each module has, in the way in which the map is applied.

    Args:
        policy_map: the policy map.
        made: what the user's function returned.

    Raises:
        ValueError: if it cannot be traced, or nothing in it has a policy.
    """
    if policy_map.way == "arguments":
        cast = f"all floating arguments are cast to {dtype_name(policy_map.default.compute_dtype)}"
        return ["", f"by arguments: {cast} before the call; no rules hold"]
    is_pair = type(made) is tuple and len(made) == 2 and isinstance(made[1], tuple | list)
    # Of a model alone, adapters make a view.
    given = (made[0], *made[1]) if is_pair else ((lambda model: None), made)
    run = lambda fn, *args: [apply_policy(fn, policy_map)(*args)]  # noqa: E731, a list is no loss
    tables = _by_modules if policy_map.way == "modules" else _by_operations
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lines = list(tables(run, given, policy_map))
    if not lines:
        raise ValueError(
            "Expected the function of --model to return a module of Equinox or NNX, or a pair of a "
            f"function and the tuple of its arguments, of which something runs by {policy_map.way} "
            f"that has a policy, got {describe(made)}: return the pair of a call, such as "
            "transformed.init, and of all that it needs."
        )
    texts = [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
    notes = dict.fromkeys(re.sub(r" of policy map '[^']*'", "", text) for text in texts)
    return [*lines, *([""] if notes else []), *notes]


def _by_operations(run: Run, given: Given, policy_map: PolicyMap) -> Iterator[str]:
    """Yields in which dtypes each module and each scope computes."""
    program = attempt("Tracing the model failed", lambda: traced_program(run, given))
    if found := scopes(Graph(program)):
        yield from ("", "by operations, under autocast:", *scope_lines(found, is_full=True))


def _by_modules(run: Run, given: Given, policy_map: PolicyMap) -> Iterator[str]:
    """Yields what each module of the frameworks has."""
    with listening() as sessions:
        attempt("Tracing the model failed", lambda: trace_shapes(run, given, {}))
    followed = policy_map.applied_by("modules", "explain")
    for session in filter(lambda session: session.met, sessions):
        if session.policy_map != followed:
            raise ValueError(
                "Cannot tell which rules the modules have, because the function of --model runs "
                f"them under its own {session.name}('{session.policy_map or ''}'), which takes "
                "precedence: let it return the model without that."
            )
        rows = list(_rows(session, followed))
        yield from ("", f"under {session.name}:", *table(("path", "class", "rule"), rows))


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
