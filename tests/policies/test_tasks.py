"""Contexts of policies in asynchronous tasks."""

import asyncio
import contextlib
import contextvars

import jax
import pytest
from helpers import BF16, F16, F32
from helpers.contexts import CONTEXTS, X, everywhere, nothing_stays_behind, run_linen


@pytest.fixture(autouse=True)
def clean():
    yield from nothing_stays_behind()


async def holds(make, run, entered, leave):
    with make("c=bf16"):
        entered.set()
        assert run() == BF16
        await leave.wait()
        return run()


async def refused_meanwhile(kind, act):
    """Acts in a second task while a first one is in a context; returns what each one gives."""
    entered, leave = asyncio.Event(), asyncio.Event()

    async def acts():
        await entered.wait()
        try:
            act()
        except ValueError as error:
            return str(error)
        finally:
            leave.set()

    make, run = CONTEXTS[kind]
    return await asyncio.gather(holds(make, run, entered, leave), acts())


KINDS = list(CONTEXTS)
PAIRS = [(kind, KINDS[(i + step) % len(KINDS)]) for i, kind in enumerate(KINDS) for step in (0, 1)]


@pytest.mark.parametrize(("kind", "other"), PAIRS)
def test_a_second_task_is_refused_and_the_first_one_goes_on(kind, other):
    def enters():
        with CONTEXTS[other][0]("c=f16"):
            raise AssertionError("entered")

    dtype, message = asyncio.run(refused_meanwhile(kind, enters))
    held = {"haiku": "jmpx.haiku.policies", "linen": "jmpx.flax.policies"}
    names = [held.get(name, "jmpx.push_policy") for name in (other, kind)]
    refused = f"Cannot enter {names[0]} while another task of this thread is inside {names[1]},"
    assert dtype == BF16 and str(message).startswith(refused)


@everywhere
def test_a_module_in_a_task_that_did_not_enter_is_refused(kind):
    make, run = CONTEXTS[kind]
    own = {"push_linen": run_linen}.get(kind, run)  # without the context that it would enter
    dtypes = []

    @jax.jit
    def jitted(x):
        dtypes.append(own(x))  # pyright: ignore[reportOptionalCall]
        return x

    for call in (own, lambda: jitted(X)):
        _, message = asyncio.run(refused_meanwhile(kind, call))
        if kind == "push_linen":
            assert message is None  # no context of Linen's is open: nothing is cast in either task
        else:
            assert "while another task of this thread is inside" in message  # pyright: ignore[reportOperatorIssue]
            with make("c=bf16"):  # what was refused was not cached
                call()  # pyright: ignore[reportOptionalCall]
    assert dtypes == [F32 if kind == "push_linen" else BF16]


@everywhere
def test_tasks_that_leave_before_they_wait_are_free(kind):
    make, run = CONTEXTS[kind]

    async def steps(dtype):
        seen = []
        for _ in range(3):
            with make(f"c={dtype.name}"):
                seen.append(run())
            await asyncio.sleep(0)
            seen.append(run())
        return seen

    async def main():
        return await asyncio.gather(steps(BF16), steps(F16))

    assert asyncio.run(main()) == [[BF16, F32] * 3, [F16, F32] * 3]


@everywhere
def test_tasks_started_within_a_context_are_in_it(kind):
    make, run = CONTEXTS[kind]

    async def child():
        await asyncio.sleep(0)
        return run()

    async def within():
        with make("c=bf16"):
            inside = await asyncio.gather(child(), child())
            with make("c=f16"):
                inside.append(await asyncio.create_task(child()))  # pyright: ignore[reportAttributeAccessIssue]
            late = asyncio.create_task(child())
        return [*inside, await late]

    async def with_one_from_before():
        before = asyncio.create_task(child())
        return [await within(), await before]

    with pytest.raises(ValueError, match="while another task"):
        asyncio.run(with_one_from_before())
    assert asyncio.run(within()) == [BF16, BF16, F16, F32]
    with make("c=f16"):
        assert asyncio.run(child()) == F16


@everywhere
def test_cancelled_and_failing_tasks(kind):
    make, run = CONTEXTS[kind]

    async def main():
        entered, leave = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(holds(make, run, entered, leave))
        await entered.wait()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert run() == F32

        async def fails():
            with make("c=bf16"):
                await asyncio.sleep(0)
                raise RuntimeError("in the middle")

        results = await asyncio.gather(fails(), asyncio.sleep(0), return_exceptions=True)
        assert isinstance(results[0], RuntimeError)
        with make("c=f16"):
            return run()

    assert asyncio.run(main()) == F16


@everywhere
def test_an_asynchronous_generator_that_another_task_closes(kind):
    make, run = CONTEXTS[kind]

    async def steps():
        with make("c=bf16"):
            yield run()
            yield run()

    async def main():
        generator = steps()
        assert await anext(generator) == BF16
        await asyncio.create_task(generator.aclose())
        return run()

    assert asyncio.run(main()) == F32


@everywhere
def test_every_event_loop_tells_its_tasks_by_context_variables(kind):
    """Drives two coroutines by hand, each in a `contextvars.Context`, as any event loop does."""
    make, run = CONTEXTS[kind]

    class Pause:
        def __await__(self):
            yield

    async def steps(dtype):
        with make(f"c={dtype.name}"):
            await Pause()
            return run()

    first, second = steps(BF16), steps(F16)
    contexts = contextvars.copy_context(), contextvars.copy_context()
    contexts[0].run(first.send, None)
    with pytest.raises(ValueError, match="another task"):
        contexts[1].run(second.send, None)
    with pytest.raises(StopIteration) as stop:
        contexts[0].run(first.send, None)
    assert stop.value.value == BF16
