"""Import and export of Hugging Face checkpoints."""

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl.models import hf_weights
from jaxrl.models.decoder import init_params
from jaxrl.models.hf_weights import load_hf, open_hf, save_hf
from jaxrl.models.qwen import QwenConfig
from jaxrl.models.registry import read_architecture
from tests.helpers import ROOT, with_devices

pytestmark = pytest.mark.usefixtures("quick_compilation")

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = [
    "qwen2_old_spelling",
    "qwen2_tied",
    "qwen3_biased_bf16",
    "qwen3_moe_mixed",
    "qwen3_untied",
]
CONFIG = QwenConfig(
    vocab_size=12,
    width=8,
    mlp_width=6,
    num_layers=3,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    tie_embeddings=False,
    qkv_bias=False,
    output_bias=False,
    qk_norm=True,
    max_positions=64,
)


def read_tensors(folder):
    """Return every tensor of a folder as (dtype, shape, bytes)."""
    return {
        name: (str(array.dtype), array.shape, array.tobytes())
        for file in sorted(folder.glob("*.safetensors"))
        for name, array in load_file(file).items()
    }


def hash_files(folder):
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


@pytest.fixture
def hf_folder(tmp_path):
    """Return a copy of a model to change."""
    return Path(shutil.copytree(GOLDEN / "qwen3_untied", tmp_path / "hf"))


