"""Which rule of a policy map each module of a model has; `python -m jmpx --model` prints it.

The model is looked at in the way in which the map is applied: by modules, operations or arguments.
Nothing is computed: models are viewed and functions are traced with abstract arrays.
"""

import contextlib
import dataclasses
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jmpx._adapters.applying import apply_policy
from jmpx._adapters.dtype_fields import reading_policy
from jmpx._adapters.scopes import ModuleRecord, PolicyScope, inherited_policy, listening, pooled
from jmpx._autocast import Autocast
from jmpx._autocast.interpreter import Interpreter
from jmpx._autocast.regions import Regions
from jmpx._autocast.value import Value
from jmpx._base.dtypes import dtype_name
from jmpx._base.leaves import is_floating_dtype, is_traceable
from jmpx._base.matmul import matmul_of
from jmpx._base.stateful import split
from jmpx._cli.targets import attempt
from jmpx._jaxprs import core
from jmpx._jaxprs.marks import is_own_name, module_of
from jmpx._jaxprs.scopes import FULL_PRECISION
from jmpx._policies.maps import PolicyMap, Rule
from jmpx._policies.modules import call_marked
from jmpx._policies.places import where
from jmpx._policies.policy import Policy, given_fields
from jmpx._policies.registry import policy_of

RETURNS = (
    "a module of Equinox or NNX, or a pair of a function, a Linen module or a Haiku transformed "
    "function and the tuple of its arguments"
)
_NO_MODULES = "no module is called that by=modules could cast; by operations it would be:"
_OUTERMOST = "(outermost)"  # what has no path
_SETS_FIELD = "sets its dtype field"


class Row(NamedTuple):
    """A module, a scope or an operation.

    Args:
        labels: its path, its class, its rule and the like.
        fields: what holds in it: names of dtypes and of the algorithm of products, by the keys of
            policy strings.
    """

    labels: tuple[str, ...]
    fields: dict[str, str]


class Table(NamedTuple):
    """Rows for `python -m jmpx` to print.

    Args:
        title: a line above the rows.
        header: the names of the labels.
        rows: the rows.
    """

    title: str
    header: tuple[str, ...]
    rows: list[Row]


class Report(NamedTuple):
    """What `python -m jmpx --model` prints.

    Args:
        tables: the rows.
        notes: sentences about rules that are in force nowhere, and what else there is to know.
    """

    tables: list[Table]
    notes: list[str]


def report(policy_map: PolicyMap, made: Any) -> Report:
    """Returns which rule each module has, in the way in which the policy map is applied.

    Args:
        policy_map: the policy map.
        made: what the user's function returned.

    Raises:
        ValueError: if it is nothing that can be viewed or traced, or if tracing fails.
    """
    fn, args = _split(made)
    if policy_map.way == "arguments":
        return Report([], list(_by_arguments(policy_map)))
    title = "by operations, under autocast:"
    if policy_map.way == "modules":
        found = _by_modules(fn, args, dataclasses.replace(policy_map, by=None))
        if found is not None:
            return found
        title = _NO_MODULES
    fn, args = _forward(fn, args)
    policy_map = dataclasses.replace(policy_map, by="operations")
    trying = lambda: _by_operations(fn, args, policy_map, title)  # noqa: E731
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


def _by_modules(fn: Any, args: tuple[Any, ...], policy_map: PolicyMap) -> Report | None:
    """Returns what each module of the frameworks has; None if there is none."""
    models = _models_in(_unwrapped(fn), args)
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
    return Report(tables, [*_texts(caught, policy_map), *about_rules, *about_casts[:1]])


def _split(made: Any) -> tuple[Any, tuple[Any, ...]]:
    """Returns the function or module to look at, and its arguments.

    Raises:
        ValueError: if there is none, or if arguments are missing.
    """
    is_pair = type(made) is tuple and len(made) == 2
    fn, args = made if is_pair else (made, ())
    got = f"a value of type {type(made).__name__}"
    if isinstance(fn, Autocast):
        raise ValueError(
            "The function of --model returns what jmpx.autocast has made under a policy map of "
            "its own: let it return the module or the function without that."
        )
    if not is_pair and _is_viewable(fn):
        return fn, ()
    if callable(fn) or _initializer(fn) is not None:
        if is_pair and isinstance(args, tuple | list):
            return fn, tuple(args)
        given = f"arguments of type {type(args).__name__}" if is_pair else "no arguments"
        got = f"a {type(fn).__name__} and {given}"
    raise ValueError(f"Expected the function of --model to return {RETURNS}, got {got}.")


def _type_of(package: str, name: str) -> tuple[type, ...]:
    """Returns a class of a framework in a tuple, for `isinstance`; `()` if it is not imported."""
    module = sys.modules.get(package)
    return () if module is None else (getattr(module, name),)


