"""Long float16 trainings, killed and not, and that their comparisons notice a failure."""

import os
import random

import pytest
from helpers import float16_training, kills, run_python, soak
from helpers.kills import FORMATS, digest

pytestmark = pytest.mark.usefixtures("standard_promotion")  # as in a user's program


@pytest.fixture
def seed(request):
    """Of what a script draws: what it drew before, or another one."""
    is_new = request.config.getoption("--hypothesis-profile") == "new_draws"
    return random.randrange(2**31) if is_new else 0


# kills.py

every_format = pytest.mark.parametrize("form", FORMATS)


@pytest.mark.slow  # trainings in processes of their own
@pytest.mark.hypothesis
@every_format
def test_a_killed_training_loses_nothing(form, seed):
    if form == "Orbax":
        pytest.importorskip("orbax.checkpoint")
    figures, failures = kills.run(form, seed)
    assert not failures
    assert figures["lines"] >= 150 and figures["kills"] == 1


def test_a_line_or_a_bit_that_differs_is_a_failure():
    whole = [{"from": 0, "unfinished": 0}, [0, "a", 1, 0, 0, 0], [1, "b", 1, 0, 0, 0]]
    whole.append({"final": "bits"})
    killed = [*whole[:2], {"from": 0, "unfinished": 1}, *whole[1:]]
    figures, failures = kills.compare(whole, killed, 2, 1)
    assert not failures and (figures["lines"], figures["torn_writes"]) == (3, 1)
    for index, other in ((1, [0, "c", 1, 0, 0, 0]), (-1, {"final": "others"}), (-2, [0, 0])):
        changed = list(killed)
        changed[index] = other
        assert kills.compare(whole, changed, 2, 1)[1]
    assert kills.compare(whole, killed, 2, 2)[1]


@pytest.fixture
def states():
    step, _ = float16_training.make_step()
    first, *_ = step(kills.init(), kills.batch(0))
    return first, step(first, kills.batch(1))[0]


def saved(form, folder, *states):
    """Returns a folder that holds a checkpoint of each state."""
    folder.mkdir()
    if form == "Orbax":
        pytest.importorskip("orbax.checkpoint")
    checkpoints = FORMATS[form](folder)
    for step, state in enumerate(states, 1):
        checkpoints.save(step, state)
    checkpoints.close()
    return folder


def resumed(form, folder):
    checkpoints = FORMATS[form](folder)
    try:
        return kills.resume(checkpoints, kills.init())
    finally:
        checkpoints.close()


# Threads of Orbax outlive the event loop of a checkpoint that cannot be read.
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@every_format
def test_a_torn_checkpoint_is_told_and_the_one_before_it_is_used(
    form, states, rng, tmp_path, capfd
):
    folder = saved(form, tmp_path / "saved", *states)
    step, state = resumed(form, folder)
    assert (step, digest(state)) == (2, digest(states[1]))
    if form == "Orbax":  # The file of all leaves; tests of the others take long.
        newest = max((folder / "2" / "default" / "d").iterdir(), key=os.path.getsize)
    else:
        newest = FORMATS[form](folder).path(2)
    whole = newest.read_bytes()
    lengths = {0, 1, len(whole) - 1, *rng.integers(len(whole), size=2 if form == "Orbax" else 20)}
    for length in lengths:
        newest.write_bytes(whole[:length])
        capfd.readouterr()
        step, state = resumed(form, folder)
        assert (step, digest(state)) == (1, digest(states[0])), length
        assert capfd.readouterr().err.count("is torn") == 1
    if form == "npz":
        for index in rng.integers(len(whole), size=20):
            flipped = bytearray(whole)
            flipped[index] ^= 1 << rng.integers(8)
            newest.write_bytes(flipped)
            step, state = resumed(form, folder)
            assert digest(state) == digest(states[step - 1]), index


@pytest.mark.thorough
def test_torn_checkpoints_alone_are_refused_in_one_sentence(states, tmp_path):
    folder = saved("npz", tmp_path / "saved", states[0])
    path = kills.Npz(folder).path(1)
    path.write_bytes(path.read_bytes()[:-1])
    sentence = r"^[^.\n]* is torn [^.\n]* and there is none before it[^.\n]*\.$"
    with pytest.raises(ValueError, match=sentence):
        resumed("npz", folder)


@pytest.mark.thorough
def test_a_write_that_fails_leaves_the_checkpoints_as_they_were(states, tmp_path, monkeypatch):
    folder = saved("npz", tmp_path / "saved", states[0])

    def full(file):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        kills.Npz(folder).save(2, states[1])
    step, state = resumed("npz", folder)
    assert (step, digest(state)) == (1, digest(states[0]))


# soak.py


@pytest.mark.slow  # 150 steps with each of two loss scales
@pytest.mark.hypothesis
@pytest.mark.parametrize("skip_by", ["cond", "where"])
def test_every_step_is_that_of_the_plain_model(skip_by, seed):
    for name in ("hysteresis 3", "backoff 0.5, factor 1.1"):
        figures, failures = soak.run(name, skip_by, 150, seed)
        assert not failures
        assert figures["traces"] == 1 and figures["planted"] == 15


# What a program begins with


FIRST_STEP = """
import functools, pkgutil, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
import jmpx

traces = []

def loss_fn(w, x):
    traces.append(1)
    return jnp.mean((x @ w).astype(jnp.float32) ** 2)

def step(w, x, scale, axis_name=None):
    over = axis_name and jmpx.Over(axis_name)
    grad_fn = jmpx.grad(loss_fn, scale, policy="c=f16", over=over)
    scale, finite, grads = grad_fn(w, x)
    return grads, scale

OTHERS
in_specs = P(), P("data"), P()
mesh = Mesh(jax.devices(), "data")
mapped = functools.partial(step, axis_name="data")
mapped = jax.shard_map(mapped, mesh=mesh, in_specs=in_specs, out_specs=P())
for jitted in jax.jit(step), jax.jit(mapped):
    w, x = jnp.ones((3, 2)), jnp.ones((8, 3))
    scale = jax.tree.map(jnp.asarray, jmpx.DynamicLossScale(8.0))
    for _ in range(3):
        jitted(w, x, scale)
    print(len(traces))
jax.make_user_context = None  # an error where a part that is imported later makes one
for module in pkgutil.walk_packages(jmpx.__path__, "jmpx."):
    if module.name != "jmpx.__main__":
        __import__(module.name)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("others", ["", "step = jmpx.autocast(step)"])
def test_the_first_step_of_a_program_is_traced_once(others):
    result = run_python("-c", FIRST_STEP.replace("OTHERS", others))
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["1", "2"]
