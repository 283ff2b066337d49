from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.envs.rewards.qa import exact_match, f1, normalize_answer


def test_normalize_answer():
    assert normalize_answer("  The  U.S.A., an\tapple a day!") == "usa apple day"
    assert normalize_answer("theatre") == "theatre"


@pytest.mark.parametrize(
    ("composed", "decomposed"),
    [
        ("\u00c5ngstr\u00f6m", "A\u030angstro\u0308m"),
        ("\u00c5ngstr\u00f6m", "\u212bngstr\u00f6m"),
        ("\uae40\uce58", "\u1100\u1175\u11b7\u110e\u1175"),
        ("\u00e0 la carte", "a\u0300 la carte"),  # whose `a` is not an article
    ],
)
def test_equivalent_characters_match(composed, decomposed):
    for answer, truth in ((composed, decomposed), (decomposed, composed)):
        assert exact_match(answer, truth) == f1(answer, truth) == 1.0
        assert exact_match(answer.upper(), [f"The {truth}."]) == 1.0


def test_answers_without_words_match_only_themselves():
    # No word of `A` is left, since it is an article; of `+` nothing at all.
    normalized = {"A": "a", "(A).": "a", "The The": "the the", "+": "+", "- -": "- -", " ": ""}
    assert {text: normalize_answer(text) for text in normalized} == normalized
    for truth in ("A", "an", "The The", "+", "..."):
        assert exact_match(f" {truth}\n", truth) == exact_match(truth, ["x", truth]) == 1.0
        assert f1(truth, truth) == 1.0
        others = ["", "The!", "B", "-", "...?", "Paris", f"{truth} Paris", f"{truth} {truth} ."]
        assert [exact_match(other, truth) for other in others] == [0.0] * len(others), truth
        assert f1("", truth) == 0.0
    assert exact_match("", [""]) == f1("", "") == 0.0


@settings(max_examples=25)
@given(st.sampled_from("ABCD"), st.sampled_from("ABCD"))
def test_letters_of_multiple_choice_match_in_every_form(truth, answer):
    for form in ("{}", "{}.", "({})", "{})", " {}\n", "**{}**"):
        for text in (form.format(answer), form.format(answer.lower())):
            assert exact_match(text, truth) == f1(text, truth) == (answer == truth)


@pytest.mark.parametrize(
    ("answer", "truths", "score"),
    [
        ("The Eiffel Tower", "eiffel tower", 1.0),
        ("Barack Obama", ["Obama", "Barack H. Obama"], 0.8),  # the better of 2/3 and 4/5
        ("to be or not to be", "to be", 2 / 4),  # precision 2/6, recall 1
        ("to to be", "to be be", 2 / 3),  # one `to` and one `be` are shared
        ("London", "Paris", 0.0),
        ("yes it is", "yes", 0.0),
        ("no", "no man's land", 0.0),
        ("No answer", "noanswer", 0.0),
        ("The!", "a", 0.0),
        ("Paris", [], 0.0),
    ],
)
def test_f1(answer, truths, score):
    assert f1(answer, truths) == pytest.approx(score, abs=1e-15)


def squad_f1(answer, truth):
    """Compute F1 by SQuAD's definition, word by word."""
    words, truth_words = normalize_answer(answer).split(), normalize_answer(truth).split()
    num_shared = sum(
        min(words.count(word), truth_words.count(word)) for word in set(words) & set(truth_words)
    )
    if num_shared == 0:
        return 0.0
    precision, recall = num_shared / len(words), num_shared / len(truth_words)
    return 2 * precision * recall / (precision + recall)


WORDS = st.lists(st.sampled_from(["the", "an", "Old", "old", "city", "of", "Rome.", "Oslo"]))
PHRASES = WORDS.map(" ".join)


@settings(max_examples=50)
@given(PHRASES, st.lists(PHRASES, min_size=1, max_size=3))
def test_f1_is_squads_for_the_best_truth(answer, truths):
    assert f1(answer, truths) == max(f1(answer, truth) for truth in truths)
    truth = truths[0]
    score = f1(answer, truth)
    assert score == pytest.approx(squad_f1(answer, truth))
    assert score == f1(truth, answer)  # precision and recall change places
    bags = [Counter(normalize_answer(text).split()) for text in (answer, truth)]
    assert (score == 1.0) == (bags[0] == bags[1] != Counter())
    assert score >= exact_match(answer, truth)


@settings(max_examples=50)
@given(WORDS, WORDS.filter(lambda words: set(words) - {"the", "an"}), st.randoms())
def test_f1_ignores_order_articles_and_punctuation(words, truth, random):
    shuffled = [f"{word.upper()}!" for word in words] + ["the", "..."]
    random.shuffle(shuffled)
    assert f1(" ".join(shuffled), " ".join(truth)) == f1(" ".join(words), " ".join(truth))
