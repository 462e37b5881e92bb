"""Pictures for light and for dark pages.

A picture with a sibling `NAME-dark.EXT` is on a page twice, and the theme shows one of them. The
twin of a drawing (`.svg`) is made here, by other colours. The line with the command that makes a
picture (`*Made by* ...`) is small.
"""

import os
import re
from pathlib import Path

from docutils import nodes
from sphinx.transforms import SphinxTransform

# The colours of the drawings: lines and texts, then the fills with the lines around them.
DARK = {
    "#1f2933": "#e6edf3",
    "#52606d": "#adb9c5",
    "#7b8794": "#8b98a5",
    "#9aa5b1": "#4d5967",
    "#fbfbfd": "#1b2129",
    "#eef1f5": "#2a323c",
    "#dbeafe": "#12325c",
    "#2563eb": "#6aa9ff",
    "#ffedd5": "#4a2a10",
    "#c2410c": "#ff9d5c",
    "#dcfce7": "#143d26",
    "#15803d": "#4ade80",
    "#fee2e2": "#4c1b1b",
    "#b91c1c": "#ff8a8a",
}


class Twins(SphinxTransform):
    """Puts the twins beside the pictures."""

    default_priority = 400  # before Sphinx collects the pictures

    def apply(self):
        """Changes the document."""
        here = Path(self.env.doc2path(self.env.docname)).parent
        for image in list(self.document.findall(nodes.image)):
            light = here / image["uri"]
            dark = light.with_name(f"{light.stem}-dark{light.suffix}")
            if light.suffix == ".svg" and light.exists():
                dark = Path(self.app.doctreedir) / dark.name
                paint = lambda found: DARK.get(found[0], found[0])  # noqa: E731
                dark.write_text(re.sub("#[0-9a-f]{6}", paint, light.read_text()))
            if dark.exists():
                twin = image.deepcopy()
                twin["uri"] = os.path.relpath(dark, here)
                twin["classes"] = [*image["classes"], "only-dark"]
                image["classes"] = [*image["classes"], "only-light"]
                image.parent.insert(image.parent.index(image) + 1, twin)
        for paragraph in self.document.findall(nodes.paragraph):
            if paragraph.astext().startswith("Made by "):
                paragraph["classes"] += ["jmpx-made-by"]


def setup(app):
    """Registers the transform with Sphinx."""
    app.add_transform(Twins)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
