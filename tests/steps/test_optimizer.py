# Optax types states, updates and parameters as pytrees of arrays, which have no fields and no None.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import apply_updates, assert_same_bits, lenient, normal
from jax.sharding import Mesh, PartitionSpec

import jmpx

OPTIMIZERS = {
    "sgd": lambda: optax.sgd(optax.linear_schedule(0.5, 0.1, 10), momentum=0.9),
    "adam": lambda: optax.adam(optax.cosine_decay_schedule(1e-2, 10)),
    "adamw": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
    "bf16 moment": lambda: optax.adam(1e-2, mu_dtype=jnp.bfloat16),
    "hyperparams": lambda: optax.inject_hyperparams(optax.sgd)(learning_rate=0.1),
}


def make_optimizer(name):
    return lenient(OPTIMIZERS[name]())


def make_params(rng):
    params = {
        "w": normal(rng, 4, 3),
        "b": jnp.asarray(rng.normal(size=3), jnp.bfloat16),
        # A sum with +0.0 would turn -0.0 into 0.0.
        "zero": jnp.array([-0.0, 0.0], jnp.float32),
    }
    return params


def grads_like(params, rng, bad=None):
    grads = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), params)
    if bad is not None:
        grads["w"] = grads["w"].at[1, 1].set(bad)
    return grads


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("jit", "bad", "skip"),
    [(True, np.inf, "cond"), (True, np.nan, "where"), (False, -np.inf, "cond")],
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_update_skips_to_the_bit_and_then_goes_on(name, jit, bad, skip, rng):
    optimizer, params = make_optimizer(name), make_params(rng)
    state = optimizer.init(params)

    def step(params, state, grads):
        finite = jmpx.all_finite(grads)
        return jmpx.optimizer_update(params, optimizer, state, grads, finite, skip_by=skip)

    run = jax.jit if jit else lambda f: f
    step = run(step)
    for i in range(6):
        skipped = i in (0, 3)
        grads = grads_like(params, rng, bad if skipped else None)
        before = params, state
        params, state = step(params, state, grads)
        if skipped:
            assert_same_bits((params, state), before)
            continue
        updates, expected_state = run(optimizer.update)(grads, before[1], before[0])
        expected = run(apply_updates)(before[0], updates)
        for a, b in zip(
            jax.tree.leaves((params, state)),
            jax.tree.leaves((expected, expected_state)),
            strict=True,
        ):
            assert a.dtype == b.dtype
            # Compiled together, update and sum may be fused into one rounding.
            eps = (
                float(jnp.finfo(a.dtype).eps)
                if jit and jnp.issubdtype(a.dtype, jnp.floating)
                else 0
            )
            np.testing.assert_allclose(
                np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=4 * eps, atol=eps
            )


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("given", "skip"), [(False, "where"), (True, "cond")])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_skip_nonfinite_skips_to_the_bit_and_counts(name, given, skip, rng):
    params = make_params(rng)
    plain = make_optimizer(name)
    plain_state = plain.init(params)
    optimizer = jmpx.skip_nonfinite(plain, skip_by=skip)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, grads):
        extra = {"grads_finite": jmpx.all_finite(grads)} if given else {}
        updates, state = optimizer.update(grads, state, params, **extra)
        return updates, apply_updates(params, updates), state

    total = consecutive = 0
    for skipped in (True, False, True, True, False):
        grads = grads_like(params, rng, np.inf if skipped else None)
        before = params, state.inner_state
        updates, params, state = step(params, state, grads)
        total, consecutive = total + skipped, (consecutive + 1) * skipped
        assert (state.total_skipped, state.consecutive_skipped) == (total, consecutive)
        assert bool(state.grads_finite) != skipped
        if skipped:
            assert_same_bits((params, state.inner_state), before)
            for update in jax.tree.leaves(updates):
                assert (update == 0).all() and np.signbit(np.asarray(update, np.float32)).all()
        else:
            # Steps and schedules count the steps taken, not those skipped.
            _, plain_state = jax.jit(plain.update)(grads, plain_state, before[0])
    assert jax.tree.structure(state.inner_state) == jax.tree.structure(plain_state)
    for a, b in zip(jax.tree.leaves(state.inner_state), jax.tree.leaves(plain_state), strict=True):
        if jnp.issubdtype(a.dtype, jnp.integer):
            assert a == b == total - 1 == 2


