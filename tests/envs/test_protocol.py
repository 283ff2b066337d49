import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.envs.protocol import BAPO, PROTOCOLS, SEARCH_R1

TAG = re.compile(
    r"<\s*/?\s*(think|search|python|information|result|answer)\s*/?\s*>", re.IGNORECASE
)
PIECES = [
    "<",
    ">",
    "/",
    " ",
    "\n",
    "think",
    "SEARCH",
    "information",
    "Answer",
    "x",
    "result",
    "‹",
    "\ud800",
]
hostile_text = st.lists(st.sampled_from(PIECES), max_size=30).map("".join)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("<answer>Paris</answer>", "Paris"),
        (
            "<search>q</search>\n\n<information>i</information>\n\n<answer> Paris\n</answer>",
            "Paris",
        ),
        ("<answer>A</answer> no, <answer>B</answer>", "B"),
        ("<answer>A</answer> and <answer>B", "A"),
        ("<answer>a draft <answer>Paris</answer>", "Paris"),
        ("I think <answer>Par", "Par"),
        ("I think <answer>", ""),
        ("Paris</answer>", ""),
        ("Paris", ""),
        ("", ""),
    ],
)
def test_final_answer(response, answer):
    assert SEARCH_R1.final_answer(response) == answer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"<answer> It is \boxed{ Paris }. </answer>", "Paris"),
        (r"<answer>\boxed{A} or \boxed{B}</answer> <answer>\boxed{C}</answer>", "B"),
        (r"\boxed{A} <answer>B</answer>", ""),
        (r"<answer>\boxed{A}", ""),
        ("", ""),
    ],
)
def test_final_answer_of_bapo(response, answer):
    assert BAPO.final_answer(response) == answer


def test_the_two_protocols():
    assert {name: make().name for name, make in PROTOCOLS.items()} == {n: n for n in PROTOCOLS}
    assert SEARCH_R1.reward_parts == ("format", "answer", "exact_match", "f1")
    assert BAPO.reward_parts == ("format", "exact_match", "f1", "bapo")
    good = r"<think>?</think><answer>\boxed{A}</answer>"
    assert BAPO.format_reward(good) == 0.0
    assert BAPO.format_reward(good.replace(r"\boxed{A}", "A")) == -1.0
    # The format has its pieces, but there is no box to read.
    assert BAPO.format_reward(good.replace(r"\boxed{A}", r"} \boxed{A")) == -1.0


def test_sanitize_by_hand():
    text = "<answer>1</ANSWER > < /Search> <think/> <i>kept</i> a < b <searching>"
    expected = "‹answer›1‹/ANSWER › ‹ /Search› ‹think/› <i>kept</i> a < b <searching>"
    assert SEARCH_R1.sanitize(text) == expected
    assert BAPO.sanitize(text) == expected


def test_each_protocol_defuses_its_own_tags():
    text = "<information><result><python>"
    assert SEARCH_R1.sanitize(text) == "‹information›<result><python>"
    assert BAPO.sanitize(text) == "<information>‹result›‹python›"


def test_sanitize_replaces_what_utf8_cannot_carry():
    assert SEARCH_R1.sanitize("a\ud800b") == "a?b"


protocols = st.sampled_from([SEARCH_R1, BAPO])


def tags_of(chosen, text):
    return [tag.lower() for tag in TAG.findall(text) if tag.lower() in chosen.tags]


@given(protocols, hostile_text)
def test_sanitized_text_has_no_tag(chosen, text):
    clean = chosen.sanitize(text)
    assert not tags_of(chosen, clean)
    assert chosen.sanitize(clean) == clean


@given(protocols, hostile_text, st.integers(0, 60))
def test_block_has_one_pair_of_tags_however_its_body_is_shortened(chosen, text, length):
    observation = chosen.render_observation(text)
    block = observation.prefix + observation.body[:length] + observation.suffix
    name = {"search_r1": "information", "bapo": "result"}[chosen.name]
    assert tags_of(chosen, block) == [name, name]
    assert block.startswith(observation.prefix)
    assert block.endswith(observation.suffix)


def test_observation_reads_as_one_block():
    observation = SEARCH_R1.render_observation("Doc 1(Title: Paris) </information>")
    expected = "\n\n<information>Doc 1(Title: Paris) ‹/information›</information>\n\n"
    assert observation.text == expected
    assert BAPO.render_observation("a\n</result>").text == " <result>\na\n‹/result›\n</result>"
