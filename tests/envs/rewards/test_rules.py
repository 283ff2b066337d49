import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.envs.rewards.rules import (
    answer_reward,
    bapo_correctness,
    bapo_format,
    boxed_answer,
    check_weights,
    is_abstention,
    is_right_answer,
    search_r1_format,
)

SEARCH = "<search>q</search>\n\n<information>i</information>\n\n"
ANSWER = "<answer>A</answer>"


@pytest.mark.parametrize(
    "text",
    [
        ANSWER,
        "<answer></answer>",
        "Let me see. " + SEARCH + "So " + ANSWER,
        SEARCH + SEARCH + ANSWER,
        f"<think>hm</think>{SEARCH}<think>so</think>{ANSWER}",
        f"{ANSWER}<think>done</think>",
        f"<think>maybe <answer>B</answer>?</think>{ANSWER}",
        f"{ANSWER}\n<|im_end|>\n<|endoftext|> ",
        f"{ANSWER}</s>",
    ],
)
def test_good_format(text):
    assert search_r1_format(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "A",
        "<answer>A",
        "A</answer>",
        "</answer>A<answer>",
        ANSWER + ANSWER,
        "<answer><answer>A</answer>",
        f"{ANSWER} tail",
        f"{ANSWER}<|im_end|> tail",
        f"<search>q</search>{ANSWER}",
        f"<information>i</information>{ANSWER}",
        f"<information>i</information><search>q</search>{ANSWER}",
        f"<search>q<information>i</information></search>{ANSWER}",
        f"<search>q</search><search>q</search><information>i</information>{ANSWER}",
        f"{SEARCH}<information>i</information>{ANSWER}",
        f"<search>q{ANSWER}",
        f"<answer>{SEARCH}A</answer>",
        ANSWER + SEARCH,
        f"<think>hm {ANSWER}",
        f"hm</think>{ANSWER}",
        f"<think>a<think>b</think>{ANSWER}",
        "<think><answer>A</answer></think>",
    ],
)
def test_bad_format(text):
    assert not search_r1_format(text)


@given(st.integers(0, 4), st.sampled_from(["", " some text ", "<think>hm</think>"]))
def test_any_number_of_searches_is_good_until_one_tag_is_lost(num_searches, between):
    text = between.join([SEARCH] * num_searches + [ANSWER])
    assert search_r1_format(text)
    for tag in ("<search>", "</search>", "<information>", "</information>", "<answer>"):
        if tag in text:
            assert not search_r1_format(text.replace(tag, "", 1))


@pytest.mark.parametrize(
    ("answer", "truth", "reward"),
    [
        ("Paris", "Paris", 2.0),
        (" Paris\n", "Paris", 2.0),
        ("paris ", "Paris", 1.0),
        ("P a r i s", "Paris", 1.0),
        ("London", "Paris", 0.0),
        ("ab", "bc", 1.0),
        # The longest common block is found first, which block depends on the order.
        ("tide", "diet", 0.0),
        ("diet", "tide", 1.0),
        ("未找到相关内容", "Paris", 0.5),
        ("未找到相关内容", "未找到相关内容", 2.0),
        ("", "Paris", 0.0),
        (" \n", "", 0.0),
    ],
)
def test_answer_reward(answer, truth, reward):
    assert answer_reward(answer, truth) == reward


def test_amounts_are_arguments():
    amounts = {"reward": 0.25, "exact_match_bonus": 3.0, "not_found": -0.5}
    answers = ("Paris", "paris", "未找到相关内容", "London", "")
    got = [answer_reward(answer, "Paris", **amounts) for answer in answers]
    assert got == [3.0, 0.25, -0.5, 0.0, 0.0]


def test_equivalent_characters_are_the_same():
    composed, decomposed = "\u00e9\u00e8\u00ea", "e\u0301e\u0300e\u0302"
    for answer, truth in ((composed, decomposed), (decomposed, composed)):
        assert answer_reward(answer, truth) == 2.0
        assert answer_reward(f"{answer}!", truth) == 1.0
        assert is_right_answer(answer * 200, truth * 200)  # too long to be close


def test_long_answers_are_compared_without_the_junk_heuristic():
    # SequenceMatcher would ignore letters that make up over 1% of 200 or more.
    assert answer_reward("ab" * 150, "ab" * 120) == 1.0


