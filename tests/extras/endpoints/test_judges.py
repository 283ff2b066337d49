"""Judges against a real server, in its good hours and its bad ones."""

import itertools
import math
import threading
import time
from dataclasses import replace

import pytest

from jaxrl.envs.base import Episode, Reward, ScoredEpisode, Task, ToolError, Turn
from jaxrl.envs.rewards.combiner import MAX_THREADS, RewardCombiner
from jaxrl.extras.endpoints.judges import Judge, JudgeEndpoint, JudgeSettings, parse_score
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
    """An endpoint that answers each request as the next of a script says, or scores 7."""
    script = []

    def answer(request):
        how = script.pop(0) if script else {}
        time.sleep(how.get("wait", 0.0))
        message = {"content": how.get("text", "Fine.\nScore: 7")}
        ending = {"finish_reason": how.get("finish_reason", "stop")}
        body = how.get("raw", {"choices": [{"message": message, **ending}]})
        return Reply(body, how.get("status", 200), how.get("headers", {}))

    with served(answer) as endpoint:
        endpoint.script = script
        yield endpoint


def judge(url, workdir=None, **settings):
    quick = {"backoff_s": 0.01, "deadline_s": 5.0, "outage_deadline_s": 0.6, "retries": 2}
    base = {"url": url, "model": "judge-1", "prompt": PROMPT}
    made = Judge("helpful", JudgeSettings(**{**base, **quick, **settings}))
    made.open(workdir)
    return made


def finished(text):
    episode = Episode(task=TASK, turns=[Turn(text=text)])
    return ScoredEpisode(episode=episode, reward=Reward(parts={"f1": 0.5}, final_answer=""))


def paid(part, *texts):
    rewards, _ = counted(part, *texts)
    return rewards


def counted(part, *texts, **settings):
    """What is paid for some responses, and what the judge's calls took."""
    pay = RewardCombiner(
        weights={"f1": 1.0, "helpful": 2.0}, custom_parts={"helpful": part}, **settings
    )
    group = [finished(text) for text in texts]
    [rewards] = pay([group])
    records = [record for one in group for record in one.records]
    assert {record.tool for record in records} == {"helpful"}
    assert [record.call for record in records] == [part.prompt(one) for one in group]
    return rewards, records


def ledger_of(records):
    made = replace(make_trajectory(turns=(ANSWER,)), reward_records=tuple(records))
    return UsageStats.compute([made], {"helpful": 0.25, "search": 9.0})


def test_a_judge_is_asked_with_the_filled_prompt_and_its_number_is_paid(server):
    part = judge(server.url, system="Be strict.", options={"seed": 3}, temperature=0.5)
    [reward] = paid(part, "In {answers}.")
    assert reward.parts["helpful"] == pytest.approx(0.7)
    assert reward.total == pytest.approx(0.5 + 2 * 0.7)
    [request] = server.requests
    prompt = PROMPT.replace("{question}", "Where {response}?", 1)
    prompt = prompt.replace("Truth: {answers}", "Truth: Paris | Lutetia")
    # What the texts hold is no place; a text of ours in braces is plain.
    prompt = prompt.replace("Response: {response}", "Response: In {answers}.")
    assert request.json == {
        "model": "judge-1", "temperature": 0.5, "max_tokens": 1024, "seed": 3,
        "messages": [
            {"role": "system", "content": "Be strict."}, {"role": "user", "content": prompt},
        ],
    }  # fmt: skip


def test_what_was_judged_is_not_asked_again(server):
    part = judge(server.url)
    server.script[:] = [{"text": "Score: 2"}]
    rewards = paid(part, "a", "a", "a")
    assert [r.parts["helpful"] for r in rewards] == [pytest.approx(0.2)] * 3
    assert [r.parts["helpful"] for r in paid(part, "a", "b")] == [
        pytest.approx(0.2), pytest.approx(0.7),
    ]  # fmt: skip
    assert len(server.requests) == 2


