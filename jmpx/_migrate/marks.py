"""What each part of the edits needs: the facts, the marks, and what was counted."""

from typing import Any

import libcst as cst
from libcst.helpers import get_full_name_for_node
from libcst.metadata import ParentNodeProvider, PositionProvider

from jmpx._migrate.definitions import Definitions
from jmpx._migrate.names import DYNAMIC_SCALE, Facts

MODULES = ("haiku.mixed_precision", DYNAMIC_SCALE)  # whose names are in jmpx now
CLASS = f"{DYNAMIC_SCALE}.DynamicScale"
OTHER_CLASS = "jmpx.DynamicLossScale has other arguments and attributes than DynamicScale"


class Marks(Definitions):
    """Collects marks: lines, and what to write there."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts.names)
        self.count = 0
        self.marks: list[tuple[int, str]] = []
        self.needs_jmpx = False
        self._facts = facts

    def mark(self, node: cst.CSTNode, words: str) -> None:
        """Notes what is left to do, at the statement of a node."""
        statement: Any = node
        while not isinstance(statement, cst.BaseStatement):
            statement = self.get_metadata(ParentNodeProvider, statement)
        place: Any = self.get_metadata(PositionProvider, statement)
        self.marks.append((place.start.line, words))


def first_word(node: cst.CSTNode) -> str:
    return (get_full_name_for_node(node) or "").partition(".")[0]
