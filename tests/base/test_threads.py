"""Contexts of policies in threads."""

import asyncio
import threading

import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from helpers import BF16, F16, F32
from helpers.contexts import (
    CONTEXTS,
    EquinoxModule,
    HaikuModule,
    LinenModule,
    X,
    everywhere,
    nothing_stays_behind,
    run_haiku,
)

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


def steps(make, policy="c=bf16"):
    with make(policy):
        yield


def in_another_thread(func):
    thread = threading.Thread(target=func)
    thread.start()
    thread.join()


def end_elsewhere(held, how):
    """Ends the generators in a list in another thread: closes them, or drops the last reference."""

    def end():
        while held:
            generator = held.pop(0)
            if how == "close":
                with pytest.raises(ValueError, match="^Cannot leave .* in its own thread.$"):
                    generator.close()
            del generator

    in_another_thread(end)


def started(make, *policies):
    generators = [steps(make, policy) for policy in policies]
    for generator in generators:
        next(generator)
    return generators


# Python prints an error of a generator that is collected, and goes on.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in")
ENDS = pytest.mark.parametrize("how", ["close", "collect"])


@everywhere
@ENDS
def test_a_context_that_ends_in_another_thread_is_over(kind, how):
    """From the next call of a module, or the next trace of one, on."""
    make, run = CONTEXTS[kind]
    module = jax.jit(lambda x: jnp.zeros((), run(x)))
    around = jax.jit(lambda x: (module(x), x))  # traced without a call of the module
    calls = [module, lambda x: around(x)[0], jax.jit(lambda x: jnp.zeros((), run(x)))]
    held = started(make, "c=bf16")
    assert [call(X).dtype for call in calls[:2]] == [BF16, BF16]
    end_elsewhere(held, how)
    first = calls[2](X).dtype if how == "close" else run()  # a trace, or a call
    assert first == F32
    assert [call(X).dtype for call in calls] == [F32] * 3
    assert run() == F32
    for policy, dtype in [("c=bf16", BF16), ("c=f16", F16)]:
        with make(policy):
            assert [run(), *(call(X).dtype for call in calls)] == [dtype] * 4
    assert [call(X).dtype for call in calls] == [F32] * 3


@everywhere
def test_what_was_compiled_before_a_context_is_not_traced_again_after_it(kind):
    make, run = CONTEXTS[kind]
    traces = []
    call = jax.jit(lambda x: traces.append(run(x)) or x)
    call(X)
    end_elsewhere(started(make, "c=bf16"), "close")
    run()
    call(X)
    call(X)
    assert traces == [F32]


@everywhere
@ENDS
def test_the_contexts_around_one_that_ends_in_another_thread_go_on(kind, how):
    make, run = CONTEXTS[kind]
    call = jax.jit(lambda x: jnp.zeros((), run(x)))
    with make("c=f16"):
        held = started(make, "c=bf16", "c=f32", "c=bf16")
        assert call(X).dtype == run() == BF16
        inner = held.pop(1)
        end_elsewhere(held, how)
        assert run() == call(X).dtype == F32
        inner.close()
        assert call(X).dtype == run() == F16
    assert call(X).dtype == run() == F32


@everywhere
def test_a_context_that_ends_while_its_thread_traces(kind):
    """What is traced partly under a policy is not kept for a later context of that policy."""
    make, run = CONTEXTS[kind]
    held, dtypes = started(make, "c=bf16"), []

    @jax.jit
    def call(x):
        before = run(x)
        end_elsewhere(held, "close")
        dtypes.append((before, run(x)))
        return x

    call(X)
    assert dtypes == [(BF16, F32)]
    call(X)
    with make("c=bf16"):
        call(X)
    assert dtypes == [(BF16, F32), (F32, F32), (BF16, BF16)]


@everywhere
def test_a_policy_that_is_set_after_a_context_has_ended_in_another_thread_stays(kind):
    make, _ = CONTEXTS[kind]
    end_elsewhere(started(make, "c=bf16"), "close")
    for cls in (HaikuModule, LinenModule, EquinoxModule):
        jmpx.set_policy(cls, "c=f16")
        assert jmpx.policy_of(cls) == jmpx.get_policy("c=f16")
        jmpx.clear_policy(cls)


def test_haiku_gets_class_policies_back_from_a_context_that_ends_in_another_thread():
    policy = jmpx.get_policy("c=f16")
    with hk.mixed_precision.push_policy(HaikuModule, policy):  # pyright: ignore[reportArgumentType]
        held = started(jmpx.haiku.policies, "c=bf16")
        assert run_haiku() == F16  # by jmpx, which has taken the policy over
        end_elsewhere(held, "close")
        assert run_haiku() == F16
        assert hk.mixed_precision.get_policy(HaikuModule) is policy
