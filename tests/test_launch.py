"""Bad input is refused in one line, at once, and without the network."""

import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from absl.testing import flagsaver

from configs import debug_tiny
from jaxrl import launch
from jaxrl.builders.resolved import resolve_names
from jaxrl.config.schema import serialize_config
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.envs.base import OutageError
from jaxrl.models.hf_weights import open_tensors
from jaxrl.models.registry import read_architecture
from jaxrl.runtime.preemption import Interrupted
from jaxrl.runtime.resume import read_record
from jaxrl.training.failures import AllEpisodesFailedError
from jaxrl.training.usage import BudgetSpentError
from jaxrl.utils.callables import UserCodeError
from tests.helpers import as_nobody

CONFIG = "configs/debug_tiny.py"

# Runs the command where every look-up on the network ends the process with a code of its own.
OFFLINE = """
import os, runpy, sys
def guard(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
        print("network:", event, args, file=sys.stderr, flush=True)
        os._exit(99)
sys.addaudithook(guard)
try:
    runpy.run_module("jaxrl.launch", run_name="__main__", alter_sys=True)
finally:
    print("jax" in sys.modules)
"""


@pytest.fixture
def refusal(monkeypatch, capfd, tmp_path, tiny_world):
    """Return a function that runs the command with arguments and returns its error."""

    def refuse(*arguments, config=f"{CONFIG}:{tiny_world}"):
        workdir = tmp_path / "workdir"
        argv = ["launch", f"--config={config}", f"--workdir={workdir}", *arguments]
        monkeypatch.setattr(sys, "argv", argv)
        monkeypatch.setattr("jaxrl.run.run", lambda *_: pytest.fail("the run was begun"))
        for name in ("socket.connect", "getaddrinfo"):
            monkeypatch.setattr(f"socket.{name}", lambda *_, **__: pytest.fail("network"))
        with flagsaver.flagsaver(), pytest.raises(SystemExit) as ended:
            launch.main(launch.parse_flags(argv))
        assert not workdir.exists()
        assert capfd.readouterr() == ("", "")
        message = ended.value.code
        assert message.startswith("error: ")
        assert "\n" not in message
        assert "Traceback" not in message
        return message.removeprefix("error: ")

    return refuse


@pytest.fixture
def model(tiny_world, tmp_path):
    """A copy of the model's folder, to be damaged."""
    return shutil.copytree(tiny_world / "model", tmp_path / "model")


def write(path, *lines):
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("argument", "wanted", "loads_jax"),
    [
        (
            "--config.rollout.grup_size=4",
            "there is no key config.rollout.grup_size; did you mean rollout.group_size?",
            False,
        ),
        ("--config.model.path=Qwen/Qwen3-0.6B", "model folder 'Qwen/Qwen3-0.6B' does not ex", True),
    ],
)
def test_a_process_refuses_in_one_line_without_the_network(tmp_path, argument, wanted, loads_jax):
    # Nothing is set that would keep JAX, transformers or the hub's client quiet or offline.
    names = {"JAX_PLATFORMS", "HF_HUB_OFFLINE", "TRANSFORMERS_VERBOSITY"}
    names |= {"TRANSFORMERS_NO_ADVISORY_WARNINGS"}
    environment = {name: value for name, value in os.environ.items() if name not in names}
    workdir = tmp_path / "workdir"
    command = [sys.executable, "-c", OFFLINE, f"--workdir={workdir}", f"--config={CONFIG}"]
    done = subprocess.run([*command, argument], capture_output=True, text=True, env=environment)
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith(f"error: {wanted}")
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stdout.strip() == str(loads_jax)
    assert not workdir.exists()


