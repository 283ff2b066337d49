"""Text to token ids and back, by way of bytes."""

import contextlib
import json
import os
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import tokenizers

from jaxrl.data.chat_template import Chat, Piece, mark_token, reads_clock, with_fixed_clock
from jaxrl.envs.base import Message
from jaxrl.utils.concurrency import error_text
from jaxrl.utils.json_io import read_object
from jaxrl.utils.quiet_transformers import quiet_transformers
from jaxrl.utils.text import printable

MAX_IDS = 2**24
"""Most ids of a vocabulary, which is a list of them; published ones end near 260,000."""

_MAX_CHATS = 64  # templates with different tools
_SLACK_TOKENS = 128  # behind the last id that is taken of a prefix
_USUAL_CHARACTERS = 8  # a token, of a prefix that is tried first


class Tokenizer:
    """A byte-level BPE tokenizer with a chat template, read from a folder in Hugging Face's format.

    Attributes:
        vocab_bytes: the bytes each id stands for; an added token stands for its own text, an id
            that the vocabulary skips for nothing.
        num_tokens: ids the tokenizer knows, `0 <= id < num_tokens`; a model's embedding may be
            padded beyond.
        eos_ids: any of these ends the model's message; the tokenizer's own comes first.
        opener: what the chat template writes of each message of the model before the model does;
            the end of every prompt, "" for most templates.
        pad_id: fills unused places; masks never depend on it.
        image_id: stands, as often as its image has tokens, where an image is read; None where the
            model reads none.
        video_id: stands for videos, which are not read; None where the model knows none.
        now: time that the chat template is given, whenever it asks.
        reads_clock: True if it may ask.
    """

    vocab_bytes: list[bytes]
    num_tokens: int
    eos_ids: tuple[int, ...]
    opener: str
    pad_id: int
    image_id: int | None
    video_id: int | None
    now: datetime
    reads_clock: bool

    def __init__(
        self,
        hf_tokenizer: Any,
        *,
        eos_ids: Iterable[int] = (),
        eos_tokens: Iterable[str] = (),
        template_arguments: Mapping[str, Any] | None = None,
        image_id: int | None = None,
        video_id: int | None = None,
        now: datetime | None = None,
    ):
        """Wrap a fast tokenizer of transformers; `from_folder` is the usual way here.

        Args:
            hf_tokenizer: a `PreTrainedTokenizerFast`.
            eos_ids: further ids that end a message.
            eos_tokens: further tokens that end a message, by their texts.
            template_arguments: of the chat template, such as `enable_thinking`.
            image_id: of the token that the template writes for an image; None of a text model.
            video_id: of the one for a video; likewise.
            now: time that the chat template is given; by default the present.

        Raises:
            ValueError: the tokenizer is of another kind, or lacks what was named.
        """
        self._hf_tokenizer = hf_tokenizer
        text = hf_tokenizer.backend_tokenizer.to_str()
        spec = json.loads(text)
        self._tokenizer = tokenizers.Tokenizer.from_str(text)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # Without added tokens nothing is matched ahead of the merges, which also keeps markers
        # that are not flagged as special (`<think>`, `<tool_call>`) apart.
        self._plain = tokenizers.Tokenizer(self._tokenizer.model)
        self._plain.normalizer = self._tokenizer.normalizer
        self._plain.pre_tokenizer = self._tokenizer.pre_tokenizer
        for token in spec["added_tokens"]:
            if token["special"] and token["id"] in self.encode_plain(token["content"]):
                raise ValueError(
                    f"the special token {token['content']!r} is also what the merges make of that "
                    "text, so text from outside could forge it; expected special tokens that no "
                    "merge produces. Take it out of the merges in tokenizer.json."
                )

        self.vocab_bytes = bytes_of_ids(spec)
        self.num_tokens = len(self.vocab_bytes)
        self._longest_token = max(len(data) for data in self.vocab_bytes)
        eos = hf_tokenizer.eos_token_id
        named: list[int] = []
        for token_text in eos_tokens:
            ids = self.encode(token_text)
            if len(ids) != 1:
                raise ValueError(
                    f"config.model.eos_tokens names {token_text!r}, of which the tokenizer makes "
                    f"{len(ids)} tokens; expected the text of one token, as '<|im_end|>'."
                )
            named += ids
        self.eos_ids = tuple(dict.fromkeys([*([] if eos is None else [eos]), *eos_ids, *named]))
        if not self.eos_ids:
            raise ValueError(
                "the tokenizer names no end-of-sequence token and generation_config.json none "
                "either; set `eos_token` in tokenizer_config.json."
            )
        pad = hf_tokenizer.pad_token_id
        self.pad_id = self.eos_ids[0] if pad is None else pad
        special = [token["id"] for token in spec["added_tokens"] if token["special"]]
        self._added_ids = {token["id"] for token in spec["added_tokens"]}
        arguments = dict(template_arguments or {})
        templates = _templates_of(hf_tokenizer)
        _check_arguments(arguments, "\n".join(templates))
        self.now = now or datetime.now()
        self.reads_clock = any(map(reads_clock, templates))
        self._arguments = arguments
        self.image_id, self.video_id = image_id, video_id
        self._chat = self._make_chat(())
        self._chats = {"[]": self._chat}
        # A template that writes no added token for an image knows none, and has nothing to compare.
        written = {self.decode([id]): id for id in self.encode(self._chat.image)}
        is_known = image_id in written.values() or not self._added_ids & {*written.values()}
        if image_id is not None and not is_known:
            raise ValueError(
                f"the config.json in config.model.path has the image_token_id {image_id}; expected "
                f"one that its chat template writes for an image: {written}. Mend config.json."
            )
        self.opener = self._chat.opener
        # Ids that no message's content can write: what holds a chat together, and images and
        # videos, which a text could feign.
        self._chat_ids = {*special, *self.eos_ids, *self.encode(self._chat.around)}
        self._chat_ids |= {image_id, video_id}
        for template in templates[1:]:
            self._chat_ids |= {*self.encode(self._make_chat((), template).around)}
        reserved = [self.decode([id]) for id in self._added_ids & self._chat_ids]
        by_length = sorted(reserved, key=len, reverse=True)
        self._chat_tokens = re.compile("|".join(map(re.escape, by_length)) or "(?!)")

    @property
    def template_arguments(self) -> Mapping[str, Any]:
        """Arguments with which the chat template is rendered."""
        return self._arguments

    @classmethod
    def from_folder(
        cls,
        path: str | os.PathLike[str],
        *,
        eos_tokens: Iterable[str] = (),
        template_arguments: Mapping[str, Any] | None = None,
        now: datetime | None = None,
    ) -> "Tokenizer":
        """Load from a local folder; nothing is ever looked up on a network.

        `eos_ids` also takes in those of `generation_config.json`, where the folder has one.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise FileNotFoundError(
                f"{os.fspath(path)!r} is not a folder; expected a local folder with tokenizer.json "
                "(names on a model hub are not looked up). Set `model.path`."
            )
        if not (folder / "tokenizer.json").is_file():
            raise FileNotFoundError(
                f"{folder} holds no tokenizer.json; expected a fast tokenizer's file. Save it "
                "there with transformers' `save_pretrained`, or set `model.path` to another folder."
            )
        for file in folder.glob("*.json"):
            file.open("rb").close()  # what may not be read is told by name
        with quiet_transformers(), _loading(folder):
            from transformers import AutoTokenizer

            # The hub is never asked: not about the folder, and not about what its files name.
            hf_tokenizer = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        template = hf_tokenizer.chat_template
        if not template:
            raise ValueError(
                f"the tokenizer in {folder} has no chat template; expected `chat_template` in "
                "tokenizer_config.json or a file chat_template.jinja. Add one, or set `model.path` "
                "to an instruction-tuned model."
            )
        named = template if isinstance(template, dict) else {"default": template}
        if not all(isinstance(named.get(name), str) for name in ("default", *named)):
            raise ValueError(
                f"the tokenizer in {folder} has the chat templates {', '.join(map(str, named))}; "
                "expected texts, one of them called default. Name it so in tokenizer_config.json, "
                "or put it into chat_template.jinja."
            )
        with _loading(folder, ValueError):
            return cls(
                hf_tokenizer,
                eos_ids=_generation_eos_ids(folder),
                eos_tokens=eos_tokens,
                template_arguments=template_arguments,
                now=now,
                **_ids_of_images(folder),
            )

    def opener_with(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """Return `opener` as of a chat with these tools."""
        return self._chat_with(tools).opener

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; strings of special tokens become these tokens, none are added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_plain(self, text: str) -> list[int]:
        """Ids of `text` from outside: a string such as `<|im_end|>` stays plain characters.

        No added token is matched, whether the tokenizer flags it as special or not.
        """
        return self._plain.encode(text, add_special_tokens=False).ids

    def encode_start(self, text: str, max_tokens: int) -> list[int]:
        """The first `max_tokens` ids of `encode_plain(text)`; a longer text costs no more.

        What stands far behind an id has no say in it: merges work on pieces of the text, and the
        pieces depend on what is near. Where a prefix ends, its last ids do depend on what is cut
        off, so ids are taken only where many others follow them. A run of blanks is one piece,
        however long; a prefix does not end within one, unless it has reached its largest size.
        Where the tokenizer normalises, which sorts the marks on a letter, thousands of marks on
        one letter are sorted within the prefix only.
        """
        wanted = max_tokens + _SLACK_TOKENS
        largest = self._longest_token * wanted  # characters: holds as many tokens in any case
        size = min(_USUAL_CHARACTERS * wanted, largest)
        while size < len(text):
            start = text[:size]
            ids = self.encode_plain(start.rstrip() or start)
            if len(ids) >= wanted:
                return ids[:max_tokens]
            if size == largest:
                return self.encode_plain(start)[:max_tokens]
            size = min(2 * size, largest)
        return self.encode_plain(text)[:max_tokens]

    def render_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        image_tokens: Sequence[int] = (),
        behind: int = 0,
        has_default_system: bool = False,
    ) -> list[int]:
        """Ids of a chat up to where the model's next message begins.

        What the messages hold cannot forge the chat: in their contents and other fields, strings
        of special tokens and of tokens that the template itself writes stay plain characters. Other
        added tokens are parsed there as anywhere: an example's `<think>` is the token that a model
        writes.

        Args:
            messages: the chat; fields beside role and content are the template's to write.
            tools: what the model may call, as JSON schemas, for the template to describe.
            image_tokens: of each image, for which a mark stands in the contents; without any, marks
                are plain text.
            behind: so many messages, none blank, are left out with all that is before their ends.
            has_default_system: see `Chat.render`.

        Raises:
            ValueError: the template refuses the chat, drops a message or a field of one, or knows
                no tools or images.
        """
        pieces = self._chat_with(tools).render(
            messages, with_images=bool(image_tokens), has_default_system=has_default_system
        )
        if behind:
            ends = [end for end, piece in enumerate(pieces, start=1) if piece.is_given][:behind]
            if [pieces[end - 1].text for end in ends] != [m["content"] for m in messages[:behind]]:
                raise ValueError("the chat template does not write the first messages in order.")
            pieces = pieces[ends[-1] :]
        return self._expand(self._encode_chat(pieces, self._chat_ids), image_tokens)

    def render_turn(self, message: Message, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Return the text of a message of the assistant as the chat template writes its fields.

        Raises:
            ValueError: see `Chat.turn`.
        """
        return self._chat_with(tools).turn(message)

    def render_image(self, num_tokens: int) -> tuple[list[int], str]:
        """Ids and text of an image, as the chat template writes it; `num_tokens` are of its own."""
        return self._expand(self.encode(self._chat.image), [num_tokens]), self._chat.image

    def render_results(
        self,
        results: Sequence[str],
        tools: Sequence[Mapping[str, Any]] = (),
        image_tokens: Sequence[Sequence[int]] = (),
    ) -> tuple[list[int], str]:
        """Ids and text of a turn of results, from behind the id that ended the model's message.

        They are those of the chat template, up to where the model's next message begins, but that
        no added token is matched inside a result.

        Raises:
            ValueError: the template shows no results, or nothing ends the messages before them.
        """
        shown = image_tokens or [()] * len(results)
        first, *others = self._chat_with(tools).tool_turn([len(counts) for counts in shown])
        end = self.decode(self.encode(first)[:1])
        if self.encode(first)[0] not in self.eos_ids:
            raise ValueError(
                f"the chat template ends the model's messages with {end!r}, at which nothing "
                "stops; name the token that ends them in config.model.eos_tokens."
            )
        pieces = [Piece(first.removeprefix(end), False)]
        for result, text in zip(results, others, strict=True):
            pieces += [Piece(result, True), Piece(text, False)]
        ids = self._encode_chat(pieces, self._added_ids)
        counts = [count for of_result in shown for count in of_result]
        return self._expand(ids, counts), "".join(piece.text for piece in pieces)

    def _expand(self, ids: list[int], image_tokens: Sequence[int]) -> list[int]:
        """Ids with as many of the image token for each image as it has tokens, in place of one.

        Raises:
            ValueError: the template has written another number of them.
        """
        num_written = ids.count(self.image_id) if self.image_id is not None else 0
        if num_written != len(image_tokens):
            raise ValueError(
                f"the chat template writes {num_written} image tokens for {len(image_tokens)} "
                "images; expected one for each, in the template of a model that reads images "
                "(image_token_id in its config.json)."
            )
        if not num_written:
            return ids
        counts = iter(image_tokens)
        return [id for id in ids for _ in range(next(counts) if id == self.image_id else 1)]

    def _make_chat(self, tools: Sequence[Mapping[str, Any]], template: str | None = None) -> Chat:
        """Makes a chat with tools, by the model's template for them or by another one."""
        described = {"tools": [dict(tool) for tool in tools]} if tools else {}
        if template is None and self._hf_tokenizer.chat_template:
            template = self._hf_tokenizer.get_chat_template(tools=[*tools] or None)
        if template is not None:
            template = with_fixed_clock(template, self.now)
        return Chat(
            lambda messages, asks: self._hf_tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=asks,
                chat_template=template,
                **{**self._arguments, **described},
            ),
            bos=self._hf_tokenizer.bos_token or "",
            mark_tokens=self._mark_tokens,
        )

    def _mark_tokens(self, text: str) -> str:
        """A text with marks around the tokens that hold a chat together."""
        return self._chat_tokens.sub(lambda token: mark_token(token[0]), text)

    def _chat_with(self, tools: Sequence[Mapping[str, Any]]) -> Chat:
        key = json.dumps([dict(tool) for tool in tools], ensure_ascii=False)
        if key not in self._chats:
            forged = [id for id in self.encode(key) if id in self._added_ids]
            if forged:
                raise ValueError(
                    f"the description of a tool holds {self.decode(forged[:1])!r}, which is a "
                    "token of the model; expected plain text. Change what the tool says of itself."
                )
            if not re.search(r"\btools\b", self._hf_tokenizer.get_chat_template(tools=[*tools])):
                raise ValueError(
                    "the tokenizer's chat template does not describe tools; expected one that "
                    "reads `tools`. Set config.env.search.protocol to one with tags, or "
                    "config.model.path to a model that was trained to call tools."
                )
            if len(self._chats) > _MAX_CHATS:  # clients of a server bring tools of their own
                # The oldest but the first, which has no tools; another thread may have been faster.
                self._chats.pop(list(self._chats)[1], None)
            self._chats[key] = self._make_chat(tools)
        return self._chats[key]

    def _encode_chat(self, pieces: Sequence[Piece], reserved: Container[int]) -> list[int]:
        """Ids of a chat in which no given text holds a reserved added token."""
        text = "".join(piece.text for piece in pieces)
        is_given = [piece.is_given for piece in pieces for _ in piece.text]
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        added = [
            (id, start, end)
            for id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)
            if id in self._added_ids
        ]
        kept = [
            (id, start, end)
            for id, start, end in added
            if id not in reserved or not any(is_given[start:end])
        ]
        if len(kept) == len(added):
            return encoding.ids
        # An added token cuts a text in two, which are encoded apart; a forged one does not.
        ids, begin = [], 0
        for id, start, end in kept:
            ids += [*self.encode_plain(text[begin:start]), id]
            begin = end
        return [*ids, *self.encode_plain(text[begin:])]

    @property
    def left_out_system(self) -> str:
        """The chat template's own system message, once a prompt has been rendered without it."""
        return next((chat.left_out for chat in self._chats.values() if chat.left_out), "")

    @property
    def unknown_message_end(self) -> str:
        """The added token that stands behind the model's messages, where nothing stops at it.

        "" where one of `eos_ids` stands there, or no added token.
        """
        ids = self.encode(self._chat.message_end.strip())[:1]
        is_unknown = bool(ids) and ids[0] in self._added_ids and ids[0] not in self.eos_ids
        return self.decode(ids) if is_unknown else ""

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, special tokens included; bytes that are not UTF-8 read as U+FFFD."""
        return b"".join(self.vocab_bytes[id] for id in ids).decode("utf-8", errors="replace")


def _templates_of(hf_tokenizer: Any) -> list[str]:
    """The chat templates that are used: the default one, and another one for tools if there is."""
    if not hf_tokenizer.chat_template:
        return []
    default, for_tools = hf_tokenizer.get_chat_template(), hf_tokenizer.get_chat_template(tools=[])
    return [default] if for_tools == default else [default, for_tools]


_OWN_ARGUMENTS = ("messages", "conversation", "tokenize", "add_generation_prompt", "chat_template")
"""Not a user's to set: they decide what is rendered, and as what."""


