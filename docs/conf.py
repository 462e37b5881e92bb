"""How Sphinx builds the manual: `python -m sphinx -W -b html docs site`."""

import configparser
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]

import jmpx  # noqa: E402

setup_cfg = configparser.ConfigParser()
setup_cfg.read(HERE.parent / "setup.cfg")
project = setup_cfg["metadata"]["name"]
author = copyright = setup_cfg["metadata"]["author"]
version = release = jmpx.__version__
repository = setup_cfg["metadata"].get("url", "")  # its only home
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_llms_txt",  # llms.txt and llms-full.txt, the pages as one text
    "chapters",
    "docstrings",
    "figures",
    "message_index",
    "pages",
    "public_names",
    "packages",
]
exclude_patterns = ["README.md", "description.md", "_*", "**.ipynb_checkpoints"]

# Pages link to the headings of others, as on GitHub: [what it saves](autocast.md#memory).
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

# A notebook runs where it or its outputs are new, and one that fails is an error.
nb_execution_mode = "cache"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True

autosummary_generate = False
autodoc_default_options = {"members": True, "inherited-members": "tuple,Generic,object"}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
viewcode_follow_imported_members = True
add_module_names = True
python_maximum_signature_line_length = 80
napoleon_attr_annotations = False
napoleon_use_ivar = True
napoleon_use_rtype = False
toc_object_entries_show_parents = "hide"

# Pages load nothing from other hosts: no widgets, no fonts.
nb_ipywidgets_js = {}

html_theme = "sphinx_book_theme"
html_title = f"jmpx {version}"
html_static_path = ["_static"]
html_favicon = "_static/icon.svg"
html_css_files = ["jmpx.css"]
html_js_files = ["versions.js", "switcher.js"]
html_search_scorer = str(HERE / "_ext" / "search.js")
html_show_sourcelink = False  # the sources are there for llms.txt alone
html_use_index = False  # the reference lists all names
html_context = {"default_mode": "auto"}
html_show_sphinx = False
html_show_copyright = False
html_last_updated_fmt = None
html_theme_options = {
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "pygments_dark_style": "github-dark",
    "navbar_start": [],
    "navbar_center": [],
    "navbar_end": [],
    "navbar_persistent": [],
}
if repository:
    html_theme_options |= {
        "repository_url": repository,
        "repository_provider": "gitlab" if "gitlab" in repository else "github",
        "use_repository_button": True,
    }
# A copied block is the program without its prompts and output.
copybutton_prompt_text = r">>> ?|\.\.\. ?"
copybutton_prompt_is_regexp = True


def setup(app):
    """Is called by Sphinx; keeps what notebooks write out of the repository."""

    def move(app):
        folder = str(Path(app.doctreedir) / "notebooks")
        config = app.env.mystnb_config
        app.env.mystnb_config = config.copy(output_folder=folder, execution_cache_path=folder)

    app.connect("builder-inited", move, priority=900)  # after MyST-NB has set them
