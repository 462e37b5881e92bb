"""The chapters of the manual: a table of contents that names the pages which exist.

A page that no chapter names is put into one of its own, so that no page is lost.
"""

CHAPTERS = {
    "Get started": ["start", "choosing", "which_way", "train_step", "notebooks/first_steps"],
    "Guides": [
        *("policies", "loss_scaling", "autocast", "memory", "gradients", "flags"),
        *("logging", "casts"),
        "how_it_works",
    ],
    "Frameworks": ["haiku", "flax_linen", "flax_nnx", "equinox", "plain_jax"],
    "Models and hardware": [
        *("language_models", "reinforcement_learning", "recurrent", "odes", "derivatives"),
        *("recipes", "hardware"),
    ],
    "Inspect a program": [
        *("audit", "nonfinite", "choose", "blame", "plan", "compare", "roundings", "matmul"),
        *("compiled", "eight_bits", "commands"),
    ],
    "Scale up": ["sharding", "storage", "checkpoints"],
    "Coming from": [
        *("coming_from_jmp", "coming_from_torch", "coming_from_others", "migrate"),
    ],
    "More": [],
    "Reference": ["reference/index", "results", "errors", "messages", "cost", "reliability"],
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
            options = [":hidden:", ":maxdepth: 1", f":caption: {caption}"]
            lines = ["```{toctree}", *options, "", *there, "```"]
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
