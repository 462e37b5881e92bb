"""Contexts of policies in threads."""

import asyncio
import threading

import pytest
from helpers import BF16, F16, F32
from helpers.contexts import CONTEXTS, HaikuModule, LinenModule, everywhere, nothing_stays_behind

import jmpx
import jmpx.equinox
import jmpx.flax
import jmpx.haiku


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


@pytest.mark.parametrize("kind", ["haiku", "linen"])
def test_a_context_that_ends_in_another_thread_is_over(kind):
    make, run = CONTEXTS[kind]

    def steps():
        with make("c=bf16"):
            yield

    generator = steps()
    next(generator)
    thread = threading.Thread(target=generator.close)
    thread.start()
    thread.join()
    assert run() == F32
    with make("c=f16"):
        assert run() == F16


@pytest.mark.parametrize("kind", ["push_haiku", "push_linen"])
def test_a_push_that_ends_in_another_thread_says_so(kind):
    make, _ = CONTEXTS[kind]
    errors = []

    def end(context):
        try:
            context.__exit__(None, None, None)
        except ValueError as error:
            errors.append(str(error))

    context = make("c=bf16")
    context.__enter__()
    thread = threading.Thread(target=end, args=(context,))
    thread.start()
    thread.join()
    assert len(errors) == 1 and "in its own thread" in errors[0]
    jmpx.clear_policy({"push_haiku": HaikuModule}.get(kind, LinenModule))
