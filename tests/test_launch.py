"""Bad input is told in one line, at once, and without the network."""

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from absl import flags
from absl.testing import flagsaver

from configs import debug_tiny
from jaxrl import launch
from jaxrl.builders.resolved import resolve_names
from jaxrl.config.schema import to_json
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.envs.base import OutageError
from jaxrl.models.hf_weights import open_tensors
from jaxrl.models.registry import read_model
from jaxrl.runtime.preemption import Interrupted
from jaxrl.training.failures import NothingWorksError
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
    """Gives the command's arguments, on the tiny world unless told otherwise; returns the error."""

    def refuse(*arguments, config=f"{CONFIG}:{tiny_world}"):
        workdir = tmp_path / "workdir"
        argv = ["launch", f"--config={config}", f"--workdir={workdir}", *arguments]
        monkeypatch.setattr(sys, "argv", argv)
        sys.modules.pop("config_config", None)  # a config file is loaded into what is there
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


def write_config(path, *lines):
    body = ["config = default_config().lock()", *lines, "return config"]
    head = ["from jaxrl.config import default_config", "def get_config():"]
    return write(path, *head, *(f"    {line}" for line in body))


class TestProcess:
    """The command itself, in a process that may not reach the network."""

    def run(self, tmp_path, *arguments):
        # Nothing is set that would keep JAX, transformers or the hub's client quiet or offline.
        names = (
            "JAX_PLATFORMS",
            "HF_HUB_OFFLINE",
            "TRANSFORMERS_VERBOSITY",
            "TRANSFORMERS_NO_ADVISORY_WARNINGS",
        )
        environment = {name: value for name, value in os.environ.items() if name not in names}
        command = [sys.executable, "-c", OFFLINE, f"--workdir={tmp_path / 'workdir'}", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment)

    def refused(self, tmp_path, *arguments):
        done = self.run(tmp_path, *arguments)
        assert done.returncode == 1, done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
        line = done.stderr.rstrip("\n")
        assert line.startswith("error: ")
        assert not (tmp_path / "workdir").exists()
        return line.removeprefix("error: "), done.stdout.strip() == "True"

    def test_misspelt_key(self, tmp_path):
        got = self.refused(tmp_path, f"--config={CONFIG}", "--config.rollout.grup_size=4")
        wanted = "there is no key config.rollout.grup_size; did you mean rollout.group_size?"
        assert got == (wanted, False)  # JAX was not even imported

    def test_missing_model_folder(self, tmp_path):
        arguments = [f"--config={CONFIG}:{tmp_path}", "--config.model.path=Qwen/Qwen3-0.6B"]
        message, _ = self.refused(tmp_path, *arguments)
        assert message.startswith("model folder 'Qwen/Qwen3-0.6B' does not exist; set config.model")
        assert "hf download Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B" in message

    def test_tokenizer_without_chat_template(self, tmp_path, tiny_world, model):
        file = model / "tokenizer_config.json"
        fields = json.loads(file.read_text())
        del fields["chat_template"]
        file.write_text(json.dumps(fields))
        arguments = [f"--config={CONFIG}:{tiny_world}", f"--config.model.path={model}"]
        message, _ = self.refused(tmp_path, *arguments)
        assert message.startswith(f"the tokenizer in {model} has no chat template; expected")

    def test_malformed_corpus(self, tmp_path, tiny_world):
        good = (tiny_world / "corpus.jsonl").read_text().splitlines()[0]
        corpus = write(tmp_path / "corpus.jsonl", good, '{"id": "1", "title": "x"')
        arguments = [f"--config={CONFIG}:{tiny_world}", f"--config.search.local.corpus={corpus}"]
        message, _ = self.refused(tmp_path, *arguments)
        assert message.startswith(f"{corpus}:2 is not valid JSON")


