"""The commands of `python -m jmpx`: imports of programs, the text of `explain`, the functions."""

import argparse
import dataclasses
import importlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, TypeVar

import jax
import numpy as np

from jmpx._base.dtypes import dtype_name
from jmpx._base.trees import PyTree
from jmpx._inspect.text import columns
from jmpx._policies.map_strings import output_without_effect
from jmpx._policies.maps import PolicyMap, Rule
from jmpx._policies.policy import ATTRIBUTES, Policy, given_fields
from jmpx._scales.kinds import LossScale, NoOpLossScale
from jmpx._scales.strings import get_mixed_precision

R = TypeVar("R")

# The program that a user names, and its flags.


_LONGEST = 500  # of an error that becomes one line: some of JAX's have a sentence per array


def load(target: str, flags: Sequence[str]) -> PyTree:
    """Returns the result of the function that a target names; a ValueError says why it cannot.

    From here on, `sys.argv` holds the flags of the program. absl parses them if it has some of it.
    """
    name, _, attribute = target.rpartition(":")
    if not name or not attribute:
        raise ValueError(
            f"Expected MODULE:FUNCTION, got {target!r}: name a module or a .py file and, after a "
            "colon, the function in it to call."
        )
    sys.argv = [name, *flags]
    module: Any = attempt(f"Cannot import {name!r}", lambda: _import(name))
    attempt(f"The flags of {name!r} after -- are wrong", lambda: _parse_flags(module))
    return attempt(f"The function {target} failed", lambda: getattr(module, attribute)())


def attempt(what: str, func: Callable[[], R]) -> R:
    """Runs code of the user; turns its error into one line, which names the line of the code."""
    try:
        return func()
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split())
        text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
        raise ValueError(
            f"{what}: {type(error).__name__}{f': {text}' if text else ''}{_line_of(error)}"
        ) from error


