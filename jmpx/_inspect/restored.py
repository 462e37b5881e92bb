"""The precision of a checkpoint, and a check that the restored state still has it."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jmpx._base.messages import describe
from jmpx._base.trees import NUMBERS, PyTree, holds, is_array, is_floating, is_traceable
from jmpx._scales.kinds import LossScale
from jmpx._scales.strings import MixedPrecisionLike, get_mixed_precision

# The bits of exponent and mantissa of formats to which values may have been rounded.
_FORMATS = {"bfloat16": (8, 7), "float16": (5, 10), "float32": (8, 23)}
_PYTHONS = {"int", "float", "complex"}  # Python's numbers have no dtype to keep.
_CHANGES = {
    "narrowing": "less precision than",
    "widening": "wider dtypes than",
    "": "another kind than",
}


def describe_precision(tree: PyTree, policy: MixedPrecisionLike | None = None) -> dict[str, Any]:
    """Describes the precision of a train state, for the metadata of its checkpoint.

    Checkpoint libraries restore into another dtype without a word. `check_restored` compares what
    they restored to this description. Where several processes hold one array, each calls both.

    Args:
        tree: any pytree of arrays or of shapes. Loss scales in it are left out, as their template
            converts them.
        policy: the policy of the run: anything that `get_mixed_precision` takes.

    Returns:
        Plain values, for JSON and msgpack. `"policy"` is the string of the policy map, or None.
        `"dtypes"` has the name of each dtype by the path of its leaf: names joined by slashes,
        whatever containers hold them. `"rounded"` names the leaves that have more bits than their
        values need, such as a float32 leaf of zeros, and the dtype that would hold them; it is None
        if leaves have no values, as shapes have.

    Raises:
        ValueError: if the policy does not follow its grammar.

    Example:
        >>> import jax.numpy as jnp, jmpx
        >>> params = {"w": jnp.array([0.1, 0.2]), "b": jnp.zeros(2)}
        >>> jmpx.inspect.describe_precision(params, "c=bf16,o=f32")
        {'policy': 'params=float32,compute=bfloat16,output=float32', 'dtypes': {'b': 'float32', \
'w': 'float32'}, 'rounded': {'b': 'bfloat16'}}
    """
    leaves = dict(_leaves_by_path(tree))
    rounded = None
    if all(_has_values(leaf) for leaf in leaves.values() if is_floating(leaf)):
        rounded = {path: name for path, leaf in leaves.items() if (name := _narrowest(leaf))}
    return {
        "policy": None if policy is None else str(get_mixed_precision(policy).policy_map),
        "dtypes": {path: _name(leaf) for path, leaf in leaves.items()},
        "rounded": rounded,
    }


def check_restored(
    tree: PyTree,
    description: Mapping[str, Any],
    *,
    allow_narrowing: bool = False,
    allow_widening: bool = False,
) -> None:
    """Refuses a train state that was restored in another precision than it was saved in.

    A leaf that was narrowed has lost bits. So has one that went through a narrower dtype and back:
    the narrower one then holds all its values, which it did not when they were saved. A leaf that
    was widened, such as float32 from bfloat16, looks like a master, but its values are rounded.

    Args:
        tree: the tree that was described, right after it was restored, or the shapes into which it
            is to be restored. Containers may differ.
        description: the result of `describe_precision` in the checkpoint.
        allow_narrowing: whether to accept narrower dtypes, and rounded values.
        allow_widening: whether to accept wider floating dtypes. Wider integers hold what they
            held, and are accepted always.

    Raises:
        TypeError: if the description is not one.
        ValueError: if the precision is another one, or the tree has other leaves.

    Example:
        >>> import jax.numpy as jnp, jmpx
        >>> saved = jmpx.inspect.describe_precision({"w": jnp.ones(2, jnp.bfloat16)})
        >>> jmpx.inspect.check_restored({"w": jnp.ones(2, jnp.bfloat16)}, saved)
        >>> jmpx.inspect.check_restored({"w": jnp.ones(2)}, saved)
        Traceback (most recent call last):
        ...
        ValueError: Restored 1 of 1 leaves in wider dtypes than they were saved in, such as w in \
