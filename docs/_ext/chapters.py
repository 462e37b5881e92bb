"""The chapters of the manual: a table of contents that names the pages which exist.

A page that no chapter names is put into one of its own, so that no page is lost.
"""

CHAPTERS = {
    "Get started": ["start", "choosing", "train_step", "notebooks/first_steps"],
    "Guides": [
        *("policies", "loss_scaling", "autocast", "memory", "gradients", "eight_bits", "flags"),
    ],
    "Frameworks": ["haiku", "flax_linen", "flax_nnx", "equinox", "plain_jax"],
    "Models": ["known_models", "recipes", "language_models", "reinforcement_learning", "recurrent"],
    "Inspect a program": ["reports", "audit", "nonfinite", "choose", "plan", "commands"],
    "Scale up": ["sharding", "storage", "checkpoints", "production"],
    "Coming from": ["coming_from_jmp", "coming_from_torch", "coming_from_others"],
    "More": [],
    "Reference": ["reference/index", "errors", "cost", "reliability", "project/changelog"],
}
OTHERS = "More"
# Pages that the contents show where one is at the page above them, or at one of these.
UNDER = {
    "train_step": ["model_state"],
    "policies": ["which_way", "public_programs"],
    "loss_scaling": ["logging"],
    "autocast": ["transformations", "matmul", "casts", "derivatives", "how_it_works"],
    "eight_bits": ["eight_bits_measured"],
    "equinox": ["equinox_details"],
    "flax_nnx": ["nnx_details"],
    "language_models": ["kv_caches"],
    "recurrent": ["odes"],
    "audit": ["findings", "ranges"],
    "choose": ["blame", "compare", "roundings"],
    "plan": ["compiled", "hardware"],
    "sharding": ["shard_map"],
    "coming_from_jmp": ["migrate"],
    "errors": ["errors_strings", "errors_steps", "messages", "results"],
    "flags": ["config_files"],
    "cost": ["overhead", "llama"],
    "reliability": [
        *("project/contributing", "project/first_runs", "how_it_is_built", "releasing"),
    ],
}


def contents(caption: str, pages: list[str]) -> str:
    """Returns a table of contents."""
    options = [":hidden:", ":maxdepth: 1", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["```{toctree}", *options, "", *pages, "```"])


def toctrees(names: set[str]) -> str:
    """Returns the tables of contents of the pages `names`."""
    parents = {page: parent for parent, pages in UNDER.items() for page in pages}
    named = {page for pages in CHAPTERS.values() for page in pages}
    named |= {page for page, parent in parents.items() if parent in names}
    others = sorted(n for n in names - named if "/" not in n or n in parents)
    chapters = CHAPTERS | {OTHERS: others}
    blocks = []
    for caption, pages in chapters.items():
        if there := [page for page in pages if page in names]:
            blocks.append(contents(caption, there))
    return "\n\n".join(blocks)


def add_chapters(app, docname, source):
    """Appends the tables of contents to the first page, and to those with pages under them."""
    if docname == "index":
        pages = set(app.env.found_docs) - {"index"}
        source[0] += "\n\n" + toctrees(pages) + "\n"
    elif docname in UNDER:
        there = [page for page in UNDER[docname] if page in app.env.found_docs]
        source[0] += "\n\n" + contents("", there) + "\n"


def outdated(app, env, added, changed, removed):
    """Has the first page written again where the pages are other ones."""
    return ["index"] if added or removed else []


def setup(app):
    """Is called by Sphinx."""
    app.connect("env-get-outdated", outdated)
    app.connect("source-read", add_chapters)
    return {"parallel_read_safe": True}
