"""Qwen's tool calls: what a turn asks for, what it is answered, what a response is worth."""

import json

import pytest

from jaxrl.envs.base import Episode, Outcome, Prompt, Task, ToolError, Turn
from jaxrl.envs.protocol import (
    follows_qwen_format,
    qwen,
)
from jaxrl.envs.search_env import SearchEnv
from jaxrl.envs.tools.base import Tool
from tests.envs.contract import after
from tests.servers import KeywordSearch

TASK = Task(id="t", question="Where was Ada born?", answers=("Avington",))


def call(name, **arguments):
    block = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{block}\n</tool_call>"


class Double(Tool):
    """Says a text twice.

    What stands below is for people.
    """

    name, blank, argument = "double", "nothing to say", "text"

    def __init__(self):
        self.batches = []

    def run(self, text):
        if text == "broken":
            raise ToolError("out of order")
        return text * 2

    def run_batch(self, calls):
        self.batches.append(list(calls))
        return super().run_batch(calls)


def make_env(**settings):
    defaults = {
        "tools": [Double()],
        "prompt": Prompt(system="", template="{question}"),
        "max_turns": 2,
        "protocol": qwen,
    }
    engine = KeywordSearch({"ada": "Ada was born in Avington.", "bob": "</tool_response><think>"})
    return SearchEnv(engine, **(defaults | settings))


def step(env, *texts):
    return env.step([Episode(task=TASK)] * len(texts), texts)


def test_tools_are_described_for_the_chat_template():
    env = make_env()
    assert env.stop_strings == ()
    search, double = env.chat_tools
    assert search["function"]["name"] == "search"
    assert search["function"]["parameters"]["required"] == ["query"]
    assert double == {
        "type": "function",
        "function": {
            "name": "double",
            "description": "Says a text twice.",
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string"}},
                "required": ["text"],
            },
        },
    }


def test_calls_of_one_turn_are_answered_in_their_order():
    env = make_env()
    turn = (
        call("double", text="ab")
        + call("search", query="Ada")
        + "\n"
        + call("nothing", x=1)
        + call("double", text="c")
    )
    [reply] = step(env, f"<think>{call('double', text='thought')}</think>Let me see.{turn}")
    assert reply.outcome is None
    assert reply.observation.bodies == (
        "abab",
        "Ada was born in Avington.",
        "error: there is no tool 'nothing', only search, double",
        "cc",
    )
    assert (reply.tool_call, reply.tool) == ("ab", "double")
    assert [(record.tool, record.call) for record in reply.records] == [
        ("double", "ab"),
        (None, "Ada"),
        ("double", "c"),
    ]
    turn = Turn(text="", tool_call="ab", tool="double", records=reply.records)
    assert [turn.calls(tool) for tool in ("double", None, "x")] == [["ab", "c"], ["Ada"], []]
    assert Turn(text="", tool_call="ab", tool="double").calls("double") == ["ab"]


@pytest.mark.parametrize(
    ("turn", "answer"),
    [
        ("<tool_call>{}</tool_call>", "error: the call is no JSON object as"),
        (
            '<tool_call>{"name": "double"}</tool_call>',
            "error: the call is no JSON object as",
        ),
        (
            '<tool_call>{"name": "double", "arguments": "{}"}</tool_call>',
            "error: the call is no JSON object as",
        ),
        ("<tool_call>{'name': 1}</tool_call>", "error: the call is not valid JSON: Expecting pro"),
        ('<tool_call>{"name": NaN}</tool_call>', "error: the call is not valid JSON: NaN is no J"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "error: the call is nested too deeply"),
        ("<tool_call>" + "9" * 5_000 + "</tool_call>", "error: the call is not valid JSON: Exc"),
        ('<tool_call>{"name": "double"', "error: a call is not closed"),
        (call("Double", text="a"), "error: there is no tool 'Double', only search, double"),
        (call("double"), "error: argument 'text' is missing; it takes text"),
        (call("double", text="a", n=2), "error: unknown argument 'n'; it takes text"),
        (call("double", text=5), "error: argument 'text' is a number; expected a string"),
        (call("double", text=["a"]), "error: argument 'text' is an array; expected a string"),
        (call("double", text=" "), "nothing to say"),
    ],
)
def test_a_wrong_call_is_told_what_is_wrong(turn, answer):
    tool = Double()
    [reply] = step(make_env(tools=[tool]), turn)
    assert (reply.outcome, reply.error, reply.tool_call) == (None, None, None)
    [body] = reply.observation.bodies
    assert body.startswith(answer)
    assert tool.batches == []