@pytest.mark.parametrize(
    ("argument", "missing"), [("--workdir=x", "--config"), (f"--config={CONFIG}", "--workdir")]
)
def test_a_missing_flag_is_named(monkeypatch, argument, missing):
    argv = ["launch", argument]
    monkeypatch.setattr(sys, "argv", argv)
    with flagsaver.flagsaver(), pytest.raises(SystemExit) as ended:
        launch.main(launch.parse_flags(argv))
    assert ended.value.code.startswith(f"error: {missing} is missing; ")


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        # Flags.
        (["--step=3"], "--step=3 evaluates and exports a checkpoint of the run's own model"),
        (["--step=3", "--config.stages=('evaluate',)"], "has no such checkpoint; available: none."),
        (["--wrkdir=x"], "Unknown command line flag 'wrkdir'. Did you mean"),
        (["--config=configs/nope.py:argument"], "--config=configs/nope.py is not a file; expect"),
        # Values.
        (["--values=my.yaml"], "--values='my.yaml' is not a file"),
        (["--config.rollout.group_size=1"], "config.rollout.group_size is 1; expected at least 2"),
        (["--config.mesh.data=3"], "config.mesh (data=3, fsdp=1, context=1, expert=1, tensor=1) "),
        (["--config.prompt.system=\udcff"], "is '\\udcff'; expected text in UTF-8."),
        (
            ["--config.rollout.max_total_tokens=2048"],
            "max_total_tokens=2048 exceeds the model's 1024 positions",
        ),
        # Files.
        (["--config.sft.source={tmp}/bda.jsonl"], "Did you mean '{tmp}/bad.jsonl'?"),
        (["--config.tasks.train.source={tmp}/bad.jsonl"], "{tmp}/bad.jsonl:1 is not valid JSON"),
        (["--config.search.local.corpus={tmp}/bad.jsonl"], "{tmp}/bad.jsonl:1 is not valid JSON"),
    ],
)
def test_bad_arguments_are_refused(refusal, tmp_path, arguments, wanted):
    write(tmp_path / "bad.jsonl", '{"id": "1", "title": "x"')
    message = refusal(*(argument.format(tmp=tmp_path) for argument in arguments))
    assert wanted.format(tmp=tmp_path) in message


def test_modules_beside_the_config_file_are_found(refusal, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    write(tmp_path / "beside_it.py", "class Env: ...")
    lines = ["from jaxrl.config import default_config", "import beside_it", "def get_config():"]
    lines += ["    config = default_config()", '    config.env.name = "beside_it.Env"']
    file = write(tmp_path / "my_config.py", *lines, "    return config")
    assert refusal(config=str(file)).startswith("config.env.name is 'beside_it.Env', which")


def test_the_command_line_wins(monkeypatch, tmp_path):
    lines = ["seed: 5", "rollout.group_size: 3", "optimizer:", "  lr: 1e-6"]
    values = write(tmp_path / "my.yaml", *lines, "eval.final_suites: [greedy]")
    argv = ["launch", f"--config={CONFIG}", f"--workdir={tmp_path}", f"--values={values}"]
    argv += ["--config.seed=7", "--config.stages=('train',)"]
    monkeypatch.setattr(sys, "argv", argv)
    with flagsaver.flagsaver():
        config, workdir = launch._load_config(launch.parse_flags(argv))
    assert (config.seed, config.rollout.group_size, config.optimizer.lr) == (7, 3, 1e-6)
    assert (config.stages, config.eval.final_suites) == (("train",), ("greedy",))
    assert workdir == tmp_path


class TestModelFolder:
    def test_files_without_permission(self, tiny_world, open_folder):
        model = shutil.copytree(tiny_world / "model", open_folder / "model")
        for name, read in (
            ("model.safetensors", open_tensors),
            ("tokenizer.json", Tokenizer.from_folder),
            ("config.json", read_architecture),
        ):
            (model / name).chmod(0)
            with as_nobody(), pytest.raises(PermissionError) as raised:
                read(model)
            message = launch._format_message(raised.value)
            assert message.startswith(f"{model / name}: Permission denied; give this user")

    def test_damaged_and_missing_weights(self, refusal, model):
        file = model / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1000])
        message = refusal(f"--config.model.path={model}")
        size = file.stat().st_size
        assert message.startswith(f"{file} ({size} bytes) is not a complete safetensors file")
        file.unlink()
        assert "has neither model.safetensors nor" in refusal(f"--config.model.path={model}")

    def test_an_adapter_of_another_model(self, refusal):
        lora = {"rank": 4, "alpha": 8.0, "path": "tests/golden/lora_all_linear"}
        message = refusal(*(f"--config.model.lora.{key}={value}" for key, value in lora.items()))
        assert message.endswith("The adapter was trained for 'qwen3_untied'.")

    def test_a_chat_template_without_system_messages(self, refusal, model):
        file = model / "tokenizer_config.json"
        fields = json.loads(file.read_text())
        raising = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}"
        fields["chat_template"] = f"{raising}{{% endif %}}{fields['chat_template']}"
        file.write_text(json.dumps(fields))
        message = refusal(f"--config.model.path={model}", "--config.prompt.system=Search.")
        assert message.endswith("a chat with the roles ['system', 'user']: no system")


