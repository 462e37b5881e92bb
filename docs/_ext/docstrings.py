"""Docstrings as Markdown writes them: `code` in single backticks, and the names of pages."""

import re

_CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)(\w?)")
_PAGE = re.compile(r"(?:``)?docs/(\w+)\.md(?:``)?")


def _literal(match):
    """Returns reStructuredText of a literal, which ends where a word goes on: `Param`s."""
    text, suffix = match.groups()
    return f"``{text}``" + (f"\\ {suffix}" if suffix else "")


def to_restructured_text(text: str) -> str:
    """Returns a docstring with literals and links as reStructuredText writes them."""
    parts = re.split(r"(^[ ]*(?:>>>|\.\.\.) .*$)", text, flags=re.MULTILINE)
    for i in range(0, len(parts), 2):  # the others are programs
        prose = _CODE.sub(_literal, parts[i])
        parts[i] = _PAGE.sub(r":doc:`/\1`", prose)
    return "".join(parts)


def convert(app, what, name, obj, options, lines):
    """Converts the lines of a docstring in place."""
    lines[:] = to_restructured_text("\n".join(lines)).split("\n")


def skip(app, what, name, obj, would_skip, options):
    """Leaves out the fields of a class, which the docstring of the class describes."""
    if what == "class" and not (callable(obj) or isinstance(obj, property | classmethod)):
        return True
    return None


def setup(app):
    """Is called by Sphinx."""
    app.connect("autodoc-skip-member", skip)
    app.connect("autodoc-process-docstring", convert, priority=100)  # before Napoleon
    return {"parallel_read_safe": True}
