"""How many programs the inspections compile: one, and none for a step that is inspected again."""

import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal

import jmpx

COMPILE = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compilations():
    """Returns a function that counts the compilations since its last call."""
    seen = []
    listen = lambda event, *_, **__: seen.append(1) if event == COMPILE else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listen)

    def count():
        number = len(seen)
        seen.clear()
        return number

    yield count
    if hasattr(jax.monitoring, "unregister_event_duration_listener"):  # not yet in JAX 0.7
        jax.monitoring.unregister_event_duration_listener(listen)


def make_step(constant=1.0):
    """A step with a constant, which is made anew in each call."""
    array = jnp.full(8, constant)

    def loss_fn(params, x):
        for w in params:
            x = jax.nn.relu(jnp.tanh(x @ w) * array)
        x, _ = jax.lax.scan(lambda x, _: (x * array, None), x, None, length=2)
        return jnp.mean(x**2)

    return jax.value_and_grad(loss_fn), array


def arguments(rng, layers=2):
    return [normal(rng, 8, 8) for _ in range(layers)], normal(rng, 4, 8)


def test_a_step_that_is_made_anew_is_not_compiled_again(rng, compilations):
    params, x = jax.block_until_ready(arguments(rng, 3))  # no other test has three layers

    def look(x, constant=1.0) -> Any:
        return jmpx.inspect.first_nonfinite(make_step(constant)[0])(params, x)

    jax.block_until_ready(make_step())
    bad = x.at[1, 2].set(jnp.inf)
    compilations()
    assert look(x) is None and compilations() == 1
    assert look(x) is None and look(bad).given == "x" and compilations() == 0
    for constant in (np.nan, 2.0, np.inf):
        result = look(x, constant)
        assert (result and result.given) == (None if np.isfinite(constant) else "a constant")


def test_a_step_that_fills_rows_with_nan_is_not_compiled_again(rng, compilations):
    w, x = normal(rng, 4, 5), normal(rng, 4, 4)
    labels = jax.block_until_ready(jnp.array([[0], [3], [1], [2]]))
    compilations()
    for few in (1, 0):
        loss_fn = jmpx.autocast(
            lambda w: jnp.take_along_axis(x @ w, labels, axis=1).astype(jnp.float32).sum(), "c=f16"
        )
        assert jmpx.inspect.first_nonfinite(loss_fn)(w) is None
        assert compilations() <= few


def test_an_operation_that_is_found_again_is_not_compiled_again(rng, compilations):
    ones = jnp.ones(3)
    make = lambda: lambda x: jnp.log(x * ones).sum()  # noqa: E731
    x = jnp.array([1.0, 0.0, 2.0])
    for few in (3, 0):
        fn = make()
        compilations()
        found = jmpx.inspect.first_nonfinite(fn)(x)
        assert compilations() <= few and found is not None
        assert found.operation == "log" and found.operands[0].smallest == 0


def test_ranges_read_new_constants_and_arguments(rng, compilations):
    x = jnp.arange(1.0, 5.0)
    for scale, few in ((1.0, 9), (8.0, 0), (64.0, 0)):
        array = jax.block_until_ready(jnp.full(4, scale))
        compilations()
        found = jmpx.inspect.ranges(lambda x: jax.nn.relu(x * array).sum())(x)  # noqa: B023
        assert compilations() <= few
        assert max(found.histogram("activations").exponents) >= np.log2(scale) + 2


@pytest.mark.parametrize("inspect", [jmpx.inspect.first_nonfinite, jmpx.inspect.ranges])
def test_no_array_of_a_step_stays_alive(inspect, rng):
    params, x = arguments(rng)
    step, array = make_step()
    alive = [weakref.ref(each) for each in (array, x, *params)]
    inspect(step)(params, x)
    del step, array, params, x
    gc.collect()
    assert not any(each() is not None for each in alive)


def test_a_call_of_python_is_that_of_the_step(rng):
    x = jnp.ones(3)
    for number in (1.0, np.inf):
        call = lambda x: np.float32(number) * x  # noqa: B023, E731

        def fn(x):
            return jax.pure_callback(call, x, x).sum()  # noqa: B023

        assert (jmpx.inspect.first_nonfinite(lambda x: [fn(x)])(x) is None) == (number == 1)


def test_a_step_of_two_layers_is_one_program_of_ranges_and_none_of_an_audit(rng, compilations):
    params, x = jax.block_until_ready(arguments(rng))
    step, _ = jax.block_until_ready(make_step())
    compilations()
    jmpx.inspect.audit(step)(params, x)
    assert compilations() == 0
    jmpx.inspect.ranges(step)(params, x)
    assert compilations() <= 2
