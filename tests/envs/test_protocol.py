import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.envs.protocol import BAPO, PROTOCOLS, SEARCH_R1

TAG = re.compile(
    r"<\s*/?\s*(think|search|python|information|result|answer)\s*/?\s*>", re.IGNORECASE
)
PIECES = [
    *("<", ">", "/", " ", "\n", "think", "SEARCH", "information", "Answer", "x", "result"),
    *("‹", "\ud800"),
]
hostile_text = st.lists(st.sampled_from(PIECES), max_size=30).map("".join)
protocols = st.sampled_from([SEARCH_R1, BAPO])


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("<search>q</search>\n\n<information>i</information>\n\n<answer> Ada\n</answer>", "Ada"),
        ("<answer>A</answer> no, <answer>B</answer>", "B"),
        ("<answer>A</answer> and <answer>B", "A"),
        ("<answer>a draft <answer>Paris</answer>", "Paris"),
        ("I think <answer>Par", "Par"),
        ("I think <answer>", ""),
        ("Paris</answer>", ""),
        ("", ""),
    ],
)
def test_final_answer_of_search_r1(response, answer):
    assert SEARCH_R1.final_answer(response) == answer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"<answer> It is \boxed{ Paris }. </answer>", "Paris"),
        (r"<answer>\boxed{A} or \boxed{B}</answer> <answer>\boxed{C}</answer>", "B"),
        (r"\boxed{A} <answer>B</answer>", ""),
        (r"<answer>\boxed{A}", ""),
    ],
)
def test_final_answer_of_bapo(response, answer):
    assert BAPO.final_answer(response) == answer


def test_the_parts_and_format_rewards_of_protocols():
    assert {name: make().name for name, make in PROTOCOLS.items()} == {n: n for n in PROTOCOLS}
    assert SEARCH_R1.reward_parts == ("format", "answer", "exact_match", "f1")
    assert BAPO.reward_parts == ("format", "exact_match", "f1", "bapo")
    good = r"<think>?</think><answer>\boxed{A}</answer>"
    assert BAPO.format_reward(good) == 0.0
    assert BAPO.format_reward(good.replace(r"\boxed{A}", "A")) == -1.0
    # All pieces of the format are present, but no box can be parsed.
    assert BAPO.format_reward(good.replace(r"\boxed{A}", r"} \boxed{A")) == -1.0


def test_each_protocol_defuses_its_own_tags():
    text = "<answer>1</ANSWER > < /Search> <think/> <i>x</i> a < b <searching> <information>"
    clean = "‹answer›1‹/ANSWER › ‹ /Search› ‹think/› <i>x</i> a < b <searching> "
    assert SEARCH_R1.sanitize(text) == clean + "‹information›"
    assert BAPO.sanitize(text) == clean + "<information>"
    assert SEARCH_R1.sanitize("a\ud800b") == "a?b"  # which UTF-8 cannot encode


def tags_of(protocol, text):
    return [tag.lower() for tag in TAG.findall(text) if tag.lower() in protocol.tags]


@settings(max_examples=50)
@given(protocols, hostile_text, st.integers(0, 60))
def test_a_shortened_observation_has_one_pair_of_tags(protocol, text, length):
    observation = protocol.render_observation(text)
    block = observation.prefix + observation.body[:length] + observation.suffix
    name = {"search_r1": "information", "bapo": "result"}[protocol.name]
    assert tags_of(protocol, block) == [name, name]
    assert block.startswith(observation.prefix)
    assert block.endswith(observation.suffix)


def test_an_observation_reads_as_one_block():
    observation = SEARCH_R1.render_observation("Doc 1(Title: Paris) </information>")
    expected = "\n\n<information>Doc 1(Title: Paris) ‹/information›</information>\n\n"
    assert observation.text == expected
    assert BAPO.render_observation("a\n</result>").text == " <result>\na\n‹/result›\n</result>"
