"""The programs on the pages of the manual run, and print what the pages say."""

from pathlib import Path

import pytest
from helpers import ROOT, run_python_blocks

DOCS = ROOT / "docs"


def pages():
    """Returns the names of all pages with programs that no test beside their subject runs."""
    tests = [path for path in (ROOT / "tests").glob("*/test_*.py") if path != Path(__file__)]
    texts = [text for text in (path.read_text() for path in tests) if "run_python_blocks" in text]
    return sorted(
        page.name
        for page in DOCS.glob("*.md")
        if ">>> " in page.read_text() and not any(f'"{page.name}"' in text for text in texts)
    )


@pytest.mark.sampled(9)
@pytest.mark.parametrize("page", pages())
def test_a_page_runs_from_top_to_bottom(page):
    run_python_blocks(DOCS / page)