def test_a_recorded_run_is_given_again_without_a_network(server, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-very-secret")
    server.script[:] = [{"text": "Score: 3"}]
    first = paid(judge(server.url, tmp_path, key_env="JUDGE_KEY"), "a")
    assert server.requests[0].headers["authorization"] == "Bearer sk-very-secret"
    monkeypatch.delenv("JUDGE_KEY")
    nowhere = "http://127.0.0.1:9/v1"
    replay = {"replay": "only", "key_env": "JUDGE_KEY"}  # neither the server nor the key is needed
    again = judge(nowhere, tmp_path, **replay)
    assert paid(again, "a") == first
    [missing] = paid(again, "never seen")
    assert isinstance(missing, ToolError)
    assert "replay is 'only'" in str(missing)
    with pytest.raises(
        FileNotFoundError, match=r"reward\.judges\['helpful'\]\.replay is 'only', but .* no replies"
    ):
        judge(nowhere, tmp_path, **replay, model="judge-2")
    kept = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert kept
    assert not any("sk-very-secret" in text for text in kept)
    with pytest.raises(
        ValueError, match=r"JUDGE_KEY, which config\.reward\.judges.*key_env names, is not"
    ):
        judge(nowhere, key_env="JUDGE_KEY")


BASE = {"url": "http://judge:8000/v1", "model": "m", "prompt": "{response}"}

PASSING = {
    "a status that may pass": {"status": 500},
    "too many": {"status": 429, "headers": {"Retry-After": "0"}},
    "cut short": {"raw": '{"choices": [{"mess'},
    "no content": {"raw": '{"choices": []}'},
    "null content": {"raw": '{"choices": [{"message": {"content": null}}]}'},
    "cut within its number": {"text": "Score: 1", "finish_reason": "length"},
    "no number": {"text": "I would rather not say."},
    "out of bounds": {"text": "Score: 11"},
}


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
def test_a_fault_that_passes_costs_a_further_try(server, fault):
    server.script[:] = [fault, {"text": "I think so. Score: **4.5**"}]
    [reward] = paid(judge(server.url), "a")
    assert reward.parts["helpful"] == pytest.approx(0.45)
    assert len(server.requests) == 2


LASTING = {
    "refused": ({"status": 401, "raw": "who are you?"}, "status 401"),
    "unreadable": ({"text": "Nine out of ten."}, "the reply ends 'Nine out of ten.'; expected a"),
    "cut": ({"text": "Score: 1", "finish_reason": "length"}, "cut at max_tokens=1024"),
    "late": ({"wait": 2.0}, "answer within 0."),
}


@pytest.mark.parametrize(("fault", "told"), LASTING.values(), ids=LASTING)
def test_a_judge_that_gives_no_number_is_an_error_and_no_score(server, fault, told):
    server.script[:] = [fault] * 50
    start = time.monotonic()
    deadline_s = 0.2 if "wait" in fault else 5.0
    [error] = paid(judge(server.url, deadline_s=deadline_s), "a")
    assert isinstance(error, ToolError)
    assert str(error).startswith("the judge 'helpful' returned no score: ")
    assert told in str(error)
    assert time.monotonic() - start < 5


def test_a_server_that_is_not_there_is_given_up_in_time():
    start = time.monotonic()
    errors = paid(judge("http://127.0.0.1:9/v1"), "a", "b", "c")
    assert all(isinstance(error, ToolError) for error in errors)
    assert "the judge has not answered for" in str(errors[0])
    assert time.monotonic() - start < 5


def test_each_request_is_in_the_ledger_and_what_was_kept_costs_nothing(server, tmp_path):
    part = judge(server.url, tmp_path)
    server.script[:] = [{"status": 500}, {"text": "no number"}, {"text": "Score: 2"}]
    _, first = counted(part, "a")
    _, then = counted(part, "a", "b")
    _, again = counted(judge("http://127.0.0.1:9/v1", tmp_path, replay="only"), "b")
    found = [(record.source, record.attempts) for record in (*first, *then, *again)]
    assert found == [("tool", 3), ("cache", 0), ("tool", 1), ("replay", 0)]
    ledger = ledger_of([*first, *then, *again])
    assert ledger.num_calls == {"helpful": 4}
    assert ledger.usage.attempts == {"helpful": 4} == {"helpful": len(server.requests)}
    assert ledger.usage.cost == 1.0


def test_equal_prompts_under_way_are_paid_once(server):
    server.script[:] = [{"wait": 0.3}]
    _, records = counted(judge(server.url), "a", "a", "a")
    assert sorted(record.source for record in records) == ["shared", "shared", "tool"]
    assert ledger_of(records).usage.cost == 0.25


def test_a_judge_that_gave_no_score_is_paid_and_leaves_the_others_their_rewards(server):
    part = judge(server.url)
    _, first = counted(part, "good")  # the server has answered
    server.script[:] = [{"text": "no"}] * 20
    (good, error), records = counted(part, "good", "bad")
    assert good.parts["helpful"] == pytest.approx(0.7)
    assert isinstance(error, ToolError)
    assert ledger_of([*first, *records]).usage.cost == 0.25 * len(server.requests) > 0.5
    assert "the reply ends 'no'" in records[1].error


def test_calls_that_were_given_up_count_one_attempt_if_they_were_begun(server):
    server.script[:] = [{"wait": 2.0}] * 40
    texts = [str(number) for number in range(MAX_THREADS + 1)]
    errors, records = counted(judge(server.url), *texts, deadline_s=0.5)
    assert {type(error) for error in errors} == {DeadlineError}
    assert [record.attempts for record in records] == [1] * MAX_THREADS + [0]
    assert {record.error for record in records} == {"abandoned"}
    assert records[0].waited_s > 0.25 > records[-1].waited_s == 0.0


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"prompt": "Rate {answer}"}, r"expected \{response\} in it"),
        ({"pattern": "score: (\\d+"}, r"pattern is .*; expected a regular expression \(missing"),
        ({"pattern": "score"}, "expected one group"),
        ({"url": "http://x/v1?api_key=abc"}, r"contains a parameter 'api_key'.*key_env"),
        ({"url": "judge:8000"}, "expected the address of a server"),
        ({"low": 5, "high": 5}, "low is 5; expected less than high=5"),
        ({"low": -math.inf}, "low is -inf; expected a finite number"),
        ({"replay": "yes"}, "replay is 'yes'; expected one of off, record, only"),
        ({"deadline_s": 1e10}, "deadline_s is .*at most 1e.09 seconds"),
        ({"deadline_s": 0}, "deadline_s is 0; expected a number above 0"),
        ({"retries": 1.5}, "retries is 1.5; expected a value of type int"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, told):
    with pytest.raises(ValueError, match=told):
        JudgeSettings(**{**BASE, **settings})


