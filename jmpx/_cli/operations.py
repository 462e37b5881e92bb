"""What each module, scope and operation of a function has under autocast, for `--model`."""

from collections.abc import Callable, Iterable, Iterator

from jmpx._autocast.interpreter import Interpreter
from jmpx._autocast.regions import Regions
from jmpx._autocast.value import Value
from jmpx._base.leaves import PyTree, is_floating_dtype
from jmpx._base.stateful import split
from jmpx._cli.made import Call, trace
from jmpx._cli.tables import Row, table
from jmpx._inspect.programs import trace_shapes
from jmpx._jaxprs import core
from jmpx._jaxprs.inner import all_equations
from jmpx._jaxprs.marks import is_own_name, module_of
from jmpx._jaxprs.scopes import FULL_PRECISION
from jmpx._policies.maps import PolicyMap
from jmpx._policies.modules import call_marked
from jmpx._policies.places import where


def by_operations(call: Call, policy_map: PolicyMap) -> list[str]:
    """Returns what each module, scope and operation of a function has under autocast."""
    regions, scopes = _regions_and_scopes(call, policy_map)
    found: dict[str, set[str]] = {}
    for eqn in all_equations(trace(call, policy_map).jaxpr):
        dtypes = {atom.aval.dtype for atom in eqn.invars if hasattr(atom.aval, "dtype")}
        floating = {dtype.name for dtype in dtypes if is_floating_dtype(dtype)}
        name = core.operation_name(eqn.primitive.name)
        is_cast = name in ("convert_element_type", "reduce_precision")
        if floating and not is_cast and not core.holds_jaxpr(eqn.params):
            found.setdefault(name, set()).update(floating)
    rules = [rule for rule in policy_map.rules if rule.is_operation]
    labels = {rule.selector.removeprefix("op."): rule.label for rule in rules}
    operations = [
        Row((name, labels.get(name, ""), " ".join(sorted(found[name]))), {})
        for name in sorted(found)
    ]
    return [
        *("", "by operations, under autocast:"),
        *table(("scope", "class", "rule"), _rows_of_scopes(scopes, regions)),
        *("", "its operations:", *table(("operation", "rule", "runs in"), operations)),
    ]


def _regions_and_scopes(call: Call, policy_map: PolicyMap) -> tuple[Regions, Iterable[str]]:
    """Returns the regions of autocast and the scopes that they were asked for."""
    interpreter = Interpreter(policy_map)

    def mark(fn: Callable[..., PyTree], *args: PyTree) -> PyTree:
        with split(call_marked, (_any_module, fn, args, {}), {}) as (pure, state, given, kwargs):
            traced = core.trace(pure, (state, *given), kwargs)
            values = [Value(array, is_weak=True) for array in traced.arrays]
            interpreter.evaluate(traced.jaxpr, values, "")

    fn, args = call
    trace_shapes(mark, (fn, *args), {})
    return interpreter.regions, interpreter.used.scopes


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
    return Row((path or "(outermost)", kind, ", ".join(labels) or "default"), fields)
