"""`examples/haiku/train_distributed.py`: the same bits in all processes, or a clear end."""

import re
import shutil

import pytest
from helpers import LESS_OPTIMIZED, QUICK_XLA, finish, run_python
from helpers.distributed import FOLDER, gone, pids, read_log, start_training, summed_dtypes
from helpers.examples import assert_refused, files_of

SCRIPT = FOLDER / "train_distributed.py"
STEPS = 12  # two epochs
NAN_AT = 7
EVERY = 5  # steps from one checkpoint to the next
SCALE = 2.0**20  # The first steps overflow.
PERIOD = 4


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Runs the example, with a NaN for one device, and returns the result and what was noted."""
    cache = tmp_path_factory.mktemp("cache")

    def run(processes, devices, checkpoints, *arguments, **faults):
        log = tmp_path_factory.mktemp("log")
        result = finish(
            start_training(
                *(f"--processes={processes}", f"--devices_per_process={devices}", "--epochs=2"),
                f"--mp_loss_scale=dynamic,init={SCALE},period={PERIOD}",
                *(f"--checkpoint_dir={checkpoints}", f"--checkpoint_every={EVERY}", *arguments),
                **{"cache": cache, "log": str(log), "nan": [NAN_AT, 3], **faults},
            )
        )
        assert pids(log) and gone(pids(log))
        if (log / "step.mlir").exists():  # All is summed in float32, though the model is float16.
            assert summed_dtypes(log) == {"f32"} and "xf16>" in (log / "step.mlir").read_text()
        return result, read_log(log)

    return run


@pytest.fixture(scope="module")
def unbroken(train, tmp_path_factory):
    """A run of one process with four devices: its result, its log and its checkpoints."""
    folder = tmp_path_factory.mktemp("unbroken")
    result, log = train(1, 4, folder)
    assert result.returncode == 0, result.stderr
    return result, log, folder


def digest(result):
    """Returns the digest of the final state, which a run prints last."""
    found = re.search(r" devices: ([0-9a-f]{64})\n$", result.stdout)
    assert found, result.stderr
    return found[1]


def output(result):
    """Returns the lines of standard output, without those that JAX's collectives write."""
    return [line for line in result.stdout.splitlines() if not line.startswith("[Gloo]")]


def epochs(result):
    return [line for line in output(result) if line.startswith("epoch")]


def same_everywhere(log):
    """Holds that all devices of all processes had the same state after each step; returns it."""
    first, *others = log.values()
    assert all(other == first for other in others)
    assert all(len(set(step.digests)) == 1 for step in first.values())
    return {number: (step.scale, step.was_taken, step.digests[0]) for number, step in first.items()}


@pytest.mark.thorough  # many processes
def test_a_nan_or_an_overflow_on_one_device_skips_the_step_on_all(unbroken):
    result, log, _ = unbroken
    steps = same_everywhere(log)
    assert list(steps) == list(range(STEPS)) and len(log["0"][0].digests) == 4
    taken = [was_taken for _, was_taken, _ in steps.values()]
    assert not taken[0] and not taken[NAN_AT] and 4 <= sum(taken) < STEPS
    scale, finite = SCALE, 0  # a plain model of the loss scale
    for new_scale, was_taken, _ in steps.values():
        finite = finite + 1 if was_taken else 0
        scale = scale * 2 if finite == PERIOD else scale if was_taken else scale / 2
        finite %= PERIOD
        assert new_scale == scale
    assert len(epochs(result)) == 2 and f"skipped steps {STEPS - sum(taken)}" in epochs(result)[1]


def check_killed_and_resumed(train, unbroken, folder, at, before, after, **faults):
    """Kills a process of a run, and resumes it with what may be another number of processes."""
    step, process = at
    killed, first = train(*before, folder, kill=at, **faults)
    assert killed.returncode == 1
    assert killed.stderr.splitlines()[-1] == (
        f"process {process} was ended by SIGKILL, so all {before[0]} were ended. "
        "The same command resumes from the newest checkpoint."
    )
    # The others may be ended before they have noted the step that they share.
    lasts = {name: max(steps) for name, steps in first.items()}
    assert len(lasts) == before[0] and lasts[str(process)] == step - 1
    assert set(lasts.values()) <= {step - 2, step - 1}
    shared = range(min(lasts.values()) + 1)
    first = {name: {n: steps[n] for n in shared} for name, steps in first.items()}

    resumed, second = train(*after, folder)
    assert resumed.returncode == 0, resumed.stderr
    found = re.search(f"^resumed after step (.*) of {STEPS}$", resumed.stdout, re.MULTILINE)
    last = int(found[1]) if found else 0
    assert last in range(0, step + 1, EVERY) and (found or "saved" not in faults)
    expected = same_everywhere(unbroken[1])
    assert same_everywhere(first) == {n: expected[n] for n in shared}
    assert same_everywhere(second) == {n: expected[n] for n in range(last, STEPS)}
    assert digest(resumed) == digest(unbroken[0])
    assert epochs(resumed) == epochs(unbroken[0])[-len(epochs(resumed)) :] != []


