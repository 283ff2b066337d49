"""Calls with and without records, and budgets of an episode."""

from jaxrl.envs.base import CallRecord, Episode, Outcome, Prompt, Task, Turn
from jaxrl.envs.search_env import SearchEnv
from jaxrl.envs.tools.base import Tool
from jaxrl.envs.tools.budget import Budget, get_call_records
from tests.servers import KeywordSearch

ASKED = Turn(text="<search>q</search>", tool_call="q", observation="found", latency_s=0.5)


class Echo(Tool):
    name = "echo"
    blank = "nothing"

    def run(self, call):
        return call


def test_calls_of_a_turn():
    records = (CallRecord(call="a"), CallRecord(call="b", tool="echo", source="cache", attempts=0))
    assert get_call_records(Turn(text="x", tool_call="a", records=records)) == records
    # An environment of one's own need not keep any.
    assert get_call_records(ASKED) == (CallRecord(call="q", waited_s=0.5),)
    failed = Turn(text="x", tool_call="q", tool="echo", error="down")
    assert get_call_records(failed) == (CallRecord(call="q", tool="echo", error="down"),)
    # A reward that failed later is no failure of the call.
    [call] = get_call_records(
        Turn(text="x", tool_call="q", observation="found", error="score: broken")
    )
    assert call.error is None
    assert get_call_records(Turn(text="<answer>x</answer>")) == ()


def test_a_budget_counts_each_call_once_whoever_answered_it():
    hard = CallRecord(call="a", attempts=9)
    easy = CallRecord(call="a", source="cache", attempts=0)
    computed = CallRecord(call="1", tool="echo")
    turns = [Turn(text="", records=(hard,)), Turn(text="", records=(easy, computed))]
    episode = Episode(task=Task(id="t", question="?"), turns=turns)
    prices = {"search": 0.1, "echo": 0.05}  # 0.25 so far
    assert Budget(prices=prices, max_cost=0.35).allows(episode, ["search"])
    assert not Budget(prices=prices, max_cost=0.34).allows(episode, ["search"])
    assert Budget(prices=prices, max_cost=0.3).allows(episode, ["echo"])
    assert not Budget(prices=prices, max_cost=0.35).allows(episode, ["search", "echo"])
    assert Budget(prices=prices, max_cost=0.25).allows(episode, ["free"])
    assert Budget(prices=prices).allows(episode, ["search"] * 1000)


def test_a_call_beyond_the_budget_is_not_made():
    asked = []

    class Engine(KeywordSearch):
        def run(self, query):
            asked.append(query)
            return "found"

    env = SearchEnv(
        Engine({}),
        tools=[Echo()],
        prompt=Prompt(system="", template="{question}"),
        max_turns=9,
        budget=Budget(prices={"search": 1.0}, max_cost=2.0),
    )
    episode = Episode(task=Task(id="t", question="?", answers=("x",)))
    for text in ("<search>a</search>", "<search> </search>", "<search>b</search>"):
        [reply] = env.step([episode], [text])
        assert reply.outcome is None
        turn = Turn(text=text, tool_call=reply.tool_call, observation="f", records=reply.records)
        episode.turns.append(turn)
    [free] = env.step([episode], ["<echo>c</echo>"])
    assert free.outcome is None
    [beyond] = env.step([episode], ["<search>c</search>"])
    assert beyond.outcome == Outcome.OUT_OF_BUDGET
    assert asked == ["a", "b"]  # a blank call reaches nobody
    [answer] = env.step([episode], ["<answer>x</answer>"])
    assert answer.outcome == Outcome.ANSWERED