def test_skip_nonfinite_takes_the_flag_that_it_is_given(rng):
    optimizer = jmpx.skip_nonfinite(optax.sgd(1.0))
    params = {"w": normal(rng, 3)}
    state = optimizer.init(params)
    updates, state = optimizer.update(params, state, params, grads_finite=False)
    assert (updates["w"] == 0).all() and state.total_skipped == 1
    bad = {"w": jnp.full(3, jnp.inf)}
    updates, state = optimizer.update(bad, state, params, grads_finite=True)
    assert jnp.isinf(updates["w"]).all() and state.total_skipped == 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_may_donate_its_first_state(name, rng):
    optimizer, params = jmpx.skip_nonfinite(make_optimizer(name)), make_params(rng)
    state, loss_scale = optimizer.init(params), jax.device_put(jmpx.DynamicLossScale(2.0**4))
    kept = jax.tree.map(jnp.copy, (state, loss_scale))  # optax itself makes some arrays once
    grads = grads_like(params, rng)

    def step(state, loss_scale):
        _, state = optimizer.update(grads, state, params)
        return state, loss_scale.adjust(state.grads_finite)

    counters = state.total_skipped, state.consecutive_skipped, state.grads_finite
    assert len({array.unsafe_buffer_pointer() for array in counters}) == 3
    donated = jax.jit(step, donate_argnums=(0, 1))(state, loss_scale)
    assert_same_bits(donated, jax.jit(step)(*kept))


def test_extra_arguments_are_handed_on(rng):
    optimizer = jmpx.skip_nonfinite(
        lenient(optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1)))
    )
    params = {"w": normal(rng, 3)}
    state = optimizer.init(params)
    _, state = optimizer.update(params, state, params, value=1.0)
    model, state = jmpx.optimizer_update(params, optimizer, state, params, True, value=1.0)
    assert state.total_skipped == 0 and model["w"].dtype == jnp.float32
    plain = jmpx.skip_nonfinite(optax.sgd(0.1))  # takes none: not handed on
    plain.update(params, plain.init(params), params, value=1.0)


def test_optimizer_update_tells_skip_nonfinite(rng):
    optimizer, params = jmpx.skip_nonfinite(make_optimizer("adam")), make_params(rng)
    state = optimizer.init(params)
    for expected, finite in ((1, False), (2, False), (2, True)):
        before = params
        params, state = jmpx.optimizer_update(
            params, optimizer, state, grads_like(params, rng), finite
        )
        assert state.total_skipped == expected
        if not finite:
            assert_same_bits(params, before)
    assert state.consecutive_skipped == 0


def test_optimizer_update_leaves_other_leaves_alone(rng):
    w = normal(rng, 3)
    key = jax.random.key(0)
    model = {"w": w, "act": jnp.tanh, "n": jnp.arange(2), "key": key, "none": None, "p": 0.5}
    trained = {name: w if name == "w" else None for name in model}
    optimizer = make_optimizer("adam")
    new, _ = jmpx.optimizer_update(model, optimizer, optimizer.init(trained), trained, True)
    for name in ("act", "n", "key", "none", "p"):
        assert new[name] is model[name]
    assert not (new["w"] == w).any()


def test_a_float32_update_of_a_bfloat16_parameter_is_rounded_once():
    model = {"w": jnp.array([1.0], jnp.bfloat16)}
    optimizer = optax.sgd(1.0)
    step = {"w": jnp.array([-(2.0**-8 + 2.0**-9)], jnp.float32)}
    new, _ = jmpx.optimizer_update(model, optimizer, optimizer.init(model), step, True)
    assert new["w"].dtype == jnp.bfloat16 and new["w"][0] == 1 + 2.0**-7


