"""Orbax checkpoints of a training on many devices; one of another run or model is refused."""

import hashlib
import os
import sys
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp

T = TypeVar("T")

KEPT = 3  # the newest checkpoints


def describe(tree: Any) -> dict[str, str]:
    """Returns dtype and shape, such as `float32[16, 10]`, of each array by its path."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): f"{x.dtype}{list(x.shape)}" for path, x in leaves}


def digests(tree: Any) -> list[str]:
    """Returns a SHA-256 for each device of this process, which holds a copy of all bits."""
    found = {device: hashlib.sha256() for device in jax.local_devices()}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            found[shard.device].update(np.asarray(shard.data).tobytes())
    return [digest.hexdigest() for digest in found.values()]


class Checkpoints:
    """The checkpoints in a directory, each with the arrays and a description of the run.

    Orbax writes while the training goes on, into a temporary directory, which it renames at the
    end: a process that dies leaves no half of a checkpoint.

    Args:
        directory: their folder, which is made if it is missing.
        run: plain values by their names; a run resumes only if they are equal.
    """

    def __init__(self, directory: str, run: dict[str, Any]):
        self.run = run
        path = Path(directory).absolute()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            sys.exit(f"--checkpoint_dir={directory} cannot be used: {error}")
        if not os.access(path, os.W_OK):
            sys.exit(f"--checkpoint_dir={directory} must be a directory that can be written to")
        options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, cleanup_tmp_directories=True)
        self.manager = ocp.CheckpointManager(path, options=options)

    def save(self, number: int, tree: Any) -> None:
        """Begins to save global arrays, and returns when they may change."""
        description = {"run": self.run, "arrays": describe(tree), "sha256": digests(tree)[0]}
        self.manager.save(
            number,
            args=ocp.args.Composite(
                arrays=ocp.args.StandardSave(tree), description=ocp.args.JsonSave(description)
            ),
        )

    def newest(self) -> int | None:
        """Returns the number of the newest checkpoint, if there is one."""
        return self.manager.latest_step()

    def restore(self, number: int, like: T) -> T:
        """Returns the arrays of a checkpoint, and changes no file.

        Ends the program, with a sentence, if the checkpoint is of another run or model, or damaged.

        Args:
            number: which checkpoint.
            like: global arrays of the structure, shapes, dtypes and shardings to restore.
        """
        path = f"{self.manager.directory}/{number}"
        description = self._read(number, path, description=ocp.args.JsonRestore())
        check_description(path, description, self.run, describe(like))
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like
        )
        tree = self._read(number, path, arrays=ocp.args.StandardRestore(target))
        if set(digests(tree)) != {description["sha256"]}:
            sys.exit(damaged(path, "its bits are not those that were saved"))
        return tree

    def _read(self, number: int, path: str, **item: Any) -> Any:
        (name,) = item
        hook = sys.unraisablehook
        # After one read has failed, Orbax closes its event loop, and its other threads complain
        # about that until the program has ended.
        sys.unraisablehook = lambda raised: (
            None if isinstance(raised.exc_value, RuntimeError) else hook(raised)
        )
        try:
            result = self.manager.restore(number, args=ocp.args.Composite(**item))[name]
        except Exception as error:  # Orbax and tensorstore raise many kinds.
            first_line = str(error).partition("\n")[0]
            sys.exit(damaged(path, f"{type(error).__name__}: {first_line:.200}"))
        sys.unraisablehook = hook
        return result

    def close(self) -> None:
        """Waits until all is written."""
        self.manager.wait_until_finished()
        self.manager.close()


def damaged(path: str, reason: str) -> str:
    return (
        f"the checkpoint {path} is damaged or of another program ({reason}): remove it, and the "
        "same command resumes from the one before"
    )


def check_description(
    path: str, description: Any, run: dict[str, Any], arrays: dict[str, str]
) -> None:
    """Ends the program, with a sentence, if a checkpoint is of another run or model."""
    try:
        saved_run, saved = dict(description["run"]), dict(description["arrays"])
        _ = description["sha256"]
    except (KeyError, TypeError, ValueError):
        sys.exit(damaged(path, "its description is incomplete"))
    advice = "give the flags that it was made with, or another --checkpoint_dir"
    for name in run:
        if saved_run.get(name) != run[name]:
            sys.exit(
                f"the checkpoint {path} is of a run with --{name}={saved_run.get(name)}, not "
                f"{run[name]}: {advice}"
            )
    for name in sorted(saved.keys() | arrays.keys()):
        if saved.get(name) != arrays.get(name):
            sys.exit(
                f"the checkpoint {path} is of another model, in which {name} is "
                f"{saved.get(name, 'missing')}, not {arrays.get(name, 'missing')}: {advice}"
            )
