"""`axis_name` averages replicas; a parameter that the function gathers is a shard, and refused."""

import compiled_step
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal
from jax.sharding import Mesh, PartitionSpec as P

import jmpx
import jmpx._differentiation

DEVICES, AXIS = 4, "data"
MAPS = ["shard_map", "shard_map without vma", "vmap", "pmap"]
# JAX 0.10 announces the end of pmap with a DeprecationWarning.
pytestmark = pytest.mark.filterwarnings("ignore:.*pmap.*:DeprecationWarning")


def over_devices(run, how, params, batch, split=True):
    """Calls `run(params, part)` for each part of the batch, and of the parameters if `split`.

    Returns:
        The results, stacked along a first axis.
    """

    def parts(tree):
        return jax.tree.map(lambda x: x.reshape(DEVICES, -1, *x.shape[1:]), tree)

    if how.startswith("shard_map"):
        stacked = lambda *args: jax.tree.map(lambda x: x[None], run(*args))  # noqa: E731
        mapped = jax.shard_map(
            stacked,
            mesh=Mesh(jax.devices()[:DEVICES], AXIS),
            in_specs=(P(AXIS) if split else P(), P(AXIS)),
            out_specs=P(AXIS),
            check_vma=how == "shard_map",
        )
        return jax.jit(mapped)(params, batch)
    axes = 0 if split else None, 0
    params = parts(params) if split else params
    if how == "vmap":
        return jax.jit(jax.vmap(run, in_axes=axes, axis_name=AXIS))(params, parts(batch))
    devices = jax.devices()[:DEVICES]
    return jax.pmap(run, in_axes=axes, axis_name=AXIS, devices=devices)(params, parts(batch))


def value_and_grad(loss_fn, **options):
    scaling = options.pop("scaling", jmpx.StaticLossScale(8))
    options = {"policy": "full", "axis_name": AXIS, **options}
    return jmpx.filter_value_and_grad(loss_fn, scaling, **options)


def gather(w):
    return jax.lax.all_gather(w, AXIS, tiled=True)


@jax.custom_vjp
def gather_with_float32_sum(w):
    return gather(w)


gather_with_float32_sum.defvjp(
    lambda w: (gather(w), None),
    lambda _, g: (jax.lax.psum_scatter(g.astype(jnp.float32), AXIS, tiled=True),),
)


@jax.custom_jvp
def gather_forward(w):
    return gather(w)


gather_forward.defjvp(lambda w, t: (gather(*w), gather(*t)))


def ring(w):
    """Gathers by passing the parts around."""
    parts = [w]
    for _ in range(DEVICES - 1):
        parts.append(jax.lax.ppermute(parts[-1], AXIS, [(i, (i + 1) % 4) for i in range(4)]))
    return jnp.concatenate(parts)


# Ways to read a whole weight of shape (8, 3) from its shard of shape (2, 3).
READS = {
    "gather": gather,
    "untiled": lambda w: jax.lax.all_gather(w, AXIS).reshape(8, 3),
    "over several axes": lambda w: jax.lax.all_gather(w, (AXIS,), tiled=True),
    "cast": lambda w: gather(w.astype(jnp.bfloat16)).astype(jnp.float32),
    "flattened": lambda w: gather(w.reshape(-1)).reshape(8, 3),
    "transposed": lambda w: jax.lax.all_gather(w.T, AXIS, axis=1, tiled=True).T,
    "scaled": lambda w: gather(w * 0.5),
    "normalized": lambda w: gather(w / jnp.linalg.norm(w)),
    "masked": lambda w: gather(jnp.where(jnp.arange(3) > 0, w, 0)),
    "joined": lambda w: gather(jnp.concatenate([w, 2 * w], 1))[:, :3],
    "a part": lambda w: gather(jax.lax.dynamic_slice_in_dim(w, 0, 2)),
    "in jit": jax.jit(gather),
    "in nested jit": jax.jit(lambda w: jax.jit(gather)(w.astype(jnp.bfloat16)).astype(w.dtype)),
    "in checkpoint": jax.checkpoint(gather),
    "in cond": lambda w: jax.lax.cond(
        jax.lax.axis_index(AXIS) >= 0, gather, lambda w: 2 * gather(w), w
    ),
    "in scan": lambda w: jax.lax.scan(lambda c, row: (c, gather(row)), 0.0, w.reshape(6, 1))[
        1
    ].reshape(8, 3),
    "carried": lambda w: jax.lax.scan(lambda c, _: (c, gather(c)), w, None, length=2)[1][1],
    "carried, later": lambda w: jax.lax.scan(
        lambda c, _: ((c[1], w), gather(c[0])), (w * 0, w * 0), None, length=3
    )[1][2],
    "in vmap": lambda w: jax.vmap(gather, in_axes=1, out_axes=1)(w),
    "own backward": gather_with_float32_sum,
    "own tangent": gather_forward,
    "ring": ring,
    "all_to_all": lambda w: jax.lax.all_to_all(
        jnp.tile(w, (1, 4)), AXIS, split_axis=1, concat_axis=0, tiled=True
    ),
}


