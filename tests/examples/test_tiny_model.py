"""A model with random weights and a tokenizer for the user's texts."""

import json

from examples import tiny_model
from jaxrl.builders.validation import validate
from jaxrl.config import default_config
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.envs.tools.base import build_chat_schema
from jaxrl.envs.tools.functions import FunctionTool
from jaxrl.models.hf_weights import load_hf
from tests.helpers import build


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
    assert capsys.readouterr().out.endswith(f"{tokenizer.num_tokens} tokens from 4 texts\n")
    embedding = load_hf(tmp_path / "tiny")["embed"]["embedding"]
    assert embedding.shape[0] >= tokenizer.num_tokens
    tiny_model.main([f"--texts={texts}", f"--out={tmp_path / 'other'}", "--seed=1"])
    assert (load_hf(tmp_path / "other")["embed"]["embedding"] != embedding).any()


def measure(bridge: str) -> str:
    """Measure a bridge.

    Args:
        bridge: Name of the bridge.
    """
    return f"{bridge} is 90 m long."


def test_a_run_of_the_tiny_model_needs_no_settings_but_paths(tmp_path):
    corpus, questions = tmp_path / "corpus.jsonl", tmp_path / "questions.jsonl"
    document = {"id": "d1", "title": "Avington Bridge", "text": "Ada Kerr designed it."}
    question = {"question": "Who designed the bridge at Avington?", "answers": ["Ada Kerr"]}
    corpus.write_text(json.dumps(document))
    questions.write_text(json.dumps(question))
    tiny_model.main([f"--texts={corpus},{questions}", f"--out={tmp_path / 'tiny'}"])
    config = default_config().lock()
    config.model.path = str(tmp_path / "tiny")
    config.tasks.train.source = config.tasks.eval.source = str(questions)
    config.search.local.corpus = str(corpus)
    config.env.search.protocol = "qwen"
    validate(config)
    tokenizer = build(config).tokenizer
    tools = [build_chat_schema(FunctionTool(measure))]
    ids = tokenizer.render_prompt([{"role": "user", "content": "How long is it?"}], tools)
    assert "measure(bridge): Measure a bridge." in tokenizer.decode(ids)
