"""Contexts of interleaved coroutines, generators and threads; contexts that end out of order."""

import asyncio
import contextlib
import gc
import itertools
import threading
import warnings

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmpx
import jmpx.equinox
import jmpx.flax
import jmpx.haiku

X = np.ones(2, np.float32)
BF16, F16, F32 = (np.dtype(d) for d in (jnp.bfloat16, jnp.float16, jnp.float32))


class HaikuModule(hk.Module):
    def __call__(self, x):
        return x * 2


class LinenModule(nn.Module):
    def __call__(self, x):
        return x * 2


class EquinoxModule(eqx.Module):
    w: float = 2.0

    def __call__(self, x):
        return x * self.w


NETWORK = hk.transform(lambda x: HaikuModule()(x))


def run_haiku(x=X):
    return NETWORK.apply({}, None, x).dtype


def run_linen(x=X):
    return LinenModule().apply({}, x).dtype


def run_linen_by_class(x=X):
    with jmpx.flax.policies():
        return run_linen(x)


def run_equinox(x=X):
    return jmpx.equinox.with_policies(EquinoxModule())(x).dtype


# A context of one dtype, and what runs a module in it.
KINDS = {
    "haiku": (jmpx.haiku.policies, run_haiku),
    "linen": (jmpx.flax.policies, run_linen),
    "push_haiku": (lambda policy: jmpx.push_policy(HaikuModule, policy), run_haiku),
    "push_linen": (lambda policy: jmpx.push_policy(LinenModule, policy), run_linen_by_class),
    "push_equinox": (lambda policy: jmpx.push_policy(EquinoxModule, policy), run_equinox),
}
everywhere = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def nothing_stays_behind():
    """Holds that plain calls give afterwards what they gave before, and are traced no more."""
    traces = []

    @jax.jit
    def plain(x):
        traces.append(1)
        return NETWORK.apply({}, None, x), LinenModule().apply({}, x)

    runs = [run for _, run in KINDS.values()]
    assert {run() for run in runs} == {F32}
    plain(X)
    yield
    assert {run() for run in runs} == {F32}
    assert {y.dtype for y in plain(X)} == {F32} and len(traces) == 1
    for cls in (HaikuModule, LinenModule, EquinoxModule):
        assert jmpx.policy_of(cls) is None
    for context, run in KINDS.values():
        with context("c=f16"):
            assert run() == F16
    hooks = []
    with hk.intercept_methods(lambda f, a, k, c: hooks.append(1) or f(*a, **k)):
        run_haiku()
    with nn.intercept_methods(lambda f, a, k, c: hooks.append(1) or f(*a, **k)):
        run_linen()
    assert hooks


# contexts that end in another order


@everywhere
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_contexts_may_end_in_any_order(kind, order):
    make, run = KINDS[kind]
    dtypes = [BF16, F16, BF16]
    contexts = [make(f"c={dtype.name}") for dtype in dtypes]
    for context in contexts:
        context.__enter__()
    assert run() == dtypes[-1]
    still_open = [0, 1, 2]
    for i in order:
        contexts[i].__exit__(None, None, None)
        still_open.remove(i)
        assert run() == (dtypes[still_open[-1]] if still_open else F32)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_contexts_of_several_kinds_may_end_in_any_order(order):
    names = ["haiku", "linen", "push_equinox", "push_linen"]
    contexts = [KINDS[name][0]("c=bf16") for name in names]
    for context in contexts:
        context.__enter__()
    still_open = {*names}
    for i in order:
        contexts[i].__exit__(None, None, None)
        still_open.remove(names[i])
        for name in ("haiku", "linen", "push_equinox"):
            expected = BF16 if name in still_open else F32
            assert KINDS[name][1]() == expected


@everywhere
def test_interleaved_generators(kind):
    make, run = KINDS[kind]

    def steps(dtype):
        with make(f"c={dtype.name}"):
            for _ in range(3):
                yield run()

    first, second = steps(BF16), steps(F16)
    assert (next(first), next(second)) == (BF16, F16)
    assert next(first) == F16  # generators cannot be told apart: the innermost context holds
    first.close()
    assert next(second) == F16 and run() == F16
    assert len(list(second)) == 1
    assert run() == F32


@everywhere
def test_a_generator_that_fails_and_one_that_is_forgotten(kind):
    make, run = KINDS[kind]

    def fails():
        with make("c=bf16"):
            yield
            raise RuntimeError("in the middle")

    def waits():
        with make("c=f16"):
            yield

    failing, forgotten = fails(), waits()
    next(failing)
    next(forgotten)
    with pytest.raises(RuntimeError, match="in the middle"):
        next(failing)
    assert run() == F16
    del forgotten
    gc.collect()
    assert run() == F32


@everywhere
def test_exit_stacks_that_are_closed_out_of_order(kind):
    make, run = KINDS[kind]
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    first.enter_context(make("c=bf16"))
    second.enter_context(make("c=f16"))
    moved = first.pop_all()
    first.close()
    assert run() == F16
    moved.close()
    assert run() == F16
    second.close()
    second.close()
    assert run() == F32


