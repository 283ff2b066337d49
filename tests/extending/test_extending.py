"""The user files that the documents show, each named by one line of configuration."""

import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs import debug_tiny
from jaxrl.builders.environment import (
    build_environment,
    build_rewards,
    build_search_engine,
    build_tools,
)
from jaxrl.builders.resolved import resolve_names
from jaxrl.builders.validation import validate
from jaxrl.data.tasks import open_tasks
from jaxrl.envs.base import (
    Episode,
    Prompt,
    ScoredEpisode,
    Task,
    Turn,
)
from jaxrl.envs.protocol import qwen
from jaxrl.envs.search_env import SearchEnv
from jaxrl.envs.tools.functions import FunctionTool
from jaxrl.extras.mcp.servers import McpServer
from jaxrl.objectives.advantages import ESTIMATORS
from jaxrl.objectives.filters import FILTERS
from jaxrl.objectives.kl import kl_estimate
from jaxrl.training.collect import _filter_groups
from tests.envs.contract import check_env
from tests.episodes import grouped, make_trajectory
from tests.helpers import blocks, estimator, method_with, text
from tests.servers import Retriever, served

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
KINDS = (
    "env tool function server engine protocol reward verl_reward trl_reward turn_reward tasks "
    "estimator loss filter aggregation score run"
)
FILES = [HERE / f"my_{kind}.py" for kind in KINDS.split()]
PAGES = ("environments", "tools", "search", "rewards", "data", "extending")
TASKS = [
    Task(id="1", question="What is 3*(4+5)?", answers=("27",)),
    Task(id="2", question="6*7?", answers=("42",)),
]


@pytest.fixture(autouse=True)
def user_files_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    yield
    for path in FILES:
        sys.modules.pop(path.stem, None)


def test_the_documents_show_the_files_and_valid_lines_that_name_them():
    shown = [block for page in PAGES for block in blocks(DOCS / f"{page}.md", "python")]
    links = "".join((DOCS / f"{page}.md").read_text(encoding="utf-8") for page in PAGES)
    assert all(text(path) in shown or f"../tests/extending/{path.name}" in links for path in FILES)
    lines = [block for block in shown if re.match(r"config\..*(my_|judges)", block, re.DOTALL)]
    for line in lines:  # each by itself is a valid configuration
        config = debug_tiny.get_config()
        exec(line, {"config": config})
        if "env.name" in line:
            config.reward.weights = {"exact_match": 1.0}
        validate(config)
    named = set(re.findall(r"\b(my_\w+)\.", "".join(lines)))
    assert {path.stem for path in FILES} - named == {"my_run", "my_score"}  # my_run names my_score


def test_the_environment_keeps_the_contract():
    from my_env import CalculatorEnv

    turns = ["<calc> 6*7 </calc>", "<answer> 42 </answer>", "Hm."]
    check_env(CalculatorEnv(max_turns=1), TASKS, turns)


def test_the_tool_and_the_engine_answer():
    from my_engine import Engine
    from my_tool import Clock

    def results(tool, *calls):
        return [answer.result for answer in tool.call_batch(calls)]

    assert results(Clock(), "75", "0") == ["13:15", "12:00"]
    with served(lambda request: request.params["query"][::-1]) as server:
        engine = Engine(url=f"{server.url}/search")
        assert results(engine, "abc", "x & y") == ["cba", "y & x"]
    [failed] = results(Engine(url="http://127.0.0.1:9/", timeout_s=1), "abc")
    assert str(failed).startswith("URLError: ")


