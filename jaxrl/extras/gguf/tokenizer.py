"""A GGUF file's vocabulary as a `tokenizer.json`: byte-level BPE, as GPT-2 began it.

Ids, merges and the chat template are in the file. How a text is cut into words before the merges is
not: `tokenizer.ggml.pre` has a name for it, and the table at the foot says what it means.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from jaxrl.envs.text import printable

KEY = "tokenizer.ggml."

CONTROL, USER_DEFINED, UNUSED = 3, 4, 5
"""Kinds of tokens: special ones, further added ones, and rows without a token."""


def tokenizer_files(path: Path, metadata: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """`tokenizer.json`, `tokenizer_config.json` and `generation_config.json`.

    Raises:
        ValueError: the vocabulary is of another kind, or has no chat template.
    """
    template = metadata.get("tokenizer.chat_template")
    if not (isinstance(template, str) and template):
        raise ValueError(
            f"{path} holds no chat template (tokenizer.chat_template); expected the file of a "
            "model that was trained on chats."
        )
    tokens, kinds, pairs = _vocabulary(path, metadata)
    count = len(tokens)
    while count and kinds[count - 1] == UNUSED:  # rows that pad the embedding
        count -= 1
    # Added tokens behind all others get their ids by their order; those before them, by the
    # vocabulary.
    first_added = count
    while first_added and kinds[first_added - 1] in (CONTROL, USER_DEFINED):
        first_added -= 1
    added = [
        {
            **{"id": id, "content": tokens[id], "special": kinds[id] == CONTROL},
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
        }
        for id in range(count)
        if kinds[id] in (CONTROL, USER_DEFINED)
    ]
    named = {}
    for name in ("bos", "eos", "unknown", "padding", "eot"):
        id = metadata.get(f"{KEY}{name}_token_id")
        if id is not None and not (type(id) is int and 0 <= id < count):
            raise ValueError(f"{path}: {KEY}{name}_token_id is {id!r:.80}; expected an id.")
        named[name] = id
    bos, post_processor = named["bos"], None
    if bos is not None and metadata.get(f"{KEY}add_bos_token"):
        # It stands before each text here, and in the chat template, to which jaxrl leaves it.
        first = {"SpecialToken": {"id": tokens[bos], "type_id": 0}}
        single, pair = ([first, {"Sequence": {"id": n, "type_id": 0}}] for n in "AB")
        written = {tokens[bos]: {"id": tokens[bos], "ids": [bos], "tokens": [tokens[bos]]}}
        post_processor = {
            **{"type": "TemplateProcessing", "single": single, "pair": single + pair},
            "special_tokens": written,
        }
    normalizer, pieces, ignores_merges = PRE_TOKENIZERS[metadata[f"{KEY}pre"]]
    tokenizer = {
        **{"version": "1.0", "truncation": None, "padding": None, "added_tokens": added},
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": pieces},
        "post_processor": post_processor,
        "decoder": {"type": "ByteLevel", **BYTES, "use_regex": True},
        "model": {
            **{"type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False},
            **{"continuing_subword_prefix": None, "end_of_word_suffix": None},
            **{"byte_fallback": False, "ignore_merges": ignores_merges},
            "vocab": {tokens[id]: id for id in range(first_added)},
            "merges": pairs,
        },
    }
    try:
        Tokenizer.from_str(json.dumps(tokenizer))
    except Exception as error:  # of the package's own type; it names the token or merge
        text = " ".join(str(error).split())[:200]
        raise ValueError(f"{path}: its vocabulary is damaged: {printable(text)}.") from error
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    ends = dict.fromkeys(id for id in (named["eos"], named["eot"]) if id is not None)
    ids = {"bos_token_id": named["bos"], "eos_token_id": [*ends], "pad_token_id": named["padding"]}
    return {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "chat_template": _templates(metadata, template),
            **{names[n]: tokens[id] for n, id in named.items() if n in names and id is not None},
        },
        "generation_config.json": {name: id for name, id in ids.items() if id not in (None, [])},
    }


def _templates(metadata: dict[str, Any], default: str) -> str | list[dict[str, str]]:
    """The chat template, or all of them where the file names further ones."""
    names = metadata.get("tokenizer.chat_templates")
    templates = {"default": default}
    for name in names if isinstance(names, list) else []:
        template = metadata.get(f"tokenizer.chat_template.{name}")
        if isinstance(template, str):
            templates[str(name)] = template
    if len(templates) == 1:
        return default
    return [{"name": name, "template": text} for name, text in templates.items()]


def _vocabulary(
    path: Path, metadata: dict[str, Any]
) -> tuple[list[str], list[int], list[list[str]]]:
    """Tokens by id, their kinds, and merges in order; refuses vocabularies that are not read."""
    kind, pre = metadata.get(f"{KEY}model"), metadata.get(f"{KEY}pre")
    if kind != "gpt2":
        raise ValueError(
            f"{path}: {KEY}model is {kind!r:.80}; expected 'gpt2', byte-level BPE. Other "
            "vocabularies are not read here."
        )
    if pre not in [*PRE_TOKENIZERS]:  # it may be of any type
        raise ValueError(
            f"{path}: {KEY}pre is {pre!r:.80}; expected one of {', '.join(PRE_TOKENIZERS)}. A "
            "folder in Hugging Face format has its own tokenizer.json."
        )
    lists: list[Any] = [metadata.get(KEY + n) for n in ("tokens", "token_type", "merges")]
    tokens, kinds, merges = lists
    types = (str, int, str)
    if (
        not all(isinstance(one, list) for one in lists)
        or not all(isinstance(x, kind) for one, kind in zip(lists, types, strict=True) for x in one)
        or len(tokens) != len(kinds)
    ):
        raise ValueError(
            f"{path}: expected the lists {KEY}tokens and {KEY}merges of strings and "
            f"{KEY}token_type of whole numbers, as many as there are tokens."
        )
    pairs = [merge.split(" ") for merge in merges]
    wrong = [merge for merge, pair in zip(merges, pairs, strict=True) if len(pair) != 2]
    if wrong or len(set(tokens)) != len(tokens):
        problem = f"the merge {wrong[0]!r:.80}" if wrong else "a token twice"
        raise ValueError(f"{path}: its vocabulary has {problem}, so it is damaged.")
    return tokens, kinds, pairs


BYTES = {"add_prefix_space": False, "trim_offsets": True}


def _split(digits: str) -> list[dict[str, Any]]:
    """Words as GPT-4 cuts them, with so many digits in a piece."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        rf"{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return [
        {
            "type": "Split",
            "pattern": {"Regex": pattern},
            "behavior": "Isolated",
            "invert": False,
        },
        {"type": "ByteLevel", **BYTES, "use_regex": False},
    ]


_QWEN2 = ({"type": "NFC"}, _split(r"\p{N}"), False)
_LLAMA3 = (None, _split(r"\p{N}{1,3}"), True)
_SMOLLM = (
    None,
    [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", **BYTES, "use_regex": True},
    ],
    False,
)
PRE_TOKENIZERS: dict[str, tuple[Any, list[dict[str, Any]], bool]] = {
    "smollm": _SMOLLM,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
}
"""Names of llama.cpp to normalizer, pre-tokenizers, and whether whole words go before merges."""
