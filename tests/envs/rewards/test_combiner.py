"""Weighted sums of reward parts; errors and deadlines, which never become a score."""

import asyncio
import dataclasses
import sys
import threading
import time

import pytest

from jaxrl.envs.base import Episode, OutageError, Reward, ScoredEpisode, Task, Turn
from jaxrl.envs.rewards.combiner import EnvironmentRewards, RewardCombiner
from jaxrl.envs.rewards.functions import RewardFunction, detect_convention
from jaxrl.utils.concurrency import DeadlineError, format_error_report

TASK = Task(id="t0", question="?", answers=("Paris",))
ENV_REWARD = Reward(
    parts={"f1": 0.5, "format": -1.0, "exact_match": 1.0}, final_answer="Paris", is_correct=True
)


def make_episode(text, reward=ENV_REWARD):
    """Return a scored episode with a turn for each piece between bars."""
    turns = [Turn(text=piece) for piece in text.split("|")]
    return ScoredEpisode(episode=Episode(task=TASK, turns=turns), reward=reward)


def make_combiner(weights, *functions, **settings):
    parts = {
        function.__name__: RewardFunction(
            name=function.__name__, function=function, convention=detect_convention(function)
        )
        for function in functions
    }
    return RewardCombiner(weights=weights, custom_parts=parts, **settings)


def score(combiner, *groups):
    return combiner([[make_episode(text) for text in group] for group in groups])


def brevity(response, answers):
    return float(len(response) <= len(answers[0]))


def test_the_reward_is_the_weighted_sum_of_all_parts():
    combiner = make_combiner({"format": 0.1, "f1": 3.0, "brevity": 0.5}, brevity)
    [[short, long]] = score(combiner, ["Paris", "It is Paris."])
    for reward, brief in ((short, 1.0), (long, 0.0)):
        assert reward.parts == {**ENV_REWARD.parts, "brevity": brief}
        assert reward.total == pytest.approx(3.0 * 0.5 - 0.1 + 0.5 * brief)
        assert reward.rest == reward.total
        assert (reward.final_answer, reward.turn_totals, reward.is_correct) == ("Paris", (), True)
    assert ENV_REWARD.total == 0.0


async def skips(completions, **kwargs):
    await asyncio.sleep(0)
    return [None if "skip" in text else float(len(text)) for text in completions]


def test_a_part_that_does_not_apply_is_left_out_of_the_sum():
    combiner = make_combiner({"f1": 1.0, "skips": 1.0}, skips)
    [[reward, skipped], [other]] = score(combiner, ["abc", "skip"], ["abcd"])
    assert [r.total for r in (reward, skipped, other)] == [3.5, 0.5, 4.5]
    assert "skips" not in skipped.parts
    [[reward, nothing]] = score(make_combiner({"skips": 1.0}, skips), ["abc", "skip"])
    assert reward.total == 3.0
    assert "'skips' have a weight but no value" in str(nothing)
    [[missing]] = score(make_combiner({"bleu": 1.0}, skips), ["abc"])
    assert isinstance(missing, ValueError)


def steps(turns, answers):
    return [float(turn.text) for turn in turns]


def test_turns_earn_their_weighted_amounts():
    env_reward = Reward(parts={"f1": 0.5}, turn_parts={"tools": (1.0, 0.0)}, final_answer="")
    combiner = make_combiner({"f1": 1.0, "tools": 2.0, "steps": 0.5}, steps)
    [[reward]] = combiner([[make_episode("4|8", env_reward)]])
    assert reward.parts == {"f1": 0.5, "tools": 1.0, "steps": 12.0}
    assert reward.turn_totals == (2.0 + 2.0, 0.0 + 4.0)
    assert (reward.total, reward.rest) == (8.5, 0.5)
    wrong = Reward(parts={"f1": 0.5}, turn_parts={"tools": (1.0,)}, final_answer="")
    [[error]] = combiner([[make_episode("4|8", wrong)]])
    assert "1 values of 'tools' for 2 turns" in str(error)


def large(response, answers):
    return -1e300


def test_a_sum_beyond_float32_is_an_error():
    [[error]] = score(make_combiner({"f1": 1.0, "large": 2.0}, large), ["a"])
    assert "'large': -2e+300} sum to -2e+300; expected at most" in str(error)
    [[reward]] = score(make_combiner({"f1": 1.0, "large": 0.0}, large), ["a"])  # only logged
    assert reward.parts["large"] == -1e300
    [[reward]] = score(make_combiner({"f1": 1.0, "large": 1e-300}, large), ["a"])
    assert reward.total == pytest.approx(0.5 - 1.0)


