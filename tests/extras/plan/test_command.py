"""The plan as the command shows it, and as it decides whether a run starts."""

import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from absl.testing import flagsaver
from rich.console import Console

from configs import debug_tiny
from jaxrl import launch
from jaxrl.builders import components
from jaxrl.builders.capacity import GIB, CacheSizes, format_bytes
from jaxrl.extras.plan import advice, display, memory
from jaxrl.models.registry import read_architecture
from tests.extras.plan.cases import NODE, QWEN_7B, ROOT, large_run
from tests.helpers import readme_config, resolved

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
    """Runs `--plan` in this process; returns its exit status, what it printed, and its JSON."""

    def run(*flags):
        file = tmp_path / "plan.json"
        argv = ["launch", "--plan", f"--plan_json={file}", *flags]
        monkeypatch.setattr(sys, "argv", argv)
        with flagsaver.flagsaver(), pytest.raises(SystemExit) as ended:
            launch.main(launch.parse_flags(argv))
        made = json.loads(file.read_text()) if file.exists() else None
        return ended.value.code, capsys.readouterr(), made

    return run


def test_bytes_for_people_by_hand():
    assert [format_bytes(n) for n in (0, 3 * 2**19, 2**30 - 1, 2**30, 5 * 2**29)] == [
        *("0.00 MiB", "1.50 MiB", "1024.00 MiB", "1.00 GiB", "2.50 GiB"),
    ]


def test_the_plan_of_a_tiny_model_is_in_mib(tiny_world):
    """In GiB each of its rows is 0.00."""
    config = resolved(debug_tiny.get_config(str(tiny_world)))
    model = read_architecture(tiny_world / "model")
    laptop = memory.Target(platform="cpu", num_devices=1, memory_bytes=4 * GIB)
    plan = memory.make_plan(config, model, laptop)
    out = io.StringIO()
    Console(file=out, width=120, color_system=None).print(display.format_plan(plan, [], None))
    table = out.getvalue()
    assert "MiB" in table.split("part")[1].splitlines()[0]
    rows = [float(n) for n in re.findall(r"│ +([\d.]+) │", table)]
    assert max(rows) == pytest.approx(plan.peak / 2**20, abs=0.01)
    assert sum(row > 0.005 for row in rows) > 0.7 * len(rows)
    assert f"fits: {plan.peak / 2**20:.2f} MiB at the peak, 3.60 GiB may be used" in table


class TestShipped:
    """Every configuration that is shipped fits the devices that docs/plan.md names for it."""

    @pytest.mark.parametrize(("flags", "path", "peak", "phase"), FITS, ids=[row[1] for row in FITS])
    def test_the_table(self, flags, path, peak, phase, plan):
        status, shown, made = plan("--plan_memory_gib=80", *flags.split())
        assert status == 0, shown.out
        assert f"{made['peak'] / GIB:.1f}" == peak
        assert max(made["phases"], key=lambda one: one["peak"])["name"].endswith(phase)

    def test_the_table_has_the_published_ones(self):
        named = {Path(row[1]).stem for row in FITS}
        assert named >= {"search_r1", "dapo", "bapo", "ares", "passk"}

    @pytest.mark.parametrize("path", SMALL, ids=lambda path: path.stem)
    def test_small_ones_fit_a_laptop(self, path, tiny_world):
        names = {}
        exec(path.read_text(encoding="utf-8"), names)
        config = resolved(names["get_config"]())
        laptop = memory.Target(platform="cpu", num_devices=1, memory_bytes=4 * GIB)
        assert memory.make_plan(config, read_architecture(tiny_world / "model"), laptop).fits

    def test_the_readme_s_example(self):
        config = resolved(readme_config())
        model = read_architecture(ROOT / "configs/models" / Path(config.model.path).name.lower())
        advice.choose_micro_rows(config, model, NODE)
        assert memory.make_plan(config, model, NODE).fits


