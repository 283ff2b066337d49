"""Foreign text on a terminal or a page: nothing is executed, and nothing is hidden."""

from jaxrl.utils.text import escape_control_chars


def test_control_characters_are_shown_as_codes():
    assert escape_control_chars("a\tb\n\udc80 é 😀") == "a\tb\n\ufffd é 😀"
    text = "\x1b]0;title\x07\x1b[2J\x9b31m\r\x7f\0"
    assert escape_control_chars(text) == r"\x1b]0;title\x07\x1b[2J\x9b31m\r\x7f\x00"


def test_characters_that_reorder_or_hide_text_are_shown_as_codes():
    text = "user\u202egnp.exe\u2066x\u2069 p\u200bay\ufeffpal \U000e0041 one\u2028two"
    codes = r"user\u202egnp.exe\u2066x\u2069 p\u200bay\ufeffpal \U000e0041 one\u2028two"
    assert escape_control_chars(text) == codes


def test_text_of_any_script_is_unchanged():
    text = "مرحبا שלום 你好 ñ नमस्ते 𝄞 ±½ “quoted” – …"
    assert escape_control_chars(text) == text
