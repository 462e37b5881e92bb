"""Functions that take a policy: also as a dtype or a mapping; 8 bits; unmatched rules."""

import dataclasses
import functools
import pickle
import warnings
from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from absl import flags
from flax import nnx
from helpers import zoo

import jmpx
import jmpx.equinox
import jmpx.flags
import jmpx.flax
import jmpx.haiku

X = np.ones((2, 3), np.float32)
FLOAT8 = sorted(name for name in vars(jnp) if name.startswith("float8_"))
every_framework = pytest.mark.parametrize("framework", zoo.FRAMEWORKS)


def mlp(framework):
    return zoo.drawn(framework, zoo.mlp, *X.shape)


def run(framework, policy):
    net = mlp(framework)
    apply, arrays = net.split(net.under(policy))
    return jax.eval_shape(apply, arrays, X)


def words(framework, text):
    return mlp(framework).words(text.replace("<head>", "<net/>head"))


def warnings_of(function, *args):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*args)
    return [str(warning.message) for warning in caught]


def product(policy, function=jnp.exp, **options):
    def f(x):
        with jax.named_scope("head"):
            return function(x @ x.T)

    return jax.make_jaxpr(jmpx.autocast(f, policy, **options))(X)


class Own:
    pass


def set_and_get(cls, policy):
    jmpx.set_policy(cls, policy)
    try:
        return jmpx.policy_of(cls)
    finally:
        jmpx.clear_policy(cls)


def push_and_get(cls, policy):
    with jmpx.push_policy(cls, policy):
        return jmpx.policy_of(cls)


def gradient(make, policy):
    grad_fn = make(lambda w: (w @ w.T).sum(), jmpx.NoOpLossScale(), policy=policy)
    return str(jax.make_jaxpr(grad_fn)(X))


def flag(define, policy):
    values = flags.FlagValues()
    holder = define("policy", policy, "The policy.", values)
    values(["program"])
    return holder.value


def mp_flags(policy):
    values = flags.FlagValues()
    mp = jmpx.flags.define_mp_flags(default_policy=policy, flag_values=values)
    values(["program"])
    return mp.policy_map


