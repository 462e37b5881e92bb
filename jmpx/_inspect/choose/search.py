"""Searches for a small set of parts that rules put into float32, so that a bound holds."""

import collections
import contextlib
import dataclasses
import math
import re
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jmpx._adapters.applying import apply_policy
from jmpx._autocast.rules import PRODUCTS
from jmpx._base.contexts import RUN, SHOWN
from jmpx._base.trees import PyTree
from jmpx._inspect.audit.summary import in_eight_bits
from jmpx._inspect.blame.api import Lines, nodes_of, runs_of, selects
from jmpx._inspect.blame.runs import Measure, Runs, costs, size_of
from jmpx._inspect.first_nonfinite.api import found_in
from jmpx._inspect.graph import Graph, Node, selector, where
from jmpx._inspect.programs import Program, traced_program
from jmpx._inspect.running import Advance, relative_error
from jmpx._policies.map_strings import get_policy_map
from jmpx._policies.maps import PolicyMap, PolicyMapLike, Rule

_MOST = 24  # islands; with more, layers that are alike are one
_OWN = 0.5  # the least part of its error that an island has outside of islands inside of it
_CAST = "convert_element_type"  # no rule changes an equation that only casts
_TRIED = 8  # how many islands are tried, those with the largest shares, to take the best one
_MARGIN = 0.02  # the least part of the squared error that an island removes
_TINY = 1e-30  # stands for a squared error of 0
_WIDEST = 4  # how many layers, or groups of layers that are alike, are tried in 8 bits
_AGAIN = 2  # how many more searches, with a tighter bound, if a string is worse than its mask
_PROMOTED = 0.9  # the part of its mask's error below which a string rounds less than the mask
_SETS = 4  # strings with none to all of the rules; with float32 and others, some ten


# --- Islands ---


@dataclasses.dataclass(frozen=True, eq=False)
class Island:
    """The sites that a rule with a selector would put into float32.

    Attributes:
        selector: the selector: a class, a glob of paths or scopes, or an operation.
        sites: booleans of shape (sites,), in the order of the program's points.
        own: the numbers of its sites that are in no island inside of it.
    """

    selector: str
    sites: np.ndarray
    own: tuple[int, ...]

    @property
    def is_operation(self) -> bool:
        """Whether it is all equations of one operation, wherever they are."""
        return self.selector.startswith("op.")


class Sites:
    """The sites of a program that round, and the islands among them.

    Args:
        graph: the program.
        nodes: the node of each site.
        policy_map: the policy map under which it was traced.
    """

    def __init__(self, graph: Graph, nodes: Sequence[Node], policy_map: PolicyMap) -> None:
        self.nodes, self.outermost = nodes, graph.outermost
        self.by_operations = policy_map.way == "operations"

    def islands(self) -> list[Island]:
        """Returns the islands, operations last.

        Modules and scopes are named by their paths; if these are too many, by paths with `*` for
        numbers; else by classes and last names. Sites outside of them, or in an outermost module,
        whose rule would select the whole model, are in the islands of their operations.
        """
        names = list[str | None]()
        for name in (selector, _alike, _broad):
            names = [self._named(name, node.scope) for node in self.nodes]
            if len(set(names) - {None}) <= _MOST:
                break
        own: dict[str, list[int]] = {}
        for number, (name, node) in enumerate(zip(names, self.nodes, strict=True)):
            own.setdefault(name or f"op.{node.name}", []).append(number)
        scopes = dict.fromkeys(filter(None, names))
        found = [Island(name, self.selected(name), tuple(own[name])) for name in scopes]
        operations = dict.fromkeys(node.name for node in self.nodes if node.name != _CAST)
        for name in operations if self.by_operations else ():
            sites = np.array([node.name == name for node in self.nodes])
            found.append(Island(f"op.{name}", sites, tuple(own.get(f"op.{name}", ()))))
        return found

    def selected(self, select: str) -> np.ndarray:
        """Returns the sites that a rule for a module or scope selects, inner ones included."""
        rule, scopes = Rule(select), {node.scope for node in self.nodes}
        known = {scope: selects(rule, scope, self.by_operations) for scope in scopes}
        return np.array([known[node.scope] for node in self.nodes], bool)

    def shortened(self, selectors: Sequence[str]) -> list[str]:
        """Replaces selectors of modules and scopes by fewer ones that select the same sites."""
        kept = list(selectors)
        wider = [self._named(name, node.scope) for name in (_alike, _broad) for node in self.nodes]
        for wide in dict.fromkeys(filter(None, wider)):
            sites = self.selected(wide)
            parts = {each: self.selected(each) for each in kept}
            inside = [each for each, part in parts.items() if part.any() and (part <= sites).all()]
            if len(inside) > 1 and not (sites & ~np.any([parts[each] for each in inside], 0)).any():
                kept[kept.index(inside[0])] = wide
                kept = [each for each in kept if each not in inside]
        return kept

    def _named(self, name: Callable[[str], str | None], scope: str) -> str | None:
        module = where(scope).module
        if module in self.outermost or (module is None and not self.by_operations):
            return None
        return name(scope)


