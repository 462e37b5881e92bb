"""Autocast: mixed precision per operation, of any function, without a cast in it."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmpx import _jaxpr
from jmpx._dtypes import DTypeLike, as_dtype, check_enabled
from jmpx._evaluation import RESTORE, Run
from jmpx._operations import KINDS, operation_name
from jmpx._policy import Policy, did_you_mean
from jmpx._policy_map import PolicyMap, Rule, get_policy_map, warn_of
from jmpx._registry import refuse_creation
from jmpx._tree import is_floating
from jmpx._values import Value


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["fn"], meta_fields=["policy_map", "output"]
)
@dataclasses.dataclass(frozen=True)
class Autocast:
    """A callable under autocast; `jmpx.autocast` makes it.

    A pytree whose one child is the callable: of a module, parameters are trained, saved and
    sharded as before.

    Args:
        fn: the callable.
        policy_map: the policies of scopes and operations.
        output: "traced", None or a dtype; see `jmpx.autocast`.
    """

    fn: Callable[..., Any]
    policy_map: PolicyMap
    output: Any = "traced"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls `fn` under autocast."""
        return self._call(*args, **kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        policy_map = self.policy_map
        for dtype in (policy_map.default.compute_dtype, *(r.compute for r in policy_map.rules)):
            if dtype is not None:
                check_enabled(dtype)
        with refuse_creation():
            traced = _jaxpr.trace(lambda fn, *a, **k: fn(*a, **k), (self.fn, *args), kwargs)
        run = Run(policy_map)
        values = run.evaluate(traced.jaxpr, [Value(a, weak=True) for a in traced.arrays], "")
        with jax.named_scope(RESTORE):
            outputs = [
                self._output(value, aval)
                for value, aval in zip(values, traced.jaxpr.out_avals, strict=True)
            ]
        policy_map.mark_used(run.used)
        _warn_unused(run, stacklevel=3)
        return traced.rebuild(outputs)

    def _output(self, value: Value, traced: Any) -> Any:
        if self.output is None or not is_floating(value.array):
            return value.array
        if self.output != "traced":
            return value.to(np.dtype(self.output))
        array = value.to(traced.dtype)
        return _jaxpr.weakly_typed(array) if traced.weak_type else array


def autocast(
    fn: Callable[..., Any] | None = None,
    policy: str | Policy | PolicyMap = "compute=bf16",
    *,
    rules: Mapping[Any, DTypeLike] | None = None,
    output: DTypeLike | None = "traced",
) -> Any:
    """Makes a function run in mixed precision, operation by operation.

    In the tradition of `torch.autocast` and Grampax, for JAX: what was traced in float32 runs

    - in the compute dtype, if it is a matrix product or a convolution;
    - in float32, if it needs range or digits: exponentials, logarithms, powers to fractions, sums
      and other statistics, special functions, linear algebra; so do comparisons, which answer yes
      or no;
    - else in the widest dtype of its operands, where inputs, parameters and constants yield to
      what a matrix product made: a float32 bias leaves a bfloat16 activation bfloat16.

    Nothing else is cast: parameters stay as they are stored, and what was traced in another dtype
    keeps it. All work happens when JAX traces; put `jax.jit` around the train step as ever. It
    composes with `jit`, `grad`, `vmap`, `scan`, `jax.checkpoint`, `shard_map`, custom derivatives
    and itself.

    Constants that the compute dtype cannot hold saturate where they are added or put in place, such
    as a mask of -1e9: what is finite in float32 stays finite. Next to a factor or a divisor that
    float16 cannot hold, or that is one number known only when the program runs (a count, a learned
    scale), multiplication and division run in float32 and round the result. An epsilon that float16
    cannot hold is lost in a sum, `h + 1e-8`, as it is in torch: add it to a mean or a total, which
    is float32. Integer powers (`h**2`, `h**3`) stay in bfloat16; where they would be float16 they
    run in float32, because they and their derivatives overflow; what is made of them is float32 up
    to a matrix product or a bounded function, such as the tanh of a gelu.

    A loop's carry keeps its float32, so that sums over many steps are right; `op.scan: bf16` and
    `op.while: bf16` carry activations in 16 bits. A product with `precision="highest"` stays in
    float32, and so does what `jmpx.full_precision` marks. A cast to float32 of what is float32 to
    begin with leaves no trace in JAX and is not seen. A function with `jax.custom_vjp` runs in
    float32.

    Apply it to the model, `transformed.apply` or `module.apply`, and let the loss be computed from
    the float32 output. A function that creates Haiku parameters cannot be wrapped.

    Args:
        fn: any callable of pytrees; None to decorate with arguments. A callable that is itself a
            pytree, such as an Equinox module, gives a pytree that holds it.
        policy: a policy, a policy map or a string of either, of which the compute dtypes count.
            Selectors are globs of scopes (`*/head/*`), which are module paths in Haiku and Linen
            and `jax.named_scope` everywhere, names of Equinox's own layers (`LayerNorm`), and
            operations (`op.exp`).
        rules: dtypes of single operations, by primitive or name: `{lax.exp_p: jnp.bfloat16}`. They
            go after the rules of `policy`. A result never gets wider than it was traced.
        output: "traced" gives results in the dtypes that they have without autocast; None leaves
            them as they come; a dtype casts the floating ones.

    Returns:
        A function with the signature of `fn`, or a `jmpx.Autocast`.

    Raises:
        TypeError: if `fn` is not callable, or a dtype is not one.
        ValueError: if a string is not a policy map, a dtype not a floating one, or, when called,
            if `fn` creates Haiku parameters.

    Warns:
        UserWarning: when called, of each rule that matched nothing.

    Example:
        >>> import jax.numpy as jnp
        >>> import jmpx
        >>> @jmpx.autocast(policy="compute=bf16; op.tanh: f32", output=None)
        ... def f(w, b, x):
        ...     h = x @ w + b
        ...     return h, jnp.tanh(h), jnp.exp(h)
        >>> w, b, x = jnp.ones((3, 2)), jnp.ones(2), jnp.ones((4, 3))
        >>> [y.dtype.name for y in f(w, b, x)]
        ['bfloat16', 'float32', 'float32']
    """
    if fn is None:
        return functools.partial(autocast, policy=policy, rules=rules, output=output)
    if not callable(fn):
        raise TypeError(
            f"Expected a function to run under autocast, got {fn!r}: write jmpx.autocast(f, policy)"
            " or @jmpx.autocast(policy=...)."
        )
    policy_map = _with_operations(get_policy_map(policy), rules or {})
    if output is not None and output != "traced":
        output = as_dtype(output)
    wrapped = Autocast(fn, policy_map, output)
    if not jax.tree_util.all_leaves([fn]):
        return wrapped

    @functools.wraps(fn, updated=())
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return wrapped._call(*args, **kwargs)

    return wrapper


def _with_operations(policy_map: PolicyMap, rules: Mapping[Any, DTypeLike]) -> PolicyMap:
    """Returns the policy map with rules for operations at its end."""
    more = [Rule(f"op.{_operation(key)}", compute=as_dtype(dtype)) for key, dtype in rules.items()]
    return PolicyMap(policy_map.default, (*policy_map.rules, *more))


def _operation(key: Any) -> str:
    """Returns the name of an operation that was given as a primitive or by name."""
    name = getattr(key, "name", key)
    if not isinstance(name, str):
        raise TypeError(
            f"Expected a primitive or its name as a key of rules, got {key!r}: write for example "
            "lax.exp_p or 'exp'."
        )
    return operation_name(name.removeprefix("op."))


def _warn_unused(run: Run, stacklevel: int) -> None:
    """Warns of each rule that no equation met, and names what is near."""
    for rule in run.policy_map.unused():
        name = rule.selector.removeprefix("op.").strip("*/")
        if rule.is_operation:
            met = [{n: f"op.{n}" for n in names} for names in (sorted(run.operations), KINDS)]
            kind, near = "operation", [did_you_mean(name, choices) for choices in met]
        else:
            kind, near = "scope", [did_you_mean(name, _by_name(run.scopes))]
        found = [end for end in near if end != "."]
        warn_of(rule, run.policy_map, kind, [*found, "."][0], stacklevel + 1)


def _by_name(scopes: Iterable[str]) -> dict[str, str]:
    """Returns scopes by their last name, and by what follows the last dot of it."""
    names = {scope: scope.rpartition("/")[2] for scope in scopes if scope}
    return {
        key: scope
        for scope, name in names.items()
        for key in (name.rpartition(".")[2], name, scope)
    }


_COMPARISONS = frozenset("eq ne lt le gt ge is_finite eq_to lt_to le_to".split())
# What costs next to nothing to compute again from what is saved.
_CHEAP = frozenset(
    """
    mul div sub neg abs sign max min clamp select_n integer_pow square convert_element_type
    broadcast_in_dim reshape transpose squeeze rev slice pad concatenate split
    """.split()
)


def save_low_precision(primitive: Any, *avals: Any, **params: Any) -> bool:
    """Keeps no float32 intermediates for the backward pass: a policy of `jax.checkpoint`.

    Results in 16 bits are saved, and so are masks and indices. What is computed in float32, such
    as a softmax or the statistics of a norm, is computed again, as is what multiplications, casts
    and changes of shape make of what is saved.

    Args:
        primitive: the operation.
        *avals: the shapes and dtypes of its operands.
        **params: its parameters.

    Returns:
        Whether to save the results.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import jmpx
        >>> @functools.partial(jax.checkpoint, policy=jmpx.save_low_precision)
        ... @jmpx.autocast
        ... def loss_fn(w, x):
        ...     return jnp.mean(jax.nn.softmax(x @ w) ** 2)
        >>> jax.grad(loss_fn)(jnp.ones((3, 2)), jnp.ones((4, 3))).shape
        (3, 2)
    """
    if primitive.name in _COMPARISONS:
        return True
    if primitive.name in _CHEAP:
        return False
    said = [params.get(key) for key in ("new_dtype", "preferred_element_type", "dtype")]
    dtypes = [dtype for dtype in said if dtype is not None]
    dtypes = dtypes or [aval.dtype for aval in avals if hasattr(aval, "dtype")]
    inexact = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)]
    return all(np.dtype(dtype).itemsize <= 2 for dtype in inexact)
