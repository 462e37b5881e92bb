"""The audit as users call it: it runs the searches for findings, and tries rules against them."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Never, TypeAlias

import numpy as np

from jmpx._inspect.audit import hardware, hazards, leaks, rounding, summary
from jmpx._inspect.audit.report import SEVERITIES, Audit, Finding, alike_groups, common
from jmpx._inspect.audit.step import AuditedStep, Remedies, UntriedFinding
from jmpx._inspect.audit.trying import Trial, before_products
from jmpx._inspect.audit.values import MOVES_AND_CASTS, is_half_product
from jmpx._inspect.graph import WIDE, Graph, modules_of
from jmpx._inspect.programs import traced_program
from jmpx._inspect.text import bytes_text, refuse_arguments, starred
from jmpx._jaxprs.equations import Place
from jmpx._policies.map_strings import parse_rule
from jmpx._policies.maps import Rule

# Each file has `search` and `KINDS`: the names of kinds, which are public, and methods that return
# rules that may fix a finding. `rounding` runs first: the others skip what it explains.
_SEARCHES = (rounding, leaks, hazards, hardware)
KINDS = {name: rules for each in _SEARCHES for name, rules in each.KINDS.items()}
_MOST = 12  # rules that are tried in one audit; each is one more trace

_PLATFORMS = {"cpu": "cpu", "cuda": "gpu", "gpu": "gpu", "tpu": "tpu"}


def audit(
    fn: Callable[..., object], *args: Never, platform: str | None = None, run: bool = False
) -> Callable[..., Audit]:
    """Shows which operations of a train step run in which dtype, and where precision leaks.

    The function is traced, never run, so you can pass shapes. Modules of Haiku, Equinox, Linen and
    NNX appear by their paths, other code by `jax.named_scope`. Proposed rules have been tried: the
    function was traced once more with the rule in its policy maps, for at most 12 rules.

    Args:
        fn: a loss, which is differentiated in its first argument: it returns a floating scalar, or
            a tuple that begins with one. It may take gradients inside, as of an energy. Or a step
            that computes its own gradients. Any other function is audited as it is, without a
            gradient.
        *args: none: the function that is returned takes the arguments of `fn`.
        platform: `"tpu"`, `"gpu"` (or `"cuda"`) or `"cpu"`, to also find the float32 matmuls that
            this hardware would multiply in fewer bits; None skips that check. In a
            `lax.platform_dependent`, the audit follows the branch of this platform, or with None
            that of this machine.
        run: whether to run the program, on arrays. Floating shapes in the first argument are filled
            at random, up to 256 MiB. Then each rule, and each edit by which advice narrows, has the
            error that it makes; one that raises it beyond the rounding of the policy is not
            proposed. False runs nothing.

    Returns:
        A function that takes the arguments of `fn`, as arrays or `jax.ShapeDtypeStruct`s, and
        returns a `jmpx.inspect.Audit`: shares of FLOPs by dtype, bytes saved for the backward pass,
        casts, a table of modules, and findings, each with the line of your code and a rule to
        paste, or what to write there. In a test, call `report.check(...)`.

    See Also:
        `jmpx.inspect.ranges` runs the function once and measures the magnitudes of its values.

    Raises:
        TypeError: if arguments are given beside `fn`; when called, if `fn` is not callable.
        ValueError: if the platform is unknown; when called, if `fn` is a loss whose first argument
            holds no floating array, or to run it needs values: of integers, or of large shapes.

    Example:
        >>> import jax, jax.numpy as jnp, jmpx
        >>> def loss_fn(params, x):
        ...     h = x.astype(jnp.bfloat16) @ params["w"].astype(jnp.bfloat16)
        ...     return jnp.mean((h.astype(jnp.float32) @ params["head"]) ** 2)  # a leak
        >>> params = {"w": jax.ShapeDtypeStruct((64, 64), "float32"),
        ...           "head": jax.ShapeDtypeStruct((64, 8), "float32")}
        >>> report = jmpx.inspect.audit(loss_fn)(params, jax.ShapeDtypeStruct((32, 64), "float32"))
        >>> report.products[0].dtypes, report.products[0].flops
        ('bfloat16 x bfloat16', 524288)
    """
    refuse_arguments("audit", args)
    if platform is not None and platform not in _PLATFORMS:
        raise ValueError(f"Unknown platform {platform!r}: expected 'tpu', 'gpu' or 'cpu'.")

    @functools.wraps(fn, updated=(), assigned=("__name__", "__qualname__", "__module__"))
    def call(*args: object, **kwargs: object) -> Audit:
        hardware = None if platform is None else _PLATFORMS[platform]
        program = traced_program(fn, args, kwargs)
        graph = Graph(program, hardware).without_dropped()
        findings, untried = _tried(graph, hardware, run)
        return Audit(
            title=program.name + " (a step, or a loss with new parameters)" * program.is_unclear,
            is_step=not program.is_differentiated,
            platform=hardware,
            products=summary.products(graph),
            saved=summary.saved(graph),
            casts=summary.casts(graph),
            scopes=summary.scopes(graph),
            findings=findings,
            has_while=any(node.in_while for node in graph.nodes),
            uncounted=summary.uncounted(graph),
            eight_bits=summary.in_eight_bits(graph),
            untried=untried,
        )

    return call


# --- Findings ---

_Key: TypeAlias = tuple[str, Place | None, str]
_Found: TypeAlias = dict[_Key, UntriedFinding]


def _key(finding: Finding) -> _Key:
    return finding.name, finding.place, finding.scope


def _find(graph: Graph, platform: str | None) -> tuple[UntriedFinding, ...]:
    """Returns all findings in a graph, the worst first."""
    step = AuditedStep(graph, platform)
    return merged(found for each in _SEARCHES for found in each.search(step))


def merged(findings: Iterable[UntriedFinding]) -> tuple[UntriedFinding, ...]:
    """Merges findings of one name, place and scope, and sorts them by severity and size.

    A merged finding has the message and the remedies of the worst one, the first if several are.
    """
    groups: dict[_Key, list[UntriedFinding]] = {}
    for found in findings:
        groups.setdefault(_key(found.finding), []).append(found)
    result: list[UntriedFinding] = []
    for group in groups.values():
        worst = min(group, key=lambda found: SEVERITIES.index(found.finding.severity))
        finding = worst.finding.with_sizes_of(found.finding for found in group)
        nodes = [node for found in group for node in found.nodes]
        edited = [node for found in group for node in found.edited]
        result.append(worst._replace(finding=finding, nodes=nodes, edited=edited))
    return tuple(sorted(result, key=_rank))


def _rank(found: UntriedFinding) -> tuple[object, ...]:
    f = found.finding
    return SEVERITIES.index(f.severity), -f.flops, -f.nbytes, -f.count, f.name, str(f.place)


# --- Rules on trial ---


class _Seen(NamedTuple):
    """The properties in which a program under a rule is compared with the program without it."""

    findings: dict[_Key, str]  # the severities of its findings
    half: int  # the FLOPs of its products in 16 bits
    wide: int  # the bytes of the float32 that it computes before its products, in its forward pass


def _seen(graph: Graph, findings: Sequence[UntriedFinding]) -> _Seen:
    severities = {_key(each.finding): each.finding.severity for each in findings}
    half = sum(node.flops for node in graph.nodes if is_half_product(node))
    inner = (node for node in before_products(graph) if node.name not in MOVES_AND_CASTS)
    wide = sum(node.times * v.nbytes for node in inner for v in node.results if v.is_wide)
    return _Seen(severities, half, wide)


def _tried(graph: Graph, platform: str | None, run: bool) -> tuple[tuple[Finding, ...], str]:
    """Returns the findings in a graph, and why advice was not tried.

    Each has a rule that was seen to fix it, or advice. A rule fixes a finding if the program,
    traced with the rule at the end of its policy maps, has neither the finding nor a worse new one,
    and loses no FLOPs of products in 16 bits except those of the finding itself. Layers that are
    alike share a rule.
    """
    found = {_key(each.finding): each for each in _find(graph, platform)}
    groups = alike_groups(each.finding for each in found.values())
    edits = [[found[_key(each)] for each in group] for group in groups]
    trial = Trial(graph, edits) if run and groups else None
    trials, tried = _Trials(graph, platform, found, trial), dict[_Key, Finding]()
    for number, group in enumerate(groups):
        rule, advice = trials.remedy(group) if graph.program.mapped_by else ("", "{}")
        cost = trials.cost(rule)
        for each in group:
            message = each.message + cost
            new = each._replace(rule=rule, advice=advice.format(each.advice), message=message)
            tried[_key(each)] = new if trial is None else trial.told(new, number)
    findings = sorted((tried[key] for key in found), key=lambda f: SEVERITIES.index(f.severity))
    untried = "pass run=True" if trial is None else trial.reason
    return tuple(findings), untried if any(each.edited for each in found.values()) else ""


class _Trials:
    """The program, traced again under each rule once."""

    def __init__(
        self, graph: Graph, platform: str | None, found: _Found, trial: Trial | None
    ) -> None:
        self._graph, self._platform, self._found, self._trial = graph, platform, found, trial
        self._remedies, self._before = Remedies(graph), _seen(graph, list(found.values()))
        self._after: dict[Rule, _Seen | None] = {}  # None if the program cannot be traced

    def remedy(self, group: Sequence[Finding]) -> tuple[str, str]:
        """Returns the first rule that fixes a group, or "", and a sentence with `{}` for advice."""
        is_leak = group[0].name in leaks.KINDS
        own = 0 if is_leak else sum(finding.flops for finding in group)
        rank, second, refused = SEVERITIES.index(group[0].severity), "", ""
        candidates = self._common_rules(group)
        for text, rule in candidates.items():
            if not own and self._lowers_share(rule):
                continue
            if rule not in self._after and len(self._after) == _MOST:
                rest = "" if second else f"; rules for it were not tried, after {_MOST} others"
                return second, "{}" + rest
            new = self._worst_new(rule, group, own)
            if new is None or new < rank:
                continue
            if self._trial is not None and (why := self._trial.refused(rule)):
                refused = refused or f"{text} {why}: "
                continue
            if new > rank:
                return text, "{}"
            # A new finding that is equally bad has its own rule: a norm in float32, then a layer.
            second = second or text
        is_lost = bool(candidates) and not second
        lost = refused or "no rule that keeps 16-bit matmuls fixes it: "
        return second, f"{lost * is_lost}{{}}"

    def _lowers_share(self, rule: Rule) -> bool:
        """Whether a rule certainly puts some of the 16-bit products into float32."""
        if rule.compute is None or rule.matmul or np.dtype(rule.compute) not in WIDE:
            return False
        halves = {node.scope for node in self._graph.nodes if is_half_product(node)}
        return any(rule.matches(*module) for scope in halves for module in modules_of(scope))

    def cost(self, text: str) -> str:
        """Returns a sentence about activations that a rule with `product=` widens, if it does."""
        rule = parse_rule(text) if text else None
        after = None if rule is None or rule.product is None else self._after[rule]
        more = 0 if after is None else after.wide - self._before.wide
        return f" The rule widens {bytes_text(more)} of other activations, too." if more > 0 else ""

    def _common_rules(self, group: Sequence[Finding]) -> dict[str, Rule]:
        """Returns the rules that apply to a whole group of layers that are alike."""
        columns = zip(*map(self._rules, group), strict=False)
        alike = [column for column in columns if len(set(map(starred, column))) == 1]
        return {text: parse_rule(text) for text in map(common, alike)}

    def _rules(self, finding: Finding) -> list[str]:
        """Returns the rules that may fix a finding, except those for an outermost module."""
        found = self._found[_key(finding)]
        rules = KINDS[finding.name]
        tried = rules(self._remedies, found.nodes) if rules else ()
        texts = dict.fromkeys((*found.rules, *tried))
        return [text for text in texts if not self._graph.selects_all(parse_rule(text))]

    def _worst_new(self, rule: Rule, group: Sequence[Finding], own: int) -> int | None:
        """Returns the rank of the worst new finding under a rule; None if the rule fixes nothing.

        Ranks are indices of `SEVERITIES`, whose length stands for no new finding.
        """
        if rule not in self._after:
            self._after[rule] = self._traced(rule)
        old, after = self._before, self._after[rule]
        if after is None or after.half < old.half - own:
            return None
        if any(_key(finding) in after.findings for finding in group):
            return None
        new = [after.findings[key] for key in after.findings if key not in old.findings]
        return min(map(SEVERITIES.index, new), default=len(SEVERITIES))

    def _traced(self, rule: Rule) -> _Seen | None:
        try:
            program = self._graph.program.with_rules(rule)
        except Exception:  # such as JAX's for a loop whose carry would change its dtype
            return None
        graph = Graph(program, self._platform).without_dropped()
        return _seen(graph, _find(graph, self._platform))