def _alike(scope: str) -> str | None:
    """Returns the selector of a scope and of all scopes that differ from it in numbers alone."""
    return re.sub(r"\d+(?=/|$)", "*", selector(scope) or "") or None


def _broad(scope: str) -> str | None:
    """Returns the class of a scope's module, or the last name of a scope outside of modules."""
    module, select = where(scope).module, _alike(scope)
    if select is None or module is not None:
        return select if module is None else module.cls.__name__
    return f"*/{select.rpartition('/')[2]}"


# --- The search ---


class IslandSearch:
    """Sets of islands, tried on all batches.

    Args:
        program: the program.
        runs: its runs.
        base: the policy map under which it was traced.
        seed: seeds the measurement of costs.
        done: called after each set that is tried.
    """

    def __init__(
        self, program: Program, runs: Runs, base: PolicyMap, seed: int, done: Advance
    ) -> None:
        graph = Graph(program)
        self.runs, self.done = runs, done
        self.sites = Sites(graph, nodes_of(graph, runs.points), base)
        shares = self._shares(seed)
        self.islands = sorted(shares, key=lambda island: (island.is_operation, -shares[island]))
        self.order = list(range(len(self.islands)))
        # How many operands of products, and numbers in all, each island puts into float32.
        points = runs.points.at.values()
        operands = np.array([size_of([p for p in each if p.is_operand]) for each in points])
        numbers = np.array([size_of(each) for each in points])
        self.sizes = [(operands[i.sites].sum(), numbers[i.sites].sum()) for i in self.islands]
        self._known: dict[frozenset[int], np.ndarray] = {}

    def _shares(self, seed: int) -> dict[Island, float]:
        """Returns the islands to try, and the part of each in the squared error.

        Their own sites make half of their error or more.
        """
        islands = self.sites.islands()
        others = [*{*range(len(self.sites.nodes))}.difference(*(island.own for island in islands))]
        # With the sites that no rule selects as a group, shares add up, and need no measurements.
        relative = dataclasses.replace(self.runs, measure=relative_error)
        found = costs(relative, [*(island.own for island in islands), others], seed, self.done)
        if not math.isfinite(found.squared):  # There are no estimates of what islands cost.
            return dict.fromkeys(islands, 0.0)

        def is_worthwhile(island: Island) -> bool:
            own, whole = (found.sites[each].sum() for each in ([*island.own], island.sites))
            return island.is_operation or own >= _OWN * whole

        parts = zip(islands, map(float, found.parts), strict=False)
        return {island: part for island, part in parts if is_worthwhile(island)}

    def squares(self, chosen: Iterable[int]) -> np.ndarray:
        """Returns the squared error of each batch where all but the chosen islands round."""
        key = frozenset(chosen)
        if key not in self._known:
            mask = np.ones(len(self.runs.points.order), bool)
            for number in key:
                mask &= ~self.islands[number].sites
            self._known[key] = self.runs.squares(mask)
            self.done()
        return self._known[key]

    def error(self, chosen: Iterable[int]) -> float:
        """Returns the root mean square of the error where all but the chosen islands round."""
        return math.sqrt(float(np.mean(self.squares(chosen))))

    def selectors(self, chosen: Iterable[int]) -> list[str]:
        """Returns selectors of islands, as few as select the same."""
        return self.sites.shortened([self.islands[number].selector for number in chosen])

    def find(self, bound: float) -> tuple[int, ...]:
        """Returns islands that hold a bound, the one that removes most of the error first.

        An island that lowers the error by no more than chance is left out if others hold the bound,
        too. If no set holds it, all islands that lower the error by more are returned.
        """
        useless = set[int]()
        chosen = self._holding(bound, useless)
        while idle := [i for i in chosen if not self._earns(i, chosen)]:
            worst = min(idle, key=lambda i: self.error(set(chosen) - {i}))
            others = self._holding(bound, useless | {worst})
            is_held = self.error(chosen) <= bound
            if is_held and (self.error(others) > bound or len(others) > len(chosen)):
                break
            useless.add(worst)
            chosen = others
        return tuple(chosen)

    def _holding(self, bound: float, useless: Container[int]) -> list[int]:
        """Returns islands that hold a bound and are all needed; all islands if no set holds it."""
        chosen = list[int]()
        while self.error(chosen) > bound:
            left = [i for i in self.order if i not in chosen and i not in useless]
            scopes = [i for i in left if not self.islands[i].is_operation]
            tried = (scopes or left)[:_TRIED]  # operations once no module or scope is left
            if not tried:
                return chosen
            chosen.append(min(tried, key=lambda i: self._merit(chosen, i, bound)))
        for number in sorted(chosen, key=lambda i: self.error(set(chosen) - {i})):
            if self.error(set(chosen) - {number}) <= bound:
                chosen.remove(number)
        return chosen

    def _merit(self, chosen: Sequence[int], number: int, bound: float) -> tuple[float, ...]:
        """Returns a key that sorts candidates: the smallest that holds the bound comes first.

        If none does, the one that removes most of the error comes first.
        """
        error = self.error([*chosen, number])
        return (0, *self.sizes[number]) if error <= bound else (1, error)

    def _earns(self, number: int, chosen: Sequence[int]) -> bool:
        """Whether an island of a set lowers the error by a margin, and by more than chance."""
        before, after = self.squares(set(chosen) - {number}), self.squares(chosen)
        is_finite = np.isfinite(before) & np.isfinite(after)
        if not is_finite.all():
            return bool(np.isfinite(after).sum() > np.isfinite(before).sum())
        gains = np.log(np.maximum(before, _TINY) / np.maximum(after, _TINY))
        noise = gains.std(ddof=1) / math.sqrt(len(gains)) if len(gains) > 1 else 0.0
        return bool(gains.mean() > max(_MARGIN, noise))