class TestFlags:
    @pytest.mark.parametrize(
        ("arguments", "missing", "example"),
        [
            ((), "--config is", "--config=configs/quickstart.py"),
            (("--workdir=x",), "--config is", "--config=configs/quickstart.py"),
            (("--plan",), "--config is", "--config=configs/quickstart.py"),
            (("--config.seed=1",), "--config is", "--config=configs/quickstart.py"),
            ((f"--config={CONFIG}",), "--workdir is", "--workdir=runs/quickstart"),
        ],
    )
    def test_a_missing_flag_is_named(self, monkeypatch, capfd, arguments, missing, example):
        argv = ["launch", *arguments]
        monkeypatch.setattr(sys, "argv", argv)
        with flagsaver.flagsaver(), pytest.raises(SystemExit) as ended:
            launch.main(launch.parse_flags(argv))
        assert ended.value.code.startswith(f"error: {missing} missing; ")
        assert ended.value.code.endswith(f" such as {example}.")

    def test_a_step_is_evaluated_alone_and_has_a_checkpoint(self, refusal):
        told = refusal("--step=3")
        assert told.startswith("--step=3 evaluates and exports a checkpoint of the run's own model")
        told = refusal("--step=3", "--config.stages=('evaluate',)")
        assert told.startswith("--step=3: ")
        assert told.endswith("checkpoints has no such checkpoint; it holds none.")

    def test_missing_config_file(self, refusal):
        expected = "expected one such as configs/quickstart.py."
        wanted = f"--config=configs/nope.py is not a file; {expected}"
        assert refusal(config="configs/nope.py") == wanted
        assert refusal("--config.seed=1", config="configs/nope.py:argument") == wanted

    @pytest.mark.parametrize(
        "flag",
        [
            *("values", "config.model.path", "config.tasks.train.source", "config.sft.source"),
            "config.search.local.corpus",
        ],
    )
    def test_a_similar_file_is_suggested(self, refusal, tmp_path, flag):
        file = write(tmp_path / "thing.jsonl")
        wanted = f"Did you mean {str(file)!r}?"
        assert refusal(f"--{flag}={tmp_path / 'thnig.jsonl'}").endswith(wanted)
        assert refusal(config=f"{tmp_path / 'thing'}").endswith(wanted)

    def test_unknown_flag(self, refusal):
        assert refusal("--wrkdir=x").startswith("Unknown command line flag 'wrkdir'. Did you mean")

    def test_argument_that_is_no_flag(self, refusal):
        assert refusal("train").startswith("unexpected arguments ['train']")

    @pytest.mark.parametrize(
        ("override", "wanted"),
        [
            ("--config.rollout.group_size=many", "a whole number"),
            ("--config.rollout.group_size=2.5", "a whole number"),
            ("--config.num_steps=1.5e0", "a whole number"),
            ("--config.optimizer.lr=fast", "a number"),
            ("--config.model.scan_layers=maybe", "true or false"),
            ("--config.rollout.deterministic=maybe", "true or false"),
        ],
    )
    def test_wrong_type(self, refusal, override, wanted):
        assert refusal(override) == f"{override}: expected {wanted}."

    def test_section(self, refusal):
        assert refusal("--config.model=x").startswith("config.model is a section; set its keys")

    def test_switching_off_a_key_that_does_not_exist(self, refusal):
        wanted = "there is no key config.model.remt; did you mean model.remat?"
        assert refusal("--noconfig.model.remt") == wanted

    @pytest.mark.parametrize(
        ("argument", "key"),
        [
            ("--optimizer.lr=1e-5", "optimizer.lr"),
            ("-optimizer.lr", "optimizer.lr"),
            ("--seed=3", "seed"),
        ],
    )
    def test_key_without_its_prefix(self, refusal, argument, key):
        flag = argument.partition("=")[0]
        assert refusal(argument) == f"{flag} is not a flag; set this key as --config.{key}=value."

    @pytest.mark.parametrize("inside", ["", "/run"])
    def test_a_workdir_that_is_a_file(self, refusal, tmp_path, inside):
        file = write(tmp_path / "taken")
        message = refusal(f"--workdir={file}{inside}")
        assert message == f"--workdir={file}{inside}: {file} is a file; name a folder."

    def test_traceback_on_demand(self, monkeypatch, tmp_path):
        argv = ["launch", f"--config={CONFIG}", "--workdir=x", "--config.sed=1", "--traceback"]
        monkeypatch.setattr(sys, "argv", argv)
        with flagsaver.flagsaver(), pytest.raises(ValueError, match=r"config\.sed; did you mean"):
            launch.parse_flags(argv)


