"""`examples/equinox/train_vit.py`, run as a user runs it, and its functions one by one."""

import importlib.util
import io
import json
import os
import pickle
import re
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest
from helpers import LESS_OPTIMIZED, finish, start_python

FOLDER = Path(__file__).parents[2] / "examples" / "equinox"
ISLANDS = "LayerNorm: full; Softmax: full; */head: full"
SMALL = ["--width=16", "--depth=1", "--heads=2"]


SHORT = ["--patch=4", "--depth=2", "--epochs=10"]

# Code that is not optimized, which computes the same, is compiled in half the time.
QUICK = "--xla_backend_optimization_level=0"


def start(*arguments, devices=1, xla_flags=QUICK):
    return start_python(
        *("-W", "error", *arguments),
        xla_flags=f"--xla_force_host_platform_device_count={devices} {xla_flags}",
        PYTHONPATH=str(FOLDER),
    )


def run(*arguments, devices=1):
    return finish(start(str(FOLDER / "train_vit.py"), *arguments, devices=devices))


def start_probe(code, *arguments, devices=1):
    """Runs code beside the script's functions, whose flags can be defined once in a process."""
    return start("-c", code, *arguments, devices=devices)


def answer(process):
    """Returns what a probe printed last, which is JSON."""
    result = finish(process)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def probe(code):
    return answer(start_probe(code))


def test_the_default_and_float16_reach_the_accuracy_of_float32():
    runs = {
        "default": [],
        "float32": ["--mp_policy=float32"],
        "float16": [f"--mp_policy=c=f16,o=f32; {ISLANDS}"],
    }
    script = str(FOLDER / "train_vit.py")
    processes = {
        name: start(script, *SHORT, *args, xla_flags=LESS_OPTIMIZED) for name, args in runs.items()
    }
    reached = {}
    for name, process in processes.items():
        result = finish(process)
        assert result.returncode == 0, result.stderr
        *epochs, last = result.stdout.splitlines()
        assert len(epochs) == 10
        for number, line in enumerate(epochs, 1):
            assert re.fullmatch(
                rf"epoch +{number}  loss [\d.]+  test accuracy [\d.]+%  "
                rf"loss scale {32768 if name == 'float16' else 1}  skipped steps 0",
                line,
            )
        accuracy, time = re.match(r"test accuracy ([\d.]+)%, ([\d.]+) ms a step", last).groups()
        assert float(time) > 0
        assert "step/s" in result.stderr  # the progress bar
        reached[name] = float(accuracy)
    assert reached["float32"] >= 97
    assert reached["default"] >= reached["float32"] - 1
    assert reached["float16"] >= reached["float32"] - 1


def test_skipped_steps_are_counted_and_drawn(tmp_path):
    plot = tmp_path / "training.png"
    result = run(
        *("--mp_policy=c=f16,o=f32", "--mp_scale_value=16777216", "--accumulate=4", "--epochs=2"),
        *(*SMALL, f"--plot={plot}"),
    )
    assert result.returncode == 0, result.stderr
    scales = [float(s) for s in re.findall(r"loss scale (\S+)", result.stdout)]
    skipped = [int(n) for n in re.findall(r"skipped steps (\d+)", result.stdout)]
    assert 0 < skipped[0] <= skipped[-1] < 15
    assert scales[-1] == 2.0 ** (24 - skipped[-1])  # one adjustment a step, not one a micro-batch
    assert plot.read_bytes().startswith(b"\x89PNG") and plot.stat().st_size > 10_000


def test_without_skipping_an_overflow_is_seen():
    result = run(
        *("--mp_policy=c=f16,o=f32", "--mp_scale_value=1e30", "--epochs=1"),
        *("--nomp_skip_nonfinite", *SMALL),
    )
    assert "loss nan" in result.stdout and "skipped steps 0" in result.stdout


