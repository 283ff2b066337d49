import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.envs.rewards.math_answers import (
    compute_math_correctness,
    extract_math_answer,
    is_equivalent,
    remove_thousands_separators,
)

SAME = [
    # the same number
    (".5", "0.50"),
    ("007", "7"),
    (r"\dfrac12", r"\tfrac{1}{2}"),
    (r"1\frac12", "3/2"),
    ("3 1/2", "3.5"),
    (r"\dfrac1{-2}", "-1/2"),
    (r"\frac{-1}2", "-1/2"),
    ("-(0.5)", "-0.5"),
    ("-3 1/2", "-3.5"),
    (r"(\frac{1}{-2}, -(3))", "(-0.5, -3)"),
    # canonically equivalent characters
    ("\\text{e\u0301}", "\u00e9"),
    # decoration
    (" $5$ ", "5"),
    (r"The answer is \boxed{\frac{1}{2}}.", "1/2"),
    ("**5**", "5"),
    (r"50\%", "50"),
    (r"x = 12\,000\text{ cm}", "12000"),
    (r"\frac{10{,}000}{3}", "10,000/3"),
    ("2 100/300", "7/3"),  # a mixed number
    (r"90^{\circ}", "90"),
    ("12 square feet.", "12"),
    # lists and other answers
    ("(1, 0.5)", r"\left(1,\frac{1}{2}\right)"),
    ("[1, 2)", "[1,2)"),
    (r"\text{(C)}", "C"),
    ("True", "true"),
    (r"2 \sqrt{3}", r"2\sqrt{3}"),
    ("1/0", "1/0"),
    # decoration that is the whole answer
    ("*", " * "),
]
DIFFERENT = [
    ("5", "6"),
    ("", "5"),
    ("", ""),
    ("1 2", "12"),
    ("0.333", "1/3"),
    ("1,00", "100"),
    ("x", "X"),
    ("[1,2)", "(1,2)"),
    ("(1,2)", "(1,2,3)"),
    ("5 or 6", "5"),
    (r"\sqrt{4}", "2"),
    ("1e3", "1000"),
    ("1/-0", "0"),
    # a sum is no mixed number
    ("-1 -1/2", "-0.5"),
    (r"1\frac{-1}{2}", "0.5"),
    # lists are no numbers, nor are digits in other groups
    ("10, 000", r"10,\!000"),
    (r"1\,234,567", "1234567"),  # elsewhere 1234.567
    (r"\{1,234\}", r"\{1,\!234\}"),
]


SIGNED = (
    r"{}{}/{}", r"{}({})/({})", r"{}\frac{{{}}}{{{}}}", r"{} \dfrac{{ {} }}{{ {} }}",
    r"{}({}/{})", r"{}\left(\tfrac{{{}}}{{{}}}\right)", r"{}\frac{{({})}}{{({})}}",
)  # fmt: skip


@settings(max_examples=50)
@given(
    st.sampled_from(SIGNED),
    st.tuples(*[st.sampled_from(["", "+", "-", "- ", "−"])] * 3),
    st.integers(1, 30),
    st.integers(1, 30),
)
def test_a_sign_counts_in_every_position(form, signs, over, under):
    text = form.format(signs[0], f"{signs[1]}{over}", f"{signs[2]}{under}")
    is_negative = sum(sign[:1] in ("-", "−") for sign in signs if sign) % 2
    assert is_equivalent(text, f"{'-' * is_negative}{over}/{under}"), text
    assert not is_equivalent(text, f"{'-' * (1 - is_negative)}{over}/{under}"), text


@pytest.mark.parametrize(("answer", "truth"), SAME)
def test_equivalent_answers(answer, truth):
    assert is_equivalent(answer, truth)
    assert is_equivalent(truth, answer)


@pytest.mark.parametrize(("answer", "truth"), DIFFERENT)
def test_different_answers(answer, truth):
    assert not is_equivalent(answer, truth)
    assert not is_equivalent(truth, answer)


numbers = st.fractions(-5000, 5000, max_denominator=60)