class TestConfigFile:
    @pytest.mark.parametrize(
        ("line", "wanted"),
        [
            ("config.rollout.grup_size = 4", "rollout.grup_size; did you mean rollout.group_size?"),
            (
                "config.lss.name = 'clip'",
                "AttributeError: there is no key config.lss; did you mean",
            ),
            ("config.model.zebra.rank = 1", "there is no key config.model.zebra; docs/"),
            (
                "config.rollout.group_size = 'many'",
                "config.rollout.group_size is 'many'; expected a value of type int, as 8.",
            ),
            ("config.seed = sed", "name 'sed' is not defined"),
            ("open('nothing')", "No such file or directory: 'nothing'"),
        ],
    )
    def test_mistake_in_a_line(self, refusal, tmp_path, line, wanted):
        file = write_config(tmp_path / "bad.py", "config.seed = 1", line)
        message = refusal(config=str(file))
        assert message.startswith(f"{file}:5: ")
        assert wanted in message
        assert message == refusal("--config.seed=2", config=str(file))

    def test_syntax(self, refusal, tmp_path):
        file = write(tmp_path / "bad.py", "def get_config(:")
        assert refusal(config=str(file)) == "invalid syntax (bad.py, line 1)"

    @pytest.mark.parametrize("name", ["my.yaml", "my.json"])
    def test_values_in_its_place(self, refusal, tmp_path, name):
        file = write(tmp_path / name, "seed: 3")
        message = refusal(config=str(file))
        assert message.startswith(f"--config={file} takes a Python file, such as configs/quick")
        assert f"as --values={file}." in message

    def test_one_that_may_not_be_read(self, open_folder):
        file = write_config(open_folder / "mine.py")
        file.chmod(0)
        with as_nobody(), pytest.raises(PermissionError) as raised:
            launch._check_config_flags(["launch", f"--config={file}"])
        wanted = f"{file}: Permission denied; give this user the right to it"
        assert launch._message(raised.value).startswith(wanted)

    def test_without_get_config(self, refusal, tmp_path):
        file = write(tmp_path / "bad.py", "config = 3")
        wanted = f"{file} has no get_config; expected a function of that name"
        assert refusal(config=str(file)).startswith(wanted)

    def test_another_result(self, refusal, tmp_path):
        file = write(tmp_path / "bad.py", "def get_config():", "    return {}")
        message = refusal(config=str(file))
        assert message.startswith(f"{file}: get_config returned a dict; expected ")

    def test_no_result(self, refusal, tmp_path):
        file = write_config(tmp_path / "bad.py", "config.seed = 1")
        text = file.read_text().replace("    return config\n", "")
        message = refusal(config=str(write(file, *text.splitlines())))
        assert message == f"{file}: get_config returns nothing; end it with: return config"

    @pytest.mark.parametrize(
        ("lines", "wanted"),
        [
            (["get_config = 3"], "TypeError: 'int' object is not callable"),
            (["def get_config(world):", "    pass"], "missing 1 required positional argument"),
            (["def get_config():", "    raise SystemExit(0)"], "ended the program: SystemExit(0)"),
        ],
    )
    def test_no_configuration_comes_of_it(self, refusal, tmp_path, lines, wanted):
        message = refusal(config=str(write(tmp_path / "bad.py", *lines)))
        assert message.startswith(f"{tmp_path / 'bad.py'}")
        assert wanted in message

    def test_a_key_is_gone(self, refusal, tmp_path):
        lines = ["config.unlock()", "del config.num_steps"]
        message = refusal(config=str(write_config(tmp_path / "bad.py", *lines)))
        assert message.startswith("the configuration lacks config.num_steps")

    def test_a_prompt_that_no_tokenizer_takes(self, refusal):
        message = refusal("--config.prompt.system=\udcff")  # so does a shell hand on other bytes
        assert message == "config.prompt.system is '\\udcff'; expected text in UTF-8."

    def test_unknown_reward_part(self, refusal, tmp_path):
        message = refusal("--config.reward.weights={'exactmatch': 1.0}")
        assert message.startswith(
            "config.reward.weights is {'exactmatch': 1.0}: there is no reward "
        )
        assert "did you mean 'exact_match'? Known parts are format, answer, exact_match" in message
        message = refusal("--config.reward.weights.exact_match=1.0")
        wanted = "--config.reward.weights=\"{'exact_match': 1.0}\""
        assert message.endswith(f"takes a mapping; set it whole, as {wanted}.")

    def test_what_lies_beside_the_configuration_is_found(self, refusal, tmp_path, monkeypatch):
        monkeypatch.setattr(sys, "path", [*sys.path])
        (tmp_path / "beside_it.py").write_text("class Env: ...\n")
        file = write_config(tmp_path / "own.py", 'config.env.name = "beside_it.Env"')
        message = refusal(config=str(file))
        assert message.startswith("config.env.name is 'beside_it.Env', which")

    def test_group_of_one(self, refusal):
        message = refusal("--config.rollout.group_size=1")
        assert message.startswith("config.rollout.group_size is 1; expected at least 2")


