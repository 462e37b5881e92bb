"""What each module, scope and operation of a function has under autocast, for `--model`."""

import warnings
from collections.abc import Callable, Iterable, Iterator

from jmpx._adapters.applying import apply_policy
from jmpx._autocast.interpreter import Interpreter
from jmpx._autocast.regions import Regions
from jmpx._autocast.value import Value
from jmpx._base.leaves import PyTree, is_floating_dtype
from jmpx._base.stateful import split
from jmpx._cli.made import is_array_or_shape
from jmpx._cli.model_tables import OUTERMOST, Report, Row, Table, texts_of
from jmpx._jaxprs import core
from jmpx._jaxprs.marks import is_own_name, module_of
from jmpx._jaxprs.scopes import FULL_PRECISION
from jmpx._policies.maps import PolicyMap
from jmpx._policies.modules import call_marked
from jmpx._policies.places import where


def by_operations(
    fn: Callable[..., PyTree], args: tuple[PyTree, ...], policy_map: PolicyMap, title: str
) -> Report:
    """Returns what each module, scope and operation of a function has under autocast."""
    interpreter, found = Interpreter(policy_map), dict[str, set[str]]()

    def run(fn: Callable[..., PyTree], *args: PyTree) -> PyTree:
        return apply_policy(fn, policy_map)(*args)

    def mark(fn: Callable[..., PyTree], *args: PyTree) -> PyTree:
        with split(call_marked, (_any_module, fn, args, {}), {}) as (pure, state, given, kwargs):
            traced = core.trace(pure, (state, *given), kwargs)
            values = [Value(array, is_weak=True) for array in traced.arrays]
            interpreter.evaluate(traced.jaxpr, values, "")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _collect(core.trace(run, (fn, *args), {}, is_array_or_shape).jaxpr, found)
        core.trace(mark, (fn, *args), {}, is_array_or_shape)
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
    return Report(tables, [*texts_of(caught, policy_map), *notes])


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
    return Row((path or OUTERMOST, kind, ", ".join(labels) or "default"), fields)


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
