"""Foreign text on a terminal or a page: nothing is obeyed, and nothing is hidden."""

from jaxrl.utils.text import escape_control_chars

HALF = "\udc80"


def test_control_characters_read_as_their_codes():
    assert escape_control_chars(f"a\tb\n{HALF} é 😀") == "a\tb\n\ufffd é 😀"
    assert escape_control_chars("\x1b]0;title\x07\x1b[2J\x9b31m\r\x7f\0") == (
        r"\x1b]0;title\x07\x1b[2J\x9b31m\r\x7f\x00"
    )


def test_what_turns_or_hides_text_reads_as_its_code():
    assert (
        escape_control_chars("user\u202egnp.exe\u2066x\u2069") == r"user\u202egnp.exe\u2066x\u2069"
    )
    assert escape_control_chars("p\u200bay\ufeffpal \U000e0041") == r"p\u200bay\ufeffpal \U000e0041"
    assert escape_control_chars("one\u2028two\u2029") == r"one\u2028two\u2029"


def test_other_writing_stays():
    text = "مرحبا שלום 你好 ñ नमस्ते 𝄞 ±½ “quoted” – …"
    assert escape_control_chars(text) == text
