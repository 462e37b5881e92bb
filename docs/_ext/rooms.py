"""The table of rooms: floors from `pyproject.toml`, purposes from the docstrings of packages."""

import ast
import tomllib
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList

ROOT = Path(__file__).parents[2]


def floors() -> list[list[str]]:
    """Returns the rooms of each floor, from the highest floor to the lowest."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    layers = tools["importlinter"]["contracts"][0]["layers"]
    return [layer.split(" | ") for layer in layers]


def purpose(room: str) -> str:
    """Returns the first paragraph of the docstring of a room, in one line."""
    folder = ROOT / "jmpx" / room
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
    return " ".join(docstring.partition("\n\n")[0].split())


class Rooms(Directive):
    """Writes the table, from the highest floor to the lowest."""

    def run(self) -> list[nodes.Node]:
        """Returns the nodes of the table."""
        rows = floors()
        lines = ["| Layer | Package | Purpose |", "|---|---|---|"]
        lines += [
            f"| {len(rows) - index} | `{room}` | {purpose(room)} |"
            for index, rooms in enumerate(rows)
            for room in rooms
        ]
        node = nodes.container()
        self.state.nested_parse(StringList(lines, source=__file__), self.content_offset, node)
        return list(node.children)


def setup(app):
    """Registers the directive with Sphinx."""
    app.add_directive("rooms", Rooms)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
