"""The index of messages: each error and warning of jmpx, read from its source.

A message is the text that `...Error(text)`, `warnings.warn(text)` or `error.add_note(text)` is
called with. Where another function makes the text, or hands it on, as `_warn` does, the index
follows it there. Values that a message names are shown as `…`, and so is what it cannot follow.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.addnodes import pending_xref

ROOT = Path(__file__).parents[2] / "jmpx"
VALUE = "…"
_START = 16  # characters: a caller's words there make a message of their own, later ones are values
# What the files of the library are about: the subject, and the page that explains it. The longest
# beginning of a path decides.
SUBJECTS = {
    "_adapters": ("A function under a policy", "which_way"),
    "_adapters/equinox": ("Equinox", "equinox"),
    "_adapters/haiku": ("Haiku", "haiku"),
    "_adapters/linen": ("Flax Linen", "flax_linen"),
    "_adapters/nnx": ("Flax NNX", "flax_nnx"),
    "_autocast": ("Autocast", "autocast"),
    "_base": ("Dtypes and casts", "casts"),
    "_base/axes": ("Micro-batches and devices", "sharding"),
    "_base/contexts": ("A function under a policy", "which_way"),
    "_base/messages": ("Policies and policy maps", "policies"),
    "_base/public": ("Names that are elsewhere", "coming_from_others"),
    "_base/stateful": ("Flax NNX", "flax_nnx"),
    "_cli": ("The command line", "commands"),
    "_devices": ("Micro-batches and devices", "sharding"),
    "_flags": ("Flags", "flags"),
    "_inspect": ("Reports", "audit"),
    "_inspect/audit": ("Audit a step", "audit"),
    "_inspect/blame": ("Attribute rounding error", "blame"),
    "_inspect/choose": ("Search for a policy", "choose"),
    "_inspect/compare": ("Compare two functions", "compare"),
    "_inspect/emulate": ("Emulate 16-bit rounding", "roundings"),
    "_inspect/first_nonfinite": ("Find a NaN", "nonfinite"),
    "_inspect/hlo": ("Compiled steps", "compiled"),
    "_inspect/plan": ("Predict memory and cost", "plan"),
    "_inspect/restored": ("Checkpoints", "checkpoints"),
    "_inspect/update_report": ("16-bit storage", "storage"),
    "_jaxprs": ("A function under a policy", "which_way"),
    "_migrate": ("The migration tool", "migrate"),
    "_policies": ("Policies and policy maps", "policies"),
    "_remat": ("Save memory", "memory"),
    "_scales": ("Loss scales", "loss_scaling"),
    "_steps": ("Gradients and optimizer steps", "loss_scaling"),
    "_steps/batches": ("Micro-batches and devices", "sharding"),
    "_storage": ("16-bit storage", "storage"),
    "mpx": ("MPX's names", "coming_from_others"),
}


# What is called with a message, besides errors by their names.
_KINDS = {"warn": "UserWarning", "add_note": "note", "error": "ValueError"}
# What another message quotes.
_INNER = ("its factor", "there is no such file", "another module")


class Message(NamedTuple):
    """How a message begins, up to the fix that it names, its kind, and the file that has it."""

    beginning: str
    kind: str
    file: str

    @property
    def shown(self) -> str:
        """The beginning without values that may be missing, such as the place in a string."""
        return re.sub(rf"(?<!tree|rads|rams)(?<=[\w')]){VALUE}(?=,| |$)", "", self.beginning)

    @property
    def subject(self) -> tuple[str, str]:
        """What the message is about, and the page that explains it."""
        return SUBJECTS[max((n for n in SUBJECTS if self.file.startswith(n)), key=len)]

    def begins(self, printed: str) -> bool:
        """Whether a printed message is this one."""
        pattern = re.escape(self.beginning).replace(VALUE, ".*")
        return re.match(pattern, printed, re.DOTALL) is not None


class _Function(NamedTuple):
    """A function, or the body of a file."""

    file: str
    node: ast.AST


class Source:
    """The files of the library, and who calls whom in them."""

    def __init__(self, root: Path):
        self.functions: dict[str, list[_Function]] = {}
        self.calls: dict[str, list[tuple[_Function, ast.Call]]] = {}
        self.assigned: dict[tuple[str, ast.AST], dict[str, list[ast.expr]]] = {}
        for path in sorted(root.rglob("*.py")):
            tree = ast.parse(path.read_text())
            file = str(path.relative_to(root).with_suffix(""))
            self._visit(tree, _Function(file, tree), _Function(file, tree))

    def _visit(self, node: ast.AST, function: _Function, module: _Function) -> None:
        """Notes the functions, the calls and the names that are assigned in a tree."""
        names = self.assigned.setdefault(function, dict(self.assigned.get(module, {})))
        for each in ast.iter_child_nodes(node):
            if isinstance(each, ast.FunctionDef):
                inner = _Function(function.file, each)
                self.functions.setdefault(each.name, []).append(inner)
                self._visit(each, inner, function)
                continue
            if isinstance(each, ast.Call):
                self.calls.setdefault(_name(each.func), []).append((function, each))
            targets = each.targets if isinstance(each, ast.Assign) else []
            if isinstance(each, ast.For | ast.AugAssign | ast.NamedExpr):
                targets = [each.target]
            value = each.iter if isinstance(each, ast.For) else getattr(each, "value", None)
            for target in targets:
                if isinstance(target, ast.Name) and value is not None:
                    names.setdefault(target.id, []).append(value)
            self._visit(each, function, module)

    def messages(self) -> Iterator[Message]:
        """Yields each message."""
        for name, calls in self.calls.items():
            for function, call in calls:
                kind = _KINDS.get(name, name)
                if not call.args or (name not in _KINDS and not name.endswith("Error")):
                    continue
                for text in self.texts(call.args[0], function, ()):
                    text = re.sub(rf"{VALUE}+", VALUE, " ".join(text.split()))
                    text = re.sub(r"(.{8,}?[^:]): .*", r"\1", text)
                    text = text.removesuffix(f". {VALUE}").removesuffix(".")
                    if re.search(r"[A-Za-z]{6}| \w+ \w", text) and not text.startswith(_INNER):
                        yield Message(text, kind, function.file)

    def texts(self, node: ast.AST, function: _Function, within: tuple[ast.AST, ...]) -> list[str]:
        """Returns what a string may be."""
        if node in within or len(within) > 12:
            return [VALUE]
        within = (*within, node)
        match node:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.JoinedStr(values=parts):
                return self._joined(parts, function, within)
            case ast.BinOp(op=ast.Add(), left=left, right=right):
                return self._joined([left, right], function, within)
            case ast.FormattedValue(value=ast.Constant(value=value), conversion=114):
                return [repr(value)]
            case ast.FormattedValue(value=value, conversion=-1) | ast.Starred(value=value):
                return self.texts(value, function, within)
            case ast.Tuple(elts=several):  # messages, one after the other
                return self._any(several, function, within)
            case ast.IfExp(body=body, orelse=orelse):
                return self._any([body, orelse], function, within)
            case ast.BoolOp(values=[*_, value]):
                return self.texts(value, function, within)
        return self._elsewhere(node, function, within)

    def _elsewhere(
        self, node: ast.AST, function: _Function, within: tuple[ast.AST, ...]
    ) -> list[str]:
        """Returns what a name or a call may be."""
        name = _name(node.func) if isinstance(node, ast.Call) else _name(node)
        if isinstance(node, ast.Call) and name != "did_you_mean":
            return self._returned(name, function, within)
        if isinstance(node, ast.Name) and name in self.assigned[function]:
            return self._any(self.assigned[function][name], function, within)
        return self._given(name, function, within) if isinstance(node, ast.Name) else [VALUE]

    def _joined(
        self, parts: Iterable[ast.AST], function: _Function, within: tuple[ast.AST, ...]
    ) -> list[str]:
        found = [""]
        for part in parts:
            options = self.texts(part, function, within)
            if len(options) > 1 and (len(found) > 1 or len(found[0]) >= _START):
                options = [VALUE]
            if VALUE in options:  # also stands for numbers
                options = [each for each in options if each == VALUE or re.search("[a-z]", each)]
            found = [text + option for text in found for option in options]
        return found

    def _any(
        self, values: Iterable[ast.AST], function: _Function, within: tuple[ast.AST, ...]
    ) -> list[str]:
        found = dict.fromkeys(t for value in values for t in self.texts(value, function, within))
        return list(found) or [VALUE]

    def _given(self, name: str, function: _Function, within: tuple[ast.AST, ...]) -> list[str]:
        """Returns what callers give for a parameter."""
        parameters = _parameters(function.node)
        if name not in parameters:
            return [VALUE]
        at = parameters.index(name) - (parameters[0] in ("self", "cls"))
        found = dict[str, None]()
        for caller, call in self.calls.get(function.node.name, []):
            if function.node.name.startswith("_") and caller.file != function.file:
                continue
            given = {each.arg: each.value for each in call.keywords}.get(name)
            given = call.args[at] if given is None and at < len(call.args) else given
            found |= dict.fromkeys(self.texts(given, caller, within) if given else [VALUE])
        return list(found) or [VALUE]

    def _returned(self, name: str, function: _Function, within: tuple[ast.AST, ...]) -> list[str]:
        """Returns what a function of the library returns or yields, if those are strings."""
        if name in _parameters(function.node):
            return [VALUE]
        for found in self.functions.get(name, []):
            returns = getattr(found.node, "returns", None)
            is_near = found.file == function.file or not name.startswith("_")
            if is_near and returns and re.search(r"\bstr\b", ast.unparse(returns)):
                inside = ast.walk(found.node)
                ends = ast.Return | ast.Yield | ast.YieldFrom
                values = [each.value for each in inside if isinstance(each, ends)]
                return self._any([v for v in values if v], found, within)
        return [VALUE]


def _parameters(node: ast.AST) -> list[str]:
    """Returns the names of the parameters of a function; none for the body of a file."""
    return [arg.arg for arg in node.args.args] if isinstance(node, ast.FunctionDef) else []


def _name(func: ast.AST) -> str:
    """Returns the last part of the name of what is called."""
    return getattr(func, "attr", getattr(func, "id", ""))


def collect(root: Path = ROOT) -> list[Message]:
    """Returns the messages of the library, in the order of the alphabet.

    Of two that begin alike, such as those of a string and of a mapping, the shorter one stays.
    """
    kinds: dict[str, dict[str, None]] = {}
    files: dict[str, str] = {}
    for text, kind, file in sorted(set(Source(root).messages())):
        known = next((each for each in kinds if text.startswith(each)), text)
        kinds.setdefault(known, {})[kind] = None
        files.setdefault(known, file)
    found = [Message(text, " or ".join(each), files[text]) for text, each in kinds.items()]
    return sorted(found, key=lambda message: message.beginning.lstrip(f"{VALUE} '-=").lower())


class Messages(Directive):
    """Writes a section for each subject, with a link to its page."""

    def run(self) -> list[nodes.Node]:
        """Returns the sections."""
        env = self.state.document.settings.env
        here = env.docname
        subjects: dict[tuple[str, str], list[Message]] = {}
        for message in collect():
            subjects.setdefault(message.subject, []).append(message)
        sections = []
        for (subject, page), messages in sorted(subjects.items()):
            section = nodes.section("", nodes.title("", subject))
            section["names"] = [nodes.fully_normalize_name(subject)]
            if page in env.found_docs:
                link = pending_xref("", nodes.inline(), refdomain="std", reftype="doc")
                link["reftarget"], link["refexplicit"], link["refdoc"] = f"/{page}", False, here
                words = [nodes.Text("Explained in "), link, nodes.Text(".")]
                section += nodes.paragraph("", "", *words)
            rows = nodes.bullet_list(classes=["messages"])
            for message in messages:
                text = nodes.literal("", message.shown)
                kind = nodes.inline("", message.kind, classes=["kind"])
                rows += nodes.list_item("", nodes.paragraph("", "", text, nodes.Text(" "), kind))
            section += rows
            self.state.document.note_implicit_target(section, section)
            sections.append(section)
        return sections


def setup(app):
    """Registers the directive with Sphinx."""
    app.add_directive("messages", Messages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
