"""The weight of the library, and what no file of it may do, such as a look at its callers."""

import ast
import re

import pytest
from helpers import ROOT

FILES = {
    str(path.relative_to(ROOT)): path.read_text() for path in sorted(ROOT.glob("jmpx/**/*.py"))
}
FORBIDDEN = re.compile(
    r"\bsys\._getframe\b|\binspect\.(stack|currentframe|getouterframes)\b|\bf_locals\b"
    r"|\b(import|from) gc\b|\bgc\.\w+\(|\b__del__\b"
)


def test_no_file_looks_at_its_callers_or_at_all_objects():
    found = [
        f"{file}:{number}: {line.strip()}"
        for file, text in FILES.items()
        for number, line in enumerate(text.splitlines(), 1)
        if FORBIDDEN.search(line)
    ]
    assert not found, "\n".join(found)


# What a walk through a program fills, or what an open context keeps.
MUTABLE = set("Block Context Node Operation Pool Stream Used Value _Push _Row".split())


def test_dataclasses_are_frozen():
    mutable = {
        node.name: f"{file}:{node.lineno}"
        for file, text in FILES.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef)
        for decorator in map(ast.unparse, node.decorator_list)
        if re.match(r"(dataclasses\.)?dataclass\b(?!.*frozen=True)", decorator)
    }
    assert not mutable.keys() - MUTABLE, mutable


def lengths_of_files():
    return {file: len(text.splitlines()) for file, text in FILES.items()}


def lengths_of_functions():
    """The lines of each function without those of its docstring."""
    lengths = {}
    for file, text in FILES.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                (first, last), inside = span(node), node.body[0]
                low, high = span(inside) if ast.get_docstring(node) else (0, -1)
                lengths[f"{file}:{first}: {node.name}"] = last - first - (high - low)
    return lengths


def span(node):
    return node.lineno, node.end_lineno or node.lineno


def all_lines():
    return {"the library": sum(lengths_of_files().values())}


def words_any():
    return {"the library": sum(len(re.findall(r"\bAny\b", text)) for text in FILES.values())}


# Each measure with the most that any file, function or the library may have. Whoever makes the
# library lighter lowers its number here; only a new feature raises it, by the feature's own lines.
MEASURES = [
    (lengths_of_files, 500),
    (lengths_of_functions, 60),
    (all_lines, 31326),
    (words_any, 300),
]


@pytest.mark.parametrize(("measure", "most"), MEASURES)
def test_the_library_is_no_heavier_than(measure, most):
    found = measure()
    over = {name: length for name, length in found.items() if length > most}
    assert found and not over, "\n".join(f"{name}: {length}" for name, length in over.items())
