"""What threads share: the classes that adapters make, marks of modules, the filters of warnings."""

import sys
import threading
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jmpx
import jmpx.equinox
import jmpx.flax
from jmpx._base.made_once import made_once
from jmpx._jaxprs import marks


@pytest.fixture(autouse=True)
def frequent_switches():
    """Lets Python change threads as often as it can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def at_once(func, count=8):
    """Returns the results of a function that several threads call at once."""
    results, barrier = [], threading.Barrier(count)

    def work():
        barrier.wait()
        results.append(func())

    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == count
    return results


def new_equinox():
    class Model(eqx.Module):
        w: jax.Array

        def __call__(self, x):
            return x * self.w

    return Model(jnp.ones(()))


def new_nnx():
    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(()))

        def __call__(self, x):
            return x * self.w[...]

    return Model()


def class_of_a_marked(model):
    seen = []
    jax.eval_shape(
        jmpx.autocast(lambda m, x: seen.append(type(m)) or m(x), "f32; Model: c=bf16"),
        model,
        jnp.ones(2),
    )
    return seen[0]


MADE = {
    "equinox view": (new_equinox, lambda m: type(jmpx.equinox.with_policies(m, "c=bf16"))),
    "nnx view": (new_nnx, lambda m: type(jmpx.flax.with_policies(m, "c=bf16"))),
    "equinox mark": (new_equinox, class_of_a_marked),
}


@pytest.mark.parametrize("kind", MADE)
def test_threads_get_one_class_for_one_class_and_policy(kind):
    new, class_of = MADE[kind]
    for _ in range(10):
        model = new()
        assert len(set(at_once(lambda model=model: class_of(model)))) == 1


def test_what_is_made_once_is_made_of_its_arguments():
    made = made_once(lambda *key: [*key])
    assert made(1, "a") == [1, "a"] and made(1, "a") is made(1, "a") is not made(1, "b")
    with pytest.raises(ZeroDivisionError):
        made_once(lambda x: 1 / x)(0)


def test_nothing_changes_the_filters_of_warnings_which_all_threads_share(monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Equinox's, of both kinds of __init__

        class Model(eqx.Module):
            w: jax.Array

            def __init__(self):
                self.w = jnp.ones(())

            def __post_init__(self):
                raise AssertionError

            def __call__(self, x):
                return x * self.w

    def changed(*_, **__):
        raise AssertionError("the filters of warnings change")

    model, x = Model(), jnp.ones(2)
    call = jmpx.autocast(lambda m, x: m(x), "c=bf16; Model: f32")
    with monkeypatch.context() as patch:
        patch.setattr("warnings.catch_warnings", changed)
        view = jmpx.equinox.with_policies(model, "c=bf16,o=f32")
        results = [view(x), jax.eval_shape(call, model, x), jax.eval_shape(call, view, x)]
    assert {y.dtype for y in results} == {x.dtype}
    with pytest.raises(AssertionError):  # An instance has the method that its class hides.
        view.__post_init__()


def test_a_mark_means_its_module_as_soon_as_other_threads_can_find_it(monkeypatch):
    class Marks(dict):
        def setdefault(self, module, mark):
            assert marks.module_of(mark) == module
            return super().setdefault(module, mark)

    monkeypatch.setattr(marks, "_marks", Marks())
    module = marks.Module(eqx.nn.Linear, "layer")
    assert len({marks._mark(module) for _ in range(3)}) == 1
    assert marks.module_of(marks._mark(module)) == module
