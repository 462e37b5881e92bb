"""Casts of the parameters that modules read: one in each trace, however often a module reads."""

from typing import TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jmpx._base.leaves import PyTree
from jmpx._jaxprs import core
from jmpx._policies.policy import Policy

T = TypeVar("T")

# By the identity of a parameter and the dtype: the parameter, kept so that no other one gets its
# identity, and the cast.
_Casts = dict[tuple[int, np.dtype], tuple[PyTree, PyTree]]


class ParameterCasts:
    """The casts that are made while a model is traced, anew in each trace: no array may leak."""

    def __init__(self) -> None:
        self._traces: list[tuple[object, _Casts]] = []  # those that are under way, innermost last

    def clear(self) -> None:
        """Forgets the casts."""
        self._traces.clear()

    def to_compute(self, policy: Policy, tree: T) -> T:
        """Returns a stored parameter, any pytree, in the compute dtype of a policy."""
        return jax.tree.map(lambda leaf: self._cast(policy, leaf), tree)

    def _cast(self, policy: Policy, leaf: PyTree) -> PyTree:
        # JAX would find the casts of inner traces here, when it looks for leaks.
        if not isinstance(leaf, jax.core.Tracer) or core.looks_for_leaks():
            return policy.cast_to_compute(leaf)
        casts, key = self._casts(), (id(leaf), jnp.dtype(policy.compute_dtype))
        if key not in casts:
            casts[key] = leaf, policy.cast_to_compute(leaf)
        return casts[key][1]

    def _casts(self) -> _Casts:
        """Returns the casts of the current trace, and forgets those of traces that ended in it."""
        current = core.current_trace()
        known = [i for i, (trace, _) in enumerate(self._traces) if trace == current]
        if known:
            del self._traces[known[0] + 1 :]
        else:
            self._traces.append((current, {}))
        return self._traces[-1][1]
