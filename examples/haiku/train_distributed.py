"""Trains the network of `train.py` on many devices, in one process or more, and resumes.

    python examples/haiku/train_distributed.py --processes=4 --mp_policy=16-mixed \
        --checkpoint_dir=DIRECTORY

This starts four processes on this machine, each with `--devices_per_process` devices. If one of
them dies, all are ended, and the same command resumes from the newest checkpoint, also with other
numbers of processes and devices. On a cluster, the cluster's launcher starts the script, and
`jax.distributed` learns from it which processes there are; all of them read and write DIRECTORY:

    srun --kill-on-bad-exit=1 python examples/haiku/train_distributed.py --launch=none \
        --mp_policy=16-mixed --checkpoint_dir=DIRECTORY

Each device takes its part of the batch; its BatchNorm sees that part alone. Gradients are averaged
over the devices in float32, or what the policy says by reduce=, the moving averages of BatchNorm in
float32. So all devices hold the same bits and decide alike whether to take a step. What four
devices compute does not depend on how many processes they are in.
"""

import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import launch
import numpy as np
import train
from absl import app, flags, logging
from checkpoints import Checkpoints, digests
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

import jmpx

PROCESSES = flags.DEFINE_integer("processes", 1, "Processes to start on this machine.", 1)
DEVICES = flags.DEFINE_integer("devices_per_process", 1, "Devices of each of them.", 1)
LAUNCH = flags.DEFINE_enum(
    "launch",
    "local",
    ["local", "none"],
    "local: start --processes processes on this machine, and end them together. none: a cluster's "
    "launcher, such as srun, has started this process and the others.",
)
CHECKPOINT_DIR = flags.DEFINE_string(
    "checkpoint_dir", None, "The directory to save checkpoints in, and to resume from."
)
CHECKPOINT_EVERY = flags.DEFINE_integer("checkpoint_every", 100, "Steps between two of them.", 1)

flags.register_validator("checkpoint_dir", lambda path: path != "", "must name a directory")


class Progress(NamedTuple):
    """The content of a checkpoint: global arrays, the same on all devices."""

    state: train.TrainState
    position: jax.Array  # int32: how many batches were taken
    loss_sum: jax.Array  # float32: of the losses of this epoch so far


def begin(optimizer: Any, images: np.ndarray, mesh: Mesh) -> Progress:
    """Returns the progress before the first step."""

    @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, PartitionSpec()))
    def make() -> Progress:
        state = train.make_state(optimizer, images)
        return Progress(state, jnp.array(0, jnp.int32), jnp.array(0, jnp.float32))

    return make()


def make_step(
    optimizer: Any, steps_per_epoch: int, mesh: Mesh
) -> Callable[[Progress, train.Data], tuple[Progress, jax.Array, jax.Array]]:
    """Returns the jitted train step: `(progress, batch) -> (progress, loss, grads_finite)`."""

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("data")),
        out_specs=PartitionSpec(),
    )
    def step(progress: Progress, batch: train.Data) -> tuple[Progress, jax.Array, jax.Array]:
        state = progress.state
        (loss, model_state), loss_scale, grads_finite, grads = jmpx.value_and_grad(
            train.loss_fn,
            state.loss_scale,
            has_aux=True,
            policy=train.MP.policy_map,
            uncast=1,
            over=jmpx.Over("data"),
        )(state.params, state.model_state, batch)
        take = grads_finite | (not train.MP.skip_nonfinite)
        params, opt_state = jmpx.optimizer_update(
            state.params, optimizer, state.opt_state, grads, take
        )
        model_state = mean_over_devices(model_state)
        model_state = jmpx.select_tree(take, model_state, state.model_state)
        begins_epoch = progress.position % steps_per_epoch == 0
        loss_sum = jnp.where(begins_epoch, 0, progress.loss_sum) + loss
        state = train.TrainState(params, model_state, opt_state, loss_scale)
        return Progress(state, progress.position + 1, loss_sum), loss, grads_finite

    return step


