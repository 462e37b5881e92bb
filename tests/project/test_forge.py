"""The files of the public forge: forms that it can read, and a workflow that runs what CI runs."""

import pytest
from helpers import ROOT

yaml = pytest.importorskip("yaml")
FOLDER = ROOT / ".github"


def read(path):
    return yaml.safe_load((FOLDER / path).read_text())


def test_the_workflow_runs_all_of_ci_and_may_write_nothing():
    (path,) = (FOLDER / "workflows").iterdir()
    workflow = read(path)
    (job,) = workflow["jobs"].values()
    assert workflow["permissions"] == {"contents": "read"} and "permissions" not in job
    assert [step["run"] for step in job["steps"] if "run" in step] == ["bash .ci/run"]
    (checkout, python) = (step for step in job["steps"] if "uses" in step)
    assert checkout["with"] == {"persist-credentials": False}
    newest, oldest = python["with"]["python-version"].split()
    assert newest > oldest  # the last one is python3; .ci/run finds the newest


@pytest.mark.parametrize("name", ["bug.yml", "idea.yml"])
def test_a_form_has_questions_of_different_names(name):
    form = read(f"ISSUE_TEMPLATE/{name}")
    assert form.keys() == {"name", "description", "labels", "body"}
    names = [question["id"] for question in form["body"]]
    assert len({*names}) == len(names) >= 2
    for question in form["body"]:
        assert question["type"] == "textarea" and question["attributes"]["label"]
    assert form["body"][0]["validations"]["required"]


def test_a_change_is_asked_for_what_contributing_asks_for():
    asked = (FOLDER / "PULL_REQUEST_TEMPLATE.md").read_text()
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    for word in ("pre-commit run --all-files", "float64"):
        assert word in asked and word in contributing
