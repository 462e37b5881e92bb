"""Pages that are written for GitHub, as they are on the site.

Links to files of the repository that are no pages, such as examples, lead to the address of the
repository, `url` in setup.cfg. Without one they become plain text that names the file. Links to the
changelog and to CONTRIBUTING.md lead to the pages that include them.
"""

from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms import SphinxTransform

INCLUDED = {"CHANGELOG.md": "project/changelog", "CONTRIBUTING.md": "project/contributing"}


class RepositoryFiles(SphinxTransform):
    """Replaces what MyST makes of links to files: a cross-reference, or a download of a copy."""

    default_priority = 5  # before Sphinx collects downloads

    def apply(self, **kwargs):
        """Goes through the links of a page."""
        for kind in (addnodes.pending_xref, addnodes.download_reference):
            for link in list(self.document.findall(kind)):
                name = self.file_of(link) if link.get("reftype") == "myst" else None
                if name in INCLUDED:
                    link["refdomain"], link["reftarget"] = "doc", INCLUDED[name]
                elif name is not None and self.config.repository:
                    kind = "tree" if (Path(self.env.srcdir).parent / name).is_dir() else "blob"
                    address = f"{self.config.repository.rstrip('/')}/{kind}/main/{name}"
                    link.replace_self(nodes.reference("", "", *link.children, refuri=address))
                elif name is not None:
                    text = link.children
                    if name not in link.astext():
                        text = [*text, nodes.Text(" ("), nodes.literal("", name), nodes.Text(")")]
                    link.replace_self(text)

    def file_of(self, link) -> str | None:
        """Returns the path in the repository of a file that is no page; None for other targets."""
        target = link["reftarget"].partition("#")[0]
        if not target or target in self.env.found_docs:
            return None
        docs = Path(self.env.srcdir).resolve()
        is_included = self.env.docname in INCLUDED.values()  # its text is that of a file above
        folder = docs.parent if is_included else (docs / self.env.docname).parent
        if link.get("refdomain") == "doc":
            target += ".md"  # MyST has taken it for a page
        path = (folder / target).resolve()
        if not path.exists() or not path.is_relative_to(docs.parent):
            return None
        page = str(path.with_suffix("").relative_to(docs)) if path.is_relative_to(docs) else None
        return None if page in self.env.found_docs else str(path.relative_to(docs.parent))


class TrimmedPrograms(SphinxTransform):
    """Takes away the empty line at the end of a program, which ends the output of a doctest."""

    default_priority = 5

    def apply(self, **kwargs):
        """Goes through the blocks of a page."""
        for block in self.document.findall(nodes.literal_block):
            if len(block) == 1 and isinstance(block[0], nodes.Text):
                block[0] = nodes.Text(block.astext().rstrip())
                block.rawsource = block.astext()  # is compared with the text to be highlighted


class UnbrokenFlags(SphinxTransform):
    """Marks short literals such as `--mp_policy`, which browsers would break after a hyphen."""

    default_priority = 5

    def apply(self, **kwargs):
        """Goes through the literals of a page."""
        for literal in self.document.findall(nodes.literal):
            if "-" in literal.astext() and len(literal.astext()) <= 30:
                literal["classes"].append("unbroken")


def setup(app):
    """Is called by Sphinx."""
    app.add_config_value("repository", "", "env", str)
    app.add_transform(RepositoryFiles)
    app.add_transform(TrimmedPrograms)
    app.add_transform(UnbrokenFlags)
    return {"parallel_read_safe": True}