def spell(number, style):
    sign, size = "-" if number < 0 else "", abs(number)
    whole, rest = divmod(size.numerator, size.denominator)
    return {
        "slash": f"{number.numerator} / {number.denominator}",
        "latex": rf"${sign}\dfrac{{{size.numerator}}}{{{size.denominator}}}$",
        "mixed": rf"{sign}{whole}\frac{{{rest}}}{{{size.denominator}}}",
        "boxed": rf"\boxed{{{number}}}",
        "commas": f"{number.numerator:,}/{number.denominator:,}",
        "zeros": f"{sign}00{size.numerator}/{size.denominator}.0",
    }[style]


styles = st.sampled_from(["slash", "latex", "mixed", "boxed", "commas", "zeros"])


@settings(max_examples=60)
@given(numbers, numbers, styles, styles)
def test_numbers_are_compared_by_value(first, second, style, other_style):
    assert is_equivalent(spell(first, style), spell(first, other_style))
    assert is_equivalent(spell(first, style), spell(second, other_style)) == (first == second)


THOUSANDS = [
    *(",", "{,}", r",\!", r",\!\!", r", \! ", r"{,}\!", r"\!,", r"\!,\!"),
    *(r"\,", r"{\,}", r"\;", r"\:", r"\!", r"\ ", "~", r"\thinspace ", r"\, "),
    *(" ", "\u00a0", "\u2009", "\u202f"),
]
AROUND = ["{}", "${}$", r"\(+{}\)", r"\boxed{{{}}}.", r"\$ {}", r"${}\%$", r"{}\text{{ cm}}"]
separators, decorations = st.sampled_from(THOUSANDS), st.sampled_from(AROUND)
wholes = st.one_of(st.integers(0, 10**7), st.integers(0, 10**15))


@settings(max_examples=80)
@given(wholes, wholes, separators, separators, decorations, decorations)
def test_thousands_are_one_number_in_every_spelling(first, second, left, right, around, other):
    spelled = around.format(f"{first:,}".replace(",", left))
    assert is_equivalent(spelled, str(first)), spelled
    assert is_equivalent(str(first), spelled), spelled
    assert is_equivalent("-" + f"{first:,}".replace(",", left), str(-first))
    again = other.format(f"{first:,}".replace(",", right))
    assert is_equivalent(spelled, again), (spelled, again)
    different = other.format(f"{second:,}".replace(",", right))
    assert is_equivalent(spelled, different) == (first == second), (spelled, different)


@settings(max_examples=80)
@given(st.text("()[]{},\\boxedfrac0123/.-+=%$^ \ncm", max_size=40))
def test_no_text_fails_and_nonempty_text_equals_itself(text):
    assert is_equivalent(text, text) or not is_equivalent(text, "5")


def test_degenerate_output_takes_linear_time():
    start = time.process_time()
    pieces = ("\\boxed{", "((((", "\\frac", "1,", "{", "9", "\\text{", "1 234", "1,\\!", "1{,}234")
    for piece in pieces:
        text = piece * (200_000 // len(piece))
        is_equivalent(text, "5")
        remove_thousands_separators(text)
        is_equivalent(piece * (200 // len(piece)), "5")
    assert time.process_time() - start < 5


def test_answer_lines():
    assert extract_math_answer("Answer: 3 \nAnswer: 4 apples\nend") == "4 apples"
    assert extract_math_answer("My ANSWER:\n\n 4") == "4"
    assert extract_math_answer("Answer:") == ""
    assert extract_math_answer("The answers: 4") is None
    assert extract_math_answer("4") is None


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("Answer: 33\nNo.\nAnswer: $34$.", 1.0),
        ("Answer: 34\nNo.\nAnswer: 33", -1.0),
        ("**Answer**: **34**", 1.0),
        ("The final answer:\n34", 1.0),
        ("Answer: \\boxed{34.0}", 1.0),
        ("34", -1.0),
        ("Answer: 34 or 35", -1.0),
        (r"Answer: I do not know, \boxed{34}", -1.0),
    ],
)
def test_math_correctness(response, score):
    assert compute_math_correctness(response, "34") == score
    assert compute_math_correctness(response, ("7", "34")) == score
    assert compute_math_correctness(response, ()) == -1.0
