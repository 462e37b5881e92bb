"""Functions whose body runs after their call: each wrapper of jmpx refuses them."""

import functools

import jax
import jax.numpy as jnp
import pytest

import jmpx


def generator(x):
    yield x * 2


async def async_generator(x):
    yield x * 2


async def coroutine(x):
    return x * 2


class Lazy:
    def __call__(self, x):
        yield x * 2


DELAYED = {
    "generator": generator,
    "async generator": async_generator,
    "coroutine": coroutine,
    "partial": functools.partial(coroutine),
    "object": Lazy(),
}
WRAPPERS = {
    "arguments": jmpx.apply_policy(policy="c=bf16"),
    "modules": jmpx.apply_policy(policy="by=modules,c=bf16"),
    "operations": jmpx.apply_policy(policy="by=operations,c=bf16"),
    "autocast": jmpx.autocast(policy="c=bf16"),
    "full_precision": jmpx.full_precision,
    "force_full_precision": jmpx.force_full_precision,
    "cast_function": functools.partial(jmpx.mpx.cast_function, dtype=jnp.bfloat16),
    "gradient": lambda func: jmpx.grad(func, jmpx.NoOpLossScale(), policy="c=bf16"),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", DELAYED)
def test_a_delayed_function_is_refused_when_it_is_wrapped(kind, wrapper):
    words = r"computes its result when it is called, got one that returns an? \w"
    with pytest.raises(TypeError, match=words):
        WRAPPERS[wrapper](DELAYED[kind])


@pytest.mark.filterwarnings("ignore:jmpx.apply_policy casts nothing")
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", DELAYED)
def test_a_function_that_returns_one_is_refused_when_it_is_called(kind, wrapper):
    wrapped = WRAPPERS[wrapper](lambda x: {"lazy": DELAYED[kind](x)})
    with pytest.raises(TypeError, match="whose body runs later"):
        wrapped(jnp.ones(2))


@pytest.mark.filterwarnings("ignore:jmpx.apply_policy casts nothing")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_function_that_reads_a_generator_is_not_refused(wrapper):
    wrapped = WRAPPERS[wrapper](lambda x: sum(jnp.sum(y) for y in generator(x)))
    result = jax.tree.leaves(wrapped(jnp.ones(2)))[-1]
    assert result.dtype in (jnp.float32, jnp.bfloat16)
