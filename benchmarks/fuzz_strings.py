"""Looks for strings and mappings that the parsers of jmpx do not understand, or refuse badly.

    pip install -e '.[fuzz]'                               # atheris, on Python 3.11 to 3.13
    python benchmarks/fuzz_strings.py --minutes=10
    python benchmarks/fuzz_strings.py --small              # some thousand inputs, without atheris

An input is some bytes. They choose a parser, and are its string or say how to build a mapping. Each
input has to give a value that its string and its dict give back, or a ValueError or TypeError of
one sentence, which quotes the input a few times at most. atheris mutates the inputs that reach
new lines of jmpx. Then pieces of the inputs that it kept are repeated, and a text that is four
times as long may not take eight times as long.
"""

import ast
import importlib
import importlib.util
import json
import math
import os
import pickle
import random
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

os.environ.setdefault("JAX_PLATFORMS", "cpu")

if "--guided" in sys.argv:  # the process that atheris runs in counts the branches of jmpx
    engine: Any = importlib.import_module("atheris")
    with engine.instrument_imports(include=["jmpx"]):
        import jmpx
else:
    import jmpx

import jax.numpy as jnp
import numpy as np
import reliability

PARSERS: dict[str, Callable[[Any], Any]] = {
    "get_policy": jmpx.get_policy,
    "get_policy_map": jmpx.get_policy_map,
    "get_loss_scale": jmpx.get_loss_scale,
    "get_loss_scale, with a policy": lambda spec: jmpx.get_loss_scale(spec, policy="c=f16"),
    "get_mixed_precision": jmpx.get_mixed_precision,
}

SEEDS = (
    "params=float32,compute=bfloat16,output=float32",
    "p=f32,c=f16,o=f32,m=highest,r=f32",
    "full,m=BF16_BF16_F32_X3;",
    "bf16-mixed",
    "mixed_float16",
    "half",
    "float8_e4m3fn",
    "c=bf16,o=f32; BatchNorm: full; */head/*?: c=f32,m=high",
    "f32; op.exp: bf16; haiku.Linear ? : p=f16",
    "dynamic, init=2**15, period=500, factor=2, min=2**-14, max=2**24, backoff=.5, hysteresis=2",
    "dynamic=1e4,counter=-3",
    "static=1_024",
    "auto, min=0.25, init=0.5",
    "c=f16,o=f32; LayerNorm: full | dynamic, init=2**10",
    "c=bf16 | none",
)
WORDS = (
    *("p", "param", "params", "c", "compute", "o", "output", "m", "matmul", "r", "reduce"),
    *("policy", "rules", "loss_scale", "select", "selector", "optional", "type"),
    *("init", "period", "factor", "min", "max", "backoff", "hysteresis", "counter"),
    *("f16", "bf16", "full", "half", "float64", "highest", "BF16_BF16_F32_X3", "16-mixed"),
    *("dynamic", "static", "none", "noop", "auto", "op.exp", "LayerNorm", "*/head/*", "?"),
    *(";", ":", ",", "=", "|", "**", "2**15", "2**-126", "1e40", "-1", "\n", "\u2028", "\x85"),
)
OBJECTS = (
    *(None, True, False, 0, 1, -1, 2**15, 10**400, 0.5, math.inf, math.nan, 1e-45, -0.0, 2.0**126),
    *(jnp.bfloat16, np.float32, np.dtype("float16"), int, float, "", b"f16", 1j, object, (), {}),
    *(np.float32(4), np.array(8.0), np.array([1.0, 2.0]), np.array("f16"), jmpx.get_policy("f16")),
    *(jmpx.types.Rule("*/a", compute="f32"), jmpx.get_policy_map("f16; A: full")),
    *(jmpx.StaticLossScale(2), jmpx.DynamicLossScale(8, period=3), jmpx.NoOpLossScale()),
)
LONGEST = 2048  # bytes of an input


class Finding(Exception):
    """What a parser may not do."""


class Input(NamedTuple):
    """A parser, and what it is given."""

    parser: str
    spec: Any


