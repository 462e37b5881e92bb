"""Docstrings as Markdown writes them: `code` in single backticks, and the names of pages.

Signatures show the names of unions, such as `PolicyLike`, which `docs/reference/types.md` explains.
"""

import functools
import re
from pathlib import Path

import jax
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.typing import stringify_annotation

import jmpx
from jmpx._adapters.applying import UncastLike
from jmpx._base.dtypes import DTypeLike
from jmpx._base.trees import AxisName, Flag
from jmpx._policies.maps import PolicyMapLike
from jmpx._policies.policy import PolicyLike
from jmpx._scales.strings import LossScaleLike, MixedPrecisionLike

_CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)(\w?)")
_BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_CLASS = re.compile(r"<class '([\w.]+)'>")
_FLAGS = "<absl.flags._flagvalues.FlagValues object>"
# The unions that signatures show by their names: longer ones first, as they hold the others.
_UNIONS = {
    "MixedPrecisionLike": MixedPrecisionLike,
    "PolicyMapLike": PolicyMapLike,
    "PolicyLike": PolicyLike,
    "LossScaleLike": LossScaleLike,
    "UncastLike": UncastLike,
    "DTypeLike": DTypeLike,
    "~jmpx.LossScale": jmpx.LossScale,
    "ArrayLike": jax.typing.ArrayLike,
    "Flag": Flag,
    "AxisName": AxisName,
}
_CONSTANTS = {
    "jmpx.mpx.BFLOAT16_MAX": "The largest number of bfloat16.",
    "jmpx.mpx.FLOAT16_MAX": "The largest number of float16.",
    "jmpx.mpx.HALF_PRECISION_DATATYPE": "float16, MPX's default half precision.",
}
_SPELLED = {stringify_annotation(union, "smart"): name for name, union in _UNIONS.items()}
_PAGE = re.compile(r"(?:``)?docs/(\w+)\.md(?:``)?")


def _literal(match):
    """Returns reStructuredText of a literal, which ends where a word goes on: `Param`s."""
    text, suffix = match.groups()
    return f"``{text}``" + (f"\\ {suffix}" if suffix else "")


def _code_block(match):
    """Returns a fenced block as a directive."""
    indent, language, code = match.groups()
    lines = "".join(f"   {line}\n" if line else "\n" for line in code.splitlines())
    return f"{indent}.. code-block:: {language}\n\n{lines}"


def to_restructured_text(text: str) -> str:
    """Returns a docstring with literals and links as reStructuredText writes them."""
    text = _BLOCK.sub(_code_block, text)
    parts = re.split(r"(^[ ]*(?:>>>|\.\.\.) .*$)", text, flags=re.MULTILINE)
    for i in range(0, len(parts), 2):  # the others are programs
        prose = _CODE.sub(_literal, parts[i])
        parts[i] = _PAGE.sub(r":doc:`/\1`", prose)
    return "".join(parts)


def convert(app, what, name, obj, options, lines):
    """Converts the lines of a docstring in place."""
    if name in _CONSTANTS:
        lines[:] = [_CONSTANTS[name]]  # else those of its type
    lines[:] = to_restructured_text("\n".join(lines)).split("\n")


def skip(app, what, name, obj, would_skip, options):
    """Leaves out the fields of a class, which the docstring of the class describes."""
    if what == "class" and not (callable(obj) or isinstance(obj, property | classmethod)):
        return True
    return None


def hide_private_fields(app, what, name, obj, options, signature, return_annotation):
    """Shows no signature of a class that another function makes, such as a report."""
    is_made = name.startswith("jmpx.inspect.") or (signature or "").startswith("(_")
    if what == "class" and is_made:
        return "", None
    return None


def _with_names(text: str) -> str:
    for spelled, name in _SPELLED.items():
        text = text.replace(spelled, name)
    text = text.replace("Callable[[...], ~typing.Any]", "Callable").replace("[[...], ", "[..., ")
    return _CLASS.sub(r"\1", text).replace(_FLAGS, "flags.FLAGS")


def name_unions(app, what, name, obj, options, signature, return_annotation):
    """Shows unions and defaults by their names. Autodoc cannot read all of them from the source."""
    return signature and _with_names(signature), return_annotation and _with_names(
        return_annotation
    )


@functools.cache
def _modules_of_classes() -> dict[str, str]:
    """Returns the modules that define classes; public classes name their module instead."""
    root = Path(jmpx.__file__).parent
    return {
        name: ".".join(("jmpx", *path.relative_to(root).with_suffix("").parts))
        for path in root.rglob("*.py")
        for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE)
    }


def source_of_class(app, module, name):
    """Returns the module whose source has a class, None for other objects."""
    return _modules_of_classes().get(name.partition(".")[0])


def show_one_signature():
    """Has autodoc show the signature of a function itself, not its overloads for type checkers."""
    analyze = ModuleAnalyzer.analyze

    def analyze_without_overloads(self):
        analyze(self)
        self.overloads.clear()

    ModuleAnalyzer.analyze = analyze_without_overloads


def setup(app):
    """Is called by Sphinx."""
    show_one_signature()
    app.connect("autodoc-process-signature", hide_private_fields)
    app.connect("autodoc-process-signature", name_unions)
    app.connect("autodoc-skip-member", skip)
    app.connect("viewcode-follow-imported", source_of_class)
    app.connect("autodoc-process-docstring", convert, priority=100)  # before Napoleon
    return {"parallel_read_safe": True}
