"""A model of random weights for texts of one's own."""

import json

import pytest

from examples import tiny_model
from jaxrl.models.hf_weights import load_hf
from jaxrl.tokenizer import Tokenizer


def test_texts_of_records_become_whole_tokens(tmp_path, capsys):
    record = {"question": "Who dug Avington?", "answers": ["Kerrigan", "Kerrigan"], "year": 1842}
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n\n")
    (tmp_path / "b.txt").write_text("Who was Kerrigan?\n")
    texts = f"{tmp_path / 'a.jsonl'},{tmp_path / 'b.txt'}"
    tiny_model.main([f"--texts={texts}", f"--out={tmp_path / 'tiny'}"])
    tokenizer = Tokenizer.from_folder(tmp_path / "tiny")
    assert len(tokenizer.encode("Kerrigan")) == 1
    assert len(tokenizer.encode("Harrigan")) > 1  # in none of the texts
    assert tokenizer.render_prompt([{"role": "user", "content": "Who?"}])
    assert capsys.readouterr().out.endswith(f"{tokenizer.num_tokens} tokens of 4 texts\n")
    embedding = load_hf(tmp_path / "tiny")["embed"]["embedding"]
    assert embedding.shape[0] >= tokenizer.num_tokens
    tiny_model.main([f"--texts={texts}", f"--out={tmp_path / 'other'}", "--seed=1"])
    assert (load_hf(tmp_path / "other")["embed"]["embedding"] != embedding).any()


@pytest.mark.parametrize(("content", "told"), [(None, "No such file"), ("{", "a.jsonl:1 is not")])
def test_files_that_cannot_be_read(content, told, tmp_path):
    if content:
        (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(SystemExit, match=told):
        tiny_model.main([f"--texts={tmp_path / 'a.jsonl'}", f"--out={tmp_path / 'tiny'}"])
