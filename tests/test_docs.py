"""The documents against the code: links, commands, configuration keys, code, no leftovers."""

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


def test_the_tables_of_keys_are_those_of_their_entries():
    page = text(key_tables.PAGE)
    assert key_tables.tables(page) == page, "run: python -m tests.key_tables"


def test_the_readme_example_is_a_valid_configuration():
    config = readme_config()
    validate(config)
    shards = config.mesh.data * config.mesh.fsdp
    assert shards * config.mesh.tensor == 8
    assert config.rollout.max_num_seqs % shards == config.optimizer.micro_rows % shards == 0
