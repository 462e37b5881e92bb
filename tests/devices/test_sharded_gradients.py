"""Which parameters the gradient functions take for shards, and which for replicas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal
from helpers.maps import AXIS, DEVICES, MAPS, everywhere, over_devices
from helpers.shards import gradients, in_float64
from jax.sharding import PartitionSpec as P

import jmpx

# JAX 0.10 announces the end of pmap with a DeprecationWarning.
pytestmark = pytest.mark.filterwarnings("ignore:.*pmap.*:DeprecationWarning")
WHOLE, SPLIT = (P(), P(AXIS)), (P(AXIS), P(AXIS))


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
    """Gathers by passing the parts around, so that each device has its own first."""
    parts = [w]
    for _ in range(DEVICES - 1):
        parts.append(jax.lax.ppermute(parts[-1], AXIS, [(i, (i + 1) % 4) for i in range(4)]))
    return jnp.concatenate(parts)


# Ways to read a whole weight of shape (8, 3) from its shard of shape (2, 3).
READS = {
    "gather": gather,
    "jmpx.distributed.gather": lambda w: jmpx.distributed.gather(w, AXIS, "full"),
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
    "in 8 bits": lambda w: quantized(w),
}
if jax.__version_info__ >= (0, 10):  # JAX 0.7 cannot differentiate one under shard_map
    READS["in a mutable array"] = lambda w: through_ref(w)
if hasattr(jax.lax, "all_gather_invariant"):  # on JAX 0.7
    READS["invariant"] = lambda w: jax.lax.all_gather_invariant(w, AXIS, tiled=True)  # pyright: ignore[reportAttributeAccessIssue]


def through_ref(w):
    ref = jax.new_ref(jnp.zeros((8, 3)) * w[:1, :1])
    ref[...] = gather(w)
    return ref[...]


@jax.custom_vjp
def quantized(w):
    return gather(jnp.round(w * 16).astype(jnp.int8)).astype(jnp.float32) / 16


quantized.defvjp(
    lambda w: (quantized(w), None), lambda _, g: (jax.lax.psum_scatter(g, AXIS, tiled=True),)
)


def make_problem(rng):
    return {"full": {"w": normal(rng, 8, 3)}}, normal(rng, 12, 8)


def square(w, x):
    return jnp.mean((x @ w) ** 2)


def of_each(reads):
    """A loss of one weight for each way to read one, and the weights."""
    return lambda params, x: sum(
        (square(read(params[name]), x) for name, read in reads.items()), jnp.zeros(())
    )


@pytest.mark.thorough
@pytest.mark.parametrize("mask", [None, True])
def test_a_varying_parameter_that_is_gathered_is_a_shard(mask, rng):
    weights, batch = {name: normal(rng, 8, 3) for name in READS}, normal(rng, 12, 8)
    run = gradients(of_each(READS), sharded=mask)
    grads = over_devices(run, "shard_map", weights, batch)[-1]
    by_hand = lambda w, x: jax.grad(of_each(READS))(w, x)  # noqa: E731
    sums = over_devices(by_hand, "shard_map without vma", weights, batch)
    if "invariant" in READS:  # whose backward pass sums nothing where JAX does not track
        one_device = jax.jit(jax.grad(square))(weights["invariant"], batch)
        sums["invariant"] = DEVICES * one_device.reshape(DEVICES, 2, 3)
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, sums[name] / DEVICES, 1e-5, 1e-6, err_msg=name)


@pytest.mark.skipif("invariant" not in READS, reason="of JAX 0.7")
@pytest.mark.parametrize("mask", [None, True, False])
def test_an_invariant_gather_is_refused_where_nothing_is_tracked(mask, rng):
    params, batch = make_problem(rng)
    loss_fn = lambda params, x: square(READS["invariant"](params["full"]["w"]), x)  # noqa: E731
    with pytest.raises(
        TypeError, match=r"\['w'\].*all_gather_invariant .* gather by jax.lax.all_gather"
    ):
        run = gradients(loss_fn, sharded=mask)
        over_devices(run, "shard_map without vma", params, batch)


@pytest.mark.parametrize("options", [{}, {"use_mixed_precision": False}, {"policy": "c=f16"}])
@pytest.mark.parametrize("how", MAPS[1:])
def test_where_nothing_is_tracked_a_gathered_parameter_has_to_be_told(how, options, rng):
    params, batch = make_problem(rng)
    params["rest"] = jnp.ones(4)  # pyright: ignore[reportArgumentType]

    def loss_fn(params, x):
        return (x @ gather(params["full"]["w"])).sum() + params["rest"].sum()

    message = r"whether the first argument's \['full'\]\['w'\] is a shard, .* over the axis 'data'"
    with pytest.raises(TypeError, match=message) as error:
        over_devices(gradients(loss_fn, **options), how, params, batch)
    assert (
        "parameters are shards by sharded= of jmpx.Over, or use" in str(error.value).split("\n")[0]
    )


@pytest.mark.parametrize("read", [read for read in READS if read not in ("invariant", "joined")])
def test_every_gather_is_seen_where_nothing_is_tracked(read, rng):
    params, batch = make_problem(rng)
    loss_fn = lambda params, x: square(READS[read](params["full"]["w"]), x)  # noqa: E731
    with pytest.raises(TypeError, match="Cannot tell whether .* is a shard, which the function"):
        over_devices(gradients(loss_fn), "vmap", params, batch)


# Neither gathered nor a device's own: the loss depends on the parameters of other devices


def experts(w, x):
    """Each device has the experts of two features, and gets those of the examples of all."""
    mine = jax.lax.all_to_all(x.reshape(3, 4, 2), AXIS, split_axis=1, concat_axis=0, tiled=True)
    parts = (mine.reshape(12, 2) @ w).reshape(4, 3, 3)
    return jnp.mean(jax.lax.psum_scatter(parts, AXIS) ** 2)


def pieces_of_a_product(w, x):
    """Tensor parallelism: the same batch on all devices, the features split."""
    x = gather(x)
    mine = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(AXIS) * 2, 2, axis=1)
    return jnp.mean(jax.lax.psum(mine @ w, AXIS) ** 2)


def placed(w, x):
    """A gather by a sum of arrays that are zero where other devices have their shards."""
    start = jax.lax.axis_index(AXIS) * 2
    full = jax.lax.dynamic_update_slice_in_dim(jnp.zeros((8, 3)), w, start, axis=0)
    return square(jax.lax.psum(full, AXIS), x)


def stages(w, x):
    """A pipeline, whose last device alone has a loss."""
    steps = [(i, (i + 1) % 4) for i in range(4)]
    h = gather(x)[:, :3]
    for stage in range(4):
        h = jnp.where(jax.lax.axis_index(AXIS) == stage, jnp.tanh(h * w.sum(0)), h)
        h = jax.lax.ppermute(h, AXIS, steps)
    return jnp.where(jax.lax.axis_index(AXIS) == 0, 4 * jnp.mean(h**2), 0.0)


def solved(w, x):
    """A linear system whose matrix is split over the devices."""
    product = lambda v: 9 * v + jax.lax.psum(w.T @ (w @ v), AXIS)  # noqa: E731
    return jax.scipy.sparse.linalg.cg(product, jax.lax.pmean(x.sum((0, 1)), AXIS) * jnp.ones(3))[
        0
    ].sum()


SHARDS = {
    "experts": (experts, square),
    "pieces": (pieces_of_a_product, square),
    "placed": (placed, square),
    "stages": (stages, None),
}
REPLICAS = {
    "a mean of losses": lambda w, x: jax.lax.pmean(square(w, x), AXIS),
    "a sum of losses": lambda w, x: jax.lax.psum(square(w, x), AXIS) / DEVICES,
    "gathered losses": lambda w, x: jax.lax.all_gather(square(w, x), AXIS).mean(),
    "contrasts": lambda w, x: -jax.nn.log_softmax((x @ w) @ gather(x @ w).T).mean(),
    "a norm over the batch": lambda w, x: square(
        w / jnp.sqrt(jax.lax.pmean(square(w, x), AXIS)), x
    ),
}
NEITHER = {**{name: loss for name, (loss, _) in SHARDS.items()}, **REPLICAS, "solved": solved}


@pytest.mark.parametrize("name", NEITHER)
def test_what_may_be_both_is_refused_without_a_mask(name, rng):
    params, batch = make_problem(rng)
    if name in REPLICAS:  # each device has a whole one of its own
        params["full"]["w"] = normal(rng, 32, 3)
    loss_fn = lambda params, x: NEITHER[name](params["full"]["w"], x)  # noqa: E731
    message = r"Cannot tell whether the first argument's \['full'\]\['w'\] is a shard or a replica"
    with pytest.raises(TypeError, match=message) as error:
        over_devices(gradients(loss_fn), "shard_map", params, batch)
    remedy = 'which parameters are shards, and "own" for a part that no device gathers.'
    assert remedy in str(error.value).split("\n")[0]


@pytest.mark.thorough
@pytest.mark.parametrize("how", MAPS)
def test_with_a_mask_shards_and_replicas_have_the_gradient_of_the_mean_loss(how, rng):
    batch = normal(rng, 12, 8)
    shards = {name: normal(rng, 8, 3) / 3 for name in SHARDS}
    replicas = {name: normal(rng, 8, 3) / 3 for name in REPLICAS}

    def loss_fn(params, x):
        losses = [SHARDS[name][0](w, x) for name, w in params["shards"].items()]
        losses += [REPLICAS[name](w, x) for name, w in params["replicas"].items()]
        return sum(losses, jnp.zeros(()))

    def run(params, x):
        if how == "shard_map":
            params["replicas"] = jax.tree.map(everywhere, params["replicas"])
        mask = {"shards": "own", "replicas": False}
        return gradients(loss_fn, sharded=mask)(params, x)

    specs = ({"shards": P(AXIS), "replicas": P()}, P(AXIS))
    params = {"shards": shards, "replicas": replicas}
    grads = over_devices(run, how, params, batch, specs=specs)[-1]

    def last_of_stages(w, x):
        h = x[:, :3]
        for part in w.reshape(4, 2, 3):
            h = jnp.tanh(h * part.sum(0))
        return jnp.mean(h**2)

    def contrasts(w, x):
        return -jax.nn.log_softmax((x @ w) @ (x @ w).T).mean()

    whole = {"stages": last_of_stages, "contrasts": contrasts}
    whole["a norm over the batch"] = lambda w, x: square(w / jnp.sqrt(square(w, x)), x)
    for kind, weights in params.items():
        for name, w in weights.items():
            expected = jax.grad(whole.get(name, square))(w, batch)
            expected = expected.reshape(4, 2, 3) if kind == "shards" else [expected] * 4
            np.testing.assert_allclose(grads[kind][name], expected, 1e-4, 1e-6, err_msg=name)


# What makes no shard of a replica


@pytest.mark.sampled(3)
@pytest.mark.parametrize("vma", [True, False])
@pytest.mark.parametrize("kind", ["cast", "stacked"])
def test_varying_replicas_are_averaged(kind, vma, rng):
    w = normal(rng, 4, 8, 3)
    batch = normal(rng, 12, 8)

    def loss_fn(params, x):
        w = params["w"]  # whose copies are compared, beside the loss
        drift = jax.lax.stop_gradient(gather(w)).sum() + jax.lax.psum(w * 0, AXIS).sum()
        return square(w, x), (drift, gather(w).sum()) if kind == "cast" and vma else 0.0

    def run(w, x):
        w = everywhere(w[0]) if kind == "cast" and vma else w[0]
        grads = gradients(loss_fn, has_aux=True)({"w": w}, x)[-1]
        return grads["w"]

    specs = WHOLE if kind == "cast" else SPLIT
    how = "shard_map" if vma else "shard_map without vma"
    grads = over_devices(run, how, w, batch, specs=specs)
    replicas = w if kind == "stacked" else [w[0]] * 4
    parts = zip(replicas, batch.reshape(4, 3, 8), strict=True)
    one_device = jax.jit(jax.grad(square))
    each = [one_device(replica, x) for replica, x in parts]
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


@pytest.mark.thorough
def test_what_gathers_no_parameter_goes_on(rng):
    weights, batch = {name: normal(rng, 8, 3) for name in FINE}, normal(rng, 12, 8)
    of_all = lambda params, x: sum((FINE[n](w, x) for n, w in params.items()), jnp.zeros(()))  # noqa: E731
    for how in MAPS[:2]:
        grads = over_devices(gradients(of_all), how, weights, batch, specs=WHOLE)[-1]
        # By hand: where JAX tracks nothing, each device has the gradient of the sum of all losses.
        by_hand = lambda w, x: jax.grad(of_all)(w, x)  # noqa: E731
        sums = over_devices(by_hand, "shard_map without vma", weights, batch, specs=WHOLE)
        for name, grad in grads.items():
            expected = [sums[name].mean(0)] * DEVICES
            np.testing.assert_allclose(grad, expected, 1e-5, 1e-6, err_msg=name)


def contrastive(embed, x, everything):
    """A loss that compares each example with the examples of all devices."""
    mine = embed(x)
    return -jax.nn.log_softmax(mine @ everything(mine).T).mean()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("closed_over", [False, True])
@pytest.mark.parametrize("how", MAPS)
def test_a_contrastive_loss_gathers_activations(how, closed_over, rng):
    params = {"w": normal(rng, 8, 3), "b": jnp.ones(3)}
    batch = normal(rng, 12, 8)

    def loss_fn(params, x, everything=gather):
        return contrastive(lambda x: jnp.tanh(x @ params["w"] + params["b"]), x, everything)

    def run(params, x):
        if closed_over:
            return gradients(lambda params: loss_fn(params, x))(params)
        return gradients(loss_fn)(params, x)

    value, _, _, grads = over_devices(run, how, params, batch, specs=WHOLE)
    one_device = jax.value_and_grad(lambda p: loss_fn(p, batch, lambda x: x))
    expected, expected_grads = one_device(params)
    np.testing.assert_allclose(value, np.full(4, expected), rtol=1e-5)
    for name, grad in grads.items():
        for one in grad:
            np.testing.assert_allclose(one, expected_grads[name], rtol=1e-4, atol=1e-6)


# Contradictions


def test_a_parameter_that_is_equal_on_all_devices_is_no_shard(rng):
    params, batch = make_problem(rng)
    for mask, loss_fn, message in [
        (
            True,
            lambda p, x: square(p["full"]["w"], x),
            "Expected a shard, as sharded=True says, but",
        ),
        (None, lambda p, x: square(gather(p["full"]["w"])[:8], x), "Cannot gather"),
    ]:
        with pytest.raises(TypeError, match=rf"{message}.*\['w'\].* the same on all devices"):
            run = gradients(loss_fn, sharded=mask)
            over_devices(run, "shard_map", params, batch, specs=WHOLE)
    # A gather that picks a part of a whole parameter first, as the mask says.
    part = lambda w: gather(jax.lax.dynamic_slice_in_dim(w, jax.lax.axis_index(AXIS) * 2, 2))  # noqa: E731
    run = gradients(lambda p, x: square(part(p["full"]["w"]), x), sharded=False)
    grads = over_devices(run, "shard_map", params, batch, specs=WHOLE)[-1]["full"]["w"]
    expected = jax.jit(jax.grad(square))(params["full"]["w"], batch)
    np.testing.assert_allclose(grads, [expected] * 4, rtol=1e-5, atol=1e-6)


def test_a_gathered_shard_is_no_replica(rng):
    params, batch = make_problem(rng)
    loss_fn = lambda p, x: square(gather(p["full"]["w"]), x)  # noqa: E731
    with pytest.raises(TypeError, match=r"average the gradient of .*\['w'\].*say sharded=True"):
        over_devices(gradients(loss_fn, sharded=False), "shard_map", params, batch)


# A mask is believed where it may be right, and refused where it is seen to be wrong.


def picked(w):
    return gather(jax.lax.dynamic_slice_in_dim(w, jax.lax.axis_index(AXIS) * 2, 2))


USES = {
    "gathered": lambda w, x: square(gather(w), x),
    "jmpx": lambda w, x: square(jmpx.distributed.gather(w, AXIS, "full"), x),
    "in layers": lambda w, x: square(
        jax.lax.scan(lambda c, _: (c, gather(w)), 0, length=2)[1][1], x
    ),
    "replica": square,
    "contrasts": lambda w, x: -jax.nn.log_softmax((x @ w) @ gather(x @ w).T).mean(),
    "picked": lambda w, x: square(picked(w), x),
    "picked by rows": lambda w, x: square(
        gather(w[jax.lax.axis_index(AXIS) * 2 + jnp.arange(2)]), x
    ),
    "experts": experts,
    "pieces": pieces_of_a_product,
}
SPLIT_USES = ("gathered", "jmpx", "in layers", "experts", "pieces")
# What is said of each, and is wrong; what JAX does not track may be an own part.
WRONG = {
    "gathered": [False],
    "jmpx": [False],
    "in layers": [False],
    "replica": [True],
    "contrasts": [True],
    "picked": [],
    "picked by rows": [],
    "experts": [True],
    "pieces": [True],
}
RIGHT = {
    **dict.fromkeys(("gathered", "jmpx", "in layers"), [True, "own"]),
    **dict.fromkeys(("replica", "contrasts", "picked", "picked by rows"), [False]),
    **dict.fromkeys(("experts", "pieces"), ["own"]),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("how", MAPS)
@pytest.mark.parametrize(("use", "says"), [(use, says) for use in RIGHT for says in RIGHT[use]])
def test_masks_that_are_right(use, says, how, rng):
    w, batch = normal(rng, 8, 3) / 3, normal(rng, 12, 8)
    run = gradients(lambda w, x: USES[use](w, x), sharded=says)
    specs = SPLIT if use in SPLIT_USES else WHOLE
    value, _, _, grads = over_devices(run, how, w, batch, specs=specs)
    whole = {"contrasts": lambda w, x: -jax.nn.log_softmax((x @ w) @ (x @ w).T).mean()}
    one_device = whole.get(use, square)
    loss, expected = in_float64(one_device, w, batch)
    np.testing.assert_allclose(value, [loss] * DEVICES, rtol=1e-5)
    expected = expected.reshape(4, 2, 3) if use in SPLIT_USES else [expected] * DEVICES
    np.testing.assert_allclose(grads, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("how", MAPS)
@pytest.mark.parametrize(("use", "says"), [(use, says) for use in WRONG for says in WRONG[use]])
def test_masks_that_are_seen_to_be_wrong(use, says, how, rng):
    w, batch = {"w": normal(rng, 8, 3), "b": normal(rng, 3)}, normal(rng, 12, 8)
    loss_fn = lambda p, x: USES[use](p["w"], x) + p["b"].sum()  # noqa: E731
    specs = ({"w": SPLIT[0] if use in SPLIT_USES else WHOLE[0], "b": P()}, P(AXIS))
    with pytest.raises(
        TypeError, match=f"as sharded={says} says, .* say sharded={not says} "
    ) as error:
        run = gradients(loss_fn, sharded={"w": says, "b": False})
        over_devices(run, how, w, batch, specs=specs)
    assert "['w']" in str(error.value)


def test_what_nobody_sees_may_be_a_gather(rng):
    """A callback may gather: a mask that calls its parameter a shard is believed."""
    w, batch = normal(rng, 2, 3), normal(rng, 4, 3, 2)

    @jax.custom_vjp
    def called_back(w):
        return jax.pure_callback(lambda w: w, jax.typeof(w), w, vmap_method="sequential")

    called_back.defvjp(lambda w: (called_back(w), None), lambda _, g: (g,))
    run = gradients(lambda w, x: jnp.mean((x @ called_back(w)) ** 2), sharded=True)
    *_, grads = jax.vmap(run, in_axes=(None, 0), axis_name=AXIS)(w, batch)
    each = jax.vmap(jax.grad(lambda w, x: jnp.mean((x @ w) ** 2)), in_axes=(None, 0))(w, batch)
    np.testing.assert_allclose(grads, each / DEVICES, rtol=1e-5, atol=1e-6)
