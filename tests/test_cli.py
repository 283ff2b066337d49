"""The command `jaxrl` of the built wheel, used in an empty folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl import cli
from tests.helpers import ROOT

pytestmark = pytest.mark.minutes


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder into which the wheel is installed, without what it depends on."""
    built, site = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    wheel = ["wheel", "--no-deps", "--no-build-isolation", "-w", built]
    # From a copy: a build leaves folders behind.
    copy = tmp_path_factory.mktemp("source")
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file() and not name.startswith(("tests/", "docs/")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run([*pip, *wheel, copy], check=True)
    [file] = built.iterdir()
    install = ["install", "--no-deps", "--no-index", "--target", site, file]
    subprocess.run([*pip, *install], check=True)
    return site


def jaxrl(site, *arguments, cwd):
    env = {**os.environ, "PYTHONPATH": str(site), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, "-P", site / "bin" / "jaxrl", *arguments],
        **{"cwd": cwd, "env": env, "capture_output": True, "text": True, "check": False},
    )


def test_the_wheel_holds_all_that_the_checkout_runs(site):
    def files(folder, *patterns):
        return {path.relative_to(folder) for each in patterns for path in folder.rglob(each)}

    patterns = ("*.py", "*.html", "*.css", "*.js", "*/config.json")
    assert files(site / "jaxrl", *patterns) == (
        files(ROOT / "jaxrl", *patterns)
        | {Path("bundled") / "configs" / each for each in files(ROOT / "configs", *patterns)}
        | {Path("bundled") / "examples" / each for each in files(ROOT / "examples", *patterns)}
    )
    others = {path.name for path in site.iterdir()}
    assert others == {"bin", "jaxrl", *(name for name in others if name.endswith(".dist-info"))}


def test_a_plan_with_files_that_came_with_the_package(site, tmp_path):
    done = jaxrl(
        site,
        *("plan", "--config=configs/search_r1_small.py"),
        *("--config.model.path=configs/models/qwen2.5-0.5b", "--plan_devices=1"),
        "--plan_memory_gib=24",
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "fits: " in done.stdout


def test_files_of_ones_own_come_first(site, tmp_path):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "search_r1_small.py").write_text("1 / 0\n")
    done = jaxrl(site, "plan", "--config=configs/search_r1_small.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "ZeroDivisionError: division by zero" in done.stderr
    assert done.stderr.endswith("configs/search_r1_small.py:1).\n")


def test_the_quickstart_finds_a_world_that_was_made(site, tiny_world, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "quickstart").symlink_to(tiny_world)
    done = jaxrl(site, "quickstart", "--plan", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("fits: ") == 1
    assert "wrote" not in done.stdout  # no world


@pytest.mark.slow(instead="test_cli.py::test_the_quickstart_finds_a_world_that_was_made")
def test_the_quickstart_in_an_empty_folder(site, tmp_path):
    """It makes its world, trains and evaluates; the report is written again by its own word."""
    done = jaxrl(site, "quickstart", "--config.num_steps=2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"data", "runs"}
    report = jaxrl(site, "report", "runs/quickstart", cwd=tmp_path)
    written = tmp_path.resolve() / "runs/quickstart/report.html"
    assert (report.returncode, report.stdout.splitlines()[-1]) == (0, str(written))


def test_help_of_the_quickstart_makes_no_world(site, tmp_path):
    done = jaxrl(site, "quickstart", "--help", cwd=tmp_path)
    assert "--config" in done.stdout + done.stderr
    assert not list(tmp_path.iterdir())


def test_without_a_word_it_says_which_there_are(site, tmp_path):
    assert "jaxrl quickstart " in jaxrl(site, cwd=tmp_path).stdout
    done = jaxrl(site, "trian", cwd=tmp_path)
    assert done.returncode == 1
    words = "quickstart, train, plan, evaluate, export, chat, view, report, serve, tiny-model"
    assert done.stderr == f"error: jaxrl trian: expected {words}.\n"
    # A checkout has it without the script.
    module = [sys.executable, "-m", "jaxrl.cli", "trian"]
    again = subprocess.run(module, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (again.returncode, again.stderr) == (1, done.stderr)


NAMES = """
import runpy, sys
sys.argv[1:] = ["--help"]
try:
    runpy.run_module("{module}", run_name="__main__", alter_sys=True)
except SystemExit:
    pass
print("run \u00e9")
"""

MODULES = {module for module, *_ in cli.SUBCOMMANDS.values() if module.startswith("jaxrl.")}


@pytest.mark.parametrize("module", ["jaxrl.cli", *sorted(MODULES)])
def test_no_command_ends_for_what_stdout_cannot_encode(module):
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "JAX_PLATFORMS": "cpu"}
    program = [sys.executable, "-c", NAMES.format(module=module)]
    done = subprocess.run(program, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "run ?"), done.stderr


def test_only_missing_files_are_looked_for_in_the_bundle(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = str(ROOT / "configs" / "quickstart.py")
    for given, wanted in (
        ("--config=configs/quickstart.py", f"--config={whole}"),
        ("--config=configs/quickstart.py:data/a", f"--config={whole}:data/a"),
        ("configs/quickstart.py", whole),
        ("--config=configs/none.py", "--config=configs/none.py"),
        ("--config=my/configs/quickstart.py", "--config=my/configs/quickstart.py"),
        ("Is configs/quickstart.py long?", "Is configs/quickstart.py long?"),
    ):
        assert cli.resolve_bundled_path(given) == wanted
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "quickstart.py").touch()
    assert cli.resolve_bundled_path("configs/quickstart.py") == "configs/quickstart.py"


def test_version(site, tmp_path):
    done = jaxrl(site, "--version", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"jaxrl \d+\.\d+\.\d+\n", done.stdout)