class TestValues:
    def test_misspelt_key(self, refusal, tmp_path):
        file = write(tmp_path / "my.yaml", "rollout:", "  grup_size: 4")
        message = refusal(f"--values={file}")
        wanted = "there is no key config.rollout.grup_size; did you mean rollout.group_size?"
        assert message == f"{file}: {wanted}"

    def test_another_type(self, refusal, tmp_path):
        file = write(tmp_path / "my.yaml", "num_steps: many")
        wanted = f"{file}: config.num_steps is 'many'; expected a value of type int"
        assert refusal(f"--values={file}").startswith(wanted)

    def test_missing(self, refusal):
        assert refusal("--values=my.yaml").startswith("--values='my.yaml' is not a file")

    def test_the_command_line_wins(self, monkeypatch, tmp_path):
        lines = ["seed: 5", "rollout.group_size: 3", "optimizer:", "  lr: 1e-6"]
        lines += ["rollout.num_rows: 1e2", "eval.final_suites: [greedy]"]
        values = write(tmp_path / "my.yaml", *lines)
        argv = ["launch", f"--config={CONFIG}", f"--workdir={tmp_path}", f"--values={values}"]
        argv += [
            "--config.seed=7",
            "--config.stages=('train',)",
            "--config.rollout.deterministic=no",
        ]
        argv += ["--config.num_steps=1e3", "--config.prompt.template=1e3 {question}"]
        monkeypatch.setattr(sys, "argv", argv)
        with flagsaver.flagsaver():
            config, workdir = launch._read(launch.parse_flags(argv))
        assert (config.seed, config.rollout.group_size, config.optimizer.lr) == (7, 3, 1e-6)
        assert (config.stages, config.rollout.deterministic) == (("train",), False)
        assert (config.num_steps, config.prompt.template) == (1000, "1e3 {question}")
        assert (config.rollout.num_rows, config.eval.final_suites) == (100, ("greedy",))
        assert workdir == tmp_path


