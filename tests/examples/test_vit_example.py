"""`examples/equinox/train_vit.py`, run as a user runs it, and its functions one by one."""

import pytest
from helpers import LESS_OPTIMIZED, finish
from helpers.examples import FOLDER, SMALL, accuracy_of, answer, assert_refused, run_vit, start_vit

SHORT = ["--patch=4", "--depth=2", "--epochs=10"]
ISLANDS = "LayerNorm: full; Softmax: full; */head: full"


@pytest.mark.slow  # three trainings in full
def test_the_default_and_float16_reach_the_accuracy_of_float32():
    runs = {
        "default": [],
        "float32": ["--mp_policy=float32"],
        "float16": [f"--mp_policy=c=f16,o=f32; {ISLANDS}"],
    }
    script = str(FOLDER / "train_vit.py")
    processes = {
        name: start_vit(script, *SHORT, *args, xla_flags=LESS_OPTIMIZED)
        for name, args in runs.items()
    }
    reached = {
        name: accuracy_of(finish(process), 10, 32768 if name == "float16" else 1)
        for name, process in processes.items()
    }
    assert reached["float32"] >= 97
    assert reached["default"] >= reached["float32"] - 1
    assert reached["float16"] >= reached["float32"] - 1


@pytest.mark.slow  # a training
def test_without_skipping_an_overflow_is_seen():
    result = run_vit(
        *("--mp_policy=c=f16,o=f32", "--mp_scale_value=1e30", "--epochs=1"),
        *("--nomp_skip_nonfinite", *SMALL),
    )
    assert "loss nan" in result.stdout and "skipped steps 0" in result.stdout


SETUP = """
import json, re
import jax, jax.numpy as jnp, numpy as np, optax
import datasets, jmpx, jmpx.equinox, train_vit
from helpers.loops import operations
rng = np.random.default_rng(0)
model = train_vit.VisionTransformer(
    (8, 8, 1), 10, patch=2, width=16, depth=1, heads=2, key=jax.random.key(1)
)
batch = datasets.Data(
    rng.integers(0, 256, (32, 8, 8, 1), np.uint8), rng.integers(0, 10, 32, np.int32)
)

def state_of(optimizer, loss_scale):
    return train_vit.TrainState(model, optimizer.init(model), loss_scale)

def leaves(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
"""


OVERFLOW = """
optimizer = jmpx.skip_nonfinite(train_vit.make_optimizer(10, 1e-3))
plain = train_vit.logits_of

def steep(model, images):  # where the corner is white, gradients overflow
    white = images[:, 0, 0] == 1
    return plain(model, images) * jnp.where(white, 1e6, 1.0)

train_vit.logits_of = steep
images = np.array(batch.images)
images[:, 0, 0] = 0
good = datasets.Data(images, batch.labels)
images = np.array(images)
images[8:16, 0, 0] = 255  # the second of four
bad = datasets.Data(images, batch.labels)

state = state_of(optimizer, jmpx.DynamicLossScale(2.0**10, counter=3))
bits = [leaf.tobytes() for leaf in leaves((state.model, state.opt_state.inner_state))]
policy_map = jmpx.get_policy_map("by=modules,c=f16,o=f32; LayerNorm: full")
step = train_vit.make_step(policy_map, optimizer, True, 4)
seen = []
for images in good, bad:
    new, metrics = step(state, images)
    after = [leaf.tobytes() for leaf in leaves((new.model, new.opt_state.inner_state))]
    scale = [float(new.loss_scale.loss_scale), int(new.loss_scale.counter)]
    skipped = int(metrics["consecutive_skipped"])
    seen.append([skipped, bool(jnp.isfinite(metrics["loss"])), after == bits, *scale])
new, _ = train_vit.make_step(policy_map, optimizer, False, 4)(state, bad)
taken = not all(np.isfinite(leaf).all() for leaf in leaves(new.model))
print(json.dumps([*seen, taken]))
"""


@pytest.mark.thorough
def test_an_overflow_in_one_micro_batch_skips_the_step_as_one():
    seen = answer(start_vit("-c", SETUP + OVERFLOW))
    assert seen == [[0, True, False, 1024, 4], [1, True, True, 512, 0], True]


SUMS = """
def sums_of(policy):
    optimizer = train_vit.make_optimizer(10, 1e-3)
    step = train_vit.make_step(jmpx.get_policy_map(policy), optimizer, True, 2)
    state = state_of(optimizer, jmpx.StaticLossScale(1))
    lowered = step.lower(state, batch)
    text = lowered.as_text()
    assert "stablehlo.all_reduce" not in operations(lowered, in_loops=True)
    found = re.findall(r"all_reduce.*?\\) : \\(tensor<([^>]*)>", text, re.DOTALL)
    return sorted({each.rpartition("x")[2] for each in found if "x" in each})  # no numbers
print(json.dumps([sums_of(f"c=f16,o=f32{reduce}") for reduce in ("", ",r=bf16", ",r=f16")]))
"""


@pytest.mark.thorough
def test_gradients_are_summed_over_devices_once_and_in_the_dtype_of_the_policy():
    assert answer(start_vit("-c", SETUP + SUMS, devices=4)) == [["f32"], ["bf16"], ["f16"]]


WATCH = """
import json, sys
import jax
import train_vit
make_step, kept = train_vit.make_step, []

def watched(*args):
    step = make_step(*args)
    def run(state, batch):
        new, metrics = step(state, batch)
        whole = all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(new))
        shares = {s.data.shape for s in batch.images.addressable_shards}
        loss = float(metrics["loss"])
        kept.append((loss, whole, sorted(shares), len(batch.images.sharding.device_set)))
        return new, metrics
    return run

train_vit.make_step = watched
try:
    train_vit.app.run(train_vit.main)
except SystemExit:
    print(json.dumps(kept))
"""


@pytest.mark.slow  # two trainings
def test_four_devices_share_a_batch_and_give_the_losses_of_one():
    arguments = ["--mp_policy=float32", "--batch_size=240", "--accumulate=2", "--epochs=1"]
    probes = [start_vit("-c", WATCH, *SMALL, *arguments, devices=n) for n in (1, 4)]
    one, four = map(answer, probes)
    assert len(one) == len(four) == 5
    for (loss, _, shares, count), (loss4, replicated, shares4, count4) in zip(
        one, four, strict=True
    ):
        assert abs(loss - loss4) < 1e-4
        assert (shares, count) == ([[240, 8, 8, 1]], 1)
        assert (replicated, shares4, count4) == (True, [[60, 8, 8, 1]], 4)


@pytest.mark.thorough
def test_a_batch_that_devices_cannot_share_ends_with_one_line():
    result = run_vit("--batch_size=90", devices=4)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == (
        "--batch_size=90 must be a multiple of --accumulate times the 4 devices"
    )


BAD = [
    ("--mp_loss_scale=static=8 --mp_scale_value=4", "--mp_scale_value"),
    ("--heads=3", "--heads must divide --width"),
    ("--patch=3", "--patch must divide the side of the images"),
    ("--accumulate=3", "--accumulate must divide --batch_size"),
    ("--learning_rate=nan", "must be a positive number"),
    ("--dataset=cifar10 --patch=4", "--data_dir must be a directory that holds the archive"),
    ("--batch_size=2000", "must not exceed the 1437 training images"),
]


@pytest.mark.thorough
def test_a_wrong_flag_ends_with_one_clear_line():
    assert_refused(FOLDER / "train_vit.py", BAD)
