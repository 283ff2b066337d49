import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl.models import hf_weights
from jaxrl.models.decoder import init_params
from jaxrl.models.hf_weights import load_hf, open_hf, save_hf
from jaxrl.models.qwen import QwenConfig
from jaxrl.models.registry import read_architecture
from tests.helpers import with_devices

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


def tensors_of(folder):
    """Every tensor of a folder as (dtype, shape, bytes)."""
    return {
        name: (str(array.dtype), array.shape, array.tobytes())
        for file in sorted(folder.glob("*.safetensors"))
        for name, array in load_file(file).items()
    }


def hashes_of(folder):
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


@pytest.fixture
def hf_folder(tmp_path):
    """A copy to damage."""
    return Path(shutil.copytree(GOLDEN / "qwen3_untied", tmp_path / "hf"))


def rewrite(folder, change):
    """Applies `change` to the tensors of a folder with one file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_layer_by_hand(tmp_path):
    # HF keeps [out, in]: our kernel's column j is its row j.
    folder = GOLDEN / "qwen2_tied"
    params = load_hf(folder)
    tensors = load_file(folder / "model.safetensors")
    q = params["blocks"]["attention"]["q"]
    assert q["kernel"].shape == (2, 48, 48)
    wanted = tensors["model.layers.1.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(q["kernel"][1, :, 5], wanted[5])
    np.testing.assert_array_equal(q["bias"][1], tensors["model.layers.1.self_attn.q_proj.bias"])
    np.testing.assert_array_equal(
        params["embed"]["embedding"], tensors["model.embed_tokens.weight"]
    )
    assert "lm_head" not in params


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("max_shard_size", [10**9, 40_000])
def test_import_then_export_is_bit_exact(tmp_path, name, max_shard_size):
    source, path = GOLDEN / name, tmp_path / "export"
    save_hf(
        load_hf(source),
        read_architecture(source),
        path,
        source=source,
        max_shard_size=max_shard_size,
    )
    assert tensors_of(path) == tensors_of(source)
    for file in ("config.json", "generation_config.json"):
        assert (path / file).read_bytes() == (source / file).read_bytes()
    files = sorted(path.glob("*.safetensors"))
    if max_shard_size == 10**9:
        assert [file.name for file in files] == ["model.safetensors"]
        assert not (path / "model.safetensors.index.json").exists()
        assert files[0].read_bytes() == (source / "model.safetensors").read_bytes()
    else:
        index = json.loads((path / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == set(tensors_of(source))
        assert set(index["weight_map"].values()) == {file.name for file in files}
        assert index["metadata"]["total_size"] == sum(len(t[2]) for t in tensors_of(path).values())
        for file in files:
            header = file.read_bytes()[8:].split(b"}", 1)[0]
            assert b'"format":"pt"' in header
            stored = load_file(file)
            assert len(stored) == 1 or sum(x.nbytes for x in stored.values()) <= max_shard_size

    assert {file.stat().st_mode for file in files} == {(path / "config.json").stat().st_mode}

    # And what was written in pieces reads like the original.
    again = load_hf(path)
    jax.tree.map(np.testing.assert_array_equal, again, load_hf(source))


def test_every_bfloat16_survives(tmp_path, hf_folder):
    # All finite bf16 values, subnormal ones and negative zero included, and two infinities.
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
    assert tensors_of(path) == tensors_of(hf_folder)
    dtypes = {kind for kind, _, _ in tensors_of(path).values()}
    assert dtypes == {"float32", "bfloat16", "float16"}


def test_loads_in_another_dtype():
    params = load_hf(GOLDEN / "qwen3_biased_bf16", dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}


def test_side_files_are_copied_and_others_are_not(tmp_path, hf_folder):
    kept = ["tokenizer.json", "tokenizer_config.json", "merges.txt", "vocab.json", "LICENSE"]
    for name in [*kept, "chat_template.jinja", "README.md", "pytorch_model.bin"]:
        (hf_folder / name).write_bytes(f"{name} \r\n é".encode())
    params, config = load_hf(hf_folder), read_architecture(hf_folder)
    save_hf(params, config, tmp_path / "export", source=hf_folder)
    assert {file.name for file in (tmp_path / "export").iterdir()} == {
        *kept,
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    for name in kept:
        assert (tmp_path / "export" / name).read_bytes() == (hf_folder / name).read_bytes()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("is_qwen3", [True, False])
def test_model_without_a_source(tmp_path, is_qwen3, tied):
    fields = CONFIG.hf_config() | {"tie_word_embeddings": tied, "attention_bias": True}
    fields["model_type"] = "qwen3" if is_qwen3 else "qwen2"
    config = QwenConfig.from_dict(fields)
    params = init_params(config, seed=0)
    save_hf(params, config, tmp_path / "export")
    assert read_architecture(tmp_path / "export") == config
    jax.tree.map(np.testing.assert_array_equal, load_hf(tmp_path / "export"), params)


def test_head_stored_though_tied(tmp_path):
    source = Path(shutil.copytree(GOLDEN / "qwen2_tied", tmp_path / "hf"))

    def add_head(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    rewrite(source, add_head)
    params = load_hf(source)
    save_hf(params, read_architecture(source), tmp_path / "export", source=source)
    assert tensors_of(tmp_path / "export") == tensors_of(source)

    rewrite(source, lambda tensors: tensors["lm_head.weight"].__setitem__((3, 4), 0.5))
    with pytest.raises(ValueError, match=r"'lm_head\.weight' differs"):
        load_hf(source)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("lm_head.weight"), r"lacks .* 'lm_head\.weight' of shape \[288, 40\]"),
        (
            lambda t: t.pop("model.layers.1.self_attn.q_norm.weight"),
            r"'model\.layers\.1\.self_attn\.q_norm\.weight' of shape \[16\].*model\.safetensors",
        ),
        (
            lambda t: t.update({"model.layers.2.mlp.up_proj.weight": np.zeros((72, 40), "f4")}),
            r"model\.safetensors has the tensor 'model\.layers\.2\.mlp\.up_proj\.weight'",
        ),
        (
            lambda t: t.update({"model.norm.weight": np.zeros(41, "f4")}),
            r"'model\.norm\.weight' has shape \[41\]; config\.json requires \[40\]",
        ),
        (
            lambda t: t.update({"model.norm.weight": np.zeros(40, "f8")}),
            r"'model\.norm\.weight' is stored as F64",
        ),
        (lambda t: t.clear(), r"model\.embed_tokens\.weight"),
    ],
)
def test_wrong_tensors_are_named(hf_folder, change, named):
    rewrite(hf_folder, change)
    with pytest.raises(ValueError, match=named):
        load_hf(hf_folder)


IGNORED = [
    "model.layers.0.self_attn.rotary_emb.inv_freq",
    "visual.rotary_pos_emb.inv_freq",
    "model.embeddings.position_ids",
    "v_head.summary.weight",
    "score.weight",
    "mtp.layers.0.mlp.up_proj.weight",
]


@pytest.mark.parametrize("name", IGNORED)
def test_tensors_beside_the_model_are_ignored(hf_folder, tmp_path, name):
    clean = tensors_of(hf_folder)
    extra = {name: np.zeros(3, "f8"), "z_head.weight": np.ones(1, "i8")}
    rewrite(hf_folder, lambda tensors: tensors.update(extra))
    log = []
    config, _ = open_hf(hf_folder, log=log.append)
    assert len(log) == 1
    assert "2 tensors" in log[0]
    assert repr(name) in log[0]
    save_hf(load_hf(hf_folder), config, tmp_path / "out", source=hf_folder)
    assert tensors_of(tmp_path / "out") == clean


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.bias",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.sinks",
        "model.norm.bias",
        "model.v_head.weight",
        "model.embed_positions.weight",
    ],
)
def test_tensors_that_would_change_the_model_are_refused(hf_folder, name):
    rewrite(hf_folder, lambda t: t.update({name: np.zeros(3, "f4")}))
    with pytest.raises(ValueError, match=f"has the tensor '{name}'"):
        load_hf(hf_folder)


def test_missing_weights(hf_folder):
    (hf_folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        load_hf(hf_folder)


@pytest.mark.parametrize("kept", [0, 100, -1])
def test_truncated_file(hf_folder, kept):
    file = hf_folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"model\.safetensors .* not a complete safetensors file"):
        load_hf(hf_folder)


def test_git_lfs_pointer(hf_folder):
    (hf_folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        load_hf(hf_folder)


@pytest.fixture
def sharded_folder(tmp_path):
    source = GOLDEN / "qwen3_untied"
    params, config = load_hf(source), read_architecture(source)
    save_hf(params, config, tmp_path / "sharded", source=source, max_shard_size=60_000)
    return tmp_path / "sharded"


def test_missing_shard(sharded_folder):
    lost = sorted(sharded_folder.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(FileNotFoundError, match=lost.name):
        load_hf(sharded_folder)


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}']
)
def test_damaged_index(sharded_folder, text):
    (sharded_folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json is damaged"):
        load_hf(sharded_folder)


@pytest.mark.parametrize(
    "outside", ["../other/model.safetensors", "/etc/passwd", "sub/x", "..", ""]
)
def test_an_index_that_names_a_file_outside_its_folder_is_refused(sharded_folder, outside):
    index_file = sharded_folder / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    index["weight_map"]["model.norm.weight"] = outside
    index_file.write_text(json.dumps(index))
    with pytest.raises(
        ValueError, match=f"names '{outside}'; expected names of files in its folder"
    ):
        load_hf(sharded_folder)


def test_killed_export_leaves_nothing(tmp_path, monkeypatch):
    params = init_params(CONFIG, seed=0)
    path = tmp_path / "out" / "export"
    save_hf(params, CONFIG, path)
    before = hashes_of(path)

    def fail(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr(hf_weights.shutil, "copymode", fail)
    with pytest.raises(OSError, match="No space"):
        save_hf(init_params(CONFIG, seed=1), CONFIG, path)
    assert hashes_of(path) == before
    assert [file.name for file in path.parent.iterdir()] == ["export"]

    # A process that was killed leaves its folder behind; the next export replaces both.
    monkeypatch.undo()
    (tmp_path / "out" / ".export.unfinished").mkdir()
    (tmp_path / "out" / ".export.unfinished" / "rest").write_text("half")
    save_hf(init_params(CONFIG, seed=1), CONFIG, path)
    assert hashes_of(path) != before
    assert [file.name for file in path.parent.iterdir()] == ["export"]


def test_export_over_something_else(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match=r"holds no config\.json"):
        save_hf(init_params(CONFIG, seed=0), CONFIG, tmp_path)
    assert (tmp_path / "thesis.tex").exists()


def test_export_over_its_source(hf_folder):
    params, config = load_hf(hf_folder), read_architecture(hf_folder)
    with pytest.raises(ValueError, match="cannot export to the source folder"):
        save_hf(params, config, hf_folder, source=hf_folder)


def test_export_with_another_models_source(tmp_path, hf_folder):
    with pytest.raises(ValueError, match="is not the model to export: its vocab_size"):
        save_hf(init_params(CONFIG, seed=0), CONFIG, tmp_path / "export", source=hf_folder)


ON_EIGHT_DEVICES = """
import sys
import jax, numpy as np
from jaxrl.runtime import sharding
from jaxrl.models.registry import read_architecture
from jaxrl.models.hf_weights import load_hf, save_hf

