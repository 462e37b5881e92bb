"""Edits of the arguments of gradient functions."""

import libcst as cst

from jmpx._migrate import moves
from jmpx._migrate.marks import Marks, first_word

_HOW = (
    "write by=arguments, or by=modules where it has rules, into the policy: operations are cast now"
)
_FULL = ("full", "f32", "fp32", "float32")  # nothing was cast, and nothing is


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
            if old in moves.GRADIENT_FUNCTIONS and name in moves.GRADIENT:
                new, inner = moves.GRADIENT[name]
                gathered.setdefault(new, []).append(argument(inner, each.value))
            else:
                args.append(each)
        if old in moves.GRADIENT_FUNCTIONS:
            args = self._with_way(args, original)
        if len(gathered.get("uncast", ())) > 1:
            self.mark(original, "write uncast=(...) for uncast_argnums and uncast_argnames")
            return updated
        grouped = [new for new, inner in gathered.items() if not _is_plain(inner)]
        if self._facts.taken and grouped and not isinstance(original.func, cst.Attribute):
            self.mark(original, f"write {' and '.join(f'{new}=' for new in grouped)} of jmpx")
            return updated
        args += [self._gathered(new, inner, original.func) for new, inner in gathered.items()]
        self.count += bool(gathered)
        return with_args(updated, args) if args != [*updated.args] else updated

    def _with_way(self, args: list[cst.Arg], original: cst.Call) -> list[cst.Arg]:
        """Returns the arguments with a policy that casts as its default did until 0.3.

        Without rules, that was by arguments, and by modules with rules for classes or paths. What
        the policy is, only a string tells.
        """
        given = next((each for each in args if named(each, "policy")), None)
        if given is None:
            if any(each.star == "**" for each in args):
                return args
            self.count += 1
            return [*args, argument("policy", cst.SimpleString('"by=arguments,half"'))]
        if not isinstance(given.value, cst.SimpleString):
            self.mark(original, _HOW)
            return args
        text = given.value.evaluated_value
        if not isinstance(text, str) or text.strip().lower() in _FULL or "by=" in text:
            return args
        rules = [part for part in text.partition("|")[0].split(";") if ":" in part]
        if rules and all(rule.strip().startswith("op.") for rule in rules):
            return args
        written = given.value.value
        start = len(given.value.prefix) + len(given.value.quote)
        way = "by=modules," if rules else "by=arguments,"
        value = cst.SimpleString(written[:start] + way + written[start:])
        self.count += 1
        return [each.with_changes(value=value) if each is given else each for each in args]

    def _gathered(self, new: str, inner: list[cst.Arg], function: cst.CSTNode) -> cst.Arg:
        """Returns the argument that takes the place of one of 0.2, or of several."""
        if not _is_plain(inner):
            return argument(new, self._group(new, inner, function))
        return argument("microbatches" if new == "batch" else new, inner[0].value)

    def _group(
        self, new: str, inner: list[cst.Arg], function: cst.CSTNode | None = None
    ) -> cst.BaseExpression:
        """Returns `jmpx.Over(...)`, whose axis comes first without a name, or `jmpx.Batch(...)`.

        Of `m.grad`, a function of `import jmpx as m`, it is `m.Over(...)`.
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


def _is_plain(inner: list[cst.Arg]) -> bool:
    """Whether one argument is taken as it is: an axis, a number of parts, or what has no class."""
    (name, *others) = [each.keyword.value if each.keyword else "" for each in inner]
    return not others and name in ("", "axis_name", "microbatches")


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
