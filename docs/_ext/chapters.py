"""The chapters of the manual: a table of contents that names the pages which exist.

A page that no chapter names is put into one of its own, so that no page is lost.
"""

CHAPTERS = {
    "First steps": ["start", "which_way", "train_step", "notebooks/first_steps", "how_it_works"],
    "What to write": ["policies", "loss_scaling", "autocast", "casts", "flags"],
    "Frameworks": ["haiku", "equinox", "flax_linen", "flax_nnx", "plain_jax"],
    "Look at a program": [
        "audit",
        "nonfinite",
        "errors",
        "matmul",
        "roundings",
        "compare",
        "blame",
        "plan",
        "choose",
        "collectives",
        "products",
    ],
    "Larger runs": ["sharding", "storage", "checkpoints", "recipes"],
    "Coming from": ["coming_from_jmp", "coming_from_torch", "coming_from_others", "from_0.2"],
    "More": [],
    "Reference": ["cost", "reliability", "results", "reference/index"],
    "The project": [
        *("project/changelog", "project/contributing", "project/first_runs"),
        *("how_it_is_built", "releasing"),
    ],
}
OTHERS = "More"


def toctrees(names: set[str]) -> str:
    """Returns the tables of contents of the pages `names`."""
    named = {page for pages in CHAPTERS.values() for page in pages}
    chapters = CHAPTERS | {OTHERS: sorted(n for n in names - named if "/" not in n)}
    blocks = []
    for caption, pages in chapters.items():
        there = [page for page in pages if page in names]
        if there:
            lines = ["```{toctree}", ":maxdepth: 1", f":caption: {caption}", "", *there, "```"]
            blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def add_chapters(app, docname, source):
    """Appends the tables of contents to the first page."""
    if docname == "index":
        pages = set(app.env.found_docs) - {"index"}
        source[0] += "\n\n" + toctrees(pages) + "\n"


def outdated(app, env, added, changed, removed):
    """Has the first page written again where the pages are other ones."""
    return ["index"] if added or removed else []


def setup(app):
    """Is called by Sphinx."""
    app.connect("env-get-outdated", outdated)
    app.connect("source-read", add_chapters)
    return {"parallel_read_safe": True}
