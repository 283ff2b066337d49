"""The command `jaxrl` of the built wheel, run in an empty folder."""

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
    """Return a folder with the wheel installed, without what it depends on."""
    # Built from a copy: a build leaves folders behind.
    source = tmp_path_factory.mktemp("source")
    listed = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file() and not name.startswith(("tests/", "docs/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    built, site = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    wheel = ["wheel", "--no-deps", "--no-build-isolation", "-w", built, source]
    subprocess.run([*pip, *wheel], check=True)
    [file] = built.iterdir()
    install = ["install", "--no-deps", "--no-index", "--no-compile", "--target", site, file]
    subprocess.run([*pip, *install], check=True)
    return site


def jaxrl(site, *arguments, cwd):
    env = {**os.environ, "PYTHONPATH": str(site), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, "-P", site / "bin" / "jaxrl", *arguments],
        **{"cwd": cwd, "env": env, "capture_output": True, "text": True, "check": False},
    )


def test_the_wheel_has_all_that_the_checkout_runs(site):
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


def test_files_in_the_current_folder_come_before_bundled_ones(site, tmp_path):
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
    """It makes its world, trains and evaluates; `jaxrl report` writes the report again."""
    done = jaxrl(site, "quickstart", "--config.num_steps=2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"data", "runs"}
    report = jaxrl(site, "report", "runs/quickstart", cwd=tmp_path)
    written = "runs/quickstart/report.html"  # relative, like the argument
    assert (report.returncode, report.stdout.splitlines()[-1]) == (0, written)


def test_an_unknown_subcommand_is_refused_with_all_names(site, tmp_path):
    done = jaxrl(site, "trian", cwd=tmp_path)
    assert done.returncode == 1
    words = (
        "quickstart, train, plan, audit, evaluate, export, chat, view, report, serve, tiny-model"
    )
    assert done.stderr == f"error: jaxrl trian: expected {words}.\n"


HELP = """
import runpy, sys
sys.argv[1:] = ["--help"]
try:
    runpy.run_module("{module}", run_name="__main__", alter_sys=True)
except SystemExit:
    pass
print("run \u00e9")
"""


@pytest.mark.parametrize("module", ["jaxrl.cli", "jaxrl.launch", "jaxrl.extras.view"])
def test_characters_that_stdout_cannot_encode_are_replaced(module):
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "JAX_PLATFORMS": "cpu"}
    program = [sys.executable, "-c", HELP.format(module=module)]
    done = subprocess.run(program, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "run ?"), done.stderr


def test_only_missing_files_are_read_from_the_bundle(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bundled = str(ROOT / "configs" / "quickstart.py")
    for argument, resolved in (
        ("--config=configs/quickstart.py:data/a", f"--config={bundled}:data/a"),
        ("configs/quickstart.py", bundled),
        ("--config=configs/none.py", "--config=configs/none.py"),
        ("Is configs/quickstart.py long?", "Is configs/quickstart.py long?"),
    ):
        assert cli.resolve_bundled_path(argument) == resolved
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "quickstart.py").touch()
    assert cli.resolve_bundled_path("configs/quickstart.py") == "configs/quickstart.py"


def test_the_version_is_printed(site, tmp_path):
    done = jaxrl(site, "--version", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"jaxrl \d+\.\d+\.\d+\n", done.stdout)