def rewrite(folder, change):
    """Apply `change` to the tensors of a folder with one file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_kernels_are_transposed():
    # HF stores [out, in]: our kernel's column j is its row j.
    folder = GOLDEN / "qwen2_tied"
    params = load_hf(folder)
    tensors = load_file(folder / "model.safetensors")
    q = params["blocks"]["attention"]["q"]
    assert q["kernel"].shape == (2, 48, 48)
    expected = tensors["model.layers.1.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(q["kernel"][1, :, 5], expected[5])
    np.testing.assert_array_equal(q["bias"][1], tensors["model.layers.1.self_attn.q_proj.bias"])
    np.testing.assert_array_equal(
        params["embed"]["embedding"], tensors["model.embed_tokens.weight"]
    )
    assert "lm_head" not in params


@pytest.mark.parametrize(
    ("name", "max_shard_size"),
    [*((name, 10**9) for name in NAMES), ("qwen3_moe_mixed", 40_000)],
)
def test_import_then_export_is_bit_exact(tmp_path, name, max_shard_size):
    source, path = GOLDEN / name, tmp_path / "export"
    save_hf(
        load_hf(source),
        read_architecture(source),
        path,
        source=source,
        max_shard_size=max_shard_size,
    )
    assert read_tensors(path) == read_tensors(source)
    for file in ("config.json", "generation_config.json"):
        assert (path / file).read_bytes() == (source / file).read_bytes()
    files = sorted(path.glob("*.safetensors"))
    if max_shard_size == 10**9:
        assert [file.name for file in files] == ["model.safetensors"]
        assert not (path / "model.safetensors.index.json").exists()
        assert files[0].read_bytes() == (source / "model.safetensors").read_bytes()
    else:
        index = json.loads((path / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == set(read_tensors(source))
        assert set(index["weight_map"].values()) == {file.name for file in files}
        assert index["metadata"]["total_size"] == sum(
            len(t[2]) for t in read_tensors(path).values()
        )
        for file in files:
            header = file.read_bytes()[8:].split(b"}", 1)[0]
            assert b'"format":"pt"' in header
            stored = load_file(file)
            assert len(stored) == 1 or sum(x.nbytes for x in stored.values()) <= max_shard_size
    assert {file.stat().st_mode for file in files} == {(path / "config.json").stat().st_mode}
    jax.tree.map(np.testing.assert_array_equal, load_hf(path), load_hf(source))


def test_every_bfloat16_value_survives(tmp_path, hf_folder):
    # All bf16 values but NaN, including subnormal ones, negative zero and infinities.
    bits = np.arange(2**16, dtype=np.uint16)
    values = bits.view(ml_dtypes.bfloat16)
    values = values[~np.isnan(values.astype(np.float32))]

    def change(tensors):
        shape = tensors["model.embed_tokens.weight"].shape
        tensors["model.embed_tokens.weight"] = np.resize(values, shape)
        tensors["lm_head.weight"] = np.resize(values[::-1], shape).copy()
        tensors["model.layers.0.mlp.up_proj.weight"] = np.resize(values[30_000:], (72, 40))
        tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float16)

    rewrite(hf_folder, change)
    params = load_hf(hf_folder)
    path = tmp_path / "export"
    save_hf(params, read_architecture(hf_folder), path, source=hf_folder)
    assert read_tensors(path) == read_tensors(hf_folder)
    dtypes = {kind for kind, _, _ in read_tensors(path).values()}
    assert dtypes == {"float32", "bfloat16", "float16"}


def test_only_tokenizer_and_license_files_are_copied(tmp_path, hf_folder):
    names = ["tokenizer.json", "merges.txt", "LICENSE", "chat_template.jinja"]
    for name in [*names, "README.md", "pytorch_model.bin"]:
        (hf_folder / name).write_bytes(f"{name} \r\n é".encode())
    params, config = load_hf(hf_folder), read_architecture(hf_folder)
    save_hf(params, config, tmp_path / "export", source=hf_folder)
    assert {file.name for file in (tmp_path / "export").iterdir()} == {
        *names,
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    for name in names:
        assert (tmp_path / "export" / name).read_bytes() == (hf_folder / name).read_bytes()


@pytest.mark.parametrize(("model_type", "tied"), [("qwen3", True), ("qwen2", False)])
def test_export_without_a_source(tmp_path, model_type, tied):
    fields = CONFIG.to_hf_config() | {"tie_word_embeddings": tied, "attention_bias": True}
    fields["model_type"] = model_type
    config = QwenConfig.from_dict(fields)
    params = init_params(config, seed=0)
    save_hf(params, config, tmp_path / "export")
    assert read_architecture(tmp_path / "export") == config
    jax.tree.map(np.testing.assert_array_equal, load_hf(tmp_path / "export"), params)


def test_a_stored_head_of_a_tied_model_must_equal_the_embedding(tmp_path):
    source = Path(shutil.copytree(GOLDEN / "qwen2_tied", tmp_path / "hf"))

    def add_head(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    rewrite(source, add_head)
    params = load_hf(source)
    save_hf(params, read_architecture(source), tmp_path / "export", source=source)
    assert read_tensors(tmp_path / "export") == read_tensors(source)

    rewrite(source, lambda tensors: tensors["lm_head.weight"].__setitem__((3, 4), 0.5))
    with pytest.raises(ValueError, match=r"'lm_head\.weight' differs"):
        load_hf(source)


def test_a_killed_export_leaves_the_previous_one(tmp_path, monkeypatch):
    params = init_params(CONFIG, seed=0)
    path = tmp_path / "out" / "export"
    save_hf(params, CONFIG, path)
    before = hash_files(path)

    def fail(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr(hf_weights.shutil, "copymode", fail)
    with pytest.raises(OSError, match="No space"):
        save_hf(init_params(CONFIG, seed=1), CONFIG, path)
    assert hash_files(path) == before
    assert [file.name for file in path.parent.iterdir()] == ["export"]

    # A killed process leaves its folder behind; the next export replaces both.
    monkeypatch.undo()
    (tmp_path / "out" / ".export.unfinished").mkdir()
    (tmp_path / "out" / ".export.unfinished" / "rest").write_text("half")
    save_hf(init_params(CONFIG, seed=1), CONFIG, path)
    assert hash_files(path) != before
    assert [file.name for file in path.parent.iterdir()] == ["export"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("lm_head.weight"), r"lacks .* 'lm_head\.weight' of shape \[288, 40\]"),
        (
            lambda t: t.update({"model.layers.2.mlp.up_proj.weight": np.zeros((72, 40), "f4")}),
            r"model\.safetensors has the tensor 'model\.layers\.2\.mlp\.up_proj\.weight'",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.sinks": np.zeros(3, "f4")}),
            r"has the tensor 'model\.layers\.0\.self_attn\.sinks'",
        ),
        (
            lambda t: t.update({"model.norm.weight": np.zeros(41, "f4")}),
            r"'model\.norm\.weight' has shape \[41\]; config\.json requires \[40\]",
        ),
        (
            lambda t: t.update({"model.norm.weight": np.zeros(40, "f8")}),
            r"'model\.norm\.weight' is stored as F64",
        ),
    ],
)
def test_tensors_that_do_not_fit_the_model_are_refused(hf_folder, change, message):
    rewrite(hf_folder, change)
    with pytest.raises(ValueError, match=message):
        load_hf(hf_folder)


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.rotary_emb.inv_freq", "v_head.summary.weight"]
)
def test_tensors_beside_the_model_are_ignored(hf_folder, tmp_path, name):
    clean = read_tensors(hf_folder)
    extra = {name: np.zeros(3, "f8"), "score.weight": np.ones(1, "i8")}
    rewrite(hf_folder, lambda tensors: tensors.update(extra))
    messages = []
    config, _ = open_hf(hf_folder, log=messages.append)
    assert "2 tensors" in messages[0]
    save_hf(load_hf(hf_folder), config, tmp_path / "out", source=hf_folder)
    assert read_tensors(tmp_path / "out") == clean


@pytest.mark.parametrize("num_bytes", [0, 100, -1])
def test_a_truncated_file_is_refused(hf_folder, num_bytes):
    file = hf_folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:num_bytes])
    with pytest.raises(ValueError, match=r"model\.safetensors .* not a complete safetensors file"):
        load_hf(hf_folder)


@pytest.fixture
def sharded_folder(tmp_path):
    source = GOLDEN / "qwen3_untied"
    params, config = load_hf(source), read_architecture(source)
    save_hf(params, config, tmp_path / "sharded", source=source, max_shard_size=60_000)
    return tmp_path / "sharded"


def test_a_missing_file_is_refused(sharded_folder):
    missing = sorted(sharded_folder.glob("*.safetensors"))[1]
    missing.unlink()
    with pytest.raises(FileNotFoundError, match=missing.name):
        load_hf(sharded_folder)
    (sharded_folder / "model.safetensors.index.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        load_hf(sharded_folder)


@pytest.mark.parametrize("outside", ["../other/model.safetensors", "/etc/passwd", "sub/x", ""])
def test_an_index_cannot_name_files_outside_its_folder(sharded_folder, outside):
    index_file = sharded_folder / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    index["weight_map"]["model.norm.weight"] = outside
    index_file.write_text(json.dumps(index))
    message = f"names '{outside}'; expected names of files in its folder"
    with pytest.raises(ValueError, match=message):
        load_hf(sharded_folder)
    index_file.write_text('{"weight_map": []}')
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json is damaged"):
        load_hf(sharded_folder)


def test_an_export_never_replaces_other_files(tmp_path, hf_folder):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match=r"contains no config\.json"):
        save_hf(init_params(CONFIG, seed=0), CONFIG, tmp_path)
    assert (tmp_path / "thesis.tex").exists()
    params, config = load_hf(hf_folder), read_architecture(hf_folder)
    with pytest.raises(ValueError, match="cannot export to the source folder"):
        save_hf(params, config, hf_folder, source=hf_folder)


ONE_OF_TWO_PROCESSES = """
import sys
import jax, numpy as np
port, index, source, path = sys.argv[1:]
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=int(index))
from jaxrl.models.hf_weights import load_hf, save_hf
from jaxrl.models.registry import read_architecture
from jaxrl.runtime.sharding import make_mesh, make_param_shardings

