"""Links to files of the repository that are no pages, such as examples, become plain text.

On GitHub they are links. The site has no address of the repository to link to, and does not carry
a copy of the repository, so there the text names the file. Links to the changelog and to
CONTRIBUTING.md lead to the pages that include them.
"""

from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms import SphinxTransform

PAGES = {"CHANGELOG.md": "project/changelog", "CONTRIBUTING.md": "project/contributing"}


class RepositoryFiles(SphinxTransform):
    """Replaces what MyST makes of links to files: a cross-reference, or a download of a copy."""

    default_priority = 5  # before Sphinx collects downloads

    def apply(self, **kwargs):
        """Goes through the links of a page."""
        for kind in (addnodes.pending_xref, addnodes.download_reference):
            for link in list(self.document.findall(kind)):
                name = self.file_of(link) if link.get("reftype") == "myst" else None
                if name in PAGES:
                    link.update_basic_atts({})
                    link["refdomain"], link["reftarget"] = "doc", PAGES[name]
                elif name is not None:
                    text = link.children
                    if name not in link.astext():
                        text = [*text, nodes.Text(" ("), nodes.literal("", name), nodes.Text(")")]
                    link.replace_self(text)

    def file_of(self, link) -> str | None:
        """Returns the path in the repository of what a link names; None if it is no such file."""
        docs = Path(self.env.srcdir).resolve()
        target, _, _ = link["reftarget"].partition("#")
        folder = (docs / self.env.docname).parent
        if self.env.docname in PAGES.values():
            folder = docs.parent  # the text is that of a file there
        if not target or target in self.env.found_docs:
            return None
        path = folder / target
        if link.get("refdomain") == "doc":  # the path of a Markdown file without its suffix
            path = Path(f"{folder / target}.md")
        path = path.resolve()
        if not path.exists() or not path.is_relative_to(docs.parent):
            return None
        if path.is_relative_to(docs) and path.relative_to(docs).with_suffix("").as_posix() in (
            self.env.found_docs
        ):
            return None
        return path.relative_to(docs.parent).as_posix()


def setup(app):
    """Is called by Sphinx."""
    app.add_transform(RepositoryFiles)
    return {"parallel_read_safe": True}
