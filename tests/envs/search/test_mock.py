"""Fixed texts by keyword, from a mapping or a file."""

import json

import pytest

from configs import debug_tiny
from jaxrl.builders.environment import build_search_engine
from jaxrl.builders.fingerprints import compute_search_fingerprints
from jaxrl.builders.validation import validate

DOCUMENTS = {"Paris": "Paris is in France.", "straße": "A street."}


def mock(**settings):
    config = debug_tiny.get_config()
    config.search.engine = "mock"
    config.update_from_flattened_dict({f"search.mock.{name}": x for name, x in settings.items()})
    return config


def search(config):
    return build_search_engine(validate(config), print, None, print)


@pytest.mark.parametrize("is_file", [False, True])
def test_a_query_finds_the_texts_of_its_keywords_in_any_case(tmp_path, is_file):
    (tmp_path / "texts.json").write_text(json.dumps(DOCUMENTS))
    engine = search(
        mock(path=str(tmp_path / "texts.json")) if is_file else mock(documents=DOCUMENTS)
    )
    assert engine.run("where is PARIS?") == "Paris is in France."
    assert engine.run("a STRASSE in paris") == "Paris is in France.\nA street."
    assert engine.run(" Where is  Rome?") == "No information found for:  Where is  Rome?"


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"documents": {"paris": 3}},
        {"documents": {" ": "everything"}},
    ],
)
def test_other_settings_are_refused(settings):
    with pytest.raises(ValueError, match=r"config\.search\.mock.*set exactly one of them, with"):
        search(mock(**settings))


def test_a_changed_file_has_another_fingerprint(tmp_path):
    prints = []
    for text in ("first", "second"):
        (tmp_path / "texts.json").write_text(json.dumps({"a": text}))
        config = validate(mock(path=str(tmp_path / "texts.json")), needs_data=False)
        prints.append(compute_search_fingerprints(config)["search.mock.path"])
    assert prints[0] != prints[1]
