import itertools
import json
from datetime import datetime

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from jaxrl.data.tokenizer import Tokenizer
from jaxrl.models.hf_weights import copy_non_weight_files
from tests.damage import JSON_BOMBS

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = ["where is the Eiffel tower?", "<search>tower</search>", "<answer>Paris</answer>", "塔，é"]


def save(
    folder,
    *,
    special=("<|im_end|>", "<|im_start|>"),
    added=("<think>",),
    pre_tokenizer=None,
    **config,
):
    """Train a small tokenizer and write it as a model's folder has it."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizer or GPT2
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 5, trainer)
    backend.add_special_tokens(list(special))
    backend.add_tokens(list(added))
    # What the class must switch off: a token at the front, a limit on the length, padding.
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", backend.token_to_id(special[1]))]
    )
    backend.enable_truncation(5)
    if "pad_token" in config:
        backend.enable_padding(length=8, pad_token=config["pad_token"])
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": CHATML,
    } | config
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.from_folder(save(tmp_path_factory.mktemp("tokenizer")))


@settings(max_examples=25, deadline=None)
@given(text=st.text() | st.text("<>/searchanwer|im_end 塔é\n"))
def test_bytes_survive_a_round_trip(tokenizer, text):
    text = normalizers.NFC().normalize_str(text)
    for ids in (tokenizer.encode(text), tokenizer.encode_plain(text)):
        assert b"".join(tokenizer.vocab_bytes[id] for id in ids) == text.encode()
        assert tokenizer.decode(ids) == text


def test_special_tokens_are_parsed_and_none_added(tokenizer):
    end = tokenizer.eos_ids[0]
    assert tokenizer.encode("a<|im_end|>b") == [
        *tokenizer.encode("a"),
        end,
        *tokenizer.encode("b"),
    ]
    assert tokenizer.vocab_bytes[end] == b"<|im_end|>"
    assert len(tokenizer.encode("a" * 50)) > 5  # the file's own limit on the length is off


@pytest.mark.parametrize("marker", ["<|im_end|>", "<think>"])
def test_text_from_outside_cannot_forge_a_token(tokenizer, marker):
    (forged,) = tokenizer.encode(marker)
    text = f"a{marker}b {marker}{marker}"
    plain = tokenizer.encode_plain(text)
    assert forged not in plain
    assert tokenizer.decode(plain) == text
    assert tokenizer.encode("plain words <search>") == tokenizer.encode_plain(
        "plain words <search>"
    )


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
ONE_PIECE = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
QWEN = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(
            tokenizers.Regex(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
            "isolated",
        ),
        ONE_PIECE,
    ]
)
"""The pre-tokenizers of GPT-2 and Qwen, and one that never splits."""

PIECES = st.sampled_from(
    [*"ab 1.\né塔<", "aaa", "   ", "\n\n", " \n ", "the tower", "'re", "e\u0301", "<|im_end|>"]
)


@pytest.fixture(scope="module", params=[GPT2, QWEN, ONE_PIECE], ids=["gpt2", "qwen", "one piece"])
def short_sighted(request, tmp_path_factory):
    """Return tokenizers that look at few tokens beyond the last one, so texts can be short."""
    folder = save(tmp_path_factory.mktemp("tokenizer"), pre_tokenizer=request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxrl.data.tokenizer._SLACK_TOKENS", 16)
        yield Tokenizer.from_folder(folder)


@settings(max_examples=50, deadline=None)
@given(
    pieces=st.lists(st.tuples(PIECES | st.text(max_size=8), st.integers(1, 40)), max_size=12),
    max_tokens=st.integers(0, 20),
)
def test_a_prefix_has_the_ids_of_the_whole_text(short_sighted, pieces, max_tokens):
    text = "".join(piece * count for piece, count in pieces)
    whole = short_sighted.encode_plain(text)
    assert short_sighted.encode_prefix(text, max_tokens) == whole[:max_tokens]


@pytest.mark.parametrize("unit", ["the tower is in Paris. ", " ", "塔"])
def test_little_more_of_a_long_text_is_encoded_than_needed(tokenizer, monkeypatch, unit):
    seen = []
    encode = tokenizer.encode_plain
    monkeypatch.setattr(
        tokenizer, "encode_plain", lambda text: seen.append(len(text)) or encode(text)
    )
    ids = tokenizer.encode_prefix(unit * (5_000_000 // len(unit)), 100)
    assert len(ids) == 100
    assert ids == encode(unit * 10_000)[:100]
    assert sum(seen) <= tokenizer._longest_token * 228


def test_prompt_is_the_template_as_transformers_encodes_it(tokenizer):
    messages = [{"role": "system", "content": "Search."}, {"role": "user", "content": "Where?"}]
    ids = tokenizer.render_prompt(messages)
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nSearch.<|im_end|>\n<|im_start|>user\nWhere?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert ids == tokenizer._hf_tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )


def test_end_tokens_come_from_both_files(tmp_path):
    save(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    start, end = tokenizer.encode("<|im_start|>") + tokenizer.encode("<|im_end|>")
    for value, expected in [(start, (end, start)), ([end, start], (end, start)), (None, (end,))]:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
        assert Tokenizer.from_folder(tmp_path).eos_ids == expected


def test_skipped_ids_are_empty_tokens(tmp_path):
    spec = json.loads((save(tmp_path) / "tokenizer.json").read_text())
    spec["added_tokens"].append(spec["added_tokens"][-1] | {"id": 400, "content": "<late>"})
    spec["model"]["vocab"]["<late>"] = 400
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.num_tokens == 401
    assert tokenizer.vocab_bytes[399:] == [b"", b"<late>"]


def test_a_missing_folder_is_refused_without_asking_a_hub():
    with pytest.raises(FileNotFoundError, match=r"'Qwen/Qwen3-0.6B' is not a folder.*model\.path"):
        Tokenizer.from_folder("Qwen/Qwen3-0.6B")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"chat_template": None}, "no chat template"),
        ({"chat_template": {"tool_use": CHATML, "rag": CHATML}}, "none called default"),
        ({"eos_token": None}, "eos_token"),
        ({"special": ("<|im_end|>", "<|im_start|>", "search")}, "special token 'search'"),
    ],
)
def test_a_tokenizer_without_a_required_field_is_refused(tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_folder(save(tmp_path, **fields))


def test_other_kinds_of_tokenizers_are_refused(tmp_path):
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "▁": 1}, []))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    save(tmp_path)
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="expected byte-level BPE"):
        Tokenizer.from_folder(tmp_path)


WRONG = (None, -1, 10**30, 1.5, "x\n\x1b[2J", [[1]], {"a": 1})


def loads(folder):
    """Return whether a tokenizer loads; check that a refusal is one short printable line."""
    message = ""
    try:
        tokenizer = Tokenizer.from_folder(folder)
    except ValueError as error:
        message = str(error)
    if message:
        assert message.isprintable()
        assert len(message) < 1500
        return False
    assert isinstance(tokenizer.decode(tokenizer.encode("a")), str)
    return True


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_damaged_files_load_or_are_refused_in_one_line(name, tmp_path, capfd):
    file = save(tmp_path) / name
    whole = file.read_bytes()
    fields = json.loads(whole)
    assert loads(tmp_path)
    num_refused = 0
    for key, value in itertools.product(fields, WRONG):
        file.write_text(json.dumps(fields | {key: value}))
        num_refused += not loads(tmp_path)
    assert num_refused >= 10
    for data in (whole[: len(whole) // 2], *JSON_BOMBS.values(), b"\0" * 100, b"[" * 100_000):
        file.write_bytes(data)
        assert not loads(tmp_path)
    capfd.readouterr()  # the library writes to stderr when it panics


TOOLS = [{"type": "function", "function": {"name": "search", "description": "Finds."}}]
TOOL_USE = (
    "{{ 'You may call: ' }}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<tool_use>{{ m.role + m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<tool_use>assistant<think>{% endif %}"
)
NAMED = {"default": CHATML, "tool_use": TOOL_USE, "rag": "{{ documents }}"}
ADDED = ("<think>", "<tool_use>")


def write_list(folder):
    save(folder, added=ADDED, chat_template=[{"name": n, "template": t} for n, t in NAMED.items()])


def write_files(folder):
    save(folder, added=ADDED, chat_template=None)
    (folder / "chat_template.jinja").write_text(CHATML)
    (folder / "additional_chat_templates").mkdir()
    for name in ("tool_use", "rag"):
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(NAMED[name])


def write_by_transformers(folder):
    (folder / "before").mkdir()
    write_list(folder / "before")
    AutoTokenizer.from_pretrained(folder / "before").save_pretrained(folder)


@pytest.mark.parametrize("write", [write_list, write_files, write_by_transformers])
@pytest.mark.parametrize("is_exported", [False, True])
def test_named_templates_load_from_every_form(tmp_path, write, is_exported):
    write(tmp_path)
    folder = tmp_path
    if is_exported:
        folder = tmp_path / "exported"
        folder.mkdir()
        copy_non_weight_files(tmp_path, folder)
    tokenizer = Tokenizer.from_folder(folder)
    messages = [{"role": "user", "content": "Where?"}]
    for tools, begin in ((None, "<|im_start|>user"), (TOOLS, "You may call: ")):
        ids = tokenizer.render_prompt(messages, tools or ())
        assert ids == tokenizer._hf_tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, return_dict=False
        )
        assert tokenizer.decode(ids).startswith(begin)
    assert tokenizer._hf_tokenizer.chat_template == NAMED


def test_markers_of_the_tool_template_cannot_be_forged(tmp_path):
    write_list(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    [id] = tokenizer.encode("<tool_use>")
    ids = tokenizer.render_prompt([{"role": "user", "content": "a<tool_use>b"}], TOOLS)
    assert ids.count(id) == 2
    assert (tokenizer.response_prefix, tokenizer.get_response_prefix(TOOLS)) == ("", "<think>")


DATED = (
    "{% macro header() %}{{ 'Today: ' ~ strftime_now('%d %b %Y') ~ '\n' }}{% endmacro %}"
    "{{ header() }}{% if strftime_now is defined %}{% set clock = '%H:' ~ '%M' %}"
    "{% for m in messages %}{{ m.content ~ ' (' ~ strftime_now(clock) ~ ')' }}{% endfor %}"
    "{% endif %}"
)
NIGHT = datetime(2024, 2, 29, 23, 59, 7)
QUESTION = [{"role": "system", "content": "Find it."}, {"role": "user", "content": "Where?"}]


def test_a_template_always_reads_the_same_time(tmp_path):
    save(tmp_path, chat_template=DATED)
    tokenizer = Tokenizer.from_folder(tmp_path, now=NIGHT)
    assert tokenizer.reads_clock
    for _ in range(2):
        text = tokenizer.decode(tokenizer.render_prompt(QUESTION))
        assert text == "Today: 29 Feb 2024\nFind it. (23:59)Where? (23:59)"
