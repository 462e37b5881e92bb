"""Contexts of policies that end in another order than they began, or in another thread."""

import asyncio
import itertools
import threading
import warnings

import flax.linen as nn
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
    run_linen,
)

import jmpx
import jmpx.equinox
import jmpx.flax
import jmpx.haiku

# Python prints an error of a generator that is collected, and goes on.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in")
ENDS = pytest.mark.parametrize("how", ["close", "collect"])
PUSHES = {"haiku": HaikuModule, "linen": LinenModule, "equinox": EquinoxModule}


@pytest.fixture(autouse=True)
def clean():
    yield from nothing_stays_behind()


def enter(*contexts):
    for context in contexts:
        context.__enter__()


def leave(context):
    context.__exit__(None, None, None)


# Contexts that end in another order


@everywhere
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 0, 1), (1, 0, 2)], ids=str)
def test_contexts_may_end_in_any_order(kind, order):
    make, run = CONTEXTS[kind]
    dtypes = [BF16, F16, BF16]
    contexts = [make(f"c={dtype.name}") for dtype in dtypes]
    enter(*contexts)
    assert run() == dtypes[-1]
    still_open = [0, 1, 2]
    for i in order:
        leave(contexts[i])
        still_open.remove(i)
        assert run() == (dtypes[still_open[-1]] if still_open else F32)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4)))[::4], ids=str)
def test_contexts_of_several_kinds_may_end_in_any_order(order):
    names = ["haiku", "linen", "push_equinox", "push_linen"]
    contexts = [CONTEXTS[name][0]("c=bf16") for name in names]
    enter(*contexts)
    still_open = {*names}
    for i in order:
        leave(contexts[i])
        still_open.remove(names[i])
        for name in ("haiku", "linen", "push_equinox"):
            expected = BF16 if name in still_open else F32
            assert CONTEXTS[name][1]() == expected


@pytest.mark.parametrize("name", PUSHES)
def test_set_policy_between_pushes_that_end_out_of_order(name):
    make, run = CONTEXTS[f"push_{name}"]
    jmpx.set_policy(PUSHES[name], "c=f16")
    first, second = make("c=bf16"), make("c=f32")
    enter(first, second)
    leave(first)
    assert run() == F32
    leave(second)
    assert run() == F16
    jmpx.clear_policy(PUSHES[name])


# Refused entries, and frameworks' own interceptors


@everywhere
def test_an_entry_that_is_refused_changes_nothing(kind):
    make, run = CONTEXTS[kind]
    with make("c=bf16"):
        with pytest.raises(ValueError, match="Unknown dtype"), make("c=f17"):
            raise AssertionError
        assert run() == BF16


def test_the_users_interceptors_around_and_inside_are_left_alone():
    calls = []

    def count(f, args, kwargs, context):
        calls.append(context.method_name)
        return f(*args, **kwargs)

    for intercept, make, run in [
        (hk.intercept_methods, jmpx.haiku.policies, run_haiku),
        (nn.intercept_methods, jmpx.flax.policies, run_linen),
    ]:
        calls.clear()
        with intercept(count), make("c=f16"), intercept(count), make("c=bf16"):
            assert run() == BF16
        assert calls.count("__call__") == 2


def test_a_policy_is_pushed_inside_of_a_method_of_another_class():
    class Outer(hk.Module):
        def __call__(self, x):
            with jmpx.push_policy(HaikuModule, "c=f16"):
                return HaikuModule()(x)

    network = hk.transform(lambda x: Outer()(x))
    assert network.apply({}, None, X).dtype == F16
    with jmpx.haiku.policies("c=bf16"):
        assert network.apply({}, None, X).dtype == BF16


def test_a_context_warns_of_unused_rules_though_it_ends_out_of_order():
    first, second = jmpx.flax.policies("c=bf16; Dence: full"), jmpx.flax.policies("c=f16")
    enter(first)
    run_linen()
    enter(second)
    with pytest.warns(UserWarning, match="Dence"):
        leave(first)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        leave(second)


# Threads


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


def end_elsewhere(held, how):
    """Ends the generators in a list in another thread: closes them, or drops the last reference."""

    def end():
        while held:
            generator = held.pop(0)
            if how == "close":
                with pytest.raises(ValueError, match="^Cannot leave .* in its own thread.$"):
                    generator.close()
            del generator

    thread = threading.Thread(target=end)
    thread.start()
    thread.join()


def held_open(make, policy):
    with make(policy):
        yield


def started(make, *policies):
    generators = [held_open(make, policy) for policy in policies]
    for generator in generators:
        next(generator)
    return generators


@everywhere
@ENDS
def test_a_context_that_ends_in_another_thread_is_over(kind, how):
    """It ends at the next call or trace of a module."""
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
    """A trace partly under a policy is not reused in a later context of that policy."""
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
    for cls in PUSHES.values():
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
