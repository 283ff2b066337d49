"""Commands of README and docs/: all are parsed by what they name, and what takes seconds is run."""

import argparse
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from absl.testing import flagsaver

from jaxrl import launch
from jaxrl.builders.validation import validate
from jaxrl.cli import PROGRAMS
from tests.helpers import ROOT, blocks, shown_config, text
from tests.published import CASES, parquet

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

RUN = (
    "python -m examples.benchmark_tasks ",
    "python -m examples.looking_world ",
    "python -m examples.math_world ",
    "python -m examples.tfds_tasks ",
    "jaxrl report ",
    "cat data/nq/train.jsonl ",
)
"""Beginnings of commands that are run as they stand, beside all that plan."""

NOT_RUN = {
    r"(python -m jaxrl\.launch|jaxrl train) (?!.*--plan)": "minutes; the same "
    "configurations, and whole runs of tiny worlds, are in tests/test_runs.py, test_quickstart.py "
    "and test_restarts.py",
    r"python -m jaxrl\.launch --config=my_run\.py --plan$": "README's configuration is for eight "
    "devices, and this plans for those at hand; with --plan_devices it is run",
    r"jaxrl chat ": "a trained run, which takes minutes; tests/extras/chat/test_chat.py",
    r"jaxrl view ": "serves until it is ended; tests/extras/view/test_server.py",
    r"jaxrl serve ": "serves until it is ended; tests/extras/serve/test_opening.py",
    r"python -m examples\.quickstart_world ": "half a minute each; many tests make smaller ones",
    r"python -m examples\.calls_world ": "likewise; tests/examples/test_calls_world.py",
    r"python -m examples\.real_world ": "downloads wheels; tests/examples/test_real_world.py makes "
    "one of small stand-ins",
    r"python -m examples\.serve_retriever ": "serves until it is ended, on a fixed port; "
    "tests/examples/test_serve_retriever.py",
    r"curl ": "asks that server",
    r"(python -m examples\.tiny_model|jaxrl tiny-model) ": "texts of the reader's; "
    "tests/examples/test_tiny_model.py",
    r"python -m examples\.convert_gguf ": "a downloaded file; tests/examples/test_convert_gguf.py",
    r"python -m pytest ": "needs torch and weights; tests/examples/test_real_gguf.py itself",
    r"(hf download|python -m zipfile|mv) ": "downloads a model, and moves it to its place",
    r"(taskset -c \d )?python -m benchmarks\.": "minutes to hours; tests/test_benchmarks.py runs "
    "small ones",
    r"make ": "minutes; the targets are in the Makefile, and CI runs them",
    r"((\.venv/bin/)?pip|python3(\.12)? -m venv) ": "installs",
    r"agent/bin/python jaxrl/extras/serve/agents/verifiers\.py ": "needs verifiers; "
    "tests/extras/serve/agents/test_verifiers.py runs it where that is",
    r"tensorboard ": "serves until it is ended",
    r"(export|for|do|done|wait|until|LARGER=|\[ )": "of the shell, around other commands",
}
"""The others, and why they are not."""

PROMPTED = re.compile(r"""^(?:[A-Z_]+=(?:"[^"]*"|'[^']*'|[^\s"']*) +)+(?=\S)""")
DEPARTED = re.compile(
    r"(?:^|(?<=until ))(?:taskset -c \d )?(?:python -m ([\w.]+)|jaxrl ([\w-]+))(.*)$"
)


def commands_of(page):
    """The commands of a page, lines that go on joined, without variables before them."""
    for code in blocks(page, "sh"):
        for line in code.replace("\\\n", " ").splitlines():
            line = re.sub(r"\s+", " ", line.partition(" # ")[0].strip())
            if line and not line.startswith("#"):
                yield PROMPTED.sub("", line)


COMMANDS = [(page, line) for page in PAGES for line in commands_of(page)]
LARGER = next(line for _, line in COMMANDS if line.startswith("LARGER="))


def name(command):
    page, line = command
    return f"{page.stem}: {line[:60]}"


def module_and_arguments(line):
    """What `python -m` or `jaxrl` is given; None for another command."""
    found = DEPARTED.search(line)
    if not found:
        return None
    module, *own = PROGRAMS[found[2]] if found[2] else (found[1],)
    given = found[3].replace("$LARGER", shlex.split(LARGER)[0].partition("=")[2])
    given = given.replace("$i", "0").replace("$lr", "1e-6")
    return module, [*own, *shlex.split(given.removesuffix("; do").removesuffix(" &"))]


