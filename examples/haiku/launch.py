"""Starts the processes of a `jax.distributed` program on this machine, and ends them together.

A process that waits for a collective waits for ever if another one has died. So one process, the
launcher, trains nothing and watches the others: if one of them fails, or if the launcher is ended,
all end. On a cluster, the cluster's launcher does this.
"""

import contextlib
import functools
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Sequence
from typing import IO, TypeAlias

# Exit statuses of a process.
REFUSED = 2  # It said in one sentence why it stops.
LOST = 4  # A collective failed, as a rule because another process had ended.
PLACE = "EXAMPLE_PLACE"  # the environment variable with a process's address and number
ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SECONDS_FOR_OTHERS = 10  # to say what they met
LAST_LINES = 20

# A process's number and its exit status, or None and a signal that ends the launcher.
Events: TypeAlias = "queue.SimpleQueue[tuple[int | None, int]]"


def is_launched() -> bool:
    """Whether `launch` has started this process."""
    return PLACE in os.environ


def launch(count: int, devices: int, advice: str) -> int:
    """Runs the command line of this process in `count` processes, and waits for them.

    Process 0 writes to the terminal. Of the others, the first that fails shows its last lines.

    Args:
        count: how many processes to start.
        devices: how many devices each gets: of the CPU's, or of a machine's GPUs.
        advice: a sentence that says how to go on after a failure.

    Returns:
        The exit status: 0 if all processes ended with 0.
    """
    events: Events = queue.SimpleQueue()
    for number in ENDINGS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup sets it
            signal.signal(number, lambda number, _: events.put((None, number)))
    address = f"127.0.0.1:{free_port()}"
    processes: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(count)]
        stack.callback(end, processes)
        for index, log in enumerate(logs):
            processes.append(start(f"{address} {count} {index} {devices}", log if index else None))
            await_end = functools.partial(wait_for, processes[index], index, events)
            threading.Thread(target=await_end, daemon=True).start()
        for _ in range(count):
            index, status = next_event(events)
            if index is None:
                end(processes)
                name = signal.Signals(status).name
                say(f"{name} has ended the launcher and its {count} processes. {advice}")
                return 128 + status
            if status == REFUSED:
                return refuse_with(index, processes, logs)
            if status != 0:
                end(processes)
                show(index, status, logs)
                ending = f"ended with status {status}"
                if status < 0:
                    ending = f"was ended by {signal.Signals(-status).name}"
                say(f"process {index} {ending}, so all {count} were ended. {advice}")
                return 1
    return 0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def start(place: str, log: IO[str] | None) -> subprocess.Popen[bytes]:
    """Starts one process by the command line of this one.

    It has a session of its own, so that Ctrl-C reaches the launcher alone, and as its input a pipe
    that ends when the launcher ends, however it does.
    """
    return subprocess.Popen(
        [sys.executable, *sys.orig_argv[1:]],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        env={**os.environ, PLACE: place},
        start_new_session=True,
    )


def wait_for(process: subprocess.Popen[bytes], index: int, events: Events) -> None:
    events.put((index, process.wait()))


def next_event(events: Events) -> tuple[int | None, int]:
    """Returns the next event; a failure comes before the `LOST` that it caused in the others.

    A process closes its connections before the launcher hears of its end, so the others may end
    first.
    """
    event = first = events.get()
    with contextlib.suppress(queue.Empty):
        while event[1] == LOST or (first[1] == LOST and event[1] == 0):
            event = events.get(timeout=SECONDS_FOR_OTHERS)
        return event
    return first


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Kills processes, because one that waits for a collective ignores milder signals."""
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


def refuse_with(
    index: int, processes: list[subprocess.Popen[bytes]], logs: Sequence[IO[str]]
) -> int:
    """Ends all processes after one has refused, and shows its sentence.

    As a rule all refuse, and process 0 writes the sentence to the terminal.
    """
    with contextlib.suppress(subprocess.TimeoutExpired):
        processes[0].wait(SECONDS_FOR_OTHERS)
    end(processes)
    if processes[0].returncode != REFUSED:
        show(index, REFUSED, logs)
    return REFUSED


def show(index: int, status: int, logs: Sequence[IO[str]]) -> None:
    """Writes the last lines of a process other than 0 that failed by itself."""
    if index == 0 or status in (-signal.SIGKILL, -signal.SIGTERM):
        return
    logs[index].seek(0)
    for line in logs[index].read().splitlines()[-LAST_LINES:]:
        print(f"process {index}: {line}", file=sys.stderr)


def say(sentence: str) -> None:
    print(f"\n{sentence}", file=sys.stderr)  # below a progress bar


def connect() -> None:
    """Connects this process with the others, before JAX looks for devices.

    Ends the program, with a sentence, if neither `launch` nor a cluster that JAX knows started it.
    """
    import jax  # here, because the launcher does without

    if not is_launched():
        try:
            jax.distributed.initialize()
        except ValueError as error:
            sys.exit(f"no cluster that JAX knows has started this process: {error}")
        return
    address, *numbers = os.environ[PLACE].split()
    count, index, devices = map(int, numbers)
    follow_launcher()
    jax.config.update("jax_num_cpu_devices", devices)
    jax.distributed.initialize(
        address,
        count,
        index,
        local_device_ids=range(index * devices, (index + 1) * devices),  # of GPUs
        coordinator_bind_address=address,
    )


def follow_launcher() -> None:
    """Ends this process as soon as the launcher has ended, also if the launcher was killed."""

    def follow() -> None:
        os.read(sys.stdin.fileno(), 1)  # Nothing is ever written: it returns when the pipe closes.
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """Ends the process as soon as the body fails.

    Python's usual end would wait minutes for the other processes, which wait for this one. A
    `SystemExit` with a sentence shows the sentence alone.
    """
    try:
        yield
    except BaseException as error:
        status = report(error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def report(error: BaseException) -> int:
    """Writes the traceback or the sentence of an error, and returns the exit status."""
    if not isinstance(error, SystemExit):
        import jax  # here, because the launcher does without

        traceback.print_exc()
        return LOST if isinstance(error, jax.errors.JaxRuntimeError) else 1
    if not isinstance(error.code, str):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return REFUSED