def _check_arguments(arguments: Mapping[str, Any], template: str) -> None:
    """Refuses arguments that the chat template does not read."""
    for name in arguments:
        is_read = re.search(rf"\b{re.escape(name)}\b", template)
        if name in _OWN_ARGUMENTS or not is_read:
            raise ValueError(
                f"config.prompt.chat_template_kwargs names {name!r}, which the model's chat "
                "template does not read; its arguments are in the template's text (chat_template "
                "in tokenizer_config.json, or chat_template.jinja)."
            )


@contextlib.contextmanager
def _loading(folder: Path, *ours: type[Exception]) -> Iterator[None]:
    """Tells in one line whatever libraries make of a damaged file; `ours` tell it themselves."""
    try:
        yield
    except (KeyboardInterrupt, *ours):
        raise
    except BaseException as error:  # tokenizers panics with what is no Exception
        why = " ".join(printable(error_text(error)).split())
        raise ValueError(
            f"the tokenizer in {folder} cannot be loaded (tokenizer.json, tokenizer_config.json, "
            f"config.json): {why[:500]}"
        ) from error


def _ids_of_images(folder: Path) -> dict[str, int]:
    """The `image_token_id` and the `video_token_id` of `config.json`, where there are any."""
    try:
        fields = read_object(folder / "config.json")
    except (OSError, ValueError):
        return {}  # who reads the model says what is wrong with it
    ids = {f"{kind}_id": fields.get(f"{kind}_token_id") for kind in ("image", "video")}
    return {name: id for name, id in ids.items() if isinstance(id, int)}


