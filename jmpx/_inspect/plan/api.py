"""The plan as users call it: `jmpx.inspect.plan(make_step, policies, chip="v5e")`."""

from collections.abc import Callable, Sequence
from typing import Any

from jmpx._base.leaves import PyTree, is_array
from jmpx._base.messages import describe
from jmpx._base.text import short_names
from jmpx._inspect.audit import summary
from jmpx._inspect.graph import Graph
from jmpx._inspect.plan.chips import Chip, get_chip, missing
from jmpx._inspect.plan.compiling import compiled, placed, versions
from jmpx._inspect.plan.report import Plan, Planned
from jmpx._inspect.programs import Program, traced_step
from jmpx._inspect.progress import progress
from jmpx._jaxprs.watched import constants
from jmpx._scales.mixed_precision import MixedPrecisionLike, get_mixed_precision

_NUMBERS = 16  # that an array among the arguments may have: a key, a count, a loss scale
_CONSTANT = 8 * 2**20  # bytes that a constant may have: a mask, a table of positions


def plan(
    make_step: Callable[[Any], tuple[Callable[..., PyTree], tuple[PyTree, ...]]],
    policies: Sequence[MixedPrecisionLike],
    *,
    chip: str | None = None,
) -> Plan:
    """Tells what a train step costs under each policy, before a chip is rented.

    Each step is traced here, for its FLOPs by dtype and the bytes that it keeps for its backward
    pass. For a chip it is then compiled, by the chip's own compiler, which needs no chip: a process
    of its own says how much memory a chip holds at once, which bytes it touches, and what chips
    send to each other. Answers are kept, so that the same step is not compiled twice: as files
    in `jmpx/plan` in the user's cache.

    Args:
        make_step: a function of a policy that returns a step and the tuple of its arguments. The
            step may be jitted: what it donates, and its shardings, count. The arguments hold
            `jax.ShapeDtypeStruct`s where there are arrays, as `jax.eval_shape` makes them, and may
            have shardings of any mesh, such as a `jax.sharding.AbstractMesh`, whose size says how
            many chips there are.
        policies: policy strings or maps, as `jmpx.get_mixed_precision` takes them. Each is handed
            to `make_step` as it was given.
        chip: `"v5e"`, `"v5p"` or `"v6e"` (TPUs), `"h100"` or `"a100"`; None for the counts of the
            trace alone. TPUs need `pip install 'jmpx[tpu]'`, GPUs `'jmpx[cuda]'`: without it, the
            plan says so, and has the counts of the trace.

    Returns:
        A `jmpx.inspect.Plan`, with a row for each policy. One that cannot be traced or compiled, or
        that does not fit, is a row that says why.

    See Also:
        `jmpx.inspect.blame` tells what a policy costs in accuracy.

    Raises:
        TypeError: if `make_step` is not callable or returns something else, or a policy is none.
        ValueError: if there are no policies or one is wrong, the chip is unknown, or there are
            arrays among the arguments or the constants of a step.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import jmpx
        >>> def make_step(policy):
        ...     def loss_fn(w, x):
        ...         return jnp.mean(jnp.tanh(x @ w).astype(jnp.float32) ** 2)
        ...     def step(w, x):
        ...         return w - 0.1 * jax.grad(jmpx.apply_policy(loss_fn, policy))(w, x)
        ...     shape = jax.ShapeDtypeStruct((64, 64), "float32")
        ...     return jax.jit(step, donate_argnums=0), (shape, shape)
        >>> print(jmpx.inspect.plan(make_step, ["c=f32", "c=bf16,o=f32"]))
        Plan of step: counts of the trace
        <BLANKLINE>
    """
    target = None if chip is None else get_chip(chip)
    names = _names(policies)
    if not callable(make_step):
        raise TypeError(f"Expected make_step to be a function of a policy, got {make_step!r}.")
    reason = missing(target) if target else ""
    rows, programs, failures = list[Planned](), list[Program](), list[Exception]()
    with progress("policies", len(names)) as done:
        for name, policy in zip(names, policies, strict=True):
            step, arguments = _made(make_step, policy)
            try:
                programs.append(traced_step(step, arguments))
            except Exception as error:  # such as a kernel that refuses a dtype
                failures.append(error)
                rows.append(Planned(name, error=_line(error)))
            else:
                _refuse_arrays(programs[-1])
                rows.append(_planned(name, programs[-1], target, not reason))
            done()
    if not programs:
        raise failures[0]
    notes = [f"{reason} These are counts of the trace."] if reason else []
    if target and not reason:
        notes = _notes(target, programs)
    known = (target.name, target.memory, versions(target)) if target else (None, None, "")
    return Plan(programs[0].name, *known, tuple(rows), tuple(notes))


def _names(policies: object) -> list[str]:
    """Returns the policies as a report names them; refuses what is no policy."""
    if isinstance(policies, str) or not isinstance(policies, Sequence) or not policies:
        raise ValueError(
            f"Expected policies as a list, such as ['c=f32', 'c=bf16'], got {describe(policies)}."
        )
    for policy in policies:
        get_mixed_precision(policy)
    return [each if isinstance(each, str) else short_names(str(each)) for each in policies]


def _made(make_step: Callable[[Any], Any], policy: object) -> Any:
    """Returns the step and its arguments; refuses what is none."""
    made = make_step(policy)
    if isinstance(made, tuple) and len(made) == 2 and callable(made[0]):
        if isinstance(made[1], tuple):
            return made
    raise TypeError(
        f"Expected make_step to return a step and the tuple of its arguments, got "
        f"{describe(made)}: write `return step, (state, batch)`."
    )


def _refuse_arrays(program: Program) -> None:
    arguments = [("argument", x) for x in program.arrays if is_array(x) and x.size > _NUMBERS]
    closed = [("constant", x) for x in constants(program.jaxpr) if x.nbytes > _CONSTANT]
    for kind, array in (*arguments, *closed):
        raise ValueError(
            f"Expected shapes, got an array of {array.dtype.name}{list(array.shape)} as "
            f"{'an' * (kind == 'argument') or 'a'} {kind} of {program.name}: make it by "
            "jax.eval_shape, which computes nothing, and pass it among the arguments."
        )


def _planned(name: str, program: Program, chip: Chip | None, compiles: bool) -> Planned:
    platform = None if chip is None else "tpu" if chip.platform == "tpu" else "gpu"
    graph = Graph(program, platform)
    products, saved = summary.products(graph), summary.saved(graph)
    row = Planned(name, products=products, other_flops=summary.other_flops(graph), saved=saved)
    if chip is None or not compiles:
        return row
    try:
        row = row._replace(**compiled(program, chip))
    except Exception as error:  # such as a callback, which JAX cannot export
        return row._replace(error=_line(error))
    # A GPU's compiler takes what does not fit, too.
    return row._replace(fits=row.fits and (row.peak or 0) <= chip.memory)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _notes(chip: Chip, programs: Sequence[Program]) -> list[str]:
    notes = []
    if not any(placed(program)[0] for program in programs):
        notes.append(
            "No argument is donated, so that the old state is held beside the new one: jit the "
            "step with donate_argnums."
        )
    if chip.platform == "cuda":
        notes.append("Nothing is tuned without the GPU: a real run fuses a little more or less.")
    return notes
