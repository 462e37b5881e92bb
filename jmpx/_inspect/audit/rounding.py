"""Findings: logits rounded before a loss, constants beyond float16, and casts that lose digits.

The gradient of a loss with a softmax is a difference of probabilities. If these are close, because
a model is nearly right or near its teacher, the gradient is mostly the rounding of the logits.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np

from jmpx._inspect.audit.step import AuditedStep, Key, Remedies, UntriedFinding
from jmpx._inspect.audit.values import (
    CAST,
    MOVES,
    MOVES_AND_CASTS,
    is_at_most_zero,
    multiplied,
    reaches_end,
)
from jmpx._inspect.graph import Graph, Node, Value, before, modules_of, where
from jmpx._jaxprs.equations import writer_of

KINDS = {
    **dict.fromkeys(("rounded-logits", "constant-range"), Remedies.wider),
    **dict.fromkeys(("cast-to-and-fro", "double-rounding"), Remedies.wider_makers),
    "rounded-target": None,
}

# Primitives between a product and the softmax: biases, temperatures, masks and soft-caps.
_BETWEEN = frozenset("add sub mul div neg abs tanh max min clamp select_n concatenate pad".split())
# Between the logarithm of a sigmoid and the end of its loss, which weighs and adds.
_WEIGHED = frozenset("add sub mul div neg select_n reduce_sum".split()) | MOVES_AND_CASTS
# Between an exponential and the logarithm of a loss: `log(sum(exp))` or `log(softmax + 1e-6)`.
_OF_SOFTMAX = frozenset("reduce_sum div add max clamp mul select_n abs".split())
_TIES = frozenset({"slice", "stack", "result", "join", "shard", "unshard"})
_FARTHEST = 64  # how many nodes before a logarithm are searched
_NEAREST = 4  # how many products may add up to the logits; a residual stream has more

_FLOAT16 = np.dtype(np.float16)
_LARGEST, _SMALLEST = 65504.0, 2.0**-24  # of float16
_MANY = 2**20  # larger constants are not searched
# Primitives whose results may hold a constant among other numbers.
_CHOICES = frozenset({"select_n", "pad", "concatenate", "max", "min", "clamp", "neg"})
_ARITHMETIC = frozenset({"add", "sub", "mul", "div", "pow", "rem"})


def search(step: AuditedStep) -> Iterator[UntriedFinding]:
    """Yields the findings of `KINDS`."""
    if step.graph.program.has_backward:
        yield from _logits(step)
    for node in step.streams.forward:
        if node.results and node.results[0].dtype == _FLOAT16:
            yield from _constant(step, node)
        if node.name == CAST and node not in step.explained:
            yield from _target(step, node)
            yield from _casts(step, node)


# --- Logits ---


def _logits(step: AuditedStep) -> Iterator[UntriedFinding]:
    """Yields a finding for each product whose rounded results are the logits of a loss.

    It explains the operations between these products and the logarithms of the losses.
    """
    rounded: dict[Node, tuple[np.dtype, str]] = {}
    for node in step.streams.forward:
        if node.name == "log1p" and _is_weighed(node) or node.name == "log" and reaches_end(node):
            through = lambda each: _through(each, _OF_SOFTMAX)  # noqa: E731
            behind = Graph.back(node.operands[:1], through, _FARTHEST)
            exponentials = (each for each in behind if each.name == "exp")
            for exponential in (e for e in exponentials if is_at_most_zero(e.operands[0])):
                products, between = _rounded(exponential.operands[0])
                function = "softmax" if node.name == "log" else "sigmoid"
                rounded.update((each, (dtype, function)) for each, dtype in products)
                if products:
                    step.explained.update((node, exponential, *between))
    step.explained.update(rounded)
    sizes = Counter[Key]()  # a product and its backward ones have the same key
    for node in step.graph.nodes if rounded else ():
        if node.is_product:
            sizes[step.key(node)] += node.flops
    for product, (dtype, function) in rounded.items():
        text = (
            f"Logits are rounded to {dtype.name} before the {function} of a loss: its gradient is "
            "a difference of probabilities, which may be smaller than what the rounding changes."
        )
        remedy, size = _remedy_for_logits(step, product, dtype), sizes.pop(step.key(product), 0)
        yield step.found("rounded-logits", "high", product, text, *remedy, flops=size)


def _is_weighed(node: Node) -> bool:
    """Whether a result reaches the end of a loss through weights and sums alone."""

    def through(node: Node) -> list[Value]:
        return node.results if node.name in _WEIGHED and not node.is_backward else []

    readers = Graph.forward(node.results, through)
    return any(value.is_output for each in readers for value in through(each))


def _through(node: Node, names: frozenset[str]) -> Sequence[Value]:
    """Returns the operands of a node to follow, if it is a move or has one of these names."""
    if node.is_structure:
        return node.operands if node.name in _TIES else ()
    if node.name in MOVES or node.is_view:
        return node.operands[:1]
    return node.operands[node.name == "select_n" :] if node.name in names else ()


def _rounded(value: Value) -> tuple[list[tuple[Node, np.dtype]], list[Node]]:
    """Returns the products before a value with the dtypes that round them, and nodes between."""
    found, between = list[tuple[Node, np.dtype]](), list[Node]()
    pending: list[tuple[Value, np.dtype | None]] = [(value, None)]
    seen: set[Value] = set()
    while pending and len(found) < _NEAREST:
        each, low = pending.pop(0)
        low = each.dtype if each.is_low else low
        node = each.node
        if node is None or each in seen:
            continue
        seen.add(each)
        if not node.is_product:
            between.append(node)
            pending += [(operand, low) for operand in _through(node, _BETWEEN)]
        elif low is not None:
            found.append((node, low))
    return found, between


def _remedy_for_logits(step: AuditedStep, product: Node, dtype: np.dtype) -> Iterator[str]:
    """Yields advice on code that keeps logits in float32, then a rule that does the same."""
    is_matrix_product = product.name == "dot_general" and dtype.name in multiplied(product)
    policy = "product=float32" if is_matrix_product else "compute=float32,output=float32"
    selector, module = product.selector, product.module
    is_autocast = step.graph.program.uses_autocast
    # A rule for a module that holds other modules would select these, too.
    scopes = {node.scope for node in step.graph.nodes} if module is not None else ()
    has_parts = any(module in modules_of(s) and where(s).module != module for s in scopes)
    is_selected = selector is not None and (is_autocast if module is None else not has_parts)
    if is_autocast:
        yield f"jax.named_scope around the product, and a rule for the scope with {policy}"
    else:
        yield "preferred_element_type=jnp.float32 in the product, and no cast to 16 bits behind it"
    if is_autocast and module is not None:
        # Linen's `embed.attend`: a rule for `embed` would widen its lookups, and what reads them.
        own = module.path.rpartition("/")[2] + "."
        names = (name for name in product.scope.split("/") if name.startswith(own))
        yield from (f"*/{module.path}.{name.removeprefix(own)}: {policy}" for name in names)
    if is_selected:
        yield f"{selector}: {policy}"


# --- Constants ---


def _constant(step: AuditedStep, node: Node) -> Iterator[UntriedFinding]:
    """Yields a finding about a number that is infinite or 0 in float16."""
    is_cast = node.name == CAST and node.operands[0].is_wide
    number = _beyond(node.operands[0]) if is_cast else _lost_literal(node)
    # Code that tests whether a number is finite replaces it, as autocast does.
    if number is None or any(each.name == "is_finite" for each in node.results[0].readers):
        return
    what = f"The constant {number:g} is" if is_cast else "A number became"
    is_large = abs(number) > 1
    became, limit = ("inf", "largest is 65504") if is_large else ("0", "smallest is 6e-8")
    text = f"{what} {'-' * (number < -1)}{became} in float16, whose {limit}."
    advice = "use a number that float16 holds: jnp.finfo(x.dtype).min in a mask, an epsilon of 1e-4"
    nbytes = node.times * node.results[0].nbytes
    yield step.found("constant-range", "high", node, text, advice, nbytes=nbytes)


def _beyond(value: Value, depth: int = 8) -> float | None:
    """Returns a number in a constant that is inf or 0 in float16; None if there is none."""
    node = value.node
    if value.kind in ("literal", "const"):
        return _beyond_numbers(value.numbers) if value.size <= _MANY else None
    if node is None or depth == 0:
        return None
    operands = node.operands if node.name in _CHOICES else []
    if node.name in MOVES_AND_CASTS:
        operands = node.operands[:1]
    is_mul = node.name == "mul"
    if is_mul:  # of a mask of ones and a number
        left, right = node.operands
        operands = [one for one, other in ((left, right), (right, left)) if _is_mask(other)]
    found = (_beyond(each, depth - 1) for each in operands if each.is_wide)
    return next((n for n in found if n is not None and (abs(n) > 1 or not is_mul)), None)


def _is_mask(value: Value) -> bool:
    """Whether an array is an argument, of booleans or integers, or 1 minus such a mask."""
    value = value.unmoved
    node = value.node
    if node is None or not (value.is_low or value.is_wide):
        return value.kind != "literal"
    return node.name == "sub" and node.operands[0].number == 1


def _beyond_numbers(numbers: np.ndarray) -> float | None:
    size = np.abs(numbers)
    # Numbers up to half a unit beyond the largest and smallest of float16 round to these.
    beyond = np.isfinite(size) & ((size >= _LARGEST + 16) | ((size > 0) & (size <= _SMALLEST / 2)))
    return float(numbers[beyond].flat[0]) if beyond.any() else None


def _lost_literal(node: Node) -> float | None:
    """Returns infinity, or 0 for an epsilon, if a Python number became that in float16.

    JAX writes Python numbers into the program in the dtype of the array. A first operand 0 is the
    start of a `sum`.
    """
    for index, value in enumerate(node.operands[:2] if node.name in _ARITHMETIC else ()):
        number = value.number if value.kind == "literal" else None
        is_added = number == 0 and index == 1 and node.name == "add"
        is_epsilon = is_added and _is_kept_from_zero(node.results[0])
        if number is not None and (np.isinf(number) or is_epsilon):
            return number
    return None


def _is_kept_from_zero(value: Value) -> bool:
    """Whether a value is divided by, or read by a logarithm or a root: an epsilon helps."""
    return any(
        reader.name in ("log", "rsqrt", "sqrt")
        or (reader.name == "div" and value is reader.operands[1])
        or (reader.name in MOVES and _is_kept_from_zero(reader.results[0]))
        for reader in value.readers
    )


# --- Targets ---


def _target(step: AuditedStep, cast: Node) -> Iterator[UntriedFinding]:
    """Yields a finding about an argument that is rounded, and only compared with a model's output.

    It explains the casts between the two.
    """
    (result,), argument, program = cast.results, before(cast.operands[0], MOVES), step.graph.program
    is_target = argument.kind == "input" and argument.is_wide and result.is_low
    if not is_target or argument.index in program.parameters:
        return
    moves = lambda node: node.results if node.name in MOVES_AND_CASTS else []  # noqa: E731
    near = list(Graph.forward([argument], moves))
    readers = [node for node in near if node.name not in MOVES_AND_CASTS]
    outputs = Graph.back([v for node in readers for v in node.operands], lambda node: node.operands)
    is_compared = {n.name for n in readers} == {"sub"} and reaches_end(cast)
    is_compared &= any(n.is_product for n in outputs)
    what = "the loss subtracts it: errors"
    for node in (each for each in readers if each.name == "sub"):
        if all(before(value, MOVES_AND_CASTS) is argument for value in node.operands):
            readers, is_compared = [node], True  # distances of positions
            what = "its numbers are subtracted from each other: differences"
    # A step subtracts the change of a parameter from the parameter itself.
    if not is_compared or not {*readers}.isdisjoint(argument.readers):
        return
    step.explained.update(near)
    name, share = program.names[argument.index], float(jnp.finfo(result.dtype).eps) / 2
    text = (
        f"The argument `{name}` is rounded to {result.dtype.name} before {what} below {share:.2%} "
        "of its numbers are lost."
    )
    advice = f"no cast of `{name}` to 16 bits: by=operations in the policy makes none"
    yield step.found("rounded-target", "medium", readers[0], text, advice, nbytes=result.nbytes)


# --- Casts ---


def _casts(step: AuditedStep, node: Node) -> Iterator[UntriedFinding]:
    """Yields a finding about a cast of a value that another cast made."""
    (source,), (result,), graph = node.operands, node.results, step.graph
    nbytes = node.times * result.nbytes
    maker = before(source, MOVES).node
    earlier = maker if maker is not None and maker.name == CAST else None
    first = source if earlier is None else earlier.operands[0]
    stored = source if source.is_low else first
    if result.is_low and stored.is_low and stored.dtype != result.dtype:
        origin = before(stored, MOVES)
        is_argument = origin.kind == "input"
        name = f"argument `{graph.program.names[origin.index]}`" if is_argument else "value"
        text = f"A {stored.dtype.name} {name} is cast to {result.dtype.name}: it is rounded twice."
        advice = "cast once, from float32, or use one 16-bit dtype"
        yield step.found("double-rounding", "medium", node, text, advice, nbytes=nbytes)
        return
    is_back = first.is_wide and source.is_low and result.is_wide
    if earlier is None or not is_back or step.streams.is_of_leak(result):
        return
    if not _is_meant(graph, node, earlier):
        # What a policy or one of its rules rounds is asked for.
        severity = "low" if writer_of(earlier.eqn) == "jmpx" else "medium"
        names = " to ".join(value.dtype.name for value in (first, source, result))
        text = f"A value is cast from {names}, with nothing between: its digits are lost."
        advice = f"read the {first.dtype.name} value, or leave out the cast back"
        yield step.found("cast-to-and-fro", severity, node, text, advice, nbytes=nbytes)


def _is_meant(graph: Graph, node: Node, earlier: Node) -> bool:
    """Whether a float32 value is rounded to 16 bits on purpose before it is cast up again."""
    summed = earlier.operands[0]
    if summed.node is not None and summed.node.name in ("div", "mul"):  # a mean
        summed = summed.node.operands[0]
    sums = ("reduce_", "cum")
    maker, readers = before(summed, MOVES).node, node.results[0].readers
    # jnp.sum and jnp.mean add 16-bit numbers in float32, and round the result.
    if maker is not None and maker.name.startswith(sums):
        return True
    if all(reader.name.startswith(sums) for reader in readers):
        return True
    if all(map(_is_rounded_lookup, readers)):  # gathers whose gradients jmpx sums in float32
        return True
    half = earlier.results[0].dtype.name
    if all(reader.is_product and half in multiplied(reader) for reader in readers):
        return True  # the products round it, by `product=f32`
    # A value that is not only widened is rounded for operations of 16 bits, too.
    if graph.program.uses_autocast or not _is_only_widened(earlier.results[0]):
        return True
    return not graph.policy(node) and earlier.user_call == node.user_call


def _is_rounded_lookup(node: Node) -> bool:
    """Whether a node picks rows that are cast to 16 bits before anything else reads them."""
    if node.name not in ("gather", "dynamic_slice"):
        return False
    readers = [reader for reader in node.results[0].readers if not reader.is_backward]
    return all(reader.name == CAST and reader.results[0].is_low for reader in readers)


def _is_only_widened(value: Value) -> bool:
    """Whether all readers of a 16-bit value in the forward pass cast it up."""
    return all(
        reader.is_backward
        or (reader.name == CAST and reader.results[0].is_wide)
        or (reader.name in MOVES and _is_only_widened(reader.results[0]))
        for reader in value.readers
    )
