"""JSON from outside: what is too deep or damaged is told in one line."""

import json

import pytest

from jaxrl.utils.json_io import MAX_DEPTH, parse_json, read_object
from tests.damage import JSON_BOMBS


@pytest.mark.parametrize("bomb", [*JSON_BOMBS][:-1])
def test_what_cannot_be_read_is_one_line(bomb):
    for text in (JSON_BOMBS[bomb], JSON_BOMBS[bomb].decode("latin-1")):
        with pytest.raises(
            ValueError, match=r"^here is (nested too deeply|not valid JSON)"
        ) as told:
            parse_json(text, "here")
        assert len(str(told.value)) < 300
        assert "\n" not in str(told.value)


def test_the_depth_that_is_read_by_hand(tmp_path):
    def nested(depth):
        return "[" * depth + "]" * depth

    assert parse_json(nested(MAX_DEPTH), "x")
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(nested(MAX_DEPTH + 1), "x")
    assert parse_json(json.dumps([[1]] * 1000), "x") == [[1]] * 1000  # many, and not deep
    (tmp_path / "a").write_text("[1]")
    with pytest.raises(ValueError, match=r"/a holds a list; expected a JSON object"):
        read_object(tmp_path / "a")
