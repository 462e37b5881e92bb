"""The notebooks: they run from top to bottom, and are committed without outputs."""

import json
import re

import pytest
from helpers import ROOT
from helpers.packaging import SETUP

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def cells(path, kind):
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_committed_without_outputs(path):
    for cell in cells(path, "code"):
        assert cell["outputs"] == [] and cell["execution_count"] is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_first_cell_installs_from_where_the_metadata_says(path):
    address = SETUP["metadata"].get("url")
    source = f"'jmpx @ git+{address}'" if address else "jmpx"
    first = "".join(cells(path, "code")[0]["source"])
    assert re.search(rf"%pip install --quiet {re.escape(source)}(\s|$)", first)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_from_top_to_bottom(path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="nbclient is in the docs extra")
    nbformat = pytest.importorskip("nbformat", reason="nbformat is in the docs extra")
    pytest.importorskip("ipykernel", reason="ipykernel is in the docs extra")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(path, as_version=4)
    ran = nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    code = [cell for cell in ran.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    outputs = [output for cell in code for output in cell.outputs]
    text = "".join(output.text for output in outputs if output.output_type == "stream")
    # All three runs have learned, and the one with too large a loss scale has skipped steps.
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", text)]
    assert len(losses) == 3 and max(losses) < 0.05
    (skipped,) = re.findall(r"skipped: (\d+) of", text)
    assert int(skipped) > 3
    assert any("text/html" in output.get("data", {}) for output in outputs)
