"""A package whose entry points register names, installed by pip."""

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


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Folder into which pip installed the package."""
    source, folder = (tmp_path_factory.mktemp("package") / name for name in ("source", "site"))
    shutil.copytree(PACKAGE, source)
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet")
    pip = (sys.executable, "-m", "pip", "install", *offline, f"--target={folder}", str(source))
    subprocess.run(pip, check=True)
    return folder


@pytest.fixture
def installed(site, monkeypatch):
    monkeypatch.syspath_prepend(site)
    yield
    sys.modules.pop("my_package", None)


@pytest.mark.usefixtures("installed", "quick_compilation", "no_pictures", "one_size")
def test_a_run_uses_each_registered_name(tiny_world, tmp_path):
    (tmp_path / "notes.txt").write_text("the note\n")
    config = debug_tiny.get_config(str(tiny_world))
    config.update_from_flattened_dict(
        METHOD_SIZES
        | {
            "model.architecture": "skipping",
            "model.replay": True,
            "num_steps": 1,
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
    assert parts.engine.recorded_specs.keys() == {"skips"}
    (tmp_path / "run").mkdir()
    run(settings_of(config), tmp_path / "run", parts, Display())
    record = records(tmp_path / "run")[-1]
    assert record["reward/brevity/mean"] == 1.0
    assert record["critic/rewards/mean"] == 0.5 + record["reward/exact_match/mean"]
    assert record["rollout_corr/logprob_diff_max"] < 1e-4  # training skips what sampling skipped


def test_unknown_and_duplicate_names_are_refused(installed, tmp_path, monkeypatch):
    config = default_config()
    config.reward.weights = {"exact_match": 1.0}
    before = config.to_json()
    resolved(config)
    assert config.to_json() == before  # built-in names stay
    config.reward.weights = {"brevity": 0.5, "my_package:brevity": 0.25}
    with pytest.raises(ValueError, match="the same object twice"):
        resolved(config)
    config.reward.weights = {"exact_match": 1.0}
    config.search.engine = "nots"
    with pytest.raises(ValueError, match=r"is 'nots'.*expected one of local, .*, notes, or a "):
        resolved(config)
    # Another package registers the same name.
    other = tmp_path / "other-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (other / "entry_points.txt").write_text("[jaxrl.engines]\nnotes = other:Engine\n")
    monkeypatch.syspath_prepend(tmp_path)
    config.search.engine = "notes"
    with pytest.raises(ValueError, match=r"2 packages register: "):
        resolved(config)