class Reader:
    """Reads what an input says, byte by byte; after its end all bytes are 0."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def number(self, below: int) -> int:
        self.at += 1
        return self.data[self.at - 1] % below if self.at <= len(self.data) else 0

    def text(self, length: int) -> str:
        self.at += length
        return self.data[self.at - length : self.at].decode("utf-8", "surrogateescape")

    def word(self) -> str:
        number = self.number(len(WORDS) + 16)
        return WORDS[number] if number < len(WORDS) else self.text(number - len(WORDS))

    def value(self, depth: int) -> Any:
        kind = self.number(6 if depth else 4)
        if kind == 0:
            return self.word()
        if kind == 1:
            return self.text(self.number(64))
        if kind == 2:
            return SEEDS[self.number(len(SEEDS))]
        if kind == 3:
            return OBJECTS[self.number(len(OBJECTS))]
        if kind == 4:
            return [self.value(depth - 1) for _ in range(self.number(4))]
        return self.mapping(depth - 1)

    def mapping(self, depth: int) -> dict[Any, Any]:
        odd = self.number(16) == 15
        keys = (self.value(1) if odd else self.word() for _ in range(self.number(6)))
        return {key: self.value(depth) for key in keys if _is_hashable(key)}


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def read(data: bytes) -> Input:
    """Returns what some bytes stand for."""
    reader = Reader(data)
    parser = list(PARSERS)[reader.number(len(PARSERS))]
    form = reader.number(4)
    if form == 3:
        return Input(parser, reader.value(3))
    return Input(parser, reader.mapping(3) if form == 2 else reader.text(LONGEST))


def check(found: Input) -> bool:
    """Gives an input to its parser; returns whether it was understood.

    Raises:
        Finding: if the parser does what it may not.
    """
    parse = PARSERS[found.parser]
    try:
        value = parse(found.spec)
    except (ValueError, TypeError) as error:
        check_sentence(str(error), found.spec)
        return False
    for name, form in (("string", str(value)), ("dict", value.to_dict())):
        again = parse(form)
        if not (type(again) is type(value) and again == value and str(again) == str(value)):
            raise Finding(f"its {name}, {form!r}, gives {str(again)!r}")
    if json.loads(json.dumps(value.to_dict())) != value.to_dict():
        raise Finding(f"JSON does not keep {value.to_dict()}")
    if pickle.loads(pickle.dumps(value)) != value:
        raise Finding(f"pickle does not keep {value}")
    if isinstance(found.spec, str):
        check_string(found, value)
    return True


def check_string(found: Input, value: Any) -> None:
    """Holds a string that was understood to what it means elsewhere."""
    if PARSERS[found.parser](f" \t{found.spec} ") != value:
        raise Finding("white space around it changes its value")
    if found.parser == "get_policy" and jmpx.get_policy_map(found.spec) != jmpx.PolicyMap(value):
        raise Finding("as a policy map it means something else")
    if found.parser == "get_policy_map":
        if jmpx.get_mixed_precision(found.spec).policy_map != value:
            raise Finding("as a mixed precision it means something else")
        rules = [rule.to_dict() for rule in value.rules]
        if jmpx.get_policy_map({"policy": str(value.default), "rules": rules}) != value:
            raise Finding("its rules as dicts mean something else")


_QUOTED = r"""('(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")"""


def check_sentence(message: str, spec: Any) -> None:
    """Holds an error message to one sentence on one line, not much longer than its input."""
    if message.splitlines() != [message] or not message.endswith((".", "?")):
        raise Finding(f"no sentence: {message!r}")
    if re.search(r"[.?!] [A-Z]", re.sub(_QUOTED, "", message)):
        raise Finding(f"several sentences: {message!r}")
    if len(message) > 1500 + 4 * len(repr(spec)):
        raise Finding(f"a message of {len(message)} characters for {len(repr(spec))}")
    found = re.search(rf"{_QUOTED} at position (\d+) of [a-z ]+ {_QUOTED}", message)
    if found is None or message.startswith("Duplicate key") or "..." in found[1]:
        return  # "Duplicate key" names the long key; "..." stands for the middle of a long word
    word, whole = ast.literal_eval(found[1]), ast.literal_eval(found[3])
    if not whole[int(found[2]) :].lower().startswith(word.lower()):
        raise Finding(f"another position: {message!r}")


def seeds() -> list[bytes]:
    """Returns the inputs to begin with: each string, for each parser, and some mappings."""
    texts = [bytes([n, 0]) + text.encode() for n in range(len(PARSERS)) for text in SEEDS]
    return [*texts, *(bytes([n, 2, n, 3, *range(40 * n, 40 * n + 30)]) for n in range(5))]


def signature(error: Exception) -> str:
    """Returns what findings of one cause have in common."""
    frame, where = error.__traceback__, ""
    while frame is not None:
        name = Path(frame.tb_frame.f_code.co_filename).name
        where, frame = f"{name}:{frame.tb_lineno}", frame.tb_next
    words = re.sub(r"""'[^']*'|"[^"]*"|\d+""", "", str(error))[:40]
    return f"{type(error).__name__} {where} {words}"


class Findings:
    """The first input of each cause, which are kept in a file at once."""

    def __init__(self, path: Path) -> None:
        self.path, self.known = path, set()

    def add(self, error: Exception, found: Input) -> None:
        key = f"{found.parser} {signature(error)}"
        if key not in self.known:
            self.known.add(key)
            with self.path.open("a") as file:
                file.write(json.dumps(f"{found.parser} of {found.spec!r}: {error!r}") + "\n")

    def run(self, data: bytes) -> None:
        """Runs one input, as atheris calls it."""
        found = read(data)
        try:
            check(found)
        except Exception as error:
            self.add(error, found)


# With atheris, in a process of its own, because libFuzzer ends the process when it is done.


def fuzz(arguments: list[str]) -> None:
    """Runs in the process of atheris, and does not return."""
    folder, options = Path(arguments[0]), arguments[1:]
    warnings.simplefilter("error")
    engine: Any = importlib.import_module("atheris")
    engine.Setup([sys.argv[0], *options], Findings(folder / "findings").run)
    engine.Fuzz()


def guided(folder: Path, minutes: float, seed: int) -> dict[str, int]:
    """Runs atheris; returns how many inputs it ran, and how much of jmpx they covered."""
    corpus, words, seconds = folder / "corpus", folder / "words", math.ceil(60 * minutes)
    words.write_text("".join(f'"{_escaped(word)}"\n' for word in WORDS))
    options = ["-print_final_stats=1", f"-max_len={LONGEST}", f"-seed={seed}", f"-dict={words}"]
    options += [f"-max_total_time={seconds}", "-timeout=10", f"-artifact_prefix={folder}/"]
    command = [sys.executable, __file__, "--guided", str(folder), *options, str(corpus)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output: Any = process.stdout
    began, last = time.monotonic(), deque[str](maxlen=30)
    figures = {"executions": 0, "branches": 0}
    with tqdm(total=seconds, unit="s", desc="atheris") as bar:
        for line in output:
            bar.update(min(seconds, int(time.monotonic() - began)) - bar.n)
            last.append(line)
            for name, pattern in (("executions", r"#(\d+)\s"), ("branches", r"cov: (\d+)")):
                if match := re.search(pattern, line):
                    figures[name] = int(match[1])
            bar.set_postfix(figures, refresh=False)
    if process.wait():
        raise RuntimeError(f"atheris ended with {process.returncode}:\n{''.join(last)}")
    return figures


def _escaped(word: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in word.encode())


def mutated(folder: Path, count: int, seed: int) -> dict[str, int]:
    """Runs inputs that are made of the seeds and the words by chance."""
    rng, findings, known = random.Random(seed), Findings(folder / "findings"), seeds()
    for _ in tqdm(range(count), unit="input", desc="by chance"):
        data = bytearray(rng.choice(known))
        for _ in range(rng.randrange(5)):
            start, length = rng.randrange(len(data)), rng.choice((0, 0, 1, 4))
            new = rng.choice((rng.choice(WORDS).encode(), rng.randbytes(2), b""))
            data[start : start + length] = new if len(data) > 40 or new else b"\0"
        findings.run(bytes(data[:LONGEST]) or b"\0")
    return {"executions": count, "branches": 0}


# Time.


def stretched(found: Input, rng: random.Random) -> Iterator[Callable[[int], Input]]:
    """Yields functions from a number to an input in which one piece of a text is repeated."""
    if not isinstance(found.spec, str):
        return
    cuts = [0, *(m.end() for m in re.finditer(r"[;:,=|*?/._\s-]", found.spec)), len(found.spec)]
    for _ in range(3):
        start, end = sorted(rng.sample(cuts, 2)) if len(cuts) > 1 else (0, len(found.spec))
        if start < end:
            yield lambda n, s=start, e=end: Input(
                found.parser,
                found.spec[:s] + found.spec[s:e] * math.ceil(n / (e - s)) + found.spec[e:],
            )


def seconds(found: Input) -> float:
    """Returns the processor's time for one input, the least of a few."""
    times = []
    while not times or (len(times) < 3 and min(times) > 0.02):
        start = time.process_time()
        check(found)
        times.append(time.process_time() - start)
    return min(times)


def check_time(make: Callable[[int], Input], length: int = 4_000) -> None:
    """Holds a text that is four times as long to less than eight times the time."""
    short, long = seconds(make(length)), seconds(make(4 * length))
    if long > 8 * short and long > 0.05:
        raise Finding(f"{short:.3f} s for {length} characters, {long:.3f} s for four times as many")


def time_all(folder: Path, inputs: list[bytes], seed: int) -> int:
    """Repeats pieces of each input; returns the number of texts that were timed."""
    rng, findings, count = random.Random(seed), Findings(folder / "findings"), 0
    for data in tqdm(inputs, unit="input", desc="time"):
        for make in stretched(read(data), rng):
            count += 2
            try:
                check_time(make)
            except Exception as error:
                findings.add(error, make(100))
    return count


def main(arguments: list[str] | None = None) -> None:
    parser = reliability.parser(__doc__)
    parser.add_argument("--minutes", type=float, default=10, help="with atheris")
    parser.add_argument("--inputs", type=int, default=3_000, help="without it, with --small")
    args = parser.parse_args(arguments)
    seed = random.randrange(2**31) if args.seed is None else args.seed
    if not args.small and importlib.util.find_spec("atheris") is None:
        parser.error("atheris is missing: pip install 'jmpx[fuzz]', or give --small")
    warnings.simplefilter("error")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "corpus").mkdir()
        for number, data in enumerate(seeds()):
            (folder / "corpus" / str(number)).write_bytes(data)
        if args.small:
            figures = mutated(folder, args.inputs, seed)
        else:
            figures = guided(folder, args.minutes, seed) | {"minutes": args.minutes}
        corpus = [path.read_bytes() for path in sorted((folder / "corpus").iterdir())]
        corpus = random.Random(seed).sample(corpus, 20) if args.small else corpus
        figures |= {"corpus": len(corpus), "timed": time_all(folder, corpus, seed)}
        found = folder / "findings"
        failures = (
            [json.loads(line) for line in found.read_text().splitlines()]
            if (found.exists())
            else []
        )
    reliability.keep(
        args.out, "fuzz_strings", "parsers of strings and mappings under a coverage-guided fuzzer",
        times="{executions} inputs" + ("" if args.small else " in {minutes} minutes"),
        outcome="each a value that round-trips, or one sentence; {timed} long texts in linear time",
        figures=figures, failures=failures, seed=seed, small=args.small,
    )  # fmt: skip
    sys.exit(bool(failures))


if __name__ == "__main__":
    if "--guided" in sys.argv:
        fuzz(sys.argv[sys.argv.index("--guided") + 1 :])
    main()
