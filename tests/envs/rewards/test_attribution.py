"""Evidence and redundant searches in episodes written by hand."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.envs.base import NO_INFORMATION, CallRecord, Episode, Prompt, Task, Turn
from jaxrl.envs.protocol import PROTOCOLS
from jaxrl.envs.rewards.attribution import (
    Attribution,
    attribute_answers,
    occurs_in,
    split_documents,
)
from jaxrl.envs.search.base import Document, SearchEngine, render_documents
from jaxrl.envs.search_env import SearchEnv
from jaxrl.envs.tools.base import Tool
from jaxrl.extras.sentinel.evidence import has_found_answer
from jaxrl.extras.stability.first_occurrence import first_occurrence
from tests.envs.contract import append_turn
from tests.episodes import make_trajectory
from tests.servers import KeywordSearch

KERR = Document("1", "Avington Bridge", "The bridge was designed by Ada Kerr.")
MILL = Document("2", "Mill", "The mill burnt in 1914-1918.")
DALE = Document("3", "Dale", "A valley in the U.S.")


def search(query, *documents, protocol="search_r1"):
    shown = PROTOCOLS[protocol]().render_observation(render_documents(documents))
    return Turn(text=f"<search>{query}</search>", tool_call=query, observation=shown.text)


ANSWER = Turn(text="<answer>x</answer>")


@pytest.mark.parametrize(
    ("answer", "occurs"),
    [
        ("the ADA  Kerr!", True),  # as exact match compares
        ("Ada", True),
        ("da Kerr", False),  # not whole words
        ("1914", True),
        ("US", True),
        ("U.S.", True),
        ("Avington Bridge", True),  # in a title
        ("information", False),  # a tag
        ("2", False),  # the number of a document
        ("the", False),  # an article
    ],
)
def test_answers_in_results_are_evidence(answer, occurs):
    for protocol in PROTOCOLS:
        turn = search("q", KERR, MILL, DALE, protocol=protocol)
        assert occurs_in(answer, turn.observation) == occurs
        assert attribute_answers([turn, ANSWER], ["no such", answer]).has_evidence == occurs


@pytest.mark.parametrize(
    ("turns", "count"),
    [
        ([search("a", KERR), search("b", MILL)], 0),
        ([search("Who built", KERR), search(" who  BUILT ", MILL)], 1),  # the same query
        ([search("a", KERR, MILL), search("b", MILL)], 1),  # another query, nothing new
        ([search("a", KERR), search("b", KERR, MILL)], 0),  # one of two is new
        ([search("a"), search("b")], 0),  # nothing was found, so nothing is repeated
        ([search("a", KERR), search("a", KERR), search("b", KERR)], 2),
        ([ANSWER], 0),
    ],
)
def test_redundant_searches(turns, count):
    assert attribute_answers(turns, []).num_redundant == count


def test_a_truncated_copy_of_an_earlier_result_is_redundant():
    whole, longer = search("a", KERR, MILL).observation, search("b", MILL, KERR).observation
    cut = longer[: longer.index("Ada")] + "</information>"
    first = Turn(text="", tool_call="a", observation=whole)
    second = Turn(text="", tool_call="b", observation=cut)
    assert attribute_answers([first, second], []).num_redundant == 1
    assert attribute_answers([second, first], []).num_redundant == 0  # the rest is new


def test_calls_of_other_tools_are_not_searches():
    calls = [Turn(text="", tool_call="2-1", tool="python", observation="<result>1</result>")] * 2
    assert attribute_answers(calls, ["1"]) == Attribution(has_evidence=False, num_redundant=0)


def test_each_search_of_a_turn_counts():
    records = tuple(CallRecord(call=query) for query in ("a", "b", "A"))
    turn = Turn(text="", tool_call="a", records=records, observation=search("", KERR).observation)
    assert attribute_answers([turn], []).num_redundant == 1
    again = Turn(text="", records=(CallRecord(call="c"),) * 2, observation=turn.observation)
    assert attribute_answers([turn, again], []).num_redundant == 3


@settings(max_examples=30)
@given(st.lists(st.text(max_size=20), max_size=4), st.text(max_size=60))
def test_any_text_can_be_read(answers, text):
    turn = Turn(text=text, tool_call="", observation=text)
    attribution = attribute_answers([turn, turn], answers)
    assert 1 <= attribution.num_redundant <= 2
    is_shown = bool(split_documents(text)) and any(occurs_in(answer, text) for answer in answers)
    assert attribution.has_evidence == is_shown
    echo = Turn(text=text, tool_call=text, observation=text)
    assert not attribute_answers([echo], answers).has_evidence


class Echo(SearchEngine):
    """Repeats the query in another form, and may append documents."""

    def __init__(self, rewrite, *documents):
        self._rewrite = rewrite
        self._documents = render_documents(documents) if documents else ""

    def run(self, query, /):
        return self._rewrite(query) + self._documents


class Python(Tool):
    """Prints the argument of a print statement."""

    name, blank = "python", "nothing"

    def run(self, call, /):
        return call.removeprefix("print ")


REWRITES = {
    "unchanged": lambda query: query,
    "not found": lambda query: f"{NO_INFORMATION} for: {query}",
    "error": lambda query: f"error: nothing fits '{query}'; try other words than {query!r}",
    "sorted": lambda query: " ".join(sorted(query.replace(",", "").split())),
    "document": lambda query: f"Doc 1(Title: {query}) {query}",
}
GUESSES = [
    "Oslo, Kerr, Ada, Rome",
    "who is ada kerr?",
    '"Ada Kerr" OR "Eve Kerr"',
    "A\nAda\nKerr",
]


def has_evidence(turns, answers=("Ada Kerr",)):
    """Whether turns show an answer, on which every reader of results agrees."""
    evidence = attribute_answers(turns, answers).has_evidence
    assert sum(first_occurrence(turns, answers)) == evidence
    task = Task(id="t", question="Who?", answers=answers)
    trajectory = dataclasses.replace(make_trajectory(turns=tuple(turns)), task=task)
    assert has_found_answer(trajectory) == evidence
    return evidence


def play(engine, *texts, protocol="qwen", tools=(), **settings):
    """Return the turns of an episode in which a model writes these texts."""
    env = SearchEnv(
        engine,
        tools=tools,
        max_turns=9,
        prompt=Prompt(system="", template="{question}"),
        protocol=PROTOCOLS[protocol],
        **settings,
    )
    episode = Episode(task=Task(id="t", question="Who?", answers=("Ada Kerr",)))
    for text in texts:
        episode = append_turn(env, episode.task, episode.turns, text)
    return episode.turns


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def search_text(query, protocol="qwen"):
    return call("search", query=query) if protocol == "qwen" else f"<search>{query}</search>"


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", REWRITES)
def test_a_guess_in_the_query_is_no_evidence(protocol, name):
    # The protocols differ in their tags alone, so one of them sees every guess.
    for query in GUESSES if protocol == "qwen" else GUESSES[:1]:
        for documents in ((), (KERR,)):
            engine = Echo(REWRITES[name], *documents)
            guess = search_text(query, protocol)
            assert not has_evidence(play(engine, guess, protocol=protocol))
            # The result of another query is evidence, even after a guess.
            turns = play(engine, guess, search_text("the bridge", protocol), protocol=protocol)
            is_shown = bool(documents) and name != "not found"
            assert has_evidence(turns) == is_shown
            assert first_occurrence(turns, ["Ada Kerr"]) == [0.0, float(is_shown)]


@pytest.mark.parametrize("query", ["bridge", "Kerr bridge", "Eve Kerr"])
def test_a_query_with_some_words_of_the_answer_may_find_it(query):
    engine = Echo(lambda query: f"For {query}: ", KERR)
    assert has_evidence(play(engine, search_text(query)))
    assert not has_evidence(play(Echo(str), search_text(query)))


def test_another_answer_than_the_guess_is_evidence():
    turns = play(Echo(str, KERR), search_text("Kerr"))
    assert has_evidence(turns, ("Kerr", "Ada Kerr"))
    assert not has_evidence(turns, ("Kerr",))


@pytest.mark.parametrize(
    "text",
    [
        call("Rome Ada Kerr Oslo"),
        call("search", **{"Ada Kerr": "bridge"}),
        call("search", query=["Ada Kerr"]),
        call("python", call="print Ada Kerr"),
        '<tool_call>{"name": "search", Ada Kerr}</tool_call>',
        # The results of one turn share one observation.
        call("search", query="river") + call("python", call="print Ada Kerr"),
        call("Ada Kerr") + call("search", query="river") + call("Ada Kerr"),
    ],
)
def test_only_results_of_searches_are_evidence(text):
    engine = KeywordSearch({"bridge": "By Ada Kerr.", "river": "A river."})
    turns = play(engine, text, tools=[Python()])
    assert turns[0].observation is not None
    assert not has_evidence(turns)
    assert has_evidence(play(engine, text + search_text("bridge"), tools=[Python()]))
    assert has_evidence(play(engine, search_text("bridge") + text, tools=[Python()]))


def test_calls_beyond_the_limit_and_failed_calls_are_no_evidence():
    engine = KeywordSearch({"bridge": "By Ada Kerr."})
    text = search_text("river") + search_text("bridge")
    assert not has_evidence(play(engine, text, max_calls=1))
    assert has_evidence(play(engine, text, max_calls=2))
    record = CallRecord(call="bridge", error="the server is down")
    assert not has_evidence([Turn(text="", records=(record,), observation="Ada Kerr is away.")])


def test_a_result_that_joins_words_of_the_query_is_no_evidence():
    for query in ("ada-kerr", "Ad Ada Ker r, AdaKerr?"):
        for result in ("Ada+Kerr", "AdaKerr", "A.d.a.K.e.r.r"):
            turn = Turn(text="", tool_call=query, observation=f"Nothing for {result} here.")
            assert not has_evidence([turn], ("AdaKerr",))
    turn = Turn(text="", tool_call="Ada", observation="AdaKerr")
    assert has_evidence([turn], ("AdaKerr",))


@pytest.mark.parametrize(
    ("query", "answer"),
    [
        ("\uff41\uff44\uff41 kerr", "Ada Kerr"),  # full width
        ("\ufb01nland", "Finland"),  # a ligature
        ("\u0130stanbul", "Istanbul"),
        ("A d a K e r r", "AdaKerr"),  # the letters are not articles
        ("北京是首都吗", "北京"),
    ],
)
def test_every_spelling_of_an_answer_in_the_query_is_the_answer(query, answer):
    turn = Turn(text="", tool_call=query, observation=f"Nothing for {answer} here.")
    assert not has_evidence([turn], (answer,))
    assert has_evidence([dataclasses.replace(turn, tool_call="x")], (answer,))


@pytest.mark.parametrize(
    ("answer", "text", "occurs"),
    [
        ("Washington", "Wash\u00adington", True),
        ("Tokyo", "\uff34\uff4f\uff4b\uff59\uff4f", True),
        ("北京", "中国的首都是北京。", True),
        ("กรุงเทพ", "เมืองหลวงคือกรุงเทพ", True),
        ("北京", "北 aa 京", False),
        ("दिल", "दूल", False),  # another vowel, which is a mark
    ],
)
def test_answers_of_any_script_are_found(answer, text, occurs):
    assert occurs_in(answer, text) == occurs


def test_every_argument_of_a_json_call_is_part_of_the_query():
    for query in ("Ada Kerr", "\nAda\tKerr", "\u2028Ada\u00a0Kerr"):
        arguments = json.dumps({"query": query, "topk": 3})
        assert not has_evidence([Turn(text="", tool_call=arguments, observation=f"For {query}.")])
