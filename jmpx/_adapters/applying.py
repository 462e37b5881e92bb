"""`apply_policy`: runs a function under a policy, in the way of the policy map."""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from numbers import Integral
from typing import NamedTuple, TypeAlias, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from jmpx._adapters.function_casts import refuse_set
from jmpx._base.contexts import MARKED, Context, casts_watched, entered, fact, parameters_rounded
from jmpx._base.dtypes import DTypeLike, dtype_name
from jmpx._base.messages import casts_noted, check_runs_at_once, describe, user_stacklevel, warn
from jmpx._base.stateful import (
    Arguments as Args,
    Changes,
    Function,
    Keywords as Kwargs,
    Leaf,
    PureFunction,
    call,
    skip_kept,
)
from jmpx._base.trees import PyTree, is_array, is_floating, spell
from jmpx._jaxprs.gathers import summed_in_float32
from jmpx._policies.frameworks import Creation, call_with_proxies, imported_adapters, out_of_sight
from jmpx._policies.map_strings import output_without_effect
from jmpx._policies.maps import PolicyMap
from jmpx._policies.policy import Policy
from jmpx._policies.registry import call_marked, computing, markers
from jmpx._policies.unused import warn_of
from jmpx._remat.remat import run_saved
from jmpx._remat.saving import get_saving
from jmpx._scales.strings import MixedPrecisionLike, policy_map_of

F = TypeVar("F", bound=Callable[..., PyTree])
State: TypeAlias = list[Leaf]  # of the objects of NNX among the arguments
Result: TypeAlias = tuple[PyTree, Changes]

_NAME = "jmpx.apply_policy"


# `uncast=`: the arguments that a function gets as they are, by position or name.


Given: TypeAlias = tuple[Args, Kwargs]
UncastLike: TypeAlias = int | str | Sequence[int | str]  # positions and names, one or several


class UncastArguments(NamedTuple):
    """The arguments that a function gets as they are, while its others are cast."""

    given: tuple[int | str, ...]  # by the user, positions and names
    positional: tuple[str, ...] = ()  # the arguments that the function takes by position, in order
    named: tuple[str, ...] = ()  # all arguments of the function
    has_state: bool = False  # whether the last one given is `state_argnum`

    @classmethod
    def of(
        cls, func: Callable[..., PyTree], uncast: UncastLike, state_argnum: int | None = None
    ) -> "UncastArguments":
        """Checks the positions and the names, and reads the signature of the function."""
        given: tuple[PyTree, ...] = (uncast,)
        if isinstance(uncast, Iterable) and not isinstance(uncast, str | bytes):
            given = tuple(uncast)
        if any(isinstance(each, bool) or not isinstance(each, Integral | str) for each in given):
            raise TypeError(
                "Expected uncast to be the position or the name of an argument, or several of "
                f"both, got {describe(uncast)}: write uncast=2, uncast='targets' or "
                "uncast=(0, 'targets')."
            )
        given = given if state_argnum is None else (*given, state_argnum)
        try:
            parameters = inspect.signature(func).parameters.values() if given else ()
        except (TypeError, ValueError):  # of a function that is not written in Python
            parameters = ()
        named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        positional = tuple(p.name for p in named if p.kind != p.KEYWORD_ONLY)
        names = tuple(p.name for p in named)
        return cls(given, positional, names, has_state=state_argnum is not None)

    def leaves(self, args: Args, kwargs: Kwargs) -> list[PyTree]:
        """Returns the floating leaves of these arguments in a call, but for model state."""
        own = self._replace(given=self.given[:-1]) if self.has_state else self
        found = {**dict(enumerate(args)), **kwargs}
        trees = [found[place] for place in own._places(len(args), kwargs) if place in found]
        return [leaf for leaf in jax.tree.leaves(trees) if is_floating(leaf)]

    def check(self, args: Args, kwargs: Kwargs) -> None:
        """Refuses a call that has not all of these arguments."""
        self._places(len(args), kwargs)

    def exempt(self, change: Callable[[Given], Given], args: Args, kwargs: Kwargs) -> Given:
        """Changes the arguments of a call except these."""
        places = self._places(len(args), kwargs)
        others = tuple(None if i in places else arg for i, arg in enumerate(args))
        new_args, new_kwargs = change(
            (others, {name: value for name, value in kwargs.items() if name not in places})
        )
        new_args = tuple(args[i] if i in places else arg for i, arg in enumerate(new_args))
        return new_args, {**kwargs, **new_kwargs}

    def _places(self, count: int, kwargs: Iterable[str]) -> set[int | str]:
        """Returns where these arguments are in a call: positions, and names of all others."""
        names = {*self.named, *kwargs}
        places: dict[int | str, int | str] = {name: name for name in names}
        places.update(enumerate(self.positional))
        before = enumerate(self.positional[:count])
        places |= {name: i for i, name in before if name not in kwargs}
        places |= {i: i % count for i in range(-count, count)}
        unknown = [each for each in self.given if each not in places]
        if unknown:
            raise ValueError(
                f"Cannot leave argument {unknown[0]!r} uncast, as uncast says, in a call with "
                f"{count} positional arguments: count from 0, or give one of {sorted(names)}."
            )
        return {places[each] for each in self.given}


