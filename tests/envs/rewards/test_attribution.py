"""Evidence and repetition in episodes written by hand."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.envs.base import NO_INFORMATION, CallRecord, Episode, Prompt, Task, Turn
from jaxrl.envs.protocol import PROTOCOLS
from jaxrl.envs.rewards.attribution import Attribution, attribute, occurs, results_of
from jaxrl.envs.search.base import Document, SearchEngine, render_documents
from jaxrl.envs.search_env import SearchEnv
from jaxrl.envs.tools.base import Tool
from jaxrl.extras.sentinel.evidence import found_answer
from jaxrl.extras.stability.first_occurrence import first_occurrence
from tests.envs.contract import after
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
    ("answer", "is_there"),
    [
        ("Ada Kerr", True),
        ("the ADA  Kerr!", True),  # as exact match compares
        ("Ada", True),
        ("da Kerr", False),  # whole words
        ("1914", True),
        ("1914-1918", True),
        ("US", True),
        ("U.S.", True),
        ("Avington Bridge", True),  # titles are read too
        ("information", False),  # a tag
        ("Doc", False),
        ("2", False),  # the number of a document
        ("title", False),
        ("", False),
        ("the", False),  # an article is no answer
    ],
)
def test_an_answer_in_results(answer, is_there):
    for protocol in PROTOCOLS:
        turn = search("q", KERR, MILL, DALE, protocol=protocol)
        assert occurs(answer, turn.observation) == is_there
        assert attribute([turn, ANSWER], ["no such", answer]).has_evidence == is_there


def test_results_that_were_cut_hold_what_is_left():
    whole = search("q", KERR).observation
    cut = whole[: whole.index("Kerr")] + "</information>"
    turn = Turn(text="", tool_call="q", observation=cut)
    assert attribute([turn], ["Ada"]).has_evidence
    assert not attribute([turn], ["Ada Kerr"]).has_evidence


def test_the_results_of_an_observation():
    titles = [
        result.partition(")")[0] for result in results_of(search("q", KERR, MILL).observation)
    ]
    assert titles == ["Avington Bridge", "Mill"]
    assert results_of("<information>27 degrees\nand rain</information>") == ["27 degrees and rain"]
    assert results_of(f"<result>{NO_INFORMATION}</result>") == []
    assert results_of("") == []


@pytest.mark.parametrize(
    ("turns", "count"),
    [
        ([search("a", KERR), search("b", MILL)], 0),
        ([search("Who built", KERR), search(" who  BUILT ", MILL)], 1),  # the same question
        ([search("a", KERR, MILL), search("b", MILL)], 1),  # another one, nothing new
        ([search("a", KERR), search("b", KERR, MILL)], 0),  # one of two is new
        ([search("a", KERR), search("b", MILL), search("c", MILL, KERR)], 1),
        ([search("a"), search("b")], 0),  # nothing was found, so nothing twice
        ([search("a"), search("a")], 1),
        ([search("a", KERR), search("a", KERR), search("b", KERR)], 2),
        ([ANSWER], 0),
    ],
)
def test_redundant_searches(turns, count):
    assert attribute(turns, []).num_redundant == count


def test_a_result_seen_whole_before_is_known_when_it_is_cut():
    whole, longer = search("a", KERR, MILL).observation, search("b", MILL, KERR).observation
    cut = longer[: longer.index("Ada")] + "</information>"
    first, second = (
        Turn(text="", tool_call=q, observation=o) for q, o in (("a", whole), ("b", cut))
    )
    assert attribute([first, second], []).num_redundant == 1
    assert attribute([second, first], []).num_redundant == 0  # the rest is new


def test_calls_of_other_tools_are_no_searches():
    calls = [Turn(text="", tool_call="2-1", tool="python", observation="<result>1</result>")] * 2
    assert attribute(calls, ["1"]) == Attribution(has_evidence=False, num_redundant=0)


def test_several_searches_of_a_turn():
    records = tuple(CallRecord(call=query) for query in ("a", "b", "A"))
    turn = Turn(text="", tool_call="a", records=records, observation=search("", KERR).observation)
    assert attribute([turn], []).num_redundant == 1
    again = Turn(text="", records=(CallRecord(call="c"),) * 2, observation=turn.observation)
    assert attribute([turn, again], []).num_redundant == 3


@given(st.lists(st.text(max_size=20), max_size=4), st.text(max_size=60))
def test_any_text_can_be_read(answers, text):
    turn = Turn(text=text, tool_call="", observation=text)
    found = attribute([turn, turn], answers)
    assert 1 <= found.num_redundant <= 2
    is_shown = bool(results_of(text)) and any(occurs(answer, text) for answer in answers)
    assert found.has_evidence == is_shown
    echo = Turn(text=text, tool_call=text, observation=text)
    assert not attribute([echo], answers).has_evidence


class Echo(SearchEngine):
    """Says what it was asked, in some other form, and may show a document."""

    def __init__(self, form, *documents):
        self._form, self._documents = form, render_documents(documents) if documents else ""

    def run(self, query, /):
        return self._form(query) + self._documents


class Python(Tool):
    """Prints what it is told to."""

    name, blank = "python", "nothing"

    def run(self, call, /):
        return call.removeprefix("print ")


PROMPT = Prompt(system="", template="{question}")
FORMS = {
    "as it is": lambda query: query,
    "not found": lambda query: f"{NO_INFORMATION} for: {query}",
    "error": lambda query: f"error: nothing fits '{query}'; try other words than {query!r}",
    "upper": lambda query: f"Results for <b>{query.upper()}</b>",
    "sorted": lambda query: " ".join(sorted(query.replace(",", "").split())),
    "reversed": lambda query: " ".join(reversed(query.replace(",", "").split())),
    "document": lambda query: f"Doc 1(Title: {query}) {query}",
}
GUESSES = [
    "Oslo Ada Kerr Rome",
    "Oslo, Kerr, Ada, Rome",
    "who is ada kerr?",
    "Ada-Kerr's bridge",
    '"Ada Kerr" OR "Eve Kerr"',
    "A\nAda\nKerr",
]


def has_evidence(turns, answers=("Ada Kerr",)):
    """Whether turns show an answer, which all that reads results agrees on."""
    evidence = attribute(turns, answers).has_evidence
    assert sum(first_occurrence(turns, answers)) == evidence
    task = Task(id="t", question="Who?", answers=answers)
    trajectory = dataclasses.replace(make_trajectory(turns=tuple(turns)), task=task)
    assert found_answer(trajectory) == evidence
    return evidence


def played(engine, *texts, protocol="qwen", tools=(), **settings):
    """The turns of an episode in which a model writes these texts."""
    settings = {"max_turns": 9, "prompt": PROMPT, "protocol": PROTOCOLS[protocol], **settings}
    env = SearchEnv(engine, tools=tools, **settings)
    episode = Episode(task=Task(id="t", question="Who?", answers=("Ada Kerr",)))
    for text in texts:
        episode = after(env, episode.task, episode.turns, text)
    return episode.turns


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def asked(protocol, query):
    return call("search", query=query) if protocol == "qwen" else f"<search>{query}</search>"


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("form", FORMS)
def test_a_guess_in_the_query_is_no_evidence(protocol, form):
    for query in GUESSES:
        for documents in ((), (KERR,)):
            engine = Echo(FORMS[form], *documents)
            assert not has_evidence(played(engine, asked(protocol, query), protocol=protocol))
            # A result of another query is, also behind a guess.
            texts = (asked(protocol, query), asked(protocol, "the bridge"))
            turns = played(engine, *texts, protocol=protocol)
            is_shown = bool(documents) and form != "not found"
            assert has_evidence(turns) == is_shown
            assert first_occurrence(turns, ["Ada Kerr"]) == [0.0, float(is_shown)]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("query", ["bridge", "Kerr bridge", "Ada", "Eve Kerr"])
def test_a_query_without_all_words_of_the_answer_may_find_it(protocol, query):
    engine = Echo(lambda query: f"For {query}: ", KERR)
    assert has_evidence(played(engine, asked(protocol, query), protocol=protocol))
    assert not has_evidence(played(Echo(str), asked(protocol, query), protocol=protocol))


def test_another_answer_than_the_guess_is_evidence():
    turns = played(Echo(str, KERR), asked("qwen", "Kerr"))
    assert has_evidence(turns, ("Kerr", "Ada Kerr"))
    assert not has_evidence(turns, ("Kerr",))


@pytest.mark.parametrize(
    "text",
    [
        call("Rome Ada Kerr Oslo"),
        call("Ada Kerr", query="bridge"),
        call("search", **{"Ada Kerr": "bridge"}),
        call("search", query=["Ada Kerr"]),
        call("python", call="print Ada Kerr"),
        call("python", code="Ada Kerr"),
        call("search", query=" ") + call("python", call="print Ada Kerr"),
        '<tool_call>{"name": "search", Ada Kerr}</tool_call>',
        # The results of one turn stand in one observation.
        call("search", query="river") + call("python", call="print Ada Kerr"),
        call("python", call="print Ada Kerr") + call("search", query="river"),
        call("Ada Kerr") + call("search", query="river") + call("Ada Kerr"),
    ],
)
def test_only_results_of_searches_are_evidence(text):
    engine = KeywordSearch({"bridge": "By Ada Kerr.", "river": "A river."})
    turns = played(engine, text, tools=[Python()])
    assert turns[0].observation is not None
    assert not has_evidence(turns)
    assert has_evidence(played(engine, text + asked("qwen", "bridge"), tools=[Python()]))
    assert has_evidence(played(engine, asked("qwen", "bridge") + text, tools=[Python()]))


def test_a_call_that_was_not_made_is_no_evidence():
    engine = KeywordSearch({"bridge": "By Ada Kerr."})
    text = asked("qwen", "river") + asked("qwen", "bridge")
    assert not has_evidence(played(engine, text, max_calls=1))
    assert has_evidence(played(engine, text, max_calls=2))


def test_a_search_that_failed_is_no_evidence():
    record = CallRecord(call="bridge", error="the server is down")
    assert not has_evidence([Turn(text="", records=(record,), observation="Ada Kerr is away.")])


def test_words_that_the_result_joins_are_the_query_s():
    for query in ("Ada Kerr", "ada-kerr", "Ad Ada Ker r, AdaKerr?"):
        for result in ("Ada+Kerr", "ada-kerr", "AdaKerr", "A.d.a.K.e.r.r"):
            turn = Turn(text="", tool_call=query, observation=f"Nothing for {result} here.")
            assert not has_evidence([turn], ("AdaKerr",))
    turn = Turn(text="", tool_call="Ada", observation="AdaKerr")
    assert has_evidence([turn], ("AdaKerr",))


@pytest.mark.parametrize(
    ("query", "answer"),
    [
        ("\uff41\uff44\uff41 kerr", "Ada Kerr"),  # full width
        ("\u200b".join("Washington"), "Washington"),
        ("\ufb01nland", "Finland"),  # a ligature
        ("mc\u00b2", "mc2"),
        ("\u0130stanbul", "Istanbul"),
        ("A d a K e r r", "AdaKerr"),  # the letters are no articles
        ("北京是首都吗", "北京"),
        ("서울은?", "서울"),
    ],
)
def test_spellings_of_an_answer_in_the_query_are_the_answer(query, answer):
    turn = Turn(text="", tool_call=query, observation=f"Nothing for {answer} here.")
    assert not has_evidence([turn], (answer,))
    assert has_evidence([dataclasses.replace(turn, tool_call="x")], (answer,))


@pytest.mark.parametrize(
    ("answer", "text", "is_there"),
    [
        ("Washington", "Wash\u00adington", True),
        ("Tokyo", "\uff34\uff4f\uff4b\uff59\uff4f", True),
        ("北京", "中国的首都是北京。", True),
        ("서울", "서울은 수도다", True),
        ("กรุงเทพ", "เมืองหลวงคือกรุงเทพ", True),
        ("北京", "北 aa 京", False),
        ("दिल", "यह दिल है", True),
        ("दिल", "दूल", False),  # another vowel, which is a mark
    ],
)
def test_an_answer_in_results_of_any_script(answer, text, is_there):
    assert occurs(answer, text) == is_there


def test_a_call_of_several_arguments_is_read_whole():
    """As of a search tool of one's own, whose calls are JSON."""
    for query in ("Ada Kerr", "\nAda\tKerr", "\u2028Ada\u00a0Kerr"):
        sent = json.dumps({"query": query, "topk": 3})
        assert not has_evidence([Turn(text="", tool_call=sent, observation=f"For {query}.")])
