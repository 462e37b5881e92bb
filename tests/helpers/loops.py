"""What a program does inside of its loops, and how large it is."""

import re


def operations(lowered, in_loops=False):
    """The names of a lowered program's StableHLO operations, those that functions of it hold, too.

    Args:
        lowered: a `jax.stages.Lowered`.
        in_loops: whether those inside of loops only.
    """
    module = lowered.compiler_ir().body.operations
    functions = {op.attributes["sym_name"].value: op for op in module}

    def walk(op, inside):
        for inner in (inner for region in op.regions for block in region for inner in block):
            if inside or not in_loops:
                yield inner.operation.name
            called = inner.attributes["callee"].value if "callee" in inner.attributes else None
            below = inside or inner.operation.name == "stablehlo.while"
            yield from walk(functions[called] if called else inner, below)

    return list(walk(functions["main"], False))


def instructions(compiled, in_loops=False):
    """The kinds of a compiled program's HLO instructions, without those that fusions hold.

    Args:
        compiled: a `jax.stages.Compiled`.
        in_loops: whether those inside of loops only, which call other computations.
    """
    computations, bodies = {}, []
    for line in compiled.as_text().splitlines():
        header = re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line)
        if header:
            computations[header[1]] = current = []
            continue
        found = re.match(r"\s+(?:ROOT )?%?[\w.-]+ = .*? ([a-z][\w-]*)\(", line)
        if not found:
            continue
        bodies += re.findall(r" while\(.* body=%?([\w.-]+)", line)
        calls = (
            [] if found[1] == "fusion" else re.findall(r"(?:body|to_apply|calls)=%?([\w.-]+)", line)
        )
        current.append((found[1], calls))
    pending, seen = bodies if in_loops else list(computations), set()
    while pending:
        name = pending.pop()
        if name not in seen:
            seen.add(name)
            pending += [called for _, calls in computations[name] for called in calls]
    return [kind for name in seen for kind, _ in computations[name]]
