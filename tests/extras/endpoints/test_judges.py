"""Judges with a real server that answers, fails or hangs."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from jaxrl.envs.base import Episode, Reward, ScoredEpisode, Task, ToolError, Turn
from jaxrl.envs.rewards.combiner import MAX_THREADS, RewardCombiner
from jaxrl.extras.endpoints.judges import Judge, JudgeSettings, parse_score
from jaxrl.training.usage import UsageStats
from jaxrl.utils.concurrency import DeadlineError
from tests.episodes import ANSWER, make_trajectory
from tests.servers import Reply, served

TASK = Task(id="t", question="Where {response}?", answers=("Paris", "Lutetia"))
PROMPT = (
    "Question: {question}\nTruth: {answers}\nResponse: {response}\nEnd with 'Score: 0..10' {x}."
)


@pytest.fixture
def server():
    """Start an endpoint with scripted replies, which then answers with a score of 7."""
    script = []

    def answer(request):
        reply = script.pop(0) if script else {}
        time.sleep(reply.get("wait", 0.0))
        message = {"content": reply.get("text", "Fine.\nScore: 7")}
        choice = {"message": message, "finish_reason": reply.get("finish_reason", "stop")}
        body = reply.get("raw", {"choices": [choice]})
        return Reply(body, reply.get("status", 200), reply.get("headers", {}))

    with served(answer) as endpoint:
        endpoint.script = script
        yield endpoint


def make_judge(url, workdir=None, **settings):
    quick = {"backoff_s": 0.01, "deadline_s": 5.0, "outage_deadline_s": 0.6, "retries": 2}
    base = {"url": url, "model": "judge-1", "prompt": PROMPT}
    judge = Judge("helpful", JudgeSettings(**{**base, **quick, **settings}))
    judge.open(workdir)
    return judge


def make_episode(text):
    episode = Episode(task=TASK, turns=[Turn(text=text)])
    return ScoredEpisode(episode=episode, reward=Reward(parts={"f1": 0.5}, final_answer=""))


def compute_rewards(judge, *texts):
    rewards, _ = compute_rewards_and_records(judge, *texts)
    return rewards


def compute_rewards_and_records(judge, *texts, **settings):
    combiner = RewardCombiner(
        weights={"f1": 1.0, "helpful": 2.0}, custom_parts={"helpful": judge}, **settings
    )
    group = [make_episode(text) for text in texts]
    [rewards] = combiner([group])
    records = [record for episode in group for record in episode.records]
    assert {record.tool for record in records} == {"helpful"}
    assert [record.call for record in records] == [judge.build_prompt(episode) for episode in group]
    return rewards, records


def compute_usage(records):
    trajectory = replace(make_trajectory(turns=(ANSWER,)), reward_records=tuple(records))
    return UsageStats.from_trajectories([trajectory], {"helpful": 0.25, "search": 9.0})


def test_a_judges_number_is_part_of_the_reward(server):
    judge = make_judge(server.url, system="Be strict.", options={"seed": 3}, temperature=0.5)
    [reward] = compute_rewards(judge, "In {answers}.")
    assert reward.parts["helpful"] == pytest.approx(0.7)
    assert reward.total == pytest.approx(0.5 + 2 * 0.7)
    [request] = server.requests
    prompt = PROMPT.replace("{question}", "Where {response}?", 1)
    prompt = prompt.replace("Truth: {answers}", "Truth: Paris | Lutetia")
    # Braces in the texts are no placeholders, and other braces of the prompt are plain text.
    prompt = prompt.replace("Response: {response}", "Response: In {answers}.")
    assert request.json == {
        "model": "judge-1", "temperature": 0.5, "max_tokens": 1024, "seed": 3,
        "messages": [
            {"role": "system", "content": "Be strict."}, {"role": "user", "content": prompt},
        ],
    }  # fmt: skip


def test_a_recorded_run_is_replayed_without_a_network(server, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-very-secret")
    server.script[:] = [{"text": "Score: 3"}]
    first = compute_rewards(make_judge(server.url, tmp_path, key_env="JUDGE_KEY"), "a")
    assert server.requests[0].headers["authorization"] == "Bearer sk-very-secret"
    monkeypatch.delenv("JUDGE_KEY")
    nowhere = "http://127.0.0.1:9/v1"
    replay = {"replay": "only", "key_env": "JUDGE_KEY"}  # neither the server nor the key is needed
    judge = make_judge(nowhere, tmp_path, **replay)
    assert compute_rewards(judge, "a") == first
    [missing] = compute_rewards(judge, "never seen")
    assert isinstance(missing, ToolError)
    with pytest.raises(FileNotFoundError, match=r"judges\['helpful'\]\.replay is 'only', but"):
        make_judge(nowhere, tmp_path, **replay, model="judge-2")
    texts = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert texts
    assert not any("sk-very-secret" in text for text in texts)
    with pytest.raises(ValueError, match=r"JUDGE_KEY, which config\.reward\.judges.*key_env names"):
        make_judge(nowhere, key_env="JUDGE_KEY")


BASE = {"url": "http://judge:8000/v1", "model": "m", "prompt": "{response}"}

TRANSIENT = {
    "status": {"status": 500},
    "null content": {"raw": '{"choices": [{"message": {"content": null}}]}'},
    "cut within its number": {"text": "Score: 1", "finish_reason": "length"},
    "no number": {"text": "I would rather not say."},
}


@pytest.mark.parametrize("fault", TRANSIENT.values(), ids=TRANSIENT)
def test_a_transient_fault_is_retried(server, fault):
    server.script[:] = [fault, {"text": "I think so. Score: **4.5**"}]
    [reward] = compute_rewards(make_judge(server.url), "a")
    assert reward.parts["helpful"] == pytest.approx(0.45)
    assert len(server.requests) == 2


LASTING = {
    "refused": ({"status": 401, "raw": "who are you?"}, "status 401"),
    "unreadable": ({"text": "Nine out of ten."}, "the reply ends 'Nine out of ten.'; expected a"),
    "cut": ({"text": "Score: 1", "finish_reason": "length"}, "cut at max_tokens=1024"),
    "late": ({"wait": 2.0}, "answer within 0."),
}


@pytest.mark.parametrize(("fault", "message"), LASTING.values(), ids=LASTING)
def test_a_judge_without_a_number_is_an_error_and_no_score(server, fault, message):
    server.script[:] = [fault] * 50
    start = time.monotonic()
    deadline_s = 0.2 if "wait" in fault else 5.0
    [error] = compute_rewards(make_judge(server.url, deadline_s=deadline_s), "a")
    assert isinstance(error, ToolError)
    assert str(error).startswith("the judge 'helpful' returned no score: ")
    assert message in str(error)
    assert time.monotonic() - start < 5


def test_requests_are_counted_and_cached_replies_cost_nothing(server, tmp_path):
    judge = make_judge(server.url, tmp_path)
    server.script[:] = [{"status": 500}, {"text": "no number"}, {"text": "Score: 2"}]
    _, first = compute_rewards_and_records(judge, "a")
    rewards, then = compute_rewards_and_records(judge, "a", "b")
    assert [r.parts["helpful"] for r in rewards] == [pytest.approx(0.2), pytest.approx(0.7)]
    replayed = make_judge("http://127.0.0.1:9/v1", tmp_path, replay="only")
    _, again = compute_rewards_and_records(replayed, "b")
    records = [*first, *then, *again]
    sources = [(record.source, record.attempts) for record in records]
    assert sources == [("tool", 3), ("cache", 0), ("tool", 1), ("replay", 0)]
    server.script[:] = [{"text": "no number"}] * 20
    (good, error), failed = compute_rewards_and_records(judge, "a", "c")
    assert good.parts["helpful"] == pytest.approx(0.2)  # another episode's error changes nothing
    assert isinstance(error, ToolError)
    stats = compute_usage([*records, *failed])
    assert stats.num_calls == {"helpful": 6}
    assert stats.usage.attempts == {"helpful": len(server.requests)}
    assert stats.usage.cost == 0.25 * len(server.requests) > 1.0


def test_abandoned_calls_count_one_attempt_if_they_were_sent(server):
    server.script[:] = [{"wait": 2.0}] * 40
    texts = [str(number) for number in range(MAX_THREADS + 1)]
    judge = make_judge(server.url)
    errors, records = compute_rewards_and_records(judge, *texts, deadline_s=0.5)
    assert {type(error) for error in errors} == {DeadlineError}
    assert [record.attempts for record in records] == [1] * MAX_THREADS + [0]
    assert {record.error for record in records} == {"abandoned"}
    assert records[0].waited_s > 0.25 > records[-1].waited_s == 0.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt": "Rate {answer}"}, r"expected \{response\} in it"),
        ({"pattern": "score: (\\d+"}, r"pattern is .*; expected a regular expression \(missing"),
        ({"url": "http://x/v1?api_key=abc"}, r"contains a parameter 'api_key'.*key_env"),
        ({"low": 5, "high": 5}, "low is 5; expected less than high=5"),
        ({"deadline_s": 0}, "deadline_s is 0; expected a number above 0"),
    ],
)
def test_invalid_settings_are_rejected(settings, message):
    with pytest.raises(ValueError, match=message):
        JudgeSettings(**{**BASE, **settings})


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("Score: 0.5", 0.75),
        ("Score: 1\nRather not.\nscore = -0.5", 0.25),
        ('{"score": 1}', 1.0),
        ("**Score (from -1 to 1):** -1", 0.0),
        ("Fine. **Score: 1/1**\n", 1.0),
        ("Score: 3", None),
        ("1", None),
        ("Score: between 0 and 1", None),  # no number is picked out of a sentence
    ],
)
def test_scores_are_parsed_and_scaled(reply, score):
    settings = JudgeSettings(**BASE, low=-1, high=1)
    if score is not None:
        assert parse_score(reply, settings) == score
        return
    with pytest.raises(ToolError, match="expected a number from -1 to 1"):
        parse_score(reply, settings)


def test_a_custom_pattern_searches_the_end_of_a_reply_within_a_second():
    """Other threads continue during the search."""
    custom = JudgeSettings(**BASE, pattern=r"worth (\d+)")
    assert parse_score("worth 10" + " " * 4096 + "worth 3, or worth 4", custom) == 0.4
    with pytest.raises(ToolError, match="expected a number from 0 to 10"):
        parse_score("worth 3" + " " * 4096, custom)
    endless = JudgeSettings(**BASE, pattern=r"((?:a|aa)+)$")
    with ThreadPoolExecutor() as pool:
        search = pool.submit(parse_score, "a" * 60 + "!", endless)
        num_ticks = 0
        while not search.done():
            time.sleep(0.01)
            num_ticks += 1
        assert num_ticks > 10
        with pytest.raises(TimeoutError):
            search.result()
