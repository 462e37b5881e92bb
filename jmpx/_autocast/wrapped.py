"""`autocast` and `Autocast`: a callable that traces the user's, and evaluates the jaxpr."""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar, Unpack, overload

import jax
import jax.core
import numpy as np

from jmpx._autocast.interpreter import Interpreter
from jmpx._autocast.neighbours import Ends, has_norms
from jmpx._autocast.value import Array, Value
from jmpx._autocast.warned import (
    overriding_classes,
    traced_name,
    tracing_explained,
    unused_rules,
    wide_products,
)
from jmpx._base.contexts import AUTOCAST, fact, fact_set, note_cast
from jmpx._base.dtypes import DTypeLike, as_dtype, check_computes, is_dtype, region_setting
from jmpx._base.made_once import made_once
from jmpx._base.messages import check_runs_at_once, describe, user_stacklevel
from jmpx._base.stateful import (
    Arguments,
    Changes,
    Function,
    Keywords,
    Leaf,
    PureFunction,
    apply,
    call,
    is_object,
    nnx,
)
from jmpx._base.trees import PyTree, is_floating, is_traceable
from jmpx._jaxprs import core
from jmpx._jaxprs.gathers import summed_in_float32
from jmpx._jaxprs.marks import RESTORE, Module
from jmpx._policies.map_strings import get_policy_map
from jmpx._policies.maps import PolicyMap, PolicyMapLike, with_trial_rules
from jmpx._policies.registry import any_class_has_a_policy, marking_calls
from jmpx._remat.remat import Left, keeping_less, messages_of, run_saved
from jmpx._remat.saving import Saving, get_saving