def test_a_full_disk_while_the_index_is_written(refusal, monkeypatch, tmp_path):
    def write_index(*_):
        raise ValueError("An IO error occurred: No space left on device")

    monkeypatch.setattr("jaxrl.envs.search.bm25._write_index", write_index)
    message = refusal(f"--config.search.local.index={tmp_path / 'index'}")
    assert f"could not be written to {tmp_path / 'index'}, where" in message


class TestWorkdir:
    """A run resumes with the configuration that it started with."""

    def check_workdir(self, tmp_path, *, accept_changes=False, **changes):
        config = debug_tiny.get_config(str(tmp_path / "world"))
        config.update_from_flattened_dict(changes)
        record = read_record(tmp_path, accept_changes=accept_changes)
        launch._check_workdir(config, tmp_path, record, {}, accept_changes=accept_changes)

    def write_workdir(self, tmp_path, **changes):
        config = debug_tiny.get_config(str(tmp_path / "world"))
        config.update_from_flattened_dict(changes)
        (tmp_path / "checkpoints" / "5").mkdir(parents=True)
        (tmp_path / "config.json").write_text(serialize_config(config))

    def test_other_keys_change_only_with_consent(self, tmp_path):
        self.write_workdir(tmp_path)
        self.check_workdir(tmp_path, num_steps=500)
        with pytest.raises(ValueError, match=r"config.seed: 0 -> 7. .*--acc"):
            self.check_workdir(tmp_path, seed=7)
        self.check_workdir(tmp_path, accept_changes=True, seed=7)

    @pytest.mark.parametrize(
        ("key", "value", "initial"),
        [
            ("kl.coef", 0.5, {}),
            ("kl.anchor", "old", {}),
            ("model.freeze_tower", True, {"stages": ("evaluate",)}),
            ("model.lora.rank", 4, {"model.lora.rank": 2}),
            ("model.lora.targets", ("k_proj",), {"model.lora.rank": 2}),
            ("tasks.eval.source", "b.csv", {"checkpoint.keep_best": 1}),
        ],
    )
    def test_what_the_state_depends_on_cannot_change(self, tmp_path, key, value, initial):
        self.write_workdir(tmp_path, **initial)
        with pytest.raises(ValueError, match=f"config.{key} is .*, but .* began with"):
            self.check_workdir(tmp_path, accept_changes=True, **initial | {key: value})

    def test_exporting_onto_the_source_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match=r"config.model.path=.* is where --workdir=.* exports"):
            self.check_workdir(tmp_path, **{"model.path": str(tmp_path / "export")})


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_signal_before_the_first_step_ends_the_process(monkeypatch, capfd, tmp_path, tiny_world):
    ended = queue.Queue()

    def end(code):
        ended.put(code)
        raise SystemExit  # of the thread that answers signals

    def build(*_, **__):
        os.kill(os.getpid(), signal.SIGINT)
        raise ValueError(ended.get(timeout=10))

    argv = ["launch", f"--config={CONFIG}:{tiny_world}", f"--workdir={tmp_path / 'run'}"]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr("jaxrl.builders.components.build", build)
    monkeypatch.setattr("os._exit", end)
    with flagsaver.flagsaver(), pytest.raises(SystemExit, match="75"):
        launch.main(launch.parse_flags(argv))
    wanted = "SIGINT: ended before the first step; there is nothing to save\n"
    assert capfd.readouterr() == ("", wanted)