@pytest.mark.thorough  # many processes
def test_a_killed_process_ends_all_and_the_resumed_run_has_the_bits(train, unbroken, tmp_path):
    check_killed_and_resumed(
        train, unbroken, tmp_path, [8, 1], (2, 2), (2, 2), saved=str(tmp_path / str(EVERY))
    )


@pytest.mark.slow  # many processes
@pytest.mark.parametrize(
    "at, before, after",
    [([9, 0], (4, 1), (4, 1)), ([11, 3], (4, 1), (1, 4)), ([5, 0], (1, 4), (4, 1))],
    ids=["the first", "fewer resume", "while it saves, and more resume"],
)
def test_any_process_may_be_killed_and_fewer_or_more_resume(
    train, unbroken, tmp_path, at, before, after
):
    check_killed_and_resumed(train, unbroken, tmp_path, at, before, after)


@pytest.mark.slow  # many processes
@pytest.mark.parametrize("processes, devices", [(2, 2), (4, 1)])
def test_scales_flags_and_bits_are_those_of_one_process(
    train, unbroken, tmp_path, processes, devices
):
    result, log = train(processes, devices, tmp_path)
    assert result.returncode == 0, result.stderr
    assert len(log) == processes and same_everywhere(log) == same_everywhere(unbroken[1])
    assert digest(result) == digest(unbroken[0]) and epochs(result) == epochs(unbroken[0])


@pytest.mark.slow  # one process more
def test_a_run_that_has_ended_tells_its_digest_again(train, unbroken):
    result, log = train(1, 4, unbroken[2])
    assert result.returncode == 0 and not log
    assert digest(result) == digest(unbroken[0])


@pytest.mark.thorough  # many processes
def test_a_checkpoint_of_another_model_ends_with_one_sentence(train, unbroken):
    before = files_of(unbroken[2])
    result, _ = train(1, 4, unbroken[2], channels=5)
    assert result.returncode == 2 and not output(result)
    (line,) = result.stderr.splitlines()
    assert f"{unbroken[2]}/{STEPS} is of another model, in which " in line
    assert files_of(unbroken[2]) == before


@pytest.mark.slow  # many processes
def test_a_torn_checkpoint_ends_all_processes_with_one_sentence(train, unbroken, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(unbroken[2], folder)
    for path in (folder / str(STEPS) / "arrays").glob("**/d/*"):
        path.write_bytes(path.read_bytes()[:-9])
    before = files_of(folder)
    result, _ = train(2, 2, folder)
    assert result.returncode == 2 and not output(result)
    (line,) = result.stderr.splitlines()
    assert f"{folder}/{STEPS} is damaged or of another program" in line
    assert files_of(folder) == before

    shutil.rmtree(folder / str(STEPS))
    resumed, _ = train(2, 2, folder)
    assert resumed.returncode == 0 and digest(resumed) == digest(unbroken[0])


@pytest.mark.slow  # many processes
def test_an_exception_in_one_process_ends_all_and_is_seen(train, tmp_path):
    result, _ = train(2, 1, tmp_path, **{"raise": [3, 1]})
    *_, error, _, last = result.stderr.splitlines()
    assert result.returncode == 1 and error == "process 1: ArithmeticError: planted"
    assert last.startswith("process 1 ended with status 1, so all 2 were ended.")


@pytest.mark.slow  # a training
def test_the_example_itself_learns():
    result = run_python(
        *("-W", "error", str(SCRIPT), "--processes=2", "--devices_per_process=2", "--epochs=2"),
        "--mp_policy=by=modules,c=bf16,o=f32",
        xla_flags=LESS_OPTIMIZED,
    )
    assert result.returncode == 0, result.stderr
    assert float(re.findall(r"test accuracy ([\d.]+)%", result.stdout)[-1]) > 90
    assert "step/s" in result.stderr and "2 x 2 devices: " in result.stdout


@pytest.mark.thorough
def test_without_a_cluster_nothing_is_launched():
    result = run_python("-W", "error", str(SCRIPT), "--launch=none", xla_flags=QUICK_XLA)
    assert result.returncode == 2 and not output(result)
    assert result.stderr.startswith("no cluster that JAX knows has started this process: ")


BAD = [
    ("--processes=0", "--processes"),
    ("--devices_per_process=x", "--devices_per_process"),
    ("--launch=srun", "--launch"),
    ("--checkpoint_dir=", "must name a directory"),
    ("--checkpoint_every=0", "--checkpoint_every"),
    ("--plot=x.png", "Unknown command line flag 'plot'"),
    ("bf16", "unexpected argument 'bf16'"),
]


@pytest.mark.thorough
def test_a_wrong_flag_starts_nothing():
    assert_refused(SCRIPT, BAD)
