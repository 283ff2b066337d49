"""Questions to a run's model, each an episode in the run's environment."""

import dataclasses
import functools
import io
import json
import operator
import os
import shutil
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from configs import debug_tiny
from jaxrl.builders import saved_run
from jaxrl.config.loading import parse_overrides
from jaxrl.config.schema import serialize_config
from jaxrl.envs.base import Turn
from jaxrl.extras.chat import __main__ as chat
from jaxrl.extras.chat.conversation import Conversation
from jaxrl.logs.display import Display
from jaxrl.models.hf_weights import load_hf
from jaxrl.runtime.checkpoint import Checkpointer
from jaxrl.training.run_state import Progress
from jaxrl.types import Group, TrainState
from tests.episodes import make_failure, make_trajectory
from tests.helpers import resolved

TOOL = '''
def lookup(word: str) -> str:
    """Look a word up.

    Args:
        word: Any word.
    """
    return word
'''

pytestmark = pytest.mark.usefixtures("quick_compilation", "one_size")


@pytest.fixture
def run(tmp_path, tiny_world):
    """Workdir of an untrained run. The run's custom code and judge are missing."""
    config = debug_tiny.get_config(str(tiny_world))
    config.mesh.data = 8  # of the machine that it ran on
    config.rollout.max_total_tokens, config.rollout.max_response_tokens = 64, 16
    config.optimizer.lr = 1e-6  # JSON's spelling of which is text to YAML
    # Nobody scores a question: the judge's key and the function's file do not exist.
    judge = {"url": "http://127.0.0.1:9/v1", "model": "j", "prompt": "{response}", "key_env": "NO"}
    config.reward.judges = {"helpful": judge}
    config.ledger.prices = {"helpful": 1.0, "search": 2.0}
    config.reward.weights = {"helpful": 1.0, "my_missing_file.grade": 1.0}
    config.reward.settings = {"my_missing_file.grade": {"scale": 2}}
    config.reward.correct = "helpful"
    # Nothing is trained: these functions do not exist either.
    for section in (config.advantage, config.loss, config.filter):
        section.name, section.settings = "my_missing_file.function", {"scale": 2}
    config.loss.aggregation = config.kl.estimator = "my_missing_file.function"
    config.optimizer.schedule = config.sft.optimizer.schedule = "my_missing_file.function"
    (tmp_path / "config.json").write_text(serialize_config(config))
    return tmp_path


@pytest.fixture
def exported(run, tiny_world):
    """The same workdir with an exported model."""
    shutil.copytree(tiny_world / "model", run / "export")
    return run


def edit_config(run, key, value):
    config = json.loads((run / "config.json").read_text())
    *sections, name = key.split(".")
    section = functools.reduce(operator.getitem, sections, config)
    section[name] = value
    (run / "config.json").write_text(json.dumps(config))


def get_error(*arguments):
    with pytest.raises(SystemExit) as ended:
        chat.main(list(map(str, arguments)))
    assert "\n" not in ended.value.code
    return ended.value.code


def test_a_run_answers_and_does_not_change(exported, capsys):
    before = sorted(exported.rglob("*"))
    too_long = "Who taught Ada? " * 64
    questions = ("Who taught Ada?", too_long, "Where was Ben\udcff born?")  # the last is no UTF-8
    with pytest.raises(SystemExit) as ended:
        chat.main([str(exported), *questions])
    assert ended.value.code == 1
    shown = capsys.readouterr()
    assert shown.err.startswith("error: the prompt of task 'question 1' has ")
    assert shown.err.count("\n") == 1
    weights, *episodes = shown.out.split("\n\n")
    assert weights.split() == ["weights:", f"{exported}/export"]
    assert [text.splitlines()[0] for text in episodes] == [
        "Who taught Ada?",
        "Where was Ben\ufffd born?",
    ]
    assert all("answer: " in text.splitlines()[-1] for text in episodes)
    assert sorted(exported.rglob("*")) == before


def save_checkpoints(run, params, *steps):
    """Save checkpoints whose parameters grow by the step; return these by step."""
    checkpointer = Checkpointer(run / "checkpoints", keep=3)
    trees, count = {}, jnp.int32(0)
    for step in steps:
        trees[step] = jax.tree.map(lambda leaf, by=step: leaf + by, params)
        state = TrainState(
            params=trees[step], opt_state={"x": count}, num_updates=count, num_skipped=count
        )
        position = Progress(step=step, stage="train", stage_step=1).to_json()
        checkpointer.save(step, state, position, None)
    checkpointer.close()
    return trees


