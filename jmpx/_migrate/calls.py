"""Edits of the arguments of gradient functions."""

import libcst as cst

from jmpx._migrate import moves
from jmpx._migrate.marks import Marks, first_word

_GRADIENT_FUNCTIONS = ("jmpx.filter_grad", "jmpx.filter_value_and_grad")


class Calls(Marks):
    """Rewrites the arguments of jmpx 0.2."""

    def _call_of_0_2(self, old: str, original: cst.Call, updated: cst.Call) -> cst.Call:
        """Gathers the arguments of gradient functions, and marks arguments that are gone."""
        function = old.rpartition(".")[2]
        gathered: dict[str, list[cst.Arg]] = {}
        args: list[cst.Arg] = []
        for each in updated.args:
            name = each.keyword.value if each.keyword else ""
            if words := moves.GONE.get((function, name)):
                self.mark(original, words)
            if old in _GRADIENT_FUNCTIONS and name in moves.GRADIENT:
                new, inner = moves.GRADIENT[name]
                gathered.setdefault(new, []).append(argument(inner, each.value))
            else:
                args.append(each)
        if len(gathered.get("uncast", ())) > 1:
            self.mark(original, "write uncast=(...) for uncast_argnums and uncast_argnames")
            return updated
        if self._facts.taken and gathered and not isinstance(original.func, cst.Attribute):
            self.mark(original, f"write {' and '.join(f'{new}=' for new in gathered)} of jmpx")
            return updated
        for new, inner in gathered.items():
            value = inner[0].value if new == "uncast" else self._group(new, inner, original.func)
            args.append(argument(new, value))
        self.count += bool(gathered)
        return with_args(updated, args) if gathered else updated

    def _group(
        self, new: str, inner: list[cst.Arg], function: cst.CSTNode | None = None
    ) -> cst.BaseExpression:
        """Returns `jmpx.Over(...)`, whose axis comes first without a name, or `jmpx.Batch(...)`.

        Of `m.filter_grad`, a function of `import jmpx as m`, it is `m.Over(...)`.
        """
        root = "jmpx"
        if isinstance(function, cst.Attribute):
            root = first_word(function)
        else:
            self.needs_jmpx = True
        inner = sorted(inner, key=lambda each: not named(each, "axis_name"))
        args = [
            argument("", each.value) if named(each, "axis_name") else plain(each) for each in inner
        ]
        return cst.Call(cst.parse_expression(f"{root}.{new.title()}"), args)


def named(argument: cst.Arg, name: str) -> bool:
    return argument.keyword is not None and argument.keyword.value == name


def argument(name: str, value: cst.BaseExpression) -> cst.Arg:
    """Returns `name=value`, or `value` without a name."""
    if not name:
        return cst.Arg(value)
    equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    return cst.Arg(value, cst.Name(name), equal)


def plain(argument: cst.Arg) -> cst.Arg:
    """Returns an argument without the line break and the comma behind it."""
    empty = cst.SimpleWhitespace("")
    return argument.with_changes(comma=cst.MaybeSentinel.DEFAULT, whitespace_after_arg=empty)


def with_args(call: cst.Call, args: list[cst.Arg]) -> cst.Call:
    """Returns a call with other arguments, whose last one ends as the last one did."""
    end = call.args[-1]
    args = [plain(each) if each is end else each for each in args]
    args[-1] = args[-1].with_changes(comma=end.comma, whitespace_after_arg=end.whitespace_after_arg)
    return call.with_changes(args=args)
