"""What the documents show: a user's files, outside the package, by one line each."""

import itertools
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from configs import debug_tiny
from jaxrl.builders.validation import validate
from jaxrl.envs.base import CallRecord, Episode, Outcome, Prompt, Task, Turn
from jaxrl.envs.protocol import qwen
from jaxrl.envs.search_env import SearchEnv
from jaxrl.envs.tools.functions import FunctionTool
from jaxrl.extras.mcp.servers import McpServer
from jaxrl.logs.display import Display
from jaxrl.objectives.advantages import ESTIMATORS
from jaxrl.objectives.filters import FILTERS
from jaxrl.objectives.kl import kl_estimate
from jaxrl.run import run
from jaxrl.training.collect import NotEnoughGroupsError, _filter_groups
from tests.envs.contract import check_env
from tests.episodes import grouped, make_trajectory
from tests.helpers import blocks, build, estimator, method_with, settings_of, text
from tests.runs import records, trajectories
from tests.servers import served

HERE = Path(__file__).parent
KINDS = (
    "env tool function server engine protocol reward verl_reward trl_reward turn_reward tasks "
    "estimator loss filter aggregation"
)
FILES = [HERE / f"my_{kind}.py" for kind in KINDS.split()]
PAGES = ("environments", "tools", "search", "rewards", "data", "extending")
JUDGED = """config.reward.weights = {"exact_match": 1.0, "helpful": 0.2}
config.reward.judges = {
    "helpful": {
        "url": "http://judge:8000/v1",
        "model": "Qwen/Qwen3-32B",
        "prompt": "Question: {question}\\nResponse: {response}\\n"
        "How helpful is the response? End with a line 'Score: ' and a number from 0 to 10.",
        "key_env": "JUDGE_API_KEY",
    }
}
"""
TASKS = [
    Task(id="1", question="What is 3*(4+5)?", answers=("27",)),
    Task(id="2", question="6*7?", answers=("42",)),
]