class TestFaultsOfTheMachine:
    @pytest.fixture
    def run_until_error(self, monkeypatch, tmp_path, tiny_world):
        def run_until_error(run):
            monkeypatch.setattr("jaxrl.run.run", run)
            monkeypatch.setattr(launch, "_fit_memory", lambda *_, **__: [])
            flags = {"_IGNORE_MEMORY_PLAN": False, "_ACCEPT": False, "_STEP": None}
            for flag, value in flags.items():
                monkeypatch.setattr(launch, flag, SimpleNamespace(value=value))
            monkeypatch.setattr(
                "jaxrl.builders.components.build", lambda *_, **__: SimpleNamespace(notes=[])
            )
            config = debug_tiny.get_config(str(tiny_world))
            with pytest.raises(SystemExit) as raised:
                launch._build_and_run(resolve_names(config), tmp_path, lambda: False, lambda: None)
            return raised.value.code

        return run_until_error

    @pytest.mark.parametrize("saved", [None, 4])
    def test_one_line_says_what_is_saved(self, run_until_error, tmp_path, saved):
        def run(*_):
            if saved:
                folder = tmp_path / "checkpoints" / str(saved)
                folder.mkdir(parents=True)
                (folder / "manifest.json").touch()
            raise ValueError("RESOURCE_EXHAUSTED: params/d/c0: No space left on device")

        what = f"step {saved} is saved" if saved else "nothing is saved yet"
        wanted = f"error: {tmp_path}: No space left on device; {what}; free some space and run the"
        assert run_until_error(run).startswith(wanted)

    def test_a_device_out_of_memory_names_what_to_lower(self, run_until_error):
        def run(*_):
            jnp.zeros((1 << 40, 1 << 20), jnp.int8).block_until_ready()

        message = run_until_error(run)
        assert re.fullmatch(
            r"error: .*RESOURCE_EXHAUSTED: Out of memory.* lower "
            r"config\.sft\.optimizer\.micro_rows=4 or config\.optimizer\.micro_rows=4 or "
            r"config\.rollout\.max_num_seqs=16; `jaxrl plan` .*; nothing is saved yet\.",
            message,
        )

    def test_another_error_of_a_device_keeps_its_traceback(self, run_until_error):
        def run(*_):
            raise jax.errors.JaxRuntimeError("INTERNAL: a bug")

        with pytest.raises(jax.errors.JaxRuntimeError, match="a bug"):
            run_until_error(run)


@pytest.fixture
def launched(monkeypatch, tmp_path, tiny_world):
    """Return a function that starts the command with a stand-in for `run`; it returns the code."""

    def start(run):
        argv = ["launch", f"--config={CONFIG}:{tiny_world}", f"--workdir={tmp_path / 'run'}"]
        monkeypatch.setattr(sys, "argv", argv)
        monkeypatch.setattr("jaxrl.run.run", run)
        parts = SimpleNamespace(notes=("a note",))
        monkeypatch.setattr("jaxrl.builders.components.build", lambda *_, **__: parts)
        with flagsaver.flagsaver(), pytest.raises(SystemExit) as ended:
            launch.main(launch.parse_flags(argv))
        return ended.value.code

    return start


def test_an_outage_has_its_own_exit_code(launched, capfd, tmp_path):
    workdir = tmp_path / "run"

    def run(*arguments):
        record_start = arguments[-1]
        assert not (workdir / "config.json").exists()  # nothing is restored yet
        record_start()
        raise AllEpisodesFailedError("every episode failed: no route to host")

    assert launched(run) == 69
    outputs = capfd.readouterr()
    assert outputs.err == "error: every episode failed: no route to host\n"
    assert outputs.out == "a note\n"
    # The workdir holds the configuration that it started with.
    assert json.loads((workdir / "config.json").read_text())["seed"] == 0
    [line] = (workdir / "config_history.jsonl").read_text().splitlines()
    assert json.loads(line)["contents"].keys() >= {"tasks.train.source", "search.local.corpus"}


FAILED = "config.filter.name names 'my.keep', which failed: ZeroDivisionError."


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Interrupted("it ended."), 75),
        (BudgetSpentError("it ended."), 78),
        (OutageError("it ended."), 69),
        (UserCodeError(FAILED), f"error: {FAILED}"),  # which a process ends with as 1, in one line
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_run_that_ends_early_says_how(error, code, launched):
    def run(*_):
        raise error

    assert launched(run) == code
