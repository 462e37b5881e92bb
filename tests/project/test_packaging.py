"""What ships: the wheel, the source distribution, an editable install, the description."""

import re
import tarfile
import zipfile

import pytest
from helpers import ROOT, run_python
from helpers.packaging import SETUP, copy_repository

KINDS = ("sdist", "wheel", "editable")
DESCRIPTION = (ROOT / SETUP["metadata"]["long_description"].removeprefix("file: ")).read_text()
BUILD = """
import sys
from setuptools import build_meta
for folder in sys.argv[1:]:
    getattr(build_meta, "build_" + folder.rpartition("/")[2])(folder)
"""


def test_the_description_stands_without_the_repository():
    pattern = r"\]\(([^)]*)\)|(?:href|src)=\"([^\"]*)\"|^\[.*\]: (\S+)"
    targets = re.findall(pattern, DESCRIPTION, re.M)
    assert targets
    for target in targets:
        assert "".join(target).startswith("https://"), target


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The repository's files in a folder that git does not know, and all that is built there."""
    pytest.importorskip("setuptools", minversion="77")  # as pyproject.toml asks of a build
    source = tmp_path_factory.mktemp("source")
    files = copy_repository(source)
    folders = {kind: tmp_path_factory.mktemp("out") / kind for kind in KINDS}
    for folder in folders.values():
        folder.mkdir()
    result = run_python("-c", BUILD, *map(str, folders.values()), cwd=source)
    assert result.returncode == 0 and "Deprecat" not in result.stderr, result.stderr
    return source, files, {kind: next(folder.iterdir()) for kind, folder in folders.items()}


@pytest.mark.thorough
def test_the_wheel_holds_the_package_and_nothing_else(built):
    _, files, archives = built
    wheel = zipfile.ZipFile(archives["wheel"])
    names = set(wheel.namelist())
    package = {name for name in names if ".dist-info/" not in name}
    assert package == {name for name in files if name.startswith("jmpx/")}
    assert {"jmpx/py.typed", "jmpx/__init__.py"} <= package
    (metadata,) = (name for name in names if name.endswith("/METADATA"))
    assert DESCRIPTION in wheel.read(metadata).decode()


@pytest.mark.thorough
def test_type_checkers_find_an_editable_install(built):
    source, _, archives = built
    wheel = zipfile.ZipFile(archives["editable"])
    # They read the paths in .pth files, and run no import hook.
    (name,) = (name for name in wheel.namelist() if ".dist-info/" not in name)
    assert name.endswith(".pth")
    assert wheel.read(name).decode().strip() == str(source.resolve())


@pytest.mark.thorough
def test_the_source_distribution_has_each_file(built, tmp_path):
    _, files, archives = built
    with tarfile.open(archives["sdist"]) as tar:
        there = {name.partition("/")[2] for name in tar.getnames()}
        assert files <= there  # beside folders, and what setuptools writes
