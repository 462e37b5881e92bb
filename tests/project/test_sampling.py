"""The default run and the rest, which CI runs, are all tests: each case is in one of them."""

import re

import pytest
from helpers import ROOT, run_python

CASES = """
import pytest

pytestmark = pytest.mark.filterwarnings("error")

def test_plain(): pass

@pytest.mark.slow
def test_slow(): pass

@pytest.mark.thorough
def test_thorough(): pass

@pytest.mark.thorough
@pytest.mark.versions
def test_of_versions(): pass

@pytest.mark.sampled(3)
@pytest.mark.parametrize("n", range(7))
def test_table(n): pass

@pytest.mark.sampled(3)
@pytest.mark.parametrize("a, b", [(n, -n) for n in range(4)])
@pytest.mark.parametrize("c", "uvw")
def test_product(a, b, c): pass

@pytest.mark.sampled(2)
@pytest.mark.parametrize("n", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_slow_case(n): pass

@pytest.fixture(params=[0, 1])
def way(request): return request.param

@pytest.mark.sampled(3)
@pytest.mark.parametrize(("a", "b"), [(0, 0), (1, 1)])
def test_fixture(way, a, b): pass
"""
DEFAULT = """
    test_plain test_table[0] test_table[3] test_table[6]
    test_product[u-0-0] test_product[u-3--3] test_product[v-2--2] test_product[w-1--1]
    test_slow_case[0] test_fixture[0-0-0] test_fixture[1-1-1]
""".split()


@pytest.fixture(scope="module")
def collect(tmp_path_factory):
    """A function that returns the names of the cases that a run would have."""
    file = tmp_path_factory.mktemp("sampled") / "test_cases.py"
    file.write_text(CASES)
    plugins = "-p sampling -p xdist -p _hypothesis_pytestplugin".split()
    options = [*plugins, "-c", str(ROOT / "pyproject.toml"), str(file)]
    environment = {"PYTHONPATH": str(ROOT / "tests"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}

    def collect(*more):
        command = ["-m", "pytest", "--collect-only", "-q", *options, *more]
        result = run_python(*command, **environment)
        assert result.returncode == 0, result.stdout + result.stderr
        return re.findall(r"::(\S+)$", result.stdout, re.M)

    return collect


def test_the_default_run_has_a_sample(collect):
    assert sorted(collect()) == sorted(DEFAULT)


@pytest.mark.thorough
def test_ci_runs_every_case_and_those_of_versions_on_each_line(collect):
    words = re.findall(r'/bin/pytest -n auto -m "(.*?)"', (ROOT / ".ci/run").read_text())
    words.remove("hypothesis")  # properties once more, with other examples
    slow, oldest, newest = (collect("-m", each) for each in words)
    everything = collect("-m", "")
    assert len(everything) == 1 + 1 + 1 + 1 + 7 + 12 + 3 + 4
    assert sorted(slow) == ["test_slow", "test_slow_case[2]"]
    assert sorted(newest) == sorted({*everything} - {*slow})
    assert sorted(oldest) == sorted([*DEFAULT, "test_of_versions"])
