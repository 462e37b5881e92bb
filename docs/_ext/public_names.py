"""Links literals such as `jmpx.autocast` to the reference, so that pages keep plain backticks.

A literal that begins with `jmpx.` and names nothing public is a warning, which fails a build with
`-W`: the name is misspelled, or gone.
"""

import importlib
import re

from docutils import nodes
from sphinx.errors import NoUri
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging

LOGGER = logging.getLogger(__name__)
_NAME = re.compile(r"(?:with |@)?(jmpx(?:\.[A-Za-z]\w*)+)(?:\(.*\):?)?$", re.DOTALL)
_OLD = ("project/", "migrate")  # have names of the past


def is_public(name: str) -> bool:
    """Whether a dotted name that begins with `jmpx.` is an attribute of the library."""
    parts = name.split(".")[1:]
    value = importlib.import_module("jmpx")
    for part in parts:
        names = ("__dataclass_fields__", "_fields") if isinstance(value, type) else ()
        if any(part in getattr(value, name, ()) for name in names):
            return True
        if not hasattr(value, part):
            return False
        value = getattr(value, part)
    return True


class PublicNames(SphinxPostTransform):
    """Makes links of literals that name something of the reference."""

    default_priority = 20

    def run(self, **kwargs):
        """Goes through the literals of a page."""
        for literal in list(self.document.findall(nodes.literal)):
            match = _NAME.match(literal.astext())
            if match and not isinstance(literal.parent, nodes.reference | nodes.title):
                self.link(literal, match[1])

    def link(self, literal, name):
        """Puts a link around a literal, to the name or to the class whose attribute it is."""
        objects = self.env.domains["py"].objects
        target = name
        while target not in objects and "." in target:
            target = target.rpartition(".")[0]
        docname = self.env.docname
        if not is_public(name):
            if not docname.startswith(_OLD):
                message = "%s is no public name of jmpx"
                LOGGER.warning(message, name, location=literal, type="jmpx", subtype="name")
        elif target in objects and target != "jmpx":
            entry = objects[target]
            try:
                uri = self.app.builder.get_relative_uri(docname, entry.docname)
            except NoUri:
                return
            if entry.docname == docname:
                uri = ""  # an anchor of this page
            link = nodes.reference("", "", refuri=f"{uri}#{entry.node_id}", internal=True)
            link["classes"].append("jmpx-name")
            literal.replace_self(link)
            link += literal


def setup(app):
    """Is called by Sphinx."""
    app.add_post_transform(PublicNames)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
