import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.envs.rewards.math_answers import (
    compute_math_correctness,
    extract_math_answer,
    is_equivalent,
    join_thousands,
)
from jaxrl.envs.rewards.rules import extract_last_boxed

SAME = [
    # the same number
    ("5", "5.0"),
    ("5.", "5"),
    (".5", "0.50"),
    ("007", "7"),
    ("+3", "3"),
    ("−3", "-3"),
    ("- 3", "-3"),
    ("-0", "0"),
    ("1,234,567", "1234567"),
    ("1{,}000.5", "1000.5"),
    ("1/2", "0.5"),
    (r"\frac{1}{2}", "2/4"),
    (r"\dfrac12", r"\tfrac{1}{2}"),
    (r"-\frac{3}{4}", "-0.75"),
    (r"\frac{-3}{4}", "-3/4"),
    (r"1\frac12", "3/2"),
    ("3 1/2", "3.5"),
    (r"\frac{1}{-2}", "-0.5"),
    (r"\frac{-1}{-2}", "0.5"),
    (r"-\frac{1}{-2}", "0.5"),
    (r"-\frac{-1}{-2}", "-0.5"),
    (r"\dfrac1{-2}", "-1/2"),
    (r"\frac{-1}2", "-1/2"),
    (r"\frac{1}{ − 2}", "-0.5"),
    (r"\frac{(-1)}{(2)}", "-0.5"),
    ("1/-2", "-0.5"),
    ("-1/-2", "0.5"),
    ("1/(-2)", "-0.5"),
    ("(-1)/2", "-0.5"),
    ("(-1)/(-2)", "0.5"),
    ("-(1/2)", "-0.5"),
    ("-(-1/2)", "0.5"),
    ("-(0.5)", "-0.5"),
    ("+(1/2)", "0.5"),
    (r"-\left(\frac{1}{2}\right)", "-0.5"),
    (r"-1\frac12", "-3/2"),
    ("-3 1/2", "-3.5"),
    (r"x = \frac{3}{-4}", "-0.75"),
    (r"(\frac{1}{-2}, -(3))", "(-0.5, -3)"),
    # canonically equivalent characters
    ("Cafe\u0301", "Caf\u00e9"),
    ("\\text{e\u0301}", "\u00e9"),
    ("\u212b", "\u00c5"),
    # what stands around it
    (" $5$ ", "5"),
    (r"\(5\)", "5"),
    (r"\boxed{5}.", "5"),
    (r"The answer is \boxed{\frac{1}{2}}.", "1/2"),
    ("**5**", "5"),
    ("x = 5", "5"),
    (r"50\%", "50"),
    ("50 %", "50"),
    (r"\$1,234.50", "1234.5"),
    (r"\$32,\!348", "32348"),
    (r"1\,234.5", "1234.5"),
    (r"x = 12\,000\text{ cm}", "12000"),
    (r"\frac{10{,}000}{3}", "10,000/3"),
    (r"10\,000/3", "10000/3"),
    (r"(1,\!000, 2)", "(1000, 2)"),
    ("2 100/300", "7/3"),  # a mixed number
    (r"90^\circ", "90"),
    ("90°", "90"),
    (r"90^{\circ}", "90"),
    (r"5\text{ cm}", "5"),
    ("5 cm^2", "5"),
    ("5cm^{2}", "5"),
    ("12 square feet.", "12"),
    # lists and other answers
    ("(1, 0.5)", r"\left(1,\frac{1}{2}\right)"),
    ("1,2", "1, 2.0"),
    ("[1, 2)", "[1,2)"),
    ("(C)", "C"),
    (r"\text{(C)}", "C"),
    ("True", "true"),
    (r"2 \sqrt{3}", r"2\sqrt{3}"),
    (r"\text{Monday}", "Monday"),
    (r"\{1, 2\}", r"\{1,2\}"),
    ("1/0", "1/0"),
    # what is else ignored around an answer, as the answer
    ("*", " * "),
    ("A", "(A)."),
    (".", "."),
]
DIFFERENT = [
    ("5", "6"),
    ("", "5"),
    ("", ""),
    ("*", "~"),
    ("", "*"),
    ("1 2", "12"),
    ("0.333", "1/3"),
    ("1,00", "100"),
    ("x", "X"),
    ("2x", "x2"),
    ("[1,2)", "(1,2)"),
    ("(1,2)", "(2,1)"),
    ("(1,2)", "(1,2,3)"),
    ("5 or 6", "5"),
    ("5x", "5"),
    ("-5", "5"),
    (r"\sqrt{4}", "2"),
    ("1e3", "1000"),
    (r"\frac{1}{-2}", "0.5"),
    ("-1/-2", "-0.5"),
    ("1/-0", "0"),
    # a sum is no mixed number
    ("-1 -1/2", "-0.5"),
    (r"1\frac{-1}{2}", "0.5"),
    # lists are no numbers, nor are digits that are grouped otherwise
    ("10, 0", r"10,\!000"),
    ("10, 000", r"10,\!000"),
    (r"1,\!00", "100"),
    (r"1\,2", "12"),
    (r"1\,2345", "12345"),
    (r"1234\,567", "1234567"),
    (r"1\,234,567", "1234567"),  # 1234.567 elsewhere
    (r"1 234,567", "1234567"),
    (r"0.123\,456", "123456"),
    (r"\{1,234\}", r"\{1,\!234\}"),
]


