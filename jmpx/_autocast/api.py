"""Autocast as users call it: the function `autocast`, and the class `Autocast` of its results."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, NoReturn, Protocol, TypeVar, overload

import jax
import numpy as np

from jmpx import _jaxpr
from jmpx._autocast.interpreter import Interpreter
from jmpx._autocast.saving import Saving, get_saving
from jmpx._autocast.unused import warn_of_algorithms, warn_unused
from jmpx._autocast.value import Value
from jmpx._contexts import note_cast
from jmpx._dtypes import DTypeLike, as_dtype, check_computes
from jmpx._jaxpr import operation_name
from jmpx._leaves import is_floating
from jmpx._made_once import made_once
from jmpx._matmul import region_setting
from jmpx._modules import Marks
from jmpx._nnx_objects import is_object, module_base
from jmpx._policy_map import PolicyMap, PolicyMapLike, Rule as PolicyRule, get_policy_map
from jmpx._registry import refuse_creation
from jmpx._scopes import RESTORE
from jmpx._stateful import Pure, call

_Function = TypeVar("_Function", bound=Callable[..., Any])


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["_jmpx_fn"],
    meta_fields=["_jmpx_policy_map", "_jmpx_output", "_jmpx_save"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Autocast:
    """A callable under autocast; `jmpx.autocast` makes it.

    It is a pytree whose one child is the callable, so that the parameters of a module are trained,
    saved and sharded as before. It has the attributes of the callable, such as a layer's `weight`.
    Public methods of the callable that are called through it run under autocast, too. The callable
    itself is its `__wrapped__`.

    If the callable is an object of Flax's NNX, it is an `nnx.Module`, so that it can be an
    attribute of other modules; attributes that are set on it are set on the object.

    Args:
        _jmpx_fn: the callable.
        _jmpx_policy_map: the policies of scopes and operations.
        _jmpx_output: "traced", None or a dtype; see `jmpx.autocast`.
        _jmpx_save: what the backward pass keeps; see `jmpx.autocast`.

    Example:
        >>> import equinox as eqx, jax
        >>> import jmpx
        >>> layer = jmpx.autocast(eqx.nn.Linear(3, 2, key=jax.random.key(0)))
        >>> isinstance(layer, jmpx.Autocast), layer.weight.shape, type(layer.__wrapped__).__name__
        (True, (2, 3), 'Linear')
    """

    _jmpx_fn: Callable[..., Any]
    _jmpx_policy_map: PolicyMap
    _jmpx_output: Any = "traced"
    _jmpx_save: Saving | None = None

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self._jmpx_fn

    def __getattr__(self, name: str) -> Any:
        # Python, copy and pickle ask for special methods, also before there are any fields.
        if "_jmpx_fn" not in vars(self) or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(self._jmpx_fn, name)
        is_method = callable(value) and getattr(value, "__self__", None) is self._jmpx_fn
        if is_method and not name.startswith("_"):
            return _applied(value, self._jmpx_policy_map, self._jmpx_output, self._jmpx_save)
        return value

    def __dir__(self) -> Iterable[str]:
        return {*super().__dir__(), *dir(self._jmpx_fn)}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the callable under autocast."""
        return self._jmpx_call(*args, **kwargs)

    def _jmpx_call(self, *args: Any, **kwargs: Any) -> Any:
        policy_map = self._jmpx_policy_map
        for dtype in (policy_map.default.compute_dtype, *(r.compute for r in policy_map.rules)):
            if dtype is not None:
                check_computes(dtype)
        note_cast("jmpx.autocast")
        interpreter = Interpreter(policy_map, region_setting(), self._jmpx_save)
        marks = Marks(policy_map)
        transform = functools.partial(_evaluate, interpreter, self._jmpx_output)
        result = call(transform, marks.call, (self._jmpx_fn, *args), kwargs)
        warn_unused(policy_map, interpreter.used, marks.seen, stacklevel=3)
        warn_of_algorithms(policy_map, interpreter.used, stacklevel=3)
        return result


