"""Questions to a run's model, each played through the run's environment."""

import dataclasses
import io
import json
import os
import shutil
import sys
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from configs import debug_tiny
from jaxrl.builders import saved_run
from jaxrl.config.loading import parse_overrides
from jaxrl.config.schema import default_config, to_json
from jaxrl.envs.base import OutageError, Outcome, Turn
from jaxrl.extras.chat import __main__ as chat
from jaxrl.extras.chat.conversation import Conversation
from jaxrl.logs.display import Display
from jaxrl.models.hf_weights import load_hf
from jaxrl.runtime.checkpoint import Checkpointer
from jaxrl.training.run_state import Progress
from jaxrl.types import Group, TrainState
from tests.episodes import make_failure, make_trajectory
from tests.helpers import as_nobody, resolved

TOOL = '''
def lookup(word: str) -> str:
    """Look a word up.

    Args:
        word: Any word.
    """
    return word
'''

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture
def run(tmp_path, tiny_world):
    """A workdir in which nothing is trained yet."""
    config = debug_tiny.get_config(str(tiny_world))
    config.mesh.data = 8  # of the machine that it ran on
    config.rollout.max_total_tokens, config.rollout.max_response_tokens = 64, 16
    config.optimizer.lr = 1e-6  # JSON's spelling of which is text to YAML
    # Nobody is to score a question of now: neither this judge, whose key is not there, nor a
    # function, whose file is not.
    judge = {"url": "http://127.0.0.1:9/v1", "model": "j", "prompt": "{response}", "key_env": "NO"}
    config.reward.judges = {"helpful": judge}
    config.ledger.prices = {"helpful": 1.0, "search": 2.0}
    config.reward.weights = {"helpful": 1.0, "my_missing_file.grade": 1.0}
    config.reward.settings = {"my_missing_file.grade": {"scale": 2}}
    config.reward.correct = "helpful"
    # Nor is anything trained: these functions are nowhere either.
    for section in (config.advantage, config.loss, config.filter):
        section.name, section.settings = "my_missing_file.function", {"scale": 2}
    config.loss.aggregation = config.kl.estimator = "my_missing_file.function"
    config.optimizer.schedule = config.sft.optimizer.schedule = "my_missing_file.function"
    (tmp_path / "config.json").write_text(to_json(config))
    return tmp_path


def refused(*arguments):
    with pytest.raises(SystemExit) as ended:
        chat.main(list(map(str, arguments)))
    assert "\n" not in ended.value.code
    return ended.value.code


def test_what_was_trained_answers(run, tiny_world, capsys):
    shutil.copytree(tiny_world / "model", run / "export")
    before = sorted(run.rglob("*"))
    too_long = "Who taught Ada? " * 64
    questions = ("Who taught Ada?", too_long, "Where was Ben\udcff born?")  # the last is no UTF-8
    with pytest.raises(SystemExit) as ended:
        chat.main([str(run), *questions])
    assert ended.value.code == 1
    shown = capsys.readouterr()
    assert shown.err.startswith("error: the prompt of task 'question 1' has ")
    assert shown.err.count("\n") == 1
    weights, *first = shown.out.split("\n\n")
    assert weights.split() == ["weights:", f"{run}/export"]
    assert [text.splitlines()[0] for text in first] == [
        "Who taught Ada?",
        "Where was Ben\ufffd born?",
    ]
    assert all("answer: " in text.splitlines()[-1] for text in first)
    assert sorted(run.rglob("*")) == before


def test_a_run_under_way_answers_with_its_newest_checkpoint(run, tiny_world):
    shutil.copytree(tiny_world / "model", run / "export")  # of the warm start
    params = jax.tree.map(lambda leaf: leaf + 1, load_hf(tiny_world / "model"))
    count = jnp.int32(0)
    state = TrainState(params=params, opt_state={"x": count}, num_updates=count, num_skipped=count)
    position = Progress(step=61, stage="train", stage_step=1).to_json()
    checkpointer = Checkpointer(run / "checkpoints", keep=1)
    checkpointer.save(61, state, position, None)
    checkpointer.close()
    display = Display()
    display.console = Console(file=io.StringIO(), width=200)
    parts, config = saved_run.load_saved_run(run, None, display)
    assert "weights: checkpoint of step 61, in the middle" in display.console.file.getvalue()
    got, _ = saved_run.load_weights(parts.model, config, run, None, display)
    jax.tree.map(lambda one, other: (one == other).all() or pytest.fail("differs"), got, params)


