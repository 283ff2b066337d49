import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.envs.rewards.search_r1 import (
    compute_search_r1_reward,
    follows_search_r1_format,
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
def test_answer_correctness(answer, truth, reward):
    assert compute_search_r1_reward(answer, truth) == reward


def test_long_answers_are_compared_without_the_junk_heuristic():
    # SequenceMatcher would ignore letters that make up over 1% of 200 or more.
    assert compute_search_r1_reward("ab" * 150, "ab" * 120) == 1.0


def test_a_comparison_takes_bounded_time():
    # The worst case: every common letter occurs at many positions.
    spaced = "".join(f"a{chr(0x4E00 + i)}" for i in range(2_000))
    start = time.process_time()
    assert not is_close_answer("a" * 2_000, spaced)
    assert is_close_answer(f" {spaced.upper()} ", spaced[:1_000] + "\n" + spaced[1_000:])
    assert is_close_answer("a" * 200, spaced[:400])  # the longest that are compared
    assert time.process_time() - start < 5
