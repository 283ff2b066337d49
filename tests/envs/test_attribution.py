"""Evidence and repetition in episodes written by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.envs.attribution import attribute, occurs, results_of
from jaxrl.envs.base import NO_INFORMATION, CallRecord, Turn
from jaxrl.envs.protocol import PROTOCOLS
from jaxrl.envs.retrieval import Document, render_documents

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


def test_what_the_model_writes_is_no_evidence():
    turn = Turn(text="Ada Kerr <search>Ada Kerr</search>", tool_call="Ada Kerr", observation=" ")
    assert not attribute([turn, Turn(text="<answer>Ada Kerr</answer>")], ["Ada Kerr"]).has_evidence


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
    calls = [Turn(text="", tool_call="1", tool="python", observation="<result>1</result>")] * 2
    assert attribute(calls, ["1"]) == attribute(calls[:1], ["1"])
    assert attribute(calls, ["1"]).has_evidence  # but what they answer is


def test_several_searches_of_a_turn():
    records = tuple(CallRecord(call=query) for query in ("a", "b", "A"))
    turn = Turn(text="", tool_call="a", records=records, observation=search("", KERR).observation)
    assert attribute([turn], []).num_redundant == 1
    again = Turn(text="", records=(CallRecord(call="c"),) * 2, observation=turn.observation)
    assert attribute([turn, again], []).num_redundant == 3


@given(st.lists(st.text(max_size=20), max_size=4), st.text(max_size=60))
def test_any_text_can_be_read(answers, text):
    turn = Turn(text=text, tool_call=text, observation=text)
    found = attribute([turn, turn], answers)
    assert 1 <= found.num_redundant <= 2
    assert found.has_evidence == any(occurs(answer, text) for answer in answers)
