"""Prints what a policy string means, and what of a program runs in which dtype.

    python -m jmpx doctor
    python -m jmpx explain "c=bf16,o=f32; BatchNorm: full; */router: c=f32,m=highest"
    python -m jmpx explain --model pkg.module:make "c=bf16,o=f32; BatchNorm: full | dynamic"
    python -m jmpx explain --config config.yaml
    python -m jmpx audit pkg.module:make --platform tpu
    python -m jmpx ranges pkg.module:make --dtype float16 --plot ranges.png
    python -m jmpx first-nonfinite examples/haiku/train.py:make -- --mp_policy=c=f16

`doctor` shows versions, the device and settings, and what of them does not fit together.

`explain`, a word that may be left out, takes a policy or a policy map and, after a bar, a loss
scale; without one, the policy map decides, as with the loss scale `auto`. `make` of `--model`
returns a module of Equinox or NNX; or a pair of a Linen module or a Haiku transformed function,
whose `init` is traced, and a tuple of its arguments; or a pair of any other function and its
arguments, such as `lambda x: model.init(key, x, train=False)`. It is looked at in the way in which
the map is applied, `by=`; by operations the call is traced, and needs arguments. No array is
computed. `--config` takes a file of YAML, JSON or TOML in place of the string, and explains each
policy in it: strings under keys such as `policy`, `mp_policy`, `student_policy` or `precision`,
mappings that jmpx.get_mixed_precision reads, and any other string with an equals sign that is one.

The other commands look at a program: a loss, which they differentiate in its first argument, or a
training step. `make` returns a pair of it and the tuple of its arguments, which for `audit` may be
shapes. What follows `--` are flags of the program itself.

The exit code is 1 if the program makes an inf or NaN, or if the doctor warns, and 2 after a line
that says what went wrong.
"""

import argparse
import os
import re
import sys
from typing import Any, NoReturn

from jmpx._base.messages import did_you_mean
from jmpx._cli.explain import FLAGS_REMEDY, explain, explain_config

_COMMANDS = {
    "explain": "what a policy string means, and which of its rules each module of a model has",
    "audit": "what of a program runs in which dtype, and what leaked",
    "ranges": "which magnitudes a program has, and what a 16-bit dtype would lose",
    "first-nonfinite": "the first operation of a program that makes an inf or NaN",
    "doctor": "versions, the device and settings, and what of them does not fit together",
}


