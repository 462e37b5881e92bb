"""The training that `kills.py` kills: it goes on from its newest checkpoint that is whole.

    python benchmarks/killed_training.py FOLDER --format=npz

Checkpoints are written to a temporary file, which `os.fsync` and `os.replace` make the checkpoint
as a whole; Orbax does the same with folders. One that is torn all the same is told, and the one
before it is used; one of another model ends the training with a sentence.
"""

import argparse
import hashlib
import io
import json
import os
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmpx

STEPS, SAVE_EVERY, KEPT = 400, 5, 2
OVERFLOWS = 24  # planted steps
PyTree = Any


class State(NamedTuple):
    """All that the next step depends on."""

    params: PyTree
    opt_state: PyTree
    loss_scale: jmpx.DynamicLossScale
    key: jax.Array  # the bits of a random key


OPTIMIZER = jmpx.skip_nonfinite(optax.adam(optax.cosine_decay_schedule(1e-2, STEPS)))


def init(width: int = 16) -> State:
    rng = np.random.default_rng(0)
    shapes = {"in": (8, width), "hidden": (width, width), "out": (width, 1)}
    params = {
        name: jnp.asarray(rng.normal(size=s) / s[0], np.float32) for name, s in shapes.items()
    }
    loss_scale = jmpx.DynamicLossScale(2.0**15, period=7)
    return State(params, OPTIMIZER.init(params), loss_scale, jax.random.PRNGKey(1))


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the inputs and targets of a step; those of a planted one overflow in float16."""
    planted = np.random.default_rng(2).choice(STEPS, OVERFLOWS, replace=False)
    rng = np.random.default_rng([3, step])
    x = rng.normal(size=(16, 8)).astype(np.float32)
    return x * (1e6 if step in planted else 1), np.sin(x.sum(1, keepdims=True))


def loss_fn(params: PyTree, x: jax.Array, y: jax.Array, key: jax.Array) -> jax.Array:
    h = jnp.tanh(x @ params["in"])
    h = jnp.where(jax.random.bernoulli(key, 0.9, h.shape), h, 0)
    h = jnp.tanh(h @ params["hidden"]) @ params["out"]
    return jnp.mean((h.astype(jnp.float32) - y.astype(jnp.float32)) ** 2)


@jax.jit
def train_step(state: State, x: jax.Array, y: jax.Array) -> tuple[State, jax.Array]:
    key, dropout = jax.random.split(state.key)
    grad_fn = jmpx.filter_value_and_grad(loss_fn, state.loss_scale, policy="c=f16,o=f32")
    loss, loss_scale, finite, grads = grad_fn(state.params, x, y, dropout)
    params, opt_state = jmpx.optimizer_update(
        state.params, OPTIMIZER, state.opt_state, grads, finite
    )
    return State(params, opt_state, loss_scale, key), loss


def logged(step: int, loss: Any, state: State) -> str:
    """Returns the line of a step, in which equal numbers are equal bits."""
    skips: Any = state.opt_state
    counts = [int(skips.total_skipped), int(skips.consecutive_skipped)]
    scale = float(state.loss_scale.loss_scale).hex()
    return json.dumps([step, float(loss).hex(), scale, int(state.loss_scale.counter), *counts])


def digest(state: State) -> str:
    """Returns a hash of the bits of all leaves."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
    parts = [f"{leaf.dtype}{leaf.shape}".encode() + leaf.tobytes() for leaf in leaves]
    return hashlib.sha256(b"".join(parts)).hexdigest()


# Checkpoints in one file.


class Torn(ValueError):
    """A checkpoint that is not whole."""


def leaves_of(state: State) -> dict[str, Any]:
    found = jax.tree_util.tree_flatten_with_path(state)[0]
    return {jax.tree_util.keystr(path): leaf for path, leaf in found}


def description(state: State) -> dict[str, str]:
    return {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in leaves_of(state).items()}


def check_model(found: dict[str, str], template: State, path: Path) -> None:
    """Refuses the checkpoint of another model."""
    wanted = description(template)
    for name in [*wanted, *found]:
        if wanted.get(name) != found.get(name):
            raise ValueError(
                f"{path.name} is the checkpoint of another model, with {found.get(name)} at {name} "
                f"where this one has {wanted.get(name)}: give another folder, or that model."
            )


def restored(template: State, values: dict[str, np.ndarray]) -> State:
    leaves = [jnp.asarray(values[name]) for name in leaves_of(template)]
    return jax.tree.unflatten(jax.tree.structure(template), leaves)


def save_npz(file: Any, state: State) -> None:
    arrays: Any = {name: np.asarray(leaf) for name, leaf in leaves_of(state).items()}
    np.savez(file, **arrays)


def load_npz(path: Path, template: State) -> State:
    try:
        with path.open("rb") as file, np.load(file) as arrays:
            values = {name: arrays[name] for name in arrays.files}
    except (zipfile.BadZipFile, ValueError, EOFError, OSError, KeyError) as error:
        raise Torn(f"{path.name} is torn ({type(error).__name__})") from error
    found = {name: f"{value.dtype}{list(value.shape)}" for name, value in values.items()}
    check_model(found, template, path)
    return restored(template, values)


