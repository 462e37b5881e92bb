"""`examples/haiku/launch.py`: processes that are started, watched and ended together."""

import os
import signal
import time

import pytest
from helpers import finish, start_python
from helpers.distributed import FOLDER, gone, is_running, pids

# Each process notes that it runs, waits for the others, and does what it is told.
PROGRAM = """
import os, signal, sys, time
import launch
launch.SECONDS_FOR_OTHERS = 4
folder, *deeds = sys.argv[1:]
if not launch.is_launched():
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # A shell's background jobs ignore SIGINT.
        ignored = name in os.environ.get("IGNORED", "")
        signal.signal(getattr(signal, name), signal.SIG_IGN if ignored else signal.SIG_DFL)
    sys.exit(launch.launch(len(deeds), 1, "Go on."))
launch.follow_launcher()
number = int(os.environ[launch.PLACE].split()[2])
with open(f"{folder}/{number}.tmp", "w") as file:
    file.write(str(os.getpid()))
os.rename(file.name, f"{folder}/{number}.pid")
while sum(name.endswith(".pid") for name in os.listdir(folder)) < len(deeds):
    time.sleep(0.01)
with launch.ending_at_once():
    exec(deeds[number])
"""
WAIT = "time.sleep(600)"
DEAF = "[signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; time.sleep(600)"
RAISE = "raise ArithmeticError('planted')"
LOSE = """
import jax
class Lost(jax.errors.JaxRuntimeError): ...
raise Lost('Connection closed by peer')
"""
AFTER_0 = """
with open(f'{folder}/0.pid') as file:
    first = file.read()
while os.path.exists('/proc/' + first):
    time.sleep(0.01)
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.fixture
def start(tmp_path):
    """Starts a launcher, whose processes do as they are told."""
    started = []

    def start_launcher(*deeds, **environment):
        command = ("-W", "error", "-c", PROGRAM, str(tmp_path), *deeds)
        started.append(start_python(*command, PYTHONPATH=str(FOLDER), **environment))
        return started[-1]

    yield start_launcher
    for process in started:
        process.kill()
        process.communicate()


def test_the_output_of_process_0_is_seen_and_the_status_is_0(start, tmp_path):
    result = finish(start(*["print('I am', number)"] * 3))
    assert (result.returncode, result.stdout, result.stderr) == (0, "I am 0\n", "")
    assert len(pids(tmp_path)) == 3


# What each process does; what is written at last; and what is seen of the process, if anything.
FAILURES = {
    "a raise": (
        [WAIT, RAISE, WAIT],
        "process 1 ended with status 1, so all 3 were ended.",
        "process 1: ArithmeticError: planted",
    ),
    "a raise in process 0": (
        [RAISE, WAIT],
        "process 0 ended with status 1, so all 2 were ended.",
        "ArithmeticError: planted",
    ),
    "an abort": (
        [WAIT, "print('planted', flush=True); os.abort()"],
        "process 1 was ended by SIGABRT, so all 2 were ended.",
        "process 1: planted",
    ),
    "a raise that another process met first": (
        [LOSE, AFTER_0 + RAISE],
        "process 1 ended with status 1, so all 2 were ended.",
        "process 1: ArithmeticError: planted",
    ),
    "a kill that others met first": (
        [LOSE, f"{AFTER_0}sys.exit(0)", AFTER_0 + LOSE, f"{AFTER_0}time.sleep(0.5); {KILL}"],
        "process 3 was ended by SIGKILL, so all 4 were ended.",
        "Lost: Connection closed by peer",
    ),
    "a connection": (
        [WAIT, LOSE],
        "process 1 ended with status 4, so all 2 were ended.",
        "process 1: Lost: Connection closed by peer",
    ),
    "a status": (["sys.exit(3)", WAIT], "process 0 ended with status 3, so all 2 were ended.", ""),
    "after others": (["0", KILL], "process 1 was ended by SIGKILL, so all 2 were ended.", ""),
    "a kill": ([DEAF, DEAF, KILL], "process 2 was ended by SIGKILL, so all 3 were ended.", ""),
    "of one": ([KILL], "process 0 was ended by SIGKILL, so all 1 were ended.", ""),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_ends_all_and_the_last_line_says_whose(start, tmp_path, name):
    deeds, sentence, seen = FAILURES[name]
    began = time.monotonic()
    result = finish(start(*deeds))
    assert time.monotonic() - began < 30
    assert result.returncode == 1 and not any(map(is_running, pids(tmp_path)))
    *lines, empty, last = result.stderr.splitlines()
    assert last == f"{sentence} Go on." and not empty and result.stdout == ""
    assert lines[-1:] == ([seen] if seen else [])


@pytest.mark.thorough
@pytest.mark.parametrize("alone", [False, True])
def test_a_refusal_is_one_sentence(start, tmp_path, alone):
    refuse = "sys.exit('The flags do not fit.')"
    result = finish(start(WAIT if alone else refuse, refuse, WAIT))
    assert result.returncode == 2 and not any(map(is_running, pids(tmp_path)))
    label = "process 1: " if alone else ""
    assert result.stderr == f"{label}The flags do not fit.\n" and result.stdout == ""


def wait_for_all(folder, count):
    """Waits until all processes run, and returns their ids."""
    while len(pids(folder)) < count:
        time.sleep(0.01)
    assert all(map(is_running, pids(folder)))
    return pids(folder)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGKILL"])
def test_a_signal_to_the_launcher_ends_all(start, tmp_path, name):
    launcher = start(DEAF, DEAF)
    running = wait_for_all(tmp_path, 2)
    os.kill(launcher.pid, signal.Signals[name])
    result = finish(launcher)
    assert gone(running)
    if name == "SIGKILL":  # Nobody was left to say anything.
        return
    assert result.returncode == 128 + signal.Signals[name]
    assert result.stderr == f"\n{name} has ended the launcher and its 2 processes. Go on.\n"


@pytest.mark.thorough
def test_a_signal_that_nohup_ignores_stays_ignored(start, tmp_path):
    launcher = start("time.sleep(0.5); print('done')", IGNORED="SIGHUP")
    wait_for_all(tmp_path, 1)
    launcher.send_signal(signal.SIGHUP)
    result = finish(launcher)
    assert (result.returncode, result.stdout) == (0, "done\n")
