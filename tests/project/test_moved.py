"""Names of jmpx 0.2: each error says what to write, and that is there."""

import operator
import re

import pytest
from helpers import ROOT, run_python

import jmpx
import jmpx.mpx

# What 0.2 had at its root, and has elsewhere now.
GONE = """
Audit Autocast DynamicLossScaling Ema EmaState FirstNonfinite Gradients GradientsAndAux LostUpdates
Wire audit cast_function describe ema first_nonfinite gather loss_scale_from low_precision_params
nonfinite ranges split_master stochastic_round update_report wire with_state_dtype
""".split()


def check_names(text):
    """Checks that each name of jmpx in a text is one."""
    names = re.findall(r"\bjmpx\.([\w.]*\w)", text)
    for name in names:
        assert operator.attrgetter(name)(jmpx) is not None
    return names


@pytest.mark.parametrize("name", GONE)
def test_a_name_that_is_elsewhere_says_where(name):
    assert name not in dir(jmpx)
    start = f"^module 'jmpx' has no attribute '{name}': write .* instead.$"
    with pytest.raises(AttributeError, match=start) as error:
        getattr(jmpx, name)
    found = check_names(str(error.value))
    assert found
    if name not in ("Wire", "describe", "loss_scale_from", "wire"):  # they are renamed
        assert [each.rpartition(".")[2] for each in found] == [name]


def test_rooms_know_each_other():
    with pytest.raises(AttributeError, match=r"^module 'jmpx.optim' .* write jmpx.inspect.audit i"):
        jmpx.optim.audit  # pyright: ignore[reportAttributeAccessIssue]  # noqa: B018
    with pytest.raises(AttributeError, match=r"^module 'jmpx.inspect' .* write jmpx.autocast inst"):
        jmpx.inspect.autocast  # pyright: ignore[reportAttributeAccessIssue]  # noqa: B018
    with pytest.raises(AttributeError, match="^module 'jmpx.types' has no attribute 'Policies'$"):
        jmpx.types.Policies  # pyright: ignore[reportAttributeAccessIssue]  # noqa: B018
    assert not hasattr(jmpx, "audit") and not hasattr(jmpx, "__wrapped__")


def test_an_import_of_an_old_name_says_where_it_is():
    with pytest.raises(ImportError, match="'audit': write jmpx.inspect.audit instead.$"):
        from jmpx import audit  # pyright: ignore[reportAttributeAccessIssue]  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'nothing_like_it' from 'jmpx'"):
        from jmpx import nothing_like_it  # pyright: ignore  # noqa: F401, PGH003
    near = run_python("-c", "import jmpx; jmpx.optimiser_update").stderr.splitlines()[-1]
    assert near.startswith("AttributeError: module 'jmpx' has no attribute 'optimiser_update'")


def test_the_page_lists_each_name_and_argument():
    page = (ROOT / "docs" / "from_0.2.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    first = "\n".join(row.split("|")[1] for row in rows)
    missing = [name for name in GONE if not re.search(rf"`jmpx\.{name}\b", first)]
    options = "axis_name sharded batch_argnums batch_sharding uncast_argnums"
    options += " uncast_argnames use_mixed_precision"
    missing += [name for name in options.split() if f"`{name}=" not in first]
    assert not missing
    check_names("\n".join(re.sub(r"[(].*?[)]`", "`", row.split("|")[2]) for row in rows))
