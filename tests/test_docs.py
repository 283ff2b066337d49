"""The documents against the code: links, commands, configuration keys, code, no leftovers."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from jaxrl.builders.validation import validate
from jaxrl.config.schema import default_config, flatten
from tests import key_tables
from tests.helpers import BLOCK, blocks, readme_config, text

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
SOURCES = [
    path
    for folder in ("jaxrl", "configs", "examples", "benchmarks", "launch", "tests", "docs")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".sh", ".md")
]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
KEY = re.compile(r"(?<![\w./])(?:--)?config\.([a-z]\w*(?:\.\w+)*)")
ROW = re.compile(r"^\| `([\w.]+)` \| `(.*?)` \|", re.MULTILINE)
REPOSITORY_PATH = re.compile(
    r"(?<![\w./])((?:configs|examples|benchmarks|launch|tests)/[\w./-]*\w)"
)
MODULE = re.compile(r"python -m ([\w.]+\w)")
PAST = re.compile(r"`[^`]+`\s+at\s+[0-9a-f]{8}\b")
"""A command or file of an earlier commit, which is not checked."""

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def test_the_readme_says_which_marks_make_test_leaves_out():
    """`slow` is not only minutes: it also marks cases for which quicker ones stand."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = re.search(r'^test: .*\n.*-m "(.*)"', makefile, re.MULTILINE)
    marks = re.findall(r"not (\w+)", recipe[1])
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    said = re.search(r"`make test` runs all tests but those marked (.*?)\. ", readme)
    assert said
    assert re.findall(r"`(\w+)`", said[1]) == marks
    markers = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    meaning = "minutes long, or a further case of what a quicker test shows"
    assert f'"slow: {meaning};' in markers
    assert "they take minutes, or repeat a quicker test with one more case" in said[1]


@pages
def test_relative_links_resolve(page):
    for target in LINK.findall(BLOCK.sub("", text(page))):
        path = target.partition("#")[0]
        if path and "://" not in path:
            assert (page.parent / path).exists(), f"{target} leads nowhere"


@pages
def test_anchors_exist(page):
    for target in LINK.findall(BLOCK.sub("", text(page))):
        path, _, anchor = target.partition("#")
        if anchor and "://" not in path:
            there = page.parent / path if path else page
            headings = re.findall("^#+ (.*)$", BLOCK.sub("", text(there)), re.MULTILINE)
            slugs = [re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings]
            assert anchor in slugs, f"{target}: {there.name} has no such heading"


@pages
def test_configuration_keys_exist(page):
    flat = flatten(default_config())
    known = {key.rsplit(".", n)[0] for key in flat for n in range(key.count(".") + 1)}
    page = PAST.sub("", text(page))
    named = {key for key in KEY.findall(page) if key not in ("json", "py")}
    assert named <= known


@pages
def test_named_files_modules_and_targets_exist(page):
    makefile = text(ROOT / "Makefile")
    present = PAST.sub("", text(page))
    for path in REPOSITORY_PATH.findall(present):
        assert (ROOT / path).exists(), f"{path} does not exist"
    for module in MODULE.findall(present):
        assert importlib.util.find_spec(module), f"there is no module {module}"
    commands = [line for code in blocks(page, "sh") for line in code.splitlines()]
    commands += re.findall(r"`([^`\n]+)`", text(page))
    for target in [
        m[1] for m in map(re.compile(r"(?:PYTHON=\S+ )?make ([\w-]+)$").match, commands) if m
    ]:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"there is no make {target}"


@pages
def test_python_blocks_parse(page):
    for code in blocks(page, "python"):
        ast.parse(code)


@pages
def test_every_field_is_filled(page):
    assert not re.findall(r"@@\w+@@", text(page))


def test_nothing_refers_outside_the_repository():
    outside = ".." + "/shared"
    assert not [path for path in [*PAGES, *SOURCES] if outside in text(path)]


def test_the_tables_of_keys_are_those_of_their_entries():
    page = text(key_tables.PAGE)
    assert key_tables.tables(page) == page, "run: python -m tests.key_tables"


def test_contributing_lists_every_module():
    listed = text(ROOT / "CONTRIBUTING.md")
    modules = [path.name for path in (ROOT / "jaxrl").rglob("*.py") if path.name != "__init__.py"]
    assert [name for name in modules if name not in listed] == []


def test_the_readme_names_what_is_missing():
    missing = text(ROOT / "README.md").partition("## What is not here yet")[2]
    asked_for = (
        "environments", "videos", "pipeline", "asynchronous", "serving",
        "critic", "GPUs", "TPUs", "providers", "OpenSearch", "judges", "encoders",
    )  # fmt: skip
    assert [name for name in asked_for if name not in missing] == []


def test_what_tests_need_beside_the_environment_is_told():
    tests = "\n".join(text(path) for path in (ROOT / "tests").rglob("test_*.py"))
    needed = set(re.findall(r'importorskip\("(\w+)"\)|reason="needs (\w+)"', tests))
    programs = {name for pair in needed for name in pair if name}
    assert programs
    told = text(ROOT / "CONTRIBUTING.md")
    assert [name for name in programs if name not in told] == []


def test_the_readme_example_is_a_valid_configuration():
    config = readme_config()
    validate(config)
    shards = config.mesh.data * config.mesh.fsdp
    assert shards * config.mesh.tensor == 8
    assert config.rollout.num_rows % shards == config.optimizer.micro_rows % shards == 0