def make_problem(rng):
    weights = {"full": {"w": normal(rng, 8, 3)}}
    return weights, normal(rng, 12, 8)


@pytest.mark.parametrize("read", READS)
def test_a_gathered_parameter_is_refused(read, rng):
    params, batch = make_problem(rng)

    def loss_fn(params, x):
        return jnp.mean((x @ READS[read](params["full"]["w"])) ** 2)

    with pytest.raises(TypeError, match=r"argument's \['full'\]\['w'\] over the axis") as error:
        over_devices(value_and_grad(loss_fn), "shard_map without vma", params, batch)
    assert "gather it before the call, or leave axis_name out" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("options", [{}, {"use_mixed_precision": False}, {"policy": "c=f16"}])
@pytest.mark.parametrize("how", MAPS)
def test_it_is_refused_in_every_map(how, options, rng):
    params, batch = make_problem(rng)
    params["rest"] = jnp.ones(4)  # pyright: ignore[reportArgumentType]

    def loss_fn(params, x):
        return (x @ gather(params["full"]["w"])).sum() + params["rest"].sum()

    with pytest.raises(TypeError, match=r"\['full'\]\['w'\] over the axis 'data', because.*gather"):
        over_devices(value_and_grad(loss_fn, **options), how, params, batch)


@pytest.mark.skipif(not hasattr(jax.lax, "all_gather_invariant"), reason="of JAX 0.7")
def test_an_invariant_gather_is_refused(rng):
    params, batch = make_problem(rng)

    def loss_fn(params, x):
        full = jax.lax.all_gather_invariant(params["full"]["w"], AXIS, tiled=True)  # pyright: ignore[reportAttributeAccessIssue]
        return (x @ full).sum()

    with pytest.raises(TypeError, match="reads it by all_gather_invariant"):
        over_devices(value_and_grad(loss_fn), "shard_map", params, batch)


def test_what_to_do_instead_gives_the_gradient_of_the_whole(rng):
    params, batch = make_problem(rng)
    loss_fn = lambda params, x: jnp.mean((x @ params["w"]) ** 2)  # noqa: E731

    def gathered_before(params, x):
        full = {"w": gather(params["full"]["w"])}
        *_, grads = value_and_grad(loss_fn)(full, x)
        mine = jax.lax.axis_index(AXIS) * 2
        return jax.lax.dynamic_slice_in_dim(grads["w"], mine, 2)

    def by_hand(params, x):
        gathering = lambda params, x: loss_fn({"w": gather(params["w"])}, x)  # noqa: E731
        *_, grads = value_and_grad(gathering, axis_name=None)(params["full"], x)
        return grads["w"] / DEVICES

    expected = jax.grad(loss_fn)(params["full"], batch)["w"].reshape(4, 2, 3)
    for run in (gathered_before, by_hand):
        grads = over_devices(run, "shard_map", params, batch)
        np.testing.assert_allclose(grads, expected, rtol=1e-5, atol=1e-6)


def contrastive(embed, x, everything):
    """A loss that compares each example with the examples of all devices."""
    mine = embed(x)
    return -jax.nn.log_softmax(mine @ everything(mine).T).mean()


@pytest.mark.parametrize("closed_over", [False, True])
@pytest.mark.parametrize("how", MAPS)
def test_a_contrastive_loss_gathers_activations(how, closed_over, rng):
    params = {"w": normal(rng, 8, 3), "b": jnp.ones(3)}
    batch = normal(rng, 12, 8)

    def loss_fn(params, x, everything=gather):
        return contrastive(lambda x: jnp.tanh(x @ params["w"] + params["b"]), x, everything)

    def run(params, x):
        if closed_over:
            return value_and_grad(lambda params: loss_fn(params, x))(params)
        return value_and_grad(loss_fn)(params, x)

    value, _, _, grads = over_devices(run, how, params, batch, split=False)
    one_device = jax.value_and_grad(lambda p: loss_fn(p, batch, lambda x: x))
    expected, expected_grads = one_device(params)
    np.testing.assert_allclose(value, np.full(4, expected), rtol=1e-5)
    for name, grad in grads.items():
        for one in grad:
            np.testing.assert_allclose(one, expected_grads[name], rtol=1e-4, atol=1e-6)


def everywhere(x):
    """As one that varies over the devices: `lax.pvary` on JAX 0.7, `lax.pcast` on later lines."""
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, AXIS, to="varying")
    return jax.lax.pvary(x, AXIS)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("vma", [True, False])
@pytest.mark.parametrize("kind", ["cast", "stacked"])
def test_varying_replicas_are_averaged(kind, vma, rng):
    w = normal(rng, 4, 8, 3)
    batch = normal(rng, 12, 8)
    loss_fn = lambda params, x: jnp.mean((x @ params["w"]) ** 2)  # noqa: E731

    def run(w, x):
        w = everywhere(w[0]) if kind == "cast" and vma else w[0]
        _, _, _, grads = value_and_grad(loss_fn)({"w": w}, x)
        return grads["w"][None]

    spec = P() if kind == "cast" else P(AXIS)
    mesh = Mesh(jax.devices()[:4], AXIS)
    mapped = jax.shard_map(
        run, mesh=mesh, in_specs=(spec, P(AXIS)), out_specs=P(AXIS), check_vma=vma
    )
    grads = jax.jit(mapped)(w, batch)
    replicas = w if kind == "stacked" else [w[0]] * 4
    each = [
        jax.grad(loss_fn)({"w": replica}, x)["w"]
        for replica, x in zip(replicas, batch.reshape(4, 3, 8), strict=True)
    ]
    for one in grads:
        np.testing.assert_allclose(one, np.mean(each, axis=0), rtol=1e-5, atol=1e-6)


