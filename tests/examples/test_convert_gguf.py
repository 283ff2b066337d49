"""Folders convert_file from GGUF files, against the folders whose weights the files hold."""

from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.convert_gguf import main
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.models.hf_weights import load_hf, open_tensors, save_hf
from jaxrl.models.llama import LlamaConfig
from jaxrl.models.qwen import QwenConfig
from jaxrl.models.registry import read_architecture
from tests.examples.gguf_files import make_tokenizer, permuted, tensors_of, write_gguf

SIZES = {
    **{"vocab_size": 320, "width": 64, "mlp_width": 96, "num_layers": 2, "num_heads": 4},
    **{"num_kv_heads": 2, "head_dim": 16, "rope_theta": 1e5, "rms_norm_eps": 1e-5},
    **{"tie_embeddings": True, "qkv_bias": False, "output_bias": False, "qk_norm": False},
    "max_positions": 512,
}
MODELS = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": QwenConfig(**SIZES | {"qkv_bias": True}),
    "qwen3": QwenConfig(**SIZES | {"qk_norm": True, "head_dim": 32, "tie_embeddings": False}),
}


def random_folder(path, config):
    """Write weights that all matter: no bias is zero, no scale is one."""
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(0.0, 0.3, leaf.shape), jnp.float32),
        config.make_abstract_params(),
    )
    save_hf(params, config, path)
    return path, params


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small tied Llama; tests only read it."""
    return random_folder(tmp_path_factory.mktemp("hf") / "hf", MODELS["llama"])[0]


def convert_file(file):
    out = file.with_suffix("")
    main([f"--file={file}", f"--out={out}"])
    return out


@pytest.mark.parametrize("name", MODELS)
def test_the_converted_model_is_the_source(name, tmp_path):
    folder, params = random_folder(tmp_path / "hf", MODELS[name])
    out = convert_file(write_gguf(tmp_path / "m.gguf", folder))
    assert read_architecture(out) == MODELS[name]
    jax.tree.map(np.testing.assert_array_equal, load_hf(out), params)


def test_rows_of_a_head_by_hand():
    # RoPE turns rows 0 and 2, 1 and 3 of a head of four; llama.cpp stores each pair together.
    assert permuted(np.array([0, 1, 2, 3, 10, 11, 12, 13]), 2).tolist() == [
        *(0, 2, 1, 3),
        *(10, 12, 11, 13),
    ]


@pytest.mark.parametrize("kind", ["Q4_1", "BF16"])
def test_quantized_weights_are_exact(kind, tmp_path, folder):
    out = convert_file(write_gguf(tmp_path / "m.gguf", folder, kind))
    source, tensors = open_tensors(folder), open_tensors(out)
    assert tensors.keys() == source.keys()
    assert {tensor.dtype for tensor in tensors.values()} == {"F32"}
    for name, tensor in tensors.items():
        weight = source[name].data[:]
        if weight.ndim > 1:
            stored = gguf.GGMLQuantizationType[kind]
            weight = gguf.quants.dequantize(gguf.quants.quantize(weight, stored), stored)
        np.testing.assert_array_equal(tensor.data[:], weight)


@pytest.mark.parametrize("finer", ["token_embd.weight", "output.weight"])
def test_tied_matrices_become_the_finer_one(finer, tmp_path, folder):
    tensors = tensors_of(folder)
    tensors["output.weight"] = tensors["token_embd.weight"]
    file = write_gguf(tmp_path / "m.gguf", folder, "Q4_0", tensors=tensors, kinds={finer: "Q8_0"})
    out = convert_file(file)
    assert read_architecture(out).tie_embeddings
    stored = gguf.GGMLQuantizationType.Q8_0
    wanted = gguf.quants.quantize(tensors["output.weight"], stored)
    wanted = gguf.quants.dequantize(wanted, stored)
    np.testing.assert_array_equal(load_hf(out)["embed"]["embedding"], wanted)


def test_matrices_that_differ_stay_untied(tmp_path, folder):
    tensors = tensors_of(folder)
    noise = np.random.default_rng(1).normal(0.0, 0.3, tensors["token_embd.weight"].shape)
    tensors["output.weight"] = tensors["token_embd.weight"] + noise.astype(np.float32)
    out = convert_file(write_gguf(tmp_path / "m.gguf", folder, tensors=tensors))
    assert not read_architecture(out).tie_embeddings
    np.testing.assert_array_equal(load_hf(out)["lm_head"]["kernel"].T, tensors["output.weight"])


@pytest.mark.parametrize("pre", ["smollm", "qwen2"])
def test_texts_are_encoded_to_the_same_ids(pre, tmp_path, folder):
    ours = Tokenizer.from_folder(convert_file(write_gguf(tmp_path / "m.gguf", folder, pre=pre)))
    theirs = make_tokenizer(pre)
    texts = (
        "The bridge at Avington, built 1871 by ADA's 12345 men.\n\n  \tNé à Łódź: e\u0301 为 🙂 ",
        "a<|im_start|>user\n<think>x</think><|im_end|>\r\n  <|endoftext|>",
        "  spaces   and\n\n\nlines\t\t1,000,000.5 it'll they'VE ...?!",
    )
    for text in texts:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids
    assert ours.num_tokens == theirs.get_vocab_size()  # [PAD304] and so on are no tokens
    assert ours.eos_ids == (theirs.token_to_id("<|im_end|>"),)
    prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    got = ours.render_prompt([{"role": "user", "content": "Hi"}])
    assert got == theirs.encode(prompt, add_special_tokens=False).ids


def test_a_missing_tensor_is_refused_without_leaving_a_folder(tmp_path, folder):
    file = write_gguf(tmp_path / "m.gguf", folder, llama__block_count=3)
    with pytest.raises(ValueError, match=r"tensor 'blk\.2\.attn_k\.weight' is unexpected"):
        convert_file(file)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_a_gguf_file_as_model_path_is_refused_with_the_command(tmp_path):
    file = Path(tmp_path / "m.gguf")
    file.touch()
    with pytest.raises(ValueError, match=r"m\.gguf.*python -m examples\.convert_gguf --file"):
        read_architecture(file)
