"""The documents against the code: links, files, configuration keys and commands."""

import argparse
import importlib
import importlib.util
import json
import pkgutil
import re
import shlex
import sys
from pathlib import Path

import pytest
from absl.testing import flagsaver

from jaxrl import launch
from jaxrl.builders.validation import validate
from jaxrl.cli import SUBCOMMANDS
from jaxrl.config.schema import default_config, flatten_config
from tests import key_tables
from tests.helpers import BLOCK, blocks, readme_config, shown_config, text

ROOT = Path(__file__).parents[1]
BRIEFS = ROOT / "docs/research/briefs.md"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
KEY = re.compile(r"(?<![\w./])(?:--)?config\.([a-z]\w*(?:\.\w+)*)")
REPOSITORY_PATH = re.compile(
    r"(?<![\w./])((?:configs|examples|benchmarks|launch|tests)/[\w./-]*\w)"
)
MODULE = re.compile(r"python -m ([\w.]+\w)")
PAST = re.compile(r"`[^`]+`\s+at\s+[0-9a-f]{8}\b")
"""A command or file of an earlier commit, which is not checked."""


def find_links():
    """Yield each relative link with its page."""
    for page in PAGES:
        for target in LINK.findall(BLOCK.sub("", text(page))):
            if "://" not in target:
                yield page, target


def test_links_and_anchors_resolve():
    for page, target in find_links():
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), f"{page.name}: {target} leads nowhere"
        if anchor:
            headings = re.findall("^#+ (.*)$", BLOCK.sub("", text(linked)), re.MULTILINE)
            slugs = [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings]
            assert anchor in slugs, f"{page.name}: {target} has no such heading"


def test_configuration_keys_exist():
    flat = flatten_config(default_config())
    known = {key.rsplit(".", n)[0] for key in flat for n in range(key.count(".") + 1)}
    known |= {"json", "py"}  # names of files
    for page in PAGES:
        assert {*KEY.findall(PAST.sub("", text(page)))} <= known, page.name


def test_python_names_of_the_briefs_exist():
    for name in re.findall(r"`((?:jaxrl|examples\.passk_estimator)\.[\w.]+)", text(BRIEFS)):
        pkgutil.resolve_name(name)


def test_named_files_modules_and_targets_exist():
    makefile = text(ROOT / "Makefile")
    for page in PAGES:
        present = PAST.sub("", text(page))
        for path in REPOSITORY_PATH.findall(present):
            assert (ROOT / path).exists(), f"{page.name}: {path} does not exist"
        for module in MODULE.findall(present):
            assert importlib.util.find_spec(module), f"{page.name}: there is no module {module}"
        commands = [line for code in blocks(page, "sh") for line in code.splitlines()]
        commands += re.findall(r"`([^`\n]+)`", text(page))
        for command in commands:
            if match := re.match(r"(?:PYTHON=\S+ )?make ([\w-]+)$", command):
                assert re.search(rf"^{match[1]}:", makefile, re.MULTILINE), (
                    f"{page.name}: {command}"
                )


def test_the_tables_of_keys_are_those_of_their_entries():
    page = text(key_tables.PAGE)
    assert key_tables.tables(page) == page, "run: python -m tests.key_tables"


def test_the_readme_example_is_a_valid_configuration():
    validate(readme_config())


VARIABLES = re.compile(r"""^(?:[A-Z_]+=(?:"[^"]*"|'[^']*'|[^\s"']*) +)+(?=\S)""")
PROGRAM = re.compile(
    r"(?:^|(?<=until ))(?:taskset -c \d )?(?:python -m ([\w.]+)|jaxrl ([\w-]+))(.*)$"
)
OURS = ("jaxrl", "examples", "benchmarks")
CALLED_WITH_KEYS = {
    "jaxrl.extras.audit.__main__": "load_config_file",
    "jaxrl.extras.chat.__main__": "answer_questions",
    "jaxrl.extras.serve.__main__": "serve",
    "jaxrl.extras.saved.evaluate": "evaluate",
}
"""What programs that take configuration keys beside their own flags call when all are parsed."""