# `apply_policy`, and how each way of a policy map runs a function.


@overload
def apply_policy(
    func: F, policy: MixedPrecisionLike | None = None, *, uncast: UncastLike = ()
) -> F: ...


@overload
def apply_policy(
    func: None = None, policy: MixedPrecisionLike | None = None, *, uncast: UncastLike = ()
) -> Callable[[F], F]: ...


def apply_policy(
    func: Function | None = None,
    policy: MixedPrecisionLike | None = None,
    *,
    uncast: UncastLike = (),
) -> PyTree:
    """Makes a function run in mixed precision under a policy.

    It casts operations, as `jmpx.autocast` does: its first argument has to hold the parameters,
    which stay as they are stored, and results have the dtypes that they have without a policy. The
    key `by` in the default part of the policy names the two other ways; docs/which_way.md compares
    the three:

    - `by=modules` casts at the calls of modules: like `policies` for Haiku and Linen, and like
      `with_policies` for Equinox and NNX modules among the arguments.
    - `by=arguments` casts the floating arguments to the compute dtype before the call.

    By arguments, and by operations where the policy has `o=`, floating results that are narrower
    than the output dtype are widened to it. With `save=products`, in each way, the backward pass
    keeps the results of products alone, see `jmpx.remat`: the function is traced for that.

    A policy has no loss scale: for gradients in float16, take `value_and_grad`.

    Args:
        func: any function of pytrees, such as a module or `transformed.apply`; None to decorate
            with arguments.
        policy: anything that `get_policy_map` takes, or a `MixedPrecision`.
        uncast: the positions and names of arguments that are left as they are. By operations,
            matmuls cast them anyway. With `by=modules`, the outermost module gets them so, and
            modules inside of it cast as ever.

    Returns:
        A function with the arguments and results of `func`.

    Raises:
        TypeError: if an argument is of another type, or there is no policy.
        ValueError: if a string does not follow the grammar, a call lacks an `uncast` argument, or
            `func` sets a parameter of NNX that is cast.

    Warns:
        UserWarning: if a rule, the output or the reduce dtype has no effect; when called, if there
            is nothing to cast, if something inside casts arguments again, if matmuls stay in
            float32, if a policy of a Haiku class overrides this one, if arrays of a model come back
            rounded, or if `save` leaves a part as it is.

    Example:
        >>> import jax, jax.numpy as jnp, jmpx
        >>> def f(w, x):
        ...     return jax.nn.softmax(x @ w)
        >>> w, x = jnp.ones((3, 2)), jnp.ones((4, 3))
        >>> for policy in "c=bf16", "by=arguments,c=bf16", "by=arguments,c=bf16,o=f32":
        ...     print(jmpx.apply_policy(f, policy)(w, x).dtype)
        float32
        bfloat16
        float32
    """
    if func is None:
        return functools.partial(apply_policy, policy=policy, uncast=uncast)
    if not callable(func):
        raise TypeError(
            f"Expected a function to run under a policy, got {describe(func)}: write "
            f"jmpx.apply_policy(f, policy), or decorate it with @jmpx.apply_policy(policy=...)."
        )
    check_runs_at_once(func)
    application = Application.of(policy, func, UncastArguments.of(func, uncast), _NAME)
    if application.reduce_dtype is not None:
        warn(
            f"reduce={dtype_name(application.reduce_dtype)} of policy map "
            f"{str(application.policy_map)!r} has no effect: {_NAME} runs a function, and does not "
            "see the program of its gradient: use jmpx.value_and_grad or jmpx.grad with this "
            "policy, or leave reduce out."
        )

    def transform(pure: PureFunction, state: State, args: Args, kwargs: Kwargs) -> Result:
        with application.products(), application.creation():
            return application.run(pure, state, args, kwargs)

    @functools.wraps(func, updated=())
    def wrapper(*args: PyTree, **kwargs: PyTree) -> PyTree:
        return call(transform, func, args, kwargs)

    return wrapper


