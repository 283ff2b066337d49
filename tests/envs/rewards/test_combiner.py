"""What is paid: parts side by side, weighed; errors and deadlines, which never become a score."""

import asyncio
import sys
import threading
import time

import pytest

from jaxrl.envs.base import Episode, OutageError, Reward, ScoredEpisode, Task, Turn
from jaxrl.envs.rewards.combiner import RewardCombiner
from jaxrl.envs.rewards.functions import RewardFunction, kind_of
from jaxrl.utils.concurrency import MAX_ERROR_CHARS, DeadlineError, format_error_report

TASKS = [Task(id=f"t{i}", question="?", answers=("Paris",)) for i in range(2)]
MEASURED = Reward(
    parts={"f1": 0.5, "format": -1.0, "exact_match": 1.0}, final_answer="Paris", is_correct=True
)


def finished(text, task=TASKS[0], reward=MEASURED):
    turns = [Turn(text=piece) for piece in text.split("|")]
    return ScoredEpisode(episode=Episode(task=task, turns=turns), reward=reward)


def payment(weights, *functions, **settings):
    names = [function.__name__ for function in functions]
    parts = {
        name: RewardFunction(name=name, function=function, kind=kind_of(function))
        for name, function in zip(names, functions, strict=True)
    }
    return RewardCombiner(weights=weights, custom_parts=parts, **settings)


def paid(pay, *groups):
    return pay([[finished(text) for text in group] for group in groups])


def brevity(response, answers):
    return float(len(response) <= len(answers[0]))


def test_a_run_pays_the_weighted_sum_of_the_parts_and_of_its_own():
    pay = payment({"format": 0.1, "f1": 3.0, "brevity": 0.5}, brevity)
    [[short, long]] = paid(pay, ["Paris", "It is Paris."])
    for reward, brief in ((short, 1.0), (long, 0.0)):
        assert reward.parts == {**MEASURED.parts, "brevity": brief}
        assert reward.total == pytest.approx(3.0 * 0.5 - 0.1 + 0.5 * brief)
        assert reward.rest == reward.total
        assert (reward.final_answer, reward.turn_totals, reward.is_correct) == ("Paris", (), True)
    assert MEASURED.total == 0.0


async def skips(completions, **kwargs):
    await asyncio.sleep(0)
    return [None if "skip" in one else float(len(one)) for one in completions]


def test_a_part_that_does_not_apply_is_left_out_of_the_sum():
    pay = payment({"f1": 1.0, "skips": 1.0}, skips)
    [[reward, skipped], [other]] = paid(pay, ["abc", "skip"], ["abcd"])
    assert [r.total for r in (reward, skipped, other)] == [3.5, 0.5, 4.5]
    assert "skips" not in skipped.parts
    [[reward, nothing]] = paid(payment({"skips": 1.0}, skips), ["abc", "skip"])
    assert reward.total == 3.0
    assert "'skips' have a weight but no value" in str(nothing)
    [[missing]] = paid(payment({"bleu": 1.0}, skips), ["abc"])
    assert "'bleu' have a weight" in str(missing)


def steps(turns, answers):
    return [float(turn.text) for turn in turns]


def test_turns_earn_their_weighted_amounts():
    by_env = Reward(parts={"f1": 0.5}, turn_parts={"tools": (1.0, 0.0)}, final_answer="")
    pay = payment({"f1": 1.0, "tools": 2.0, "steps": 0.5}, steps)
    [[reward]] = pay([[finished("4|8", reward=by_env)]])
    assert reward.parts == {"f1": 0.5, "tools": 1.0, "steps": 12.0}
    assert reward.turn_totals == (2.0 + 2.0, 0.0 + 4.0)
    assert (reward.total, reward.rest) == (8.5, 0.5)
    wrong = Reward(parts={"f1": 0.5}, turn_parts={"tools": (1.0,)}, final_answer="")
    [[error]] = pay([[finished("4|8", reward=wrong)]])
    assert "1 values of 'tools' for 2 turns" in str(error)


def large(response, answers):
    return -1e300


def test_a_sum_that_float32_cannot_hold_names_its_largest_part_and_the_task():
    [[error]] = paid(payment({"f1": 1.0, "large": 2.0}, large), ["a"])
    told = format_error_report(error).splitlines()[0]
    assert "'large' is -1e+300, which its weight 2 in config.reward.weights makes -2e+300" in told
    assert told.endswith("expected a sum of at most 3.4e+38 of the task 't0'")
    [[reward]] = paid(payment({"f1": 1.0, "large": 0.0}, large), ["a"])  # measured, not paid
    assert reward.parts["large"] == -1e300
    [[reward]] = paid(payment({"f1": 1.0, "large": 1e-300}, large), ["a"])
    assert reward.total == pytest.approx(0.5 - 1.0)


def test_one_of_ones_own_may_say_what_is_correct():
    pay = payment({"f1": 1.0, "brevity": 0.0}, brevity, correct="brevity")
    assert [r.is_correct for r in paid(pay, ["Paris", "It is Paris."])[0]] == [True, False]
    shy = Reward(parts={"f1": 0.0}, final_answer="", is_abstention=True)
    assert not pay([[finished("no", reward=shy)]])[0][0].is_correct


