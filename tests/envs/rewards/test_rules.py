import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.envs.rewards.rules import (
    answer_reward,
    check_weights,
    compute_bapo_correctness,
    extract_boxed_answer,
    follows_bapo_format,
    follows_search_r1_format,
    is_abstention,
    is_close_answer,
)

SEARCH = "<search>q</search>\n\n<information>i</information>\n\n"
ANSWER = "<answer>A</answer>"


@pytest.mark.parametrize(
    "text",
    [
        ANSWER,
        "Let me see. " + SEARCH + "So " + ANSWER,
        f"<think>hm</think>{SEARCH}<think>so</think>{ANSWER}",
        f"{ANSWER}\n<|im_end|>\n<|endoftext|> ",
    ],
)
def test_valid_search_r1_format(text):
    assert follows_search_r1_format(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "A</answer>",
        ANSWER + ANSWER,
        "<answer><answer>A</answer>",
        f"{ANSWER} tail",
        f"<search>q</search>{ANSWER}",
        f"<search>q<information>i</information></search>{ANSWER}",
        f"{SEARCH}<information>i</information>{ANSWER}",
        f"<answer>{SEARCH}A</answer>",
        f"<think>hm {ANSWER}",
        "<think><answer>A</answer></think>",
    ],
)
def test_invalid_search_r1_format(text):
    assert not follows_search_r1_format(text)


@settings(max_examples=25)
@given(st.integers(0, 4), st.sampled_from(["", " some text ", "<think>hm</think>"]))
def test_any_number_of_searches_is_valid_until_a_tag_is_lost(num_searches, between):
    text = between.join([SEARCH] * num_searches + [ANSWER])
    assert follows_search_r1_format(text)
    for tag in ("<search>", "</search>", "<information>", "</information>", "<answer>"):
        if tag in text:
            assert not follows_search_r1_format(text.replace(tag, "", 1))


@pytest.mark.parametrize(
    ("answer", "truth", "reward"),
    [
        ("Paris", "Paris", 2.0),
        ("P a r i s", "Paris", 1.0),
        ("London", "Paris", 0.0),
        ("ab", "bc", 1.0),
        # The longest common block comes first, and the order decides which block that is.
        ("tide", "diet", 0.0),
        ("diet", "tide", 1.0),
        ("未找到相关内容", "Paris", 0.5),
    ],
)
def test_answer_reward(answer, truth, reward):
    assert answer_reward(answer, truth) == reward


def test_long_answers_are_compared_without_the_junk_heuristic():
    # SequenceMatcher would ignore letters that make up over 1% of 200 or more.
    assert answer_reward("ab" * 150, "ab" * 120) == 1.0


def test_a_comparison_takes_bounded_time():
    # The worst case: every common letter occurs at many positions.
    spaced = "".join(f"a{chr(0x4E00 + i)}" for i in range(2_000))
    start = time.process_time()
    assert not is_close_answer("a" * 2_000, spaced)
    assert is_close_answer(f" {spaced.upper()} ", spaced[:1_000] + "\n" + spaced[1_000:])
    assert is_close_answer("a" * 200, spaced[:400])  # the longest that are compared
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("response", "abstains"),
    [
        (r"<answer>\boxed{I DON'T KNOW}</answer>", True),
        ("<answer>Sorry, I don’t know.</answer>", True),
        ("<answer>I know</answer>", False),
        ("<think>I don't know</think><answer>Paris</answer>", False),
        ("<answer>I don't know", False),
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
        f"{THINK}{RESULT}{BOX}",  # a result without a call
        f"{THINK}<search>a <search>b</search>{RESULT}{BOX}",
        f"{THINK}<search>q</search><result>of <search>: </result>{BOX}",  # results are skipped
        THINK + r"<answer>} \boxed{A</answer>",  # matched, not parsed
    ],
)
def test_valid_bapo_format(response):
    assert follows_bapo_format(response)


@pytest.mark.parametrize(
    "response",
    [
        "",
        BOX,  # no thought
        f"{THINK}</think>{BOX}",
        THINK + BOX + BOX,
        THINK + r"</answer>\boxed{A}<answer>",
        THINK + r"\boxed{Paris}<answer></answer>",
        THINK + r"<answer>\boxed{A</answer>",
        f"{THINK}{RESULT}<search>q</search>{BOX}",
        f"{THINK}<search>q<result></search></result>{BOX}",
    ],
)
def test_invalid_bapo_format(response):
    assert not follows_bapo_format(response)


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        (r"\boxed{Paris}", "Paris"),
        (r"\boxed{A} and \boxed{ B }", "B"),
        (r"\boxed{A} and \boxed{B", "A"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{x \boxed{y}}", "y"),
        ("Paris", None),
    ],
)
def test_boxed_answer(content, answer):
    assert extract_boxed_answer(f"<answer>{content}</answer>") == answer
    assert extract_boxed_answer(content) is None


@pytest.mark.parametrize(
    ("response", "score"),
    [
        (THINK + BOX, 1.0),
        (THINK + BOX.replace("Paris", "Paris, France"), 2 / 3),
        (THINK + BOX.replace("Paris", "I DON'T KNOW"), 0.0),
        (THINK + r"<answer>I don't know, \boxed{Paris}</answer>", 0.0),  # an abstention
        (BOX, -1.0),
        (THINK + r"<answer>} \boxed{Paris</answer>", -1.0),
    ],
)
def test_bapo_correctness(response, score):
    answers = ("Paris", "City of Light")
    assert compute_bapo_correctness(response, answers) == pytest.approx(score)


# Weights


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"answer": 1.0}, "no reward part 'answer'. Known parts are format, exact_match"),
        ({"format": 0.0}, "all weights are 0"),
    ],
)
def test_weights_without_effect_are_refused(weights, message):
    check_weights({"format": 0.5, "exact_match": 0.0}, ("format", "exact_match"))
    with pytest.raises(ValueError, match=message):
        check_weights(weights, ("format", "exact_match"))
