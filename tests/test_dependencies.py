"""Declared packages, imports that point one way, and slow tests that name a quick one."""

import ast
import re
import sys
import tomllib
from functools import cache
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
    "rouge-score": "rouge_score",
    "tensorflow-datasets": "tensorflow_datasets",
}
"""Modules whose name differs from that of their package."""


@cache
def read_nodes(path):
    """Return all nodes of a file's syntax tree that the tests below look at."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom | ast.Call)]


def find_own_imports(path):
    """Yield the modules of jaxrl that a file imports."""
    for node in read_nodes(path):
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


def find_imported(*folders):
    modules = set()
    for path in [path for folder in folders for path in (ROOT / folder).rglob("*.py")]:
        if path.relative_to(ROOT).as_posix() in ELSEWHERE:
            continue
        for node in read_nodes(path):
            if isinstance(node, ast.Import):
                modules |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules.add(node.module.partition(".")[0])
    return modules - set(sys.stdlib_module_names)


EXTRAS = PROJECT["optional-dependencies"]
CORE = names(PROJECT["dependencies"])
OPTIONAL = {n for key in EXTRAS.keys() - {"tpu", "dev"} for n in names(EXTRAS[key])}


def test_imported_packages_are_declared():
    declared = {MODULES.get(name, name) for name in CORE | OPTIONAL}
    ours = {"jaxrl", "configs", "examples", "benchmarks"}
    ours |= {"gguf"}  # a user of examples/convert_gguf.py installs it
    assert find_imported("jaxrl", "examples", "configs") - declared - ours == set()


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
        package = path.relative_to(ROOT / "jaxrl").with_suffix("").parts[0]
        for module in find_own_imports(path):
            if rank.get(module.split(".")[1], -1) > rank.get(package, len(ORDER)):
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert wrong == []


def test_the_core_never_imports_an_extra():
    """It names one in a table, so each folder can be deleted.

    An extra imports another only to combine two.
    """
    wrong, combined = [], {"jaxrl.extras.hybrid_moe": ("delta_net", "experts")}
    for path in (ROOT / "jaxrl").rglob("*.py"):
        parts = path.relative_to(ROOT / "jaxrl").with_suffix("").parts
        extra = f"jaxrl.{'.'.join(parts[:2])}" if parts[0] == "extras" else ""
        for module in find_own_imports(path):
            allowed = [f"jaxrl.extras.{name}" for name in combined.get(extra, ())]
            is_allowed = extra and module.startswith((extra, *allowed))
            if module.startswith("jaxrl.extras") and not is_allowed:
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert wrong == []


def test_only_builders_hold_a_configuration():
    """Stages and the packages below them receive plain arguments or frozen dataclasses."""
    below = ("utils", "envs", "types", "objectives", "models", "sampling", "training", "logs")
    wrong = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "jaxrl").rglob("*.py")
        if path.relative_to(ROOT / "jaxrl").with_suffix("").parts[0] in below
        and "ml_collections" in path.read_text(encoding="utf-8")
    ]
    assert wrong == []


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


def test_every_slow_test_names_a_quick_one():
    """Or, with `instead=None`, says why there is none. `::[case]` is a case of the same test."""
    wrong = []
    for path in (ROOT / "tests").rglob("test_*.py"):
        if "pytest.mark.slow" not in path.read_text(encoding="utf-8"):
            continue
        for node in read_nodes(path):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.slow"):
                continue
            given = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
            file, _, name = (given["instead"] or "").partition("::")
            is_known = name in functions(ROOT / "tests" / file) or (not file and name[:1] == "[")
            if not (is_known or (given["instead"] is None and given["because"])):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert wrong == []
