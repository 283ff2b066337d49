import math

import numpy as np
import pytest

from jaxrl.objectives.shaping import (
    boundary_aware_rewards,
    entropy_reward,
    overlong_penalty,
    relaxed_kl_factors,
)

# Length


def test_overlong_by_hand():
    lengths = np.array([0, 16384, 16385, 18432, 20480, 30000], np.int32)
    actual = overlong_penalty(lengths, max_length=20480, buffer=4096)
    np.testing.assert_allclose(actual, [0, 0, -1 / 4096, -0.5, -1, -1], rtol=1e-6)
    assert actual.dtype == np.float32
    half = overlong_penalty(lengths, max_length=20480, buffer=4096, factor=0.5)
    np.testing.assert_allclose(half, actual / 2)
    assert not overlong_penalty(lengths, max_length=10, buffer=0).any()


# Abstention: I abstains, X is malformed, P is right, J abstains in a bad format; others are wrong.

SCORES = {"X": -1.0, "J": -1.0, "P": 1.0}


def bapo_with_reasons(group, *others, is_late=True, sample_level=True, **settings):
    rows = [(word, number) for number, words in enumerate([group, *others]) for word in words]
    words = [word for word, _ in rows]
    actual, reasons = boundary_aware_rewards(
        np.array([SCORES.get(word, 0.0) for word in words], np.float32),
        np.array([word in "IJ" for word in words]),
        np.array([word not in "XJ" for word in words]),
        ["" if word in "XJ" else word.lower() for word in words],
        np.array([number for _, number in rows], np.int32),
        is_late=is_late,
        sample_level=sample_level,
        **settings,
    )
    assert actual.dtype == np.float32
    return actual.tolist()[: len(group)], reasons[: len(group)]


def bapo(*groups, **settings):
    return bapo_with_reasons(*groups, **settings)[0]


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        ("IbbccbXX", [0.5, 0, 0, 0, 0, 0, -1, -1]),
        ("IPbccbXX", [0, 1, 0, 0, 0, 0, -1, -1]),  # something was found
        ("IbcdbbbX", [0, 0, 0, 0, 0, 0, 0, -1]),  # b, c, d and none: 4 of 8 differ
        ("Ibcdbbbc", [0.5, 0, 0, 0, 0, 0, 0, 0]),
        ("Ibc", [0, 0, 0]),  # 2 of 3
        ("IIbbb", [0.5, 0.5, 0, 0, 0]),
        ("I", [0.5]),
        ("Jbbbbbbb", [-1, 0, 0, 0, 0, 0, 0, 0]),  # a malformed abstention earns nothing
    ],
)
def test_the_sample_gate_pays_abstentions_while_answers_agree(group, expected):
    assert bapo(group) == expected


def test_each_changed_reward_has_its_reason():
    encouraged, penalized = "IDK encouraged", "IDK penalized"
    assert bapo_with_reasons("IJbbbbbX")[1] == [encouraged] + [""] * 7
    assert bapo_with_reasons("IJPbbbbX")[1] == [penalized] + [""] * 7
    assert bapo_with_reasons("IbcdbbbX")[1] == [""] * 8  # blocked by the sample gate
    assert bapo_with_reasons("IbcdefgX", is_late=False)[1] == [""] * 8  # and by the stage gate


def test_without_the_sample_gate_abstentions_are_paid_while_answers_differ():
    assert bapo("IbcdefgX", sample_level=False) == [0.5] + [0] * 6 + [-1]


def test_the_stage_gate_reads_the_abstention_rate_of_the_whole_batch():
    assert bapo("IbcdefgX", is_late=False) == [0] * 7 + [-1]  # one of 8
    # One of 16; early on the sample gate is not used.
    assert bapo("IbcdefgX", "bbbbbbbb", is_late=False) == [0.5] + [0] * 6 + [-1]
    # The rate itself closes the gate, though 0.1 * 30 > 3 in floats.
    assert bapo("III", "b" * 27, is_late=False) == [0] * 3
    assert bapo("Ibbbbbbbbb", is_late=False, max_rate=0.11) == [0.5] + [0] * 9
    # A malformed abstention counts: 2 of 15 abstain, then 1 of 15.
    assert bapo("JIbbbbbbb", "b" * 6, is_late=False)[1] == 0
    assert bapo("bIbbbbbbb", "b" * 6, is_late=False)[1] == 0.5


def test_abstentions_of_an_early_batch_keep_their_scores():
    # Late, an abstention beside a right answer loses its score; a closed stage gate keeps it.
    scores, ids = np.array([0.2, 1, 0.3], np.float32), np.array([1, 1, 1])
    flags = np.array([True, False, False]), np.array([True, True, True])
    answers = ["idk", "paris", "b"]
    closed, _ = boundary_aware_rewards(
        scores, *flags, answers, ids, is_late=False, sample_level=False, max_rate=0.1
    )
    np.testing.assert_array_equal(closed, scores)
    late, _ = boundary_aware_rewards(scores, *flags, answers, ids, is_late=True, sample_level=False)
    np.testing.assert_allclose(late, [0, 1, 0.3], rtol=1e-6)