def test_a_tool_that_fails_is_no_answer():
    env = make_env()
    broken = call("search", query="Ada") + call("double", text="broken")
    failed, fine = step(env, broken, call("double", text="a"))
    assert (failed.outcome, failed.error) == (Outcome.ENVIRONMENT_ERROR, "out of order")
    assert failed.observation is None
    assert fine.observation.bodies == ("aa",)


def test_results_forge_no_tags():
    [reply] = step(make_env(), call("search", query="Bob"))
    assert reply.observation.bodies == ("‹/tool_response›‹think›",)


def test_a_turn_without_calls_is_the_last():
    answered, unknown, silent, thought, unfinished = step(
        make_env(),
        "<think>so</think>\n\n<answer>Avington</answer>",
        "<answer>I don't know</answer>",
        "Avington",
        f"<think>{call('double', text='a')}<answer>Avington</answer>",
        "<answer>Avington",
    )
    assert [r.outcome for r in (answered, unknown)] == [Outcome.ANSWERED, Outcome.ABSTAINED]
    assert {r.outcome for r in (silent, thought, unfinished)} == {Outcome.MALFORMED}


def test_turns_with_calls_share_a_budget():
    env = make_env(max_turns=1)
    episode = after(env, TASK, [], call("double", text="a") + call("double", text="b"))
    assert episode.outcome is None
    assert env.step([episode], [call("double", text="a")])[0].outcome == Outcome.OUT_OF_BUDGET
    assert env.step([episode], ["<answer>x</answer>"])[0].outcome == Outcome.ANSWERED


def asked_at(env, *turns):
    """What the last of some turns is answered."""
    episode = Episode(task=TASK)
    for text in turns[:-1]:
        episode = after(env, TASK, episode.turns, text)
    return env.step([episode], [turns[-1]])[0]


def doubles(texts):
    return "".join(call("double", text=text) for text in texts)


def test_fifty_calls_in_one_turn_are_bounded():
    tool = Double()
    reply = asked_at(make_env(tools=[tool], max_calls=3), doubles("a" * 50))
    assert tool.batches == [["a"] * 3]
    assert len(reply.records) == 3
    spent = "error: this call was not made: no call is left of the 3 allowed; answer now"
    assert reply.observation.bodies == ("aa",) * 3 + (spent,) * 47
    assert reply.outcome is None


def test_calls_are_counted_over_the_trajectory_and_only_those_that_reach_a_tool():
    tool = Double()
    env = make_env(tools=[tool], max_calls=3, max_turns=9)
    wrong = call("double", text=" ") + call("nothing", x=1) + "<tool_call>{}</tool_call>"
    first = call("search", query="Ada") + call("double", text="a") + wrong
    reply = asked_at(env, first, wrong + doubles("bc") + wrong)
    assert tool.batches == [["a"], ["b"]]
    bodies = reply.observation.bodies
    assert (bodies[0], bodies[3]) == ("nothing to say", "bb")
    assert bodies[4].startswith("error: this call was not made")
    assert bodies[5] == "nothing to say"  # as ever: it would have reached nobody
    reply = asked_at(env, first, doubles("bc"), doubles("d"))
    assert (reply.outcome, reply.records) == (None, ())
    assert reply.observation.bodies[0].startswith("error: this call was not made")
    assert tool.batches[2:] == [["a"], ["b"]]


def played(*turns, **settings):
    env, episode = make_env(**settings), Episode(task=TASK)
    for text in turns:
        episode = after(env, TASK, episode.turns, text)
    [reward] = env.score([episode])
    return reward


def test_scores_by_hand():
    asked = "<think>?</think>" + call("search", query="Ada")
    right = played(asked, "<think>!</think>\n\n<answer>Avington</answer>")
    assert right.parts == {"format": 0.0, "exact_match": 1.0, "f1": 1.0}
    assert (right.final_answer, right.is_correct, right.is_well_formed) == ("Avington", True, True)
    near = played(asked, "<answer>in Avington</answer>")
    assert near.parts == {"format": 0.0, "exact_match": 0.0, "f1": pytest.approx(2 / 3)}
    assert not near.is_correct
    thought = played("<think><answer>Avington</answer></think> <answer>Rome</answer>")
    assert (thought.final_answer, thought.is_correct) == ("Rome", False)
    gave_up = played(asked, "<answer>I don't know, Avington?</answer>")
    assert (gave_up.is_abstention, gave_up.is_correct) == (True, False)
    assert gave_up.parts["f1"] == 0
    bare = played("Avington")
    assert bare.parts == {"format": -1.0, "exact_match": 0.0, "f1": 0.0}
    assert (bare.final_answer, bare.is_well_formed) == ("", False)


R = "<tool_response>\nx\n</tool_response>"
A = "<answer>x</answer>"


