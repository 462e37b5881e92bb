"""Contexts of policies that end in another order than they began."""

import contextlib
import gc
import itertools
import warnings

import flax.linen as nn
import haiku as hk
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


@pytest.fixture(autouse=True)
def clean():
    yield from nothing_stays_behind()


# contexts that end in another order


@everywhere
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_contexts_may_end_in_any_order(kind, order):
    make, run = CONTEXTS[kind]
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
    contexts = [CONTEXTS[name][0]("c=bf16") for name in names]
    for context in contexts:
        context.__enter__()
    still_open = {*names}
    for i in order:
        contexts[i].__exit__(None, None, None)
        still_open.remove(names[i])
        for name in ("haiku", "linen", "push_equinox"):
            expected = BF16 if name in still_open else F32
            assert CONTEXTS[name][1]() == expected


@everywhere
def test_interleaved_generators(kind):
    make, run = CONTEXTS[kind]

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


@pytest.mark.thorough
@everywhere
def test_a_generator_that_fails_and_one_that_is_forgotten(kind):
    make, run = CONTEXTS[kind]

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
    make, run = CONTEXTS[kind]
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
    make, run = CONTEXTS[kind]
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
    with hk.mixed_precision.push_policy(HaikuModule, policy):  # pyright: ignore[reportArgumentType]
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


# entry that fails, and frameworks' own interceptors


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
    first.__enter__()
    run_linen()
    second.__enter__()
    with pytest.warns(UserWarning, match="Dence"):
        first.__exit__(None, None, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second.__exit__(None, None, None)