_Function = TypeVar("_Function", bound=Callable[..., Any])
Output: TypeAlias = DTypeLike | None  # also "traced"; see `jmpx.autocast`


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["_jmpx_fn"],
    meta_fields=["_jmpx_policy_map", "_jmpx_output", "_jmpx_save"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Autocast:
    """A callable under autocast; `jmpx.autocast` makes it.

    It is a pytree whose one child is the callable, its `__wrapped__`, so that the parameters of a
    module are trained, saved and sharded as before. It has the attributes of the callable, whose
    public methods run under autocast, too. Of an object of Flax's NNX it is an `nnx.Module`;
    attributes that are set on it are set on the object.

    Example:
        >>> import equinox as eqx, jax, jmpx
        >>> layer = jmpx.autocast(eqx.nn.Linear(3, 2, key=jax.random.key(0)))
        >>> isinstance(layer, jmpx.types.Autocast), layer.weight.shape
        (True, (2, 3))
        >>> type(layer.__wrapped__).__name__
        'Linear'
    """

    __module__ = "jmpx.types"

    # The arguments of `jmpx.autocast`:
    _jmpx_fn: Function
    _jmpx_policy_map: PolicyMap
    _jmpx_output: Output = "traced"
    _jmpx_save: Saving | None = None

    @property
    def __wrapped__(self) -> Function:
        return self._jmpx_fn

    def __getattr__(self, name: str) -> Any:
        # Python, copy and pickle ask for special methods, also before there are any fields.
        if "_jmpx_fn" not in vars(self) or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(self._jmpx_fn, name)
        is_method = callable(value) and getattr(value, "__self__", None) is self._jmpx_fn
        if is_method and not name.startswith("_"):
            return applied(value, self._jmpx_policy_map, self._jmpx_output, self._jmpx_save)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the callable under autocast."""
        transform = functools.partial(
            evaluated, self._jmpx_policy_map, self._jmpx_save, self._jmpx_output
        )
        return call(transform, apply, (self._jmpx_fn, *args), kwargs)


def evaluated(
    policy_map: PolicyMap,
    save: Saving | None,
    output: Output,
    pure: PureFunction,
    state: list[Leaf],
    args: Arguments,
    kwargs: Keywords,
    *,
    is_loss: bool = False,
    by: str = "jmpx.autocast",
) -> tuple[PyTree, Changes]:
    """Runs a pure function under autocast, and warns of rules and options without effect.

    In a loss, the state and the first argument hold the parameters, which are weak everywhere.
    Other arguments, and arrays that the function closes over, keep their dtype where they reach no
    product, as targets do. In other functions, all inputs are weak everywhere.
    """
    key = policy_map.default, policy_map.rules, save
    if output == "traced" and fact(AUTOCAST) == key:
        return pure(state, *args, **kwargs)
    policy_map = _followed(policy_map)
    user = args[0] if pure.fn is apply else pure.fn
    if is_loss and _casts_nothing(policy_map):  # a trace would refuse some, such as `if x > 0`
        if save is None:
            return pure(state, *args, **kwargs)
        return run_saved(pure, save._replace(is_cast_later=False), user, (state, *args), kwargs)
    note_cast(by)
    interpreter = Interpreter(policy_map, region_setting())
    seen = set[Module]()
    pure.invoke = marking_calls(policy_map, seen)
    # Unset, so that the trace shows the precisions of the user's own code: a setting of jmpx around
    # the call is for float32 products only.
    is_set = interpreter.regions.surrounding is not None
    products = jax.default_matmul_precision(None) if is_set else contextlib.nullcontext()
    name = traced_name(user)
    with fact_set(AUTOCAST, key), products, tracing_explained(by, name), summed_in_float32():
        traced = core.trace(pure, (state, *args), kwargs, name=name)
    _, changes = traced.rebuild(traced.jaxpr.out_avals)
    # State that is replaced is not weak, as a loop's carry: a moving average would stall.
    replaced = changes.replaced()
    values = [Value(array, is_weak=id(array) not in replaced) for array in traced.arrays]
    if is_loss:
        # By position: a target may be the same array as a parameter.
        leaves = [*filter(is_traceable, jax.tree.leaves((state, *args[:1])))]
        for i, value in enumerate(values):
            is_parameter = i < len(leaves) and is_floating(leaves[i])
            value.data = value.is_weak and not is_parameter
    is_exposed = (True,) * len(traced.jaxpr.out_avals)  # a loss outside may take the logarithm
    follows_paths = is_loss or has_norms(traced.jaxpr)
    ends = Ends(is_exposed, multiplied=() if follows_paths else None, has_data=is_loss)
    jaxpr, left, arrays = traced.jaxpr, Left(), (*traced.arrays, *traced.jaxpr.consts)
    if save is not None and any(isinstance(array, jax.core.Tracer) for array in arrays):
        jaxpr, left = keeping_less(jaxpr, save)  # nothing differentiates an eager call
    # Off in the evaluation, whose 16-bit gathers have their own derivative, `binding.run_moved`.
    with tracing_explained(by, name), summed_in_float32(False):
        results = interpreter.evaluate(jaxpr, values, "", ends)
    used, given = (policy_map, interpreter.used), None if pure.objects else args
    messages = *unused_rules(*used, seen, given), *wide_products(*used, jaxpr), *messages_of(left)
    for message in (*messages, *overriding_classes(*used, by)):
        warnings.warn(message, stacklevel=user_stacklevel("jax", "flax", "haiku", "equinox"))
    num_changes = len(changes.arrays)
    outputs = [output] * (len(results) - num_changes) + ["traced"] * num_changes
    triples = zip(results, traced.jaxpr.out_avals, outputs, strict=True)
    with jax.named_scope(RESTORE):
        return traced.rebuild([_restored(*triple) for triple in triples])


def _followed(policy_map: PolicyMap) -> PolicyMap:
    """Returns a policy map with the rules that a context adds."""
    policy_map = with_trial_rules(policy_map, "jmpx.autocast")
    check_computes(policy_map.default.compute_dtype)
    for rule in policy_map.rules:
        if rule.compute is None:
            continue
        if np.dtype(rule.compute).itemsize > 4 and not rule.is_operation:
            raise ValueError(
                f"Cannot follow rule {str(rule)!r} by operations, which widen none: write "
                "by=modules, or cast the operands in the function."
            )
        check_computes(rule.compute)
    return policy_map


def _casts_nothing(policy_map: PolicyMap) -> bool:
    """Whether a policy map leaves all operations, and the algorithm of products, as they are."""
    policy = policy_map.default
    is_wide = np.dtype(policy.compute_dtype).itemsize >= 4 and policy.matmul_precision is None
    has_rules = bool(policy_map.rules) or any_class_has_a_policy()
    return is_wide and not has_rules and region_setting() is None


def _restored(value: Value, traced: jax.core.ShapedArray, output: Output) -> Array:
    """Returns a result in the dtype that `output` says; `traced` is its type without autocast."""
    if output is None or not is_floating(value.array):
        return value.array
    if output != "traced":
        return value.to(np.dtype(output))
    array = value.to(traced.dtype)
    return core.weakly_typed(array) if traced.weak_type else array


@made_once
def _module_class(base: Any) -> type:
    """Returns the class of an `Autocast` that is an `nnx.Module`, which `base` is."""
    names = [field.name for field in dataclasses.fields(Autocast)]

    class AutocastModule(Autocast, base):
        def __init__(self, *values: object) -> None:
            for name, value in zip(names, values, strict=True):
                base.__setattr__(self, name, value)

        def __setattr__(self, name: str, value: object) -> None:
            if name in names:
                base.__setattr__(self, name, value)
            else:
                setattr(self._jmpx_fn, name, value)

        def __delattr__(self, name: str) -> None:
            delattr(self._jmpx_fn, name)

        def __reduce__(self) -> tuple[object, ...]:  # pickle does not find the class by its name
            return _wrap, tuple(getattr(self, name) for name in names)

    return AutocastModule


def _wrap(fn: Function, *fields: Any) -> Autocast:
    """Makes the `Autocast` of a callable, which may be a pytree or an object of NNX."""
    return (_module_class(nnx().Module) if is_object(fn) else Autocast)(fn, *fields)


def applied(fn: Function, *fields: Any) -> Function:
    """Returns a callable under autocast: an `Autocast` of a pytree, else a function."""
    wrapped = _wrap(fn, *fields)
    if is_object(fn) or not jax.tree_util.all_leaves([fn]):
        return wrapped

    @functools.wraps(fn, updated=())
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return wrapped(*args, **kwargs)

    return wrapper


class _Options(TypedDict, total=False):
    """The options of `autocast`."""

    output: DTypeLike | None
    save: Literal["products", "products+mixed", "products+attention"] | None


@overload
def autocast(
    fn: _Function, policy: PolicyMapLike = ..., **options: Unpack[_Options]
) -> _Function: ...


@overload
def autocast(
    fn: None = None, policy: PolicyMapLike = ..., **options: Unpack[_Options]
) -> Callable[[_Function], _Function]: ...


def autocast(
    fn: Callable[..., Any] | None = None,
    policy: PolicyMapLike = "compute=bf16",
    *,
    output: DTypeLike | None = "traced",
    save: Literal["products", "products+mixed", "products+attention"] | None = None,
) -> Callable[..., Any]:
    """Makes a function run in mixed precision, operation by operation, as `torch.autocast` does.

    Matmuls and convolutions that were traced in float32 run in the compute dtype, operations that
    need range or digits in float32, and all others in the widest dtype of their operands, where
    inputs, parameters and constants do not count beside the results of matmuls. It all happens
    while JAX traces: put `jax.jit` around the train step. See docs/autocast.md.

    Apply it to the model, `transformed.apply` or `module.apply`, and compute the loss from the
    float32 output. For a whole loss, use `apply_policy` or a gradient function. Inside autocast of
    the same policy, it is a plain call.

    Args:
        fn: any callable of pytrees, modules of Equinox and NNX included; None to decorate with
            arguments.
        policy: anything that `get_policy_map` takes. Only its compute dtypes and its `matmul`
            algorithms count. Selectors are classes and paths of modules, scopes of
            `jax.named_scope`, and operations (`op.exp`).
        output: "traced" gives results the dtypes that they have without autocast, None leaves them
            as they are, and a dtype casts the floating ones.
        save: "products", "products+mixed" or "products+attention": what to keep for the backward
            pass, see `jmpx.remat`. None leaves that to the policy, and without `save` there to JAX.

    Returns:
        A function with the signature of `fn`; a `jmpx.types.Autocast` that holds `fn` if it is
        itself a pytree, such as a module.

    Raises:
        TypeError: if an argument is of a wrong type.
        ValueError: if an argument has no such value, or, when called, if `fn` changes an NNX module
            that it closes over, a compute dtype has 8 bits, or a rule multiplies in 8 bits, for
            which the default device has no units.

    Warns:
        UserWarning: when called, if rules, algorithms or `save` have no effect, if matmuls stay in
            float32 although the policy gives them 16 bits, or if a policy of a Haiku class
            overrides this one.

    Example:
        >>> import jax, jax.numpy as jnp, jmpx
        >>> @jmpx.autocast(policy="compute=bf16; op.tanh: f32", output=None)
        ... def f(w, b, x):
        ...     h = x @ w + b
        ...     return h, jnp.tanh(h), jnp.exp(h)
        >>> [y.dtype.name for y in f(jnp.ones((3, 2)), jnp.ones(2), jnp.ones((4, 3)))]
        ['bfloat16', 'float32', 'float32']
    """
    if fn is None:
        return functools.partial(autocast, policy=policy, output=output, save=save)
    if not callable(fn) or is_dtype(fn):
        raise TypeError(
            f"Expected a function to run under autocast, got {describe(fn)}: write "
            "jmpx.autocast(f, policy) or decorate the function with @jmpx.autocast(policy=...)."
        )
    check_runs_at_once(fn)
    policy_map = get_policy_map(policy)
    saving = get_saving(policy_map.save if save is None else save, is_cast_later=True)
    if output is not None and output != "traced":
        output = as_dtype(output)
    return applied(fn, policy_map.applied_by("operations", "jmpx.autocast"), output, saving)
