"""Contexts of policies, each with a function that runs a module inside it."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import numpy as np
import pytest

import jmpx
import jmpx.equinox
import jmpx.flax
import jmpx.haiku
from helpers import F16, F32

X = np.ones(2, np.float32)


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
    return LinenModule().apply({}, x).dtype  # pyright: ignore[reportAttributeAccessIssue]


def run_linen_by_class(x=X):
    with jmpx.flax.policies():
        return run_linen(x)


def run_equinox(x=X):
    return jmpx.equinox.with_policies(EquinoxModule())(x).dtype


# A context, and a function that runs a module inside it and returns the dtype of the result.
CONTEXTS = {
    "haiku": (jmpx.haiku.policies, run_haiku),
    "linen": (jmpx.flax.policies, run_linen),
    "push_haiku": (lambda policy: jmpx.push_policy(HaikuModule, policy), run_haiku),
    "push_linen": (lambda policy: jmpx.push_policy(LinenModule, policy), run_linen_by_class),
    "push_equinox": (lambda policy: jmpx.push_policy(EquinoxModule, policy), run_equinox),
}
everywhere = pytest.mark.parametrize("kind", CONTEXTS)


TRACES = []


@jax.jit
def plain(x):
    TRACES.append(1)
    return NETWORK.apply({}, None, x), LinenModule().apply({}, x)


def nothing_stays_behind():
    """Holds that after a test plain calls give the same dtypes as before, without a new trace."""
    runs = [run for _, run in CONTEXTS.values()]
    assert {run() for run in runs} == {F32}
    plain(X)
    traced = len(TRACES)
    yield
    assert {run() for run in runs} == {F32}
    assert {y.dtype for y in plain(X)} == {F32} and len(TRACES) == traced
    for cls in (HaikuModule, LinenModule, EquinoxModule):
        assert jmpx.policy_of(cls) is None
    for context, run in CONTEXTS.values():
        with context("c=f16"):
            assert run() == F16
    hooks = []
    with hk.intercept_methods(lambda f, a, k, c: hooks.append(1) or f(*a, **k)):
        run_haiku()
    with nn.intercept_methods(lambda f, a, k, c: hooks.append(1) or f(*a, **k)):
        run_linen()