# A function that takes a policy -> a part of its effect that can be compared.
FUNCTIONS = {
    "set_policy": lambda policy: set_and_get(Own, policy),
    "set_policy of a Haiku module": lambda policy: set_and_get(hk.Linear, policy),
    "push_policy": lambda policy: push_and_get(Own, policy),
    "push_policy of an NNX module": lambda policy: push_and_get(nnx.Linear, policy),
    "grad": lambda policy: gradient(jmpx.grad, policy),
    "value_and_grad": lambda policy: gradient(jmpx.value_and_grad, policy),
    "autocast": lambda policy: str(product(policy)),
    "get_loss_scale": lambda policy: jmpx.get_loss_scale("auto", policy=policy),
    "DEFINE_policy": lambda policy: flag(jmpx.flags.DEFINE_policy, policy),
    "DEFINE_policy_map": lambda policy: flag(jmpx.flags.DEFINE_policy_map, policy),
    "define_mp_flags": mp_flags,
    **{name: functools.partial(run, name) for name in zoo.FRAMEWORKS},
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_function_takes_a_dtype_or_a_mapping_and_nothing_else(function):
    take = FUNCTIONS[function]
    assert take(np.dtype("float32")) == take("float32") != take(jnp.float16)
    assert take({"compute": "f16", "output": jnp.float32}) == take("c=f16,o=f32")
    for thing in (np.int32, 3):
        with pytest.raises((TypeError, ValueError, flags.IllegalFlagValueError)) as error:
            take(thing)
        sentence = str(error.value)
        assert "expected a floating dtype" in sentence or "mapping, a dtype" in sentence


@dataclasses.dataclass
class Dtypes:
    """Of another library, or of a vendored JMP: three dtypes by JMP's names."""

    param_dtype: Any
    compute_dtype: Any
    output_dtype: Any


LIKE_JMPS = {
    "jmp": jmp.get_policy,
    "from Haiku's registry": lambda text: in_haikus_registry(jmp.get_policy(text)),
    "a subclass": lambda text: type("Own", (jmp.Policy,), {})(*vars(jmp.get_policy(text)).values()),
    "np.dtype": lambda text: Dtypes(*map(np.dtype, vars(jmp.get_policy(text)).values())),
    "names": lambda text: Dtypes(*(np.dtype(d).name for d in vars(jmp.get_policy(text)).values())),
}


def in_haikus_registry(policy):
    store: Any = hk.mixed_precision
    with store.push_policy(hk.Conv2D, policy):
        return store.get_policy(hk.Conv2D)


@pytest.mark.parametrize("kind", LIKE_JMPS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_function_takes_a_policy_of_jmp(function, kind):
    take = FUNCTIONS[function]
    for text in ("p=f32,c=f16,o=f32", "bfloat16"):
        policy = LIKE_JMPS[kind](text)
        assert take(policy) == take(text)
        assert take({"policy": policy} if "policy" not in function else policy) == take(text)
    with pytest.raises((TypeError, ValueError, flags.IllegalFlagValueError)):
        take(jmp.Policy)  # the class
    with pytest.raises((TypeError, ValueError, flags.IllegalFlagValueError)):
        take(Dtypes(jnp.float32, jnp.int32, jnp.float32))


# 8 bits are for storage


def with_haikus_own(policy):
    hk.mixed_precision.set_policy(hk.Linear, jmpx.get_policy(policy))  # pyright: ignore[reportArgumentType]
    try:
        return hk.transform(lambda x: hk.Linear(2)(x)).init(jax.random.key(0), X)
    finally:
        hk.mixed_precision.clear_policy(hk.Linear)


def with_class_policy(policy):
    linear = eqx.nn.Linear(3, 2, key=jax.random.key(0))
    with jmpx.push_policy(eqx.nn.Linear, policy):
        return jmpx.equinox.with_policies(linear)(X[0])


COMPUTES = {
    "grad": lambda n: gradient(jmpx.grad, n),
    "value_and_grad": lambda n: gradient(jmpx.value_and_grad, f"c={n},o=f32"),
    "autocast, operation": lambda n: product(f"c=bf16; op.exp: {n}"),
    "haiku, its own registry": lambda n: with_haikus_own(f"c={n},o=f32"),
    "equinox, class": lambda n: with_class_policy(f"c={n}"),
    **{
        f"{name}, {text}": lambda n, name=name, text=text: run(name, words(name, text.format(n)))
        for name in zoo.FRAMEWORKS
        for text in ("c={},o=f32", "c=bf16; <Linear>: {}", "c=bf16; *: c={}")
    },
}


@pytest.mark.parametrize("way", COMPUTES)
def test_8_bits_are_refused_as_a_compute_dtype(way):
    name = FLOAT8[len(way) % len(FLOAT8)]
    with pytest.raises(ValueError, match=f"^Cannot compute in {name}, where .*, as") as error:
        COMPUTES[way](name)
    assert "\n" not in str(error.value) and f"params={name}" in str(error.value)
    assert jmpx.current_policy() is None


def test_8_bits_are_an_output_dtype_of_autocast():
    assert product("bf16", output=FLOAT8[0]).out_avals[0].dtype.name == FLOAT8[0]


def test_statistics_of_a_model_that_is_stored_in_8_bits_are_float32(standard_promotion):
    def names(tree):
        return {leaf.dtype.name for leaf in jax.tree.leaves(tree)}

    network = hk.transform_with_state(lambda x: hk.BatchNorm(True, True, 0.9)(x, True))
    with jmpx.haiku.policies("p=float8_e4m3fn,c=bf16"):
        params, state = jax.eval_shape(network.init, jax.random.key(0), X)
        y, state = jax.eval_shape(lambda p, s: network.apply(p, s, None, X), params, state)
    assert names(params) == {"float8_e4m3fn"} and names(state) == {"float32", "int32"}
    assert y.dtype == jnp.bfloat16

    model, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="batch")
    model = jmpx.cast_tree(model, "float8_e4m3fn")
    view = jmpx.equinox.with_policies(model, "p=float8_e4m3fn,c=bf16")
    mapped = jax.vmap(view, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    y, state = jax.eval_shape(mapped, X, state)  # pyright: ignore[reportArgumentType]
    assert y.dtype == jnp.bfloat16 and "float32" in names(state) <= {"float32", "bool", "int32"}


# Rules that match nothing

OPTIONAL = "; NoSuchNorm?: full; */nowhere/*?: c=f32; op.tanh?: full"
# A rule that matches nothing -> the end of its warning. <head> is the path of that layer.
UNUSED = {
    "NoSuch": " matched no class: select a class that the program has, such as '<Net>' or "
    "'<Linear>'.",
    "<Linear>x": " matched no class; did you mean '<Linear>'?",
    "some.<Linear>x": " matched no class; did you mean '<Linear>'?",
    "head": " matched no class; did you mean '*/head'?",
    "net.haed": " matched no class; did you mean '*/head'?",
    "*/haed/*": " matched no path; did you mean '*/head'?",
    "zzz/*": " matched no path.",
    "op.exp": " matched no module, as rules for operations hold by=operations and in "
    "jmpx.autocast alone: leave by out, or write 'op.exp?' where the map is for modules, too.",
}


@every_framework
def test_rules_that_match_nothing_are_warned_of_each_time(framework):
    # Of two rules for a module the first matches, too, though the last one wins.
    rules = "; ".join(f"{selector}: full" for selector in UNUSED)
    text = f"c=bf16; <Linear>: full; object: o=bf16{OPTIONAL}; {rules}"
    policy_map = jmpx.get_policy_map(words(framework, text))
    before = pickle.dumps(policy_map), vars(policy_map).copy()
    # A used map is what it was, and warns again.
    for given, full in ((policy_map, "full"), (policy_map.to_dict(), "compute=float32")):
        expected = [
            f"The rule '{selector}: {full}' of policy map {str(policy_map)!r}{end}"
            for selector, end in UNUSED.items()
        ]
        expected = [words(framework, each) for each in expected]
        assert warnings_of(run, framework, given) == expected
        assert (pickle.dumps(policy_map), vars(policy_map)) == before


@every_framework
def test_optional_rules_hold(framework):
    text = words(framework, f"c=bf16; <Linear>?: c=f32,o=f32{OPTIONAL}")
    assert run(framework, f"c=bf16{OPTIONAL}").dtype == jnp.bfloat16
    assert run(framework, f"{text}; *?: o=f16;").dtype == jnp.float16
    assert warnings_of(run, framework, f"{text}; */head: full") == []


@pytest.mark.parametrize("policies", [jmpx.haiku.policies, jmpx.flax.policies])
def test_rules_for_operations_are_warned_of_where_no_module_ran_too(policies):
    with pytest.warns(UserWarning, match="'op.exp: full'") as caught:
        with policies("c=bf16; op.exp: full; Linear: full"):
            pass
    (warning,) = [w for w in caught if "The rule" in str(w.message)]  # of Linear nothing is known
    assert warning.filename == __file__
    assert warnings_of(lambda: policies("c=bf16; op.exp?: full; Linear: full").__enter__()) == []


def test_operations_that_do_not_run_under_autocast():
    near = {
        "expp": "; did you mean 'op.exp'?",  # that ran
        "tanhh": "; did you mean 'op.tanh'?",  # that JAX has
        "exp2": "; did you mean 'op.exp'?",  # another that ran
        "cosh": ".",  # right, and did not run
        "while": ".",
        "qqqq": ".",
        "softmax": "'op.dot_general' and 'op.exp'.",
        "matmul": "'op.dot_general' and 'op.exp'.",
    }
    rules = "; ".join(f"op.{name}: full" for name in near)
    policy_map = jmpx.get_policy_map(f"c=bf16{OPTIONAL}; op.exp?: f32; {rules}")
    for _ in range(2):
        found = warnings_of(product, policy_map)
        for warning, end in zip(found, near.values(), strict=True):
            assert "matched no operation" in warning and warning.endswith(end), warning
    for rules, dtype in (("", jnp.bfloat16), ("; op.sin?: f32", jnp.float32)):
        (result,) = product(f"c=bf16{OPTIONAL}{rules}", jnp.sin, output=None).out_avals
        assert result.dtype == dtype
