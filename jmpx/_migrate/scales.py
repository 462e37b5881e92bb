"""Edits of Flax's DynamicScale."""

from typing import Any

import libcst as cst
import libcst.matchers as m
from libcst.helpers import get_full_name_for_node
from libcst.metadata import Scope

from jmpx._migrate.names import CLASS, DYNAMIC_SCALE, OTHER_CLASS, Facts, Marks

_WRITE_STEP = (
    "write (loss, dynamic_scale, grads_finite, grads) = jmpx.value_and_grad(loss_fn, "
    'dynamic_scale, policy="full")(params)'
)
_VALUE_AND_GRAD = m.Call(m.Attribute(attr=m.Name("value_and_grad")))
_FOUR = m.Assign([m.AssignTarget(m.Tuple([m.Element()] * 4))])


class Scales(Marks):
    """Rewrites DynamicScale, its numbers, and `value_and_grad`, whose results change places."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._scaled: set[cst.CSTNode] = set()  # calls of DynamicScale.value_and_grad, to rewrite
        self._swapped: set[cst.CSTNode] = set()  # assignments of their four results

    def _is_scale(self, node: cst.CSTNode) -> bool | None:
        """Whether an expression is a DynamicScale; None if it may be one, or may be another thing.

        Without an import of Flax's DynamicScale, what is called `dynamic_scale` may be one.
        """
        if self.imports(node):
            return False
        certain = True if self._facts.scales else None
        word = (get_full_name_for_node(node) or "").rpartition(".")[2]
        named = "dynamic_scale" in word
        perhaps = None if named or word in self._facts.words else False
        if not isinstance(node, cst.Name):
            return certain if named else perhaps
        kinds = {self._kind(each) for each in self.bindings(node, node.value)}
        if False in kinds or not kinds - {None}:
            return None if True in kinds else perhaps
        return certain

    def _kind(self, binding: Any) -> bool | None:
        """Whether a binding is one to a DynamicScale; None if it does not matter."""
        node = getattr(binding, "node", None)
        if isinstance(node, cst.Param):
            kind = node.annotation and self.imported(node.annotation.annotation)
            return kind == CLASS or "dynamic_scale" in node.name.value
        if not isinstance(node, cst.Name):
            return False
        parent, above = (*self.above(node),)[:2]
        if isinstance(above, cst.Tuple) and m.matches(parent, m.Element()):
            first = above.elements[0] is parent
            assign = self.parent(self.parent(above))
            if first and m.matches(assign, _FOUR) and isinstance(assign, cst.Assign):
                return True if assign in self._swapped else self._of_gradients(assign.value)
            return False
        made = above if isinstance(parent, cst.AssignTarget) else parent
        if isinstance(made, cst.Assign | cst.AnnAssign | cst.NamedExpr) and made.value is not None:
            return self._makes_scale(made.value)
        return False

    def _of_gradients(self, call: cst.BaseExpression) -> bool | None:
        """Returns None for a call of a function that some `value_and_grad` returned."""
        if not isinstance(call, cst.Call):
            return False
        if m.matches(call.func, _VALUE_AND_GRAD):
            return None
        if not isinstance(call.func, cst.Name):
            return False
        bindings = self.bindings(call.func, call.func.value)
        nodes = [getattr(each, "node", None) for each in bindings]
        assigns = [self._assign(each) for each in nodes if isinstance(each, cst.Name)]
        found = any(each and m.matches(each.value, _VALUE_AND_GRAD) for each in assigns)
        return None if found else False

    def _makes_scale(self, value: cst.BaseExpression) -> bool | None:
        if isinstance(value, cst.IfExp):
            kinds = {self._makes_scale(value.body), self._makes_scale(value.orelse)}
            return False if False in kinds else True if True in kinds else None
        if m.matches(value, m.Name("None")):
            return None
        if isinstance(value, cst.Call):
            return self.imported(value.func) == CLASS
        name = get_full_name_for_node(value) or ""
        return isinstance(value, cst.Name | cst.Attribute) and "dynamic_scale" in name

    def _of_a_scale(self, original: cst.Attribute, updated: cst.Attribute) -> cst.Attribute:
        """Renames the numbers of a DynamicScale: its `scale` is a method of a jmpx loss scale."""
        word, parent = original.attr.value, self.parent(original)
        called = isinstance(parent, cst.Call) and parent.func is original
        kind = self._is_scale(original.value)
        known = self._facts.scales or self._facts.uncertain
        if word == "value_and_grad":
            free = isinstance(original.value, cst.Name) and not self.bindings(
                original.value, original.value.value
            )
            other = free or not known or self.imports(original.value)
            if parent not in self._scaled and (kind is not False or not other):
                self.mark(original, _WRITE_STEP)
            return updated
        if word == "replace" and called and kind is not False and known:
            self.mark(original, OTHER_CLASS)
        new = DYNAMIC_SCALE.get(word)
        if called or new in (None, word) or kind is False:
            return updated
        if kind is None:
            if self._facts.flax:
                self.mark(original, f"write {new} for {word} if this is a jmpx.DynamicLossScale")
            return updated
        self.count += 1
        return updated.with_changes(attr=cst.Name(new or word))

    def _dynamic_loss_scale(self, original: cst.Call, updated: cst.Call) -> cst.Call:
        """Renames the arguments of a DynamicScale, which begins at 65536."""
        given = [each.keyword.value if each.keyword else None for each in updated.args]
        if not all(name in DYNAMIC_SCALE for name in given):
            self.mark(original, "write the arguments of jmpx.DynamicLossScale by name")
            return updated
        args = [
            each.with_changes(keyword=cst.Name(DYNAMIC_SCALE[each.keyword.value]))
            for each in updated.args
            if each.keyword
        ]
        if "scale" not in given:
            args.insert(0, cst.Arg(cst.parse_expression("2.0**16")))
        return updated.with_changes(args=args)

    # The edit of `value_and_grad`.

    def visit_Module(self, node: cst.Module) -> None:
        """Finds the calls whose results are all unpacked into four, at once or by a name."""
        if not self._facts.scales:
            return
        definitions: set[tuple[str, Scope]] = set()
        for assign in self._facts.assigns:
            target, scope = assign.targets[0].target, self.scope(assign)
            if isinstance(target, cst.Name) and scope and self._is_scaled(assign.value):
                definitions.add((target.value, scope))
            elif self._is_scaled(call := _function(assign.value)) and call and self._swaps(assign):
                self._scaled.add(call)
                self._swapped.add(assign)
        for name, scope in definitions:
            uses = {} if name in self._facts.strings else self.uses_of(name, scope)
            for definition, names in uses.items():
                unpacked = [self._unpacked(each) for each in names]
                if unpacked and all(unpacked) and self._is_scaled(definition.value):
                    self._scaled.add(definition.value)
                    self._swapped.update(each for each in unpacked if each)

    def _unpacked(self, name: cst.Name) -> cst.Assign | None:
        """Returns the assignment that unpacks the four results of a function, if it is one."""
        call, assign = (*self.above(name),)[:2]
        if (
            isinstance(assign, cst.Assign)
            and self._swaps(assign)
            and _function(assign.value) is name
        ):
            return assign if assign.value is call else None
        return None

    def _swaps(self, assign: cst.Assign) -> bool:
        """Whether the targets are four, and may be assigned to in another order."""
        if not m.matches(assign, _FOUR):
            return False
        four = cst.ensure_type(assign.targets[0].target, cst.Tuple)
        bound, read = [], set[str]()
        for each in four.elements:
            names, others = _targets(each.value)
            bound.append(names)
            read |= others
            if m.findall(each.value, m.Call() | m.NamedExpr() | m.StarredElement()):
                return False
        scale, finite, value, grads = bound
        if not any(map(self.is_use, self._names.get("_", ()))):
            value = value - {"_"}  # which is read nowhere
        both = value & (scale | finite)
        return not (both or read & (scale | finite | value | grads))

    def _is_scaled(self, node: cst.CSTNode | None) -> bool:
        """Whether a node is `dynamic_scale.value_and_grad(...)` with arguments that are known."""
        if node is None or not m.matches(node, _VALUE_AND_GRAD):
            return False
        call = cst.ensure_type(node, cst.Call)
        names = [each.keyword.value if each.keyword else each.star or "fun" for each in call.args]
        known = names[:1] == ["fun"] and {*names[1:]} <= {"axis_name", "has_aux"}
        return known and self._is_scale(cst.ensure_type(call.func, cst.Attribute).value) is True

    def _gradient_of_scaled(self, call: cst.Call) -> cst.Call:
        self.count += 1
        self.needs_jmpx = True
        scale = cst.ensure_type(call.func, cst.Attribute).value
        args = [
            call.args[0].with_changes(keyword=None, equal=cst.MaybeSentinel.DEFAULT),
            cst.Arg(scale),
        ]
        for each in call.args[1:]:
            if named(each, "axis_name"):
                args.append(argument("over", each.value))
            else:
                args.append(each)
        args.append(argument("policy", cst.SimpleString('"full"')))
        function = cst.parse_expression("jmpx.value_and_grad")
        return with_args(call, args).with_changes(func=function)

    def leave_Assign(self, original_node: cst.Assign, updated_node: cst.Assign) -> cst.Assign:
        """Puts the four results into jmpx's order."""
        if original_node not in self._swapped:
            return updated_node
        (target,) = updated_node.targets
        four = cst.ensure_type(target.target, cst.Tuple)
        scale, finite, value, grads = (each.value for each in four.elements)
        elements = [
            old.with_changes(value=new)
            for old, new in zip(four.elements, (value, scale, finite, grads), strict=True)
        ]
        target = target.with_changes(target=four.with_changes(elements=elements))
        return updated_node.with_changes(targets=[target])


def _function(node: cst.BaseExpression) -> cst.BaseExpression | None:
    return node.func if isinstance(node, cst.Call) else None


def _targets(node: cst.BaseExpression) -> tuple[set[str], set[str]]:
    """Returns the names that a target binds, and those that it reads: of `a[i]` both."""
    if isinstance(node, cst.Name):
        return {node.value}, set()
    if isinstance(node, cst.Tuple | cst.List):
        parts = [_targets(each.value) for each in node.elements]
        return set().union(*(p[0] for p in parts)), set().union(*(p[1] for p in parts))
    return set(), {cst.ensure_type(each, cst.Name).value for each in m.findall(node, m.Name())}


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