SIGNED = (
    r"{}{}/{}", r"{}({})/({})", r"{}\frac{{{}}}{{{}}}", r"{} \dfrac{{ {} }}{{ {} }}",
    r"{}({}/{})", r"{}\left(\tfrac{{{}}}{{{}}}\right)", r"{}\frac{{({})}}{{({})}}",
)  # fmt: skip


@given(
    st.sampled_from(SIGNED),
    st.tuples(*[st.sampled_from(["", "+", "-", "- ", "−"])] * 3),
    st.integers(1, 30),
    st.integers(1, 30),
)
def test_a_sign_counts_wherever_it_stands(form, signs, over, under):
    text = form.format(signs[0], f"{signs[1]}{over}", f"{signs[2]}{under}")
    is_negative = sum(sign[:1] in ("-", "−") for sign in signs if sign) % 2
    assert is_equivalent(text, f"{'-' * is_negative}{over}/{under}"), text
    assert not is_equivalent(text, f"{'-' * (1 - is_negative)}{over}/{under}"), text


@pytest.mark.parametrize(("answer", "truth"), SAME)
def test_same(answer, truth):
    assert is_equivalent(answer, truth)
    assert is_equivalent(truth, answer)


@pytest.mark.parametrize(("answer", "truth"), DIFFERENT)
def test_different(answer, truth):
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


@settings(max_examples=200)
@given(numbers, numbers, styles, styles)
def test_numbers_are_compared_by_value(one, other, style, other_style):
    assert is_equivalent(spell(one, style), spell(one, other_style))
    assert is_equivalent(spell(one, style), spell(other, other_style)) == (one == other)


THOUSANDS = [
    *(",", "{,}", r",\!", r",\!\!", r", \! ", r"{,}\!", r"\!,", r"\!,\!"),
    *(r"\,", r"{\,}", r"\;", r"\:", r"\!", r"\ ", "~", r"\thinspace ", r"\, "),
    *(" ", "\u00a0", "\u2009", "\u202f"),
]
AROUND = ["{}", "${}$", r"\(+{}\)", r"\boxed{{{}}}.", r"\$ {}", r"${}\%$", r"{}\text{{ cm}}"]
wholes = st.one_of(st.integers(0, 10**7), st.integers(0, 10**15))


@settings(max_examples=300)
@given(wholes, wholes, *[st.sampled_from(THOUSANDS)] * 2, *[st.sampled_from(AROUND)] * 2)
def test_thousands_are_one_number_in_all_spellings(one, other, left, right, around, other_around):
    spelt = around.format(f"{one:,}".replace(",", left))
    assert is_equivalent(spelt, str(one)), spelt
    assert is_equivalent(str(one), spelt), spelt
    assert is_equivalent("-" + f"{one:,}".replace(",", left), str(-one))
    again = other_around.format(f"{one:,}".replace(",", right))
    assert is_equivalent(spelt, again), (spelt, again)
    differs = other_around.format(f"{other:,}".replace(",", right))
    assert is_equivalent(spelt, differs) == (one == other), (spelt, differs)


@given(st.integers(1000, 10**12), st.sampled_from(THOUSANDS), st.sampled_from([", ", ",\\ ", "; "]))
def test_a_list_is_no_number_with_thousands(number, separator, between):
    pieces = f"{number:,}".split(",")
    for listed in (between.join(pieces), between.join(str(int(piece)) for piece in pieces)):
        assert not is_equivalent(listed, f"{number:,}".replace(",", separator))
        assert not is_equivalent(listed, str(number))


@given(st.integers(-(10**9), 10**9), st.integers(0, 6))
def test_decimals_are_exact(digits, places):
    value = Fraction(digits, 10**places)
    text = f"{digits:+,}" if places == 0 else f"{digits / 10**places:.{places}f}"
    assert is_equivalent(text, f"{value.numerator}/{value.denominator}")


@settings(max_examples=300)
@given(st.text("()[]{},\\boxedfrac0123/.-+=%$^ \ncm", max_size=40))
def test_no_text_breaks_it_and_all_text_equals_itself(text):
    again = is_equivalent(text, text)
    assert again or not is_equivalent(text, "5")


def test_what_a_broken_model_writes_is_read_fast():
    start = time.process_time()
    for piece in (
        "\\boxed{",
        "((((",
        "Answer: ",
        "answer",
        "\\frac",
        "1,",
        "{",
        "9",
        "\\text{",
        "5 ",
        "1 234",
        "1,\\!",
        "\\!",
        "1{,}234",
    ):
        text = piece * (200_000 // len(piece))
        extract_last_boxed(text)
        extract_math_answer(text)
        is_equivalent(text, "5")
        join_thousands(text)
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
        ("Let x be 2.\nAnswer: 34", 1.0),
        ("Answer: 33\nNo.\nAnswer: $34$.", 1.0),
        ("Answer: 34\nNo.\nAnswer: 33", -1.0),
        ("answer : 34 \n", 1.0),
        ("**Answer:** 34", 1.0),
        ("**Answer**: **34**", 1.0),
        ("The final answer:\n34", 1.0),
        ("Answer: \\boxed{34.0}", 1.0),
        ("34", -1.0),
        ("Answer:", -1.0),
        ("Answer: 34 or 35", -1.0),
        (r"Answer: I do not know, \boxed{34}", -1.0),
        ("", -1.0),
    ],
)
def test_math_correctness(response, score):
    assert compute_math_correctness(response, "34") == score
    assert compute_math_correctness(response, ("7", "34")) == score
    assert compute_math_correctness(response, ()) == -1.0