def test_the_function_and_the_server_answer_tool_calls():
    from my_function import weekday

    server = McpServer({"command": (sys.executable, str(HERE / "my_server.py"))})
    env = SearchEnv(
        None,
        tools=[FunctionTool(weekday), *server.list_tools()],
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
    texts = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    turn = "".join(f"<tool_call>{text}</tool_call>" for text in texts)
    [result] = env.step([Episode(task=TASKS[0])], [turn])
    assert result.observation.bodies == (
        "Sunday",
        "error: month must be in 1..12",
        "error: argument 'year': Input should be a valid integer",
        "brown",
    )


def test_the_protocol_judges_the_last_line():
    from my_protocol import facts

    protocol = facts(("clock",))
    right = "<search> a </search>\n<facts>b</facts>\n<answer>since b\nAda Kerr</answer>"
    assert protocol.tools == ("search", "clock")
    assert protocol.final_answer(right) == "Ada Kerr"
    assert protocol.is_correct(right, ["Ada Kerr"])
    assert not protocol.is_correct(right, ["b"])
    assert [protocol.format_reward(text) for text in (right, "<answer>Ada")] == [0.0, -1.0]
    assert protocol.render_observation("</facts><clock>").body == "‹/facts›‹clock›"


def build_episodes(config):
    """Return the environment, the reward function and the first task of a configuration."""
    validate(config)
    c = resolve_names(config)
    env = build_environment(c, build_search_engine(c, print, None, print), build_tools(c, print))
    return env, build_rewards(c, None, print), open_tasks(c.task_sources["train"], print)[0]


def score(env, reward_fn, episodes):
    group = [
        ScoredEpisode(episode=episode, reward=reward, completion_ids=[1] * 20)
        for episode, reward in zip(episodes, env.score(episodes), strict=True)
    ]
    return reward_fn([group])[0]


def write_verl(path, questions):
    """Write questions as Search-R1 prepares them for verl."""
    rows = [
        {
            "data_source": "people",
            "prompt": [{"role": "user", "content": question["question"]}],
            "ability": "fact-reasoning",
            "reward_model": {"style": "rule", "ground_truth": {"target": question["answers"]}},
            "extra_info": {"split": path.stem, "index": index},
        }
        for index, question in enumerate(questions)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)


def test_my_run_reads_verl_questions_and_pays_the_users_score(tiny_world, tmp_path, monkeypatch):
    from my_run import get_config

    shutil.copytree(tiny_world / "model", tmp_path / "model")
    for name, source in (("train", "questions_train"), ("test", "questions_eval")):
        lines = (tiny_world / f"{source}.jsonl").read_text().splitlines()
        write_verl(tmp_path / f"{name}.parquet", [json.loads(line) for line in lines[:4]])
    monkeypatch.chdir(tmp_path)
    config = get_config()
    with served(Retriever([{"id": "a", "contents": '"Ada"\nBorn in Avington.'}])) as server:
        config.search.http.url = f"{server.url}/retrieve"
        env, reward_fn, task = build_episodes(config)
        [result] = env.step([Episode(task=task)], ["<search> Ada </search>"])
    assert result.observation.body == "Doc 1(Title: Ada) Born in Avington."
    texts = [f"<answer>{task.answers[0]}</answer>", "<answer>x</answer>", "x"]
    episodes = [Episode(task=task, turns=[Turn(text=text)]) for text in texts]
    assert [reward.total for reward in score(env, reward_fn, episodes)] == [1.0, 0.1, 0.0]


def test_rewards_of_verl_and_trl_and_by_turn(tiny_world):
    config = debug_tiny.get_config(str(tiny_world))
    config.reward.weights = {
        "my_verl_reward.compute_score": 1.0,
        "my_trl_reward.economy": 0.5,
        "my_trl_reward.grounded": 2.0,
        "my_turn_reward.progress": 1.0,
    }
    config.reward.settings = {"my_verl_reward.compute_score": {"partial": 0.25}}
    config.advantage.by_turn = True
    config.advantage.name = "rloo"
    env, reward_fn, task = build_episodes(config)
    observation = env.step([Episode(task=task)], ["<search> abc </search>"])[0].observation
    useless = Turn(text="<search> abc </search>", tool_call="abc", observation=observation.text)
    shown = f"<information>{task.answers[0]}</information>"
    useful = Turn(text="<search> x </search>", tool_call="x", observation=shown)
    answer = Turn(text="<answer> x </answer>")
    episodes = [Episode(task=task, turns=turns) for turns in ([useless, useful, answer], [answer])]
    searched, guessed = score(env, reward_fn, episodes)
    assert searched.turn_totals == pytest.approx((-0.1, 0.9, 0.0))
    assert searched.total == pytest.approx(0.25 + 0.5 * 0.5 + 2.0 + 0.8)
    assert guessed.turn_totals == (0.0,)
    assert guessed.total == pytest.approx(0.25 + 0.5 * 0.5)
    assert "grounded" not in guessed.parts
    assert guessed.parts["compute_score/answered"] == 1.0


def test_the_objectives_by_hand():
    from my_aggregation import by_root
    from my_estimator import by_rank
    from my_filter import has_success
    from my_loss import floored

    rewards, ids = np.array([1.0, 0.0, 0.5, 0.0, 0.0, 3.0]), np.array([0, 0, 0, 1, 1, -1])
    advantages = by_rank(rewards, ids, scale=3.0)
    np.testing.assert_allclose(advantages, [2.0, -2.0, 0.0, 0.0, 0.0, 0.0])
    np.testing.assert_array_equal(has_success(rewards, ids), [True] * 3 + [False] * 3)
    logprobs, mask = np.array([[-1.0, -9.0, -9.0]]), np.array([[True, True, False]])
    loss, metrics = floored(logprobs, np.full((1, 3), 2.0), mask)
    np.testing.assert_allclose(loss, [[2.0, 10.0, 0.0]])
    np.testing.assert_array_equal(metrics["below_floor"], [[0, 1, 0]])
    # Roots 2, 0 and 3: two fifths of the whole over 4 tokens, three over 9.
    np.testing.assert_allclose(by_root(np.array([4, 0, 9])), [1 / 10, 1 / 5, 1 / 15])


def test_the_check_flags_long_responses():
    from my_watch import judge

    state, signs = judge({"response_length/mean": 300.0}, {})
    assert (state, signs) == ({"step": 1, "sound": 1}, [])
    state, [sign] = judge({"response_length/mean": 500.0}, state)
    assert state == {"step": 2, "sound": 1}
    assert (sign.name, sign.since) == ("too_long", 1)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"advantage.name": "my_estimator.by_rank", "advantage.settings": {"k": 3}}, "'k'"),
        ({"advantage.settings": {"scale": 3}}, "advantage.settings"),
        ({"advantage.name": "math.pi"}, "math.pi"),
        ({"loss.aggregation": "my_loss.floored"}, "my_loss.floored"),
    ],
)
def test_objectives_that_do_not_fit_are_refused(changes, name):
    config = debug_tiny.get_config()
    config.update_from_flattened_dict(changes)
    with pytest.raises(ValueError, match=re.escape(name)) as refusal:
        validate(config)
    assert str(refusal.value).startswith(f"config.{next(iter(changes)).rpartition('.')[0]}.")