def test_a_step_and_keys_are_chosen(run, tiny_world):
    """Of several checkpoints the named one answers, under the keys that are given."""
    checkpointer = Checkpointer(run / "checkpoints", keep=3)
    trees, count = {}, jnp.int32(0)
    for step in (20, 40):
        params = jax.tree.map(lambda leaf, by=step: leaf + by, load_hf(tiny_world / "model"))
        state = TrainState(
            params=params, opt_state={"x": count}, num_updates=count, num_skipped=count
        )
        position = Progress(step=step, stage="train", stage_step=1).to_json()
        checkpointer.save(step, state, position, None)
        trees[step] = params
    checkpointer.close()
    display = Display()
    display.console = Console(file=io.StringIO(), width=200)
    given = ("eval.top_p=0.5", "env.search.tools=()", "search.local.topk=2", "seed=1e3")
    keys = parse_overrides([f"--config.{key}" for key in given])
    assert (keys["search.local.topk"], keys["seed"]) == (2, 1000)
    parts, config = saved_run.load_saved_run(run, None, display, step=20, keys=keys)
    assert (config.eval.top_p, config.env.search.tools) == (0.5, ())
    assert "weights: checkpoint of step 20" in display.console.file.getvalue()
    got, _ = saved_run.load_weights(parts.model, config, run, None, display, step=20)
    jax.tree.map(lambda one, two: (one == two).all() or pytest.fail("differs"), got, trees[20])
    assert refused(run, "?", "--step=30") == (
        f"error: --step=30: {run / 'checkpoints'} has no such checkpoint; available: 20, 40."
    )
    assert refused(run, "?", "--step=20", "--model=x").startswith("error: --step=20 and --model=x")


def test_a_budget_for_judges_alone_is_left_out(run):
    config = saved_run.read_config(run)
    config.ledger.prices, config.ledger.max_cost = {"helpful": 1.0}, 5.0
    resolved_run = saved_run.resolve_for_inference(config, has_overrides=True)
    assert (resolved_run.ledger.prices, resolved_run.ledger.max_cost) == ({}, 0.0)


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("--config.eval.topp=1", "there is no key config.eval.topp; did you mean"),
        ("--config.eval.top_p=high", "config.eval.top_p is 'high'"),
        (
            "--config.env.search.tools=python,",
            "--config.env.search.tools=python,: expected a Py",
        ),
        ("--config.eval.top_p=3", "config.eval.top_p is 3.0; expected"),
        ("--config.eval.top_p", "--config.eval.top_p: expected --config.key=value"),
        ("--temprature=1", "unexpected argument --temprature=1"),
    ],
)
def test_keys_that_are_wrong(run, tiny_world, argument, told):
    shutil.copytree(tiny_world / "model", run / "export")
    assert refused(run, "?", argument).startswith(f"error: {told}")


def test_a_run_answers_from_any_folder(run, tiny_world, tmp_path_factory, monkeypatch, capsys):
    """Relative paths of its configuration are those of the folder in which it was started."""
    shutil.copytree(tiny_world / "model", run / "export")
    config = json.loads((run / "config.json").read_text())
    assert config["search"]["local"]["corpus"].startswith(str(tiny_world))
    config["search"]["local"]["corpus"] = "corpus.jsonl"
    (run / "config.json").write_text(json.dumps(config))
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.chdir(elsewhere)
    assert "corpus.jsonl" in refused(run, "?")
    (run / "environment.json").write_text(json.dumps([{"step": 0, "folder": str(tiny_world)}]))
    (elsewhere / "link").symlink_to(run)
    chat.main(["link", "Who taught Ada?", "--model=link/export"])  # these are of this folder
    assert "answer: " in capsys.readouterr().out
    assert os.getcwd() == str(elsewhere)


def test_modules_of_a_run_are_found_where_it_found_them(run, tiny_world, monkeypatch, capsys):
    shutil.copytree(tiny_world / "model", run / "export")
    config = json.loads((run / "config.json").read_text())
    config["env"]["search"]["tools"] = ["beside_the_configuration.lookup"]
    (run / "config.json").write_text(json.dumps(config))
    (folder := run / "began").mkdir()
    (folder / "beside_the_configuration.py").write_text(TOOL)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert "No module named 'beside_the_configuration'" in refused(run, "?")
    start = {"folder": str(run), "code_folders": [str(run / "gone"), str(folder)]}
    (run / "environment.json").write_text(json.dumps([start]))
    before = [*sys.path]
    chat.main([str(run), "Who taught Ada?"])
    assert "answer: " in capsys.readouterr().out
    assert sys.path == [*before, str(folder)]


