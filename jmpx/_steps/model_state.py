"""Model state, such as running statistics, that a differentiated function takes and returns."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jmpx._base.axes import varying_axes
from jmpx._base.casts import cast_like
from jmpx._base.leaves import PyTree, can_replace, is_array, is_none, is_traceable, spell
from jmpx._base.trees import holds_on_all, select_tree
from jmpx._steps.checks import check_whole

_ALL = "state"  # the rest of an aux that is the state and nothing else


@dataclasses.dataclass(frozen=True)
class ModelState:
    """The argument that holds model state, which comes back in aux, by its position."""

    argnum: int | None = None

    @classmethod
    def of(cls, argnum: object, has_aux: bool) -> "ModelState":
        """Checks the position that the user gave."""
        if argnum is None:
            return cls()
        argnum = check_whole(argnum, "state_argnum", "give the position of the model state")
        if not has_aux:
            raise ValueError(
                f"Cannot return the model state of state_argnum={argnum} without aux: return "
                "(loss, state) or (loss, (state, other)), and say has_aux=True."
            )
        return cls(argnum)

    def get(self, args: Sequence[PyTree]) -> PyTree:
        """Returns the state among the arguments of a call, as JAX's arrays, or None."""
        if self.argnum is None:
            return None
        if self.argnum >= len(args):
            raise ValueError(
                f"Cannot find the model state at argument {self.argnum}, as state_argnum says, in "
                f"a call with {len(args)} positional arguments: pass it by position."
            )
        # It is a copy: a `State` of Equinox cannot be read after the function has set it.
        return jax.tree.map(
            lambda leaf: jnp.asarray(leaf) if is_traceable(leaf) else leaf, args[self.argnum]
        )

    def put(self, args: Sequence[PyTree], state: PyTree) -> tuple[PyTree, ...]:
        """Returns the arguments with another state among them."""
        return tuple(state if index == self.argnum else arg for index, arg in enumerate(args))

    def split(self, aux: PyTree, old: PyTree) -> tuple[PyTree, PyTree]:
        """Splits aux into the new state, in the dtypes of the old one, and the rest."""
        if self.argnum is None:
            return None, aux
        if _alike(aux, old):
            return jax.tree.map(cast_like, aux, old), _ALL
        if type(aux) is tuple and aux and _alike(aux[0], old):
            return jax.tree.map(cast_like, aux[0], old), aux[1:]
        raise TypeError(
            f"Expected aux to be the new model state, or a tuple that starts with it, in the "
            f"structure and the shapes of argument {self.argnum}, as state_argnum says, got "
            f"{jax.tree.structure(aux)} for {jax.tree.structure(old)}: return (loss, state) or "
            "(loss, (state, other))."
        )

    def join(self, state: PyTree, rest: PyTree) -> PyTree:
        """Returns the aux that `split` took apart."""
        if self.argnum is None:
            return rest
        return state if rest is _ALL else (state, *rest)

    def check(self, new: PyTree, old: PyTree) -> None:
        """Refuses a new state in which more has changed than the values of arrays."""
        pairs = zip(jax.tree_util.tree_leaves_with_path(old), jax.tree.leaves(new), strict=True)
        for (path, before), after in pairs:
            if not can_replace(after, before):
                raise ValueError(
                    f"Cannot hand the model state of argument {self.argnum} from one micro-batch "
                    f"to the next, because the function changes its "
                    f"{jax.tree_util.keystr(path) or 'leaf'} from {spell(before)} to "
                    f"{spell(after)}: keep an array there, in one dtype."
                )


def _alike(new: PyTree, old: PyTree) -> bool:
    """Whether two pytrees have one structure, and their arrays one shape."""
    if jax.tree.structure(new) != jax.tree.structure(old):
        return False
    pairs = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
    return all(jnp.shape(a) == jnp.shape(b) for a, b in pairs if is_array(a) and is_array(b))


def kept_if_finite(finite: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Returns new model state, but the old one where the gradients are not finite.

    What cannot be selected stays new: a leaf that is not an array, whose shape or dtype has
    changed, or that has become the same on all devices.
    """

    def keep(new: PyTree, old: PyTree) -> PyTree:
        if not (is_traceable(new) and is_traceable(old) and can_replace(new, old)):
            return new
        if not varying_axes(old) <= varying_axes(new):
            return new
        # What all devices share would differ where each of them has a flag of its own.
        axes = tuple(sorted(varying_axes(finite) - varying_axes(new), key=str))
        place = jax.typeof(new).sharding
        if jax.typeof(old).sharding.spec != place.spec:  # on an Explicit mesh
            old = jax.sharding.reshard(old, place)
        return select_tree(holds_on_all(finite, axes) if axes else finite, new, old)

    return jax.tree.map(keep, new, old, is_leaf=is_none)
