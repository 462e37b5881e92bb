"""`examples/haiku/train.py` and the programs beside it, run as a user runs them."""

import re

import pytest
from helpers import LESS_OPTIMIZED, QUICK_XLA, ROOT, run_python
from helpers.examples import accuracy_of, assert_refused

FOLDER = ROOT / "examples" / "haiku"
SCRIPT = FOLDER / "train.py"


def run(*arguments, script="train.py", xla_flags=QUICK_XLA, **environment):
    path = str(FOLDER / script)
    return run_python("-W", "error", path, *arguments, xla_flags=xla_flags, **environment)


RUNS = {
    "float32": ["--mp_policy=float32"],
    "bfloat16": ["--mp_policy=params=float32,compute=bfloat16,output=float32"],
    "float16 dynamic": ["--mp_policy=16-mixed", "--mp_scale_type=Dynamic"],
}


@pytest.mark.slow  # a training in full
@pytest.mark.parametrize("name", RUNS)
def test_it_reaches_97_percent_with_the_default_seed(name):
    result = run(*RUNS[name], xla_flags=LESS_OPTIMIZED)
    assert accuracy_of(result, 15, timed=False) >= 97


@pytest.mark.slow  # three trainings in full
def test_stochastic_rounding_trains_16_bit_parameters_where_plain_rounding_stalls():
    accuracy = {}
    for name, script, argument in (
        ("float32", "train.py", "--mp_policy=float32"),
        ("nearest", "storage.py", "--params_rounding=nearest"),
        ("stochastic", "storage.py", "--params_rounding=stochastic"),
    ):
        arguments = argument, "--learning_rate=1e-4"
        result = run(*arguments, script=script, xla_flags=LESS_OPTIMIZED)
        assert result.returncode == 0, result.stderr
        accuracy[name] = float(re.findall(r"test accuracy ([\d.]+)%", result.stdout)[-1])
    assert accuracy["stochastic"] > accuracy["float32"] - 1
    assert accuracy["nearest"] < accuracy["float32"] - 5


@pytest.mark.slow  # a training
def test_a_scale_of_2_to_the_24_skips_steps_settles_and_is_drawn(tmp_path):
    plot = tmp_path / "training.png"
    arguments = "--mp_policy=16-mixed", "--mp_scale_value=16777216", "--epochs=2"
    result = run(*arguments, f"--plot={plot}", script="plot.py")
    assert result.returncode == 0, result.stderr
    scales = [float(s) for s in re.findall(r"loss scale (\S+)", result.stdout)]
    skipped = [int(n) for n in re.findall(r"skipped steps (\d+)", result.stdout)]
    assert 0 < skipped[0] <= skipped[-1] < 15
    assert scales[-1] == 2.0 ** (24 - skipped[-1])
    assert plot.read_bytes().startswith(b"\x89PNG") and plot.stat().st_size > 10_000


@pytest.mark.slow  # a training
def test_rules_of_a_policy_map_and_a_static_loss_scale():
    result = run(
        *("--mp_loss_scale=static=2**10", "--epochs=1"),
        JMPX_POLICY="by=modules,c=f16,o=f32; */head: c=f32,m=highest",
        JMPX_LOSS_SCALE="dynamic",  # the command line goes before it
    )
    assert result.returncode == 0, result.stderr
    assert "loss scale 1024  skipped steps 0" in result.stdout
    assert "*/head: compute=float32,matmul=highest | static=1024)" in result.stdout


WAYS = {
    "arguments": "by=arguments,c=bf16,o=f32",
    "modules": "by=modules,c=bf16,o=f32; */head: c=f32,m=highest",
    "operations": "c=bf16,save=products",
}


@pytest.mark.slow  # three trainings
def test_the_policy_alone_switches_between_arguments_modules_and_autocast():
    # Without excess precision, with which XLA:CPU leaves out most roundings to bfloat16.
    flags = f"--xla_allow_excess_precision=false {LESS_OPTIMIZED}"
    losses = {}
    for way, policy in WAYS.items():
        result = run(f"--mp_policy={policy}", "--epochs=2", xla_flags=flags)
        assert result.returncode == 0, result.stderr
        assert float(re.findall(r"test accuracy ([\d.]+)%", result.stdout)[-1]) > 90
        losses[way] = re.findall(r"loss ([\d.]+)", result.stdout)[:2]
    assert len(set(map(tuple, losses.values()))) == 3


@pytest.mark.slow  # a few steps of a training
def test_a_run_that_diverges_ends_with_one_line():
    diverging = ["--mp_policy=16-mixed", "--mp_loss_scale=static=2**100", "--mp_max_skips=2"]
    result = run(*diverging)
    assert result.returncode == 1 and result.stdout == ""
    line = re.split(r"[\r\n]", result.stderr.strip())[-1].strip()  # after the progress bar
    assert line.startswith(
        "Training diverged. Skipped 3 optimizer steps in a row, more than max_consecutive=2, "
        "with the loss scale 'static=2**100': "
    )
    assert "Traceback" not in result.stderr


BAD = [
    ("--mp_policy=c=flaot32", "did you mean 'float32'"),
    ("--batch_size=2000", "batch_size"),
    ("--learning_rate=-1", "learning_rate"),
    ("--mp_polcy=bf16", "Unknown command line flag 'mp_polcy'"),
    ("bf16", "unexpected argument 'bf16'"),
]


@pytest.mark.thorough
def test_a_wrong_flag_ends_with_one_clear_line():
    assert_refused(SCRIPT, BAD)
    assert_refused(
        FOLDER / "plot.py",
        [
            ("--plot=/no/such/directory/x.png", "directory that can be written to"),
            ("--plot=training.gif", "must be a file ending in"),
            ("", "--plot must have a value other than None"),
        ],
    )
    assert_refused(
        FOLDER / "storage.py",
        [
            ("--mp_policy=c=bf16", "write params=bfloat16"),
            ("--params_rounding=up", "params_rounding"),
        ],
    )
