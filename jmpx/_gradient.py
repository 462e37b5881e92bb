"""Gradients in mixed precision, with loss scaling, of a function of any pytree."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec, TypeVar, overload

import jax
from jax.typing import ArrayLike

from jmpx._batches import BatchArguments, check_microbatches
from jmpx._differentiation import Options, differentiate
from jmpx._dtypes import DTypeLike
from jmpx._gradient_arguments import GradDtype, ModelState, Uncast, check_arguments
from jmpx._gradient_policy import precision_finder
from jmpx._gradient_results import Gradients, GradientsAndAux, ValueAndGradients
from jmpx._groups import BatchSharding, check_batch_sharding
from jmpx._leaves import PyTree
from jmpx._loss_scale import LossScale
from jmpx._policy_map import PolicyMapLike
from jmpx._shards import check_mask
from jmpx._stateful import call
from jmpx._tree import AxisName

P = ParamSpec("P")
AuxT = TypeVar("AuxT")
ScalingT = TypeVar("ScalingT", bound=LossScale)


@overload
def filter_value_and_grad(
    func: Callable[P, ArrayLike],
    scaling: ScalingT,
    has_aux: Literal[False] = False,
    use_mixed_precision: bool = True,
    *,
    policy: PolicyMapLike | None = None,
    grad_dtype: DTypeLike | None = None,
    axis_name: AxisName | None = None,
    sharded: PyTree = None,
    batch_sharding: BatchSharding | None = None,
    microbatches: int = 1,
    batch_argnums: int | Sequence[int] | None = None,
    state_argnum: int | None = None,
    uncast_argnums: int | Sequence[int] = (),
    uncast_argnames: str | Sequence[str] = (),
) -> Callable[P, ValueAndGradients[jax.Array, ScalingT]]: ...


@overload
def filter_value_and_grad(
    func: Callable[P, tuple[ArrayLike, AuxT]],
    scaling: ScalingT,
    has_aux: Literal[True],
    use_mixed_precision: bool = True,
    *,
    policy: PolicyMapLike | None = None,
    grad_dtype: DTypeLike | None = None,
    axis_name: AxisName | None = None,
    sharded: PyTree = None,
    batch_sharding: BatchSharding | None = None,
    microbatches: int = 1,
    batch_argnums: int | Sequence[int] | None = None,
    state_argnum: int | None = None,
    uncast_argnums: int | Sequence[int] = (),
    uncast_argnames: str | Sequence[str] = (),
) -> Callable[P, ValueAndGradients[tuple[jax.Array, AuxT], ScalingT]]: ...


def filter_value_and_grad(
    func: Callable[..., Any],
    scaling: LossScale,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
    *,
    policy: PolicyMapLike | None = None,
    grad_dtype: DTypeLike | None = None,
    axis_name: AxisName | None = None,
    sharded: PyTree = None,
    batch_sharding: BatchSharding | None = None,
    microbatches: int = 1,
    batch_argnums: int | Sequence[int] | None = None,
    state_argnum: int | None = None,
    uncast_argnums: int | Sequence[int] = (),
    uncast_argnames: str | Sequence[str] = (),
) -> Callable[..., ValueAndGradients[Any, Any]]:
    """Makes a function that computes a loss and its gradients in mixed precision.

    Follows MPX's `filter_value_and_grad` (arXiv 2507.03312, section 3.4) in names, order and
    meaning, for any pytree and any of the three loss scales. The returned function

    1. casts the floating leaves of its arguments to the policy's compute dtype,
    2. runs `func` and scales the loss, which it takes to float32 first,
    3. differentiates with respect to the first argument, backwards in the compute dtype,
    4. takes the gradients to float32, divides them by the scale of step 2, and averages them over
       `axis_name`; if the policy sets reduce, it sums them in that dtype first, and divides then,
    5. checks once whether all of them are finite, and adjusts the loss scale by that.

    Objects of Flax's NNX among the arguments get their new state, as from `nnx.value_and_grad`.
    Their `nnx.Param`s are cast and, in the first argument, differentiated. Their other variables,
    such as running statistics, keep the dtype in which they are stored.

    With a static or a dynamic loss scale, model state comes back as it was where a gradient is not
    finite: the variables of NNX objects, but for random counters, which go on, and the argument of
    `state_argnum`. Other state in aux is the caller's to select, as all of it is with a
    `NoOpLossScale`, which adds nothing to the program:
    `jmpx.select_tree(grads_finite, new_state, old_state)`.

    Args:
        func: a function of pytrees that returns a loss, a floating scalar; with `has_aux` a pair of
            a loss and any pytree. The floating and complex arrays in its first argument are
            differentiated; other leaves may stand beside them.
        scaling: a `NoOpLossScale`, `StaticLossScale` or `DynamicLossScale`.
        has_aux: whether `func` returns `(loss, aux)`.
        use_mixed_precision: if False, nothing is cast, scaled or checked, no field of the policy
            counts, and the gradient is the plain one, averaged in its own dtype, and cast to
            `grad_dtype` at the end.
        policy: a policy, or anything else that `get_policy` takes, whose compute, matmul and reduce
            are used; None means `half`, whose dtype is looked up when the returned function is
            called. Or a policy map, or a string or mapping with rules, by which something inside of
            `func` casts: the adapters, Haiku's class policies or `jmpx.autocast`. Then nothing is
            cast here, where parameters would be rounded before their rule is known, and its reduce
            alone is used. A word of matmul holds forward and backward; a dot algorithm only
            where compute is float32, or `func` itself forces float32, because other products would
            take it, too.
        grad_dtype: the dtype of the gradients of floating parameters; None means that of each
            parameter. With float32, parameters that are stored in 16 or 8 bits get the gradients of
            float32 parameters of the same values: sums over micro-batches and devices, and the
            division by the loss scale, are in float32 and not rounded afterwards, so that the
            second moments of small gradients do not become 0. For this, narrower parameters are
            cast to float32 first (for float64 to float64). `func` gets them in the compute dtype as
            ever; in float32 where it casts them itself, by a policy map, or by
            `jmpx.distributed.gather` with `uncast_argnums=0`. The optimizer's state has to be
            float32, too: see `jmpx.optim.low_precision_params`. A narrower dtype saves memory of
            float32 gradients; step 5 sees what overflows in it.
        axis_name: the name (or names) of the mapped axis of `jax.pmap`, `jax.shard_map` or
            `jax.vmap` over which value and gradients are averaged: the value in float32, the
            gradients in the policy's reduce; unset, in float32 or the wider dtype of a parameter.
            In float16 they are divided by the number of devices before they are summed. They are
            scaled then, so that small ones do not underflow, and a sum that overflows is seen by
            step 5. The flag and the loss scale are the same on the whole axis. Each device may hold
            a copy of a parameter, or a shard of it that `func` gathers, by
            `jmpx.distributed.gather` or by `lax.all_gather`: the gradient of a shard is summed by
            the gather's backward pass, and divided here by the number of devices.
        sharded: which parameters are shards of `axis_name`: True for a shard that `func` gathers,
            False for a copy, "own" for a part that nobody gathers, such as an expert or a part of a
            tensor, whose activations travel; or a pytree of these that is a prefix of the first
            argument. True is refused where nothing gathers the parameter, and False where it is
            gathered as it is. Under `jax.shard_map` JAX knows which parameters differ between
            devices, so that it may be left out: those that `func` gathers are shards, and those
            that only their own device reads are copies, which may differ. Any other has to be told.
            With `check_vma=False`, and under `jax.pmap` and `jax.vmap`, JAX does not know: a
            gathered parameter has to be told, and all others are averaged unless this says
            otherwise.
        batch_sharding: for `jax.jit` without a mapped axis: the `jax.sharding.NamedSharding` of the
            batch, or its `PartitionSpec` under `jax.set_mesh`, whose first entry names the mesh
            axes that split the first axis of the batch. XLA sums gradients in the compute dtype by
            itself; by this they are summed in the policy's reduce; unset, in float32. The share of
            each device becomes a group, for which `func` runs by `jax.vmap`, so that the loss has
            to be a mean over examples that count alike: one that compares them, sums them or
            divides by their weights is another loss in groups, which cannot be seen. Then aux gets
            a leading axis of groups, and the model state is the mean over groups.
        microbatches: how many parts of one size a batch is split into, one after the other, so that
            the memory of activations is that of one part. The values and gradients of the parts are
            averaged, so that the loss has to be a mean over examples: a sum comes out divided by
            the number of parts. The gradients are summed in float32, and there is one loss scale,
            one check, and one mean over devices; what `func` gathers, it gathers in each part. Give
            `batch_sharding`, too, if `jax.jit` splits the batch over devices. Then aux gets a
            leading axis of micro-batches, after that of groups, and the model state goes from one
            part to the next.
        batch_argnums: the positions of the arguments of which `microbatches` and `batch_sharding`
            split the first axis of each array; by default all but the first and that of
            `state_argnum`. Others go whole, into each part, as keyword arguments do, and by default
            PRNG keys of shape (), from which each part draws the same. Without this argument, an
            array in a keyword argument is refused, unless its shape is ().
        state_argnum: the position of model state that `func` returns anew, as its aux or as the
            first element of an aux that is a tuple, such as running statistics of Haiku, Linen or
            Equinox. It is not cast, and not split, and a step that overflowed hands it back as it
            was; between micro-batches, the values of its arrays may change and nothing else.
            Objects of NNX need no such word.
        uncast_argnums: the positions of arguments that are not cast, such as targets that float16
            cannot hold, or positions in a sequence. Negative ones count from the end. If the first
            argument is not cast, `func` casts the parameters itself.
        uncast_argnames: the names of arguments that are not cast.

    Returns:
        A function with the arguments of `func` that returns a `ValueAndGradients`, which unpacks as
        `(value, scaling, grads_finite, grads)` or, with `has_aux`, as
        `((value, aux), scaling, grads_finite, grads)`: the unscaled loss in float32 of shape ();
        `aux` as `func` made it; the loss scale of the next step; a bool array of shape (); and
        gradients of the structure and shapes of the first argument, in its dtypes or `grad_dtype`,
        with None for what cannot be differentiated. For an NNX module, they are an `nnx.State` of
        its parameters.

    Raises:
        TypeError: if `func` is not callable, `scaling` no loss scale, `policy` no policy, or
            another argument of another type; when called, if there is no argument to differentiate,
            if `func` does not return a floating scalar, if `sharded` contradicts the program, if
            it cannot be told what a parameter is without `sharded`, or if the arguments hold no
            batch to split.
        ValueError: if `policy` is not a string of policies or maps, if `grad_dtype` is no floating
            dtype of 16 bits or more, or if two arguments contradict each other; when called, if one
            of `uncast_argnums`, `uncast_argnames`, `batch_argnums` and `state_argnum` gives an
            argument that the call does not have, if there is no axis `axis_name` or none of
            `batch_sharding` that XLA may split, if the number of parts does not divide the batch,
            if model state has no mean over groups, if `func` changes an NNX module that it closes
            over, or if compute, reduce or `grad_dtype` is float64 while JAX's 64-bit types are
            disabled.

    Warns:
        UserWarning: if `policy` sets reduce and there is neither `axis_name` nor `batch_sharding`;
            when called, if parameters that were cast to 16 bits are cast again in `func`, if
            `policy` is a map and nothing in `func` casts, if it computes in float16 and `scaling`
            is a `NoOpLossScale` (a `StaticLossScale(1)` says that this is meant), if `scaling` is
            dynamic, `policy` float32 and nothing in `func` runs in 16 bits, or if `func` has a
            convolution under a dot algorithm, which JAX ignores there.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import jmpx
        >>> def loss_fn(params, x):
        ...     return jnp.mean((x @ params["w"]) ** 2)
        >>> params, x = {"w": jnp.ones(3)}, jnp.ones((2, 3))
        >>> scaling = jmpx.DynamicLossScale(2**12)
        >>> grad_fn = jmpx.filter_value_and_grad(loss_fn, scaling, policy="c=f16")
        >>> value, scaling, grads_finite, grads = grad_fn(params, x)
        >>> value, grads_finite, grads["w"]
        (Array(9., dtype=float32), Array(True, dtype=bool), Array([6., 6., 6.], dtype=float32))
        >>> params, noop = jmpx.cast_tree(params, jnp.bfloat16), jmpx.NoOpLossScale()
        >>> for dtype in None, "float32":
        ...     grad_fn = jmpx.filter_value_and_grad(loss_fn, noop, policy="bf16", grad_dtype=dtype)
        ...     grad_fn(params, x).grads["w"].dtype.name
        'bfloat16'
        'float32'
    """
    check_arguments(func, scaling)
    check_mask(sharded, axis_name)
    check_batch_sharding(batch_sharding, axis_name)
    check_microbatches(microbatches)
    averages = axis_name is not None or batch_sharding is not None
    options = Options(
        func=func,
        scaling=scaling,
        has_aux=has_aux,
        use_mixed_precision=use_mixed_precision,
        find_precision=precision_finder(policy, use_mixed_precision, averages),
        grad_dtype=GradDtype.of(grad_dtype),
        uncast=Uncast.of(func, uncast_argnums, uncast_argnames).including(state_argnum),
        axis_name=axis_name,
        sharded=sharded,
        batch_sharding=batch_sharding,
        microbatches=microbatches,
        batch=BatchArguments.of(batch_argnums, state_argnum),
        model_state=ModelState.of(state_argnum, has_aux),
    )
    run = functools.partial(differentiate, options)

    @functools.wraps(func, updated=())  # A module's __dict__ would be its parameters.
    def wrapper(*args: Any, **kwargs: Any) -> ValueAndGradients[Any, Any]:
        return call(run, func, args, kwargs)

    return wrapper


@overload
def filter_grad(
    func: Callable[P, ArrayLike],
    scaling: ScalingT,
    has_aux: Literal[False] = False,
    use_mixed_precision: bool = True,
    *,
    policy: PolicyMapLike | None = None,
    grad_dtype: DTypeLike | None = None,
    axis_name: AxisName | None = None,
    sharded: PyTree = None,
    batch_sharding: BatchSharding | None = None,
    microbatches: int = 1,
    batch_argnums: int | Sequence[int] | None = None,
    state_argnum: int | None = None,
    uncast_argnums: int | Sequence[int] = (),
    uncast_argnames: str | Sequence[str] = (),
) -> Callable[P, Gradients[ScalingT]]: ...


@overload
def filter_grad(
    func: Callable[P, tuple[ArrayLike, AuxT]],
    scaling: ScalingT,
    has_aux: Literal[True],
    use_mixed_precision: bool = True,
    *,
    policy: PolicyMapLike | None = None,
    grad_dtype: DTypeLike | None = None,
    axis_name: AxisName | None = None,
    sharded: PyTree = None,
    batch_sharding: BatchSharding | None = None,
    microbatches: int = 1,
    batch_argnums: int | Sequence[int] | None = None,
    state_argnum: int | None = None,
    uncast_argnums: int | Sequence[int] = (),
    uncast_argnames: str | Sequence[str] = (),
) -> Callable[P, GradientsAndAux[ScalingT, AuxT]]: ...


def filter_grad(
    func: Callable[..., Any],
    scaling: LossScale,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
    *,
    policy: PolicyMapLike | None = None,
    grad_dtype: DTypeLike | None = None,
    axis_name: AxisName | None = None,
    sharded: PyTree = None,
    batch_sharding: BatchSharding | None = None,
    microbatches: int = 1,
    batch_argnums: int | Sequence[int] | None = None,
    state_argnum: int | None = None,
    uncast_argnums: int | Sequence[int] = (),
    uncast_argnames: str | Sequence[str] = (),
) -> Callable[..., Gradients[Any] | GradientsAndAux[Any, Any]]:
    """Makes a function that computes gradients in mixed precision.

    Follows MPX's `filter_grad` (arXiv 2507.03312, section 3.4). It does what
    `filter_value_and_grad` does, whose documentation says more, without the value.

    Args:
        func: a function of pytrees that returns a loss, a floating scalar; with `has_aux` a pair of
            a loss and any pytree.
        scaling: a `NoOpLossScale`, `StaticLossScale` or `DynamicLossScale`.
        has_aux: whether `func` returns `(loss, aux)`.
        use_mixed_precision: if False, nothing is cast, scaled or checked, and the gradient is the
            plain one.
        policy: a policy, or anything else that `get_policy` takes; or a policy map, by which `func`
            itself casts. None means `half`.
        grad_dtype: the dtype of the gradients, such as float32 for parameters of 16 bits; None
            means that of each parameter.
        axis_name: the name (or names) of the mapped axis over which gradients are averaged.
        sharded: which parameters are shards of `axis_name`.
        batch_sharding: how `jax.jit` splits the batch over devices.
        microbatches: how many parts a batch is split into, one after the other.
        batch_argnums: the positions of the arguments that hold examples.
        state_argnum: the position of model state that comes back in aux.
        uncast_argnums: the positions of arguments that are not cast.
        uncast_argnames: the names of arguments that are not cast.

    Returns:
        A function with the arguments of `func` that returns a `Gradients`, which unpacks as
        `(scaling, grads_finite, grads)`, or, with `has_aux`, a `GradientsAndAux`, which unpacks as
        `(scaling, grads_finite, grads, aux)`.

    Raises:
        TypeError: as `filter_value_and_grad`.
        ValueError: as `filter_value_and_grad`.

    Warns:
        UserWarning: as `filter_value_and_grad`.

    Example:
        >>> import jax.numpy as jnp
        >>> import jmpx
        >>> loss_fn = lambda w: (2.0**-14 * (2.0**-14 * w)).sum()  # float16 ends at 2**-24
        >>> for scaling in jmpx.StaticLossScale(1), jmpx.StaticLossScale(2**14):
        ...     _, _, grad = jmpx.filter_grad(loss_fn, scaling, policy="c=f16")(jnp.ones(2))
        ...     float(grad[0]) == 2.0**-28
        False
        True
    """
    value_and_grad = filter_value_and_grad(
        func,
        scaling,
        has_aux,
        use_mixed_precision,
        policy=policy,
        grad_dtype=grad_dtype,
        axis_name=axis_name,
        sharded=sharded,
        batch_sharding=batch_sharding,
        microbatches=microbatches,
        batch_argnums=batch_argnums,
        state_argnum=state_argnum,
        uncast_argnums=uncast_argnums,
        uncast_argnames=uncast_argnames,
    )

    @functools.wraps(func, updated=())
    def wrapper(*args: Any, **kwargs: Any) -> Gradients[Any] | GradientsAndAux[Any, Any]:
        value, new_scaling, grads_finite, grads = value_and_grad(*args, **kwargs)
        if has_aux:
            return GradientsAndAux(new_scaling, grads_finite, grads, aux=value[1])
        return Gradients(new_scaling, grads_finite, grads)

    return wrapper