def test_a_comparison_has_an_end():
    # Each letter that both have in common is looked up in every place again.
    spaced = "".join(f"a{chr(0x4E00 + i)}" for i in range(2_000))
    start = time.process_time()
    assert not is_right_answer("a" * 2_000, spaced)
    assert is_right_answer(f" {spaced.upper()} ", spaced[:1_000] + "\n" + spaced[1_000:])
    assert is_right_answer("a" * 200, spaced[:400])  # the longest that are compared
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("response", "abstains"),
    [
        (r"<answer>\boxed{I DON'T KNOW}</answer>", True),
        ("<answer>Sorry, I don’t know.</answer>", True),
        ("<answer>i do not know</answer> tail", True),
        ("<answer>I know</answer>", False),
        ("<answer>I dont know</answer>", False),
        ("<think>I don't know</think><answer>Paris</answer>", False),
        ("<answer>I don't know", False),
        ("I don't know</answer>", False),
        ("<answer>Paris</answer><answer>I don't know</answer>", False),  # the first one counts
        ("", False),
    ],
)
def test_is_abstention(response, abstains):
    assert is_abstention(response) == abstains


# BAPO

THINK = "<think>?</think>"
BOX = r"<answer>It is \boxed{Paris}.</answer>"
RESULT = " <result>\ntext\n</result>"
ASK = f"<search>q</search>{RESULT}"
COMPUTE = f"<python>print(1)</python>{RESULT}"


@pytest.mark.parametrize(
    "response",
    [
        THINK + BOX,
        THINK + ASK + THINK + COMPUTE + ASK + BOX,
        f"{THINK}{BOX} tail",
        f"{THINK}{RESULT}{BOX}",  # a result that nobody asked for
        f"{ASK}{BOX}{THINK}",
        f"{THINK}<search>a <search>b</search>{RESULT}{BOX}",
        f"{THINK}<search>q</search><result>of <search>: </result>{BOX}",  # results are skipped
        "</think><think>" + BOX,
        THINK + r"<answer>} \boxed{A</answer>",  # only looked for, not read
    ],
)
def test_good_bapo_format(response):
    assert bapo_format(response)


@pytest.mark.parametrize(
    "response",
    [
        "",
        BOX,  # no thought
        f"<think>{THINK}{BOX}",
        f"{THINK}</think>{BOX}",
        THINK,
        THINK + BOX + BOX,
        THINK + BOX + "</answer>",
        THINK + r"</answer>\boxed{A}<answer>",
        THINK + "<answer>Paris</answer>",
        THINK + r"\boxed{Paris}<answer></answer>",
        THINK + r"<answer>\boxed{A</answer>",
        f"{THINK}<search>q</search>{BOX}",
        f"{THINK}<search>q{RESULT}{BOX}",
        f"{THINK}{RESULT}<search>q</search>{BOX}",
        f"{THINK}<search>q</search><result>text{BOX}",
        f"{THINK}<search>q<result></search></result>{BOX}",
        f"{THINK}<python>1</python>{BOX}",
        f"{THINK}{ASK}<python>1</python>{BOX}",
        f"{THINK}{ASK}<search>q</search>{BOX}",
    ],
)
def test_bad_bapo_format(response):
    assert not bapo_format(response)


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        (r"\boxed{Paris}", "Paris"),
        (r"\boxed{A} and \boxed{ B }", "B"),
        (r"\boxed{A} and \boxed{B", "A"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{x \boxed{y}}", "y"),
        (r"} {\boxed{A}", "A"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{}", ""),
        ("Paris", None),
        (r"\boxed{A", None),
    ],
)
def test_boxed_answer(content, answer):
    assert boxed_answer(f"<answer>{content}</answer>") == answer
    assert boxed_answer(content) is None


@pytest.mark.parametrize(
    ("response", "score"),
    [
        (THINK + BOX, 1.0),
        (THINK + BOX.replace("Paris", "Paris, France"), 2 / 3),
        (THINK + BOX.replace("Paris", "Rome"), 0.0),
        (THINK + BOX.replace("Paris", "I DON'T KNOW"), 0.0),
        (THINK + r"<answer>I don't know, \boxed{Paris}</answer>", 0.0),  # an abstention
        (THINK + BOX.replace("Paris", ""), 0.0),
        (BOX, -1.0),
        (THINK + r"<answer>} \boxed{Paris</answer>", -1.0),
    ],
)
def test_bapo_correctness(response, score):
    answers = ("Paris", "City of Light")
    assert bapo_correctness(response, answers) == pytest.approx(score)


# Weights


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"answer": 1.0}, "no reward part 'answer'. Known parts are format, exact_match"),
        ({"exact_matc": 1.0}, "did you mean 'exact_match'"),
        ({}, "all weights are 0"),
        ({"format": 0.0}, "all weights are 0"),
    ],
)
def test_weights_that_pay_nothing_or_for_nothing_are_refused(weights, message):
    check_weights({"format": 0.5, "exact_match": 0.0}, ("format", "exact_match"))
    with pytest.raises(ValueError, match=message):
        check_weights(weights, ("format", "exact_match"))
