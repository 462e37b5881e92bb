"""`python -m jmpx migrate`: programs of other libraries, before and after; both give the same."""

import operator
import os
import re
import stat
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import error_of, run_jmpx

import jmpx
import jmpx.mpx

libcst = pytest.importorskip("libcst", reason="libcst is in the migrate extra")

# Private: the command tells of whole files; each edit and each name that it knows is tested here.
from jmpx._migrate.edits import COMMENT, migrate_source  # noqa: E402
from jmpx._migrate.names import new_name  # noqa: E402

JMP = """
    DynamicLossScale LossScale NoOpLossScale Policy StaticLossScale all_finite cast_to_full
    cast_to_half get_policy half_dtype select_tree
""".split()  # all of JMP 0.0.4's names
# What is rewritten: the library, its program, the program afterwards.
EDITS = {
    "jmp": (
        """
        import jmp  # as ever
        policy = jmp.get_policy("c=bf16")
        scale = getattr(jmp, f"{kind}LossScale")
        def f(jmp, x):
            return jmp.get_policy(x), x.jmp, g(jmp=jmp)
        """,
        """
        import jmpx  # as ever
        policy = jmpx.get_policy("c=bf16")
        scale = getattr(jmpx, f"{kind}LossScale")
        def f(jmp, x):
            return jmp.get_policy(x), x.jmp, g(jmp=jmp)
        """,
    ),
    "jmp under another name": (
        "import jmp as j\nj.half_dtype()\n",
        "import jmpx as j\nj.half_dtype()\n",
    ),
    "names of jmp": (
        "from jmp import Policy, all_finite as finite\nPolicy(), finite(x)\n",
        "from jmpx import Policy, all_finite as finite\nPolicy(), finite(x)\n",
    ),
    "mpx": (
        "import mpx\nmpx.filter_grad(f, scaling)\n",
        "import jmpx.mpx as mpx\nmpx.filter_grad(f, scaling)\n",
    ),
    "names of mpx": ("from mpx import cast_tree\n", "from jmpx.mpx import cast_tree\n"),
    "hk.mixed_precision": (
        "import haiku as hk\nhk.mixed_precision.set_policy(hk.Linear, p)\n",
        "import haiku as hk\nimport jmpx\n\njmpx.set_policy(hk.Linear, p)\n",
    ),
    "mixed_precision": (
        "import jmp\nfrom haiku import mixed_precision as mp\nwith mp.push_policy(A, p): pass\n",
        "import jmpx\nwith jmpx.push_policy(A, p): pass\n",
    ),
    "a string has jmp": (
        "import jmp\ndef f(x: 'jmp.Policy'): return jmp.half_dtype()\n",
        "import jmpx as jmp\ndef f(x: 'jmp.Policy'): return jmp.half_dtype()\n",
    ),
    "two bindings": (
        "try: import jmp\nexcept ImportError: jmp = None\nx = jmp and jmp.half_dtype()\n",
        "try: import jmpx as jmp\nexcept ImportError: jmp = None\nx = jmp and jmp.half_dtype()\n",
    ),
    "jmpx is another thing": (
        "import jmp\ndef f(jmpx): return jmp.get_policy(jmpx)\n",
        "import jmpx as jmp\ndef f(jmpx): return jmp.get_policy(jmpx)\n",
    ),
    "a name in global": (
        "def f():\n    global jmp\n    import jmp\nf()\njmp.half_dtype()\n",
        "def f():\n    global jmp\n    import jmpx as jmp\nf()\njmp.half_dtype()\n",
    ),
    "a policy of a class": (
        "from haiku.mixed_precision import get_policy\n",
        "from jmpx import policy_of as get_policy\n",
    ),
    "comments within an import": (
        "from haiku.mixed_precision import (\n    set_policy,  # one\n    # two\n    other,\n)\n",
        "# one\n# two\nfrom jmpx import set_policy\nfrom haiku.mixed_precision import other\n",
    ),
    "one line": ("from jmp import Policy; Policy()\n", "from jmpx import Policy; Policy()\n"),
    "a byte order mark": ("\ufeffimport jmp\n", "\ufeffimport jmpx\n"),
    "CR": ("import jmp\rjmp.half_dtype()\r", "import jmpx\rjmpx.half_dtype()\r"),
    "a loop, and another branch": (
        """
        from flax.training.dynamic_scale import DynamicScale
        def step(ds: DynamicScale):
            if ds:
                g = ds.value_and_grad(fun=f)
                for p in ps:
                    ds, ok, loss, grads = g(p)
            else:
                g = jax.grad(f)
                grads = g(p)
        """,
        """
        from jmpx import DynamicLossScale as DynamicScale
        import jmpx

        def step(ds: DynamicScale):
            if ds:
                g = jmpx.value_and_grad(f, ds, policy="full")
                for p in ps:
                    loss, ds, ok, grads = g(p)
            else:
                g = jax.grad(f)
                grads = g(p)
        """,
    ),
    "DynamicScale": (
        """
        from flax.training import dynamic_scale as lib
        scale: lib.DynamicScale = lib.DynamicScale(growth_interval=10, minimum_scale=1.0)
        def step(state):
            dynamic_scale = state.dynamic_scale
            if dynamic_scale:
                grad_fn = dynamic_scale.value_and_grad(
                    loss_fn, has_aux=True, axis_name="batch"
                )
                dynamic_scale, finite, aux, grads = grad_fn(state.params)
            return dynamic_scale.scale
        """,
        """
        import jmpx

        scale: jmpx.DynamicLossScale = jmpx.DynamicLossScale(2.0**16, period=10, min_loss_scale=1.0)
        def step(state):
            dynamic_scale = state.dynamic_scale
            if dynamic_scale:
                grad_fn = jmpx.value_and_grad(
                    loss_fn, dynamic_scale, has_aux=True, over="batch", policy="full"
                )
                aux, dynamic_scale, finite, grads = grad_fn(state.params)
            return dynamic_scale.loss_scale
        """,
    ),
    "DynamicScale in one line": (
        """
        from flax.training.dynamic_scale import DynamicScale
        dynamic_scale = DynamicScale(scale=8.0)
        dynamic_scale, finite, loss, grads = dynamic_scale.value_and_grad(f)(params)
        """,
        """
        from jmpx import DynamicLossScale as DynamicScale
        import jmpx

        dynamic_scale = DynamicScale(loss_scale=8.0)
        loss, dynamic_scale, finite, grads = jmpx.value_and_grad(f, dynamic_scale, policy="full")(params)
        """,  # noqa: E501
    ),
}
HEAD = "from flax.training.dynamic_scale import DynamicScale\nds = DynamicScale(scale=8.0)\n"
# What is left as it is: the program, and what the comment above its last line says.
LEFT = {
    "positional DynamicScale": (
        "import flax.training.dynamic_scale as d\nx = f(dynamic_scale.value_and_grad(g))\n",
        "write (loss, dynamic_scale, grads_finite, grads) = jmpx.value_and_grad",
    ),
    "argnums": (
        "dynamic_scale, ok, v, g = dynamic_scale.value_and_grad(f, argnums=1)(x)\n",
        "write (loss, dynamic_scale, grads_finite, grads) = jmpx.value_and_grad",
    ),
    "no import of Flax's class": (
        "from flax import linen\nf(*dynamic_scale.scale)\n",
        "write loss_scale for scale if",
    ),
    "a module that is handed on": (
        "from haiku import mixed_precision\nf(mixed_precision)\n",
        "the names of haiku.mixed_precision are in jmpx now",
    ),
    "a module under its full name": (
        "import haiku.mixed_precision\nx = haiku.mixed_precision\n",
        "the names of haiku.mixed_precision are in jmpx now",
    ),
    "star": ("from jmp import *\n", "import the names"),
    "another mpx": ("import mpx.utils\nimport mpx\n", None),
    "perhaps MPX": (
        "from x import y\nimport mpx; mpx.scaled(f), mpx.solve(g)\n",
        "is this the library with mpx.scaled",
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_and_no_second_one(name):
    before, after = map(textwrap.dedent, EDITS[name])
    migrated = migrate_source(before)
    assert migrated.text == after
    assert migrated.edits > 0 and migrated.marks == ()
    again = migrate_source(after)
    assert (again.text, again.edits) == (after, 0)


@pytest.mark.parametrize("name", LEFT)
def test_what_is_not_certain_has_a_comment_and_no_second_one(name):
    before, words = LEFT[name]
    migrated = migrate_source(before)
    lines = before.splitlines(keepends=True)
    if words is None:
        assert migrated.text == before and migrated.marks == ()
        return
    ((line, comment),) = migrated.marks
    assert line == len(lines) and comment.startswith(words)
    assert migrated.text == "".join([*lines[:-1], f"{COMMENT}{comment}\n", lines[-1]])
    assert migrate_source(migrated.text) == migrated


HAIKU = {  # each way to write a policy of a class
    "dotted": "import haiku as hk\nhk.mixed_precision.set_policy(hk.Linear, p)\n",
    "module": "from haiku import mixed_precision as mp\nmp.get_policy(A)\n",
    "module alias": "import haiku.mixed_precision as mp\nwith mp.push_policy(A, p): pass\n",
    "name": "from haiku.mixed_precision import set_policy, current_policy\nset_policy(A, p)\n",
    "handed on": "from haiku import mixed_precision\nf(mixed_precision)\n",
    "star": "from haiku.mixed_precision import *\n",
}
STAYS = {  # imports of which one stays, with the names that jmpx has not
    "import jmp\nfrom jmp._src.policy import _cast\njmp.Policy\n": "jmp._src is not in",
    "from jmp import Policy\nimport jmp._src.policy\n": "jmp._src is not in",
    "import jmp as j\nimport jmp\nj.Policy, jmp.new, j.other\n": "jmp.new, jmp.other are not in",
    "from jmp import Policy, new\nfrom jmp import other\n": "jmp.new, jmp.other are not in",
}


@pytest.mark.parametrize("stays", STAYS)
@pytest.mark.parametrize("haiku", HAIKU)
def test_where_jmp_stays_haikus_policies_stay_and_one_comment_names_what_is_unknown(haiku, stays):
    migrated = migrate_source(f"{stays}{HAIKU[haiku]}")
    ((line, words),) = migrated.marks
    assert line == 1 and migrated.edits == 0
    assert words.startswith("is this the library with jmp.Policy? ") and STAYS[stays] in words
    assert migrated.text == f"{COMMENT}{words}\n{stays}{HAIKU[haiku]}"
    assert migrate_source(migrated.text) == migrated
    alone = migrate_source(f"import jmp\njmp.Policy\n{HAIKU[haiku]}")
    assert alone.edits > 1 and "import jmpx" in alone.text


@pytest.mark.parametrize(
    "made",
    [
        "self.own = DynamicScale(scale=4.0)\n",
        "own = rep(DynamicScale(scale=4.0))\nself.own = own\n",
        "class State:\n    own: DynamicScale | None\n",
        "self = State(own=DynamicScale(scale=4.0))\n",
    ],
)
def test_a_number_of_what_was_given_a_scale_somewhere_has_a_comment(made):
    migrated = migrate_source(HEAD + made + "x = self.own.scale\n")
    ((_, words),) = migrated.marks
    assert words == "write loss_scale for scale if this is a jmpx.DynamicLossScale"
    assert migrated.text.endswith("\nx = self.own.scale\n")


UNPACKED = "ds, ok, loss, grads = g(p)\n"


@pytest.mark.parametrize(
    "uses",
    [
        "x = g(p)[2]\n" + UNPACKED,
        "h(g)\n" + UNPACKED,
        "h = g\n" + UNPACKED,
        "for p in ps:\n    ds, ok, loss, grads = g(p)\n    g = other\n",
        "if p:\n    g = other\n" + UNPACKED,
        "try:\n    g = other\nfinally:\n    " + UNPACKED,
        "def h():\n    global g\n    g = other\n" + UNPACKED,
        "def h(x: 'g'): pass\n" + UNPACKED,
        "del g\n",
        "ds, *ok, loss, grads = g(p)\n",
        "loss, ok, loss, grads = g(p)\n",
        "ds, i, a[i], grads = g(p)\n",
        "a = ds, ok, loss, grads = g(p)\n",
        "a, b, c = g(p)\n",
        "",
    ],
)
def test_a_gradient_function_with_another_use_is_left_at_each_place(uses):
    text = HEAD + "g = ds.value_and_grad(f)\n" + uses
    migrated = migrate_source(text)
    ((line, words),) = migrated.marks
    assert line == 3 and words.startswith("write (loss, dynamic_scale")
    assert migrated.text.split("g = ds.", 1)[1] == text.split("g = ds.", 1)[1]
    assert migrate_source(migrated.text).text == migrated.text


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_comment_has_the_place_and_the_line_end_of_its_line(end):
    first = "from haiku import mixed_precision as mp"
    lines = [first, "\f", 's = "\x1c"', f's = "{COMMENT}in a string"', "if s:"]
    words = "the names of haiku.mixed_precision are in jmpx now"
    before = end.join([*lines, "    f(mp)", ""])
    after = end.join([*lines, f"    {COMMENT}{words}", "    f(mp)", ""])
    migrated = migrate_source(before)
    assert migrated.text == after and migrated.marks == ((6, words),)
    assert migrate_source(after) == migrated


def test_a_link_stays_one(tmp_path, capsys):
    (tmp_path / "real").write_text("import jmp\n")
    (tmp_path / "link.py").symlink_to(tmp_path / "real")
    assert lines_of(capsys, tmp_path / "link.py", "--write")[0] == 0
    assert (tmp_path / "link.py").is_symlink()
    assert (tmp_path / "real").read_text() == "import jmpx\n"


def test_every_new_name_is_there():
    for name in (*(f"jmp.{name}" for name in JMP), *(f"mpx.{name}" for name in jmpx.mpx.__all__)):
        new = new_name(name)
        assert new is not None and operator.attrgetter(new.removeprefix("jmpx."))(jmpx) is not None


# The same program before and after, in the library that it was written for and in jmpx.

JMP_STEP = """
import jmp, jax, jax.numpy as jnp
policy = jmp.get_policy("params=float32,compute=float16,output=float32")
def loss_fn(params, loss_scale, x, y):
    params, x = policy.cast_to_compute((params, x))
    loss = jnp.mean((policy.cast_to_output(jnp.tanh(x @ params)) - y) ** 2)
    return loss_scale.scale(loss)
def step(params, loss_scale, x, y):
    grads = policy.cast_to_param(jax.grad(loss_fn)(params, loss_scale, x, y))
    grads = loss_scale.unscale(grads)
    finite = jmp.all_finite(grads)
    return jmp.select_tree(finite, params - grads, params), loss_scale.adjust(finite)
def run(params, x, y):
    loss_scale = jmp.DynamicLossScale(jnp.float32(2.0**20), period=2)
    for _ in range(8):
        params, loss_scale = step(params, loss_scale, x, y)
    return params, loss_scale.loss_scale
"""
FLAX_STEP = """
from flax.training.dynamic_scale import DynamicScale
import jax, jax.numpy as jnp
def run(params, x, y):
    def loss_fn(params):
        h = jnp.tanh(x.astype(jnp.float16) @ params.astype(jnp.float16))
        return jnp.mean((h.astype(jnp.float32) - y) ** 2)
    dynamic_scale = DynamicScale(scale=2.0**20)
    for _ in range(8):
        grad_fn = dynamic_scale.value_and_grad(loss_fn)
        dynamic_scale, finite, loss, grads = grad_fn(params)
        params = jnp.where(finite, params - grads, params)
    return params, dynamic_scale.scale
"""
MPX_STEP = """
import mpx, jax, jax.numpy as jnp
def run(params, x, y):
    def loss_fn(params, x):
        return jnp.mean((jnp.tanh(x @ params).astype(jnp.float32) - y) ** 2)
    scaling = mpx.DynamicLossScaling(jnp.float32(2.0**14), jnp.float32(1.0))
    for _ in range(8):
        scaling, finite, grads = mpx.filter_grad(loss_fn, scaling)(params, x)
        params = mpx.select_tree(finite, params - grads, params)
    return params, scaling.loss_scaling
"""


@pytest.mark.parametrize(
    ("library", "program"), [("jmp", JMP_STEP), ("flax", FLAX_STEP), ("mpx", MPX_STEP)]
)
@pytest.mark.filterwarnings("ignore")  # those of the other libraries
def test_a_migrated_step_gives_the_same_bits(library, program, standard_promotion):
    pytest.importorskip(library, reason=f"{library} is in the bench extra")
    after = migrate_source(program)
    assert after.marks == () and after.edits
    x, w = jax.random.normal(jax.random.key(0), (16, 4)), jnp.array([[0.5], [-1.0], [2.0], [0.1]])
    results = []
    for text in program, after.text:
        namespace = {}
        exec(text, namespace)
        results.append(namespace["run"](jnp.zeros((4, 1)), x, jnp.tanh(x @ w)))
    for old, new in zip(*results, strict=True):
        np.testing.assert_array_equal(old, new)
    assert float(results[0][1]) < 2.0**20 and jnp.any(results[0][0] != 0)


# The command


def lines_of(capsys, *arguments):
    code = run_jmpx("migrate", *map(str, arguments))
    return code, capsys.readouterr()


def test_it_shows_a_diff_and_writes_nothing_unless_told(tmp_path, capsys):
    program = tmp_path / "train.py"
    program.write_text("import jmp\npolicy = jmp.get_policy('bf16')\nx = 1\n")
    program.chmod(0o755)
    code, printed = lines_of(capsys, tmp_path)
    assert code == 0 and printed.out.endswith(
        "1 file, 2 edits, 0 left to do; nothing written (--write writes)\n"
    )
    assert f"--- {program}\n" in printed.out and "\n-import jmp\n" in printed.out
    assert program.read_text().startswith("import jmp\n")
    code, printed = lines_of(capsys, program, "--write")
    assert code == 0 and "2 edits, 0 left to do; 1 written" in printed.out
    assert program.read_text() == "import jmpx\npolicy = jmpx.get_policy('bf16')\nx = 1\n"
    assert stat.S_IMODE(program.stat().st_mode) == 0o755
    assert os.listdir(tmp_path) == ["train.py"]
    code, printed = lines_of(capsys, program)
    assert printed.out == "1 file, 0 edits, 0 left to do; nothing written (--write writes)\n"


def test_it_keeps_line_ends_and_leaves_what_it_cannot_read(tmp_path, capsys):
    (tmp_path / "a.py").write_bytes(b"import jmp\r\nx = jmp.half_dtype()\r\n")
    (tmp_path / "b.py").write_bytes(b"import jmp\n  x = (\n")
    (tmp_path / "c.py").write_bytes(b"s = 'jmp \xff'\n")
    code, printed = lines_of(capsys, tmp_path, "--write")
    assert code == 0 and "b.py:1: left as it is, no Python: " in printed.out
    assert (tmp_path / "a.py").read_bytes() == b"import jmpx\r\nx = jmpx.half_dtype()\r\n"
    assert (tmp_path / "b.py").read_bytes() == b"import jmp\n  x = (\n"
    assert (tmp_path / "c.py").read_bytes() == b"s = 'jmp \xff'\n"


@pytest.mark.parametrize("terms", [400, 20_000])  # libcst itself crashes at the second
def test_an_odd_file_is_told_and_the_others_go_on(tmp_path, capsys, terms):
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "gone.py").symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "sum.py").write_text("import jmp\nx = " + " + ".join(["1"] * terms))
    (tmp_path / "z.py").write_text("import jmp\n")
    code, printed = lines_of(capsys, tmp_path, "--write")
    assert code == 0 and (tmp_path / "z.py").read_text() == "import jmpx\n"
    for name, words in [("gone", "No such file"), ("pipe", "no file"), ("sum", "too deeply")]:
        assert re.search(f"{name}.py:1: left as it is.*{words}", printed.out)
    assert printed.out.endswith("4 files, 1 edit, 3 left to do; 1 written\n")


def test_a_file_that_cannot_be_written_is_told(tmp_path, capsys, monkeypatch):
    (tmp_path / "a.py").write_text("import jmp\n")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(PermissionError("no")))
    code, printed = lines_of(capsys, tmp_path, "--write")
    assert code == 0 and "a.py:1: not written: no" in printed.out
    assert printed.out.endswith("1 file, 0 edits, 1 left to do; 0 written\n")
    assert os.listdir(tmp_path) == ["a.py"]


def test_a_wrong_file_is_one_line(tmp_path, capsys):
    assert error_of(capsys, "migrate", str(tmp_path / "gone.py")).startswith("Cannot find")