class TestFiles:
    @pytest.mark.parametrize(
        ("name", "read"),
        [
            ("model.safetensors", open_tensors),
            ("tokenizer.json", Tokenizer.from_folder),
            ("config.json", read_model),
        ],
    )
    def test_a_model_that_may_not_be_read(self, tiny_world, open_folder, name, read):
        model = shutil.copytree(tiny_world / "model", open_folder / "model")
        (model / name).chmod(0)
        with as_nobody(), pytest.raises(PermissionError) as raised:
            read(model)
        wanted = f"{model / name}: Permission denied; give this user the right to it (ls -l shows"
        assert launch._message(raised.value).startswith(wanted)

    @pytest.mark.parametrize("name", ["io::Error", "An IO error occurred"])
    def test_a_full_disk_where_the_index_belongs(self, refusal, monkeypatch, tmp_path, name):
        def write(*_):
            raise ValueError(f"{name}: No space left on device")

        monkeypatch.setattr("jaxrl.envs.search.bm25._write_index", write)
        message = refusal(f"--config.search.local.index={tmp_path / 'index'}")
        assert f"could not be written to {tmp_path / 'index'}, where" in message
        assert "name another folder for it by config.search.local.index" in message

    def test_truncated_weights(self, refusal, model):
        file = model / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1000])
        message = refusal(f"--config.model.path={model}")
        size = file.stat().st_size
        assert message.startswith(f"{file} ({size} bytes) is not a whole safetensors file")

    def test_an_adapter_of_another_model(self, refusal):
        folder = "tests/golden/lora_all_linear"
        lora = {"rank": 4, "alpha": 8.0, "path": folder}
        message = refusal(*(f"--config.model.lora.{key}={value}" for key, value in lora.items()))
        assert message.startswith(f"{folder}/adapter_model.safetensors: tensor 'base_model.model.")
        assert message.endswith(
            "the model of config.model.path calls for [4, 64]. The adapter was made for "
            "'qwen3_untied'."
        )
        lora["rank"] = 16
        message = refusal(*(f"--config.model.lora.{key}={value}" for key, value in lora.items()))
        assert message.endswith(
            "r is 4, but config.model.lora.rank is 16; set it as the adapter has it."
        )

    def test_missing_weights(self, refusal, model):
        (model / "model.safetensors").unlink()
        assert "holds neither model.safetensors nor" in refusal(f"--config.model.path={model}")

    @pytest.mark.parametrize(
        ("key", "name"),
        [
            ("tasks.train.source", "questions_train"),
            ("tasks.eval.source", "questions_eval"),
            ("sft.source", "demonstrations"),
        ],
    )
    def test_malformed_line(self, refusal, tiny_world, tmp_path, key, name):
        first, second, *_ = (tiny_world / f"{name}.jsonl").read_text().splitlines()
        file = write(tmp_path / "bad.jsonl", first, second, second[:-1])
        message = refusal(f"--config.{key}={file}")
        assert message.startswith(f"{file}:3 is not valid JSON")
        message = refusal(f"--config.{key}={tmp_path / 'no'}")
        assert message.startswith(f"'{tmp_path / 'no'}' is not a file; set config.{key} to a JSONL")

    def test_parquet(self, refusal, tmp_path):
        file = tmp_path / "train.parquet"
        file.write_bytes(b"PAR1\x15\x04 and so on PAR1")
        message = refusal(f"--config.search.local.corpus={file}")
        assert message.startswith(f"{file} is a Parquet file; expected JSONL, one JSON object")
        assert f'q.read_table("{file}").to_pylist()' in message
        message = refusal(f"--config.tasks.train.source={file}")
        assert message.startswith(f"{file} cannot be read as Parquet: ")

    def test_empty_corpus(self, refusal, tmp_path):
        corpus = write(tmp_path / "corpus.jsonl")
        message = refusal(f"--config.search.local.corpus={corpus}")
        assert message.startswith(f"the corpus {corpus} has no documents")

    def test_data_are_checked_before_an_index_is_built(self, refusal, tmp_path, monkeypatch):
        monkeypatch.setattr("jaxrl.envs.search.bm25._write_index", None)
        corpus = write(tmp_path / "corpus.jsonl", '{"id": 1, "title": "a", "text": "b"}')
        arguments = [
            f"--config.search.local.corpus={corpus}",
            f"--config.sft.source={tmp_path / 'no'}",
        ]
        assert refusal(*arguments).startswith(f"'{tmp_path / 'no'}' is not a file; set config.sft")

    def test_missing_corpus(self, refusal, tmp_path):
        message = refusal(f"--config.search.local.corpus={tmp_path / 'no'}")
        assert message.startswith("there is no corpus")
        assert message.endswith("Set config.search.local.corpus to its path.")

    @pytest.mark.parametrize("content", ["[]", "[" * 100_000])
    @pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json"])
    def test_damaged_small_files(self, refusal, model, name, content):
        (model / name).write_text(content)
        message = refusal(f"--config.model.path={model}")
        assert str(model) in message
        assert name in message

    def test_an_end_of_turn_that_no_tokenizer_knows(self, refusal, model):
        (model / "generation_config.json").write_text('{"eos_token_id": [1, 99999]}')
        message = refusal(f"--config.model.path={model}")
        assert "eos_token_id names [99999], which the tokenizer's" in message

    def test_a_template_that_refuses_system_messages(self, refusal, model):
        file = model / "tokenizer_config.json"
        template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}"
        fields = json.loads(file.read_text())
        fields["chat_template"] = f"{template}{{% endif %}}{fields['chat_template']}"
        file.write_text(json.dumps(fields))
        message = refusal(f"--config.model.path={model}", "--config.prompt.system=Search.")
        wanted = "the tokenizer's chat template refuses a chat of the roles ['system', 'user']"
        assert message.endswith(f"{wanted}: no system")

    def test_a_template_that_drops_system_messages(self, refusal, model):
        file = model / "tokenizer_config.json"
        fields = json.loads(file.read_text())
        loop = "{% for message in messages if message['role'] != 'system' %}"
        fields["chat_template"] = fields["chat_template"].replace(
            "{% for message in messages %}", loop
        )
        file.write_text(json.dumps(fields))
        message = refusal(f"--config.model.path={model}", "--config.prompt.system=Search.")
        assert "drops message 1, of the role 'system': 'Search.'. Put its text into" in message

    @pytest.mark.parametrize(
        ("argument", "wanted"),
        [
            ("={'enable_thinking': False}", "names 'enable_thinking', which the model's chat"),
            ("={'a': []}", "is {'a': []}; expected names with true, false, a number or a text"),
            ("=3", """'3' is no mapping; expected one in quotes, as "{'name': False}\""""),
            (
                ".enable_thinking=False",
                "takes a mapping; set it whole, as --config.prompt.chat_template",
            ),
        ],
    )
    def test_arguments_of_the_chat_template(self, refusal, argument, wanted):
        assert wanted in refusal(f"--config.prompt.chat_template_kwargs{argument}")

    def test_more_tokens_than_the_model_has_positions(self, refusal):
        message = refusal("--config.rollout.max_total_tokens=2048")
        assert "max_total_tokens=2048 is beyond the model's 1024 positions" in message

    def test_prompt_that_does_not_fit(self, refusal):
        message = refusal("--config.rollout.max_prompt_tokens=4")
        assert "tokens; expected 1 to 4. Raise config.rollout.max_prompt_tokens" in message


