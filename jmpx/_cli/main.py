"""Prints what a policy string means, and what of a program runs in which dtype.

    python -m jmpx doctor
    python -m jmpx explain "c=bf16,o=f32; BatchNorm: full; */router: c=f32,m=highest"
    python -m jmpx audit pkg.module:make --check compute=bf16 --at-least 0.99
    python -m jmpx ranges pkg.module:make --plot ranges.png
    python -m jmpx choose pkg.module:make --error 0.01 --chip v5e
    python -m jmpx plan pkg.module:make --policy c=f32 --policy c=bf16 --chip v5e
    python -m jmpx first-nonfinite examples/haiku/reports.py:make_arrays -- --mp_policy=c=f16
    python -m jmpx migrate train.py models/ --write

`explain`, a word that may be left out, takes a policy or a policy map and, after a bar, a loss
scale. Under which policy each module of a model ran, `audit` tells.

One `make` serves all commands that look at a program. It returns a loss, which they differentiate
in its first argument, or a training step; and the arguments of one call, or a list of such tuples.
For `audit` and `plan` these may be shapes. What follows `--` are flags of the program itself.

The exit code is 1 if the program makes an inf or NaN, if an audit fails its check, if no policy is
found that holds the bound or fits, or if the doctor warns, and 2 after a line about what is wrong.
"""

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from jmpx._base.messages import did_you_mean
from jmpx._cli import commands


class _Command(NamedTuple):
    """A command: what it prints, the function that does so, and its arguments for argparse."""

    prints: str
    run: Callable[[argparse.Namespace], int]
    arguments: dict[str, dict[str, Any]]


_CHIP = {"help": "the chip whose memory counts: v5e, v5p, v6e, h100, a100 or b200"}
_TARGET: dict[str, dict[str, Any]] = {
    "target": {
        "metavar": "MODULE:FUNCTION",
        "help": "a function that returns a loss or a training step, the tuple of its arguments or "
        "a list of such tuples and, for choose and plan, maybe a function of a policy that returns "
        "a step and its arguments; the module may be a .py file, whose flags follow after --",
    },
    "--json": {"action": "store_true", "help": "print JSON"},
}
_COMMANDS = {
    "explain": _Command(
        "what a policy string means",
        commands.explain,
        {
            "precision": {
                "metavar": "POLICY",
                "help": "a policy or a policy map and, after a bar (|), a loss scale",
            }
        },
    ),
    "audit": _Command(
        "what of a program runs in which dtype, and what leaked",
        commands.audit,
        {
            **_TARGET,
            "--platform": {
                "choices": ("cpu", "cuda", "gpu", "tpu"),
                "help": "also find what this hardware multiplies in less than its dtype",
            },
            "--run": {
                "action": "store_true",
                "dest": "is_run",
                "help": "run the program, and propose nothing that raises the error of its results",
            },
            "--check": {
                "metavar": "compute=DTYPE",
                "help": "end with the code 1 if there are findings, or if too few products compute "
                "in this dtype, such as compute=bf16",
            },
            "--at-least": {
                "type": float,
                "metavar": "SHARE",
                "help": "of all FLOPs of products, from 0 to 1, with --check; 0.95 if left out",
            },
            "--allow": {
                "default": "",
                "metavar": "NAMES",
                "help": "findings that --check allows, such as low-exp,low-sum",
            },
        },
    ),
    "ranges": _Command(
        "which magnitudes a program has, and what a 16-bit dtype would lose",
        commands.ranges,
        {**_TARGET, "--plot": {"metavar": "PATH", "help": "draw the histogram of exponents"}},
    ),
    "first-nonfinite": _Command(
        "the first operation of a program that makes an inf or NaN",
        commands.first_nonfinite,
        _TARGET,
    ),
    "choose": _Command(
        "the policy string with the fewest parts in float32 that holds a bound on the error",
        commands.choose,
        {
            **_TARGET,
            "--error": {"type": float, "required": True, "help": "the bound, such as 0.01"},
            "--policy": {
                "default": "c=bf16",
                "help": "the policy to which rules are added, %(default)s if it is left out",
            },
            "--chip": _CHIP,
            "--plot": {"metavar": "PATH", "help": "draw the errors against the memory"},
        },
    ),
    "plan": _Command(
        "what policies cost on a chip that need not be there",
        commands.plan,
        {
            **_TARGET,
            "--policy": {"action": "append", "help": "a policy; give this option for each of them"},
            "--chip": _CHIP,
            "--plot": {"metavar": "PATH", "help": "draw the peaks of memory"},
        },
    ),
    "migrate": _Command(
        "the edits from JMP, MPX, Flax's DynamicScale or hk.mixed_precision, as a diff",
        commands.migrate,
        {
            "files": {"metavar": "FILES", "nargs": "+", "help": "Python files and folders"},
            "--write": {"action": "store_true", "help": "also make the edits"},
        },
    ),
    "doctor": _Command(
        "versions, the device and settings, and what of them does not fit together",
        commands.doctor,
        {},
    ),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Prints one line, and ends the program with the code 2."""
        self.exit(2, f"{message}; {' '.join(self.format_usage().split())}\n")


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m jmpx",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = sys.modules["jmpx"].__version__
    parser.add_argument("--version", action="version", version=f"jmpx {version}")
    parsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (prints, run, arguments) in _COMMANDS.items():
        command = parsers.add_parser(name, help=prints, description=f"Prints {prints}.")
        command.set_defaults(run=run)
        for argument, options in arguments.items():
            command.add_argument(argument, **options)
    return parser


def main(arguments: list[str]) -> int:
    """Prints what the arguments ask for, and returns the exit code.

    Raises:
        SystemExit: after the help, and after a line about wrong usage.
    """
    parser, before = _parser(), sys.argv
    if not arguments:
        parser.print_help()
        return 0
    end = arguments.index("--") if "--" in arguments else len(arguments)
    arguments, flags = arguments[:end], arguments[end + 1 :]
    if arguments and arguments[0] not in (*_COMMANDS, "-h", "--help", "--version"):
        near = did_you_mean(arguments[0], [*_COMMANDS])
        if near.endswith("?"):
            parser.error(f"unknown command {arguments[0]!r}{near}")
        arguments = ["explain", *arguments]
    given = parser.parse_args(arguments, argparse.Namespace(flags=flags))
    try:
        return given.run(given)
    except BrokenPipeError:  # as with `| head`, which has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except (ValueError, OSError, RuntimeError) as error:  # the last where JAX cannot start
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2
    finally:
        sys.argv = before  # the program has read its flags there