def find_lines():
    """Yield the command lines of all pages, continued lines joined, without variables."""
    for page in PAGES:
        for code in blocks(page, "sh"):
            for line in code.replace("\\\n", " ").splitlines():
                line = re.sub(r"\s+", " ", line.partition(" # ")[0].strip())
                if line and not line.startswith("#"):
                    yield VARIABLES.sub("", line)


def find_commands():
    """Return the modules of ours that pages start, with their arguments."""
    lines = list(find_lines())
    [larger] = [line for line in lines if line.startswith("LARGER=")]
    values = {"$LARGER": shlex.split(larger)[0].partition("=")[2], "$i": "0", "$lr": "1e-6"}
    commands = []
    for line in lines:
        match = PROGRAM.search(line)
        if not match:
            continue
        module, *arguments = SUBCOMMANDS[match[2]] if match[2] else (match[1],)
        rest = match[3].removesuffix("; do").removesuffix(" &")
        for variable, value in values.items():
            rest = rest.replace(variable, value)
        if module.partition(".")[0] in OURS:
            commands.append((module, [*arguments, *shlex.split(rest)]))
    return commands


@pytest.fixture
def documented_folder(tmp_path, monkeypatch):
    """Change to a folder with our packages, configurations of pages and the files they name."""
    for package in ("configs", "examples", "benchmarks", "launch", "docs"):
        (tmp_path / package).symlink_to(ROOT / package)
    for page, file, model in (
        (ROOT / "README.md", "my_run.py", "qwen3-4b"),
        (ROOT / "docs" / "guide.md", "first.py", "qwen2.5-0.5b"),
    ):
        config = shown_config(page)
        (tmp_path / file).write_text(config.code)
        path = tmp_path / config.get_config().model.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(ROOT / "configs" / "models" / model)
    tasks = [{"id": f"{i}", "question": "?", "answers": ["x"]} for i in range(3)]
    (tmp_path / "my_data").mkdir()
    for name in ("train", "test"):
        lines = "".join(json.dumps(task) + "\n" for task in tasks)
        (tmp_path / "my_data" / f"{name}.jsonl").write_text(lines)
    for run in ("my_run", "seed0", "seed1", "seed2", "first", "lr_1e-6", "lr_3e-6"):
        (tmp_path / "runs" / run).mkdir(parents=True)
        record = {"step": 1, "stage": "train", "critic/rewards/mean": 0.5}
        (tmp_path / "runs" / run / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    monkeypatch.chdir(tmp_path)


class ParsedError(Exception):
    """The arguments have been parsed."""


def stop(*_):
    raise ParsedError


def parse_and_stop(self, args=None, namespace=None):
    _, unknown = self.parse_known_args(args, namespace)
    assert not unknown
    raise ParsedError


@pytest.mark.usefixtures("documented_folder")
def test_every_documented_command_is_accepted_by_its_program(monkeypatch):
    commands = find_commands()
    assert len(commands) > 80
    for module, arguments in commands:
        with monkeypatch.context() as patch:
            if module == "jaxrl.launch":
                argv = ["launch", *arguments]
                patch.setattr(sys, "argv", argv)
                patch.setattr(sys, "path", [*sys.path])
                with flagsaver.flagsaver():
                    config, _ = launch._load_config(launch.parse_flags(argv))
                validate(config, needs_data=False)
                continue
            if module in {f"jaxrl.extras.{name}" for name in ("audit", "chat", "serve", "view")}:
                module = f"{module}.__main__"
            program = importlib.import_module(module)
            if module in CALLED_WITH_KEYS:
                patch.setattr(program, CALLED_WITH_KEYS[module], stop)
            else:
                patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
            with pytest.raises(ParsedError):
                program.main(arguments)