def mean_over_devices(tree: Any) -> Any:
    """Averages floating arrays over the devices in float32; the others are the same on all."""

    def mean(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return jax.lax.pmean(x.astype(jnp.float32), "data").astype(x.dtype)

    return jax.tree.map(mean, tree)


def batch_at(data: train.Data, position: int) -> train.Data:
    """Returns a batch by its number in the run, so that a resumed run reads what comes next."""
    size = train.BATCH_SIZE.value
    epoch, number = divmod(position, len(data.labels) // size)
    order = np.random.default_rng((train.SEED.value, epoch)).permutation(len(data.labels))
    chosen = order[number * size : (number + 1) * size]
    return train.Data(data.images[chosen], data.labels[chosen].astype(np.int32))


def distribute(batch: train.Data, mesh: Mesh) -> Any:
    """Makes global arrays of a batch: each process gives its devices their parts of it."""
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    return jax.tree.map(
        lambda x: jax.make_array_from_callback(x.shape, sharding, lambda part: x[part]), batch
    )


def end_if_diverged(state: train.TrainState) -> None:
    """Ends the program with one line where --mp_max_skips says that training has diverged."""
    try:
        train.MP.check_progress(state.opt_state, state.loss_scale)
    except FloatingPointError as error:
        sys.exit(f"Training diverged. {error}")


def say(line: str) -> None:
    """Prints a line above the progress bar, in process 0."""
    if jax.process_index() == 0:
        tqdm.write(line)
        sys.stdout.flush()


def report_epoch(progress: Progress, accuracy: jax.Array, steps_per_epoch: int) -> None:
    metrics = jmpx.metrics(progress.state.opt_state, progress.state.loss_scale)
    say(
        f"epoch {int(progress.position) // steps_per_epoch:2d}  "
        f"loss {float(progress.loss_sum) / steps_per_epoch:.4f}  "
        f"test accuracy {float(accuracy):.2%}  "
        f"loss scale {float(metrics['loss_scale']):.10g}  "
        f"skipped steps {int(metrics['total_skipped'])}"
    )


def common_digest(progress: Progress) -> str:
    """Returns the SHA-256 of the state's bits, which must be the same on all devices."""
    own = [list(bytes.fromhex(digest)) for digest in digests(progress)]
    rows = multihost_utils.process_allgather(np.array(own, np.uint8)).reshape(-1, 32)
    found = sorted({bytes(row).hex() for row in rows})
    if len(found) > 1:
        raise RuntimeError(f"the devices hold {len(found)} different states: {', '.join(found)}")
    return found[0]


def check_batch_size() -> None:
    """Ends the program if the devices cannot share a batch."""
    if train.BATCH_SIZE.value % jax.device_count():
        sys.exit(
            f"--batch_size={train.BATCH_SIZE.value} must be a multiple of the number of devices, "
            f"which is {jax.device_count()}"
        )


def open_checkpoints() -> Checkpoints | None:
    """Returns the checkpoints of this run, if a directory is given."""
    if CHECKPOINT_DIR.value is None:
        return None
    same = (train.SEED, train.EPOCHS, train.BATCH_SIZE)  # They decide which batches come.
    return Checkpoints(CHECKPOINT_DIR.value, {flag.name: flag.value for flag in same})


def run() -> None:
    """Trains as the flags say, and prints a line an epoch."""
    check_batch_size()
    mesh = Mesh(jax.devices(), ("data",))
    train_data, test_data = train.load_digits()
    steps_per_epoch = len(train_data.labels) // train.BATCH_SIZE.value
    steps = train.EPOCHS.value * steps_per_epoch

    optimizer = jmpx.skip_nonfinite(train.make_adam(train_data))
    progress = begin(optimizer, train_data.images[:1], mesh)
    saved = open_checkpoints()
    if saved is not None and (newest := saved.newest()) is not None:
        progress = saved.restore(newest, progress)
        say(f"resumed after step {newest} of {steps}")
    step = make_step(optimizer, steps_per_epoch, mesh)

    seconds = []
    todo = range(int(progress.position), steps)
    show = functools.partial(tqdm, unit="step", dynamic_ncols=True, leave=False)
    with show(total=steps, initial=todo.start, disable=jax.process_index() != 0) as bar:
        for position in todo:
            start = time.perf_counter()
            batch = distribute(batch_at(train_data, position), mesh)
            progress, _, _ = jax.block_until_ready(step(progress, batch))
            end_if_diverged(progress.state)
            seconds.append(time.perf_counter() - start)
            bar.update()
            done = position + 1
            if done % steps_per_epoch == 0:
                accuracy = train.accuracy(progress.state, test_data)
                report_epoch(progress, accuracy, steps_per_epoch)
            if saved is not None and (done % CHECKPOINT_EVERY.value == 0 or done == steps):
                saved.save(done, progress)
    if saved is not None:
        saved.close()
    # The first step includes compilation.
    milliseconds = 1000 * statistics.median(seconds[1:] or seconds or [0.0])
    say(f"{milliseconds:.1f} ms a step ({train.MP.mixed_precision()})")
    say(f"{jax.process_count()} x {jax.local_device_count()} devices: {common_digest(progress)}")


def main(arguments: list[str]) -> None:
    if len(arguments) > 1:
        raise app.UsageError(f"unexpected argument {arguments[1]!r}")
    if LAUNCH.value == "local" and not launch.is_launched():
        advice = "Give --checkpoint_dir, and the same command will resume."
        if CHECKPOINT_DIR.value is not None:
            advice = "The same command resumes from the newest checkpoint."
        sys.exit(launch.launch(PROCESSES.value, DEVICES.value, advice))
    with launch.ending_at_once():
        if not flags.FLAGS["verbosity"].present:
            logging.set_verbosity(logging.WARNING)  # Orbax logs 30 lines a checkpoint.
        launch.connect()
        run()


if __name__ == "__main__":
    app.run(main)
