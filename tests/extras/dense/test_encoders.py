"""Encoders against `transformers`, and the settings in their folders."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxrl.extras.dense.encoder import Encoder, read_tokenizer
from jaxrl.extras.dense.encoders import read_embedding_model

GOLDEN = Path(__file__).parents[2] / "golden"
TEXTS = json.loads((GOLDEN / "encoder_texts.json").read_text(encoding="utf-8"))
SETTINGS = {
    "encoder_e5": {"query_prefix": "query: ", "passage_prefix": "passage: "},
    "encoder_bge": {"pooling": "first", "query_prefix": "", "passage_prefix": ""},
    "encoder_qwen3": {},
}


def encoder(name, dtype="float32", **settings):
    model = read_embedding_model(GOLDEN / name, **{**SETTINGS[name], **settings})
    return Encoder(model, GOLDEN / name, jax.devices()[:1], dtype=dtype)


@pytest.mark.parametrize("name", SETTINGS)
def test_vectors_are_those_of_transformers(name, quick_compilation):
    expected = np.load(GOLDEN / name / "golden.npz")
    made = encoder(name)
    for kind in ("queries", "passages"):
        actual = getattr(made, f"encode_{kind}")(TEXTS[kind], batch_tokens=64)
        np.testing.assert_allclose(actual, expected[kind], atol=1e-4, rtol=0)
        # The texts differ, or any vector would do.
        assert np.abs(expected[kind][0] - expected[kind][1]).max() > 0.01
        # Whatever else is in a batch, and however many.
        for index, text in enumerate(TEXTS[kind]):
            [alone] = getattr(made, f"encode_{kind}")([text], batch_tokens=64)
            np.testing.assert_array_equal(alone, actual[index])


@pytest.mark.parametrize("name", ["encoder_e5", "encoder_qwen3"])
def test_bfloat16_is_close(name, quick_compilation):
    expected = np.load(GOLDEN / name / "golden.npz")["passages"]
    actual = encoder(name, "bfloat16").encode_passages(TEXTS["passages"], batch_tokens=64)
    assert actual.dtype == np.float32
    assert (np.sum(actual * expected, axis=1) > 0.998).all()


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_are_those_of_transformers(name):
    from transformers import AutoTokenizer

    model = read_embedding_model(GOLDEN / name, **SETTINGS[name])
    theirs = AutoTokenizer.from_pretrained(GOLDEN / name)
    ours = read_tokenizer(GOLDEN / name, model)
    for text in (*TEXTS["queries"], *TEXTS["passages"], "", "[SEP] <|endoftext|>"):
        expected = theirs(text, truncation=True, max_length=model.max_tokens)["input_ids"]
        assert ours.encode(text).ids == expected


def folder_with(tmp_path, name, **files):
    shutil.copytree(GOLDEN / name, tmp_path / name)
    for file, content in files.items():
        path = tmp_path / name / f"{file}.json"
        path.write_text(json.dumps(content), encoding="utf-8")
    return tmp_path / name


def test_the_folder_says_how_it_pools(tmp_path):
    e5 = read_embedding_model(GOLDEN / "encoder_e5", **SETTINGS["encoder_e5"])
    assert (e5.pooling, e5.normalize, e5.max_tokens, e5.width) == ("mean", True, 48, 32)
    qwen = read_embedding_model(GOLDEN / "encoder_qwen3", max_tokens=30)
    assert (qwen.pooling, qwen.max_tokens) == ("last", 30)
    assert (qwen.query_prefix, qwen.passage_prefix) == ("Instruct: Find it\nQuery:", "")
    folder = folder_with(tmp_path, "encoder_e5", config_sentence_transformers={
        "prompts": {"query": "q: ", "document": ""}, "similarity_fn_name": "dot",
    }, modules=[{"type": "sentence_transformers.models.Transformer", "path": ""}])  # fmt: skip
    dot = read_embedding_model(folder, pooling="first")
    assert (dot.query_prefix, dot.passage_prefix, dot.normalize) == ("q: ", "", False)
    assert read_embedding_model(folder, pooling="mean", query_prefix="").query_prefix == ""


def test_qwen_has_its_instruction_where_its_folder_has_none(tmp_path):
    folder = folder_with(tmp_path, "encoder_qwen3", config_sentence_transformers={"prompts": {}})
    prefix = read_embedding_model(folder).query_prefix
    assert prefix.startswith("Instruct: Given a web search")
    assert prefix.endswith("\nQuery:")


def test_what_is_not_known_has_to_be_said():
    with pytest.raises(ValueError, match=r"dense\.pooling to 'mean'"):
        read_embedding_model(GOLDEN / "encoder_bge", query_prefix="", passage_prefix="")
    with pytest.raises(ValueError, match=r"dense\.query_prefix to 'query: ' \(E5\)"):
        read_embedding_model(GOLDEN / "encoder_e5", passage_prefix="")
    with pytest.raises(FileNotFoundError, match=r"dense\.encoder is '.*none', which is not a"):
        read_embedding_model(GOLDEN / "none")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"modules": [{"type": "a.models.Dense", "path": "2"}]}, "module Dense, which is not"),
        ({"config": {"model_type": "xlm-roberta"}}, "model_type 'xlm-roberta' is not an encoder"),
        ({"config": {"model_type": "bert"}}, "'hidden_size' is None; expected a whole number"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path, files, message):
    folder = folder_with(tmp_path, "encoder_e5", **files)
    with pytest.raises(ValueError, match=message):
        read_embedding_model(folder, **SETTINGS["encoder_e5"])


def test_weights_and_tokenizer_are_those_of_the_model(tmp_path):
    model = read_embedding_model(GOLDEN / "encoder_e5", **SETTINGS["encoder_e5"])
    device = jax.devices()[:1]
    other = folder_with(tmp_path, "encoder_bge")
    with pytest.raises(ValueError, match=r"has shape \[96, 24\]; config.json requires \[96, 32\]"):
        Encoder(model, other, device, dtype="float32")
    shutil.copy(GOLDEN / "encoder_qwen3" / "tokenizer.json", other)
    with pytest.raises(ValueError, match="has 257 ids, but the model has 96"):
        Encoder(model, other, device, dtype="float32")
    (other / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"holds no tokenizer\.json"):
        Encoder(model, other, device, dtype="float32")