def _line_of(error: BaseException) -> str:
    """Returns the last line of an error's traceback that is outside of installed packages."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if os.path.isfile(frame.filename) and not _is_installed(frame.filename):
            return f" ({os.path.relpath(frame.filename)}:{frame.lineno})"
    return ""


def _is_installed(file: str) -> bool:
    """Whether a file is of jmpx, of Python, or of an installed package."""
    paths = map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))
    return file.startswith((os.path.dirname(os.path.dirname(__file__)), *paths))


def _import(name: str) -> ModuleType:
    """Imports a module; a script as Python would, with its folder before all others on the path."""
    if not name.endswith(".py"):
        return importlib.import_module(name)
    path = os.path.realpath(name)
    if not os.path.isfile(path):
        raise FileNotFoundError("there is no such file")
    folder, file = os.path.split(path)
    sys.path.insert(0, folder)
    module = importlib.import_module(file.removesuffix(".py"))
    if os.path.realpath(module.__file__ or "") != path:
        raise ImportError(f"another module has the name {module.__name__!r}: {module.__file__}")
    return module


def _parse_flags(module: ModuleType) -> None:
    """Parses `sys.argv` by absl, as `app.run` would, if the program defines flags of absl.

    If only libraries define flags of absl, the program reads `sys.argv` by itself: a flag that absl
    does not know is no error then.
    """
    absl_flags = sys.modules.get("absl.flags")
    if absl_flags is None:
        return
    by_module = absl_flags.FLAGS.flags_by_module_dict()
    is_own = any(_is_of_program(name, module) for name in by_module if by_module[name])
    absl_flags.FLAGS(sys.argv, known_only=not is_own)


def _is_of_program(name: str, module: ModuleType) -> bool:
    """Whether a module is of the same package as the program, or of no installed one."""
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    is_beside = name.partition(".")[0] == module.__name__.partition(".")[0]
    return is_beside or not _is_installed(file)


# The text of `explain`: what a policy string means.


def _explained(precision: str) -> list[str]:
    """Returns the lines that tell what a policy string means; a ValueError if it is wrong."""
    mixed = get_mixed_precision(precision)
    policy_map = mixed.policy_map
    why = "by= says so" if policy_map.by else "by=modules or by=arguments would say otherwise"
    return [
        *_map_lines(policy_map),
        f"applied by: {policy_map.way} ({why})",
        *_save_lines(policy_map.save),
        _loss_scale_line(precision, mixed.loss_scale),
        *_without_effect(policy_map),
    ]


def _map_lines(policy_map: PolicyMap) -> list[str]:
    """Returns a table of what each rule of a policy map sets or inherits."""
    default, rules = policy_map.default, policy_map.rules
    rows = [("default", given_fields(default))]
    rows += [(rule.label, _fields_of(rule, default)) for rule in rules]
    if policy_map.way == "operations":  # `o=` widens the results of the whole; others stay
        for _, fields in rows[1:] if policy_map.writes_output else rows:
            fields.pop("output", None)
    shown = [key for key in ATTRIBUTES if any(fields.get(key) for _, fields in rows)]
    cells = [[label, *(fields.get(key, "") for key in shown)] for label, fields in rows]
    lines = columns([["", *shown], *cells])
    if any("*" in value for _, fields in rows for value in fields.values()):
        lines.append(
            "* the compute dtype, or matmul, of what surrounds the call: here, of the default"
        )
    if any(rule.optional for rule in rules):
        lines.append("? no warning where the rule matches nothing")
    return lines


def _without_effect(policy_map: PolicyMap) -> Iterator[str]:
    """Yields what has no effect: rules that later ones replace, and dtypes by operations."""
    for i, rule in enumerate(policy_map.rules):
        later = (each for each in policy_map.rules[i + 1 :] if each.selector == rule.selector)
        fields = rule.to_dict().keys()
        if new := next((each for each in later if fields <= each.to_dict().keys()), None):
            yield f"The rule {str(rule)!r} has no effect, because {str(new)!r} follows."
    if sentence := output_without_effect(policy_map, "jmpx.apply_policy"):
        yield sentence
    dtype = policy_map.default.param_dtype
    if policy_map.way == "operations" and np.dtype(dtype).itemsize < 4:
        yield (
            f"By operations, parameters and gradients keep the dtypes in which parameters are "
            f"stored: only the init of Haiku and Linen creates them in {dtype_name(dtype)}."
        )


def _fields_of(rule: Rule, default: Policy) -> dict[str, str]:
    """Returns the fields that hold where a rule matches; a star marks inherited ones."""
    rule = rule.spelled_out(default.compute_dtype)
    fields = given_fields(rule.resolve(default, default))
    if rule.is_in_eight_bits:
        fields["matmul"] = str(rule.matmul)
    inherited = {key for key in ("compute", "output", "matmul") if getattr(rule, key) is None}
    if rule.is_operation:  # it has no more than the rule says
        return {key: fields[key] for key in ("compute", "matmul") if key not in inherited}
    return {key: f"{value} *" if key in inherited else value for key, value in fields.items()}


def _save_lines(save: str | None) -> list[str]:
    """Returns the line that says what the backward pass keeps, if the policy map says it."""
    if save is None:
        return []
    which = {
        "products": "products, but none of two activations",
        "products+mixed": "products, but not attention's scores",
        "products+attention": "all products",
    }[save]
    return [f"backward pass: keeps the results of {which} (save={save})"]


def _loss_scale_line(precision: str, loss_scale: LossScale) -> str:
    """Returns the line of the loss scale, with the reason if the policy map decided on it."""
    line, (_, _, text) = f"loss scale: {loss_scale}", precision.partition("|")
    if text.partition(",")[0].strip().lower() not in ("", "auto"):
        return line
    which = "no policy computes" if isinstance(loss_scale, NoOpLossScale) else "a policy computes"
    return f"{line} (auto: {which} in float16)"


# The commands.
#
# Each takes the parsed arguments, prints what it finds, and returns the exit code. It raises a
# ValueError of one sentence if the program cannot be made, traced or run.


_POLICIES = ["c=f32", "c=bf16", "c=bf16,save=products"]
_LOSS_ALONE = "These are gradients alone: return a make_step behind the arguments for a whole step."


def explain(given: argparse.Namespace) -> int:
    """Prints what a policy string means."""
    print(*_explained(given.precision), sep="\n")
    return 0


def doctor(given: argparse.Namespace) -> int:
    """Prints what is installed and set here; the exit code is 1 if that does not fit together."""
    from jmpx._cli.doctor import doctor  # here, as below: a command needs one of them

    return doctor()


def audit(given: argparse.Namespace) -> int:
    """Prints what runs in which dtype; the exit code is 1 if it fails the check that is given."""
    from jmpx._inspect.audit.api import audit

    fn, (args, *_), _ = _made(given)
    trying = lambda: audit(fn, platform=given.platform, run=given.is_run)(*args)  # noqa: E731
    report = attempt(f"The audit of {given.target} failed", trying)
    _print(report, given)
    if given.check is None:
        return 0
    compute = given.check.strip().removeprefix("compute=").removeprefix("c=")
    try:
        report.check(compute, at_least=given.at_least, allow=given.allow.split(","))
    except AssertionError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def ranges(given: argparse.Namespace) -> int:
    """Prints which magnitudes occur, and what narrower dtypes would lose."""
    from jmpx._inspect.ranges.api import ranges

    fn, (args, *_), _ = _made(given)
    found = attempt(f"The run of {given.target} failed", lambda: ranges(fn)(*args))
    _print(found, given)
    return 0


def first_nonfinite(given: argparse.Namespace) -> int:
    """Prints the first operation that makes an inf or NaN; the exit code is 1 if there is one."""
    from jmpx._inspect.first_nonfinite.api import first_nonfinite

    fn, (args, *_), _ = _made(given)
    found = attempt(f"The run of {given.target} failed", lambda: first_nonfinite(fn)(*args))
    if found is not None:
        _print(found, given)
        return 1
    print("null" if given.json else "no operation makes an inf or NaN")
    return 0


def choose(given: argparse.Namespace) -> int:
    """Prints policy strings that hold a bound on the error, with what they cost."""
    from jmpx._inspect.choose.api import choose

    func, batches, make_step = _made(given)
    run = choose(func, given.policy, error=given.error, make_step=make_step, chip=given.chip)
    found = attempt(f"The run of {given.target} failed", lambda: run(*batches))
    _print(found, given)
    return 0 if found.chosen else 1


def plan(given: argparse.Namespace) -> int:
    """Prints what policies cost; the exit code is 1 if none was seen to fit on the chip."""
    from jmpx._inspect.plan.api import NO_DONATION, plan

    config: Any = jax.config  # Any, because JAX does not annotate its settings
    config.update("jax_platforms", config.jax_platforms or "cpu")  # else plugins look for chips
    loss, (args, *_), make_step = _made(given)
    trying = lambda: plan(  # noqa: E731
        make_step or _gradients(loss, args), given.policy or _POLICIES, chip=given.chip
    )
    found = attempt(f"The plan of {given.target} failed", trying)
    if make_step is None:
        notes = (note for note in found.notes if note != NO_DONATION)
        found = dataclasses.replace(found, notes=(*notes, _LOSS_ALONE))
    _print(found, given)
    return int(given.chip is not None and not any(row.fits for row in found.rows))


def _gradients(loss: Callable[..., PyTree], args: tuple[PyTree, ...]) -> Callable[[str], Any]:
    """Returns a function of a policy that returns the gradient of a loss, and its shapes."""
    from jmpx._adapters.applying import apply_policy
    from jmpx._inspect.programs import traced_program

    program = traced_program(loss, args)
    if not program.is_differentiated:
        raise ValueError(
            f"Expected a loss, which each policy casts, got {program.name}, which is none: return "
            "behind its arguments a make_step, which returns a step and its arguments by policy."
        )

    def make_step(policy: str) -> tuple[Callable[..., PyTree], tuple[PyTree, ...]]:
        policy_map = get_mixed_precision(policy).policy_map
        traced = traced_program(apply_policy(loss, policy_map), args)
        return dataclasses.replace(traced, name=f"the gradients of {program.name}").as_step()

    return make_step


def migrate(given: argparse.Namespace) -> int:
    """Prints the edits that take a program to jmpx, and makes them if asked to."""
    from jmpx._migrate.files import migrate_files

    print(*migrate_files(given.files, given.write), sep="\n")
    return 0


def _made(given: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Makes the program: a function, the batches of its arguments, and what makes a step or None.

    A list of tuples is batches; a tuple, or another list, is the arguments of one call.
    """
    made: Any = load(given.target, given.flags)
    parts = made if type(made) is tuple else (made,)
    fn, args, make_step = (*parts, None, None)[:3]
    are_parts = len(parts) <= 3 and (make_step is None or callable(make_step))
    if callable(fn) and isinstance(args, tuple | list) and are_parts:
        are_batches = type(args) is list and {*map(type, args)} == {tuple}
        return fn, args if are_batches else [tuple(args)], make_step
    got = ", ".join(type(part).__name__ for part in parts)
    raise ValueError(
        f"Expected {given.target} to return a loss or a step, the tuple of its arguments or a list "
        "of such tuples, and maybe a function that makes a step of a policy, got "
        f"{f'({got})' if parts is made else got}: write `return loss_fn, (params, x)`."
    )


def _print(found: PyTree, given: argparse.Namespace) -> None:
    print(found.to_json() if given.json else found)
    if getattr(given, "plot", None) is not None:
        attempt(f"Cannot draw {given.plot!r}", lambda: found.plot(given.plot))
        print(f"wrote {given.plot}", file=sys.stderr)  # not into the JSON