@pytest.mark.parametrize("wrap", [lambda o: o, jmpx.skip_nonfinite])
def test_updates_work_on_numpy_parameters(wrap, rng):
    optimizer = wrap(optax.sgd(0.5))
    params = {"w": rng.normal(size=3).astype(np.float32)}
    new, _ = jmpx.optimizer_update(
        params, optimizer, optimizer.init(params), params, np.bool_(True)
    )
    np.testing.assert_allclose(new["w"], params["w"] / 2)


# cond and where


def wrapped_update(params, optimizer, state, grads, finite, skip_by):
    """A step of one's own with `skip_nonfinite`."""
    updates, state = optimizer.update(grads, state, params, grads_finite=finite)
    return optax.apply_updates(params, updates), state


STEPS = {
    "plain": (lambda o, skip: o, jmpx.optimizer_update),
    "counting": (lambda o, skip: jmpx.skip_nonfinite(o), jmpx.optimizer_update),
    "wrapped": (lambda o, skip: jmpx.skip_nonfinite(o, skip_by=skip), wrapped_update),
}


def make_step(name, skip):
    wrap, update = STEPS[name]
    optimizer = wrap(make_optimizer("adam"), skip)

    def step(params, state, grads, finite):
        return update(params, optimizer, state, grads, finite, skip_by=skip)

    return optimizer, step


@pytest.mark.parametrize("skip", ["cond", "where"])
@pytest.mark.parametrize("name", STEPS)
def test_a_cond_holds_all_of_the_optimizer(name, skip, rng):
    optimizer, step = make_step(name, skip)
    params = make_params(rng)
    jaxpr = jax.make_jaxpr(step)(params, optimizer.init(params), params, jnp.array(True))
    # The square roots of Adam are in the branch that a skipped step does not enter.
    outside = [eqn for eqn in jaxpr.eqns if eqn.primitive.name != "cond"]
    assert (len(outside) < len(jaxpr.eqns)) == (skip == "cond")
    assert any("sqrt" in str(eqn) for eqn in outside) == (skip == "where")
    assert "sqrt" in str(jaxpr)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("skip", ["cond", "where"])
@pytest.mark.parametrize("name", STEPS)
def test_steps_in_a_scan_and_under_vmap(name, skip, rng):
    optimizer, step = make_step(name, skip)
    params = {"w": normal(rng, 2, 3)}
    grads = {"w": normal(rng, 2, 3)}
    flags = jnp.array([[True, False, False, True], [False, True, True, False]])

    def run(params, grads, flags):
        carry = params, optimizer.init(params)
        return jax.lax.scan(lambda c, flag: (step(*c, grads, flag), c), carry, flags)

    (params_out, state), carries = jax.jit(jax.vmap(run))(params, grads, flags)
    before, after = (
        carries[0]["w"],
        jnp.concatenate([carries[0]["w"][:, 1:], params_out["w"][:, None]], axis=1),
    )
    np.testing.assert_array_equal((before == after).all(-1), ~flags)
    counts = [leaf for leaf in jax.tree.leaves(state) if leaf.dtype == jnp.int32]
    np.testing.assert_array_equal(counts[:2], [[2, 2], [2, 2]])
    if name != "plain":
        np.testing.assert_array_equal(state.total_skipped, [2, 2])
        np.testing.assert_array_equal(state.consecutive_skipped, [0, 1])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("vma", [True, False])
@pytest.mark.parametrize("skip", ["cond", "where"])
@pytest.mark.parametrize("name", STEPS)
def test_steps_under_shard_map(name, skip, vma, rng):
    # Gradients are replicated and parameters are sharded; of two flags one is replicated, the other
    # differs between devices.
    optimizer, step = make_step(name, skip)
    mesh, everywhere, parts = Mesh(jax.devices()[:4], "d"), PartitionSpec(), PartitionSpec("d")
    params = normal(rng, 4)
    flags = jnp.array([True, False, True, True])

    def run(params, part, flags):
        together = jax.lax.pmin(flags[0].astype(jnp.int32), "d") == 1
        results = []
        for p, flag in ((params, together), (part, together), (part, flags[0])):
            results.append(step(p, optimizer.init(p), p, flag)[0])
        return results

    mapped = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(everywhere, parts, parts),
        out_specs=[everywhere, parts, parts],
        check_vma=vma,
    )
    same, part, own = jax.jit(mapped)(params, params, flags)
    assert_same_bits(same, params)
    assert_same_bits(part, params)
    np.testing.assert_array_equal(own == params, ~flags)


