"""The programs of docs/storage.md run, and print what it says."""

import pytest
from helpers import ROOT, run_python_blocks


@pytest.mark.thorough
def test_the_page_runs_from_top_to_bottom():
    run_python_blocks(ROOT / "docs" / "storage.md")