@pytest.mark.parametrize("step", [None, 20])
def test_the_newest_or_a_chosen_checkpoint_answers(exported, tiny_world, step):
    trees = save_checkpoints(exported, load_hf(tiny_world / "model"), 20, 40)
    display = Display()
    display.console = Console(file=io.StringIO(), width=200)
    settings = ("eval.top_p=0.5", "env.search.tools=()", "search.local.topk=2", "seed=1e3")
    keys = parse_overrides([f"--config.{setting}" for setting in settings])
    assert (keys["search.local.topk"], keys["seed"]) == (2, 1000)
    parts, config = saved_run.load_saved_run(exported, None, display, step=step, overrides=keys)
    assert (config.eval.top_p, config.env.search.tools) == (0.5, ())
    assert f"weights: checkpoint of step {step or 40}" in display.console.file.getvalue()
    params, _ = saved_run.load_weights(parts.model, config, exported, None, display, step=step)
    jax.tree.map(np.testing.assert_array_equal, params, trees[step or 40])
    assert get_error(exported, "?", "--step=30") == (
        f"error: --step=30: {exported / 'checkpoints'} has no such checkpoint; available: 20, 40."
    )


def test_a_run_answers_from_any_folder(exported, tiny_world, tmp_path_factory, monkeypatch, capsys):
    """Relative paths in the config are resolved from the launch folder."""
    edit_config(exported, "search.local.corpus", "corpus.jsonl")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.chdir(elsewhere)
    assert "corpus.jsonl" in get_error(exported, "?")
    start = {"step": 0, "folder": str(tiny_world)}
    (exported / "environment.json").write_text(json.dumps([start]))
    (elsewhere / "link").symlink_to(exported)
    chat.main(["link", "Who taught Ada?", "--model=link/export"])  # these are of this folder
    assert "answer: " in capsys.readouterr().out
    assert os.getcwd() == str(elsewhere)


def test_modules_of_a_run_are_imported_from_its_folders(exported, monkeypatch, capsys):
    edit_config(exported, "env.search.tools", ["beside_the_configuration.lookup"])
    (folder := exported / "code").mkdir()
    (folder / "beside_the_configuration.py").write_text(TOOL)
    path = [*sys.path]
    monkeypatch.setattr(sys, "path", [*path])
    assert "No module named 'beside_the_configuration'" in get_error(exported, "?")
    start = {"folder": str(exported), "code_folders": [str(exported / "gone"), str(folder)]}
    (exported / "environment.json").write_text(json.dumps([start]))
    chat.main([str(exported), "Who taught Ada?"])
    assert "answer: " in capsys.readouterr().out
    assert sys.path == [*path, str(folder)]


def test_an_episode_is_shown_with_escapes():
    turns = (
        Turn(
            text="<search>q\x1b[2J</search>",
            tool_call="q",
            observation="\n<information>a [b]</information>\n",
        ),
        Turn(text="<answer>c</answer>"),
    )
    out = io.StringIO()
    trajectory = dataclasses.replace(make_trajectory(turns=turns), opener="<think>\n")
    chat.print_trajectory(trajectory, Console(file=out, width=20))
    lines = out.getvalue().splitlines()
    assert lines[2:] == [
        "<think>",
        "<search>q\\x1b[2J</search>",
        "<information>a [b]</information>",
        "<answer>c</answer>",
        "answer: x",
    ]


def test_a_missing_answer_has_a_reason():
    out = io.StringIO()
    chat.print_trajectory(make_failure(), Console(file=out, width=80))
    assert out.getvalue().splitlines()[-1].startswith("no answer: the environment failed: ")


def test_mistakes_are_one_line(run, tmp_path, tiny_world):
    assert get_error(tmp_path / "no", "?") == (
        f"error: {tmp_path / 'no'} has no config.json; expected the workdir of a run."
    )
    assert get_error(run, "?").startswith(f"error: {run} contains neither export/ nor a checkpoint")
    model = tiny_world / "model"
    assert get_error(model, "?") == (
        f"error: {model} is a model; name a run's workdir, and set --model={model}."
    )
    wrong_value = get_error(run, "?", f"--model={model}", "--config.eval.top_p=3")
    assert wrong_value.startswith("error: config.eval.top_p is 3.0; expected")
    message = get_error(run, "?", f"--model={model}", "--image=a.png")
    assert message == (
        f"error: --image={Path('a.png').absolute()}: the model accepts only text; remove the flag."
    )


# Conversations.


