"""What a package brings by entry points, installed by pip and used by its names."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from configs import debug_tiny
from jaxrl.builders.validation import validate
from jaxrl.config import default_config
from jaxrl.logs.display import Display
from jaxrl.run import run
from tests.helpers import build, resolved, settings_of
from tests.runs import METHOD_SIZES, records

PACKAGE = Path(__file__).with_name("package")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The package in a folder of its own, as pip puts it there."""
    source, folder = tmp_path / "source", tmp_path / "site"
    shutil.copytree(PACKAGE, source)
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet")
    pip = (sys.executable, "-m", "pip", "install", *offline, f"--target={folder}", str(source))
    subprocess.run(pip, check=True)
    monkeypatch.syspath_prepend(folder)
    yield folder
    sys.modules.pop("my_package", None)


def test_a_run_uses_each_by_its_name(installed, tiny_world, tmp_path, quick_compilation):
    (tmp_path / "notes.txt").write_text("the note\n")
    config = debug_tiny.get_config(str(tiny_world))
    config.update_from_flattened_dict(
        METHOD_SIZES
        | {
            "model.architecture": "skipping",
            "model.replay": True,
            "optimizer.skip_signal_free": False,  # so that the gap is measured at every step
            "search.engine": "notes",
            "search.settings": {"path": str(tmp_path / "notes.txt")},
            "env.name": "curt",
            "env.search.tools": ("dice",),
            "reward.weights": {"exact_match": 1.0, "brevity": 0.5},
            "reward.settings": {"brevity": {"most": 10_000}},
        }
    )
    resolved(config)
    assert config.search.engine == "my_package:Notes"
    assert config.reward.settings == {"my_package:brevity": {"most": 10_000}}
    validate(config)
    parts = build(config)
    assert parts.engine.recorded.keys() == {"skips"}
    (tmp_path / "run").mkdir()
    run(settings_of(config), tmp_path / "run", parts, Display())
    first = records(tmp_path / "run")[1]
    assert first["reward/brevity/mean"] == 1.0
    assert first["critic/rewards/mean"] == 0.5 + first["reward/exact_match/mean"]
    assert first["rollout_corr/logprob_diff_max"] < 1e-4  # training leaves out what sampling did


def test_names_of_ours_and_unknown_ones_stay(installed):
    config = default_config()
    config.reward.weights = {"exact_match": 1.0}
    before = config.to_json()
    resolved(config)
    assert config.to_json() == before
    config.search.engine = "nots"
    with pytest.raises(ValueError, match=r"is 'nots'.*expected one of local, .*, notes, or a "):
        resolved(config)


def test_two_names_of_one_thing_are_refused(installed):
    config = default_config()
    config.reward.weights = {"brevity": 0.5, "my_package:brevity": 0.25}
    with pytest.raises(ValueError, match="the same object twice"):
        resolved(config)


def test_a_name_of_two_packages_is_refused(installed):
    other = installed / "other-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (other / "entry_points.txt").write_text("[jaxrl.engines]\nnotes = other:Engine\n")
    config = default_config()
    config.search.engine = "notes"
    with pytest.raises(ValueError, match=r"2 packages register: my_pack"):
        resolved(config)