class Application(NamedTuple):
    """How a function runs under a policy map."""

    policy_map: PolicyMap
    func: Function
    uncast: UncastArguments
    name: str  # the function that applies the map, as the user calls it
    stored: PyTree = None  # the first argument, if the one given to `run` was widened before

    @classmethod
    def of(
        cls, policy: MixedPrecisionLike | None, func: Function, uncast: UncastArguments, name: str
    ) -> "Application":
        """Checks a policy when a function is made; warns of rules that have no effect."""
        if policy is None:
            raise TypeError(
                f'{name} needs a policy: write policy="c=bf16", policy="c=f16", which needs a '
                'jmpx.DynamicLossScale, or policy="full" for float32.'
            )
        policy_map = policy_map_of(policy)
        for rule in policy_map.rules if policy_map.way == "arguments" else ():
            end = f", as {name} casts arguments alone by it: leave by out, or write by=modules."
            warn_of(rule, policy_map, "argument", end, user_stacklevel("jax"))
        if sentence := output_without_effect(policy_map, name):
            warn(sentence)
        return cls(policy_map, func, uncast, name)

    @property
    def reduce_dtype(self) -> DTypeLike | None:
        """The dtype in which gradients are summed over devices; None means their own."""
        return self.policy_map.default.reduce_dtype

    def products(self) -> AbstractContextManager[object]:
        """Returns the context in which the default policy computes; see `computing`."""
        if self.policy_map.way == "modules":
            return contextlib.nullcontext()
        return computing(self.policy_map.default)

    @contextlib.contextmanager
    def creation(self) -> Iterator[None]:
        """Has `init` create parameters in the dtypes that `by=modules` gives them."""
        with contextlib.ExitStack() as stack:
            if self.policy_map.way != "modules":
                value = Creation(self.policy_map.default, self.policy_map.way == "arguments")
                for hook in filter(None, [adapter.creation for adapter in imported_adapters()]):
                    stack.enter_context(entered(Context(_NAME, value, value, hook)))
            yield

    def run(self, pure: PureFunction, state: State, args: Args, kwargs: Kwargs) -> Result:
        """Runs the function, as a pure one of the state of the objects among its arguments."""
        ways = {
            "arguments": self._by_arguments,
            "modules": self._by_modules,
            "operations": self._by_operations,
        }
        policy_map, way = self.policy_map, self.policy_map.way
        with contextlib.ExitStack() as stack:
            stack.enter_context(summed_in_float32())
            if way != "operations":
                name = getattr(code_of(self.func), "co_name", type(self.func).__name__)
                dtype = dtype_name(policy_map.default.compute_dtype)
                stack.enter_context(casts_noted(f"the {way} of {name}", dtype, policy_map))
            # In a context around a gradient function, `full` there means no casts of its own.
            if way != "modules" and self.name == _NAME:
                from jmpx._adapters.scopes import island  # here, as in `_by_modules`

                stack.enter_context(island(policy_map, (args, kwargs, pure.objects)))
            saving = None if policy_map.save is None else get_saving(policy_map.save)
            if saving is None or way == "operations":  # autocast saves by itself
                return ways[way](policy_map, pure, state, args, kwargs)
            run = functools.partial(ways[way], dataclasses.replace(policy_map, save=None), pure)
            return run_saved(run, saving, self.func, (state, args, kwargs), {})

    def _by_arguments(
        self, policy_map: PolicyMap, pure: PureFunction, state: State, args: Args, kwargs: Kwargs
    ) -> Result:
        """Runs a function with its arguments cast, and its results widened."""
        policy = policy_map.default
        inputs, keywords = self.uncast.exempt(skip_kept(policy.cast_to_compute), args, kwargs)
        compute = np.dtype(policy.compute_dtype)
        if compute.itemsize < 4 and not _has_any_to_cast((args, kwargs)):
            self._warn_of_nothing("arguments, as no floating array stands among them")
        before = args[:1] if self.stored is None else (self.stored,)
        rounded = compute if _are_rounded(before, inputs[:1]) else None
        with contextlib.ExitStack() as stack:
            casts = stack.enter_context(parameters_rounded(rounded))
            for adapter in imported_adapters():
                stack.enter_context(adapter.noted_casts())
            if fact(MARKED):
                pure.invoke = lambda fn, *args, **kwargs: call_marked(None, _all, fn, args, kwargs)
            result, updates = pure(state, *inputs, **keywords)
            updates = refuse_set(pure, state, inputs, keywords, updates)
        if casts:
            way = "operations" if {*casts} <= {"jmpx.autocast", _NAME} else "modules"
            warn(
                f"{self.name} has cast its arguments to 16 bits before {' and '.join(casts)} "
                "inside of it casts them again, so that parts which are to run in float32 get "
                f"rounded parameters: write by={way} into its policy, or leave its first argument "
                "uncast by uncast=0."
            )
        return _widened(policy, result), updates

    def _by_modules(
        self, policy_map: PolicyMap, pure: PureFunction, state: State, args: Args, kwargs: Kwargs
    ) -> Result:
        """Runs a function whose modules cast."""
        # Imported here, because the other ways need no module of a framework.
        from jmpx._adapters.boundaries import leaving_uncast
        from jmpx._adapters.scopes import for_modules, pooled

        adapters = list(imported_adapters())
        with contextlib.ExitStack() as stack:
            casts = stack.enter_context(casts_watched(code_of(self.func), policy_map))
            followed = for_modules(policy_map, self.name)
            stack.enter_context(pooled(followed, self.name))
            for adapter in adapters:
                stack.enter_context(adapter.noted_casts())
                stack.enter_context(adapter.applied(followed))
            views = [*filter(None, (each.views(followed, pure.objects) for each in adapters))]
            views = [*(markers(_all) if fact(MARKED) else ()), *views]
            pure.invoke = lambda fn, *args, **kwargs: call_with_proxies(
                views, fn, args, kwargs, self.uncast.exempt
            )
            uncast = stack.enter_context(leaving_uncast(self.uncast.leaves(args, kwargs)))
            result = pure(state, *args, **kwargs)
        if uncast.is_unknown and not uncast.came:
            warn(
                f"{self.name} casts arguments of modules that jax.jit, jax.vmap or another "
                "transformation inside of the function hands on, also those that uncast= names: "
                f"put the transformation around {self.name}, or leave those out of uncast that no "
                "module is called with, such as targets, as by=modules does not cast them."
            )
        if not casts:
            unseen = "" if pure.objects else out_of_sight((args, kwargs))
            self._warn_of_nothing("modules, as none ran that its framework reports", unseen)
        return result

    def _warn_of_nothing(self, way: str, unseen: str = "") -> None:
        whole = "pass the whole model as an argument, in place of a part of it or of closing over "
        warn(
            f"{self.name} casts nothing by policy map {str(self.policy_map)!r}, which it applies "
            f"by {way}: leave by out, which casts operations, or {unseen or f'{whole}it'}."
        )

    def _by_operations(
        self, policy_map: PolicyMap, pure: PureFunction, state: State, args: Args, kwargs: Kwargs
    ) -> Result:
        """Runs a function under autocast."""
        from jmpx._autocast.wrapped import evaluated  # here: other ways need no autocast

        self.uncast.check(args, kwargs)
        policy, saving = policy_map.default, get_saving(policy_map.save, is_cast_later=True)
        compute = np.dtype(policy.compute_dtype)
        first = [leaf for leaf in jax.tree.leaves((state, args[:1])) if is_floating(leaf)]
        narrow = [leaf for leaf in first if 2 <= leaf.dtype.itemsize < compute.itemsize]
        if narrow and compute.itemsize >= 4:
            warn(
                f"{self.name} casts operations by policy map {str(policy_map)!r}, which widens "
                f"nothing: {spell(narrow[0])} in the first argument stays as it is, so write "
                f"by=arguments to compute with it in {dtype_name(compute)}."
            )
        # `state` has the parameters of NNX objects, too, and their statistics.
        run = functools.partial(evaluated, policy_map, saving, "traced", by=self.name)
        result, updates = run(pure, state, args, kwargs, is_loss=True)
        return _widened(policy, result) if policy_map.writes_output else result, updates