def test_an_episode_is_shown_as_it_was():
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


@pytest.mark.parametrize(
    ("trajectory", "said"),
    [
        (make_trajectory(outcome=Outcome.OUT_OF_BUDGET), "no answer: out of budget"),
        (make_failure(), "no answer: the environment failed: "),
    ],
)
def test_no_answer(trajectory, said):
    out = io.StringIO()
    chat.print_trajectory(trajectory, Console(file=out, width=80))
    assert out.getvalue().splitlines()[-1].startswith(said)


def test_questions_that_are_piped_in():
    assert list(chat.read_lines(["one?\n", "\n", " two?"])) == ["one?", "", "two?"]


def test_mistakes_are_one_line(run, tmp_path, tiny_world):
    assert refused(tmp_path / "no", "?") == (
        f"error: {tmp_path / 'no'} is not a run: no config.json. Name a run's workdir."
    )
    assert refused(run, "?").startswith(f"error: {run} holds neither export/ nor a checkpoint: no")
    model = tiny_world / "model"
    assert refused(model, "?") == (
        f"error: {model} is a model; name a run's workdir, and set --model={model}."
    )
    message = refused(run, "?", f"--model={tmp_path / 'no'}")
    assert message.startswith(f"error: model folder '{tmp_path / 'no'}' does not exist")
    message = refused(run, "?", f"--model={tiny_world / 'model'}", "--image=a.png")
    shown = Path("a.png").absolute()
    assert message == f"error: --image={shown}: the model reads text alone; leave it out."
    assert refused(run, "?", "--temperature=-1") == "error: --temperature=-1.0; expected 0 or more."


def test_what_the_system_refuses_says_what_to_do(run, open_folder):
    shutil.copy(run / "config.json", open_folder / "config.json")
    (open_folder / "config.json").chmod(0)
    with as_nobody():
        message = refused(open_folder, "?")
    wanted = f"error: {open_folder / 'config.json'}: Permission denied; give this user permission"
    assert message.startswith(wanted)


def test_a_run_with_keys_that_this_version_does_not_have_is_refused(tmp_path):
    config = default_config().to_dict()
    config["search"]["tokp"] = 5
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config.json: there is no key config.search.tokp"):
        saved_run.read_config(tmp_path)


def test_a_search_engine_that_is_not_there_is_told(monkeypatch, capsys):
    told = "the search engine has not answered for 300 s"

    def down(*_):
        raise OutageError(told)

    parts = types.SimpleNamespace(rollout=down)
    opened = lambda *_, **__: (parts, resolved(debug_tiny.get_config()))  # noqa: E731
    monkeypatch.setattr(chat, "load_saved_run", opened)
    with pytest.raises(SystemExit) as ended:
        chat.main(["run", "Who taught Ada?", "Who taught Ben?"])
    assert ended.value.code == 1
    assert capsys.readouterr().err == f"error: {told}\n" * 2


# Conversations.


class Played:
    """A rollout that answers each prompt with its number, and refuses long ones."""

    def __init__(self, turns, most=10**6):
        self.prompts, self._turns, self.most = [], turns, most

    def __call__(self, draws, sampling):
        [draw] = draws
        task = draw.task
        chat = [dict(message) for message in task.messages or ()] or task.question
        if (
            sum(len(message["content"]) for message in task.messages or ({"content": "?"},))
            > self.most
        ):
            raise ValueError("the prompt is too long")
        self.prompts.append((chat, draw.stream_index))
        made = make_trajectory(turns=self._turns)
        return [Group(trajectories=(dataclasses.replace(made, task=task),))]


TURNS = (
    Turn(text="<search>q</search>", tool_call="q", observation="\n<information>x</information>\n"),
    Turn(text="<answer>Rome</answer>"),
)
SAID = "<search>q</search>\n<information>x</information>\n<answer>Rome</answer>"


def talk(rollout, **keys):
    config = debug_tiny.get_config()
    config.prompt.system, config.prompt.template = "Be brief.", "Question: {question}"
    config.update_from_flattened_dict(keys)
    return Conversation(types.SimpleNamespace(rollout=rollout), resolved(config))