def save_equinox(file: Any, state: State) -> None:
    """Writes a line that describes the leaves, as Equinox advises, and the leaves."""
    import equinox as eqx

    file.write(json.dumps(description(state)).encode() + b"\n")
    eqx.tree_serialise_leaves(file, state)


def load_equinox(path: Path, template: State) -> State:
    import equinox as eqx

    with path.open("rb") as file:
        try:
            found = json.loads(file.readline())
        except ValueError as error:
            raise Torn(f"{path.name} is torn, as its first line is not whole") from error
        check_model(found, template, path)
        rest = io.BytesIO(file.read())
    try:
        state = eqx.tree_deserialise_leaves(rest, jax.tree.map(jnp.asarray, template))
    except Exception as error:
        raise Torn(f"{path.name} is torn ({type(error).__name__})") from error
    if rest.read(1):
        raise Torn(f"{path.name} is torn, as something follows its last leaf")
    return state


class Files:
    """Checkpoints that are one file each."""

    def __init__(self, folder: Path, ending: str, save: Any, load: Any) -> None:
        self.folder, self.ending, self._save, self._load = folder, ending, save, load

    def steps(self) -> list[int]:
        return sorted(int(path.stem) for path in self.folder.glob(f"*{self.ending}"))

    def path(self, step: int) -> Path:
        return self.folder / f"{step:06}{self.ending}"

    def save(self, step: int, state: State) -> None:
        temporary = self.path(step).with_suffix(".tmp")
        with temporary.open("wb") as file:
            self._save(file, state)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path(step))
        for old in self.steps()[:-KEPT]:
            self.path(old).unlink()

    def load(self, step: int, template: State) -> State:
        return self._load(self.path(step), template)

    def unfinished(self) -> int:
        """Returns how many checkpoints were being written when the process was killed."""
        left = list(self.folder.glob("*.tmp"))
        for path in left:
            path.unlink()
        return len(left)

    def close(self) -> None:
        pass


class Orbax:
    """Checkpoints of Orbax, which writes them while the training goes on."""

    def __init__(self, folder: Path) -> None:
        import orbax.checkpoint as ocp

        self.folder, self.ocp = folder, ocp
        self.left = sum("tmp" in path.name for path in folder.iterdir())
        options = ocp.CheckpointManagerOptions(max_to_keep=KEPT)
        self.manager = ocp.CheckpointManager(folder, options=options)

    def steps(self) -> list[int]:
        return sorted(self.manager.all_steps())

    def save(self, step: int, state: State) -> None:
        self.manager.save(step, args=self.ocp.args.StandardSave(leaves_of(state)))

    def load(self, step: int, template: State) -> State:
        path = self.folder / str(step)
        try:
            values = self.manager.restore(step, args=self.ocp.args.StandardRestore())
        except Exception as error:
            raise Torn(f"{path.name} is torn ({type(error).__name__})") from error
        found = {name: f"{value.dtype}{list(value.shape)}" for name, value in values.items()}
        check_model(found, template, path)
        return restored(template, {name: np.asarray(value) for name, value in values.items()})

    def unfinished(self) -> int:
        return self.left

    def close(self) -> None:
        self.manager.close()


FORMATS: dict[str, Callable[[Path], Any]] = {
    "npz": lambda folder: Files(folder, ".npz", save_npz, load_npz),
    "equinox": lambda folder: Files(folder, ".eqx", save_equinox, load_equinox),
    "orbax": Orbax,
}


def resume(checkpoints: Any, template: State) -> tuple[int, State]:
    """Returns the newest checkpoint that is whole, and its step; tells of those that are not.

    Raises:
        ValueError: if it is of another model, or all checkpoints are torn.
    """
    torn = ""
    for step in reversed(checkpoints.steps()):
        try:
            return step, checkpoints.load(step, template)
        except Torn as error:
            torn = str(error)
            print(f"{torn}: the checkpoint before it is used.", file=sys.stderr, flush=True)
    if torn:
        raise ValueError(
            f"{torn}, and there is none before it: give an empty folder to begin anew."
        )
    return 0, template


def train(folder: Path, form: str, steps: int, width: int) -> None:
    """Trains on from the newest checkpoint; this runs in the process that is killed."""
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    checkpoints = FORMATS[form](folder / "checkpoints")
    done, state = resume(checkpoints, init(width))
    with (folder / "log").open("a") as log:
        if log.tell():
            print(file=log)  # ends a line that a kill has cut off
        print(
            json.dumps({"from": done, "unfinished": checkpoints.unfinished()}), file=log, flush=True
        )
        for step in range(done, steps):
            state, loss = train_step(state, *batch(step))
            print(logged(step, loss, state), file=log, flush=True)
            if (step + 1) % SAVE_EVERY == 0:
                checkpoints.save(step + 1, state)
        checkpoints.close()
        print(json.dumps({"final": digest(state)}), file=log, flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Trains, or trains on.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--format", choices=list(FORMATS), default="npz")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--width", type=int, default=16)
    args = parser.parse_args(arguments)
    try:
        train(args.folder, args.format, args.steps, args.width)
    except ValueError as error:
        sys.exit(f"killed_training.py: {error}")


if __name__ == "__main__":
    main()