def is_run(line):
    return line.startswith(RUN) or (
        line.startswith(("python -m jaxrl.launch", "jaxrl plan")) and "--plan_devices" in line
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the repository's own folders, configurations of pages and what they name."""
    folder = tmp_path_factory.mktemp("place")
    for own in ("configs", "examples", "benchmarks", "launch", "docs"):
        (folder / own).symlink_to(ROOT / own)
    for page, file, model in (
        (ROOT / "README.md", "my_run.py", "qwen3-4b"),
        (ROOT / "docs" / "guide.md", "first.py", "qwen2.5-0.5b"),
    ):
        config = shown_config(page)
        (folder / file).write_text(config.code)
        path = folder / config.get_config().model.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(ROOT / "configs" / "models" / model)
    task = {"question": "?", "answers": ["x"]}
    for file in ("my_data/train.jsonl", "my_data/test.jsonl"):
        path = folder / file
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps({"id": f"{i}", **task}) + "\n" for i in range(3)))
    for run in ("my_run", "seed0", "seed1", "seed2", "first", "lr_1e-6", "lr_3e-6"):
        (folder / "runs" / run).mkdir(parents=True)
        record = {"step": 1, "stage": "train", "critic/rewards/mean": 0.5}
        (folder / "runs" / run / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    return folder


def test_the_commands_are_found():
    assert len(COMMANDS) > 80
    lines = [line for _, line in COMMANDS]
    assert "python -m examples.math_world --out=data/math" in lines
    assert sum(map(is_run, lines)) > 20
    assert module_and_arguments("until python -m jaxrl.launch --config=a.py; do") == (
        *("jaxrl.launch", ["--config=a.py"]),
    )
    assert module_and_arguments("jaxrl plan --config=a.py") == (
        *("jaxrl.launch", ["--plan", "--config=a.py"]),
    )


@pytest.mark.parametrize("command", COMMANDS, ids=name)
def test_each_is_run_or_listed_with_a_reason(command):
    _, line = command
    reasons = [why for pattern, why in NOT_RUN.items() if re.match(pattern, line)]
    assert is_run(line) + len(reasons) == 1


def test_every_reason_is_of_a_command():
    lines = [line for _, line in COMMANDS]
    for pattern in NOT_RUN:
        assert any(re.match(pattern, line) for line in lines), pattern
    for beginning in RUN:
        assert any(line.startswith(beginning) for line in lines), beginning


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_shells_can_read_them(page):
    for code in blocks(page, "sh"):
        subprocess.run(["bash", "-n"], input=code, text=True, check=True)


OWN = ("jaxrl", "examples", "benchmarks")  # of other packages the flags are theirs


class ParsedError(Exception):
    """The arguments have been read."""


MODULES = [
    (page, line)
    for page, line in COMMANDS
    if (found := module_and_arguments(line)) and found[0].partition(".")[0] in OWN
]


@pytest.mark.parametrize("command", MODULES, ids=name)
def test_flags_and_keys_are_those_of_the_program(command, place, monkeypatch):
    module, arguments = module_and_arguments(command[1])
    monkeypatch.chdir(place)
    if module == "jaxrl.launch":
        argv = ["launch", *arguments]
        monkeypatch.setattr(sys, "argv", argv)
        monkeypatch.setattr(sys, "path", [*sys.path])
        with flagsaver.flagsaver():
            config, _ = launch._read(launch.parse_flags(argv))
        validate(config, needs_data=False)
        return
    extras = ("chat", "serve", "view")
    is_package = module in [f"jaxrl.extras.{name}" for name in extras]
    program = importlib.import_module(f"{module}.__main__" if is_package else module)
    takes_keys = {
        "jaxrl.extras.chat": "answer",
        "jaxrl.extras.serve": "serve",
    }
    if module in takes_keys:  # of the configuration, beside its own flags

        def begin(*_):
            raise ParsedError

        monkeypatch.setattr(program, takes_keys[module], begin)
    else:

        def parse(self, args=None, namespace=None):
            _, others = self.parse_known_args(args, namespace)
            assert not others
            raise ParsedError

        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    with pytest.raises(ParsedError):
        program.main(arguments)


def test_extras_that_are_installed_exist():
    project = tomllib.loads(text(ROOT / "pyproject.toml"))["project"]
    named = {
        extra
        for page in PAGES
        for extra in re.findall(r"pip install -e ['\"]\.\[(\w[\w-]*)", text(page))
    }
    assert named
    assert named <= project["optional-dependencies"].keys()


TO_RUN = sorted({line for _, line in COMMANDS if is_run(line)})


@pytest.mark.parametrize("line", TO_RUN, ids=lambda line: line[:90])
def test_it_runs_as_it_stands(line, place):
    """From the repository's root, as the documents have it; files that users bring are small."""
    folder = Path(sys.executable).parent
    read = re.search(r"--name=(\w+) --in=(\S+)", line)
    if read:
        path = place / read[2]
        path.parent.mkdir(parents=True, exist_ok=True)
        case = next((c for c in CASES[read[1]] if c[1].endswith(path.suffix)), None)
        write, _, found, _ = case or (parquet, *CASES[read[1]][0][1:])
        write(path, found)
    if line.startswith("cat"):  # of what other commands write
        for file in re.findall(r"data/\S+", line):
            (place / file).parent.mkdir(parents=True, exist_ok=True)
            (place / file).touch()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{folder}:{os.environ['PATH']}"}
    env |= {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        ["bash", "-c", line], cwd=place, env=env, capture_output=True, text=True, timeout=60
    )
    is_plan = "--plan_devices" in line  # which ends with 1 where this machine has too little memory
    assert done.returncode in ((0, 1) if is_plan else (0,)), done.stderr
    assert re.search("^(fits|does not fit): ", done.stdout, re.MULTILINE) or not is_plan
    assert "Traceback" not in done.stderr
