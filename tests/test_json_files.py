"""Files of JSON that are damaged or bombs: each reader refuses them, or does without."""

import shutil

import pytest

from jaxrl.config.schema import flat_json
from jaxrl.envs.search.recording import recorded_engines
from jaxrl.extras.dense.encoder import read_tokenizer
from jaxrl.extras.dense.encoders import read_embedding_model
from jaxrl.extras.lora.adapter import Adapter
from jaxrl.extras.lora.files import check_adapter
from jaxrl.extras.readers.tfds import tfds
from jaxrl.extras.view.reader import RunReader
from jaxrl.models.hf_weights import open_tensors, tensor_dtypes
from jaxrl.models.registry import read_model
from jaxrl.runtime.checkpoint import find_damage, read_newest_position, read_value
from jaxrl.runtime.history import read_history
from tests.damage import JSON_BOMBS
from tests.helpers import ROOT, TINY

UNREAD = "manifest.json: not what was written"
ENCODER = ROOT / "tests" / "golden" / "encoder_e5"


def refused(read):
    """A reader that refuses what it cannot read."""

    def check(folder):
        with pytest.raises(ValueError, match=r"^[^\n]+$") as told:
            read(folder)
        assert len(str(told.value)) < 1000

    return check


def equals(read, wanted):
    """A reader that does without what it cannot read."""

    def check(folder):
        assert read(folder) == wanted

    return check


def embedding(folder):
    return read_embedding_model(folder, query_prefix="", passage_prefix="")


def adapter(folder):
    (folder / "adapter_model.safetensors").touch()
    check_adapter(folder, Adapter(model=TINY, rank=1, alpha=1.0, targets=()))


def read_run(folder):
    reader = RunReader(folder, "run")
    reader.refresh()
    return reader


def says(folder):
    problems = read_run(folder).problems
    assert any("metrics.jsonl" in problem or "config.json" in problem for problem in problems)


READERS = {
    "config.json": [refused(read_model), refused(lambda f: flat_json(f / "config.json")), says],
    "adapter_config.json": [refused(adapter)],
    "model.safetensors.index.json": [refused(open_tensors)],
    "tensor_dtypes.json": [refused(lambda folder: tensor_dtypes(folder, TINY))],
    "modules.json": [refused(embedding)],
    "sentence_bert_config.json": [refused(embedding)],
    "config_sentence_transformers.json": [refused(embedding)],
    "1_Pooling/config.json": [refused(embedding)],
    "tokenizer.json": [refused(lambda folder: read_tokenizer(folder, embedding(ENCODER)))],
    "dataset_info.json": [refused(lambda folder: tfds(str(folder), "train", "config.x"))],
    "engine/engine.json": [equals(recorded_engines, [])],
    "7/position/metadata": [equals(read_newest_position, (7, {}))],
    "manifest.json": [
        equals(read_value, None),
        equals(lambda folder: find_damage(folder, 7).partition(" (")[0], UNREAD),
    ],
    "config_history.jsonl": [equals(lambda folder: read_history(folder)[0], [])],
    "metrics.jsonl": [says],
    "environment.json": [lambda folder: (folder / "eval").mkdir() or read_run(folder)],
    "eval/step_000007.json": [read_run],
}
"""Who reads a file of that name, in a folder of a model or of a run."""


@pytest.mark.parametrize("bomb", JSON_BOMBS)
@pytest.mark.parametrize("name", READERS)
def test_a_bomb_is_one_line(name, bomb, tmp_path):
    shutil.copytree(ENCODER, tmp_path, dirs_exist_ok=True)
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "model.safetensors").unlink()
    path.write_bytes(JSON_BOMBS[bomb] + b"\n")
    for check in READERS[name]:
        check(tmp_path)