def _is_viewable(model: Any) -> bool:
    """Whether it is a module of which a view can be made without a call, and no wrapper of one."""
    is_wrapper = isinstance(model, _type_of("equinox", "Module")) and hasattr(model, "__wrapped__")
    kinds = _type_of("equinox", "Module") + _type_of("flax.nnx", "Module")
    return isinstance(model, kinds) and not is_wrapper


def _models_in(fn: Any, args: tuple[Any, ...]) -> list[Any]:
    """Returns the outermost modules of which views can be made: the function, or its arguments."""
    if _is_viewable(fn):
        return [fn]
    return list(filter(_is_viewable, jax.tree.leaves(args, is_leaf=_is_viewable)))


def _unwrapped(fn: Any) -> Any:
    """Returns what is in a transformed function, such as `jax.vmap(model)`, or has its method."""
    while not _is_viewable(fn):
        owner = getattr(fn, "__self__", None)
        inner = fn.func if isinstance(fn, functools.partial) else getattr(fn, "__wrapped__", None)
        if inner is None and not _is_viewable(owner):
            return fn
        fn = owner if _is_viewable(owner) else inner
    return fn


def _initializer(fn: Any) -> Callable[..., Any] | None:
    """Returns the `init` of a Linen module or of a Haiku function, None for any other object."""
    kinds = _type_of("flax.linen", "Module")
    for name in ("Transformed", "TransformedWithState", "MultiTransformed"):
        kinds += _type_of("haiku", name)
    return fn.init if isinstance(fn, kinds) else None


def _view(model: Any, policy_map: PolicyMap) -> None:
    """Makes the view of a model, with abstract arrays in place of its own."""
    if isinstance(model, _type_of("equinox", "Module")):
        from jmpx._adapters.equinox.views import with_policies

        _abstractly(lambda model: with_policies(model, policy_map), (model,))
    else:
        from flax import nnx

        from jmpx._adapters.nnx.views import with_policies

        graph, state = nnx.split(model)
        jax.eval_shape(
            lambda state: with_policies(nnx.merge(graph, state), policy_map) and None, state
        )


def _trace(fn: Any, args: tuple[Any, ...], policy_map: PolicyMap) -> None:
    """Traces a function under the contexts of the frameworks that are imported."""
    init = _initializer(fn)

    def run(*args: Any) -> Any:
        return fn(*args) if init is None else init(jax.random.key(0), *args)

    with contextlib.ExitStack() as stack:
        if "haiku" in sys.modules:
            from jmpx._adapters.haiku.policies import policies

            stack.enter_context(policies(policy_map))
        if "flax.linen" in sys.modules:
            from jmpx._adapters.linen.policies import policies

            stack.enter_context(policies(policy_map))
        _abstractly(run, args)


def _abstractly(fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Calls a function with abstract arrays; arguments that are no arrays stay as they are."""
    leaves, treedef = jax.tree.flatten(args)
    arrays = {i: leaf for i, leaf in enumerate(leaves) if _is_array(leaf)}

    def run(arrays: dict[int, Any]) -> None:
        fn(*treedef.unflatten(arrays.get(i, leaf) for i, leaf in enumerate(leaves)))

    jax.eval_shape(run, arrays)


def _is_array(leaf: object) -> bool:
    return is_traceable(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def _shapes_of(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Returns the shapes of what a function returns, which must be arrays."""
    found: list[Any] = []
    as_shape = lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype)  # noqa: E731
    _abstractly(lambda *args: found.append(jax.tree.map(as_shape, fn(*args))), args)
    return found[0]


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
        yield Row((met.module.path or _OUTERMOST, kind, origin), fields)


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