float32 instead of bfloat16: restore it in bfloat16 all the way, or pass allow_widening=True.
    """
    if not isinstance(description, Mapping) or "dtypes" not in description:
        raise TypeError(
            f"Expected the description of a checkpoint, got {describe(description)}: give what "
            "jmpx.inspect.describe_precision returned, as json.loads reads it back."
        )
    saved, leaves = description["dtypes"], dict(_leaves_by_path(tree))
    if others := saved.keys() ^ leaves.keys():
        raise ValueError(
            f"Expected the {len(saved)} leaves that were described, got {len(leaves)}, which "
            f"differ for example by {min(others)!r}: build the state as it was when it was saved, "
            "with the same wrappers of its optimizer."
        )
    changes = list(_changes(leaves, saved, None if allow_narrowing else description.get("rounded")))
    allowed = {"": False, "narrowing": allow_narrowing, "widening": allow_widening}
    for kind in allowed:
        found = [(path, what) for other, path, what in changes if other == kind]
        if found and not allowed[kind]:
            path, what = found[0]
            policy = description.get("policy")
            under = f", under the policy {policy!r}" if policy else ""
            otherwise = f" all the way, or pass allow_{kind}=True" if kind else ""
            raise ValueError(
                f"Restored {len(found)} of {len(leaves)} leaves in {_CHANGES[kind]} they were "
                f"saved in{under}, such as {path} {what}: restore it in {saved[path]}{otherwise}."
            )


def _changes(
    leaves: Mapping[str, PyTree], saved: Mapping[str, str], rounded: Mapping[str, str] | None
) -> Iterator[tuple[str, str, str]]:
    """Yields a key of `_CHANGES`, a path and words; looks at values unless `rounded` is None."""
    for path, leaf in leaves.items():
        got, was = _name(leaf), saved[path]
        if got == was:
            # If values are rounded that were not when they were saved, the leaf was narrowed since.
            holder = None if rounded is None or path in rounded else _narrowest(leaf)
            if holder:
                yield "narrowing", path, f"in {got} with values of {holder} alone"
        elif not {got, was} & _PYTHONS and (kind := _change(was, got)) is not None:
            yield kind, path, f"in {got} instead of {was}"


def _leaves_by_path(tree: PyTree) -> Iterator[tuple[str, PyTree]]:
    """Yields the arrays, shapes and numbers of a tree by paths without kinds of containers."""
    is_scale = lambda node: isinstance(node, LossScale)  # noqa: E731
    seen: set[str] = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_scale):
        if hasattr(leaf, "dtype") or isinstance(leaf, NUMBERS):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            name = jax.tree_util.keystr(path) if name in seen else name  # {"a/b": 0, "a": {"b": 0}}
            seen.add(name)
            yield name, leaf


def _name(leaf: PyTree) -> str:
    return str(leaf.dtype) if hasattr(leaf, "dtype") else type(leaf).__name__


def _has_values(leaf: object) -> bool:
    return is_array(leaf) and not isinstance(leaf, jax.core.Tracer)


def _narrowest(leaf: PyTree) -> str | None:
    """Returns the name of a narrower dtype that holds all values of a leaf, if there is one."""
    if not _has_values(leaf) or not is_floating(leaf) or leaf.dtype.itemsize < 4:
        return None
    if jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
        return None  # JAX cannot read 64 bits of NumPy while its 64-bit types are off.
    names = [name for name in _FORMATS if np.dtype(name).itemsize < leaf.dtype.itemsize]
    with jax.ensure_compile_time_eval():
        holds = np.asarray(_holds(leaf, tuple(_FORMATS[name] for name in names)))
    return next((name for name, held in zip(names, holds, strict=True) if held), None)


@functools.partial(jax.jit, static_argnums=1)
def _holds(leaf: jax.Array, formats: tuple[tuple[int, int], ...]) -> jax.Array:
    """Whether each format holds all values of an array. XLA may remove casts, but not this."""
    return jnp.stack([jnp.all(jax.lax.reduce_precision(leaf, *bits) == leaf) for bits in formats])


def _change(was: str, got: str) -> str | None:
    """Returns a key of `_CHANGES`; None for integers that still hold their values."""
    if "key<" in was + got:
        return ""
    try:
        old, new = np.dtype(was), np.dtype(got)
    except TypeError:  # a dtype of another library
        return "narrowing"
    if all(jnp.issubdtype(dtype, jnp.floating) for dtype in (old, new)):
        is_held = holds(new, old)
    else:  # To NumPy, bytes, text and objects can hold anything.
        is_held = is_traceable(np.empty(0, new)) and np.can_cast(old, new)
    if not is_held:
        return "narrowing"
    return "widening" if jnp.issubdtype(new, jnp.inexact) else None
