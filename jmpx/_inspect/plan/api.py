"""The plan as users call it: `jmpx.inspect.plan(make_step, policies, chip="v5e")`."""

from collections.abc import Callable, Sequence
from typing import Any

from jmpx._base.messages import describe
from jmpx._base.trees import PyTree, is_array
from jmpx._inspect.audit import summary
from jmpx._inspect.graph import Graph
from jmpx._inspect.plan.chips import Chip, get_chip, missing
from jmpx._inspect.plan.compiling import compiled, placed, versions
from jmpx._inspect.plan.report import Plan, Planned
from jmpx._inspect.programs import Program, traced_step
from jmpx._inspect.progress import progress
from jmpx._inspect.text import short_names
from jmpx._inspect.watched import constants
from jmpx._scales.strings import MixedPrecisionLike, get_mixed_precision

_NUMBERS = 16  # that an array among the arguments may have: a key, a count, a loss scale
_CONSTANT = 8 * 2**20  # bytes that a constant may have: a mask, a table of positions
_NO_DONATION = (
    "No argument is donated, so that the old state is held beside the new one: jit the step with "
    "donate_argnums."
)
_UNTUNED = "Nothing is tuned without the GPU: a real run fuses a little more or less."


def plan(
    make_step: Callable[[Any], tuple[Callable[..., PyTree], tuple[PyTree, ...]]],
    policies: Sequence[MixedPrecisionLike],
    *,
    chip: str | None = None,
) -> Plan:
    """Predicts what a train step costs under each policy, before you rent a chip.

    Each step is traced, which gives its FLOPs by dtype and the bytes that it keeps for the backward
    pass. For a chip, the chip's own compiler, which runs without the chip in a separate process,
    gives the memory that the step needs, the bytes that it touches, and what chips send to each
    other. Answers are kept in `jmpx/plan` of the user's cache, so no program is compiled twice.

    Args:
        make_step: a function of a policy that returns a step and the tuple of its arguments. The
            step may be jitted: its donated arguments and its shardings count. The arguments hold
            `jax.ShapeDtypeStruct`s, as `jax.eval_shape` makes them, instead of arrays. Their
            shardings, of any mesh, such as a `jax.sharding.AbstractMesh`, say how many chips.
        policies: policy strings or maps. Each is passed to `make_step` as it is.
        chip: `"v5e"`, `"v5p"` or `"v6e"` (TPUs, by `pip install 'jmpx[tpu]'`), `"h100"` or `"a100"`
            (GPUs, by `'jmpx[cuda]'`). None, or a chip without its compiler, gives only the counts
            of the trace.

    Returns:
        A `jmpx.inspect.Plan` with a row for each policy. If a policy cannot be traced or compiled,
        or does not fit, its row says so.

    See Also:
        `jmpx.inspect.blame` shows what a policy costs in accuracy.

    Raises:
        TypeError: if `make_step` is not callable or returns something else, or a policy is none.
        ValueError: if there are no policies or one is wrong, the chip is unknown, or there are
            arrays among the arguments or large constants of a step.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import jmpx
        >>> def make_step(policy):
        ...     loss_fn = jmpx.apply_policy(lambda w, x: jnp.mean(jnp.tanh(x @ w)), policy)
        ...     step = jax.jit(lambda w, x: w - jax.grad(loss_fn)(w, x), donate_argnums=0)
        ...     shape = jax.ShapeDtypeStruct((64, 64), "float32")
        ...     return step, (shape, shape)
        >>> report = jmpx.inspect.plan(make_step, ["c=f32", "c=bf16,o=f32"])
        >>> [row.products[0].dtypes for row in report.rows]
        ['float32 x float32', 'bfloat16 x bfloat16']
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
    if not target:
        return Plan(programs[0].name, None, None, "", tuple(rows))
    notes = [] if any(placed(program)[0] for program in programs) else [_NO_DONATION]
    notes += [_UNTUNED] if target.platform == "cuda" else []
    notes = [f"{reason} These are counts of the trace."] if reason else notes
    known = target.name, target.memory, versions(target)
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
    """Returns a step and its arguments; refuses what is none."""
    match made := make_step(policy):
        case (step, tuple()) if callable(step) and isinstance(made, tuple):
            return made
    raise TypeError(
        f"Expected make_step to return a step and the tuple of its arguments, got "
        f"{describe(made)}: write `return step, (state, batch)`."
    )


def _refuse_arrays(program: Program) -> None:
    arrays = [x for x in program.arrays if is_array(x) and x.size > _NUMBERS]
    for array in (*arrays, *(x for x in constants(program.jaxpr) if x.nbytes > _CONSTANT)):
        raise ValueError(
            f"Expected {program.name} to take shapes in place of arrays, got or closed over one of "
            f"{array.dtype.name}{list(array.shape)}: make it by jax.eval_shape, which computes "
            "nothing, and pass it among the arguments."
        )


def _planned(name: str, program: Program, chip: Chip | None, compiles: bool) -> Planned:
    graph = Graph(program, chip and {"cuda": "gpu"}.get(chip.platform, chip.platform))
    products, saved = summary.products(graph), summary.saved(graph)
    row = Planned(name, products=products, saved=saved)
    if chip is None or not compiles:
        return row
    try:
        row = row._replace(**compiled(program, chip))
    except Exception as error:  # such as an effect that JAX cannot export
        return row._replace(error=_line(error))
    # A GPU's compiler takes what does not fit, too.
    return row._replace(fits=row.fits and (row.peak or 0) <= chip.memory)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
