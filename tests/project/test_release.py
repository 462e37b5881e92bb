"""A release as docs/releasing.md makes it, in empty environments on both lines of JAX."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT
from helpers.packaging import SETUP, copy_repository

OLDEST = re.sub(">=", "==", SETUP["options"]["install_requires"])
SHOWN = r"^default +float32 +bfloat16 +float32$"
# What the tests of the source distribution are: few, because CI runs all of them elsewhere.
TESTED = ("tests/policies/test_policy.py", "tests/flags", "tests/project/test_readme.py")


def version():
    text = (ROOT / "jmpx" / "__init__.py").read_text()
    (found,) = re.findall(r'^__version__ = "(.*)"$', text, re.MULTILINE)
    return found


def test_the_version_has_one_home():
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", version())
    assert SETUP["metadata"]["version"] == "attr: jmpx.__version__"
    assert "jmpx.__version__" in (ROOT / "docs" / "conf.py").read_text()


def test_the_changelog_has_a_section_of_the_version():
    titles = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert titles[0] == "Unreleased"
    if ".dev" not in version():
        assert re.fullmatch(rf"{re.escape(version())} \(\d{{4}}-\d\d-\d\d\)", titles[1])


def test_the_citation_is_that_of_the_metadata():
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation.keys() >= {"cff-version", "message", "title", "authors"}
    titles = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert f"{citation['version']} ({citation['date-released']})" == titles[1]  # the last release
    assert citation["license"] == SETUP["metadata"]["license"]
    assert citation.get("repository-code") == SETUP["metadata"].get("url")
    assert set(citation["keywords"]) == set(SETUP["metadata"]["keywords"].split(", "))


def test_the_conda_recipe_is_that_of_the_metadata():
    yaml = pytest.importorskip("yaml")
    recipe = yaml.safe_load((ROOT / ".ci" / "recipe.yaml").read_text())
    assert (
        recipe["context"]["version"] == version() and recipe["package"]["name"] == METADATA["name"]
    )
    needed = [f"python{OPTIONS['python_requires']}", *OPTIONS["install_requires"].split()]
    assert [each.replace(" ", "") for each in recipe["requirements"]["run"]] == needed
    about = recipe["about"]
    assert (about["summary"], about["license"]) == (METADATA["description"], METADATA["license"])


def test_an_address_in_the_metadata_is_that_of_the_package(tmp_path):
    text = (ROOT / "setup.cfg").read_text()
    address = "https://example.org/jmpx"
    (tmp_path / "setup.cfg").write_text(text.replace("[metadata]", f"[metadata]\nurl = {address}"))
    for file in ("jmpx/__init__.py", "docs/description.md", "LICENSE"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    program = "from setuptools import build_meta as b; b.prepare_metadata_for_build_wheel('.')"
    run(sys.executable, "-c", program, cwd=tmp_path)
    (found,) = tmp_path.glob("*.dist-info/METADATA")
    assert re.search(rf"^(Home-page|Project-URL: \w+,):? {address}$", found.read_text(), re.M)


METADATA, OPTIONS = SETUP["metadata"], SETUP["options"]
PYTHON = OPTIONS["python_requires"].removeprefix(">=")
(JAX,) = re.findall(r"^jax>=(.*)$", OPTIONS["install_requires"], re.MULTILINE)
TITLE = METADATA["name"] + ": " + METADATA["description"].replace("Mixed", "mixed")
NEEDS = f"needs Python {PYTHON} and JAX {JAX} or newer"
# What other files tell of the facts of setup.cfg, word by word.
TOLD = [
    ("CITATION.cff", f'title: "{TITLE}"'),
    ("CITATION.cff", f"authors:\n  - name: {METADATA['author']}\n"),
    ("LICENSE", "Version " + METADATA["license"].removeprefix("Apache-") + ", January 2004"),
    ("README.md", NEEDS),
    ("docs/description.md", NEEDS),
    ("docs/description.md", f"Licensed under {METADATA['license']}."),
    ("docs/start.md", NEEDS),
    ("docs/releasing.md", f"python=python{PYTHON} "),
    ("jmpx/__init__.py", f'"""{TITLE}.\n'),
    ("pyproject.toml", f'target-version = "py{PYTHON.replace(".", "")}"'),
    (".github/workflows/ci.yml", f"            {PYTHON}\n      - run:"),
]


@pytest.mark.parametrize(("file", "words"), TOLD)
def test_other_files_tell_what_the_metadata_say(file, words):
    assert (ROOT / file).read_text().count(words) == 1


def run(*command, cwd):
    """Runs a command in a folder, where Python finds nothing but what is installed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The source distribution and the wheel that was built from it."""
    for name in ("build", "twine"):
        pytest.importorskip(name, reason=f"{name} is in the release extra")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    copy_repository(source)
    run(sys.executable, "-m", "build", "--outdir", out, source, cwd=out)
    sdist, wheel = sorted(out.iterdir(), key=lambda path: path.suffix)
    return sdist, wheel


def empty_environment(folder, *arguments):
    """Returns the Python of a new environment, in which pip has installed the arguments."""
    run(sys.executable, "-m", "venv", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", *arguments, cwd=folder.parent)
    return python


@pytest.mark.slow
def test_the_index_would_take_it(built):
    sdist, wheel = built
    assert sdist.name == f"jmpx-{version()}.tar.gz"
    assert wheel.name == f"jmpx-{version()}-py3-none-any.whl"
    said = run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel, cwd=sdist.parent)
    assert said.count("PASSED") == 2 and "WARNING" not in said


@pytest.mark.slow
@pytest.mark.parametrize("line", ["oldest", "newest"])
def test_the_wheel_works_in_an_empty_environment(built, line, tmp_path):
    pins = OLDEST.split() if line == "oldest" else []
    python = empty_environment(tmp_path / "venv", built[1], *pins)
    said = run(python, "-I", "-m", "jmpx", "c=bf16,o=f32; LayerNorm: full", cwd=tmp_path)
    assert re.search(SHOWN, said, re.MULTILINE), said
    program = (
        "import jax, jmpx, jmpx.flags; print(jmpx.__version__, jmpx.__file__, jax.__version__)"
    )
    found, file, jax = run(python, "-I", "-c", program, cwd=tmp_path).split()
    assert found == version() and file.startswith(str(tmp_path))
    assert (f"jax=={jax}" in pins) == (line == "oldest")


@pytest.mark.slow
def test_the_tests_pass_from_the_source_distribution(built, tmp_path):
    run("tar", "xzf", built[0], "-C", tmp_path, "--strip-components=1", cwd=tmp_path)
    python = empty_environment(tmp_path / "venv", f"{tmp_path}[test]")
    said = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTED, cwd=tmp_path)
    assert re.search(r"^\d\d+ passed", said, re.MULTILINE), said
