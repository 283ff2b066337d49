"""Write the tables of docs/configuration.md from the entries of jaxrl/config/schema.py.

    python -m tests.key_tables

A comment before a table says of which keys or sections it is: `<!-- keys: model mesh -->`.
"""

import re
from pathlib import Path

from jaxrl.config.keys import RESULTS, Key
from jaxrl.config.schema import KEYS

PAGE = Path(__file__).parents[1] / "docs/configuration.md"
HEAD = "| key | default | range | restart | meaning |\n|---|---|---|---|---|\n"
TABLE = re.compile(r"(<!-- keys: (.*?) -->\n\n)(?:\|.*\n)*")


def tables(page: str) -> str:
    """The page with its tables written anew.

    Raises:
        ValueError: a key is in no table, or in two.
    """
    written: list[str] = []

    def table(match: re.Match[str]) -> str:
        names = match[2].split()
        keys = [k for k in KEYS if any(k == n or k.startswith(f"{n}.") for n in names)]
        written.extend(keys)
        return match[1] + HEAD + "".join(row(key, KEYS[key]) for key in keys)

    page = TABLE.sub(table, page)
    if sorted(written) != sorted(KEYS):
        wrong = {key for key in KEYS if written.count(key) != 1}
        raise ValueError(f"in no table of {PAGE.name} or in two: {', '.join(sorted(wrong))}")
    return page


def row(name: str, key: Key) -> str:
    bounds = {">": key.above, "≥": key.at_least, "≤": key.at_most, "<": key.below}
    limits = ", ".join(f"{sign} {bound}" for sign, bound in bounds.items() if bound is not None)
    restart = "" if key.restart == RESULTS else key.restart
    cells = (f"`{name}`", f"`{key.default!r}`", limits, restart, key.meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


if __name__ == "__main__":
    PAGE.write_text(tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
