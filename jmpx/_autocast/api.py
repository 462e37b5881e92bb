"""Autocast as users call it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, NoReturn, Protocol, TypeVar, overload

from jmpx._autocast.saving import get_saving
from jmpx._autocast.wrapped import applied
from jmpx._base.dtypes import DTypeLike, as_dtype, is_dtype
from jmpx._base.moved import telling
from jmpx._jaxprs.core import operation_name
from jmpx._policies.map_strings import get_policy_map
from jmpx._policies.maps import PolicyMap, PolicyMapLike, Rule as PolicyRule

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Decorator(Protocol):
    """A decorator that keeps the type of a function."""

    def __call__(self, fn: _Function, /) -> _Function: ...


@overload
def autocast(
    fn: _Function,
    policy: PolicyMapLike = ...,
    *,
    rules: Mapping[Any, DTypeLike] | None = ...,
    output: DTypeLike | None = ...,
    save: Literal["products"] | None = ...,
    pieces: str | Sequence[str] | None = ...,
) -> _Function: ...


@overload
def autocast(
    fn: None = None,
    policy: PolicyMapLike = ...,
    *,
    rules: Mapping[Any, DTypeLike] | None = ...,
    output: DTypeLike | None = ...,
    save: Literal["products"] | None = ...,
    pieces: str | Sequence[str] | None = ...,
) -> _Decorator: ...


@telling("jmpx.autocast")
def autocast(
    fn: Callable[..., Any] | None = None,
    policy: PolicyMapLike = "compute=bf16",
    *,
    rules: Mapping[Any, DTypeLike] | None = None,
    output: DTypeLike | None = "traced",
    save: Literal["products"] | None = None,
    pieces: str | Sequence[str] | None = None,
) -> Any:
    """Makes a function run in mixed precision, operation by operation.

    As `torch.autocast` and Grampax do, it decides for each operation that was traced in float32:

    - matrix products and convolutions run in the compute dtype;
    - operations that need range or digits run in float32: exponentials, logarithms, fractional
      powers, sums and other statistics, special functions but erf, linear algebra, and comparisons
      of two dtypes;
    - all others run in the widest dtype of their operands. Inputs, parameters and constants yield
      to the results of matrix products: a float32 bias leaves a bfloat16 activation bfloat16.

    Nothing else is cast: parameters stay as they are stored, and an operation that was traced in
    another dtype keeps it. All work happens while JAX traces; put `jax.jit` around the train step
    as ever. Autocast composes with `jit`, `grad`, `vmap`, `scan`, `jax.checkpoint`, `shard_map`,
    custom derivatives and itself.

    Constants that the compute dtype cannot hold, such as a mask of -1e9, saturate where they are
    added to an array or put into one: finite numbers stay finite. Multiplication and division run
    in float32 and round the result if float16 cannot hold a factor or a divisor, or if it is one
    number that is known only when the program runs, such as a count or a learned scale. An epsilon
    that float16 cannot hold is lost in a sum, `h + 1e-8`, as it is in torch, unless the sum is
    exposed (see below): add it to a mean or a total, which is float32. Integer powers (`h**2`,
    `h**3`) run in bfloat16, but in float32 instead of float16, because they and their derivatives
    overflow there; operations on their results are float32, too, up to a matrix product or a
    bounded function, such as the tanh of a gelu.

    A sigmoid in bfloat16 is exactly 1 from a logit of 6 on, and `log(1 - p)` infinite. So
    `logistic`, `tanh`, `erf` and `erfc` run in float32 where their result is exposed: where it
    reaches a logarithm, a root, a denominator or another function that is infinite at a bound, or a
    result of the function, through copies, sums, clamps, selections, powers and products with one
    number or itself. A product of two arrays ends the way: `silu`, `gelu`, GLUs and LSTMs stay in
    16 bits. Maximum, minimum and clamp by a constant that 16 bits round to 0, 1 or -1, such as
    `jnp.clip(p, 1e-7, 1 - 1e-7)`, run in float32, and so do exposed sums and selections with one.

    A loop's carry keeps its float32, so that sums over many steps are right; `op.scan: bf16` and
    `op.while: bf16` carry activations in 16 bits. A product with `precision="highest"` runs in
    float32, and so does code that `jmpx.full_precision` marks. A cast from float32 to float32
    leaves no trace in JAX and is not seen. A function with `jax.custom_vjp` runs in float32, as JAX
    cannot trace its backward pass again, and so do kernels and functions with a partitioning of
    their own: cast their operands before the call (`q.astype(jnp.bfloat16)`).

    `matmul` (`*/router: c=f32,m=highest`) is the algorithm of products and convolutions that run in
    float32, forward and backward, also in functions with `jax.custom_vjp` and in code that
    `jmpx.full_precision` marks. A product in 16 bits gets none, and the `precision=` of a product
    goes before it. A rule for an operation may say it, too (`op.dot_general: c=f32,m=highest`). If
    the policy sets none, float32 products have the algorithm that jmpx has set around the call, as
    `full_precision(matmul=)` and the gradient functions do. Under a precision that the user's own
    `jax.default_matmul_precision` sets, products run in float32, as under a `precision=`. JAX
    ignores dot algorithms such as `BF16_BF16_F32_X3` for convolutions. Out of reach are functions
    that JAX calls afterwards: the rule of a `custom_vmap`, and the transpose of a `linear_call`.

    `save="products"` is for memory: of everything between, the backward pass then keeps what weight
    products and convolutions made, and computes the rest again, such as norms, activation functions
    and attention scores. Autocast cuts the function at some of the places where one activation
    lives, as between the blocks of a transformer, also in jitted functions, and puts
    `jax.checkpoint` around each piece; the body of a `scan` is one piece. No dtype changes, and no
    gradient but by what the compiler fuses. Products of two activations run again: for the
    attention of a ViT 1 to 2 % more FLOPs, in long sequences more. Turn it on where training needs
    less memory. `pieces` names the modules or scopes that are the pieces instead, where autocast
    would cut elsewhere. Functions that the user put under `jax.checkpoint` stay as they are, and
    while loops. What has effects but no results, such as `jax.debug.print`, runs once, after its
    piece.

    Apply it to the model, `transformed.apply` or `module.apply`, and compute the loss from the
    float32 output. For a whole loss, `by=operations` in the policy of the gradient function, or of
    `apply_policy`, is better: it knows the parameters, and rounds no target. Within a function that
    runs under autocast of the same policies, this is a plain call. A function that creates Haiku
    parameters cannot be wrapped. If the function or its arguments hold objects of Flax's NNX, these
    get their new state back, as from `nnx.jit`; state that changes is computed in float32 and keeps
    its dtype.

    Args:
        fn: any callable of pytrees; None to decorate with arguments.
        policy: a policy map, or anything else that `get_policy_map` takes; only its compute dtypes
            and its algorithms of products count. Selectors are, as in the adapters, class names
            (`Linear`, `haiku.Linear`, also those of bases) and globs of paths (`*/head`) of the
            modules of Haiku, Linen, NNX and Equinox; names and globs of scopes, which are
            `jax.named_scope`, the paths of Haiku and Linen and the names of Equinox's own layers;
            and operations (`op.exp`). Modules of NNX and Equinox match if they are `fn` or among
            its arguments; those that `fn` closes over, or that `equinox.filter_jit` has wrapped,
            are known by their scopes alone. If a rule matches a module of an argument, the function
            sees an instance of a subclass instead.
        rules: dtypes of single operations, by primitive or name: `{lax.exp_p: jnp.bfloat16}`. They
            go after the rules of `policy`. A result never gets wider than it was traced.
        output: "traced" gives results in the dtypes that they have without autocast; None leaves
            them as they come; a dtype casts the floating ones.
        save: what the backward pass keeps: None leaves that to JAX; "products" keeps the results of
            weight products and convolutions.
        pieces: with `save`, a selector of modules or scopes as in `policy`, such as `Block` or
            `*/layers_*`, or a sequence of them: the outermost ones that match are one piece each,
            and nothing else is one. None finds them.

    Returns:
        A function with the signature of `fn`; a `jmpx.types.Autocast` that holds `fn` if it is
        itself a pytree, such as a module of Equinox or NNX.

    Raises:
        TypeError: if `fn` is not callable, a dtype is not one, or `pieces` no selectors.
        ValueError: if a string is not a policy map, a dtype not a floating one, `save` unknown or
            missing where `pieces` is given, or, when called, if `fn` creates Haiku parameters or
            changes an NNX module that it closes over, or a compute dtype has 8 bits.

    Warns:
        UserWarning: when called, for each rule that is not optional and matched nothing, whose
            `matmul` no product gets, or whose operation has no dtype of its own; once if products
            of functions that JAX cannot trace again stay in float32, or none at all runs in the 16
            bits that the policy gives; once if convolutions have a dot algorithm; for each selector
            in `pieces` that matched nothing; and once if `save` left something as it was: what is
            under `jax.checkpoint` already, what has effects amid products, or all if the function
            takes a gradient itself.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import jmpx
        >>> @jmpx.autocast(policy="compute=bf16; op.tanh: f32", output=None)
        ... def f(w, b, x):
        ...     h = x @ w + b
        ...     return h, jnp.tanh(h), jnp.exp(h)
        >>> w, b, x = jnp.ones((3, 2)), jnp.ones(2), jnp.ones((4, 3))
        >>> [y.dtype.name for y in f(w, b, x)]
        ['bfloat16', 'float32', 'float32']

        What the backward pass keeps of a model (see `jax.ad_checkpoint.print_saved_residuals`):

        >>> def loss_fn(w, x):
        ...     for _ in range(3):
        ...         x = x + jnp.tanh(x @ w) ** 2
        ...     return x.sum()
        >>> w, x = jnp.ones((4, 4)), jnp.ones((64, 4))
        >>> def kept_bytes(f):
        ...     pullback = jax.eval_shape(lambda w: jax.vjp(f, w, x)[1], w)
        ...     return sum(y.size * y.dtype.itemsize for y in jax.tree.leaves(pullback))
        >>> kept_bytes(jmpx.autocast(loss_fn, save="products")) < kept_bytes(jmpx.autocast(loss_fn))
        True
    """
    if fn is None:
        return _Unapplied(policy, rules, output, save, pieces)
    if not callable(fn) or is_dtype(fn):
        raise TypeError(f"Expected a function to run under autocast, got {fn!r}: {_WRITE}.")
    given = get_policy_map(policy)
    policy_map = _with_operations(given.applied_by("operations", "jmpx.autocast"), rules or {})
    if output is not None and output != "traced":
        output = as_dtype(output)
    return applied(fn, policy_map, output, get_saving(save or given.save, pieces))


_WRITE = "write jmpx.autocast(f, policy) or decorate the function with @jmpx.autocast(policy=...)"


class _Unapplied(NamedTuple):
    """The result of `autocast` without a function: a decorator.

    Args:
        policy: see `autocast`.
        rules: see `autocast`.
        output: see `autocast`.
        save: see `autocast`.
        pieces: see `autocast`.
    """

    policy: PolicyMapLike
    rules: Mapping[Any, DTypeLike] | None
    output: DTypeLike | None
    save: Literal["products"] | None
    pieces: str | Sequence[str] | None

    def __call__(self, fn: Callable[..., Any]) -> Any:
        given = self._asdict()
        return autocast(fn, given.pop("policy"), **given)

    def __enter__(self) -> NoReturn:
        raise TypeError(
            f"Expected a function to run under autocast, got a with block: {_WRITE}, as JAX traces "
            "functions and sees no blocks."
        )

    def __exit__(self, *exception: object) -> None:
        pass


def _with_operations(policy_map: PolicyMap, rules: Mapping[Any, DTypeLike]) -> PolicyMap:
    """Returns the policy map with policy rules for operations at its end."""
    more = [PolicyRule(f"op.{_name(key)}", compute=as_dtype(dtype)) for key, dtype in rules.items()]
    return PolicyMap(policy_map.default, (*policy_map.rules, *more))


def _name(key: Any) -> str:
    """Returns the name of an operation that was given as a primitive or by name."""
    name = getattr(key, "name", key)
    if not isinstance(name, str):
        raise TypeError(
            f"Expected a primitive or its name as a key of rules, got {key!r}: write for example "
            "lax.exp_p or 'exp'."
        )
    return operation_name(name.removeprefix("op."))