source, path = sys.argv[1:]
config = read_architecture(source)
mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
params, whole = load_hf(source, mesh), load_hf(source)
jax.tree.map(np.testing.assert_array_equal, params, whole)
wanted = sharding.param_shardings(mesh, config)
jax.tree.map(lambda leaf, layout: np.testing.assert_equal(leaf.sharding, layout), params, wanted)
kernel = params["blocks"]["mlp"]["up"]["kernel"]
parts = {shard.data.shape for shard in kernel.addressable_shards}
assert parts == {(2, 40 // 2, 72 // 2)}, parts
save_hf(params, config, path, source=source, max_shard_size=50_000)
"""


def test_loads_onto_a_mesh(tmp_path):
    source, path = GOLDEN / "qwen3_untied", tmp_path / "export"
    flags = {**with_devices(8), "JAX_PLATFORMS": "cpu"}
    subprocess.run(
        [sys.executable, "-c", ON_EIGHT_DEVICES, str(source), str(path)],
        check=True,
        env=os.environ | flags,
        cwd=Path(__file__).parents[2],
    )
    assert tensors_of(path) == tensors_of(source)


ONE_OF_TWO_PROCESSES = """
import sys
import jax, numpy as np
port, index, source, path = sys.argv[1:]
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=int(index))
from jaxrl.runtime import sharding
from jaxrl.models.registry import read_architecture
from jaxrl.models.hf_weights import load_hf, save_hf

mesh = sharding.make_mesh(data=1, fsdp=2, tensor=1)
params = load_hf(source, mesh)
assert not params["blocks"]["mlp"]["up"]["kernel"].is_fully_addressable
save_hf(params, read_architecture(source), path, source=source, max_shard_size=50_000)
"""


def test_two_processes_load_and_save(tmp_path):
    source, path = GOLDEN / "qwen3_untied", tmp_path / "export"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = {"JAX_PLATFORMS": "cpu", "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", ONE_OF_TWO_PROCESSES, str(port), str(i), str(source), str(path)],
            env=os.environ | flags,
            cwd=Path(__file__).parents[2],
        )
        for i in range(2)
    ]
    try:
        assert [process.wait(timeout=120) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    assert tensors_of(path) == tensors_of(source)