def _evaluate(
    interpreter: Interpreter, output: Any, pure: Pure, state: Any, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    """Runs a pure function under autocast; its new state has the dtypes that were traced."""
    is_inside = interpreter.regions.surrounding is not None
    # A setting of jmpx around the call is for products that run in float32; the trace shows those
    # whose precision the user's own code sets.
    open_products = jax.default_matmul_precision(None) if is_inside else contextlib.nullcontext()
    with refuse_creation(), open_products:
        traced = _jaxpr.trace(pure, (state, *args), kwargs)
    # As a loop's carry, state that is replaced does not yield: a moving average would stall.
    values = [Value(array, yields=not pure.is_replaced(array)) for array in traced.arrays]
    values = interpreter.evaluate(traced.jaxpr, values, "")
    avals = traced.jaxpr.out_avals
    with jax.named_scope(RESTORE):
        outputs = [
            _restored(value, aval, output if i < len(avals) - pure.size else "traced")
            for i, (value, aval) in enumerate(zip(values, avals, strict=True))
        ]
    return traced.rebuild(outputs)


def _restored(value: Value, traced: Any, output: Any) -> Any:
    """Returns a result of the evaluation in the dtype that `output` says.

    Args:
        value: the result.
        traced: its abstract value without autocast.
        output: see `autocast`.
    """
    if output is None or not is_floating(value.array):
        return value.array
    if output != "traced":
        return value.to(np.dtype(output))
    array = value.to(traced.dtype)
    return _jaxpr.weakly_typed(array) if traced.weak_type else array


@made_once
def _module_class(base: Any) -> type:
    """Returns the class of an `Autocast` that is an `nnx.Module`.

    Args:
        base: `nnx.Module`, as this file does not import Flax.
    """
    names = [field.name for field in dataclasses.fields(Autocast)]

    class AutocastModule(Autocast, base):
        def __init__(self, *values: Any) -> None:
            for name, value in zip(names, values, strict=True):
                base.__setattr__(self, name, value)

        def __setattr__(self, name: str, value: Any) -> None:
            if name in names:
                base.__setattr__(self, name, value)
            else:
                setattr(self._jmpx_fn, name, value)

        def __delattr__(self, name: str) -> None:
            delattr(self._jmpx_fn, name)

        def __reduce__(self) -> Any:  # pickle does not find the class by its name
            return _wrap, tuple(getattr(self, name) for name in names)

    return AutocastModule


def _wrap(fn: Callable[..., Any], *fields: Any) -> Autocast:
    """Makes the `Autocast` of a callable, which may be a pytree or an object of NNX."""
    return (_module_class(module_base()) if is_object(fn) else Autocast)(fn, *fields)


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
      powers, sums and other statistics, special functions, linear algebra, and comparisons of two
      dtypes;
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
    that float16 cannot hold is lost in a sum, `h + 1e-8`, as it is in torch: add it to a mean or a
    total, which is float32. Integer powers (`h**2`, `h**3`) run in bfloat16, but in float32 instead
    of float16, because they and their derivatives overflow there; operations on their results are
    float32, too, up to a matrix product or a bounded function, such as the tanh of a gelu.

    A loop's carry keeps its float32, so that sums over many steps are right; `op.scan: bf16` and
    `op.while: bf16` carry activations in 16 bits. A product with `precision="highest"` runs in
    float32, and so does code that `jmpx.full_precision` marks. A cast from float32 to float32
    leaves no trace in JAX and is not seen. A function with `jax.custom_vjp` runs in float32.

    `matmul` (`*/router: c=f32,m=highest`) is the algorithm of products and convolutions that run in
    float32, forward and backward, also in functions with `jax.custom_vjp` and in code that
    `jmpx.full_precision` marks. A product in 16 bits gets none, and the `precision=` of a product
    goes before it. A rule for an operation may say it, too (`op.dot_general: c=f32,m=highest`). If
    the policy sets none, float32 products have the algorithm that jmpx has set around the call, as
    `full_precision(matmul=)` and the gradient functions do. Under a precision that the user's own
    `jax.default_matmul_precision` sets, products run in float32, as under a `precision=`. JAX
    ignores dot algorithms such as `BF16_BF16_F32_X3` for convolutions. Out of reach are functions
    that JAX calls afterwards: the rule of a `custom_vmap`, and the transpose of a `linear_call`.

    Apply it to the model, `transformed.apply` or `module.apply`, and compute the loss from the
    float32 output. A function that creates Haiku parameters cannot be wrapped. If the function or
    its arguments hold objects of Flax's NNX, these get their new state back, as from `nnx.jit`;
    state that changes is computed in float32 and keeps its dtype.

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

    Returns:
        A function with the signature of `fn`; a `jmpx.Autocast` that holds `fn` if it is itself a
        pytree, such as a module of Equinox or NNX.

    Raises:
        TypeError: if `fn` is not callable, or a dtype is not one.
        ValueError: if a string is not a policy map, a dtype not a floating one, or, when called,
            if `fn` creates Haiku parameters or changes an NNX module that it closes over, or a
            compute dtype has 8 bits.

    Warns:
        UserWarning: when called, for each rule that is not optional and matched nothing, or whose
            `matmul` no product gets; and once if convolutions have a dot algorithm.

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
        return _Unapplied(policy, rules, output, save, pieces)
    if not callable(fn):
        raise TypeError(f"Expected a function to run under autocast, got {fn!r}: {_WRITE}.")
    policy_map = _with_operations(get_policy_map(policy), rules or {})
    if output is not None and output != "traced":
        output = as_dtype(output)
    return _applied(fn, policy_map, output, get_saving(save, pieces))


def _applied(fn: Callable[..., Any], *fields: Any) -> Any:
    """Returns `autocast` of a callable, given the other fields of `Autocast`."""
    wrapped = _wrap(fn, *fields)
    if is_object(fn) or not jax.tree_util.all_leaves([fn]):
        return wrapped

    @functools.wraps(fn, updated=())
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return wrapped._jmpx_call(*args, **kwargs)

    return wrapper


_jaxpr.import_extend()  # now, because the first call is often inside of a trace

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
