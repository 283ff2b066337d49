"""Loading of a run or a model folder, and the command in its own process."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from configs import debug_tiny
from jaxrl.builders.saved_run import load_saved_run
from jaxrl.config.schema import serialize_config
from jaxrl.extras.chat.conversation import Conversation
from jaxrl.extras.serve import __main__ as command
from jaxrl.extras.serve.loading import is_run, load_model
from jaxrl.logs.display import Display
from tests.extras.serve.served import Client
from tests.helpers import ROOT, without_keys_of

pytestmark = pytest.mark.usefixtures("quick_compilation", "one_size")


@pytest.fixture
def run(tmp_path, tiny_world):
    """A run that has exported what it trained."""
    config = debug_tiny.get_config(str(tiny_world))
    config.mesh.data = 8  # of the machine that it ran on
    config.rollout.max_total_tokens, config.rollout.max_response_tokens = 64, 16
    (tmp_path / "config.json").write_text(serialize_config(config))
    shutil.copytree(tiny_world / "model", tmp_path / "export")
    return tmp_path


@pytest.mark.minutes
def test_the_command_samples_as_chat_does_until_a_signal(run, quick_compilation):
    """The same weights greedily continue a prompt as an episode of `jaxrl chat` does."""
    flags = ["--port=0", "--rows=1", "--name=ada", "--end_s=20"]
    flags += ["--config.rollout.max_total_tokens=64", "--config.rollout.chunk_tokens=4"]
    environment = {**os.environ, **quick_compilation, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxrl.extras.serve", str(run), *flags],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        address = r"serving ada at http://127\.0\.0\.1:(\d+)/v1"
        match = next(filter(None, (re.match(address, line) for line in process.stdout)), None)
        assert match, process.stderr.read()
        client = Client(int(match[1]))
        _, _, body = client.raw("GET", "/v1/models")
        [model] = json.loads(body)["data"]
        assert (model["id"], model["max_model_len"]) == ("ada", 64)
        parts, config = load_saved_run(run, None, Display())
        trajectory, _ = Conversation(parts, config).ask("Who taught Ada?")
        start = trajectory.prompt_length
        num_sampled = [*trajectory.loss_mask[start:], False].index(False)  # of the first turn
        sampled = trajectory.token_ids[start : start + num_sampled].tolist()
        prompt = trajectory.token_ids[:start].tolist()
        choice = client.generate(prompt, temperature=0.0, max_tokens=len(sampled))
        assert choice["token_ids"] == sampled
        # After the first signal, running requests are finished.
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(client.generate, prompt, temperature=0.0, max_tokens=16)
            client.until(lambda m: m["jaxrl_samples_total"] == 2)
            process.send_signal(signal.SIGTERM)
            assert answer.result()["token_ids"][: len(sampled)] == sampled
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--port=70000", "port must be 0-65535"),
        ("--rows=0", "--rows=0"),
        ("--key_env=NOBODY_SET_THIS", "--key_env=NOBODY_SET_THIS"),
        ("--host=0.0.0.0", "--key_env"),
        ("--port=TAKEN", "Address already in use"),
        ("--step=3", "--step=3"),
        ("--config.rollout.max_total=3", "config.rollout.max_total"),
    ],
)
def test_a_wrong_flag_is_an_error_of_one_line(run, flag, message):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        flag = flag.replace("TAKEN", str(listener.getsockname()[1]))
        with pytest.raises(SystemExit, match=r"^error: [^\n]*$") as ended:
            command.main([str(run), "--port=0", flag])
    assert message in ended.value.code


def test_a_run_with_an_adapter_is_served_from_its_export(run, tiny_world):
    """An export holds the sum of base and adapter."""
    assert is_run(run)
    assert not is_run(run / "export")
    config = debug_tiny.get_config(str(tiny_world))
    config.model.lora.rank, config.model.lora.path = 2, "adapter"
    (run / "config.json").write_text(serialize_config(config))
    served = load_model(run, Display(), num_rows=3, keys={"rollout.chunk_tokens": 4})
    assert served.model.architecture.wrapper is None
    assert served.stops == ("</search>", "</answer>")  # which end a turn of the run
    assembled, config = load_saved_run(run, None, Display())
    assert (assembled.model.architecture.wrapper, config.model.lora.rank) == (None, 0)


def test_a_model_folder_is_served_within_its_positions(tiny_world):
    folder = tiny_world / "model"
    positions = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    with without_keys_of("lora"):
        served = load_model(folder, Display(), num_rows=3)
    assert (served.name, served.engine.num_rows, served.stops) == ("model", 3, ())
    assert served.engine.max_total_tokens == min(2048, positions)
    served = load_model(folder, Display(), name="ada", keys={"rollout.max_total_tokens": 80})
    assert (served.name, served.engine.num_rows) == ("ada", 16)
    assert served.engine.max_total_tokens == 80
    with pytest.raises(ValueError, match="is not a run"):
        load_model(folder, Display(), step=3)
    with pytest.raises(ValueError, match=r"config\.rollout\.max_total_tokens=999999 exceeds"):
        load_model(folder, Display(), keys={"rollout.max_total_tokens": 999_999})


def test_prompts_use_the_time_of_the_run(run):
    starts = [{"step": 0}, {"step": 0, "prompt_time": "2024-02-29T23:59:00"}]
    (run / "environment.json").write_text(json.dumps(starts))
    file = run / "export" / "tokenizer_config.json"
    template = "{% for m in messages %}{{ strftime_now('%F ') ~ m.content }}{% endfor %}"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    served = load_model(run, Display(), num_rows=3, keys={"rollout.chunk_tokens": 4})
    assembled, _ = load_saved_run(run, None, Display())
    for tokenizer in (served.tokenizer, assembled.tokenizer):
        prompt = tokenizer.render_prompt([{"role": "user", "content": "Where?"}])
        assert tokenizer.decode(prompt) == "2024-02-29 Where?"