def test_a_custom_part_may_decide_correctness():
    combiner = make_combiner({"f1": 1.0, "brevity": 0.0}, brevity, correct="brevity")
    assert [r.is_correct for r in score(combiner, ["Paris", "It is Paris."])[0]] == [True, False]
    abstention = Reward(parts={"f1": 0.0}, final_answer="", is_abstention=True)
    assert not combiner([[make_episode("no", abstention)]])[0][0].is_correct


def raises(response, answers):
    if "bad" in response:
        raise ZeroDivisionError("no divisor")
    return 1.0


def refuses(completions, **kwargs):
    if any("bad" in text for text in completions):
        raise OSError("the server is down")
    return [1.0] * len(completions)


def exits(response, answers):
    if "bad" in response:
        sys.exit(3)
    return 1.0


async def exits_async(response, answers):
    if "bad" in response:
        sys.exit(3)
    await asyncio.sleep(0.05)
    return 1.0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raises, "ZeroDivisionError: no divisor"),
        (refuses, "OSError: the server is down"),
        (exits, "SystemExit: 3"),
        (exits_async, "SystemExit: 3"),
    ],
)
def test_an_error_affects_its_episode_alone_and_names_its_origin(function, message):
    combiner = make_combiner({function.__name__: 1.0}, function, deadline_s=20)
    start = time.monotonic()
    [[good, bad], [other]] = score(combiner, ["a", "bad"], ["b"])
    assert time.monotonic() - start < 5
    assert (good.total, other.total) == (1.0, 1.0)
    report = format_error_report(bad)
    assert report.startswith(message)
    origin = f"in the reward part '{function.__name__}' of the task 't0'"
    assert report.splitlines()[0].endswith(origin)
    assert f"in {function.__name__}" in report


def is_down(response, answers):
    raise OutageError("no response", fallback="" if "continue" in response else None)


def test_an_outage_without_a_fallback_ends_the_run():
    [[error]] = score(make_combiner({"is_down": 1.0}, is_down), ["continue"])
    assert isinstance(error, OutageError)
    with pytest.raises(OutageError, match="no response"):
        score(make_combiner({"is_down": 1.0}, is_down), ["stop"])


RELEASE = threading.Event()


def hangs(response, answers):
    if "hang" in response:
        RELEASE.wait(20)
    return 1.0


async def awaits(response, answers):
    await asyncio.sleep(20 if "hang" in response else 0)
    return 1.0


@pytest.mark.parametrize("function", [hangs, awaits])
def test_a_call_that_hangs_is_abandoned_at_the_deadline(function):
    RELEASE.clear()
    combiner = make_combiner({function.__name__: 1.0}, function, deadline_s=0.3)
    start = time.monotonic()
    [[good], [late]] = score(combiner, ["a"], ["hang"])
    assert time.monotonic() - start < 5
    assert isinstance(late, DeadlineError)
    assert "within 0.3 s (config.reward.deadline_s)" in str(late)
    assert good.total == 1.0
    [[again]] = score(combiner, ["b"])
    assert again.total == 1.0
    RELEASE.set()


def in_main_thread(response, answers):
    return float(threading.current_thread() is threading.main_thread())


def test_functions_without_a_deadline_run_in_the_calling_thread():
    weights = {"in_main_thread": 1.0, "f1": 1.0}
    [[reward]] = score(make_combiner(weights, in_main_thread, deadline_s=0.0), ["a"])
    assert reward.total == 1.5
    [[reward]] = score(make_combiner(weights, in_main_thread), ["a"])
    assert reward.total == 0.5


def solves(completions, solution, **kwargs):
    return solution


def test_a_field_that_tasks_lack_is_refused_before_the_run():
    combiner = make_combiner({"solves": 1.0}, solves)
    with pytest.raises(ValueError, match="'solves', which requires 'solution'; the tasks of"):
        combiner.check_task(TASK, "config.tasks.train.source")
    task = Task(id="1", question="?", metadata={"solution": 1.0})
    combiner.check_task(task, "config.tasks.train.source")


def test_each_environment_pays_by_its_own_parts():
    def in_environment(name, text):
        episode = make_episode(text)
        episode.episode.task = dataclasses.replace(TASK, environment=name)
        return episode

    rewards = EnvironmentRewards(
        {
            "search": make_combiner({"f1": 2.0}),
            "math": make_combiner({"brevity": 1.0, "exact_match": 0.25}, brevity),
        }
    )
    groups = [
        [in_environment("math", "Paris"), in_environment("math", "It is Paris.")],
        [],  # every episode failed
        [in_environment("search", "Paris")],
        [in_environment("math", "Oslo, or Paris?")],
    ]
    got = [[reward.total for reward in group] for group in rewards(groups)]
    assert got == [[1.25, 0.25], [], [1.0], [0.25]]
    assert rewards([[], []]) == [[], []]
