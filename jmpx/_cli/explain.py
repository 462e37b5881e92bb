"""What `python -m jmpx explain` prints: what a policy string means."""

from jmpx._inspect.text import columns
from jmpx._policies.maps import PolicyMap
from jmpx._policies.policy import ATTRIBUTES, Policy, given_fields
from jmpx._policies.rules import Rule
from jmpx._scales.kinds import LossScale, NoOpLossScale
from jmpx._scales.mixed_precision import get_mixed_precision


def _explained(precision: str) -> list[str]:
    """Returns the lines that tell what a policy string means; a ValueError if it is wrong."""
    mixed = get_mixed_precision(precision)
    policy_map = mixed.policy_map
    why = "by= says so" if policy_map.by else "by=modules or by=arguments would say otherwise"
    return [
        *_map_lines(policy_map),
        f"applied by: {policy_map.way} ({why})",
        *_save_lines(policy_map.save),
        _loss_scale_line(precision, mixed.loss_scale),
    ]


def _map_lines(policy_map: PolicyMap) -> list[str]:
    """Returns a table of what each rule of a policy map sets or inherits."""
    default, rules = policy_map.default, policy_map.rules
    rows = [("default", given_fields(default))]
    rows += [(rule.label, _fields_of(rule, default)) for rule in rules]
    if policy_map.way == "operations":  # `o=` widens the results of the whole; others stay
        for _, fields in rows[1:] if policy_map.writes_output else rows:
            fields.pop("output", None)
    shown = [key for key in ATTRIBUTES if any(fields.get(key) for _, fields in rows)]
    cells = [[label, *(fields.get(key, "") for key in shown)] for label, fields in rows]
    lines = columns([["", *shown], *cells])
    if any("*" in value for _, fields in rows for value in fields.values()):
        lines.append(
            "* the compute dtype, or matmul, of what surrounds the call: here, of the default"
        )
    if any(rule.optional for rule in rules):
        lines.append("? no warning where the rule matches nothing")
    return lines


def _fields_of(rule: Rule, default: Policy) -> dict[str, str]:
    """Returns what holds where a rule matches, with a star where it is inherited from a call."""
    rule = rule.spelled_out(default.compute_dtype)
    fields = given_fields(rule.resolve(default, default))
    inherited = {key for key in ("compute", "output", "matmul") if getattr(rule, key) is None}
    if rule.is_operation:  # it has no more than the rule says
        return {key: fields[key] for key in ("compute", "matmul") if key not in inherited}
    return {key: f"{value} *" if key in inherited else value for key, value in fields.items()}


def _save_lines(save: str | None) -> list[str]:
    """Returns the line that says what the backward pass keeps, where the policy map says it."""
    if save is None:
        return []
    which = {
        "products": "products, but none of two activations",
        "products+mixed": "products, but not attention's scores",
        "products+attention": "all products",
    }[save]
    return [f"backward pass: keeps the results of {which} (save={save})"]


def _loss_scale_line(precision: str, loss_scale: LossScale) -> str:
    """Returns the line that shows the loss scale, and why, if the policy map decided on it."""
    line, (_, _, text) = f"loss scale: {loss_scale}", precision.partition("|")
    if text.partition(",")[0].strip().lower() not in ("", "auto"):
        return line
    which = "no policy computes" if isinstance(loss_scale, NoOpLossScale) else "a policy computes"
    return f"{line} (auto: {which} in float16)"