def test_a_parameter_without_a_configuration_key_needs_a_default(monkeypatch, tmp_path):
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


def test_objectives_named_in_the_configuration_are_used():
    groups = grouped(
        [make_trajectory(task_number=i // 2, sample_index=i % 2, reward=i) for i in range(4)]
    )
    changes = {"advantage.name": "my_estimator.by_rank", "advantage.settings": {"scale": 4.0}}
    estimated = estimator(**changes)(groups, 0, 0)
    assert [t.advantage for group in estimated for t in group.trajectories] == [-2, 2, -2, 2]
    changes = {"filter.name": "my_filter.has_success", "filter.settings": {"least": 1.0}}
    assert _filter_groups(groups, groups, method_with(**changes), 0.0) == groups[1:]


def test_results_of_objectives_are_checked(monkeypatch):
    groups = grouped([make_trajectory(task_number=i // 2, sample_index=i % 2) for i in range(4)])
    monkeypatch.setitem(ESTIMATORS, "rloo", lambda rewards: np.nan * rewards)
    with pytest.raises(ValueError, match=r"'rloo', which returned \[4\] with 0 finite numbers"):
        estimator(**{"advantage.name": "rloo"})(groups, 0, 0)
    monkeypatch.setitem(FILTERS, "varied", lambda rewards: np.arange(len(rewards)))
    method = method_with(**{"filter.name": "varied"})
    with pytest.raises(ValueError, match=r"returned int64 \[4\]; expected bool \[4\]"):
        _filter_groups(groups, groups, method, 0.0)