SETUP = """
import json, re
import jax, jax.numpy as jnp, numpy as np, optax
import datasets, jmpx, train_vit
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

def largest_difference(a, b):
    return max(float(np.abs(x - y).max()) for x, y in zip(leaves(a), leaves(b), strict=True))
"""


def test_micro_batches_give_the_update_of_their_mean_in_float32():
    differences = probe(
        SETUP
        + """
optimizer = optax.sgd(1.0)
state = state_of(optimizer, jmpx.NoOpLossScale())

steps = {
    policy: train_vit.make_step(jmpx.get_policy_map(policy), optimizer, True)
    for policy in ("float32", "c=bf16,o=f32")
}

def update(policy, batch, count):
    new, loss, finite = steps[policy](state, train_vit.split(batch, count))
    assert finite and all(leaf.dtype == np.float32 for leaf in leaves(new.model))
    return jax.tree.map(lambda a, b: np.asarray(a - b), state.model, new.model), loss

whole, loss = update("float32", batch, 1)
parts, mean_loss = update("float32", batch, 4)
half, _ = update("c=bf16,o=f32", batch, 4)
quarters = train_vit.split(batch, 4)
each = [
    update("c=bf16,o=f32", jax.tree.map(lambda x: x[i], quarters), 1)[0] for i in range(4)
]
print(json.dumps({
    "size": max(float(np.abs(leaf).max()) for leaf in leaves(whole)),
    "float32": largest_difference(whole, parts),
    "loss": abs(float(loss - mean_loss)),
    "bfloat16": largest_difference(half, jax.tree.map(lambda *g: sum(g) / 4, *each)),
}))
"""
    )
    assert differences["size"] > 0.1
    assert differences["float32"] < 1e-6 and differences["loss"] < 1e-6
    # Sums of bfloat16 numbers in bfloat16 would be wrong by 2**-9 of their size.
    assert differences["bfloat16"] < 1e-6


def test_an_overflow_in_one_micro_batch_skips_the_step_as_one():
    seen = probe(
        SETUP
        + """
optimizer = train_vit.make_optimizer(10, 1e-3)
plain = train_vit.logits_of

def steep(model, images, policy_map):  # where the corner is white, gradients overflow
    white = images[:, 0, 0] == 255
    return plain(model, images, policy_map) * jnp.where(white, 1e6, 1.0)

train_vit.logits_of = steep
images = np.array(batch.images)
images[:, 0, 0] = 0
good = train_vit.split(datasets.Data(images, batch.labels), 4)
images = np.array(images)
images[8:16, 0, 0] = 255  # the second of four
bad = train_vit.split(datasets.Data(images, batch.labels), 4)

state = state_of(optimizer, jmpx.DynamicLossScale(2.0**10, counter=3))
bits = [leaf.tobytes() for leaf in leaves((state.model, state.opt_state))]
policy_map = jmpx.get_policy_map("c=f16,o=f32; LayerNorm: full")
step = train_vit.make_step(policy_map, optimizer, True)
seen = []
for micro_batches in good, bad:
    new, loss, finite = step(state, micro_batches)
    after = [leaf.tobytes() for leaf in leaves((new.model, new.opt_state))]
    scale = [float(new.loss_scale.loss_scale), int(new.loss_scale.counter)]
    seen.append([bool(finite), bool(jnp.isfinite(loss)), after == bits, *scale])
new, _, _ = train_vit.make_step(policy_map, optimizer, False)(state, bad)
taken = not all(np.isfinite(leaf).all() for leaf in leaves(new.model))
print(json.dumps([*seen, taken]))
"""
    )
    assert seen == [[True, True, False, 1024, 4], [False, True, True, 512, 0], True]


