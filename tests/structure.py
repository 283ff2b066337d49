"""The structure of jaxrl as a picture, which `python -m tests.structure` puts in its page.

Its boxes are the rows of the table in docs/architecture.md, its arrows what rooms import of each
other; one that follows from others is left out.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
FREE = {"runtime", "logs", "report"}
"""Any room may use these, and they use what they show."""


def rows():
    """The rooms and files of each row of the table."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    cells = [line.split("|")[1] for line in lines if line.startswith("| `")]
    return [re.findall(r"`(\w+)(?:/|\.py)`", cell) for cell in cells]


def own_imports(path):
    """What a file imports of jaxrl, by its dotted name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "jaxrl":
            yield from (f"jaxrl.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and f"{node.module}".startswith("jaxrl."):
            yield node.module


def arrows():
    """Pairs of rows of which the first imports the second, without those that follow."""
    row = {name: number for number, names in enumerate(rows()) for name in names}
    found = set()
    for path in (ROOT / "jaxrl").rglob("*.py"):
        own = path.relative_to(ROOT / "jaxrl").with_suffix("").parts[0]
        others = {module.split(".")[1] for module in own_imports(path)}
        if own in row and own not in FREE:
            found |= {(row[own], row[other]) for other in others & row.keys() - FREE}
    found = {(a, b) for a, b in found if a != b}
    reached = set(found)  # by any number of arrows
    for middle in range(len(row)):
        ends = [(a, d) for a, b in reached if b == middle for c, d in reached if c == middle]
        reached |= set(ends)
    assert not any(a == b for a, b in reached - found), "rooms import each other in a circle"
    between = {(a, c) for a, b in found for b2, c in reached if b == b2}
    return sorted(found - between)


def picture():
    """The picture, as Mermaid reads it."""
    boxes = [
        f'    r{number}["{"<br>".join(names)}"]'
        for number, names in enumerate(rows())
        if not FREE & set(names)
    ]
    lines = [f"    r{a} --> r{b}" for a, b in arrows()]
    return "\n".join(["```mermaid", "flowchart BT", *boxes, *lines, "```"])


PLACE = re.compile(r"```mermaid\nflowchart BT\n.*?```", re.DOTALL)

if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(PLACE.sub(picture(), page), encoding="utf-8")