class TestWorkdir:
    """What a run began with stays."""

    def check(self, tmp_path, *, is_accepted=False, **changes):
        config = debug_tiny.get_config(str(tmp_path / "world"))
        config.update_from_flattened_dict(changes)
        launch._check_workdir(config, tmp_path, is_accepted=is_accepted)

    def begin(self, tmp_path, **changes):
        config = debug_tiny.get_config(str(tmp_path / "world"))
        config.update_from_flattened_dict(changes)
        (tmp_path / "checkpoints" / "5").mkdir(parents=True)
        (tmp_path / "config.json").write_text(to_json(config))

    def test_going_on(self, tmp_path):
        self.check(tmp_path)
        self.begin(tmp_path)
        self.check(tmp_path)
        self.check(tmp_path, num_steps=500)
        self.check(tmp_path, **{"eval.samples": 7, "stages": ("evaluate",)})

    def test_what_needs_consent(self, tmp_path):
        self.begin(tmp_path)
        changes = {"seed": 7, "optimizer.lr": 1.0}
        with pytest.raises(ValueError, match=r"config.optimizer.lr: .*seed: 0 -> 7. .*--acc"):
            self.check(tmp_path, **changes)
        self.check(tmp_path, is_accepted=True, **changes)

    @pytest.mark.parametrize(
        ("key", "value", "began"),
        [
            ("kl.coef", 0.5, {}),
            ("kl.anchor", "old", {}),
            ("model.freeze_tower", True, {"stages": ("evaluate",)}),
            ("model.lora.rank", 4, {"stages": ("sft",)}),
            ("model.lora.rank", 0, {"model.lora.rank": 2}),
            ("model.lora.rank", 4, {"model.lora.rank": 2}),
        ],
    )
    def test_what_cannot_change(self, tmp_path, key, value, began):
        self.begin(tmp_path, **began)
        with pytest.raises(ValueError, match=f"config.{key} is {value!r}, but .* began with"):
            self.check(tmp_path, is_accepted=True, **began | {key: value})

    def test_what_an_adapter_is_of_cannot_change(self, tmp_path):
        lora = {"model.lora.rank": 2, "model.lora.targets": ("q_proj",)}
        self.begin(tmp_path, **lora)
        self.check(tmp_path, is_accepted=True, **lora, **{"model.freeze_tower": True})
        with pytest.raises(ValueError, match=r"config.model.lora.targets is .*, but .* began with"):
            self.check(tmp_path, is_accepted=True, **lora | {"model.lora.targets": ("k_proj",)})

    def test_the_best_checkpoint_is_of_one_set_of_held_out_sources(self, tmp_path):
        best = {"checkpoint.keep_best": 1, "tasks.eval.source": ""}
        best["tasks.eval.sources"] = ({"source": "a.csv"}, {"source": "b.csv"})
        self.begin(tmp_path, **best)
        self.check(tmp_path, **best)
        best["tasks.eval.sources"] = best["tasks.eval.sources"][:1]
        with pytest.raises(ValueError, match=r"config.tasks.eval.sources is .*, but .* began with"):
            self.check(tmp_path, is_accepted=True, **best)

    @pytest.mark.parametrize(
        ("key", "folder"), [("model.path", "export"), ("model.lora.path", "adapter")]
    )
    def test_exporting_onto_the_source(self, tmp_path, key, folder):
        with pytest.raises(ValueError, match=rf"config.{key}=.* is where --workdir=.* exports to"):
            self.check(tmp_path, **{key: str(tmp_path / folder)})


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_signal_while_all_is_made_ready(monkeypatch, capfd, tmp_path, tiny_world):
    ended = queue.Queue()

    def end(code):
        ended.put(code)
        raise SystemExit  # of the thread that answers signals

    def assemble(*_, **__):
        os.kill(os.getpid(), signal.SIGINT)
        raise ValueError(ended.get(timeout=10))

    argv = ["launch", f"--config={CONFIG}:{tiny_world}", f"--workdir={tmp_path / 'run'}"]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr("jaxrl.builders.components.build", assemble)
    monkeypatch.setattr("os._exit", end)
    with flagsaver.flagsaver(), pytest.raises(SystemExit, match="75"):
        launch.main(launch.parse_flags(argv))
    wanted = "SIGINT: ended before the first step; there is nothing to save\n"
    assert capfd.readouterr() == ("", wanted)