def _all(cls: type, path: str) -> bool:
    return True  # all modules mark their calls


def _widened(policy: Policy, result: PyTree) -> PyTree:
    """Returns the result of a function; floating arrays are no narrower than the output dtype."""
    size = np.dtype(policy.output_dtype).itemsize

    def widened(leaf: PyTree) -> PyTree:
        is_narrow = is_floating(leaf) and leaf.dtype.itemsize < size
        return policy.cast_to_output(leaf) if is_narrow else leaf

    return jax.tree.map(widened, result)


def _has_any_to_cast(tree: PyTree) -> bool:
    """Whether a pytree has a floating array, or a PRNG key, from which an `init` makes some."""
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(tree) if is_array(leaf)}
    kinds = jnp.floating, jax.dtypes.prng_key, jnp.uint32
    return any(jnp.issubdtype(dtype, kind) for dtype in dtypes for kind in kinds)


def _are_rounded(before: PyTree, after: PyTree) -> bool:
    """Whether a cast has rounded any floating leaf: to fewer bits than it had, 16 or 8."""
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=False)
    floating = [(old, new) for old, new in pairs if is_floating(old) and is_floating(new)]
    return any(new.dtype.itemsize < min(4, old.dtype.itemsize) for old, new in floating)


def code_of(func: Function) -> object:
    """Returns the code of a function, or its class: equal for functions made anew in each call."""
    func = inspect.unwrap(func)
    while isinstance(func, functools.partial):
        func = inspect.unwrap(func.func)
    return getattr(func, "__code__", type(func))
