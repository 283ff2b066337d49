"""JSON from outside: deep or damaged values become one short line."""

import pytest

from jaxrl.utils.json_io import MAX_DEPTH, parse_json, read_object
from tests.damage import JSON_BOMBS


@pytest.mark.parametrize("name", [*JSON_BOMBS][:-1])
def test_malformed_json_is_an_error_of_one_line(name):
    for text in (JSON_BOMBS[name], JSON_BOMBS[name].decode("latin-1")):
        message = r"^here is (nested too deeply|not valid JSON)"
        with pytest.raises(ValueError, match=message) as raised:
            parse_json(text, "here")
        assert len(str(raised.value)) < 300
        assert "\n" not in str(raised.value)


def test_depth_is_bounded(tmp_path):
    assert parse_json("[" * MAX_DEPTH + "]" * MAX_DEPTH, "x")
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "x")
    (tmp_path / "a").write_text("[1]")
    with pytest.raises(ValueError, match=r"/a contains a list; expected a JSON object"):
        read_object(tmp_path / "a")