@pytest.mark.parametrize(
    ("reply", "worth"),
    [
        ("Score: 0.5", 0.75),
        ("Score: 1\nRather not.\nscore = -0.5", 0.25),
        ('{"score": 1}', 1.0),
        ("**Score (from -1 to 1):** -1", 0.0),
        ("Fine. **Score: 1/1**\n", 1.0),
        ("", None),
        ("score: high", None),
        ("Score: 3", None),
        ("1", None),
        ("Score: between 0 and 1", None),  # no number is picked out of a sentence
        ("The score 0 would be wrong", None),
    ],
)
def test_what_a_reply_is_worth(reply, worth):
    settings = JudgeSettings(**BASE, low=-1, high=1)
    if worth is not None:
        assert parse_score(reply, settings) == worth
        return
    with pytest.raises(ToolError, match="expected a number from -1 to 1"):
        parse_score(reply, settings)


def test_a_pattern_of_ones_own_reads_the_end_of_a_reply_and_cannot_hold_up_a_run():
    """Other threads go on while it is searched, and it is ended."""
    own = JudgeSettings(**BASE, pattern=r"worth (\d+)")
    assert parse_score("worth 10" + " " * 4096 + "worth 3, or worth 4", own) == 0.4
    with pytest.raises(ToolError, match="expected a number from 0 to 10"):
        parse_score("worth 3" + " " * 4096, own)
    endless = JudgeSettings(**BASE, pattern=r"((?:a|aa)+)$")
    turns, began = [], time.monotonic()
    counting = threading.Event()

    def count():
        while not counting.wait(0.01):
            turns.append(time.monotonic())

    counter = threading.Thread(target=count)
    counter.start()
    with pytest.raises(ToolError, match="took more than 1 s"):
        parse_score("a" * 60 + "!", endless)
    counting.set()
    counter.join()
    assert time.monotonic() - began < 20
    assert max(b - a for a, b in itertools.pairwise(turns)) < 0.5  # a busy machine's
    assert parse_score("worth 5", own) == 0.5  # the others are not lost


def test_an_address_of_an_endpoint_may_have_parameters():
    with served(lambda request: {"path": request.path, **request.params}) as server:
        settings = JudgeSettings(**{**BASE, "url": f"{server.url}/v1/?api-version=2026"})
        answer = JudgeEndpoint(settings, "reward.judges").send_request({})
        assert answer == {"path": "/v1/chat/completions", "api-version": "2026"}