def raises(response, answers):
    if "bad" in response:
        raise ZeroDivisionError("no divisor")
    return 1.0


def ends(response, answers):
    raise SystemExit(3)


def refuses(completions, **kwargs):
    if any("bad" in one for one in completions):
        raise OSError("the server is down")
    return [1.0] * len(completions)


def test_an_error_is_of_its_episode_alone_with_its_place():
    for function, told in ((raises, "ZeroDivisionError: no divisor"), (refuses, "OSError: the s")):
        pay = payment({function.__name__: 1.0}, function)
        [[good, bad], [other]] = paid(pay, ["a", "bad"], ["b"])
        assert (good.total, other.total) == (1.0, 1.0)
        report = format_error_report(bad)
        assert report.startswith(told)
        told = f"in the reward part '{function.__name__}' of the task 't0'"
        assert report.splitlines()[0].endswith(told)
        assert f"in {function.__name__}" in report
        assert "test_combiner.py" in report
    [[error]] = paid(payment({"ends": 1.0}, ends), ["a"])
    assert isinstance(error, SystemExit)


def deep(response, answers, depth=100):
    return deeper(response, answers, depth - 1) if depth else 1 / 0


def deeper(response, answers, depth):
    return deep(response, answers, depth)  # so that no two frames in a row are alike


def test_a_report_is_bounded_and_keeps_the_innermost_frames():
    [[error]] = paid(payment({"deep": 1.0}, deep), ["a"])
    report = format_error_report(error)
    assert len(report) <= MAX_ERROR_CHARS
    assert report.startswith("ZeroDivisionError: division by zero")
    assert "1 / 0" in report.splitlines()[-2]
    assert (
        format_error_report(ValueError("x" * 9999)) == f"ValueError: {'x' * 9999}"[:MAX_ERROR_CHARS]
    )


def is_down(response, answers):
    raise OutageError("nobody answers", fallback="" if "go on" in response else None)


def test_an_outage_ends_the_run_unless_it_may_go_on():
    [[error]] = paid(payment({"is_down": 1.0}, is_down), ["go on"])
    assert isinstance(error, OutageError)
    with pytest.raises(OutageError, match="nobody answers"):
        paid(payment({"is_down": 1.0}, is_down), ["stop"])


RELEASE = threading.Event()


def hangs(response, answers):
    if "hang" in response:
        RELEASE.wait(20)
    return 1.0


async def awaits(response, answers):
    await asyncio.sleep(20 if "hang" in response else 0)
    return 1.0


async def blocks(response, answers):
    if "hang" in response:
        RELEASE.wait(20)
    return 1.0


@pytest.mark.parametrize("function", [hangs, awaits, blocks])
def test_what_hangs_is_given_up_at_the_deadline_and_the_rest_goes_on(function):
    RELEASE.clear()
    pay = payment({function.__name__: 1.0}, function, deadline_s=0.3)
    start = time.monotonic()
    [[good], [late]] = paid(pay, ["a"], ["hang"])
    assert time.monotonic() - start < 5
    assert isinstance(late, DeadlineError)
    assert "within 0.3 s (config.reward.deadline_s)" in str(late)
    assert function is blocks or good.total == 1.0  # what blocks the loop holds up the others
    [[again]] = paid(pay, ["b"])
    assert again.total == 1.0
    RELEASE.set()


async def quits(response, answers):
    if "quit" in response:
        sys.exit(1)
    await asyncio.sleep(0.05)
    return 1.0


def test_an_exit_in_a_coroutine_fails_its_episode_alone_and_at_once():
    pay = payment({"quits": 1.0}, quits, deadline_s=20)
    start = time.monotonic()
    [[good], [bad], [other]] = paid(pay, ["a"], ["quit"], ["b"])
    assert time.monotonic() - start < 5
    assert isinstance(bad, SystemExit)
    assert good.total == other.total == 1.0


def place(response, answers):
    return float(threading.current_thread() is threading.main_thread())


def nap(response, answers):
    time.sleep(0.1)
    return 1.0


async def doze(response, answers):
    await asyncio.sleep(0.1)
    return 1.0


def test_functions_run_side_by_side_and_without_a_deadline_in_the_thread_of_the_run():
    assert paid(payment({"place": 1.0}, place, deadline_s=0.0), ["a"])[0][0].total == 1.0
    assert paid(payment({"place": 1.0, "f1": 1.0}, place), ["a"])[0][0].total == 0.5
    for function in (nap, doze):
        start = time.monotonic()
        paid(payment({function.__name__: 1.0}, function), ["a"] * 16, ["b"] * 16)
        assert time.monotonic() - start < 1.6  # one by one 32 would take 3.2 s


def solves(completions, solution, **kwargs):
    return solution


def test_a_field_that_tasks_do_not_have_is_named_before_the_run():
    pay = payment({"solves": 1.0}, solves)
    with pytest.raises(ValueError, match="'solves', which requires 'solution'; the tasks of"):
        pay.check(TASKS[0], "config.tasks.train.source")
    pay.check(Task(id="1", question="?", metadata={"solution": 1.0}), "config.tasks.train.source")