class TestFaultsOfTheWorkdir:
    """While the run goes on."""

    @pytest.fixture
    def ended(self, monkeypatch, tmp_path, tiny_world):
        def ended(run):
            monkeypatch.setattr("jaxrl.run.run", run)
            monkeypatch.setattr(launch, "_fit_memory", lambda *_, **__: [])
            for flag, value in (
                ("_IGNORE_MEMORY_PLAN", False),
                ("_ACCEPT", False),
                ("_STEP", None),
            ):
                monkeypatch.setattr(launch, flag, SimpleNamespace(value=value))
            monkeypatch.setattr(
                "jaxrl.builders.components.build", lambda *_, **__: SimpleNamespace(notes=[])
            )
            config = debug_tiny.get_config(str(tiny_world))
            with pytest.raises(SystemExit) as raised:
                launch._run(resolve_names(config), tmp_path, lambda: False, lambda: None)
            return raised.value.code

        return ended

    def test_a_folder_in_the_place_of_a_file(self, ended, tmp_path):
        file = tmp_path / "metrics.jsonl"
        file.mkdir()
        wanted = f"error: {file}: Is a directory; a file belongs there; move the folder away."
        assert ended(lambda *_: file.read_text()) == wanted

    @pytest.mark.parametrize("text", ["", "a library's own words"])
    def test_a_workdir_that_is_moved(self, ended, tmp_path, text):
        def run(*_):
            tmp_path.rename(f"{tmp_path}_moved")
            if text:
                raise RuntimeError(text)
            (tmp_path / "metrics.jsonl").open("a")

        assert ended(run).startswith(f"error: {tmp_path} was moved or removed")

    def test_another_folder_is_not_the_workdirs(self, ended, tmp_path):
        with pytest.raises(IsADirectoryError):
            ended(lambda *_: tmp_path.parent.read_text())

    @pytest.mark.parametrize("saved", [None, 4])
    def test_one_line_says_what_is_saved(self, ended, tmp_path, saved):
        def run(*_):
            if saved:
                folder = tmp_path / "checkpoints" / str(saved)
                folder.mkdir(parents=True)
                (folder / "manifest.json").touch()
            raise ValueError("RESOURCE_EXHAUSTED: params/d/c0: No space left on device")

        what = f"step {saved} is saved" if saved else "nothing is saved yet"
        wanted = f"error: {tmp_path}: No space left on device; {what}; free some space and run the"
        assert ended(run).startswith(wanted)


