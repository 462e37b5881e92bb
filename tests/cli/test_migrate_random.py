"""`migrate`, random programs: each behaves as before or carries a comment; a second run is idle.

The libraries are small models, so that a program is a list of what it has computed.
"""

import builtins
import dataclasses
import re
import textwrap
import types
import typing

import pytest
from hypothesis import example, given, settings, strategies as st

pytest.importorskip("libcst", reason="libcst is in the migrate extra")

# Private: thousands of programs, without their files.
from jmpx._migrate.edits import COMMENT, migrate_source

NAMES = "all_finite get_policy half_dtype".split()
HAIKU = {"set_policy": "set_policy", "get_policy": "policy_of"}


class Policy:
    pass


@dataclasses.dataclass(frozen=True, repr=False)
class Scale:
    number: float
    steps: int = 2000

    def __repr__(self):
        return f"scale {self.number} {self.steps}"

    def after(self):
        return dataclasses.replace(self, number=self.number / 2)


class Flax(Scale):
    """Flax's DynamicScale."""

    def __init__(self, growth_interval=2000, scale=65536.0, number=None, steps=None):
        super().__init__(number or scale, steps or growth_interval)

    scale = property(lambda self: self.number)
    growth_interval = property(lambda self: self.steps)

    def value_and_grad(self, fun, has_aux=False, axis_name=None):
        return lambda x: (self.after(), True, (fun(x), has_aux, axis_name), f"d{x}")


class Jmpx(Scale):
    """jmpx's DynamicLossScale."""

    def __init__(self, loss_scale=2.0**15, period=2000, number=None, steps=None):
        super().__init__(number or loss_scale, steps or period)

    loss_scale = property(lambda self: self.number)
    period = property(lambda self: self.steps)

    def scale(self, x):
        return x


def value_and_grad(fun, scale, has_aux=False, over=None, policy=None):
    assert policy == "full" and isinstance(scale, Jmpx)
    return lambda x: ((fun(x), has_aux, over), scale.after(), True, f"d{x}")


def functions(names):
    return {name: (lambda *args, _=name: (_, *args)) for name in names}


def module(**names):
    return types.SimpleNamespace(**names)


def libraries(migrated):
    """Returns the modules that a program may import; a migrated one has jmpx only."""
    haiku = module(Linear="Linear", mixed_precision=module(**functions(HAIKU.values())))
    haiku.mixed_precision.get_policy = haiku.mixed_precision.policy_of
    flax = module(training=module(dynamic_scale=module(DynamicScale=Flax)))
    jmp = module(Policy=Policy, **functions(NAMES))
    mpx = module(**functions(["cast_tree"]))
    if not migrated:
        return {"jmp": jmp, "mpx": mpx, "haiku": haiku, "flax": flax}
    new = {**vars(jmp), **functions(HAIKU.values()), "mpx": mpx, "Over": lambda axis: axis}
    new |= {"DynamicLossScale": Jmpx, "value_and_grad": value_and_grad}
    return {"jmpx": module(**new), "haiku": haiku, "flax": flax}


def behaviour(text, migrated):
    """Returns what a program has shown, and the error with which it ended."""
    shown = []
    known = libraries(migrated)

    def find(name, globals=None, locals=None, fromlist=(), level=0):
        if name.partition(".")[0] not in known:
            return __import__(name, globals, locals, fromlist, level)
        root, *parts = name.split(".")
        found = known[root]
        for part in parts:
            found = getattr(found, part)
        return found if fromlist else known[root]

    def show(*values):
        shown.append(
            re.sub(" at 0x[0-9a-f]+", "", repr(values))
        )  # a class's object has no other name

    names = {**vars(builtins), "__import__": find, "print": show}
    here = {"__builtins__": names, "typing": typing, "__name__": "program"}
    try:
        exec(compile(text, "program", "exec", dont_inherit=True), here)
    except Exception as error:
        shown.append(type(error).__name__)
    return shown


