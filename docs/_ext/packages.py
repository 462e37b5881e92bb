"""The table of packages: layers from `pyproject.toml`, purposes from their docstrings."""

import ast
import tomllib
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList

ROOT = Path(__file__).parents[2]


def layers() -> list[list[str]]:
    """Returns the packages of each layer, from the highest layer to the lowest."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    found = tools["importlinter"]["contracts"][0]["layers"]
    return [layer.split(" | ") for layer in found]


def purpose(package: str) -> str:
    """Returns the first paragraph of the docstring of a package, in one line."""
    folder = ROOT / "jmpx" / package
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
    return " ".join(docstring.partition("\n\n")[0].split())


class Packages(Directive):
    """Writes the table, from the highest layer to the lowest."""

    def run(self) -> list[nodes.Node]:
        """Returns the nodes of the table."""
        rows = layers()
        lines = ["| Layer | Package | Purpose |", "|---|---|---|"]
        lines += [
            f"| {len(rows) - index} | `{package}` | {purpose(package)} |"
            for index, row in enumerate(rows)
            for package in row
        ]
        node = nodes.container()
        self.state.nested_parse(StringList(lines, source=__file__), self.content_offset, node)
        return list(node.children)


def setup(app):
    """Registers the directive with Sphinx."""
    app.add_directive("packages", Packages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
