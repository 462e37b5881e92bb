"""What searches ask of values and nodes: where numbers are from, and what 16 bits keep of them."""

import functools
from collections import Counter
from collections.abc import Collection

import jax.numpy as jnp
import numpy as np

from jmpx._inspect.audit.flops import is_product
from jmpx._inspect.graph import Graph, Node, Value
from jmpx._jaxprs.equations import IDENTITIES, PICKS, PLACEMENTS, RESHAPES, ROUNDINGS, call_of
from jmpx._policies.strings import get_policy

LOW = frozenset(map(np.dtype, (jnp.float16, jnp.bfloat16)))
WIDE = frozenset(map(np.dtype, (jnp.float32, jnp.float64)))
AUTOCAST = "jmpx.autocast"  # as it stands among the functions that take a policy map
CAST = "convert_element_type"

# What moves numbers of its first operand, each on its own: what joins operands, or the parts of
# several devices, is an operation that the user wrote, and no part of another one.
MOVES = IDENTITIES | PLACEMENTS | RESHAPES | PICKS | {"stack", "result", "shard", "unshard"}
MOVES_AND_CASTS = MOVES | {CAST}
# What returns all numbers of its operand. A barrier has a result for each of several operands.
_VIEWS = (IDENTITIES - {"optimization_barrier"}) | PLACEMENTS | RESHAPES | ROUNDINGS


def is_low(value: Value) -> bool:
    """Whether a value has 16 bits."""
    return value.dtype in LOW


def largest_count(dtype: np.dtype) -> int:
    """Returns up to which number a dtype holds all integers: 256 for bfloat16, 2048 for float16.

    A sum in that dtype that is as large does not change when 1 is added.
    """
    return 2 ** (int(jnp.finfo(dtype).nmant) + 1)


def digits(dtype: np.dtype) -> str:
    """Returns how many decimal digits a dtype keeps, in words."""
    return "2 to 3 digits" if dtype == jnp.bfloat16 else "3 to 4 digits"


def worst(dtype: np.dtype) -> str:
    """Returns the severity of a hazard to range in float16, and to digits in bfloat16."""
    return "high" if dtype == jnp.float16 else "medium"


def low_dtype(node: Node) -> np.dtype | None:
    """Returns the 16-bit dtype of a node's first operand that has one; None if none has."""
    return next((value.dtype for value in node.operands if is_low(value)), None)


def low_nbytes(node: Node) -> int:
    """Returns the bytes of the 16-bit operands of all runs of a node."""
    return node.times * sum(value.nbytes for value in node.operands if is_low(value))


@functools.lru_cache(maxsize=1024)
def compute_dtype(policy: str) -> np.dtype:
    """Returns the dtype in which a policy computes."""
    return np.dtype(get_policy(policy).compute_dtype)


def outermost_dtype(graph: Graph) -> np.dtype | None:
    """Returns the dtype in which the outermost policy computes; None if there is no policy."""
    return next(map(compute_dtype, filter(None, graph.program.policies.values())), None)


def half_dtype(graph: Graph) -> str:
    """Returns the name of the 16-bit dtype of a step: of most values, else of its policy."""
    values = (v.dtype.name for node in graph.nodes for v in node.results if is_low(v))
    names = Counter(values).most_common(1) or [(str(outermost_dtype(graph) or "bfloat16"), 0)]
    return names[0][0]


def before(value: Value, names: Collection[str]) -> Value:
    """Returns what a value was before the nodes of some names, through their first operands."""
    while value.node is not None and value.node.name in names:
        value = value.node.operands[0]
    return value


def is_view(node: Node) -> bool:
    """Whether a node returns the numbers of its first operand, in another shape or dtype."""
    return node.name in ("shard", "unshard") if node.is_structure else node.name in _VIEWS


def source(value: Value) -> Value:
    """Returns the value whose numbers a value has: casts, copies and shapes are left out."""
    while value.node is not None and is_view(value.node):
        value = value.node.operands[0]
    return value


def number(value: Value) -> float | None:
    """Returns a number that is known when a program is traced; else None."""
    value = source(value)
    is_real = any(jnp.issubdtype(value.dtype, kind) for kind in (jnp.floating, jnp.integer))
    is_known = is_real and value.size == 1 and value.constant is not None
    return float(np.asarray(value.constant).reshape(())) if is_known else None


def reaches_end(node: Node, avoided: frozenset[np.dtype] = frozenset()) -> bool:
    """Whether a result reaches the end of the forward pass before a product or an avoided dtype."""
    pending, seen = [node], {id(node)}
    while pending:
        for value in pending.pop().results:
            if value.dtype in avoided:
                continue
            if value.is_output or (not value.readers and value.shape == ()):
                return True
            readers = [each for each in value.readers if not each.is_backward]
            new = [each for each in readers if id(each) not in seen and not is_product(each)]
            seen.update(map(id, new))
            pending += new
    return False


def call(node: Node) -> object:
    """Returns the user's call that an operation is a part of; None if it is unknown."""
    each: Node | None = node
    while each is not None:
        found = call_of(each.eqn)
        if found is not None:
            return found
        each = each.around
    return None