def test_members_of_no_group_count_for_nothing():
    actual, _ = boundary_aware_rewards(
        np.array([0, 0, 7, 0], np.float32),
        np.array([True, False, False, True]),
        np.ones(4, bool),
        ["", "a", "b", ""],
        np.array([3, 3, -1, -1]),
        is_late=False,
        sample_level=False,
        max_rate=0.6,  # 1 of 2, though 2 of 4 rows
        bonus=0.25,
    )
    assert actual.tolist() == [0.25, 0, 0, 0]


# Entropy

GOLDEN = {  # target 10, alpha 0.5, counts 0, 4, 10, 13, 20
    ("easy", True): [0, 0, 0, -0.080357, -0.5],
    ("easy", False): [0.15, 0.15, 0.15, 0.203754, 0.295781],
    ("medium", True): [-0.5, -0.181818, 0, -0.003788, -0.5],
    ("medium", False): [0.2, 0.2, 0.2, 0.219934, 0.38103],
    ("hard", True): [-0.18, -0.03125, 0.457525, 0.53833, 0.593408],
    ("hard", False): [0.3, 0.3, 0.3, 0.3, 0.53833],
}
COUNTS = np.array([0, 4, 10, 13, 20], np.int32)


def entropy(bucket, is_correct, counts=COUNTS, target=10, alpha=0.5, **settings):
    return entropy_reward(
        counts,
        np.full(len(counts), is_correct),
        [bucket] * len(counts),
        targets={bucket: target},
        coefficients={bucket: alpha},
        **settings,
    )


@pytest.mark.parametrize(("bucket", "is_correct"), GOLDEN)
def test_entropy_reward_by_hand(bucket, is_correct):
    actual = entropy(bucket, is_correct)
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, GOLDEN[bucket, is_correct], atol=1e-6)


def test_the_margin_of_a_small_target_is_one_token():
    # Two tokens are one beyond the margin: a penalty of 1 / (2 * knee) of margin + knee.
    for bucket, knee in (("easy", 2), ("medium", 3)):
        [actual] = entropy(bucket, True, np.array([2]), target=0)
        assert actual == pytest.approx(-0.5 / (2 * knee) / (1 + knee))
    [actual] = entropy("hard", False, np.array([4]), target=0)
    assert actual == pytest.approx(0.6 / (1 + math.exp(-1)))  # three tokens beyond, temperature 3


def test_entropy_reward_by_hand_with_other_settings():
    # Two tokens beyond a margin of half of 10, past a knee of 1: 2 - 1 / 2, over 5 + 1.
    settings = {
        "margins": (0.5, 0.25, 0.1),
        "huber_knees": (1.0, 3.0, 4.0),
        "sigmoid_temperatures": (2.0, 2.5, 6.0),
    }
    [actual] = entropy("easy", True, np.array([17]), **settings)
    assert actual == pytest.approx(-0.5 * 1.5 / 6)
    # Three tokens beyond a margin of one: sigmoid(3 / 6).
    [actual] = entropy("hard", False, np.array([14]), **settings)
    assert actual == pytest.approx(0.6 / (1 + math.exp(-0.5)))


def test_a_bucket_without_a_target_earns_nothing():
    actual = entropy_reward(
        np.array([20, 20]),
        np.array([True, True]),
        ["easy", "hard"],
        targets={"easy": 10},
        coefficients={"easy": 0.5, "hard": 0.5},
    )
    np.testing.assert_allclose(actual, [-0.5, 0])


@pytest.mark.parametrize("is_correct", [True, False])
@pytest.mark.parametrize("bucket", ["easy", "medium", "hard"])
def test_a_centered_gain_is_twice_the_gain_less_its_size(bucket, is_correct):
    plain, centered = entropy(bucket, is_correct), entropy(bucket, is_correct, centered_gain=True)
    size = {"easy": 0.3, "medium": 0.4, "hard": 0.6}[bucket]  # C and the share of a wrong answer
    is_gain = plain > 0
    np.testing.assert_allclose(centered[is_gain], 2 * plain[is_gain] - size, atol=1e-6)
    np.testing.assert_array_equal(centered[~is_gain], plain[~is_gain])
    if not is_correct:
        assert centered[0] == 0  # nothing is paid for a miss that did not explore


def test_second_chance_by_hand():
    actual = relaxed_kl_factors(
        ["easy", "easy", "easy", "hard"],
        np.array([False, False, True, False]),
        np.array([0.5, 0.49, 3.0, 3.0], np.float32),
    )
    np.testing.assert_allclose(actual, [0.67, 1, 1, 1])
    assert actual.dtype == np.float32
