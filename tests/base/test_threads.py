"""Contexts of policies in threads."""

import asyncio
import threading

import pytest
from helpers import BF16, F16, F32
from helpers.contexts import (
    CONTEXTS,
    everywhere,
    nothing_stays_behind,
)


@pytest.fixture(autouse=True)
def clean():
    yield from nothing_stays_behind()


@everywhere
def test_threads_hold_contexts_at_once(kind):
    make, run = CONTEXTS[kind]
    both, seen = threading.Barrier(2), {}

    def work(dtype):
        with make(f"c={dtype.name}"):
            both.wait()
            seen[dtype] = run()
            both.wait()

    threads = [threading.Thread(target=work, args=(dtype,)) for dtype in (BF16, F16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {BF16: BF16, F16: F16}


@everywhere
def test_a_thread_started_by_a_task_has_no_context(kind):
    make, run = CONTEXTS[kind]

    async def main():
        with make("c=bf16"):
            return await asyncio.to_thread(run)

    assert asyncio.run(main()) == F32


# The thread that entered ends while the context is open.
@pytest.mark.filterwarnings("ignore:Exception ignored in")
@everywhere
def test_a_context_cannot_be_left_in_another_thread(kind):
    """It stays in force in the thread that entered it, as the error says."""
    make, run = CONTEXTS[kind]
    seen = []

    def steps():
        with make("c=bf16"):
            yield

    def close(generator):
        with pytest.raises(ValueError, match="^Cannot leave .* in its own thread.$"):
            generator.close()

    def enter():
        generator = steps()
        next(generator)
        in_another_thread(lambda: close(generator))
        seen.append(run())

    in_another_thread(enter)
    assert seen == [BF16] and run() == F32


def in_another_thread(func):
    thread = threading.Thread(target=func)
    thread.start()
    thread.join()
