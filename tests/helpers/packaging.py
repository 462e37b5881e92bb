"""The metadata of the package; the files of the repository, copied as a fresh clone has them."""

import configparser
import pathlib
import shutil

from helpers import ROOT

SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")
FOLDERS = (".ci", ".github", "benchmarks", "docs", "examples", "jmpx", "tests")
FILES = """
    .pre-commit-config.yaml CHANGELOG.md CITATION.cff CONTRIBUTING.md LICENSE MANIFEST.in README.md
    pyproject.toml setup.cfg
""".split()


def copy_repository(target: pathlib.Path) -> set[str]:
    """Copies the files to an empty folder that git does not know; returns their paths in it."""
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc", ".*_cache", ".ipynb_checkpoints")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, target / name, ignore=ignored)
    for name in FILES:
        shutil.copy(ROOT / name, target / name)
    return {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