@pytest.mark.slow(
    instead="test_launch.py::TestFaultsOfTheWorkdir::test_one_line_says_what_is_saved"
)
def test_a_full_disk_is_one_line_whatever_its_libraries_say(tmp_path, tiny_world):
    # The first checkpoint has files beyond that.
    limited = "import resource, runpy; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000,) * 2); "
    limited += "runpy.run_module('jaxrl.launch', run_name='__main__', alter_sys=True)"
    workdir = tmp_path / "run"
    arguments = [f"--config={CONFIG}:{tiny_world}", f"--workdir={workdir}"]
    # Which cannot be written either, and has a line of its own for that.
    arguments += ["--config.compilation_cache=off"]
    arguments += ["--config.search.engine=empty", "--config.sft.num_steps=6"]
    done = subprocess.run(
        [sys.executable, "-c", limited, *arguments],
        capture_output=True,
        text=True,
        # Or Python would leave truncated modules behind, which no later process can import.
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 1
    wanted = f"error: {workdir}: File too large; nothing is saved yet; raise the limit on a file's"
    assert done.stderr.startswith(wanted)
    assert done.stderr.count("\n") == 1


def test_a_run_in_which_everything_fails_has_an_exit_code_of_its_own(
    monkeypatch, capfd, tmp_path, tiny_world
):
    def run(*arguments):
        adopt = arguments[-1]
        assert not (workdir / "config.json").exists()  # nothing is restored yet
        adopt()
        raise NothingWorksError("every episode failed: no route to host")

    workdir = tmp_path / "workdir"
    argv = ["launch", f"--config={CONFIG}:{tiny_world}", f"--workdir={workdir}"]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr("jaxrl.run.run", run)
    monkeypatch.setattr(
        "jaxrl.builders.components.build", lambda *_, **__: SimpleNamespace(notes=("a note",))
    )
    with flagsaver.flagsaver(), pytest.raises(SystemExit) as ended:
        launch.main(launch.parse_flags(argv))
    assert ended.value.code == 69
    told = capfd.readouterr()
    assert told.err == "error: every episode failed: no route to host\n"
    assert told.out == "a note\n"
    # What it began with is known from now on.
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
    ids=lambda one: type(one).__name__,
)
def test_a_run_that_ends_early_says_how(error, code, monkeypatch, tmp_path, tiny_world):
    def run(*_):
        raise error

    argv = ["launch", f"--config={CONFIG}:{tiny_world}", f"--workdir={tmp_path / 'workdir'}"]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr("jaxrl.run.run", run)
    monkeypatch.setattr(
        "jaxrl.builders.components.build", lambda *_, **__: SimpleNamespace(notes=())
    )
    with flagsaver.flagsaver(), pytest.raises(SystemExit) as ended:
        launch.main(launch.parse_flags(argv))
    assert ended.value.code == code


def test_mesh_that_does_not_divide_the_devices(refusal):
    message = refusal("--config.mesh.data=3")
    assert message.startswith(
        "config.mesh (data=3, fsdp=1, context=1, expert=1, tensor=1) does not fit the number of "
        "devices, "
    )


def test_flags_of_other_tests_are_gone():
    assert not [name for name in flags.FLAGS if name.startswith("config.")]