class TestMicroRows:
    def test_is_stored_and_kept_at_a_restart(self, tmp_path, monkeypatch, tiny_world):
        config = resolved(debug_tiny.get_config(str(tiny_world)))
        config.optimizer.micro_rows = config.sft.optimizer.micro_rows = 0
        roomy = memory.Target(platform="cpu", num_devices=1, memory_bytes=GIB)
        monkeypatch.setattr(memory, "detect_target", lambda: roomy)
        [sft, _] = launch._fit_memory(config, tmp_path)
        assert config.sft.optimizer.micro_rows == 3  # of 192 tokens: more than 512
        assert config.optimizer.micro_rows == 3
        assert re.match(
            r"config\.sft\.optimizer\.micro_rows=0: 3 rows, planned at \d+\.\d+ MiB", sft
        )
        (tmp_path / "checkpoints" / "5").mkdir(parents=True)
        (tmp_path / "config.json").write_text(json.dumps({"optimizer": {"micro_rows": 12}}))
        config.optimizer.micro_rows = 0
        assert launch._fit_memory(config, tmp_path) == []
        assert config.optimizer.micro_rows == 12

    @pytest.mark.parametrize(
        ("num_devices", "began", "rows", "note"),
        [
            (4, 2, 12, "not the original 2: not a multiple of data * fsdp * expert = 4"),
            (4, 8, 8, None),
            (1, 2**20, 3, "not the original 1048576: they need "),
        ],
    )
    def test_resumed_on_other_devices(
        self, tmp_path, monkeypatch, tiny_world, num_devices, began, rows, note
    ):
        config = resolved(debug_tiny.get_config(str(tiny_world)))
        config.optimizer.micro_rows = 0
        config.mesh.data = -1
        target = memory.Target(platform="cpu", num_devices=num_devices, memory_bytes=GIB)
        monkeypatch.setattr(memory, "detect_target", lambda: target)
        (tmp_path / "checkpoints" / "5").mkdir(parents=True)
        stored = {"optimizer": {"micro_rows": began}}
        (tmp_path / "config.json").write_text(json.dumps(stored))
        said = launch._fit_memory(config, tmp_path)
        assert config.optimizer.micro_rows == rows
        assert [line for line in said if note is None or note not in line] == []
        assert len(said) == (note is not None)


class TestRefusal:
    """A run that the plan says cannot fit does not start."""

    @pytest.fixture(params=[8, 0], ids=["rows", "rows left to the memory"])
    def config(self, request):
        config = large_run(**{"optimizer.micro_rows": request.param})
        config.model.path = str(ROOT / config.model.path)
        return config

    def on(self, monkeypatch, **changes):
        target = replace(NODE, memory_bytes=GIB, **changes)
        monkeypatch.setattr(memory, "detect_target", lambda: target)

    @pytest.mark.parametrize("platform", ["gpu", "tpu"])
    def test_an_accelerator_that_is_too_small(self, config, tmp_path, monkeypatch, platform):
        self.on(monkeypatch, platform=platform)
        with pytest.raises(ValueError, match=r" .iB; --plan suggests .*--ignore_memory_plan"):
            launch._fit_memory(config, tmp_path)

    def test_the_flag_goes_on(self, config, tmp_path, monkeypatch):
        self.on(monkeypatch)
        said = launch._fit_memory(config, tmp_path, ignore_memory_plan=True)
        assert said[-1].startswith("warning: the plan needs ")
        assert config.optimizer.micro_rows == 8  # one on each device where the memory chooses

    def test_a_cpu_is_refused_by_what_is_free(self, config, tmp_path, monkeypatch):
        # The devices share it. What they have in all counts for the choice of rows alone.
        self.on(monkeypatch, platform="cpu", free_bytes=70 * GIB)
        assert launch._fit_memory(config, tmp_path)[1:] == []
        assert config.optimizer.micro_rows == 8
        self.on(monkeypatch, platform="cpu", free_bytes=GIB)
        wanted = r"needs .* GiB on each device, but 1\.00 GiB are free; --plan .*--ignore_memory"
        with pytest.raises(ValueError, match=wanted):
            launch._fit_memory(config, tmp_path)
        said = launch._fit_memory(config, tmp_path, ignore_memory_plan=True)
        assert said[-1].startswith("warning: the plan needs ")

    def test_a_cpu_that_does_not_tell_what_is_free_is_not_refused(
        self, config, tmp_path, monkeypatch
    ):
        self.on(monkeypatch, platform="cpu")
        launch._fit_memory(config, tmp_path)
        assert config.optimizer.micro_rows == 8

    @pytest.mark.parametrize(
        ("free_bytes", "told"),
        [
            (None, "free memory is unknown on this system, so runs"),
            (2**31, "(90% of 2.00 GiB that are free)"),
        ],
    )
    def test_the_plan_tells_what_is_free(self, tiny_world, monkeypatch, plan, free_bytes, told):
        here = memory.Target(platform="cpu", num_devices=1, memory_bytes=GIB, free_bytes=free_bytes)
        monkeypatch.setattr(memory, "detect_target", lambda: here)
        _, shown, _ = plan(f"--config={ROOT / 'configs/debug_tiny.py'}:{tiny_world}")
        assert told in shown.out

    def test_what_fits_goes_on_without_a_word(self, tmp_path, monkeypatch):
        monkeypatch.setattr(memory, "detect_target", lambda: NODE)
        config = large_run()
        config.model.path = str(ROOT / config.model.path)
        assert launch._fit_memory(config, tmp_path) == []