def test_the_islands_of_the_default_compute_in_float32():
    dtypes = probe(
        SETUP
        + """
def dtypes_of(policy):
    policy_map = jmpx.get_policy_map(policy)
    logits = lambda model: train_vit.logits_of(model, batch.images, policy_map)
    text = str(jax.make_jaxpr(logits)(model))
    said = [set(re.findall(rf":(\\w+)\\[[^=]*\\] = {name}\\b", text)) for name in ("exp", "tanh")]
    view = jmpx.equinox.with_policies(model, policy_map)
    weights = view.blocks[0].mlp_norm, view.norm, view.head, view.embedding, view.blocks[0].mlp.up
    return [*map(sorted, said), *(module.weight.dtype.name for module in weights)]
print(json.dumps([dtypes_of(train_vit.DEFAULT_POLICY), dtypes_of("c=bf16"), dtypes_of("float32")]))
"""
    )
    assert dtypes == [  # of the softmax, of the GELU, of LayerNorm's weights, the head's and others
        [["f32"], ["bf16"], *["float32"] * 3, *["bfloat16"] * 2],
        [["bf16"], ["bf16"], *["bfloat16"] * 5],
        [["f32"], ["f32"], *["float32"] * 5],
    ]


WATCH = """
import json, sys
import jax
import train_vit
make_step, kept = train_vit.make_step, []

def watched(*args):
    step = make_step(*args)
    def run(state, batch):
        new, loss, finite = step(state, batch)
        whole = all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(new))
        shares = {s.data.shape for s in batch.images.addressable_shards}
        kept.append((float(loss), whole, sorted(shares), len(batch.images.sharding.device_set)))
        return new, loss, finite
    return run

train_vit.make_step = watched
try:
    train_vit.app.run(train_vit.main)
except SystemExit:
    print(json.dumps(kept))
"""


def test_four_devices_share_a_batch_and_give_the_losses_of_one():
    arguments = ["--mp_policy=float32", "--batch_size=240", "--accumulate=2", "--epochs=1"]
    probes = [start_probe(WATCH, *SMALL, *arguments, devices=devices) for devices in (1, 4)]
    one, four = map(answer, probes)
    assert len(one) == len(four) == 5
    for (loss, _, shares, count), (loss4, replicated, shares4, count4) in zip(
        one, four, strict=True
    ):
        assert abs(loss - loss4) < 1e-4
        assert (shares, count) == ([[2, 120, 8, 8, 1]], 1)
        assert (replicated, shares4, count4) == (True, [[2, 30, 8, 8, 1]], 4)


def test_a_batch_that_devices_cannot_share_ends_with_one_line():
    result = run("--batch_size=90", devices=4)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == (
        "--batch_size=90 must be a multiple of --accumulate times the 4 devices"
    )


# CIFAR