config = read_architecture(source)
mesh = make_mesh(data=1, fsdp=2, tensor=2)
params, whole = load_hf(source, mesh), load_hf(source)
shardings = make_param_shardings(mesh, config)
jax.tree.map(lambda x, layout: np.testing.assert_equal(x.sharding, layout), params, shardings)
for leaf, wanted in zip(jax.tree.leaves(params), jax.tree.leaves(whole), strict=True):
    for shard in leaf.addressable_shards:
        np.testing.assert_array_equal(shard.data, wanted[shard.index])
kernel = params["blocks"]["mlp"]["up"]["kernel"]
assert not kernel.is_fully_addressable
assert {shard.data.shape for shard in kernel.addressable_shards} == {(2, 40 // 2, 72 // 2)}
save_hf(params, config, path, source=source, max_shard_size=50_000)
"""


def test_two_processes_load_onto_a_mesh_and_save(tmp_path):
    source, path = GOLDEN / "qwen3_untied", tmp_path / "export"
    environment = {
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        **with_devices(2),
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", ONE_OF_TWO_PROCESSES, str(port)]
    processes = [
        subprocess.Popen(
            [*command, str(index), str(source), str(path)], env=os.environ | environment, cwd=ROOT
        )
        for index in range(2)
    ]
    try:
        assert [process.wait(timeout=120) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    assert read_tensors(path) == read_tensors(source)