class TestWithoutItsFolder:
    @pytest.fixture(autouse=True)
    def gone(self, monkeypatch):
        for name in ("fitting", "command"):
            monkeypatch.setitem(sys.modules, f"jaxrl.extras.plan.{name}", None)

    def test_a_run_names_its_micro_batches(self, tmp_path):
        config = large_run(**{"optimizer.micro_rows": 0})
        with pytest.raises(ValueError, match=r"config\.optimizer\.micro_rows is 0, .*extras/plan"):
            launch._fit_memory(config, tmp_path)
        config.optimizer.micro_rows = 8
        [note] = launch._fit_memory(config, tmp_path)
        assert note.startswith("no plan of memory: ")

    def test_a_run_on_an_accelerator_names_its_cache(self):
        config = large_run()
        cache = CacheSizes.compute(
            config, QWEN_7B, memory.make_target_mesh(config, QWEN_7B, NODE), 1, 64
        )
        assert cache.fixed_num_pages(config, "gpu") is None
        with pytest.raises(ValueError, match=r"config\.rollout\.cache_gib is 0.*extras/plan"):
            components.count_free_pages(config, QWEN_7B, 64)
        config.rollout.cache_gib = 2.0
        # A page has keys and values of 28 layers with 4 heads of 128, in two bytes.
        assert cache.fixed_num_pages(config, "gpu") == 2 * GIB // (64 * 2 * 28 * 4 * 128 * 2)

    def test_the_flag_is_refused(self, tiny_world, plan):
        status, _, _ = plan(f"--config={ROOT / 'configs/debug_tiny.py'}:{tiny_world}")
        assert re.search("--plan: .*extras/plan", status)


class TestCommand:
    @pytest.fixture
    def plan(self, plan, tmp_path):
        """The same for the default configuration and eight devices, unless flags say otherwise."""
        body = "from jaxrl.config import default_config\nget_config = default_config\n"
        (tmp_path / "plain.py").write_text(body)
        flags = [f"--config={tmp_path / 'plain.py'}", "--config.model.dtype=bfloat16"]
        flags.append(f"--config.model.path={ROOT}/configs/models/qwen2.5-7b")
        return partial(plan, *flags, "--plan_devices=8", "--plan_memory_gib=80")

    def test_fits(self, plan, tmp_path):
        status, shown, made = plan("--config.mesh.fsdp=8")
        assert status == 0
        assert "fits: " in shown.out
        sizes = {"data": 1, "fsdp": 8, "context": 1, "expert": 1, "tensor": 1}
        assert (made["fits"], made["mesh"]) == (True, sizes)
        assert made["peak"] == max(phase["peak"] for phase in made["phases"])
        # Beside what Python keeps of the configuration.
        assert sorted(path.name for path in tmp_path.glob("*.*")) == ["plain.py", "plan.json"]

    def test_does_not_fit(self, plan):
        status, shown, _ = plan(
            f"--config.model.path={ROOT}/configs/models/qwen3-32b",
            "--config.mesh.fsdp=64",
            "--config.optimizer.micro_rows=64",
            "--plan_devices=64",
            "--plan_memory_gib=72",
        )
        assert status == 1
        # 65 GB of decode weights on every device: splitting heads is what helps.
        assert "would fit with --config.mesh.data=1 --config.mesh.fsdp=" in shown.out

    @pytest.mark.parametrize(
        ("flags", "wanted"),
        [
            (["--config.mesh.fsdp=3"], "does not fit the number of devices, 8; "),
            (["--config.mesh.tensor=8"], "4 key-value heads"),
            (["--config.optimizer.micro_rows=12"], "of data * fsdp * expert = 8,"),
            (["--plan_devices=-8"], "--plan_devices=-8"),
            (["--plan_processes=3"], "--plan_processes=3 does not divide the 8"),
            (["--plan_processes=0"], "plan_processes"),
            (["--plan_memory_gib=80GB"], "--plan_memory_gib=80GB"),
            (["--config.rollout.max_total_tokens=100000"], "model's 32768 positions"),
            (
                ["--config.model.path=nowhere"],
                "config.model.path is 'nowhere', which has no config.json; a plan",
            ),
        ],
    )
    def test_refusals(self, plan, flags, wanted):
        message, shown, made = plan(*flags)
        assert message.startswith("error: ")
        assert wanted in message
        assert "\n" not in message
        assert (shown, made) == (("", ""), None)


@pytest.mark.slow(
    instead="extras/plan/test_command.py::TestMicroRows::test_is_stored_and_kept_at_a_restart"
)
def test_a_run_that_leaves_the_micro_batch_to_the_memory_trains(tmp_path, tiny_world):
    command = [sys.executable, "-m", "jaxrl.launch", f"--config=configs/debug_tiny.py:{tiny_world}"]
    command += [f"--workdir={tmp_path / 'run'}", "--config.optimizer.micro_rows=0"]
    command += ["--config.stages=('train',)", "--config.num_steps=1", "--config.eval.suites=()"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "config.optimizer.micro_rows=0: 3 rows, planned at" in done.stdout
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    assert stored["optimizer"]["micro_rows"] == 3
