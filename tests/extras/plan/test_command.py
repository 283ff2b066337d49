"""Output of the plan command, and runs that the plan refuses to start."""

import json
import re
import sys
from dataclasses import replace
from functools import partial

import pytest
from absl.testing import flagsaver

from configs import debug_tiny
from jaxrl import launch
from jaxrl.builders.capacity import GIB, format_bytes
from jaxrl.extras.plan import memory
from jaxrl.models.registry import read_architecture
from tests.extras.plan.cases import NODE, ROOT, large_run
from tests.helpers import resolved

FITS = re.findall(
    r"^\| `(--config=(\S+) .*?)` \| ([\d.]+) GiB \| (\w+) \|",
    (ROOT / "docs/plan.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)
SMALL = [
    path
    for path in sorted((ROOT / "configs").glob("*.py"))
    if "def get_config" in path.read_text(encoding="utf-8")
    and f"configs/{path.name}" not in [row[1] for row in FITS]
]


@pytest.fixture
def plan(monkeypatch, capsys, tmp_path):
    """Run `--plan` in this process; return its exit status, output and JSON file."""

    def run(*flags):
        file = tmp_path / "plan.json"
        argv = ["launch", "--plan", f"--plan_json={file}", *flags]
        monkeypatch.setattr(sys, "argv", argv)
        with flagsaver.flagsaver(), pytest.raises(SystemExit) as exit_info:
            launch.main(launch.parse_flags(argv))
        written = json.loads(file.read_text()) if file.exists() else None
        return exit_info.value.code, capsys.readouterr(), written

    return run


def test_bytes_for_people_by_hand():
    assert [format_bytes(n) for n in (0, 3 * 2**19, 2**30 - 1, 2**30, 5 * 2**29)] == [
        *("0.00 MiB", "1.50 MiB", "1024.00 MiB", "1.00 GiB", "2.50 GiB"),
    ]


class TestShipped:
    """All shipped configurations fit the devices that docs/plan.md lists for them."""

    @pytest.mark.parametrize(("flags", "path", "peak", "phase"), FITS, ids=[row[1] for row in FITS])
    def test_the_table(self, flags, path, peak, phase, plan):
        status, printed, written = plan("--plan_memory_gib=80", *flags.split())
        assert status == 0, printed.out
        assert f"{written['peak'] / GIB:.1f}" == peak
        assert max(written["phases"], key=lambda each: each["peak"])["name"].endswith(phase)

    @pytest.mark.parametrize("path", SMALL, ids=lambda path: path.stem)
    def test_small_ones_fit_a_laptop(self, path, tiny_world):
        names = {}
        exec(path.read_text(encoding="utf-8"), names)
        config = resolved(names["get_config"]())
        laptop = memory.Target(platform="cpu", num_devices=1, memory_bytes=4 * GIB)
        assert memory.make_plan(config, read_architecture(tiny_world / "model"), laptop).fits


class TestMicroRows:
    def test_is_stored_and_kept_at_a_restart(self, tmp_path, monkeypatch, tiny_world):
        config = resolved(debug_tiny.get_config(str(tiny_world)))
        config.optimizer.micro_rows = config.sft.optimizer.micro_rows = 0
        roomy = memory.Target(platform="cpu", num_devices=1, memory_bytes=GIB)
        monkeypatch.setattr(memory, "detect_target", lambda: roomy)
        [sft, _] = launch._fit_memory(config, tmp_path)
        assert config.sft.optimizer.micro_rows == 3  # of 192 tokens: more than 512
        assert config.optimizer.micro_rows == 3
        assert sft.startswith("config.sft.optimizer.micro_rows=0: 3 rows, planned at ")
        (tmp_path / "checkpoints" / "5").mkdir(parents=True)
        (tmp_path / "config.json").write_text(json.dumps({"optimizer": {"micro_rows": 12}}))
        config.optimizer.micro_rows = 0
        assert launch._fit_memory(config, tmp_path) == []
        assert config.optimizer.micro_rows == 12

    @pytest.mark.parametrize(
        ("num_devices", "stored_rows", "rows", "note"),
        [
            (4, 2, 12, "the original 2 do not fit these devices"),
            (4, 8, 8, None),
            (1, 2**20, 3, "the original 1048576 do not fit these devices"),
        ],
    )
    def test_resumed_on_other_devices(
        self, tmp_path, monkeypatch, tiny_world, num_devices, stored_rows, rows, note
    ):
        config = resolved(debug_tiny.get_config(str(tiny_world)))
        config.optimizer.micro_rows = 0
        config.mesh.data = -1
        target = memory.Target(platform="cpu", num_devices=num_devices, memory_bytes=GIB)
        monkeypatch.setattr(memory, "detect_target", lambda: target)
        (tmp_path / "checkpoints" / "5").mkdir(parents=True)
        stored = {"optimizer": {"micro_rows": stored_rows}}
        (tmp_path / "config.json").write_text(json.dumps(stored))
        notes = launch._fit_memory(config, tmp_path)
        assert config.optimizer.micro_rows == rows
        assert [line for line in notes if note is None or note not in line] == []
        assert len(notes) == (note is not None)


class TestRefusal:
    """A run does not start if its plan exceeds the memory."""

    @pytest.fixture
    def config(self):
        config = large_run(**{"optimizer.micro_rows": 8})
        config.model.path = str(ROOT / config.model.path)
        return config

    def set_target(self, monkeypatch, **changes):
        target = replace(NODE, memory_bytes=GIB, **changes)
        monkeypatch.setattr(memory, "detect_target", lambda: target)

    @pytest.mark.parametrize("rows", [8, 0], ids=["rows", "rows left to the memory"])
    def test_an_accelerator_that_is_too_small(self, config, rows, tmp_path, monkeypatch):
        config.optimizer.micro_rows = rows
        self.set_target(monkeypatch)
        with pytest.raises(ValueError, match=r" .iB; --plan suggests .*--ignore_memory_plan"):
            launch._fit_memory(config, tmp_path)
        notes = launch._fit_memory(config, tmp_path, ignore_memory_plan=True)
        assert notes[-1].startswith("warning: the plan needs ")
        assert config.optimizer.micro_rows == 8  # one on each device where the memory chooses

    def test_a_cpu_is_refused_by_what_is_free(self, config, tmp_path, monkeypatch):
        # The devices share it. What they have in all counts for the choice of rows alone.
        for free_bytes in (70 * GIB, None):  # None: the system does not say
            self.set_target(monkeypatch, platform="cpu", free_bytes=free_bytes)
            launch._fit_memory(config, tmp_path)
        self.set_target(monkeypatch, platform="cpu", free_bytes=GIB)
        with pytest.raises(
            ValueError, match=r"needs .* GiB on each device, but 1\.00 GiB are free"
        ):
            launch._fit_memory(config, tmp_path)

    def test_what_fits_goes_on_without_a_word(self, config, tmp_path, monkeypatch):
        monkeypatch.setattr(memory, "detect_target", lambda: NODE)
        assert launch._fit_memory(config, tmp_path) == []


class TestCommand:
    @pytest.fixture
    def plan(self, plan, tmp_path):
        """Run the command for the default configuration and eight devices, unless flags differ."""
        body = "from jaxrl.config import default_config\nget_config = default_config\n"
        (tmp_path / "plain.py").write_text(body)
        flags = [f"--config={tmp_path / 'plain.py'}", "--config.model.dtype=bfloat16"]
        flags.append(f"--config.model.path={ROOT}/configs/models/qwen2.5-7b")
        return partial(plan, *flags, "--plan_devices=8", "--plan_memory_gib=80")

    def test_fits(self, plan, tmp_path):
        status, printed, written = plan("--config.mesh.fsdp=8")
        assert status == 0
        assert "fits: " in printed.out
        sizes = {"data": 1, "fsdp": 8, "context": 1, "expert": 1, "tensor": 1}
        assert (written["fits"], written["mesh"]) == (True, sizes)
        assert written["peak"] == max(phase["peak"] for phase in written["phases"])
        # A plan leaves no other files.
        assert sorted(path.name for path in tmp_path.glob("*.*")) == ["plain.py", "plan.json"]

    def test_does_not_fit(self, plan):
        status, printed, _ = plan(
            f"--config.model.path={ROOT}/configs/models/qwen3-32b",
            "--config.mesh.fsdp=64",
            "--config.optimizer.micro_rows=64",
            "--plan_devices=64",
            "--plan_memory_gib=72",
        )
        assert status == 1
        # 65 GB of decode weights on every device: splitting heads is what helps.
        assert "would fit with --config.mesh.data=1 --config.mesh.fsdp=" in printed.out

    @pytest.mark.parametrize(
        ("flag", "message"),
        [
            ("--config.mesh.fsdp=3", "does not fit the number of devices, 8; "),
            ("--plan_processes=3", "--plan_processes=3 does not divide the 8"),
        ],
    )
    def test_refusals(self, plan, flag, message):
        status, printed, written = plan(flag)
        assert status.startswith("error: ")
        assert message in status
        assert (printed, written) == (("", ""), None)
