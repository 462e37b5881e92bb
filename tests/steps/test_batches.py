"""Which arguments of a gradient function are split, into which parts, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal
from helpers.groups import make_mesh, over, value_and_grad
from helpers.training import loss_fn, make_params
from hypothesis import given, settings, strategies as st
from jax.sharding import NamedSharding, PartitionSpec as P

import jmpx
from jmpx._steps.batches import GROUPS, MICROBATCHES, split_batch

DTYPES = ["float32", "float16", "bfloat16", "int8", "uint32", "bool", "complex64"]


@st.composite
def batches(draw):
    """Batch arguments of any structure, their number of examples, and a divisor of it."""
    count, each = draw(st.integers(1, 5)), draw(st.integers(0, 3))
    seed = draw(st.integers(0, 2**16))
    rng = np.random.default_rng(seed)

    def array(dtype, rest, numpy):
        values = rng.integers(-9, 9, (count * each, *rest))
        if dtype == "key":
            return jax.random.split(jax.random.key(seed), count * each or 1)[: count * each]
        return values.astype(np.float32) if numpy else jnp.asarray(values).astype(dtype)

    shapes = st.lists(st.integers(0, 2), max_size=2)
    arrays = st.builds(array, st.sampled_from([*DTYPES, "key"]), shapes, st.booleans())
    leaves = arrays | st.sampled_from([None, 3, 0.5, "text", max])
    trees = st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=2)
            | st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
            | st.tuples(inner)
        ),
        max_leaves=3,
    )
    args = [draw(arrays), *draw(st.lists(trees, max_size=2))]
    return count, each, tuple(draw(st.permutations(args)))


def is_split(leaf):
    return isinstance(leaf, jax.Array | np.ndarray)


def bits(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


@pytest.mark.thorough
@settings(max_examples=60, deadline=None)
@given(batch=batches(), explicit=st.booleans())
def test_the_parts_put_together_are_the_batch_in_order(batch, explicit):
    count, each, args = batch
    params = {"w": jnp.ones(7)}
    argnums = tuple(range(1, len(args) + 1)) if explicit else None
    batch = jmpx.Batch(argnums)
    arrays, merge = split_batch(batch, None, (params, *args), count, MICROBATCHES)
    assert all(array.shape[:2] == (count, each) for array in arrays)
    merged = [merge([array[i] for array in arrays]) for i in range(count)]
    for one in merged:
        assert jax.tree.structure(one) == jax.tree.structure((params, *args))
        assert one[0] is not params and one[0]["w"] is params["w"]
    for leaf, *split in zip(
        jax.tree.leaves(args), *[jax.tree.leaves(m[1:]) for m in merged], strict=True
    ):
        if not is_split(leaf):
            assert all(part is leaf for part in split)
            continue
        assert all(
            part.dtype == leaf.dtype and part.shape == (each, *leaf.shape[1:]) for part in split
        )
        np.testing.assert_array_equal(np.concatenate([bits(part) for part in split]), bits(leaf))


@pytest.mark.thorough
@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(2, 9),
    examples=st.integers(1, 40),
    others=st.integers(1, 40),
    what=st.sampled_from([GROUPS, MICROBATCHES]),
)
def test_a_batch_that_cannot_be_split_is_refused(count, examples, others, what):
    args = {}, jnp.zeros((examples, 2)), jnp.zeros(others)
    split = lambda: split_batch(jmpx.Batch(), None, args, count, what)[0]  # noqa: E731
    if examples == others and examples % count == 0:
        assert split()[1].shape == (count, examples // count)
        return
    with pytest.raises(ValueError, match=f"into {count} {what}") as error:
        split()
    differ = "differ in their number of examples" in str(error.value)
    assert differ == (examples != others) and "\n" not in str(error.value)


# Bad input: one sentence each.


def call(x, *rest, **keywords):
    loss = lambda params, x, *rest, **keywords: loss_fn(params, x)  # noqa: E731
    options = {n: keywords.pop(n) for n in ("batch", "state_argnum") if n in keywords}
    if "state_argnum" in options:
        options["has_aux"] = True
    params = {"w": jnp.ones((6, 3)), "b": jnp.ones(3)}
    return value_and_grad(loss, **options)(params, x, *rest, **keywords)


X = jnp.ones((16, 6))
CALLS = {
    "not divisible": (lambda: call(X[:12]), r"12 examples of argument 1, float32\[12, 6\], into 8"),
    "no example for each": (lambda: call(X[:4]), "the 4 examples of argument 1"),
    "different": (
        lambda: call(X, X[:8]),
        "arguments 1 and 2 .* differ in their number of examples",
    ),
    "a legacy key": (lambda: call(X, jax.random.PRNGKey(0)), r"uint32\[2\] differ .*PRNG keys"),
    "a scalar": (lambda: call(X, jnp.float32(1)), r"argument 2 .*float32\[\], which has no axis"),
    "a NumPy number": (lambda: call(X, np.int32(1)), r"argument 2 .*int32\[\], which has no axis"),
    "a key by its position": (
        lambda: call(X, jax.random.key(0), batch={"argnums": (1, 2)}),
        r"argument 2 .*key<fry>\[\], which has no axis",
    ),
    "no arrays": (lambda: call("x", 3), "argnums=None hold no array"),
    "only keys": (lambda: call(None, jax.random.key(0)), "argnums=None hold no array"),
    "none named": (lambda: call(X, batch={"argnums": ()}), r"argnums=\(\) hold no array"),
    "named without arrays": (lambda: call(X, 3, batch={"argnums": 2}), "argnums=.2,. hold no"),
    "out of range": (
        lambda: call(X, batch={"argnums": 2}),
        "Cannot split argument 2.* 2 positional",
    ),
    "far below": (lambda: call(X, batch={"argnums": -5}), "Cannot split argument -5"),
    "the first, from the end": (lambda: call(X, batch={"argnums": -2}), "Cannot split argument -2"),
    "the first": (lambda: call(X, batch={"argnums": 0}), "argument 0, .*it holds the parameters"),
    "the state": (
        lambda: call(X, X, batch={"argnums": (1, 2)}, state_argnum=2),
        "argument 2, .*it holds the model state",
    ),
    "keyword": (lambda: call(X, y=jnp.ones((16, 3))), "keyword argument 'y' .*pass it by position"),
    "nested keyword": (lambda: call(X, y={"a": [jnp.ones(16)]}), "keyword argument 'y'"),
    "a bool": (lambda: call(X, batch={"argnums": True}), "int or several, got True"),
    "text": (lambda: call(X, batch={"argnums": "1"}), "int or several, got '1'"),
    "a float": (lambda: call(X, batch={"argnums": [1, 2.0]}), "int or several, got .1, 2.0."),
    "a dict": (lambda: call(X, batch={"argnums": {"x": 1}}), "int or several, got {'x': 1}"),
    "no state": (lambda: call(X, state_argnum=4), "Cannot find the model state at argument 4"),
}


@pytest.mark.parametrize("case", CALLS)
def test_what_cannot_be_split(case):
    run, message = CALLS[case]
    with pytest.raises((ValueError, TypeError), match=message) as error:
        run()
    assert "\n" not in str(error.value) and ": " in str(error.value)


def named(*spec, mesh=None):
    return NamedSharding(make_mesh(4, 2) if mesh is None else mesh, P(*spec))


SHARDINGS = {
    "no mesh": (
        P("data"),
        "mesh with the axis 'data' .*jax.set_mesh, or give a jax.sharding.Named",
    ),
    "a string": ("data", "NamedSharding, or a PartitionSpec under jax.set_mesh, got 'data'"),
    "a mesh": (make_mesh(4, 2), "PartitionSpec under jax.set_mesh, got Mesh"),
    "no axis": (named(), "to split the first axis"),
    "another axis": (named(None, "data"), "to split the first axis"),
    "any axis": (named(P.UNCONSTRAINED), "to split the first axis"),
    "of no axes": (named(()), "to split the first axis"),
}


@pytest.mark.parametrize("case", SHARDINGS)
def test_what_is_no_sharding_of_a_batch(case, rng):
    sharding, message = SHARDINGS[case]
    with pytest.raises((ValueError, TypeError), match=message) as error:
        value_and_grad(batch={"sharding": sharding})(make_params(rng), X)
    assert "\n" not in str(error.value)


def test_an_axis_that_does_not_exist(rng):
    with jax.set_mesh(make_mesh(4, 2)):
        with pytest.raises(ValueError, match=r"axis 'dta' .* among \['data', 'model'\]: set one"):
            value_and_grad(batch={"sharding": P("dta")})(make_params(rng), X)


def test_a_mapped_axis_besides(rng):
    with pytest.raises(ValueError, match=r"Cannot average over both .* and over=jmpx.Over\('data'"):
        value_and_grad(over=jmpx.Over("data"))
    for sharding in (P("data"), over(8)):
        run = lambda x, s=sharding: value_and_grad(batch={"sharding": s})(PARAMS, x).value  # noqa: E731
        mapped = jax.shard_map(run, mesh=make_mesh(8), in_specs=P("data"), out_specs=P())
        with pytest.raises(
            ValueError, match=r"shard_map maps here.* give over=jmpx.Over\('data'\) instead"
        ):
            jax.jit(mapped)(X)


PARAMS = {"w": jnp.ones((6, 3)), "b": jnp.ones(3)}


def test_an_error_of_the_function_is_its_own():
    def loss(params, x):
        return jax.vmap(lambda x: x, out_axes=None)(x).sum()

    with pytest.raises(ValueError, match="out_axes") as error:
        value_and_grad(loss)(PARAMS, normal(np.random.default_rng(0), 16, 6))
    assert "sharding" not in str(error.value)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("examples", [8, 16, 24])
def test_no_length_decides_whether_an_array_is_split(examples):
    """Class weights of eight rows are refused beside eight examples as beside any other number."""
    x, weights = jnp.ones((examples, 6)), jnp.ones(8)
    with pytest.raises(
        ValueError, match=r"'weights' .*float32\[8\] in it .* by argnums of jmpx.Batch"
    ):
        call(x, weights=weights)
    assert call(x, weights=weights, batch={"argnums": 1}).grads_finite
    assert call(x, weights=weights[0], key=jax.random.key(0)).grads_finite


@pytest.mark.thorough
def test_named_examples_let_keyword_arguments_go_whole():
    loss = lambda params, x, *, table: loss_fn(params, x) + 0 * table.sum()  # noqa: E731
    result = value_and_grad(loss, batch={"argnums": 1})(PARAMS, X, table=jnp.ones((16, 3)))
    assert result.grads_finite


def test_reduce_without_groups_or_axis_still_warns():
    with pytest.warns(UserWarning, match="without a mean over devices: give over=jmpx.Over"):
        jmpx.filter_value_and_grad(loss_fn, jmpx.NoOpLossScale(), policy="c=bf16,r=f32")
