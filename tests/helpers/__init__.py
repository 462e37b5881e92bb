"""Functions that several test files share."""

import contextlib
import doctest
import functools
import os
import pathlib
import runpy
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmpx

ROOT = pathlib.Path(__file__).parents[2]
F32, F16, BF16 = (np.dtype(d) for d in (jnp.float32, jnp.float16, jnp.bfloat16))
LOG: list = []  # what modules of the tests note; it is empty when a test begins
MIXED = "c=bf16,o=f32"


def normal(rng, *shape):
    """A float32 array; `jnp.asarray` would compile a program for each new shape."""
    return jax.device_put(np.asarray(rng.normal(size=shape), F32))


def versions(*values):
    """Parameters of a test that the default run leaves out, and that each line of JAX has."""
    return pytest.param(*values, marks=[pytest.mark.thorough, pytest.mark.versions])


def dtypes(tree):
    return [leaf.dtype.name for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype")]


def leniently(func):
    """Lets another library promote dtypes within its own code, which ours never does."""

    @functools.wraps(func)
    def wrapper(*args, **kwargs):
        with jax.numpy_dtype_promotion("standard"):
            return func(*args, **kwargs)

    return wrapper


def lenient(optimizer):
    """Lets an optax optimizer promote dtypes: Adam takes a float to the power of an int32."""
    inner = optax.with_extra_args_support(optimizer)
    return optax.GradientTransformationExtraArgs(leniently(inner.init), leniently(inner.update))


# Optax adds float32 updates to bfloat16 parameters.
apply_updates = leniently(optax.apply_updates)


def enable_x64():
    """Returns a context in which JAX has 64-bit types."""
    # jax.enable_x64 since JAX 0.8; before, it was in jax.experimental.
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    return jax.experimental.enable_x64()  # pyright: ignore[reportAttributeAccessIssue]


# Compiles soonest. And code that is equal on paper is equal in the last bit: LLVM's optimizations
# would contract a product and a sum in one place and not in another.
QUICK_XLA = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if jax.__version_info__ < (0, 11):  # later versions have MLIR's emitters only
    QUICK_XLA += " --xla_cpu_use_fusion_emitters=false"
# Compiles in two thirds of the time, and the code is nearly as fast: for trainings.
LESS_OPTIMIZED = "--xla_backend_optimization_level=1"


def start_python(*arguments, xla_flags="", cwd=None, **environment):
    """Starts a Python process without the XLA flags of these tests."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XLA_FLAGS": xla_flags, **environment},
    )


def compiling_once(folder):
    """Environment variables by which processes load what others have compiled from a folder."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def finish(process):
    """Waits for a process; returns its `returncode`, `stdout` and `stderr`."""
    stdout, stderr = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def run_python(*arguments, **options):
    return finish(start_python(*arguments, **options))


def run_jmpx(*arguments):
    """Returns the exit code of `python -m jmpx`, in this process: each of its own costs seconds."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as exit:
        patch.setattr(sys, "argv", ["jmpx", *arguments])
        runpy.run_path(str(pathlib.Path(jmpx.__file__).with_name("__main__.py")), None, "__main__")
    return exit.value.code


def exactly(run):
    """Compiles a function so that it rounds to 16 bits where its operations do, one by one.

    Elsewhere XLA may keep float32 between them, and then two functions look alike that differ.
    """
    return jax.jit(run, compiler_options={"xla_allow_excess_precision": False})


def bits_of(array):
    array = np.asarray(array)
    return array.view(f"u{array.dtype.itemsize}")


def error_of(capsys, *arguments):
    """Returns the one line with which `python -m jmpx` ends."""
    assert run_jmpx(*arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.endswith("\n")
    (line,) = printed.err.splitlines()
    return line


def assert_same_bits(a, b):
    """Holds two trees to be the same in structure, dtypes and bits, the sign of zero too."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@contextlib.contextmanager
def warns_once(file, match):
    """Holds that one warning comes, which names a line of `file`: the test's own, not jmpx's."""
    with pytest.warns(UserWarning, match=match) as caught:
        yield
    (warning,) = caught
    assert warning.filename == file


def python_only(text):
    """Blanks every line outside of Python blocks, so that line numbers hold."""
    inside, lines = False, []
    for line in text.splitlines():
        fence = line.startswith("```")
        lines.append("" if fence or not inside else line)
        inside = line == "```python" if fence else inside
    return "\n".join(lines) + "\n"


def run_python_blocks(page):
    """Runs all Python blocks of a Markdown page, as one doctest; returns what they define."""
    text = page.read_text()
    test = doctest.DocTestParser().get_doctest(python_only(text), {}, page.name, str(page), 0)
    assert len(test.examples) == text.count(">>> ") > 0
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    report = []
    with jax.numpy_dtype_promotion("standard"):  # as in a reader's program
        runner.run(test, out=report.append, clear_globs=False)
    assert not runner.failures, "".join(report)
    return test.globs
