"""Every field of every family's config.json, set to what it cannot be: a model or one line."""

import copy
import dataclasses
import json
from pathlib import Path

import pytest

from jaxrl.extras.dense.encoders import read_encoder
from jaxrl.models.architecture import Architecture
from jaxrl.models.registry import read_model

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDERS = (
    *("qwen2_tied", "qwen2_old_spelling", "qwen2_yarn_old_spelling", "qwen3_untied", "qwen3_yarn"),
    *("qwen3_moe_mixed", "qwen2_5_vl", "qwen3_vl", "encoder_bge"),
    *("llama3_biased", "mistral_old_spelling"),
)
WRONG = (
    *(-1, 0, 10**12, 10**30, 10**400, -0.5, 1.5, float("nan"), float("inf"), float("-inf")),
    *(True, False, "5", "x" * 10_000, "a\nb\x1b[2J", [], [1], ["x"], [[[]]], {}, {"a": [1]}, None),
)
NEVER_NUMBERS = (-1, 10**30, 10**400, -0.5, float("nan"), float("inf"), float("-inf"), True, "5")
"""What no number of a configuration is, among the values above."""
NEVER_NUMBERS = (*NEVER_NUMBERS, [], [1], {"a": [1]})
LLAMA3 = {
    "rope_type": "llama3",
    **{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 128,
}


def fields_of(name):
    fields = json.loads((GOLDEN / name / "config.json").read_text(encoding="utf-8"))
    if name == "qwen3_untied":  # a setting of every kind of scaling is in one of the files
        fields["rope_scaling"] = LLAMA3
    return fields


def places(fields, before=()):
    """The way to each value, also inside of others."""
    pairs = fields.items() if isinstance(fields, dict) else enumerate(fields)
    for key, value in pairs:
        yield (*before, key)
        if isinstance(value, dict | list):
            yield from places(value, (*before, key))


def held(fields, place):
    for key in place:
        fields = fields[key]
    return fields


def changed(fields, place, value):
    fields = copy.deepcopy(fields)
    held(fields, place[:-1])[place[-1]] = value
    return fields


def read(folder, fields):
    """The model, or the one line that says why there is none."""
    (folder / "config.json").write_text(json.dumps(fields))
    reader = read_encoder if fields.get("model_type") == "bert" else read_model
    told = ""
    try:
        return reader(folder)
    except ValueError as error:
        told = str(error)
    assert str(folder / "config.json") in told
    assert told.isprintable()
    assert len(told) < 1000
    return None


def can_be_computed(model, known):
    """Shapes of all parameters; those of a like model are traced once."""
    if model in known:
        return
    known.add(model)
    assert model.abstract_params()
    if isinstance(model, Architecture):
        assert model.memory_terms(1).activations > 0
        assert json.dumps(model.hf_config(), allow_nan=False)
        assert type(model).from_dict(model.hf_config()) == model


@pytest.mark.parametrize("name", FOLDERS)
def test_any_value_of_any_field_makes_a_model_or_one_line(name, tmp_path):
    fields, known = fields_of(name), set()
    can_be_computed(read(tmp_path, fields), known)
    for place in places(fields):
        for value in WRONG:
            model = read(tmp_path, changed(fields, place, value))
            if model is not None:
                can_be_computed(model, known)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_number_that_is_read_is_never_nonsense(name, tmp_path):
    fields = fields_of(name)
    model = read(tmp_path, fields)
    taken, num_read = [], 0
    for place in places(fields):
        value = held(fields, place)
        if type(value) not in (int, float):
            continue
        others = (read(tmp_path, changed(fields, place, one)) for one in (value + 1, 2 * value, 3))
        if all(other == model for other in others):
            continue  # nobody reads it
        num_read += 1
        for wrong in NEVER_NUMBERS:
            if read(tmp_path, changed(fields, place, wrong)) is not None:
                taken.append((place, wrong))
    assert num_read >= 7
    assert taken == []


@pytest.mark.parametrize(
    "name", ["qwen3_moe_mixed", "qwen2_5_vl", "qwen3_vl", "qwen3_untied", "llama3_biased"]
)
def test_a_switch_that_is_read_is_true_or_false(name, tmp_path):
    fields = {"attention_bias": False, **fields_of(name)}
    switches = [place for place in places(fields) if isinstance(held(fields, place), bool)]
    model, num_read = read(tmp_path, fields), 0
    for place in switches:
        other = read(tmp_path, changed(fields, place, not held(fields, place)))
        if other == model:
            continue
        num_read += 1
        for wrong in ("false", 0, 1, [], {}, 0.0):
            assert read(tmp_path, changed(fields, place, wrong)) is None, (place, wrong)
    assert num_read >= 1


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3_untied", {"num_hidden_layers": -1}),
        ("qwen3_untied", {"hidden_size": 0}),
        ("qwen3_untied", {"num_key_value_heads": 4}),
        ("qwen3_untied", {"head_dim": 7}),
        ("qwen3_untied", {"rope_scaling": {**LLAMA3, "rope_type": ["llama3"]}}),
        ("qwen2_tied", {"hidden_size": 1, "num_attention_heads": 2, "head_dim": None}),
        (
            "qwen3_moe_mixed",
            {"num_hidden_layers": 4000, "num_experts": 4000, "num_local_experts": 4000},
        ),
        ("encoder_bge", {"num_attention_heads": 5}),
    ],
)
def test_numbers_that_do_not_go_together(name, changes, tmp_path):
    assert read(tmp_path, fields_of(name) | changes) is None


def test_the_places_of_a_nested_object():
    assert [*places({"a": 1, "b": {"c": [2]}})] == [("a",), ("b",), ("b", "c"), ("b", "c", 0)]


def test_models_can_be_compared():
    model = read_model(GOLDEN / "qwen3_untied")
    assert hash(model) == hash(dataclasses.replace(model))