def test_a_later_question_stands_behind_what_was_said():
    rollout = Played(TURNS)
    conversation = talk(rollout)
    for question in ("Where?", "And then?", "Why?"):
        conversation.ask(question)
    conversation.reset()
    conversation.ask("Who?")
    system = {"role": "system", "content": "Be brief."}
    first = [
        {"role": "user", "content": "Question: Where?"},
        {"role": "assistant", "content": SAID},
    ]
    second = [{"role": "user", "content": "And then?"}, {"role": "assistant", "content": SAID}]
    assert rollout.prompts == [
        ("Where?", 0),  # by itself, as in training
        ([system, *first, {"role": "user", "content": "And then?"}], 1),
        ([system, *first, *second, {"role": "user", "content": "Why?"}], 2),
        ("Who?", 3),
    ]


def test_where_the_template_shows_results_the_last_turn_is_what_was_said():
    rollout = Played(TURNS)
    conversation = talk(rollout, **{"env.search.protocol": "qwen"})
    conversation.ask("Where?")
    conversation.ask("Why?")
    assert rollout.prompts[1][0][2] == {"role": "assistant", "content": "<answer>Rome</answer>"}


def test_what_has_no_room_is_forgotten_from_the_beginning():
    rollout = Played(TURNS, most=2 * len(SAID) + 60)
    conversation = talk(rollout)
    assert [conversation.ask(f"number {i}?")[1] for i in range(5)] == [0, 0, 0, 1, 1]
    last, _ = rollout.prompts[-1]
    asked = [message["content"] for message in last if message["role"] == "user"]
    assert asked == ["Question: number 2?", "number 3?", "number 4?"]


def test_a_line_that_is_refused_leaves_what_was_said():
    rollout = Played(TURNS)
    conversation = talk(rollout)
    for question in ("Where?", "And then?"):
        conversation.ask(question)
    rollout.most = 0
    with pytest.raises(ValueError, match="too long"):
        conversation.ask("y " * 1000)
    rollout.most = 10**6
    conversation.ask("Why?")
    asked = [m["content"] for m in rollout.prompts[-1][0] if m["role"] == "user"]
    assert asked == ["Question: Where?", "And then?", "Why?"]


def test_what_is_wrong_without_any_history_is_told():
    def refuses(draws, sampling):
        raise ValueError("the question is odd")

    with pytest.raises(ValueError, match="is odd"):
        talk(refuses).ask("?")


def test_lines_are_one_conversation(run, tiny_world, monkeypatch, capsys):
    shutil.copytree(tiny_world / "model", run / "export")
    config = json.loads((run / "config.json").read_text())
    config["rollout"]["max_total_tokens"] = 256
    (run / "config.json").write_text(json.dumps(config))
    lines = "Who taught Ada?\nWhere was Ben born?\n\nWho taught Ada?\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    chat.main([str(run)])
    shown = capsys.readouterr().out.split("\n\n")
    asked = [text.splitlines() for text in shown if text.startswith(("Who", "Where"))]
    assert [text[0] for text in asked] == [
        "Who taught Ada?",
        "Where was Ben born?",
        "Who taught Ada?",
    ]
    # Begun anew, the first question has the same answer; greedy, whatever was said between.
    assert asked[0] == asked[2]


def test_nothing_is_drawn_while_a_question_is_typed(run, tiny_world, monkeypatch):
    shutil.copytree(tiny_world / "model", run / "export")
    display, growth = Display(), []
    display.console = Console(file=io.StringIO(), force_terminal=True, width=200)

    class Typing(io.StringIO):
        """Lines that are slowly typed."""

        def __next__(self):
            length = len(display.console.file.getvalue())
            time.sleep(0.5)
            growth.append(len(display.console.file.getvalue()) - length)
            return super().__next__()

    monkeypatch.setattr(chat, "Display", lambda: display)
    monkeypatch.setattr(sys, "stdin", Typing("Who taught Ada?\n"))
    chat.main([str(run)])
    assert growth == [0, 0]
    assert "answer: " in display.console.file.getvalue()


def test_a_line_that_is_no_utf_8_is_read_all_the_same(monkeypatch):
    raw = io.BytesIO(b"Who?\nbad \xff line\nThen?\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(raw, encoding="utf-8", errors="strict"))
    assert list(chat.read_lines(sys.stdin)) == ["Who?", "bad \ufffd line", "Then?"]