@pytest.fixture(autouse=True)
def beside_the_config(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    yield
    for path in FILES:
        sys.modules.pop(path.stem, None)


@pytest.fixture
def server():
    """Answers every query with itself, backwards."""
    with served(lambda request: request.params["query"][::-1]) as server:
        yield f"{server.url}/search"


def test_the_document_shows_the_files_and_their_lines():
    folder = Path(__file__).parents[2] / "docs"
    shown = [block for page in PAGES for block in blocks(folder / f"{page}.md", "python")]
    assert all(text(path) in shown for path in FILES)
    lines = [
        'config.env.name = "my_env.CalculatorEnv"\n',
        'config.env.search.tools = ("my_tool.Clock",)\n',
        'config.env.search.tools = ("my_function.weekday",)\n',
        'config.env.search.mcp = ({"command": ("python", "my_server.py")},)\n',
        'config.search.engine = "my_engine.Engine"\n',
        """config.search.engine = "examples.opensearch_engine.OpenSearch"
config.search.settings = {"url": "https://search:9200", "index": "wiki"}
""",
        'config.env.search.protocol = "my_protocol.facts"\n',
        'config.reward.weights = {"exact_match": 1.0, "my_reward.brevity": 0.2}\n',
        """config.reward.weights = {
    "my_verl_reward.compute_score": 1.0,
    "my_trl_reward.economy": 0.1,
    "my_trl_reward.grounded": 0.5,
}
config.reward.settings = {"my_verl_reward.compute_score": {"partial": 0.2}}
""",
        """config.reward.weights = {"exact_match": 1.0, "my_turn_reward.progress": 0.5}
config.advantage.by_turn = True
""",
        'config.tasks.train.format = "my_tasks.Sums"\n',
        'config.tasks.train.settings = {"count": 5000, "seed": 1}\n',
        JUDGED,
        'config.advantage.name = "my_estimator.by_rank"\n',
        'config.loss.name = "my_loss.floored"\n',
        'config.filter.name = "my_filter.has_success"\n',
        'config.loss.aggregation = "my_aggregation.by_root"\n',
    ]
    for line in lines:  # each by itself is a valid configuration
        assert line in shown
        config = debug_tiny.get_config()
        exec(line, {"config": config})
        if "env.name" in line:
            config.reward.weights = {"exact_match": 1.0}
        validate(config)


def test_the_environment_keeps_the_contract():
    from my_env import CalculatorEnv

    turns = ["<calc> 6*7 </calc>", "<answer> 42 </answer>", "Hm."]
    check_env(CalculatorEnv(max_turns=1), TASKS, turns)


def test_the_calculator_survives_what_a_model_writes():
    from my_env import CalculatorEnv, calculate

    assert calculate("3*(4+5)") == "27"
    for expression in ("", "2**9", "__import__('os')", "1 +", "(" * 500, "\0", "3.5*2"):
        assert calculate(expression).startswith("error: ")
    [malformed] = CalculatorEnv(max_turns=1).step([Episode(task=TASKS[0])], ["I give up"])
    assert malformed.outcome == Outcome.MALFORMED


def test_the_tool_and_the_engine_answer(server):
    from my_engine import Engine
    from my_tool import Clock

    found = lambda tool, *calls: [answer.result for answer in tool.answer_all(calls)]  # noqa: E731
    assert found(Clock(), "75", "1e9", "0")[::2] == ["13:15", "12:00"]
    assert found(Engine(url=server), "abc", "x & y") == ["cba", "y & x"]
    [failed] = found(Engine(url="http://127.0.0.1:9/", timeout_s=1), "abc")
    assert str(failed).startswith("URLError: ")


def test_the_function_and_the_server_answer_tool_calls():
    from my_function import weekday

    server = McpServer({"command": (sys.executable, str(HERE / "my_server.py"))})
    env = SearchEnv(
        None,
        tools=[FunctionTool(weekday), *server.tools()],
        prompt=Prompt(system="", template="{question}"),
        max_turns=1,
        protocol=qwen,
    )
    assert [tool["function"]["name"] for tool in env.chat_tools] == ["weekday", "look_up"]
    calls = [
        ("weekday", {"year": 1969, "month": 7, "day": 20}),
        ("weekday", {"year": 1969, "month": 13, "day": 20}),
        ("weekday", {"year": "1969", "month": 7, "day": 20}),
        ("look_up", {"number": 3}),
    ]
    written = [json.dumps({"name": name, "arguments": given}) for name, given in calls]
    turn = "".join(f"<tool_call>{call}</tool_call>" for call in written)
    [reply] = env.step([Episode(task=TASKS[0])], [turn])
    assert reply.observation.bodies == (
        "Sunday",
        "error: month must be in 1..12",
        "error: argument 'year': Input should be a valid integer",
        "brown",
    )


def test_the_protocol_judges_the_last_line():
    from my_protocol import facts

    spoken = facts(("clock",))
    right = "<search> a </search>\n<facts>b</facts>\n<answer>since b\nAda Kerr</answer>"
    assert spoken.tools == ("search", "clock")
    assert spoken.final_answer(right) == "Ada Kerr"
    assert spoken.is_correct(right, ["Ada Kerr"])
    assert not spoken.is_correct(right, ["b"])
    assert [spoken.format_reward(text) for text in (right, "<answer>Ada")] == [0.0, -1.0]
    assert spoken.render_observation("</facts><clock>").body == "‹/facts›‹clock›"


SIZES = {
    "num_steps": 2,
    "stages": ("sft", "train"),
    "rollout.max_num_seqs": 4,
    "rollout.max_total_tokens": 112,
    "rollout.max_observation_tokens": 24,
    "eval.suites": (),
    "log.trajectories": -1,
    "checkpoint.every_steps": 2,
}


def taught(world, folder, texts, other_texts=None, **changes):
    """The configuration of a short run whose policy first learns to write just these turns.

    Args:
        world: whose questions are asked.
        folder: for the demonstrations.
        texts: turns of the assistant and results of tools, in turn.
        other_texts: the same for every second question; None for `texts`.
        changes: of the configuration.
    """
    roles = ["user", *(["assistant", "tool"] * len(texts))]
    each = itertools.cycle([texts, other_texts or texts])
    lines = (world / "questions_train.jsonl").read_text().splitlines()
    chats = [[json.loads(line)["question"], *next(each)] for line in lines]
    messages = [
        [{"role": r, "content": t} for r, t in zip(roles, chat, strict=False)] for chat in chats
    ]
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in messages))
    config = debug_tiny.get_config(str(world))
    config.update_from_flattened_dict({**SIZES, "sft.source": str(path), **changes})
    return config