# --- Policy strings ---


def _widest(graph: Graph) -> list[str]:
    """Returns selectors of layers that are alike, those with the most FLOPs first."""
    flops = collections.Counter[str]()
    for node in graph.nodes:
        name = None if node.module in graph.outermost else _alike(node.scope)
        if name and node.is_product:
            flops[name] += node.flops
    return [name for name, _ in flops.most_common()]


class LeftOut(NamedTuple):
    """A policy string that is no candidate."""

    policy: str
    mark: str  # in a word or two, for a table
    why: str  # the end of a sentence, without its full stop


@dataclasses.dataclass(frozen=True, eq=False)
class Strings:
    """Policy strings, and the errors of the strings that were run as they are written."""

    func: Callable[..., PyTree]
    batches: Sequence[tuple[PyTree, ...]]  # its arguments, as they were given
    program: Program  # the function under the given policy
    runs: Runs  # the runs of this program
    base: PolicyMap  # the policy that was given
    given: str  # its string
    what: str  # whose error it is
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    left_out: dict[str, LeftOut] = dataclasses.field(default_factory=dict)
    in_eight_bits: set[str] = dataclasses.field(default_factory=set)  # what `find_eight_bits` tried

    @property
    def wide(self) -> str:
        """The string of float32."""
        return f"by={self.base.by},f32" if self.base.by else "f32"

    def error(self, text: str) -> float:
        """Returns the root mean square of the error under a policy string, and keeps it.

        It is infinite if results are not finite, or if JAX refuses the function under the string.
        """
        if text not in self.errors:
            self.errors[text] = math.inf
            with self._refusals(text):
                runs = runs_of(self._traced(text), self.runs.batches, self.runs.measure, False)
                self.errors[text] = math.sqrt(runs.squares().mean()) if runs.points.at else 0.0
            if math.isinf(self.errors[text]):
                why = f"the {self.what} are not finite"
                self.left_out.setdefault(text, LeftOut(text, "not finite", why))
        return self.errors[text]

    def fails(self, text: str) -> bool:
        """Whether the function is refused as it is traced under a string."""
        if text not in self.errors:
            with self._refusals(text):
                self._traced(text)
        return text not in self.errors and text in self.left_out

    @contextlib.contextmanager
    def _refusals(self, text: str) -> Iterator[None]:
        """Notes errors under a string, of JAX, of a framework, or of the function."""
        try:
            yield
        except Exception as error:
            first = next(iter(str(error).splitlines()), "").rstrip(".:") or type(error).__name__
            self.left_out[text] = LeftOut(text, "refused", f"it is refused: {first}")

    def _traced(
        self, text: str, purpose: str = RUN, batch: tuple[PyTree, ...] | None = None
    ) -> Program:
        applied = apply_policy(self.func, text)
        with warnings.catch_warnings():
            # The trace under the user's policy has given each warning. Others would concern only
            # strings on trial, such as `save=products` in a function with a `jax.checkpoint`.
            warnings.simplefilter("ignore")
            batch = self.batches[0] if batch is None else batch
            return traced_program(applied, batch, None, self.program.is_differentiated, purpose)

    def gradient(self, policy: PolicyMapLike) -> tuple[Callable[..., PyTree], PyTree]:
        """Returns the function or its gradient as a step under a policy, and its shapes."""
        return self._traced(str(policy), SHOWN).as_step()

    def with_measure(self, measure: Measure) -> "Strings":
        """Returns the strings with a measure, and with the program of the given one.

        In a program without scopes, lines are scopes.
        """
        func, names = self.func, (node.path for node in Graph(self.program).nodes)
        if self.base.way == "operations" and not any(names):
            func = Lines(func)
        strings = dataclasses.replace(self, func=func)
        program = strings._traced(self.given)
        runs = runs_of(program, self.runs.batches, measure)
        return dataclasses.replace(strings, program=program, runs=runs)

    def edits(self, texts: Iterable[str]) -> Iterator[str]:
        """Yields sentences about the lines that rules of some strings select."""
        places = self.func.places if isinstance(self.func, Lines) else {}
        rules = {rule for text in texts for rule in get_policy_map(text).rules}
        for name, place in places.items():
            if any(rule.matches_scope(name) for rule in rules):
                yield (
                    f"{name}: the line {place}, which rules select once it is written in `with "
                    f'jax.named_scope("{name}"):`.'
                )

    def without_overflow(self) -> "Strings":
        """Returns the strings with rules of `first_nonfinite` in the given one, if it overflows."""
        if math.isfinite(self.error(self.given)):
            return self
        programs = (self._traced(self.given, batch=batch) for batch in self.batches)
        found = next(filter(None, map(found_in, programs)), None)
        if found is None:
            return self
        why = f"the {self.what} are not finite, first by {found.operation} at {found.place}"
        text = f"{self.given}; {found.rule}"
        part, colon, _ = found.rule.partition(": ")  # there is none in a loss scale
        is_taken = bool(colon) and found.rule not in self.given and not self.fails(text)
        is_taken &= part.removeprefix("op.") not in PRODUCTS
        why += f"; first_nonfinite adds {found.rule!r}" * is_taken
        self.left_out[self.given] = LeftOut(self.given, "not finite", why)
        if not is_taken:
            return self
        mended = dataclasses.replace(self, base=get_policy_map(text), given=text)
        return mended.with_measure(self.runs.measure).without_overflow()

    def find(self, bound: float, seed: int, done: Advance) -> None:
        """Measures float32, the string without a rule, with a few, and with all that are needed."""
        if (error := self.error(self.wide)) > bound:
            found = self.left_out.get(self.wide)
            itself = f"is off by {error:.1e}" if found is None else f"is left out, as {found.why}"
            raise ValueError(
                f"Expected an error= that float32 can hold, got {bound:g}, where float32 itself "
                f"{itself}: give a larger one."
            )
        written = self.given
        if self.error(written) > bound:
            search = IslandSearch(self.program, self.runs, self.base, seed, done)
            written = self._searched(search, bound)
        if self.error(written) <= bound and self.base.save is None:
            # Without rules, too, to see what they cost.
            for text in filter(lambda text: self.error(text) < math.inf, (self.given, written)):
                default, *rules = text.split(";", 1)
                if ":" in default:  # a rule: there is no default part
                    default, rules = "full", [f" {text}"]
                self.error(";".join([f"{default},save=products", *rules]))

    def find_eight_bits(self, bound: float) -> None:
        """Measures strings whose widest layers multiply in 8 bits, until one misses the bound."""
        held = [text for text, error in self.errors.items() if error <= bound and text != self.wide]
        if not held or self.base.way != "operations":
            return
        text = held[-1]
        for select in _widest(Graph(self._traced(text)))[:_WIDEST]:
            wider = f"{text}; {select}: m=fp8"
            products = () if self.fails(wider) else in_eight_bits(Graph(self._traced(wider)))
            if all(each.why for each in products):
                continue  # it is refused, none of its sizes suit, or it is in float32
            self.in_eight_bits.add(wider)
            if self.error(wider) > bound:
                break
            text = wider

    def _searched(self, search: IslandSearch, bound: float) -> str:
        """Measures strings with some rules and with all that a bound needs; returns the last."""

        def text(numbers: Sequence[int], policy: str = "full") -> str:
            rules = (f"{selector}: {policy}" for selector in search.selectors(numbers))
            return "; ".join([self.given, *rules])

        chosen = search.find(bound)
        while self.fails(text(chosen)):
            out = [number for number in chosen if self.fails(text([number]))] or chosen
            search.order = [number for number in search.order if number not in out]
            chosen = search.find(bound)
        for count in sorted({*np.linspace(0, len(chosen), _SETS, dtype=int).tolist()}):
            self.error(text(chosen[:count]))
        for _ in range(_AGAIN):
            if not self.error(text(chosen)) > bound >= search.error(chosen):
                break
            # The policy is worse than its mask: search with a bound that is smaller by as much.
            chosen = search.find(bound * search.error(chosen) / self.error(text(chosen)))
        for number in reversed(chosen):
            # A rule promotes what reads its results, too, so that another one may be idle.
            if self.error(text(chosen)) > _PROMOTED * search.error(chosen):
                break
            fewer = [each for each in chosen if each != number]
            chosen = fewer if self.error(text(fewer)) <= bound else chosen
        if self.error(text(chosen)) > bound and self.base.way == "modules":
            self.error(text(chosen, "c=f32,o=f32"))
            return text(chosen, "c=f32,o=f32")
        return text(chosen)