@everywhere
def test_set_policy_between_pushes_that_end_out_of_order(kind):
    if not kind.startswith("push"):
        pytest.skip("it pushes no policy")
    cls = {"haiku": HaikuModule, "linen": LinenModule, "equinox": EquinoxModule}[kind[5:]]
    make, run = KINDS[kind]
    jmpx.set_policy(cls, "c=f16")
    first, second = make("c=bf16"), make("c=f32")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert run() == F32
    second.__exit__(None, None, None)
    assert run() == F16
    jmpx.clear_policy(cls)


def test_haikus_class_policies_come_back_from_contexts_that_end_out_of_order():
    policy = jmpx.get_policy("c=f16")
    with hk.mixed_precision.push_policy(HaikuModule, policy):
        first, second = jmpx.haiku.policies("c=bf16"), jmpx.haiku.policies("c=bf16")
        first.__enter__()
        assert run_haiku() == F16
        second.__enter__()
        assert run_haiku() == F16
        first.__exit__(None, None, None)
        assert run_haiku() == F16
        second.__exit__(None, None, None)
        assert hk.mixed_precision.get_policy(HaikuModule) is policy
        assert run_haiku() == F16


# tasks


async def holds(make, run, entered, leave, dtype=BF16):
    with make(f"c={dtype.name}"):
        entered.set()
        assert run() == dtype
        await leave.wait()
        return run()


@everywhere
@pytest.mark.parametrize("other", KINDS)
def test_a_second_task_is_refused_and_the_first_one_goes_on(kind, other):
    make, run = KINDS[kind]

    async def enters(entered, leave):
        await entered.wait()
        try:
            with KINDS[other][0]("c=f16"):
                raise AssertionError("entered")
        except ValueError as error:
            return str(error)
        finally:
            leave.set()

    async def main():
        entered, leave = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(holds(make, run, entered, leave), enters(entered, leave))

    dtype, message = asyncio.run(main())
    held = {"haiku": "jmpx.haiku.policies", "linen": "jmpx.flax.policies"}
    names = [held.get(name, "jmpx.push_policy") for name in (other, kind)]
    assert dtype == BF16
    assert message == (
        f"Cannot enter {names[0]} while another task of this thread is inside {names[1]}, which "
        "holds for the thread as a whole: leave that context before each await, or run the tasks "
        "in threads of their own."
    )


@everywhere
@pytest.mark.parametrize("jit", [False, True])
def test_a_module_in_a_task_that_did_not_enter_is_refused(kind, jit):
    make, run = KINDS[kind]
    own = {"push_linen": run_linen}.get(kind, run)  # without the context that it would enter
    dtypes = []

    @jax.jit
    def jitted(x):
        dtypes.append(own(x))
        return x

    call = (lambda: jitted(X)) if jit else own

    async def traces(entered, leave):
        await entered.wait()
        try:
            call()
        except ValueError as error:
            return str(error)
        finally:
            leave.set()

    async def main():
        entered, leave = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(holds(make, run, entered, leave), traces(entered, leave))

    _, message = asyncio.run(main())
    if kind == "push_linen":
        assert message is None  # no context of Linen's is open: nothing is cast in either task
    else:
        assert "while another task of this thread is inside" in message
        with make("c=bf16"):  # what was refused was not cached
            call()
        assert not jit or dtypes == [BF16]


@everywhere
def test_tasks_that_leave_before_they_wait_are_free(kind):
    make, run = KINDS[kind]

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
    make, run = KINDS[kind]

    async def child():
        await asyncio.sleep(0)
        return run()

    async def main():
        before = asyncio.create_task(child())
        with make("c=bf16"):
            inside = await asyncio.gather(child(), child())
            with make("c=f16"):
                inside.append(await asyncio.create_task(child()))
            late = asyncio.create_task(child())
        return [await before, *inside, await late]

    with pytest.raises(ValueError, match="while another task"):
        asyncio.run(main())  # the task from before is not

    async def within():
        with make("c=bf16"):
            inside = await asyncio.gather(child(), child())
            with make("c=f16"):
                inside.append(await asyncio.create_task(child()))
            late = asyncio.create_task(child())
        return [*inside, await late]

    assert asyncio.run(within()) == [BF16, BF16, F16, F32]
    with make("c=f16"):
        assert asyncio.run(child()) == F16


@everywhere
def test_cancelled_and_failing_tasks(kind):
    make, run = KINDS[kind]

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
    make, run = KINDS[kind]

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
    import contextvars

    make, run = KINDS[kind]

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


# threads


@everywhere
def test_threads_hold_contexts_at_once(kind):
    make, run = KINDS[kind]
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
    make, run = KINDS[kind]

    async def main():
        with make("c=bf16"):
            return await asyncio.to_thread(run)

    assert asyncio.run(main()) == F32


@pytest.mark.parametrize("kind", ["haiku", "linen"])
def test_a_context_that_ends_in_another_thread_is_over(kind):
    make, run = KINDS[kind]

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
    make, _ = KINDS[kind]
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


# entry that fails, and frameworks' own interceptors


@everywhere
def test_an_entry_that_is_refused_changes_nothing(kind):
    make, run = KINDS[kind]
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
    first.__enter__()
    run_linen()
    second.__enter__()
    with pytest.warns(UserWarning, match="Dence"):
        first.__exit__(None, None, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second.__exit__(None, None, None)
