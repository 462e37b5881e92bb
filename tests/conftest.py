"""Settings of every test: eight CPU devices, strict dtype promotion, a clean registry."""

import atexit
import gc
import os
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import LOG, QUICK_XLA, normal
from hypothesis import settings
from sampling import pytest_collection_modifyitems as pytest_collection_modifyitems

import jmpx

# A newcomer's run is the same each time. New draws are for `--hypothesis-profile=new_draws`, with
# which CI runs all properties once more, from a seed that each commit has of its own: a finding
# there is kept by `@example`.
settings.register_profile("same_draws", derandomize=True)
settings.register_profile("new_draws", derandomize=False, print_blob=True)
settings.load_profile("same_draws")

# XLA reads its flags when the first device is asked for.
os.environ["XLA_FLAGS"] = " ".join(
    (os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8", QUICK_XLA)
)

# JAX compiles an operation again under each policy, because policies are part of its caches' keys.
# Where the program is the same, JAX loads it from this folder. Each process has its own folder,
# because JAX reads and writes the files without a lock.
compiled = tempfile.TemporaryDirectory(prefix="jmpx_tests_")
atexit.register(compiled.cleanup)
jax.config.update("jax_compilation_cache_dir", compiled.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# A script that runs as a process of the distributed example, and imports that.
collect_ignore = ["helpers/faults.py"]

jax.config.update("jax_numpy_dtype_promotion", "strict")

# The garbage collector took a tenth of the time and found little: JAX's caches keep most objects.
gc.set_threshold(50_000, 20, 100)


def pytest_collection_finish():
    """Spares the garbage collector what stays: modules and tests."""
    gc.freeze()


def pytest_make_parametrize_id(val):
    """Names a dtype in the id of a test, as pytest names classes."""
    return val.name if isinstance(val, np.dtype) else None


@pytest.fixture
def rng(request) -> np.random.Generator:
    """Random inputs: other ones for each test, the same ones each time it runs."""
    return np.random.default_rng(list(request.node.nodeid.encode()))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Says how to keep what a property found."""
    report = yield
    if report.failed and call.when == "call" and item.get_closest_marker("hypothesis"):
        words = "Add the falsifying example as @hypothesis.example(...): then it runs each time."
        report.sections.append(("To keep this finding", words))
    return report


@pytest.fixture
def pair(rng):
    """An input and a weight."""
    return normal(rng, 4, 4), normal(rng, 4, 4) / 2


@pytest.fixture
def positive(pair):
    """A pair whose sums do not cancel."""
    return tuple(jnp.abs(v) / 2 for v in pair)


@pytest.fixture(autouse=True)
def log():
    """Notes of the modules that a test defines."""
    LOG.clear()
    return LOG


@pytest.fixture
def standard_promotion():
    """Lets the layers of a framework promote dtypes within their own code."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def key(rng):
    return jax.random.key(int(rng.integers(2**31)))


@pytest.fixture(autouse=True)
def no_policies():
    """Fails a test that leaves a policy behind."""
    yield
    for cls in (hk.Linear, hk.BatchNorm, hk.Conv2D):
        left = jmpx.policy_of(cls)
        jmpx.clear_policy(cls)
        assert left is None, f"{cls.__name__} still has the policy {left}"