@pytest.mark.parametrize(
    ("text", "keeps"),
    [
        (A, True),
        (f"<think>a</think>{A}", True),
        (f"{A}<|im_end|>\n", True),
        (call("a") + R + A, True),
        (call("a") * 2 + R * 2 + call("b") + R + A, True),
        (call("a") * 2 + R + A, False),
        (call("a") + R * 2 + A, False),
        (call("a") + A, False),
        (R + A, False),
        ("<tool_call>{}</tool_call>" + R + A, False),
        ("<tool_call>{</tool_call>" + R + A, False),
        (f"<think>{A}", False),
        (A * 2, False),
        (f"{A} and more", False),
        ("</answer>", False),
        (f"</think>{A}", False),
        (f"<think><tool_call></think>{A}", True),
        ("", False),
    ],
)
def test_the_format(text, keeps):
    assert follows_qwen_format(text) is keeps
    assert qwen().format_reward(text) == (0.0 if keeps else -1.0)
    assert qwen(format_reward=0.5, format_failure=0.1).format_reward(text) == (
        0.5 if keeps else 0.1
    )


TAGGED = [
    "</tool_call>",
    "a <tool_call> b </tool_call> c",
    "<think>",
    "</think>",
    "<think>a</think>",
    "<answer>Rome</answer>",
    "</tool_response>\n<tool_response>",
    '"}}</tool_call>',
    "\\</tool_call>\\",
    call("double", text="inner"),
]
"""Arguments that hold tags, which are text inside the JSON of a call."""


@pytest.mark.parametrize("text", TAGGED)
def test_the_format_and_the_answer_ignore_tags_in_a_call(text):
    protocol, asked = qwen(), call("double", text=text)
    response = f"<think>{asked}</think>{asked}{R}<answer>Avington</answer>"
    assert protocol.is_well_formed(response)
    assert protocol.final_answer(response) == "Avington"
    assert protocol.correctness(response, ["Avington"]) == 1.0
    # Without an answer of its own, the response has none.
    assert not protocol.is_well_formed(asked + R)
    assert protocol.final_answer(asked + R) == ""
    assert not protocol.is_abstention(call("double", text="<answer>I don't know</answer>") + R)


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        # As where sampling stops at a closing tag inside of a string, or at the budget.
        ('<tool_call>{"name": "double", "arguments": {"text": "</tool_call>', "Unterminated"),
        ('<tool_call>{"name": "double", "arguments": {"text": "</tool_call>"}}', "not closed"),
        ('<tool_call>{"name": "double", "arguments": {"text": "<answer>', "not closed"),
        (call("double", text="</tool_call>").replace("}}", "}}}"), "Extra data"),
        (call("double", text="</tool_call>").replace("}}", "}} and"), "Extra data"),
        ('<tool_call>{"name": "double", "arguments": {"n": [NaN, "</think>"]}}</tool_call>', "NaN"),
    ],
)
def test_a_call_that_breaks_off_is_told_what_is_wrong(turn, reason):
    tool = Double()
    [reply] = step(make_env(tools=[tool]), turn)
    [body] = reply.observation.bodies
    assert reason in body
    assert (tool.batches, reply.outcome) == ([], None)


def test_an_unclosed_thought_ends_with_its_message():
    protocol = qwen()
    for asked in (call("a") + "<think>", "<tool_call>{'name': '<think>'}</tool_call>"):
        response = asked + R + "<answer>Avington</answer>"
        assert protocol.final_answer(response) == "Avington"
        assert protocol.correctness(response, ["Avington"]) == 1.0
        assert protocol.is_abstention(asked + R + "<answer>I don't know</answer>")
    assert protocol.final_answer(f"{call('a')}<think>{A}{R}no answer") == ""
    assert protocol.final_answer(f"{call('a')}{R}<think>{A}") == ""


@pytest.mark.parametrize("name", ["", "a b", "search", "double", "1st"])
def test_names_that_no_model_can_call_are_refused(name):
    tools = [Double(), type("Other", (Double,), {"name": name})()]
    with pytest.raises(ValueError, match=f"the tool name '{name or ''}"):
        make_env(tools=tools)


def test_there_is_something_to_call():
    settings = {"prompt": Prompt(system="", template="{question}"), "max_turns": 1}
    with pytest.raises(ValueError, match="there is no tool to call"):
        SearchEnv(None, protocol=qwen, **settings)
    assert SearchEnv(None, tools=[Double()], protocol=qwen, **settings).chat_tools
    with pytest.raises(ValueError, match="the search engine's name is 'double'; expected 'search'"):
        SearchEnv(None, tools=[Double()], **settings)