# A program imports the libraries in one of these ways, and has some of the lines, in blocks.
JMP = """
import jmp
import jmp, os
import jmp as jmp
import jmp as j; jmp = j
if print: import jmp
try: import jmp
except ImportError: jmp = None
+
if not print: jmp = None
else: import jmp
+
def load():
    global jmp
    import jmp
load()
"""
JMP_LINES = """
print(jmp.get_policy("c=f16"))
print(f"{jmp.half_dtype()}", [jmp.all_finite(x) for x in "ab"])
def f(x: "jmp.Policy"): print(typing.get_type_hints(f))
f(1)
+
def f(jmpx): print(jmpx, jmp.half_dtype())
f(2)
+
jmpx = 3; print(jmpx)
def f(jmp): print(jmp)
f(4)
+
print(globals()["jmp"].half_dtype())
class A: print(jmp.half_dtype()); import jmp as own; print(own.half_dtype())
print([jmp for jmp in "ab"], jmp.half_dtype())
print((lambda jmpx: jmp.get_policy(jmpx))(5))
def f():
    import jmp; print(jmp.half_dtype())
f()
+
match [6]:
    case [jmp]: print(jmp)
+
jmp = jmp; print(jmp.half_dtype())
"""
OTHER = """
import haiku as hk, mpx; from jmp import half_dtype as h; mp = hk.mixed_precision
import haiku as hk; from haiku import mixed_precision as mp; import mpx; from jmp import (half_dtype as h)
import mpx; from jmp import half_dtype as h; import haiku as hk; import haiku.mixed_precision as mp
try: from haiku import mixed_precision as mp; import mpx; import haiku as hk; from jmp import half_dtype as h
except ImportError: mp = None
+
import haiku as hk
from jmp import (
    # below
    half_dtype as h,  # inside
)
import mpx  # behind
from haiku import mixed_precision as mp  # behind
"""  # noqa: E501
OTHER_LINES = """
print(h())
print(hk.mixed_precision.get_policy(hk.Linear))
print(hk.mixed_precision.set_policy(hk.Linear, 1)); print(hk.Linear)
print(mp.get_policy(7))
handed = mp; print(handed.get_policy(8))
def f(): from haiku.mixed_precision import get_policy, set_policy; print(get_policy(9))
f()
+
print(mpx.cast_tree(10))
def f(): from mpx import cast_tree; import jmp; print(cast_tree(10), jmp.half_dtype())
f()
+
def f(jmpx): print(mp.get_policy(jmpx))
f(11)
"""
FLAX = """
from flax.training.dynamic_scale import DynamicScale as NEW
from flax.training import dynamic_scale as lib; import flax
import flax.training.dynamic_scale
try: from flax.training.dynamic_scale import DynamicScale
except ImportError: DynamicScale = None
+
from flax.training.dynamic_scale import (
    DynamicScale,  # inside
    # below
)
"""
SCALE_LINES = """
ds = NEW()
ds = NEW(scale=8.0, growth_interval=5)
ds = NEW(4)
ds = (lambda new: new())(NEW)
dynamic_scale = ds
dynamic_scale = NEW(scale=16.0)
def f(x: "NEW"): print(len(typing.get_type_hints(f)))
f(11)
+
ds = type("Other", (), {"scale": 12, "value_and_grad": lambda *_: lambda x: (ds, x, 13, 14)})()
g = ds.value_and_grad(abs)
g = ds.value_and_grad(abs)
g = dynamic_scale.value_and_grad(fun=abs, axis_name="i")
g = lambda x: (15, 16, 17, 18)
g = other = ds.value_and_grad(abs)
ds, finite, loss, grads = g(1)
ds, finite, loss, grads = g(1)
dynamic_scale, finite, loss, grads = g(1)
dynamic_scale, finite, loss, grads = g(1)
ds, _, _, grads = g(1)
ds, i, {0: 0, True: 0}[i], grads = g(1)
print(g(1)[2])
print(*map(g, [1, 2]))
def step(): a, b, c, d = g(1); print(a, b, c, d)
step()
+
ds, finite, loss, grads = ds.value_and_grad(abs, has_aux=True)(1)
dynamic_scale, finite, loss, grads = r = dynamic_scale.value_and_grad(abs)(1)
dynamic_scale, finite, loss, grads = dynamic_scale.value_and_grad(abs)(1)
print(ds, finite, loss, grads)
print(ds, finite, loss, grads)
print(ds.scale, ds.growth_interval)
print(*[dynamic_scale.scale])
print(dynamic_scale, finite, loss, grads)
"""
OPEN = ("def f", "def step", "def load", "try", "if not", "match", "import haiku as hk\n")
OPEN += ("from flax.training.dynamic_scale import (",)
FIRST = """
dynamic_scale = ds = NEW(scale=4.0); finite, loss, grads = 1, 2, 3; g = lambda x: (ds, 4, 5, 6)
ds = NEW(scale=4.0); dynamic_scale = NEW(); g = ds.value_and_grad(abs); finite = loss = grads = g
ds = NEW(); dynamic_scale = NEW(); g = ds.value_and_grad(abs); finite = loss = grads = 1
"""


