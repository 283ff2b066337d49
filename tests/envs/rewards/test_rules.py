import pytest

from jaxrl.envs.rewards.rules import (
    check_weights,
    compute_bapo_correctness,
    extract_boxed_answer,
    follows_bapo_format,
    is_abstention,
)


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