FINE = {
    "no gather": lambda w, x: (x @ w).mean(),
    "a norm": lambda w, x: (x @ w).mean() + 0 * jax.lax.all_gather(jnp.sum(w**2), AXIS).sum(),
    "a mean over devices": lambda w, x: (x @ w).mean() + jnp.sum((w - jax.lax.pmean(w, AXIS)) ** 2),
    "without gradient": lambda w, x: (x @ w).mean() + gather(jax.lax.stop_gradient(w)).sum(),
    "of the inputs": lambda w, x: (gather(x) @ w).mean(),
    "of rows": lambda w, x: gather(w[(x[:, 0] > 0).astype(jnp.int32)]).mean(),
    "of what a scan computes": lambda w, x: gather(
        jax.lax.scan(lambda h, row: (h * jnp.tanh(row.sum()), h), x, w)[1]
    ).mean(),
}


@pytest.mark.parametrize("name", FINE)
def test_what_gathers_no_parameter_goes_on(name, rng):
    params, batch = make_problem(rng)
    w = params["full"]["w"]
    value, *_, grads = over_devices(
        value_and_grad(FINE[name]), "shard_map without vma", w, batch, split=False
    )
    assert np.isfinite(value).all() and (np.asarray(grads) == grads[:1]).all()


# It is the same program


@jax.custom_vjp
def tenfold_backwards(x):
    return x


tenfold_backwards.defvjp(lambda x: (x, None), lambda _, g: (10 * g,))


@jax.custom_jvp
def hundredfold_tangents(x):
    return x


hundredfold_tangents.defjvp(lambda x, t: (x[0], 100 * t[0]))


@pytest.mark.parametrize("how", MAPS)
def test_custom_derivatives_hold(how, rng):
    params, batch = make_problem(rng)
    w = params["full"]["w"]

    def loss_fn(w, x, first=tenfold_backwards, second=hundredfold_tangents):
        h = jax.checkpoint(lambda x: jax.jit(first)(x @ w))(x)
        return jax.lax.scan(lambda c, row: (c + second(row).sum(), None), 0 * h[0, 0], h)[0]

    plain = lambda x: x  # noqa: E731
    *_, grads = over_devices(value_and_grad(loss_fn), how, w, batch, split=False)
    expected = 1000 * jax.grad(loss_fn)(w, batch, plain, plain) / DEVICES
    np.testing.assert_allclose(grads, np.stack([expected] * 4), rtol=1e-5)


@pytest.mark.parametrize("vma", [True, False])
def test_it_compiles_to_the_same_and_calls_the_function_once(vma, rng, monkeypatch):
    calls = []

    def loss_fn(params, x):
        calls.append(x)
        for w in params:
            x = jax.nn.gelu(jax.nn.softmax(x @ w))
        return (x.astype(jnp.float32) ** 2).mean(), {"x": x, "name": "aux", "n": 3}

    def run(params, x):
        grad_fn = value_and_grad(loss_fn, policy="c=f16", has_aux=True)
        (value, aux), _, finite, grads = grad_fn(params, x)
        assert aux["name"] == "aux" and aux["n"] == 3
        return value, aux["x"], finite, grads

    mapped = jax.shard_map(
        run,
        mesh=Mesh(jax.devices()[:4], AXIS),
        in_specs=(P(), P(AXIS)),
        out_specs=(P(), P(AXIS), P(), P()),
        check_vma=vma,
    )
    params = [normal(rng, 8, 8) for _ in range(3)]
    batch = normal(rng, 12, 8)

    def compile_and_run():
        calls.clear()
        compiled = jax.jit(lambda *args: mapped(*args)).lower(params, batch).compile()
        return compiled_step.count(compiled.as_text()), compiled(params, batch), len(calls)  # pyright: ignore[reportArgumentType]

    counts, results, times = compile_and_run()
    monkeypatch.setattr(jmpx._differentiation, "find_gathers", lambda func, *_: (func, []))
    plain_counts, plain_results, plain_times = compile_and_run()
    assert counts == plain_counts and times == plain_times == 1
    for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(plain_results), strict=True):
        np.testing.assert_array_equal(a, b)


def test_without_an_axis_nothing_is_searched(rng, monkeypatch):
    def refuse(*args):
        raise AssertionError("searched")

    monkeypatch.setattr(jmpx._differentiation, "find_gathers", refuse)
    params, batch = make_problem(rng)
    value_and_grad(FINE["no gather"], axis_name=None)(params["full"]["w"], batch)
