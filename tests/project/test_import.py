"""What `import jmpx` brings with it, and what happens without the optional packages."""

import textwrap

import pytest
from helpers import run_python

HEAVY = (
    "jmpx._autocast haiku equinox flax optax absl matplotlib sklearn tqdm jmp "
    "jmpx._adapters jmpx._cli jmpx._devices jmpx._inspect jmpx._steps jmpx._storage "
    "jmpx._base.axes jmpx._base.stateful jmpx._jaxprs.core jmpx._scales.strings"
).split()


JMP_NAMES = (
    "all_finite DynamicLossScale LossScale NoOpLossScale select_tree StaticLossScale "
    "cast_to_full cast_to_half get_policy half_dtype Policy"
).split()


def run(code):
    return run_python("-c", textwrap.dedent(code))


def test_the_import_is_light_and_what_jmp_has_is_so_too():
    result = run(
        f"""
        import sys, jax, jax.export, jax.extend, numpy  # JAX does not import these by itself
        before = set(sys.modules)
        import jmpx
        print(sum(name.startswith("jmpx") for name in sys.modules))
        jmpx.get_policy_map, jmpx.set_policy, jmpx.full_precision
        for name in {JMP_NAMES}:
            getattr(jmpx, name)
        new = set(sys.modules) - before
        print(sorted(name for name in {HEAVY} if name in new))
        print(sorted(name for name in new if name.split(".")[0] not in sys.stdlib_module_names))
        """
    )
    at_first, heavy, new = result.stdout.splitlines()
    assert int(at_first) < 10 and heavy == "[]"
    assert all(name.startswith("'jmpx") for name in new.strip("[]").split(", ")), new


def test_the_core_works_without_optional_packages_and_autocast():
    result = run(
        f"""
        import sys
        sys.modules |= dict.fromkeys({HEAVY[:4]})  # an import of any of them fails
        import jax.numpy as jnp, jmpx
        class Model: ...
        jmpx.set_policy(Model, "c=bf16")
        scaling = jmpx.DynamicLossScale(2.0)
        _, _, grads = jmpx.grad(lambda w: w.sum(), scaling, policy="by=arguments,f16")(jnp.ones(2))
        print(jmpx.policy_of(Model), jmpx.current_policy(), grads)
        """
    )
    expected = "params=float32,compute=bfloat16,output=bfloat16 None [1. 1.]\n"
    assert result.stdout == expected, result.stderr


@pytest.mark.thorough
def test_help_and_completion_know_what_is_installed():
    result = run(
        """
        import sys
        sys.modules |= dict.fromkeys("haiku equinox flax absl".split())
        import jmpx, pydoc
        text, shown = pydoc.plain(pydoc.render_doc(jmpx)), {*jmpx.__all__}
        print(all(name in text for name in shown), sorted({*dir(jmpx)} - shown))
        """
    )
    modules = "'distributed', 'inspect', 'mpx', 'optim', 'types']"
    assert result.stdout.startswith("True ") and result.stdout.endswith(f"__', {modules}\n"), result


def test_the_backend_is_not_started_by_the_import_or_by_parsing():
    result = run(
        """
        import jax
        def refuse(*args): raise AssertionError("asked for devices")
        jax.local_devices = jax.devices = refuse
        import jmpx, jmpx.flags
        print(jmpx.get_policy("c=bf16,o=f32"), jmpx.StaticLossScale(8).loss_scale)
        """
    )
    assert result.stdout == "params=float32,compute=bfloat16,output=float32 8.0\n", result.stderr


def test_a_step_whose_gradient_function_is_made_inside_is_traced_and_compiled_once():
    result = run(
        """
        import jax, jax.numpy as jnp, jmpx
        compile = "/jax/core/compile/backend_compile_duration"
        traced, compiled = [], []
        listen = lambda event, *_, **__: event == compile and compiled.append(event)
        jax.monitoring.register_event_duration_secs_listener(listen)

        @jax.jit
        def step(w, x):
            traced.append(1)
            loss_fn = lambda w, x: jnp.mean((x @ w) ** 2)
            scaling = jmpx.NoOpLossScale()
            return jmpx.grad(loss_fn, scaling, policy="c=bf16")(w, x).grads

        w, x = jax.block_until_ready((jnp.ones((3, 2)), jnp.ones((4, 3))))
        for _ in range(3):
            compiled.clear()
            w = jax.block_until_ready(step(w, x))
            print(len(traced), len(compiled))
        """
    )
    assert result.stdout == "1 1\n1 0\n1 0\n", result.stderr
