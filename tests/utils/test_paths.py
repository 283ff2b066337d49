"""Paths that are suggested in place of one that does not exist."""

import pytest

from jaxrl.utils.paths import suggest_path


@pytest.mark.parametrize(
    ("missing", "suggested"),
    [
        ("my_data/trian.jsonl", "my_data/train.jsonl"),
        ("my_data/train.json", "my_data/train.jsonl"),
        ("my_data/train", "my_data/train.csv"),
        ("my_dta/train.jsonl", "my_data/train.jsonl"),
        ("my_dta/nothing_like_it", "my_data"),
    ],
)
def test_a_similar_path_is_suggested(tmp_path, monkeypatch, missing, suggested):
    (tmp_path / "my_data").mkdir()
    (tmp_path / "my_data" / "train.csv").touch()
    (tmp_path / "my_data" / "train.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    assert suggest_path(missing) == f" Did you mean {suggested!r}?"
    assert suggest_path("zebra") == suggest_path("a" * 5000) == ""
    assert suggest_path(tmp_path / missing) == f" Did you mean {str(tmp_path / suggested)!r}?"