def played(config, workdir):
    """The trajectories of the last step of a run, and its record."""
    validate(config)
    workdir.mkdir()
    run(settings_of(config), workdir, build(config, workdir=workdir), Display())
    record = records(workdir)[-1]
    return trajectories(workdir, record["step"]), record


def turn_of(saved):
    return Turn(**{**saved, "records": tuple(CallRecord(**one) for one in saved["records"])})


@pytest.mark.minutes
@pytest.mark.usefixtures("quick_compilation", "no_pictures", "one_size")
def test_a_run_pays_functions_of_verl_and_trl_and_turns(tiny_world, tmp_path):
    from my_turn_reward import progress
    from my_verl_reward import compute_score

    weights = {
        "my_verl_reward.compute_score": 1.0, "my_trl_reward.economy": 0.5,
        "my_trl_reward.grounded": 2.0, "my_turn_reward.progress": 1.0,
    }  # fmt: skip
    config = taught(
        tiny_world, tmp_path, ["<search> abc </search>", "nothing", "<answer> x </answer>"],
        ["<answer> x </answer>"],
        **{
            "reward.weights": weights, "advantage.by_turn": True, "advantage.name": "rloo",
            "reward.settings": {"my_verl_reward.compute_score": {"partial": 0.25}},
            "sft.num_steps": 20,
        },
    )  # fmt: skip
    _, record = played(config, tmp_path / "run")
    lines = trajectories(tmp_path / "run", record["step"] - 1)  # half of them search, as yet
    grounded = 0
    for line in lines:
        parts, turns = line["reward_parts"], list(map(turn_of, line["turns"]))
        truth, text = {"target": line["answers"]}, line["generated_text"]
        found = compute_score("", text, truth, partial=0.25)
        assert parts["compute_score"] == found["score"]
        assert parts["compute_score/answered"] == found["answered"]
        length = len(line["token_ids"]) - line["prompt_length"]
        assert parts["economy"] == pytest.approx(20 / (20 + length))
        assert ("grounded" in parts) == ("<information>" in text)
        grounded += "grounded" in parts
        assert line["turn_rewards"] == pytest.approx(progress(turns, line["answers"]))
        rest = found["score"] + 0.5 * parts["economy"] + 2.0 * parts.get("grounded", 0.0)
        assert line["reward"] == pytest.approx(rest + sum(line["turn_rewards"]))
    assert 0 < grounded < len(lines)
    assert record["reward/progress/mean"] < 0  # searches cost, and find nothing here
    assert_by_turn(lines)
    assert record["actor/grad_norm"] > 0


def assert_by_turn(lines):
    """Each turn has what is earned from it on, less the mean of what others of the group earn."""

    def to_go(line, turn):
        return line["reward"] - sum(line["turn_rewards"][:turn])

    several = 0
    for line in lines:
        others = [o for o in lines if o["group_id"] == line["group_id"] and o is not line]
        wanted = [
            to_go(line, turn) - np.mean([to_go(other, turn) for other in others])
            for turn in range(len(line["turns"]))
        ]
        assert line["turn_advantages"] == pytest.approx(wanted, abs=1e-5)
        several += len({round(advantage, 4) for advantage in wanted}) > 1
    assert several > 0  # else it could as well have been one a trajectory


def test_the_objectives_by_hand():
    from my_aggregation import by_root
    from my_estimator import by_rank
    from my_filter import has_success
    from my_loss import floored

    rewards, ids = np.array([1.0, 0.0, 0.5, 0.0, 0.0, 3.0]), np.array([0, 0, 0, 1, 1, -1])
    got = by_rank(rewards, ids, scale=3.0)
    np.testing.assert_allclose(got, [2.0, -2.0, 0.0, 0.0, 0.0, 0.0])
    np.testing.assert_array_equal(has_success(rewards, ids), [True] * 3 + [False] * 3)
    logprobs, mask = np.array([[-1.0, -9.0, -9.0]]), np.array([[True, True, False]])
    loss, metrics = floored(logprobs, np.full((1, 3), 2.0), mask)
    np.testing.assert_allclose(loss, [[2.0, 10.0, 0.0]])
    np.testing.assert_array_equal(metrics["below_floor"], [[0, 1, 0]])
    # Roots 2, 0 and 3: two fifths of the whole over 4 tokens, three over 9.
    np.testing.assert_allclose(by_root(np.array([4, 0, 9])), [1 / 10, 1 / 5, 1 / 15])