def test_a_flag_of_each_device_on_parameters_of_all_is_no_cond(rng):
    # A lax.cond would call its result the same on all devices, which it is not.
    optimizer, step = make_step("plain", "cond")
    params = normal(rng, 3)
    spec = PartitionSpec("d")

    def run(params, flags):
        return step(params, optimizer.init(params), params, flags[0])[0][None]

    mapped = jax.shard_map(
        run, mesh=Mesh(jax.devices()[:2], "d"), in_specs=(PartitionSpec(), spec), out_specs=spec
    )
    flags = jnp.array([True, False])
    assert "cond[" not in str(jax.make_jaxpr(mapped)(params, flags))
    np.testing.assert_array_equal((jax.jit(mapped)(params, flags) == params).all(1), ~flags)


@pytest.mark.parametrize("skip", ["cond", "where"])
def test_a_skipped_step_keeps_subnormal_numbers(skip):
    params = {"w": jnp.array([2.0**-140, -(2.0**-149), -0.0], jnp.float32)}
    optimizer, step = make_step("counting", skip)
    new, _ = jax.jit(step)(params, optimizer.init(params), params, jnp.array(False))
    assert_same_bits(new, params)


def test_a_state_with_python_numbers_is_selected(rng):
    rate = optax.GradientTransformation(
        lambda params: {"rate": 0.5, "steps": jnp.int32(0)},
        lambda g, s, p=None: (
            jax.tree.map(lambda x: -s["rate"] * x, g),
            s | {"steps": s["steps"] + 1},
        ),
    )
    params = {"w": normal(rng, 3)}

    @jax.jit
    def step(params, steps, finite):
        state = {"rate": 0.5, "steps": steps}
        params, state = jmpx.optimizer_update(params, rate, state, params, finite)
        assert state["rate"] == 0.5 and isinstance(state["rate"], float)
        return params, state["steps"]

    for finite in (True, False):
        new, steps = step(params, jnp.int32(3), finite)
        assert steps == 3 + finite
        np.testing.assert_array_equal(new["w"], params["w"] / (2 if finite else 1))


@pytest.mark.parametrize("skip", ["Cond", None, True, "select"])
def test_other_ways_to_skip_are_refused(skip):
    params = {"w": jnp.ones(2)}
    optimizer = optax.sgd(1.0)
    calls = (
        lambda: jmpx.skip_nonfinite(optimizer, skip_by=skip),
        lambda: jmpx.optimizer_update(params, optimizer, (), params, True, skip_by=skip),
    )
    for call in calls[:1] if skip is None else calls:  # None is the default of optimizer_update
        with pytest.raises(
            ValueError, match='Expected skip_by to be "cond" or "where", got'
        ) as error:
            call()
        assert "\n" not in str(error.value)


def test_bad_arguments():
    with pytest.raises(TypeError, match="Expected an optax gradient transformation, got 3"):
        jmpx.skip_nonfinite(3)
    optimizer = optax.sgd(1.0)
    params = {"w": jnp.ones(2)}
    with pytest.raises(TypeError, match="Expected grads_finite to be a scalar bool"):
        jmpx.optimizer_update(params, optimizer, optimizer.init(params), params, 1)
    skipping = jmpx.skip_nonfinite(optimizer)
    with pytest.raises(TypeError, match="Expected grads_finite to be a scalar bool"):
        skipping.update(params, skipping.init(params), params, grads_finite=1.0)


def test_the_state_is_found_by_optax():
    state = jmpx.skip_nonfinite(optax.adam(0.1)).init({"w": jnp.ones(2)})
    assert optax.tree_utils.tree_get(state, "total_skipped") == 0
    assert optax.tree_utils.tree_get(state, "count") == 0
