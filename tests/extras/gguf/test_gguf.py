"""GGUF files against the Hugging Face folders that hold the same weights."""

import dataclasses
import json
import os
import resource
import shutil
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models import folder as model_paths
from jaxrl.models.folder import model_folder
from jaxrl.models.hf_weights import load_hf, open_tensors, save_hf
from jaxrl.models.llama import LlamaConfig
from jaxrl.models.qwen import QwenConfig
from jaxrl.models.reading import read_model
from jaxrl.models.rope_scaling import Linear, Llama3, Yarn
from jaxrl.tokenizer import Tokenizer

gguf = pytest.importorskip("gguf", reason="the extra gguf is not installed")

from jaxrl.extras import gguf as extra  # noqa: E402
from tests.extras.gguf.files import (  # noqa: E402
    make_tokenizer,
    permuted,
    tensors_of,
    write_gguf,
)
from tests.vocabularies import needed  # noqa: E402

SIZES = {
    **{"vocab_size": 320, "width": 64, "mlp_width": 96, "num_layers": 2, "num_heads": 4},
    **{"num_kv_heads": 2, "head_dim": 16, "rope_theta": 1e5, "rms_norm_eps": 1e-5},
    **{"tie_embeddings": True, "qkv_bias": False, "output_bias": False, "qk_norm": False},
    "max_positions": 512,
}
LLAMA = LlamaConfig(**SIZES)
SCALED = Llama3(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
MODELS = {
    "llama": LLAMA,
    "llama_biased": dataclasses.replace(
        LLAMA, qkv_bias=True, output_bias=True, tie_embeddings=False, num_kv_heads=1
    ),
    "llama3": dataclasses.replace(LLAMA, rope_scaling=SCALED, rope_theta=5e5, head_dim=32),
    "qwen2": QwenConfig(**SIZES | {"qkv_bias": True}),
    "qwen3": QwenConfig(**SIZES | {"qk_norm": True, "head_dim": 32, "tie_embeddings": False}),
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of this test's own; what a process remembers of others is forgotten."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(model_paths, "_made", {})
    return tmp_path / "cache" / "jaxrl" / "models"


def random_folder(path, config, seed=0):
    """Weights at which all matters: no zero biases, no scales of one."""
    rng = np.random.default_rng(seed)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(0.0, 0.3, leaf.shape), jnp.float32),
        config.abstract_params(),
    )
    save_hf(params, config, path)
    return path, params


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small tied Llama; not to be written to."""
    return random_folder(tmp_path_factory.mktemp("hf") / "hf", LLAMA)[0]


def made_of(path):
    return model_folder(str(path))


@pytest.mark.parametrize("name", MODELS)
def test_same_model_as_the_folder_it_was_made_of(name, tmp_path):
    config = MODELS[name]
    folder, params = random_folder(tmp_path / "hf", config)
    tensors = tensors_of(folder)
    if config.rope_scaling is not None:  # as llama.cpp has it: divisors of the frequencies
        whole = config.rope_theta ** (-np.arange(0, 32, 2) / 32)
        waves = 8192 * whole / (2 * np.pi)
        share = np.clip((waves - 1) / 3, 0, 1)
        tensors["rope_freqs.weight"] = (1 / ((1 - share) / 8 + share)).astype(np.float32)
    found = made_of(write_gguf(tmp_path / "m.gguf", folder, tensors=tensors))
    assert read_model(found) == config
    jax.tree.map(np.testing.assert_array_equal, load_hf(found), params)


def test_rows_of_a_head_by_hand():
    # A head of four rows turns rows 0 with 2 and 1 with 3; llama.cpp has them side by side.
    assert permuted(np.array([0, 1, 2, 3, 10, 11, 12, 13]), 2).tolist() == [
        *(0, 2, 1, 3),
        *(10, 12, 11, 13),
    ]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q5_0", "F16", "BF16"])
def test_every_value_is_kept_as_the_file_has_it(kind, tmp_path, folder):
    found = made_of(write_gguf(tmp_path / "m.gguf", folder, kind))
    stored, original = open_tensors(Path(found)), open_tensors(folder)
    assert stored.keys() == original.keys()
    kinds = {tensor.dtype for tensor in stored.values()}
    # Norms of random float32 values keep all of a file in float32.
    assert kinds == {"F32"}
    for name, tensor in stored.items():
        weight = original[name].data[:]
        if weight.ndim > 1:
            rounded = gguf.quants.quantize(weight, gguf.GGMLQuantizationType[kind])
            weight = gguf.quants.dequantize(rounded, gguf.GGMLQuantizationType[kind])
        np.testing.assert_array_equal(tensor.data[:], weight)


def of_q4_k(blocks):
    """float32 [n, 256] of Q4_K, from the layout of `block_q4_K` in llama.cpp's ggml-common.h."""
    scale, least = np.split(blocks[:, :4].copy().view("<f2").astype(np.float32), 2, axis=1)
    packed, quants = blocks[:, 4:16], blocks[:, 16:]
    found = np.zeros((len(blocks), 256), np.float32)
    for j in range(8):  # of 32 values each, with six bits of scale and of minimum
        if j < 4:
            own_scale, own_least = packed[:, j] & 63, packed[:, j + 4] & 63
        else:
            own_scale = (packed[:, j + 4] & 15) | (packed[:, j - 4] >> 6 << 4)
            own_least = (packed[:, j + 4] >> 4) | (packed[:, j] >> 6 << 4)
        values = quants[:, 32 * (j // 2) :][:, :32] >> 4 * (j % 2) & 15
        scaled = scale * own_scale[:, None] * values
        found[:, 32 * j : 32 * j + 32] = scaled - least * own_least[:, None]
    return found


def of_q6_k(blocks):
    """The same of Q6_K: four low bits, two high ones, and a scale of 16 values each."""
    low, high = blocks[:, :128], blocks[:, 128:192]
    scales = blocks[:, 192:208].copy().view(np.int8).astype(np.float32)
    scale = blocks[:, 208:].copy().view("<f2").astype(np.float32)
    found = np.zeros((len(blocks), 256), np.float32)
    for half in range(2):
        for j in range(4):  # of 32 values each
            four = low[:, 64 * half + 32 * (j % 2) :][:, :32] >> 4 * (j // 2) & 15
            two = high[:, 32 * half :][:, :32] >> 2 * j & 3
            values = (four | two << 4).astype(np.int8) - 32
            at = 8 * half + 2 * j
            own = np.repeat(scales[:, at : at + 2], 16, axis=1)
            found[:, 128 * half + 32 * j :][:, :32] = scale * own * values
    return found


def random_blocks(size, scales, seed):
    """Blocks of any bits, but for their scales, which are numbers."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (2000, size), np.uint8)
    given = rng.normal(0.0, 0.01, (2000, (scales.stop - scales.start) // 2)).astype("<f2")
    blocks[:, scales] = given.view(np.uint8)
    return blocks


def real_blocks():
    """Those behind the metadata of Qwen2.5-Coder-1.5B-Instruct: rows of its output layer."""
    path, begin = needed("qwen2.5-coder-1.5b-instruct.gguf"), 5_950_528
    data = np.fromfile(path, np.uint8, offset=begin)
    return data[: len(data) // 210 * 210].reshape(-1, 210)


@pytest.mark.parametrize(
    ("kind", "blocks", "dequantise"),
    [
        ("Q4_K", lambda: random_blocks(144, slice(0, 4), seed=1), of_q4_k),
        ("Q6_K", lambda: random_blocks(210, slice(208, 210), seed=2), of_q6_k),
        ("Q6_K", real_blocks, of_q6_k),
    ],
    ids=["Q4_K", "Q6_K", "Q6_K of a published file"],
)
def test_k_quants_against_their_layout(kind, blocks, dequantise, tmp_path):
    config = dataclasses.replace(LLAMA, width=256, mlp_width=256, head_dim=64, num_layers=1)
    config = dataclasses.replace(config, num_kv_heads=4)
    folder, _ = random_folder(tmp_path / "hf", config)
    tensors, wanted = tensors_of(folder), {}
    given = blocks()
    left = np.resize(given, (320 + 7 * 256, given.shape[1]))  # some of them twice
    for name, weight in tensors.items():
        if weight.ndim > 1:  # a block for each row
            rows, left = np.split(left, [len(weight)])
            tensors[name], wanted[name] = rows, dequantise(rows)
            assert 1e-3 < wanted[name].std() < 100
    found = made_of(write_gguf(tmp_path / "m.gguf", folder, kind, tensors=tensors))
    for name, weight in tensors_of(Path(found)).items():
        if name in wanted:
            np.testing.assert_array_equal(weight, wanted[name])
    assert len(wanted) == 8


@pytest.mark.parametrize(("kind", "stored", "name"), [
    ("BF16", "BF16", "bfloat16"), ("F32", "BF16", "bfloat16"), ("F16", "F16", "float16"),
    ("Q8_0", "F32", "float32"),
])  # fmt: skip
def test_smallest_dtype_that_holds_all(kind, stored, name, tmp_path, folder):
    # Values with 8 bits are bfloat16's; one of 2 + 2^-10 has 11 bits and is float16's alone.
    tensors = {}
    for key, weight in tensors_of(folder).items():
        tensors[key] = np.round(weight * 64) / 64
        np.testing.assert_array_less(np.abs(tensors[key]), 4)  # so 8 bits suffice
    if kind == "F16":
        tensors["blk.0.ffn_up.weight"][0, 0] = 2 + 2**-9
    found = made_of(write_gguf(tmp_path / "m.gguf", folder, kind, tensors=tensors))
    kinds = {t.dtype for t in open_tensors(Path(found)).values()}
    fields = json.loads((Path(found) / "config.json").read_text())
    assert (kinds, fields["torch_dtype"]) == ({stored}, name)


@pytest.mark.parametrize("finer", ["token_embd.weight", "output.weight"])
def test_tied_tables_become_the_finer_one(finer, tmp_path, folder):
    tensors = tensors_of(folder)
    tensors["output.weight"] = tensors["token_embd.weight"]
    path = write_gguf(tmp_path / "m.gguf", folder, "Q4_0", tensors=tensors, kinds={finer: "Q8_0"})
    found = made_of(path)
    assert read_model(found).tie_embeddings
    kind = gguf.GGMLQuantizationType.Q8_0
    wanted = gguf.quants.dequantize(gguf.quants.quantize(tensors["output.weight"], kind), kind)
    np.testing.assert_array_equal(load_hf(found)["embed"]["embedding"], wanted)


def test_tables_that_differ_stay_two(tmp_path, folder):
    tensors = tensors_of(folder)
    noise = np.random.default_rng(1).normal(0.0, 0.3, tensors["token_embd.weight"].shape)
    tensors["output.weight"] = tensors["token_embd.weight"] + noise.astype(np.float32)
    found = made_of(write_gguf(tmp_path / "m.gguf", folder, tensors=tensors))
    assert not read_model(found).tie_embeddings
    np.testing.assert_array_equal(load_hf(found)["lm_head"]["kernel"].T, tensors["output.weight"])


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "llama-bpe"])
def test_texts_become_the_same_ids(pre, tmp_path, folder):
    ours = Tokenizer.from_folder(made_of(write_gguf(tmp_path / "m.gguf", folder, pre=pre)))
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


def test_named_chat_templates(tmp_path, folder):
    template = "{{ 'tools: ' ~ (tools | length) ~ messages[0].content }}"
    changes = {"tokenizer__chat_templates": ["tool_use", "gone"]}
    changes |= {"tokenizer__chat_template__tool_use": template}
    found = Tokenizer.from_folder(made_of(write_gguf(tmp_path / "m.gguf", folder, **changes)))
    messages, tool = [{"role": "user", "content": "Hi"}], {"type": "function"}
    assert found.decode(found.render_prompt(messages, [tool])) == "tools: 1Hi"
    assert found.decode(found.render_prompt(messages)).startswith("<|im_start|>user\nHi")


def test_a_first_token_is_only_written_where_it_is_asked_for(tmp_path, folder):
    from transformers import AutoTokenizer

    plain = made_of(write_gguf(tmp_path / "a.gguf", folder, pre="llama-bpe"))
    changes = {"tokenizer__ggml__add_bos_token": True}
    first = made_of(write_gguf(tmp_path / "b.gguf", folder, pre="llama-bpe", **changes))
    ids = [AutoTokenizer.from_pretrained(one)("by Ada").input_ids for one in (plain, first)]
    assert ids[1] == [make_tokenizer("llama-bpe").token_to_id("<|endoftext|>"), *ids[0]]
    assert Tokenizer.from_folder(first).encode("by Ada") == ids[0]


def test_scalings_of_rope_in_the_metadata(tmp_path, folder):
    keys = {"llama__rope__scaling__type": "yarn", "llama__rope__scaling__factor": 4.0}
    keys |= {"llama__rope__scaling__original_context_length": 128}
    yarn = read_model(made_of(write_gguf(tmp_path / "a.gguf", folder, **keys))).rope_scaling
    assert (type(yarn), yarn.factor, yarn.original_max_positions) == (Yarn, 4.0, 128)
    keys = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 2.0}
    found = read_model(made_of(write_gguf(tmp_path / "b.gguf", folder, **keys)))
    assert found.rope_scaling == Linear(factor=2.0)
    keys = {"llama__rope__scaling__type": "none"}
    assert read_model(made_of(write_gguf(tmp_path / "c.gguf", folder, **keys))) == LLAMA


def test_made_once_found_by_a_copy_and_again_by_another_content(tmp_path, folder, cache):
    told = []
    path = write_gguf(tmp_path / "m.gguf", folder)
    first = model_folder(str(path), told.append)
    assert told == [
        f"reading {path}, once; later starts find it in {first} (at most 1 MiB; {cache} has 0 MiB "
        "of other models, any of which may be deleted)"
    ]
    (tmp_path / "elsewhere").mkdir()
    copy = shutil.copy(path, tmp_path / "elsewhere")
    assert model_folder(str(copy), told.append) == first
    assert model_folder(str(path), told.append) == first
    assert len(told) == 1
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # one bit of the last weight
    path.write_bytes(data)
    model_paths._made.clear()  # as in another process
    assert model_folder(str(path), told.append) != first
    assert len(told) == 2
    assert f"; {cache} has 1 MiB of other models" in told[1]


def test_a_folder_stands_for_itself(tmp_path):
    for path in ("models/Qwen3-4B", str(tmp_path), "a.safetensors", ""):
        assert model_folder(path) == path
    (tmp_path / "odd.gguf").mkdir()
    assert model_folder(str(tmp_path / "odd.gguf")) == str(tmp_path / "odd.gguf")


def test_what_a_kill_has_left_is_replaced(tmp_path, folder, cache, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf", folder)
    found = Path(made_of(path))
    shutil.rmtree(found)
    left = found.with_name(f".{found.name}.unfinished")
    left.mkdir()
    (left / "config.json").write_text("{")
    (left / "model.safetensors").write_bytes(b"half")
    assert made_of(path) == str(found)
    assert read_model(found) == LLAMA
    assert sorted(one.name for one in cache.iterdir()) == [f".{found.name}.lock", found.name]


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_what_somebody_has_deleted_is_made_again(file, tmp_path, folder):
    path = write_gguf(tmp_path / "m.gguf", folder)
    found = Path(made_of(path))
    (found / file).unlink()
    model_paths._made.clear()  # as in another process
    assert made_of(path) == str(found)
    assert read_model(found) == LLAMA
    assert Tokenizer.from_folder(found).eos_ids
    assert open_tensors(found).keys() == open_tensors(folder).keys()


def test_one_of_two_at_once_makes_it(tmp_path, folder):
    path, told = write_gguf(tmp_path / "m.gguf", folder), []
    threads = [threading.Thread(target=extra.unpack, args=(path, told.append)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told) == 1
    assert read_model(made_of(path)) == LLAMA


def refusal(path):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        made_of(path)
    text = str(error.value)
    assert text.isprintable()
    assert str(path) in text
    return text.replace(str(path), "FILE")


def of_layer(value):
    return {"blk.0.more.weight": np.zeros((2, value), np.float32)}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"general__architecture": "gemma3"}, "FILE: general.architecture is 'gemma3'; expected"),
        ({"split__count": 3}, "FILE is one of 3 pieces of a model; join them"),
        ({"split__count": "two"}, "FILE is one of 'two' pieces of a model; join them"),
        ({"tokenizer__chat_template": None}, "FILE holds no chat template (tokenizer.chat_templa"),
        ({"tokenizer__ggml__model": "llama"}, "FILE: tokenizer.ggml.model is 'llama'; expected"),
        ({"tokenizer__ggml__pre": "tekken"}, "FILE: tokenizer.ggml.pre is 'tekken'; expected one"),
        ({"tokenizer__ggml__pre": ["qwen2"]}, "FILE: tokenizer.ggml.pre is ['qwen2']; expected o"),
        ({"tokenizer__ggml__merges": [1]}, "FILE: expected the lists tokenizer.ggml.tokens and"),
        ({"tokenizer__ggml__merges": ["a 嗨"]}, "FILE: its vocabulary is damaged: Token `嗨` out"),
        ({"tokenizer__ggml__merges": None}, "FILE: expected the lists tokenizer.ggml.tokens and "),
        ({"tokenizer__ggml__merges": ["ab"]}, "FILE: its vocabulary has the merge 'ab', so it is"),
        ({"tokenizer__ggml__eos_token_id": 999}, "FILE: tokenizer.ggml.eos_token_id is 999; exp"),
        ({"llama__expert_count": 8}, "FILE: llama.expert_count is 8; no model with it is comput"),
        ({"llama__attention__sliding_window": 64}, "FILE: a sliding window of 64 tokens is not"),
        ({"llama__rope__dimension_count": 8}, "FILE: llama.rope.dimension_count is 8, of heads"),
        ({"llama__rope__scaling__type": "longrope"}, "FILE: RoPE scaling 'longrope' is not supp"),
        ({"llama__context_length": None}, "FILE: llama.context_length is None; expected a number"),
        ({"llama__feed_forward_length": [96, 96]}, "FILE: llama.feed_forward_length is [96, 96];"),
        ({"llama__block_count": 3}, "FILE lacks the tensor 'model.layers.2."),
        ({"llama__block_count": 1}, "FILE holds the tensor 'model.layers.1."),
        ({"llama__feed_forward_length": 32}, "FILE: tensor 'blk.0.ffn_down.weight' has shape [64"),
        ({"llama__attention__head_count": 0}, "FILE: 'num_attention_heads' is 0; expected"),
        ({"tensors": of_layer(32)}, "FILE holds no tensor 'token_embd.weight', so it is no whole"),
        ({"kinds": {"blk.1.ffn_up.weight": "I8"}}, "FILE: tensor 'blk.1.ffn_up.weight' is stored"),
        ({"extra": of_layer(32)}, "FILE holds the tensor 'blk.0.more.weight', which the model"),
        ({"extra": {"rope_freqs.weight": np.ones(8, np.float32) * 3}}, "FILE: the tensor 'rope_f"),
        ({"extra": {"rope_freqs.weight": np.ones(0, np.float32)}}, "FILE: the tensor 'rope_freqs"),
    ],
)
def test_refused_in_one_line(changes, told, tmp_path, folder, cache):
    changes = dict(changes)
    if "extra" in changes:
        changes["tensors"] = tensors_of(folder) | changes.pop("extra")
    if changes.get("llama__attention__head_count") == 0:
        changes["llama__attention__key_length"] = None
    path = write_gguf(tmp_path / "m.gguf", folder, **changes)
    text = refusal(path)
    assert text.startswith(told), text
    assert not [one for one in cache.iterdir() if one.is_dir()]  # nothing is left


def test_a_quantisation_that_the_package_does_not_know(tmp_path, folder):
    path = write_gguf(tmp_path / "m.gguf", folder)
    data, name = bytearray(path.read_bytes()), b"blk.0.ffn_up.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8  # behind the number of axes and two sizes
    assert data[at : at + 4] == (0).to_bytes(4, "little")  # F32
    data[at : at + 4] = (99).to_bytes(4, "little")
    path.write_bytes(data)
    assert refusal(path).startswith("FILE has a quantisation that the package gguf does not know")


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.1, 0.5, 0.99, 0.9999])
def test_a_file_that_is_cut_off(share, tmp_path, folder):
    path = write_gguf(tmp_path / "m.gguf", folder)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share) // 4 * 4])
    text = refusal(path)
    assert "is cut off, damaged or of another version" in text


def test_a_list_without_end(tmp_path, folder):
    path = write_gguf(tmp_path / "m.gguf", folder)
    data, key = bytearray(path.read_bytes()), b"tokenizer.ggml.token_type"
    at = data.index(key) + len(key) + 4 + 4  # behind the types of the list and of its values
    damaged = "is cut off, damaged or of another version"
    for length, told in ((2**21, damaged), (2**40, "a list of 1099511627776 values; at most")):
        data[at : at + 8] = length.to_bytes(8, "little")
        path.write_bytes(data)
        assert told in refusal(path)


def test_a_tensor_without_a_shape(tmp_path, folder):
    path = write_gguf(tmp_path / "m.gguf", folder)
    data, name = path.read_bytes(), b"output_norm.weight"
    at = data.index(name) + len(name)
    assert data[at : at + 12] == (1).to_bytes(4, "little") + (64).to_bytes(8, "little")
    path.write_bytes(data[:at] + bytes(4) + data[at + 12 :] + bytes(64))
    assert refusal(path) == "FILE: tensor 'output_norm.weight' has no shape; expected 1 or 2 axes."


def test_a_pipe_is_not_waited_for(tmp_path):
    path = tmp_path / "m.gguf"
    os.mkfifo(path)
    assert refusal(path) == "config.model.path is 'FILE', which is no file."


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04" * 100, b"\x80\x00\x00\x00" * 9])
def test_a_file_of_another_kind(content, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    assert refusal(path).startswith("FILE is not a GGUF file: it begins with b'")


def test_no_such_file():
    with pytest.raises(FileNotFoundError, match=r"is 'models/x\.gguf', which does not exist; set"):
        model_folder("models/x.gguf")


def test_without_the_extra(tmp_path, folder, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf", folder)
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.delitem(sys.modules, "jaxrl.extras.gguf.model", raising=False)
    assert "install the extra: pip install 'jaxrl[gguf]'." in refusal(path)


def test_without_the_folder_of_the_extra(tmp_path, folder, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf", folder)
    monkeypatch.setitem(sys.modules, "jaxrl.extras.gguf", None)
    assert "FILE', which jaxrl.extras.gguf:unpack reads: " in refusal(path)


def test_a_disk_without_room(tmp_path, folder, cache):
    path = write_gguf(tmp_path / "m.gguf", folder)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))  # the weights have more
    try:
        text = refusal(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert text.startswith(f"{cache}: File too large for the 1 MiB of FILE; free some space")
    assert not [one for one in cache.iterdir() if one.is_dir()]
    assert read_model(made_of(path)) == LLAMA


def test_a_cache_that_may_not_be_made(tmp_path, folder, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf", folder)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(OSError, match=r"Not a directory|File exists") as error:
        made_of(path)
    assert str(tmp_path / "file") in str(error.value.filename)