def _texts(caught: list[warnings.WarningMessage], policy_map: PolicyMap) -> list[str]:
    """Returns the messages of a user's warnings, each once, those about rules without the map."""
    texts = [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
    of_map = f" of policy map {str(policy_map)!r}"
    return list(dict.fromkeys(text.replace(of_map, "", 1) for text in texts))


def _forward(fn: Any, args: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns what is traced by operations: the call of a model, with shapes as its parameters.

    Raises:
        ValueError: if there is no one call.
    """
    init = _initializer(fn)
    has_several = isinstance(fn, _type_of("haiku", "MultiTransformed"))
    if has_several or (_is_viewable(fn) and not args):
        got = f"a {type(fn).__name__} {'of several functions' if has_several else 'alone'}"
        raise ValueError(
            "Expected the function of --model to return a pair of a function, such as the model, "
            "and the tuple of its arguments, because operations are found by a call, got "
            f"{got}: return the pair, or write by=modules."
        )
    if init is None:
        return fn, args
    key = jax.random.key(0)
    made = attempt("Tracing the model failed", lambda: _shapes_of(init, (key, *args)))
    if isinstance(fn, _type_of("flax.linen", "Module")):
        changing = [name for name in made if name != "params"]
        call = functools.partial(fn.apply, rngs=key, mutable=changing)
        return call, (made, *args)
    stored = made if isinstance(fn, _type_of("haiku", "TransformedWithState")) else (made,)
    names = [*inspect.signature(fn.apply).parameters][len(stored) :]
    keys = [key] if names[:1] == ["rng"] else []  # hk.without_apply_rng takes it away
    return fn.apply, (*stored, *keys, *args)


def _by_operations(
    fn: Callable[..., Any], args: tuple[Any, ...], policy_map: PolicyMap, title: str
) -> Report:
    """Returns what each module, scope and operation of a function has under autocast."""
    interpreter, found = Interpreter(policy_map), dict[str, set[str]]()

    def run(fn: Callable[..., Any], *args: Any) -> Any:
        return apply_policy(fn, policy_map)(*args)

    def mark(fn: Callable[..., Any], *args: Any) -> Any:
        with split(call_marked, (_any_module, fn, args, {}), {}) as (pure, state, given, kwargs):
            traced = core.trace(pure, (state, *given), kwargs)
            values = [Value(array, is_weak=True) for array in traced.arrays]
            interpreter.evaluate(traced.jaxpr, values, "")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _collect(core.trace(run, (fn, *args), {}, _is_array).jaxpr, found)
        core.trace(mark, (fn, *args), {}, _is_array)
    rules = [rule for rule in policy_map.rules if rule.is_operation]
    labels = {rule.selector.removeprefix("op."): rule.label for rule in rules}
    operations = [
        Row((name, labels.get(name, ""), " ".join(sorted(found[name]))), {})
        for name in sorted(found)
    ]
    scopes = _rows_of_scopes(interpreter.used.scopes, interpreter.regions)
    tables = [
        Table(title, ("scope", "class", "rule"), scopes),
        Table("its operations:", ("operation", "rule", "runs in"), operations),
    ]
    unmatched = (r for r in policy_map.rules if r.optional and r not in interpreter.used.rules)
    notes = [f"The optional rule {str(rule)!r} matched nothing." for rule in unmatched]
    return Report(tables, [*_texts(caught, policy_map), *notes])


def _any_module(cls: type, path: str) -> bool:
    """Whether a module in the arguments marks its calls: each does, so that each has a row."""
    return True


def _rows_of_scopes(scopes: Iterable[str], regions: Regions) -> list[Row]:
    """Returns a row for each module and each named scope, by their paths."""
    rows: dict[tuple[str, bool], Row] = {}
    # A module's mark and its name are two scopes of one path, of which the inner one decides.
    for scope in sorted({*scopes} - set(_names_around_marks(scopes)), key=lambda s: s.count("/")):
        place = where(scope)
        kind = place.module.cls.__name__ if place.module and not place.names else ""
        rows[place.path, place.is_full] = _row_of_scope(scope, place.path, kind, regions)
    return [rows[key] for key in sorted(rows)]


def _names_around_marks(scopes: Iterable[str]) -> Iterator[str]:
    """Yields the scopes that are the name of a module, around the mark of that module."""
    for scope in scopes:
        outer, module = scope.rpartition("/")[0], module_of(scope)
        if outer and module is not None and is_own_name(module, outer.rpartition("/")[2]):
            yield outer


def _row_of_scope(scope: str, path: str, kind: str, regions: Regions) -> Row:
    """Returns the row of a scope of autocast, whose dtype and algorithm may be from two rules."""
    region, rules = regions.region(scope), regions.policy_map.rules
    fields, ranks = {"compute": region.dtype.name}, {region.rank}
    if region.algorithm is not None:
        fields["matmul"] = region.algorithm.name
        ranks.add(region.algorithm.rank)
    labels = [rules[rank].label for rank in sorted(ranks) if rank >= 0]
    if region.is_fixed:
        labels.append(FULL_PRECISION)
    return Row((path or _OUTERMOST, kind, ", ".join(labels) or "default"), fields)


def _collect(jaxpr: core.Jaxpr, found: dict[str, set[str]]) -> None:
    """Adds to `found` the floating dtypes of the operands of each operation of a jaxpr."""
    for eqn in jaxpr.eqns:
        for inner in core.inner_jaxprs(eqn.params):
            _collect(inner, found)
        dtypes = {atom.aval.dtype for atom in eqn.invars if hasattr(atom.aval, "dtype")}
        floating = {dtype.name for dtype in dtypes if is_floating_dtype(dtype)}
        name = core.operation_name(eqn.primitive.name)
        is_cast = name in ("convert_element_type", "reduce_precision")
        if floating and not is_cast and not core.holds_jaxpr(eqn.params):
            found.setdefault(name, set()).update(floating)