def _generation_eos_ids(folder: Path) -> list[int]:
    """The end-of-sequence ids of `generation_config.json`, where there is one."""
    file = folder / "generation_config.json"
    if not file.is_file():
        return []
    value = read_object(file).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(id) is int and id >= 0 for id in ids):
        raise ValueError(f"{file}: 'eos_token_id' is {value!r:.80}; expected ids of tokens.")
    return ids


def bytes_of_ids(spec: dict[str, Any]) -> list[bytes]:
    """Bytes of every id, from a tokenizer.json.

    Raises:
        ValueError: it is not byte-level BPE.
    """
    model, steps = spec["model"], json.dumps([spec["normalizer"], spec["pre_tokenizer"]])
    added = {token["id"]: token["content"].encode() for token in spec["added_tokens"]}
    byte_of = {char: byte for byte, char in enumerate(_byte_alphabet())}
    is_byte_level = model["type"] == "BPE" and '"ByteLevel"' in steps
    foreign = [
        token
        for token, id in (model["vocab"].items() if is_byte_level else ())
        if id not in added and not byte_of.keys() >= set(token)
    ]
    if not is_byte_level or foreign:
        raise ValueError(
            f"the tokenizer is {model['type']} with "
            + (f"tokens such as {foreign[0]!r}" if foreign else f"the pre-tokenizer {steps[:200]}")
            + "; expected byte-level BPE as in GPT-2 or Llama 3. Set `model.path` to such a "
            "model."
        )
    known = {
        id: bytes(byte_of[char] for char in token)
        for token, id in model["vocab"].items()
        if id not in added
    } | added
    if max(known) >= MAX_IDS:
        raise ValueError(f"tokenizer.json has the id {max(known)}; expected less than {MAX_IDS}.")
    return [known.get(id, b"") for id in range(max(known) + 1)]


def _byte_alphabet() -> list[str]:
    """The character that byte-level BPE writes for each byte.

    Printable Latin-1 characters stand for themselves, the rest follow from U+0100 on, as in
    GPT-2 (https://openai.com/research/better-language-models).
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]
