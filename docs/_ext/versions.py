"""Joins versions of the site, each in a folder of its own: `python docs/_ext/versions.py site`.

It tells each version of all others, by `_static/versions.js`, which their pages load, and makes the
folder's first page lead to the newest version. Run it again when a version is added.
"""

import json
import sys
from pathlib import Path

HEADER = "/* The versions of the site that lie beside each other, with their pages. */\n"
FIRST_PAGE = """<!DOCTYPE html>
<meta charset="utf-8">
<title>jmpx</title>
<meta http-equiv="refresh" content="0; url={newest}/index.html">
<a href="{newest}/index.html">jmpx {newest}</a>
"""
_OTHERS = ("_static", "_modules", "_images", "_sources")


def newest_first(name: str) -> list[int]:
    """Returns what versions such as 0.10 are sorted by."""
    return [-int(part) for part in name.split(".")]


def join(folder: Path) -> list[str]:
    """Writes what the versions in a folder need to know of each other; returns their names."""
    found = [path.parent for path in folder.glob("*/index.html")]
    found = [path for path in found if path.name.replace(".", "").isdecimal()]
    pages = {
        version.name: sorted(
            page.relative_to(version).as_posix()
            for page in version.rglob("*.html")
            if page.relative_to(version).parts[0] not in _OTHERS
        )
        for version in sorted(found, key=lambda version: newest_first(version.name))
    }
    text = f"{HEADER}const VERSIONS = {json.dumps(pages)};\n"
    for version in found:
        (version / "_static" / "versions.js").write_text(text)
    names = list(pages)
    if names:
        (folder / "index.html").write_text(FIRST_PAGE.format(newest=names[0]))
    return names


if __name__ == "__main__":
    print(*join(Path(sys.argv[1])))
