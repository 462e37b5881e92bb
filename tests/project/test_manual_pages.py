"""The programs on the pages of the manual run, and print what the pages say."""

import pytest
from helpers import ROOT, run_python_blocks

DOCS = ROOT / "docs"

# Pages that a test beside what they explain runs.
ELSEWHERE = {
    "audit.md",
    "checkpoints.md",
    "description.md",
    "flax_nnx.md",
    "flax_train_state.md",
    "matmul.md",
    "nonfinite.md",
    "sharding.md",
    "storage.md",
}

PAGES = sorted(
    page.name
    for page in DOCS.glob("*.md")
    if page.name not in ELSEWHERE and ">>> " in page.read_text()
)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs_from_top_to_bottom(page):
    run_python_blocks(DOCS / page)


def test_all_other_pages_are_run_by_other_tests():
    tests = [
        path for path in (ROOT / "tests").glob("*/test_*.py") if path.name != "test_manual_pages.py"
    ]
    texts = [path.read_text() for path in tests]
    for page in ELSEWHERE:
        assert (DOCS / page).exists()
        assert any("run_python_blocks" in text and page in text for text in texts), page
