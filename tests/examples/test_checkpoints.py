"""`examples/haiku/checkpoints.py`: what is restored is what was saved, or the program ends."""

import gc
import re
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import F16, assert_same_bits, normal
from helpers.examples import example, files_of
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jmpx

checkpoints = example("haiku/checkpoints.py")
RUN = {"seed": 0, "epochs": 2}


# Orbax leaves coroutines behind when it cannot read a file.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True, scope="module")
def leave_out():
    """Leaves out of the search for those coroutines what other files left."""
    gc.freeze()


@pytest.fixture(autouse=True)
def collect():
    """Lets Python find those coroutines before another test runs."""
    yield
    gc.collect()


@pytest.fixture
def tree(rng):
    """A state of a training, on all devices."""
    params = {"linear": {"w": normal(rng, 16, 4), "b": normal(rng, 4).astype(F16)}}
    tree = {"params": params, "scale": jmpx.DynamicLossScale(2**10), "step": np.int32(7)}
    sharding = NamedSharding(Mesh(jax.devices(), ("data",)), PartitionSpec())
    return jax.device_put(jax.tree.map(jnp.asarray, tree), sharding)


def save(folder, tree, *numbers, run=RUN):
    saved = checkpoints.Checkpoints(str(folder), run)
    for number in numbers:
        saved.save(number, tree)
    saved.close()


def restore(folder, like, run=RUN):
    """Restores the newest checkpoint in place of zeros."""
    saved = checkpoints.Checkpoints(str(folder), run)
    try:
        return saved.restore(saved.newest(), jax.tree.map(jnp.zeros_like, like))
    finally:
        saved.close()


def sentence_of(end):
    """Returns the one sentence with which the program ends."""
    sentence = end.code
    assert isinstance(sentence, str) and "\n" not in sentence
    return sentence


def refusal(folder, like, run=RUN):
    """Returns the sentence with which a restoration ends the program, and holds no file changed."""
    before = files_of(folder)
    with pytest.raises(SystemExit) as caught:
        restore(folder, like, run)
    assert files_of(folder) == before
    return sentence_of(caught.value)


@pytest.mark.thorough
def test_bits_dtypes_and_shardings_come_back(tmp_path, tree):
    save(tmp_path, tree, 1, 2)
    restored = restore(tmp_path, tree)
    assert_same_bits(restored, tree)
    for old, new in zip(jax.tree.leaves(tree), jax.tree.leaves(restored), strict=True):
        assert new.sharding == old.sharding and new.is_fully_replicated


def test_the_newest_three_are_kept(tmp_path, tree):
    save(tmp_path, tree, 1, 2, 3, 9, 10)
    saved = checkpoints.Checkpoints(str(tmp_path), RUN)
    assert saved.newest() == 10
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == [3, 9, 10]
    saved.close()


def test_what_a_killed_save_left_is_not_a_checkpoint(tmp_path, tree):
    save(tmp_path, tree, 1)
    left = tmp_path / "2.orbax-checkpoint-tmp"
    shutil.copytree(tmp_path / "1", left)
    assert_same_bits(restore(tmp_path, tree), tree)
    deadline = time.monotonic() + 60  # Orbax removes it in a thread of its own
    while left.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left.exists()


def test_an_empty_directory_has_no_checkpoint(tmp_path):
    saved = checkpoints.Checkpoints(str(tmp_path / "new" / "folder"), RUN)
    assert saved.newest() is None
    saved.close()


def test_a_file_in_the_place_of_the_directory(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SystemExit, match="--checkpoint_dir=.*file cannot be used"):
        checkpoints.Checkpoints(str(tmp_path / "file"), RUN)
    assert (tmp_path / "file").read_text() == "mine"


def wider(tree):
    return {**tree, "params": {"linear": {**tree["params"]["linear"], "w": jnp.zeros((16, 5))}}}


def renamed(tree):
    return {**tree, "params": {"linear_1": tree["params"]["linear"]}}


# What the program has in place of what was saved -> how the sentence names the first difference.
OTHERS = {
    "shape": (wider, r"\['params'\]\['linear'\]\['w'\] is float32\[16, 4\], not float32\[16, 5\]"),
    "name": (renamed, r"\['params'\]\['linear'\]\['b'\] is float16\[4\], not missing"),
    "dtype": (
        lambda tree: {**tree, "step": jnp.zeros((), jnp.float32)},
        r"\['step'\] is int32\[\], not float32\[\]",
    ),
    "more": (
        lambda tree: {**tree, "average": jnp.zeros(2)},
        r"\['average'\] is missing, not float32\[2\]",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_model_is_refused_with_the_first_difference(tmp_path, tree, name):
    change, difference = OTHERS[name]
    save(tmp_path, tree, 3)
    sentence = refusal(tmp_path, change(tree))
    assert re.search(
        f"checkpoint {tmp_path}/3 is of another model, in which {difference}", sentence
    )


@pytest.mark.parametrize("run", [{"seed": 1, "epochs": 2}, {"seed": 0, "epochs": 2, "size": 8}])
def test_another_run_is_refused(tmp_path, tree, run):
    save(tmp_path, tree, 3)
    sentence = refusal(tmp_path, tree, run)
    (name, value), *_ = run.items() - RUN.items()
    assert f"is of a run with --{name}={RUN.get(name)}, not {value}: give" in sentence


# What may happen to a file on a disk or on its way to another.
DAMAGE = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "emptied": lambda path: path.write_bytes(b""),
    "lost": lambda path: path.unlink(),
    "one bit": lambda path: flip(path),
}


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 4
    path.write_bytes(bytes(data))


@pytest.mark.thorough
@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_never_gives_other_bits(tmp_path, tree, name):
    """Each file of a checkpoint in turn: some hold what nobody reads, and none may do harm."""
    whole, copy = tmp_path / "whole", tmp_path / "copy"
    save(whole, tree, 1, 5)
    refused = 0
    for path in sorted(path for path in (whole / "5").rglob("*") if path.is_file()):
        if name == "one bit" and not path.stat().st_size:
            continue
        shutil.copytree(whole, copy)
        DAMAGE[name](copy / path.relative_to(whole))
        before = files_of(copy)
        try:
            assert_same_bits(restore(copy, tree), tree)
        except SystemExit as end:
            assert f"{copy}/5 is damaged or of another program (" in sentence_of(end)
            assert files_of(copy) == before
            refused += 1
        shutil.rmtree(copy)
    assert refused > 1


def test_the_one_before_a_damaged_one_remains(tmp_path, tree):
    save(tmp_path, tree, 1, 5)
    shutil.rmtree(tmp_path / "5" / "arrays")
    assert "resumes from the one before" in refusal(tmp_path, tree)
    shutil.rmtree(tmp_path / "5")
    assert_same_bits(restore(tmp_path, tree), tree)


def test_a_directory_of_another_program_is_refused(tmp_path, tree):
    (tmp_path / "4").mkdir()
    (tmp_path / "4" / "weights.npz").write_bytes(b"mine")
    assert "is damaged or of another program" in refusal(tmp_path, tree)
