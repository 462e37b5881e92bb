"""Casts of the parameters that modules read: one in each trace, however often a module reads."""

from typing import Any, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jmpx import _jaxpr
from jmpx._policy import Policy

T = TypeVar("T")

_jaxpr.import_extend()  # now, because the first read is often inside of a trace


class ParameterCasts:
    """The casts that are made while a model is traced.

    A weight that is read twice, as that of a shared layer is, is cast once: the program has no cast
    too many. Inside of another trace, as in the body of a loop or under `jax.checkpoint`, it is
    cast anew: an array of one trace must not leak into another one.
    """

    def __init__(self) -> None:
        # By the identity of the parameter, which is kept alive so that no other one gets it.
        self._made: dict[tuple[int, np.dtype], list[tuple[Any, Any, Any]]] = {}

    def clear(self) -> None:
        """Forgets the casts."""
        self._made.clear()

    def to_compute(self, policy: Policy, tree: T) -> T:
        """Returns a stored parameter, any pytree, in the compute dtype of a policy."""
        return jax.tree.map(lambda leaf: self._cast(policy, leaf), tree)

    def _cast(self, policy: Policy, leaf: Any) -> Any:
        if not isinstance(leaf, jax.core.Tracer):
            return policy.cast_to_compute(leaf)
        made = self._made.setdefault((id(leaf), jnp.dtype(policy.compute_dtype)), [])
        trace = _jaxpr.current_trace()
        for _, where, cast in made:
            if where == trace:
                return cast
        cast = policy.cast_to_compute(leaf)
        made.append((leaf, trace, cast))
        return cast