_JSON = {"--json": {"action": "store_true", "help": "print JSON"}}
_TARGET = {
    "target": {
        "metavar": "MODULE:FUNCTION",
        "help": "a function without arguments that returns a pair of a loss or a training step and "
        "the tuple of its arguments; the module may be the path of a .py file",
    },
    **_JSON,
}
# The arguments of each command, as argparse takes them.
_ARGUMENTS: dict[str, dict[str, dict[str, Any]]] = {
    "doctor": _JSON,
    "explain": {
        "precision": {
            "metavar": "POLICY",
            "nargs": "?",
            "help": "a policy or a policy map and, after a bar (|), a loss scale",
        },
        "--config": {
            "metavar": "FILE",
            "help": "a file of YAML, JSON or TOML, whose policies are explained",
        },
        "--model": {
            "metavar": "MODULE:FUNCTION",
            "help": "a function without arguments that returns a module of Equinox or NNX, or a "
            "pair of what is traced and a tuple of its arguments: a Linen module, a Haiku "
            "transformed function, or any other function",
        },
    },
    "audit": {
        **_TARGET,
        "--platform": {
            "choices": ("cpu", "cuda", "gpu", "tpu"),
            "help": "also find what this hardware multiplies in a lower precision than its dtype",
        },
    },
    "ranges": {
        **_TARGET,
        "--dtype": {
            "metavar": "DTYPE",
            "help": "also print the policy map that keeps in float32 what overflows in it: float16",
        },
        "--plot": {"metavar": "PATH", "help": "draw the histogram of exponents"},
    },
    "first-nonfinite": _TARGET,
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Prints one line, and ends the program with the code 2."""
        self.exit(2, f"{message}; {' '.join(self.format_usage().split())}\n")


def _parsers() -> tuple[_Parser, dict[str, _Parser]]:
    """Returns the parser that knows the commands, and the parser of each command."""
    parser = _Parser(
        prog="python -m jmpx",
        usage=f"python -m jmpx {'|'.join(_COMMANDS)} ...",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = sys.modules["jmpx"].__version__
    parser.add_argument("--version", action="version", version=f"jmpx {version}")
    subparsers = parser.add_subparsers(title="commands", metavar="", prog="python -m jmpx")
    commands: dict[str, _Parser] = {}
    for name, text in _COMMANDS.items():
        command = commands[name] = subparsers.add_parser(
            name, help=text, description=f"Prints {text}."
        )
        command.set_defaults(command=name)
        for argument, options in _ARGUMENTS[name].items():
            command.add_argument(argument, **options)
        if "target" in _ARGUMENTS[name]:
            command.usage = f"{command.prog} MODULE:FUNCTION [options] [-- FLAGS OF THE PROGRAM]"
    commands["explain"].usage = (
        'python -m jmpx [explain] [--model MODULE:FUNCTION] "c=bf16; BatchNorm: full" (or '
        "--config FILE)"
    )
    return parser, commands


def main(arguments: list[str]) -> int:
    """Prints what the arguments ask for, and returns the exit code.

    Raises:
        SystemExit: after the help, and after a line about wrong usage.
    """
    parser, commands = _parsers()
    try:
        (command, *arguments), program_flags = _with_command(parser, arguments)
        given = commands[command].parse_args(arguments)
        if command == "explain":
            return _explain(commands[command], given)
        if command == "doctor":
            from jmpx._cli.doctor import doctor  # here, as only it reads the metadata of packages

            return doctor(given.json)
        from jmpx._cli import commands as programs  # here, because it needs most of jmpx

        return getattr(programs, command.replace("-", "_"))(given, program_flags)
    except BrokenPipeError:  # as with `| head`, which has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except (ValueError, OSError, RuntimeError) as error:  # the last where JAX cannot start
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2


def _explain(parser: _Parser, given: argparse.Namespace) -> int:
    """Prints what a string or the policies of a file mean, and returns the exit code."""
    if (given.precision is None) == (given.config is None):
        parser.error("expected either a policy or --config FILE")
    wrong: list[str] = []
    if given.config is None:
        lines = explain(given.precision, given.model)
    else:
        lines, wrong = explain_config(given.config, given.model)
    print(*lines, sep="\n")
    for line in wrong:
        print(line, file=sys.stderr)
    return 2 if wrong else 0


def _with_command(parser: _Parser, arguments: list[str]) -> tuple[list[str], list[str]]:
    """Returns the arguments of jmpx, which begin with a command, and the flags of the program."""
    if not arguments:
        parser.error(f"expected one of {', '.join(_COMMANDS)}, or a policy")
    if arguments[0] in ("-h", "--help", "--version"):
        parser.parse_args(arguments[:1])
    if arguments[0] not in _COMMANDS:
        _refuse_command(parser, arguments[0])
        arguments = ["explain", *arguments]
    if "--" not in arguments:
        return arguments, []
    end = arguments.index("--")
    if arguments[0] == "explain":
        if any(argument.startswith("-") for argument in arguments[end + 1 :]):
            parser.error(FLAGS_REMEDY)
        return arguments, []
    return arguments[:end], arguments[end + 1 :]


def _refuse_command(parser: _Parser, word: str) -> None:
    """Ends the program if a word in place of a command is not a policy either."""
    if not re.fullmatch(r"[A-Za-z][\w-]*", word):
        return
    try:
        explain(word, None)
    except ValueError as error:
        if error.__cause__ is not None:  # it is one, and JAX cannot start to read it
            raise
        near = did_you_mean(word, [*_COMMANDS]).rstrip(".")
        parser.error(f"unknown command {word!r}{near or f', and no policy: {error}'.rstrip('.')}")
