"""The plan of memory: against arithmetic by hand, against the compiler, and as the command."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from absl.testing import flagsaver

from benchmarks import memory
from configs import debug_tiny
from jaxrl import launch, plan
from jaxrl.config import default_config, validate
from jaxrl.models import qwen
from jaxrl.models.qwen import QwenConfig
from tests.test_docs import readme_config

ROOT = Path(__file__).parents[1]
QWEN_7B = QwenConfig.from_hf(ROOT / "configs/models/qwen2.5-7b")
QWEN_32B = QwenConfig.from_hf(ROOT / "configs/models/qwen3-32b")
NODE = plan.Target(platform="gpu", num_devices=8, memory_bytes=80 * plan.GIB)
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


def large_run(fsdp=8, tensor=1, **keys):
    config = default_config()
    config.stages = ("train",)
    config.model.path = "configs/models/qwen2.5-7b"
    config.model.dtype = "bfloat16"
    config.mesh.fsdp, config.mesh.tensor = fsdp, tensor
    config.update_from_flattened_dict(keys)
    validate(config, needs_data=False)
    return config


def train_phase(config, model=QWEN_7B, target=NODE):
    return plan.update_phase(config, model, target, "train")


class TestByHand:
    def test_7b_on_eight_devices(self):
        # 28 layers of 3584 x (3584 + 2*512 + 3584) attention, 3 x 3584 x 18944 MLP, the biases and
        # norms, and two tables of 152064 x 3584.
        layer = 3584 * (2 * 3584 + 2 * 512) + 3 * 3584 * 18944 + 3584 + 2 * 512 + 2 * 3584
        num_params = 28 * layer + 3584 + 2 * 152064 * 3584
        made = plan.make_plan(large_run(), QWEN_7B, NODE)
        assert made.num_params == num_params == 7_615_616_512
        kept = made.phases[0].kept
        # Norms and biases are whole on every device: less than a thousandth.
        assert kept["parameters"] == pytest.approx(4 * num_params / 8, rel=1e-3)
        assert kept["optimizer state"] == pytest.approx(8 * num_params / 8, rel=1e-3)
        rollout = made.phases[1].kept
        assert rollout["decode weights"] == 2 * num_params
        # 8 of 64 slots, 28 layers, keys and values of 4 heads of 128, 2048 + 16 tokens.
        assert rollout["KV cache"] == 8 * 28 * 2 * 4 * 128 * 2064 * 2
        state = {name: kept[name] for name in ("parameters", "optimizer state")}
        assert made.between == {**state, "decode weights": 2 * num_params}
        assert made.tokens_per_step == 16 * 8 * 2048

    def test_between_phases_the_fullest_stage_counts(self):
        keys = {"kl.coef": 0.01, "sft.optimizer.micro_rows": 8}
        config = large_run(**keys)
        wanted = plan.make_plan(config, QWEN_7B, NODE).between
        names = ["parameters", "optimizer state", "reference parameters", "decode weights"]
        assert list(wanted) == names
        for stages in (default_config().stages, ("sft", "train", "evaluate"), ("sft", "train")):
            config.stages = stages
            assert plan.make_plan(config, QWEN_7B, NODE).between == wanted
        config.stages = ("evaluate",)
        between = plan.make_plan(config, QWEN_7B, NODE).between
        assert list(between) == ["parameters", "decode weights"]
        config.stages = ("sft",)  # nothing is sampled
        between = plan.make_plan(config, QWEN_7B, NODE).between
        assert list(between) == ["parameters", "optimizer state"]

    def test_each_process_reads_its_own_prompts(self):
        def prompts(num_processes, **keys):
            target = replace(NODE, num_devices=64, num_processes=num_processes)
            config = large_run(fsdp=64, **{"rollout.num_slots": 512, **keys})
            return plan.rollout_phase(config, QWEN_32B, target).kept["prompts' caches"]

        # 64 layers, keys and values of 8 heads of 128, prompts of 1024 tokens: of 512 / 8 groups,
        # or of the 64 slots of a process.
        prompt = 64 * 2 * 8 * 128 * 1024 * 2
        assert prompts(1) == 64 * prompt == 16 * plan.GIB
        assert prompts(8) == 8 * prompt == 2 * plan.GIB
        # Each process rounds its two prompts up to its eight devices.
        assert prompts(8, **{"rollout.group_size": 32}) == 8 * prompt

    def test_a_tensor_axis_stays_inside_a_process(self):
        config = large_run(fsdp=4, tensor=4, **{"mesh.data": 4})
        config.optimizer.micro_rows = config.sft.optimizer.micro_rows = 16
        several = replace(NODE, num_devices=64, num_processes=32)
        with pytest.raises(ValueError, match=r"tensor=4 would span .* own 2 devices"):
            plan.make_plan(config, QWEN_32B, several)
        plan.make_plan(config, QWEN_32B, replace(several, num_processes=16))

    def test_a_model_has_so_many_positions(self):
        model = replace(QWEN_7B, max_positions=2047)
        with pytest.raises(ValueError, match=r"max_total_tokens=2048 is beyond the model's 2047"):
            plan.make_plan(large_run(), model, NODE)

    def test_only_the_rows_of_stages_that_run_are_checked(self):
        config = large_run(fsdp=64, **{"optimizer.micro_rows": 64, "rollout.num_slots": 64})
        assert config.sft.optimizer.micro_rows == 8
        plan.make_plan(config, QWEN_32B, replace(NODE, num_devices=64))
        config.stages = ("sft", "train")
        with pytest.raises(ValueError, match=r"config.sft.optimizer.micro_rows is 8; .* = 64"):
            plan.make_plan(config, QWEN_32B, replace(NODE, num_devices=64))

    def test_math_reads_no_results(self):
        config = large_run()
        assert "reading results" in plan.rollout_phase(config, QWEN_7B, NODE).moments
        config.env.name = "math"
        assert "reading results" not in plan.rollout_phase(config, QWEN_7B, NODE).moments

    def test_a_prompt_class_larger_than_a_trajectory(self):
        tiny = {"max_prompt_tokens": 5, "max_total_tokens": 8, "chunk_tokens": 4}
        config = large_run(**{f"rollout.{key}": value for key, value in tiny.items()})
        kept = plan.rollout_phase(config, QWEN_7B, NODE).kept
        assert kept["KV cache"] == 8 * 28 * 2 * 4 * 128 * 16 * 2

    def test_parameters_are_what_the_model_makes(self):
        model = memory.MODELS["tiny"]
        params = qwen.init_params(model, 0)
        target = plan.Target(platform="cpu", num_devices=1, memory_bytes=plan.GIB)
        kept = train_phase(memory.small_run(1, 1, 1), model, target).kept
        assert kept["parameters"] == sum(leaf.nbytes for leaf in jax.tree.leaves(params))

    def test_a_reference_costs_a_copy_of_the_parameters(self):
        kept = train_phase(large_run(**{"kl.coef": 0.01})).kept
        assert kept["reference parameters"] == kept["parameters"]
        assert (
            "reference parameters"
            not in train_phase(large_run(**{"kl.coef": 0.01, "kl.anchor": "old"})).kept
        )

    def test_remat_and_sharding_save_what_they_should(self):
        peak = lambda **settings: train_phase(large_run(**settings)).peak  # noqa: E731
        assert peak() < peak(**{"model.remat": False})
        assert peak() < peak(fsdp=4)
        assert peak() < peak(**{"optimizer.micro_rows": 16})
        whole, halved = (train_phase(large_run(fsdp=4, tensor=t)).moments for t in (1, 2))
        # On half as many shards twice the rows, each with half the heads.
        assert whole["layers"]["attention scores"] == halved["layers"]["attention scores"]


class TestAgainstTheCompiler:
    """Argument, output and temporary bytes of the real programs, compiled for shapes alone."""

    def check(self, results):
        assert results
        for program, (planned, compiled) in results.items():
            assert planned == pytest.approx(compiled, rel=0.15), program

    @pytest.mark.slow
    def test_one_device(self):
        self.check(
            memory.compare(memory.small_run(1, 1, 1), memory.MODELS["tiny"], jax.devices()[:1])
        )

    @pytest.mark.minutes
    def test_eight_devices(self):
        self.check(self.in_a_process("--model=tiny", "--mesh=2x2x2"))

    @pytest.mark.slow
    @pytest.mark.parametrize("mesh", ["1x1x1", "1x4x1"])
    def test_large_models(self, mesh):
        self.check(self.in_a_process("--model=tiny,0.5b,0.6b", f"--mesh={mesh}"))

    def in_a_process(self, *arguments):
        command = [sys.executable, "-m", "benchmarks.memory", "--json=/dev/stdout", *arguments]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        rows = json.loads(done.stdout.splitlines()[-1])
        return {
            " ".join((row["model"], row["mesh"], row["program"])): (row["plan"], row["compiler"])
            for row in rows
        }


class TestMicroRows:
    def test_the_largest_that_fits(self):
        config = large_run(**{"optimizer.micro_rows": 0, "rollout.tasks_per_step": 64})
        rows, peak = plan.largest_micro_rows(config, QWEN_7B, NODE, "train")
        usable = NODE.memory_bytes * plan.USABLE
        assert rows % 8 == 0
        assert peak <= usable
        config.optimizer.micro_rows = rows
        assert train_phase(config).peak == peak
        for more in (rows + 8, 2 * rows):
            config.optimizer.micro_rows = more
            assert train_phase(config).peak > usable

    def test_no_more_than_a_batch_needs(self):
        endless = replace(NODE, memory_bytes=10**15)
        config = large_run(**{"optimizer.micro_rows": 0, "optimizer.num_minibatches": 2})
        assert plan.largest_micro_rows(config, QWEN_7B, endless, "train")[0] == 16 * 8 // 2

    def test_where_nothing_fits(self):
        small = replace(NODE, memory_bytes=16 * plan.GIB)
        with pytest.raises(ValueError, match=r"config.optimizer.micro_rows=0 asks .* 8 rows, one"):
            plan.choose_micro_rows(large_run(**{"optimizer.micro_rows": 0}), QWEN_7B, small)

    def test_is_stored_and_kept_at_a_restart(self, tmp_path, monkeypatch, tiny_world):
        config = debug_tiny.get_config(str(tiny_world))
        config.optimizer.micro_rows = config.sft.optimizer.micro_rows = 0
        roomy = plan.Target(platform="cpu", num_devices=1, memory_bytes=plan.GIB)
        monkeypatch.setattr(plan, "host_target", lambda: roomy)
        [sft, _] = launch._fit_memory(config, tmp_path)
        assert config.sft.optimizer.micro_rows == 8  # the batch
        assert config.optimizer.micro_rows == 16  # tasks_per_step * group_size
        assert sft.startswith("config.sft.optimizer.micro_rows=0: 8 rows, planned at 0.")
        (tmp_path / "checkpoints" / "5").mkdir(parents=True)
        (tmp_path / "config.json").write_text(json.dumps({"optimizer": {"micro_rows": 12}}))
        config.optimizer.micro_rows = 0
        assert launch._fit_memory(config, tmp_path) == []
        assert config.optimizer.micro_rows == 12

    @pytest.mark.parametrize(
        ("num_devices", "began", "rows", "note"),
        [
            (4, 2, 16, "not the 2 it began with: no multiple of data * fsdp = 4"),
            (4, 8, 8, None),
            (1, 2**20, 16, "not the 1048576 it began with: they would need "),
        ],
    )
    def test_resumed_on_other_devices(
        self, tmp_path, monkeypatch, tiny_world, num_devices, began, rows, note
    ):
        config = debug_tiny.get_config(str(tiny_world))
        config.optimizer.micro_rows = 0
        config.mesh.data = -1
        target = plan.Target(platform="cpu", num_devices=num_devices, memory_bytes=plan.GIB)
        monkeypatch.setattr(plan, "host_target", lambda: target)
        (tmp_path / "checkpoints" / "5").mkdir(parents=True)
        stored = {"optimizer": {"micro_rows": began}}
        (tmp_path / "config.json").write_text(json.dumps(stored))
        said = launch._fit_memory(config, tmp_path)
        assert config.optimizer.micro_rows == rows
        assert [line for line in said if note is None or note not in line] == []
        assert len(said) == (note is not None)


class TestRefusal:
    """A run on an accelerator that the plan says cannot fit does not start."""

    @pytest.fixture(params=[8, 0], ids=["rows", "rows left to the memory"])
    def config(self, request):
        config = large_run(**{"optimizer.micro_rows": request.param})
        config.model.path = str(ROOT / config.model.path)
        return config

    def on(self, monkeypatch, **changes):
        target = replace(NODE, memory_bytes=plan.GIB, **changes)
        monkeypatch.setattr(plan, "host_target", lambda: target)

    @pytest.mark.parametrize("platform", ["gpu", "tpu"])
    def test_an_accelerator_that_is_too_small(self, config, tmp_path, monkeypatch, platform):
        self.on(monkeypatch, platform=platform)
        with pytest.raises(ValueError, match=r" GiB .*--plan tells .*--ignore_memory_plan"):
            launch._fit_memory(config, tmp_path)

    def test_the_flag_goes_on(self, config, tmp_path, monkeypatch):
        self.on(monkeypatch)
        said = launch._fit_memory(config, tmp_path, ignores_plan=True)
        assert said[-1].startswith("warning: the plan needs ")
        assert config.optimizer.micro_rows == 8  # one on each device where the memory chooses

    def test_a_cpu_is_never_refused(self, config, tmp_path, monkeypatch):
        self.on(monkeypatch, platform="cpu")
        launch._fit_memory(config, tmp_path)
        assert config.optimizer.micro_rows == 8

    def test_what_fits_goes_on_without_a_word(self, tmp_path, monkeypatch):
        monkeypatch.setattr(plan, "host_target", lambda: NODE)
        config = large_run()
        config.model.path = str(ROOT / config.model.path)
        assert launch._fit_memory(config, tmp_path) == []


class TestShipped:
    """Every configuration that is shipped fits the devices that docs/plan.md names for it."""

    @pytest.mark.parametrize(("flags", "path", "peak", "phase"), FITS, ids=[row[1] for row in FITS])
    def test_the_table(self, flags, path, peak, phase, tmp_path, monkeypatch, capsys):
        file = tmp_path / "plan.json"
        argv = ["launch", "--plan", "--plan_memory_gib=80", *flags.split(), f"--plan_json={file}"]
        monkeypatch.setattr(sys, "argv", argv)
        with flagsaver.flagsaver(), pytest.raises(SystemExit) as ended:
            launch.main(launch.parse_flags(argv))
        assert ended.value.code == 0, capsys.readouterr().out
        made = json.loads(file.read_text())
        assert f"{made['peak'] / plan.GIB:.1f}" == peak
        assert max(made["phases"], key=lambda one: one["peak"])["name"].endswith(phase)

    def test_the_table_has_the_published_ones(self):
        named = {Path(row[1]).stem for row in FITS}
        assert named >= {"search_r1", "dapo", "bapo", "ares", "passk"}

    @pytest.mark.parametrize("path", SMALL, ids=lambda path: path.stem)
    def test_small_ones_fit_a_laptop(self, path, tiny_world):
        names = {}
        exec(path.read_text(encoding="utf-8"), names)
        config = names["get_config"](str(tiny_world))
        laptop = plan.Target(platform="cpu", num_devices=1, memory_bytes=4 * plan.GIB)
        assert plan.make_plan(config, QwenConfig.from_hf(tiny_world / "model"), laptop).fits

    def test_the_readme_s_example(self):
        config = readme_config()
        model = QwenConfig.from_hf(ROOT / "configs/models" / Path(config.model.path).name.lower())
        plan.choose_micro_rows(config, model, NODE)
        assert plan.make_plan(config, model, NODE).fits


class TestAdvice:
    def test_every_advice_fits_and_is_the_least_change(self):
        config = large_run(**{"optimizer.micro_rows": 128, "rollout.max_total_tokens": 4096})
        assert not plan.make_plan(config, QWEN_7B, NODE).fits
        advice = plan.advise(config, QWEN_7B, NODE)
        assert {"optimizer.micro_rows": 32} in [one.settings for one in advice]
        for one in advice:
            changed = plan.make_plan(plan._changed(config, one.settings), QWEN_7B, NODE)
            assert (changed.peak, changed.fits) == (one.peak, True)
        assert not plan.make_plan(
            plan._changed(config, {"optimizer.micro_rows": 64}), QWEN_7B, NODE
        ).fits

    def test_rows_stay_multiples_of_what_the_mesh_divides(self):
        # A half and a quarter of 72 are 36 and 18, which eight devices would not divide.
        assert plan._halvings(72, unit=8) == [32, 16, 8]
        assert plan._halvings(2048, least=1025) == []
        config = large_run(**{"optimizer.micro_rows": 72, "rollout.max_total_tokens": 4096})
        assert not plan.make_plan(config, QWEN_7B, NODE).fits
        advice = plan.advise(config, QWEN_7B, NODE)
        assert {"optimizer.micro_rows": 32} in [one.settings for one in advice]

    @pytest.mark.parametrize(("slots", "rows"), [(72, 0), (72, 72)])
    def test_slots_and_rows_stay_multiples_too(self, slots, rows):
        config = large_run(**{"rollout.num_slots": slots, "rollout.num_rows": rows})
        tried = [option for options in plan._options(config, QWEN_7B, NODE) for option in options]
        assert [o["rollout.num_slots"] for o in tried if "rollout.num_slots" in o] == [32, 16, 8]
        assert {o["rollout.num_rows"] % 8 for o in tried if "rollout.num_rows" in o} == {0}

    def test_the_tensor_axis_stays_inside_a_process(self):
        target = replace(NODE, num_processes=4)
        tried = [
            option for options in plan._options(large_run(), QWEN_32B, target) for option in options
        ]
        assert {o["mesh.tensor"] for o in tried if o.get("mesh.data") == 1} == {2}

    def test_weights_copied_to_every_device_are_split(self):
        # 12 of state and 4 of gradients a parameter: 114 GiB on every device, 57 on halves.
        advice = plan.advise(large_run(fsdp=1, **{"mesh.data": 8}), QWEN_7B, NODE)
        assert {"mesh.data": 2, "mesh.fsdp": 4, "mesh.tensor": 1} in [a.settings for a in advice]

    def test_a_tensor_axis_takes_fewer_rows_with_it(self):
        # One row of 12288 tokens has 28 x 12288² scores; two devices share the heads of a row only
        # where rows are halved as well.
        keys = {"optimizer.micro_rows": 8, "rollout.max_total_tokens": 12288, "kl.coef": 0.01}
        config = large_run(**keys, **{"rollout.num_slots": 64, "rollout.num_rows": 8})
        assert not plan.make_plan(config, QWEN_7B, NODE).fits
        mesh = {"mesh.data": 1, "mesh.fsdp": 4, "mesh.tensor": 2}
        advice = plan.advise(config, QWEN_7B, NODE)
        assert {**mesh, "optimizer.micro_rows": 4} in [one.settings for one in advice]

    def test_more_devices_where_no_setting_helps(self):
        config = large_run()
        # 32.8e9 parameters of 16 bytes are 61 GiB on each of 8, without weights to multiply with.
        assert plan.advise(config, QWEN_32B, NODE) == []
        assert plan.devices_needed(config, QWEN_32B, NODE) == 16


class TestCommand:
    @pytest.fixture
    def asked(self, tmp_path):
        """What asks for a plan of the default configuration."""
        body = "from jaxrl.config import default_config\nget_config = default_config\n"
        (tmp_path / "plain.py").write_text(body)
        return [f"--config={tmp_path / 'plain.py'}", "--plan", "--config.model.dtype=bfloat16"]

    @pytest.fixture
    def run(self, asked, tmp_path):
        def run(*arguments):
            command = [sys.executable, "-m", "jaxrl.launch", *asked, *arguments]
            environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
            return subprocess.run(
                command, capture_output=True, text=True, env=environment, cwd=tmp_path
            )

        return run

    def test_a_model_that_is_not_there(self, run):
        done = run("--config.model.path=models/none", "--plan_devices=8", "--plan_memory_gib=80")
        assert done.returncode == 1
        assert done.stderr.startswith("error: config.model.path is 'models/none', which holds no")
        assert "safetensors" not in done.stderr

    def test_memory_with_a_unit(self, run):
        wanted = "error: flag --plan_memory_gib=80GB: expected a number of GiB, such as 80\n"
        assert run("--plan_memory_gib=80GB").stderr == wanted

    def test_fits(self, run, tmp_path):
        done = run(
            f"--config.model.path={ROOT}/configs/models/qwen2.5-7b",
            "--config.mesh.fsdp=8",
            "--plan_devices=8",
            "--plan_memory_gib=80",
            f"--plan_json={tmp_path / 'plan.json'}",
        )
        assert done.returncode == 0, done.stderr
        assert "fits: " in done.stdout
        made = json.loads((tmp_path / "plan.json").read_text())
        assert (made["fits"], made["mesh"]) == (True, {"data": 1, "fsdp": 8, "tensor": 1})
        assert made["peak"] == max(phase["peak"] for phase in made["phases"])
        assert sorted(path.name for path in tmp_path.iterdir()) == ["plain.py", "plan.json"]

    def test_does_not_fit(self, run):
        done = run(
            f"--config.model.path={ROOT}/configs/models/qwen3-32b",
            "--config.mesh.fsdp=64",
            "--config.optimizer.micro_rows=64",
            "--plan_devices=64",
            "--plan_memory_gib=80",
        )
        assert done.returncode == 1, done.stderr
        # 65 GB of decode weights on every device: splitting heads is what helps.
        assert "would fit with --config.mesh.data=1 --config.mesh.fsdp=" in done.stdout

    @pytest.mark.parametrize(
        ("arguments", "wanted"),
        [
            (
                ["--config.mesh.fsdp=3", "--plan_devices=8"],
                "does not fit the number of devices, 8; ",
            ),
            (["--config.mesh.tensor=8", "--plan_devices=8"], "4 key-value heads"),
            (["--config.optimizer.micro_rows=12", "--plan_devices=8"], "a multiple of data * fsdp"),
            (["--plan_devices=-8"], "--plan_devices=-8"),
            (
                ["--plan_devices=8", "--plan_processes=3"],
                "--plan_processes=3 does not divide the 8",
            ),
            (["--plan_devices=8", "--plan_processes=0"], "plan_processes"),
            (["--config.rollout.max_total_tokens=100000"], "model's 32768 positions"),
            (
                ["--config.model.path=nowhere"],
                "config.model.path is 'nowhere', which holds no config.json; a plan",
            ),
        ],
    )
    def test_refusals(self, asked, monkeypatch, capfd, arguments, wanted):
        model = f"--config.model.path={ROOT}/configs/models/qwen2.5-7b"
        argv = ["launch", *asked, model, "--plan_memory_gib=80", *arguments]
        monkeypatch.setattr(sys, "argv", argv)
        with flagsaver.flagsaver(), pytest.raises(SystemExit) as ended:
            launch.main(launch.parse_flags(argv))
        message = ended.value.code
        assert message.startswith("error: ")
        assert wanted in message
        assert "\n" not in message
        assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_a_run_that_leaves_the_micro_batch_to_the_memory_trains(tmp_path, tiny_world):
    command = [sys.executable, "-m", "jaxrl.launch", f"--config=configs/debug_tiny.py:{tiny_world}"]
    command += [f"--workdir={tmp_path / 'run'}", "--config.optimizer.micro_rows=0"]
    command += ["--config.stages=('train',)", "--config.num_steps=1", "--config.eval.suites=()"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "config.optimizer.micro_rows=0: 16 rows, planned at" in done.stdout
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    assert stored["optimizer"]["micro_rows"] == 16  # all trajectories of a step