class RecordedRollout:
    """A rollout with fixed turns that records its prompts and rejects long ones."""

    def __init__(self, turns, max_chars=10**6):
        self.prompts, self._turns, self.max_chars = [], turns, max_chars

    def __call__(self, draws, sampling):
        [draw] = draws
        messages = draw.task.messages or ()
        if sum(len(message["content"]) for message in messages or ({"content": "?"},)) > (
            self.max_chars
        ):
            raise ValueError("the prompt is too long")
        chat = [dict(message) for message in messages] or draw.task.question
        self.prompts.append((chat, draw.stream_index))
        trajectory = make_trajectory(turns=self._turns)
        return [Group(trajectories=(dataclasses.replace(trajectory, task=draw.task),))]


TURNS = (
    Turn(text="<search>q</search>", tool_call="q", observation="\n<information>x</information>\n"),
    Turn(text="<answer>Rome</answer>"),
)
RESPONSE = "<search>q</search>\n<information>x</information>\n<answer>Rome</answer>"


def make_conversation(rollout, **keys):
    config = debug_tiny.get_config()
    config.prompt.system, config.prompt.template = "Be brief.", "Question: {question}"
    config.update_from_flattened_dict(keys)
    return Conversation(types.SimpleNamespace(rollout=rollout), resolved(config))


def test_a_later_question_follows_the_conversation():
    rollout = RecordedRollout(TURNS)
    conversation = make_conversation(rollout)
    for question in ("Where?", "And then?", "Why?"):
        conversation.ask(question)
    conversation.reset()
    conversation.ask("Who?")
    system = {"role": "system", "content": "Be brief."}
    first = [
        {"role": "user", "content": "Question: Where?"},
        {"role": "assistant", "content": RESPONSE},
    ]
    second = [{"role": "user", "content": "And then?"}, {"role": "assistant", "content": RESPONSE}]
    assert rollout.prompts == [
        ("Where?", 0),  # by itself, as in training
        ([system, *first, {"role": "user", "content": "And then?"}], 1),
        ([system, *first, *second, {"role": "user", "content": "Why?"}], 2),
        ("Who?", 3),
    ]


def test_with_results_in_the_template_only_the_last_turn_is_kept():
    rollout = RecordedRollout(TURNS)
    conversation = make_conversation(rollout, **{"env.search.protocol": "qwen"})
    conversation.ask("Where?")
    conversation.ask("Why?")
    assert rollout.prompts[1][0][2] == {"role": "assistant", "content": "<answer>Rome</answer>"}


def test_the_oldest_questions_are_dropped_for_room():
    rollout = RecordedRollout(TURNS, max_chars=2 * len(RESPONSE) + 60)
    conversation = make_conversation(rollout)
    assert [conversation.ask(f"number {i}?")[1] for i in range(5)] == [0, 0, 0, 1, 1]
    last, _ = rollout.prompts[-1]
    questions = [message["content"] for message in last if message["role"] == "user"]
    assert questions == ["Question: number 2?", "number 3?", "number 4?"]


def test_a_rejected_question_leaves_the_conversation():
    rollout = RecordedRollout(TURNS)
    conversation = make_conversation(rollout)
    for question in ("Where?", "And then?"):
        conversation.ask(question)
    rollout.max_chars = 0
    with pytest.raises(ValueError, match="too long"):
        conversation.ask("y " * 1000)
    rollout.max_chars = 10**6
    conversation.ask("Why?")
    questions = [m["content"] for m in rollout.prompts[-1][0] if m["role"] == "user"]
    assert questions == ["Question: Where?", "And then?", "Why?"]


def test_lines_are_one_conversation(exported, monkeypatch, capsys):
    edit_config(exported, "rollout.max_total_tokens", 256)
    lines = "Who taught Ada?\nWhere was Ben born?\n\nWho taught Ada?\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    chat.main([str(exported)])
    shown = capsys.readouterr().out.split("\n\n")
    episodes = [text.splitlines() for text in shown if text.startswith(("Who", "Where"))]
    assert [episode[0] for episode in episodes] == [
        *("Who taught Ada?", "Where was Ben born?", "Who taught Ada?"),
    ]
    # After an empty line, the first question has the same answer; decoding is greedy.
    assert episodes[0] == episodes[2]


def test_input_that_is_not_utf_8_is_read(monkeypatch):
    raw = io.BytesIO(b"Who?\nbad \xff line\nThen?\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(raw, encoding="utf-8", errors="strict"))
    assert list(chat.read_lines(sys.stdin)) == ["Who?", "bad \ufffd line", "Then?"]