def load_datasets():
    spec = importlib.util.spec_from_file_location("vit_datasets", FOLDER / "datasets.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


datasets = load_datasets()


def write_archive(folder, name, contents):
    """Writes the archive of a dataset: pickles, or bytes that stand for one, by member."""
    path = folder / datasets.ARCHIVES[name].file
    with tarfile.open(path, "w:gz") as tar:
        for member, content in contents.items():
            if not isinstance(content, bytes):
                content = pickle.dumps(content, protocol=2)
            information = tarfile.TarInfo(member)
            information.size = len(content)
            tar.addfile(information, io.BytesIO(content))
    return path


def contents_of(name, rng, rows=8):
    archive = datasets.ARCHIVES[name]
    return {
        member: {
            b"batch_label": b"one of them",
            b"data": rng.integers(0, 256, (rows, 3072), np.uint8),
            archive.labels: rng.integers(0, archive.classes, rows).tolist(),
            b"filenames": [b"a.png"] * rows,
        }
        for member in (*archive.train, *archive.test)
    }


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_is_read_from_its_archive(name, rng, tmp_path):
    contents = contents_of(name, rng)
    write_archive(tmp_path, name, contents)
    train, test = datasets.load(name, str(tmp_path))
    archive = datasets.ARCHIVES[name]
    for data, members in (train, archive.train), (test, archive.test):
        assert data.images.dtype == np.uint8 and data.labels.dtype == np.int32
        raw = np.concatenate([contents[member][b"data"] for member in members])
        assert data.images.shape == (len(raw), 32, 32, 3)
        for channel in range(3):  # 1024 numbers of red, then of green, then of blue, row by row
            plane = raw[:, 1024 * channel : 1024 * (channel + 1)]
            np.testing.assert_array_equal(data.images[..., channel].reshape(-1, 1024), plane)
        labels = [label for member in members for label in contents[member][archive.labels]]
        np.testing.assert_array_equal(data.labels, labels)
    assert [path.name for path in tmp_path.iterdir()] == [archive.file]  # nothing is unpacked


def python_2_pickle(images, labels):
    """What NumPy under Python 2 wrote: strings without an encoding, another module's name."""

    def string(text):
        return b"T" + len(text).to_bytes(4, "little") + text

    def integer(number):
        return b"J" + number.to_bytes(4, "little", signed=True)

    dtype = b"cnumpy\ndtype\n(" + string(b"u1") + integer(0) + integer(1) + b"tR("
    dtype += integer(3) + string(b"|") + b"NNN" + 2 * integer(-1) + integer(0) + b"tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(" + integer(0) + b"t"
    array += string(b"b") + b"tR(" + integer(1) + b"(" + b"".join(map(integer, images.shape))
    array += b"t" + dtype + b"I00\n" + string(images.tobytes()) + b"tb"
    numbers = b"](" + b"".join(map(integer, labels)) + b"e"
    return b"\x80\x02}(" + string(b"data") + array + string(b"labels") + numbers + b"u."


def test_pickles_of_python_2_are_read(rng, tmp_path):
    contents = contents_of("cifar10", rng)
    as_python_2 = {
        member: python_2_pickle(content[b"data"], content[b"labels"])
        for member, content in contents.items()
    }
    write_archive(tmp_path, "cifar10", contents)
    expected = datasets.load("cifar10", str(tmp_path))
    write_archive(tmp_path, "cifar10", as_python_2)
    for data, wanted in zip(datasets.load("cifar10", str(tmp_path)), expected, strict=True):
        np.testing.assert_array_equal(data.images, wanted.images)
        np.testing.assert_array_equal(data.labels, wanted.labels)


def test_the_script_trains_on_an_archive(rng, tmp_path):
    write_archive(tmp_path, "cifar100", contents_of("cifar100", rng))
    arguments = [f"--data_dir={tmp_path}", "--patch=16", "--batch_size=4", "--epochs=1", *SMALL]
    result = run("--dataset=cifar100", *arguments)
    assert result.returncode == 0, result.stderr
    assert re.match(r"epoch  1  loss \d\.\d+  test accuracy", result.stdout)


class Payload:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def test_a_hostile_archive_is_refused_with_one_sentence(rng, tmp_path):
    marker = tmp_path / "ran"
    contents = contents_of("cifar10", rng)
    contents["cifar-10-batches-py/data_batch_2"] = {b"data": Payload(os.system, f"touch {marker}")}
    write_archive(tmp_path, "cifar10", contents)
    result = run("--dataset=cifar10", f"--data_dir={tmp_path}", "--patch=4")
    assert result.returncode == 1 and "Traceback" not in result.stderr
    (line,) = [line for line in result.stderr.splitlines() if "data_batch_2" in line]
    assert f"it asks for the object {os.system.__module__}.system" in line
    assert not marker.exists()


HOSTILE = {
    "builtins.eval": lambda: Payload(eval, "open(marker, 'w')"),
    "builtins.getattr": lambda: Payload(getattr, "", "join"),
    "importlib.import_module": lambda: Payload(importlib.import_module, "this"),
    "numpy.fromfile": lambda: Payload(np.fromfile, "/etc/hostname"),
    "subprocess.Popen": lambda: Payload(subprocess.Popen, ["true"]),
    "an array of dtype 'O8'": lambda: np.array([None]),
    "an array of dtype 'V8'": lambda: np.zeros(2, [("a", "f8")]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_plain_value_is_refused(name):
    hostile = pickle.dumps({b"data": HOSTILE[name]()}, protocol=2, fix_imports=False)
    with pytest.raises(ValueError, match="^Refused archive:member, which is not") as error:
        datasets.read_pickle(hostile, "archive:member")
    assert name in str(error.value)


def test_arrays_of_numbers_are_read_as_they_were_written(rng):
    for dtype in ("u1", "<i4", ">i8", "<f4", "?"):
        for order in "CF":
            array = np.asarray(rng.integers(0, 2, (3, 4)), dtype, order=order)
            read = datasets.read_pickle(pickle.dumps(array, protocol=2), "member").array
            np.testing.assert_array_equal(read, array)
            assert read.dtype == array.dtype


def short(content):
    return {**content, b"data": content[b"data"][:, :-1]}


SPOILED = [
    (short, r"Expected uint8\[n, 3072\] as b'data' of .*test_batch, got uint8\[8, 3071\]\."),
    (lambda c: {**c, b"data": c[b"data"] / 255}, r"got float64\[8, 3072\]"),
    (lambda c: {**c, b"data": b"abc"}, "Expected an array or a list of integers .* got bytes"),
    (lambda c: {**c, b"labels": c[b"labels"][1:]}, r"Expected 8 integers.*test_batch, got int64"),
    (lambda c: {**c, b"labels": [10] * 8}, "Expected labels from 0 to 9 .* got 10 to 10"),
    (lambda c: {b"data": c[b"data"]}, "Expected an entry b'labels' in .*test_batch"),
    (lambda c: [c], "Expected a dict in .*test_batch, got list"),
    (lambda c: pickle.dumps(c, protocol=2)[:-100], "^Refused .*test_batch"),
    (lambda c: b"\x80\x02cnumpy\nndarray\n)R}b.", "^Refused .*test_batch"),
]


@pytest.mark.parametrize(("spoil", "message"), SPOILED)
def test_a_member_of_the_wrong_kind_is_refused(spoil, message, rng, tmp_path):
    contents = contents_of("cifar10", rng)
    contents["cifar-10-batches-py/test_batch"] = spoil(contents["cifar-10-batches-py/test_batch"])
    write_archive(tmp_path, "cifar10", contents)
    with pytest.raises(ValueError, match=message) as error:
        datasets.load("cifar10", str(tmp_path))
    assert "\n" not in str(error.value)


def test_a_broken_archive_is_refused(rng, tmp_path):
    contents = contents_of("cifar100", rng)
    path = write_archive(tmp_path, "cifar100", {"cifar-100-python/train": contents.popitem()[1]})
    with pytest.raises(ValueError, match="Expected a file cifar-100-python/test in .*gz"):
        datasets.load("cifar100", str(tmp_path))
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match="Cannot read .*cifar-100-python.tar.gz"):
        datasets.load("cifar100", str(tmp_path))
    path.write_text("not a tar")
    with pytest.raises(ValueError, match="Cannot read .*cifar-100-python.tar.gz"):
        datasets.load("cifar100", str(tmp_path))


BAD = [
    (["--mp_policy=c=bf16; LayerNorm"], "Second default"),
    (["--heads=3"], "--heads must divide --width"),
    (["--patch=3"], "--patch must divide the side of the images"),
    (["--accumulate=3"], "--accumulate must divide --batch_size"),
    (["--learning_rate=nan"], "must be a positive number"),
    (["--dataset=cifar10", "--patch=4"], "--data_dir must be a directory that holds the archive"),
    (["--batch_size=2000"], "must not exceed the 1437 training images"),
    (["--plot=training.gif"], "must be a file ending in"),
    (["bf16"], "unexpected argument 'bf16'"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_a_wrong_flag_ends_with_one_clear_line(arguments, message):
    result = run(*arguments)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    (line,) = [line for line in result.stderr.splitlines() if message in line]
    assert line
