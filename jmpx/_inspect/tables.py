"""What the tables of reports have in common: how a notebook shows them."""

import html
from collections.abc import Sequence


def html_text(head: Sequence[str], cells: Sequence[Sequence[str]], *ends: Sequence[str]) -> str:
    """Returns a report as HTML: its head, a table whose first row has the names, and its end.

    Heads and ends are lines; those that are empty are left out.
    """
    names, *rows = [[html.escape(cell) for cell in row] for row in cells]
    table = [f"<tr><th>{'</th><th>'.join(names)}</th></tr>"]
    table += [f"<tr><td>{'</td><td>'.join(row)}</td></tr>" for row in rows]
    texts = [f"<pre>{html.escape(chr(10).join(lines))}</pre>" if lines else "" for lines in ends]
    first = f"<pre>{html.escape(chr(10).join(head))}</pre>"
    return "\n".join(filter(None, [first, "<table>", *table, "</table>", *texts]))