def statements(table):
    """Splits a table: a statement is a line, or the lines from one that opens to a plus."""
    found: list[str] = []
    several = False
    for line in table.strip().splitlines():
        if several and line != "+":
            found[-1] += f"\n{line}"
        elif line != "+":
            found.append(line)
        several = line != "+" and (several or f"{line}\n".startswith(OPEN))
    return found


WRAPS = ("{}", "{}", "if print:\n{}", "for _ in 'ab':\n{}", "try:\n{}\nfinally: pass")
WRAPS += ("if not print: pass\nelse:\n{}", "for _ in 'ab':\n{}", "class Class:\n{}")


@st.composite
def blocks(draw, lines, depth=1):
    """Draws statements, some of them in blocks."""
    body = draw(st.lists(st.sampled_from(lines), min_size=1, max_size=4))
    if depth and draw(st.booleans()):
        body.insert(draw(st.integers(0, len(body))), draw(blocks(lines, depth - 1)))
    wrap, text = draw(st.sampled_from(WRAPS)), "\n".join(body)
    return text if wrap == "{}" else wrap.format(textwrap.indent(text, "    "))


@st.composite
def programs(draw):
    """Draws a program of JMP, of Haiku and MPX, or of Flax, or of two of them."""
    tables = [(JMP, JMP_LINES), (OTHER, OTHER_LINES), (FLAX, SCALE_LINES), (FLAX, SCALE_LINES)]
    chosen = draw(st.lists(st.sampled_from(tables), min_size=1, max_size=2, unique=True))
    heads = [draw(st.sampled_from(statements(head))) for head, _ in chosen]
    lines = [line for _, table in chosen for line in statements(table)]
    body = draw(blocks(lines))
    if any(head is FLAX for head, _ in chosen):
        body = draw(st.sampled_from(statements(FIRST))) + "\n" + body
        if draw(st.booleans()):
            body = f"def main():\n{textwrap.indent(body, '    ')}\nmain()"
    text = "\n".join([*heads, body, ""])
    new = "lib.DynamicScale" if "as lib" in text else "DynamicScale"
    new = "flax.training.dynamic_scale.DynamicScale" if "import flax.t" in text else new
    return draw(st.sampled_from(["", "\ufeff"])) + text.replace(" as NEW", "").replace("NEW", new)


ENDS = st.sampled_from(["\n", "\r\n", "\r"])


OBJECT = """
from flax.training.dynamic_scale import DynamicScale
ds = type("Other", (), {"scale": 12, "value_and_grad": lambda *_: lambda x: (ds, x, 13, 14)})()
g = lambda x: (ds, 4, 5, 6)
print(*map(g, [1, 2]))
"""

EXAMPLES = 300 if settings.get_current_profile_name() == "new_draws" else 30


@example("import mpx, jmp\nmatch [6]:\n    case [jmp]: print(jmp)\nprint(jmp.Policy)\n", "\n")
@example(OBJECT, "\n")
@given(programs(), ENDS)
@settings(max_examples=EXAMPLES, deadline=None)
def test_a_program_behaves_as_before_or_carries_a_comment(text, end):
    migrated = migrate_source(text.replace("\n", end))
    plain = migrated.text.replace(end, "\n")
    assert migrated.text == plain.replace("\n", end)
    assert plain.count("\ufeff") == text.count("\ufeff")
    assert (COMMENT in plain) == bool(migrated.marks)
    for comment in ("# inside", "# below", "# behind"):
        assert plain.count(comment) >= (comment in text)
    plain = plain.removeprefix("\ufeff")
    compile(plain, "program", "exec", dont_inherit=True)
    if not migrated.marks:
        assert behaviour(plain, True) == behaviour(text.removeprefix("\ufeff"), False)
    again = migrate_source(migrated.text)
    assert (again.text, again.marks) == (migrated.text, migrated.marks)