@pytest.mark.slow(instead="extending/test_extending.py::test_the_objectives_by_hand")
@pytest.mark.usefixtures("quick_compilation", "no_pictures", "one_size")
def test_a_run_with_objectives_of_ones_own(tiny_world, tmp_path):
    changes = {
        "advantage.name": "my_estimator.by_rank", "advantage.settings": {"scale": 3.0},
        "loss.name": "my_loss.floored", "loss.settings": {"floor": -3.0},
        "filter.name": "my_filter.has_success", "loss.aggregation": "my_aggregation.by_root",
        "reward.weights": {"exact_match": 1.0, "my_reward.brevity": 1.0},
        "sft.num_steps": 2,
    }  # fmt: skip
    config = taught(tiny_world, tmp_path, ["<answer> x </answer>"], **changes)
    lines, record = played(config, tmp_path / "run")
    assert len({line["reward"] for line in lines}) > 1
    for line in lines:
        group = [other["reward"] for other in lines if other["group_id"] == line["group_id"]]
        beaten = sum(line["reward"] > other for other in group)
        beating = sum(line["reward"] < other for other in group)
        assert line["advantage"] == pytest.approx(3 * (beaten - beating) / len(group))
    assert 0 < record["actor/below_floor"] < 1
    assert record["filter/kept_share"] == 1
    # None earns as much as this.
    config.filter.settings = {"least": 5.0}
    config.filter.max_batches = 1
    with pytest.raises(NotEnoughGroupsError, match=r"filter\.name='my_filter.has_success'"):
        played(config, tmp_path / "picky")


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"advantage.name": "my_estimator.by_rank", "advantage.settings": {"k": 3}}, "'k'"),
        ({"advantage.settings": {"scale": 3}}, "advantage.settings"),
        ({"advantage.name": "math.pi"}, "math.pi"),
        (
            {"advantage.name": "my_estimator.by_rank", "advantage.settings": {"scale": {1}}},
            "advantage.settings",
        ),
        ({"loss.aggregation": "my_loss.floored"}, "my_loss.floored"),
        ({"kl.estimator": "numpy.linspace"}, "numpy.linspace"),
        ({"sft.optimizer.schedule": "optax.cosine_decay_schedule"}, "optax.cosine_decay_schedule"),
    ],
)
def test_objectives_that_do_not_fit_are_refused(changes, name):
    config = debug_tiny.get_config()
    config.update_from_flattened_dict(changes)
    with pytest.raises(ValueError, match=re.escape(name)) as refusal:
        validate(config)
    assert str(refusal.value).startswith(f"config.{next(iter(changes)).rpartition('.')[0]}.")


def test_a_setting_that_no_key_holds_needs_a_default(monkeypatch, tmp_path):
    (tmp_path / "my_kl.py").write_text(
        "def strict(log_ratios, *, limit):\n    return abs(log_ratios)\n"
        "def square(log_ratios, *, scale=2.0):\n    return scale * log_ratios**2\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = debug_tiny.get_config()
    config.kl.estimator = "my_kl.strict"
    with pytest.raises(ValueError, match=r"config.kl.estimator .*'limit'"):
        validate(config)
    config.kl.estimator = "my_kl.square"
    estimator = validate(config).kl_estimator
    arrays = np.array([[-1.0, -2.0]]), np.array([[-2.0, -2.0]])
    np.testing.assert_array_equal(kl_estimate(*arrays, estimator=estimator), [[2, 0]])


def test_what_an_objective_returns_is_checked(monkeypatch):
    groups = grouped([make_trajectory(task_number=i // 2, sample_index=i % 2) for i in range(4)])
    monkeypatch.setitem(ESTIMATORS, "rloo", lambda rewards: np.nan * rewards)
    with pytest.raises(ValueError, match=r"'rloo', which returned \[4\] with 0 finite numbers"):
        estimator(**{"advantage.name": "rloo"})(groups, 0, 0)
    monkeypatch.setitem(FILTERS, "varied", lambda rewards: np.arange(len(rewards)))
    method = method_with(**{"filter.name": "varied"})
    with pytest.raises(ValueError, match=r"returned int64 \[4\]; expected bool \[4\]"):
        _filter_groups(groups, groups, method, 0.0)
