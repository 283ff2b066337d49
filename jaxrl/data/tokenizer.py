"""Byte-level BPE tokenizer with chat templates."""

import contextlib
import json
import os
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import tokenizers

from jaxrl.data.chat_template import ChatPiece, ChatTemplate, freeze_clock, mark_token, reads_clock
from jaxrl.envs.base import Message
from jaxrl.envs.images import IMAGE_TAG, VIDEO_TAG, VideoTokens
from jaxrl.utils.concurrency import format_error
from jaxrl.utils.json_io import read_object
from jaxrl.utils.quiet_transformers import quiet_transformers
from jaxrl.utils.text import escape_control_chars

_MAX_TEMPLATES = 64  # maximum number of cached chat templates, one per set of tools
_SLACK_TOKENS = 128  # tokens to encode beyond the requested prefix


class Tokenizer:
    """Byte-level BPE tokenizer with a chat template, in Hugging Face's format.

    Attributes:
        vocab_bytes: Bytes that each id decodes to; b"" for an unused id.
        num_tokens: Vocabulary size, at most the number of rows of the model's embedding.
        eos_ids: Ids that end the model's message, starting with the tokenizer's EOS id.
        response_prefix: Text that the chat template writes at the start of the model's message,
            and thus at the end of every prompt; "" for most templates.
        image_id: Id of the image token; None if the model does not support images.
        video_id: Id of the video token; None if the model does not support videos.
        now: Time passed to the chat template.
        reads_clock: True if the chat template reads the time.
    """

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
        """Wrap a fast tokenizer from transformers. `from_folder` is the usual entry point.

        Args:
            hf_tokenizer: A `PreTrainedTokenizerFast`.
            eos_ids: Additional ids that end a message.
            eos_tokens: Texts of additional tokens that end a message.
            template_arguments: Variables for the chat template, such as `enable_thinking`.
            image_id: Id of the token that the chat template writes for an image.
            video_id: Id of the token that the chat template writes for a video.
            now: Time passed to the chat template; the current time by default.

        Raises:
            ValueError: The tokenizer type is unsupported, an EOS or image token is invalid, or the
                template does not read an argument.
        """
        self._hf_tokenizer = hf_tokenizer
        text = hf_tokenizer.backend_tokenizer.to_str()
        spec = json.loads(text)
        self._tokenizer = tokenizers.Tokenizer.from_str(text)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # A copy without added tokens encodes untrusted text. Even added tokens that are not marked
        # special (`<think>`, `<tool_call>`) then stay plain text.
        self._plain = tokenizers.Tokenizer(self._tokenizer.model)
        self._plain.normalizer = self._tokenizer.normalizer
        self._plain.pre_tokenizer = self._tokenizer.pre_tokenizer
        for token in spec["added_tokens"]:
            if token["special"] and token["id"] in self.encode_plain(token["content"]):
                raise ValueError(
                    f"the merges also produce the special token {token['content']!r} from plain "
                    "text, so untrusted text could forge it; expected special tokens that no "
                    "merge produces. Remove it from the merges in tokenizer.json."
                )

        self.vocab_bytes = decode_vocab(spec)
        self.num_tokens = len(self.vocab_bytes)
        self._longest_token = max(len(data) for data in self.vocab_bytes)
        # Ids that end a message: from the tokenizer, generation_config.json and the config.
        eos = hf_tokenizer.eos_token_id
        named: list[int] = []
        for token_text in eos_tokens:
            ids = self.encode(token_text)
            if len(ids) != 1:
                raise ValueError(
                    f"config.model.eos_tokens names {token_text!r}, which the tokenizer splits "
                    f"into {len(ids)} tokens; expected the text of one token, such as '<|im_end|>'."
                )
            named += ids
        self.eos_ids = tuple(dict.fromkeys([*([] if eos is None else [eos]), *eos_ids, *named]))
        if not self.eos_ids:
            raise ValueError(
                "neither the tokenizer nor generation_config.json names an end-of-sequence token; "
                "set `eos_token` in tokenizer_config.json."
            )
        special = [token["id"] for token in spec["added_tokens"] if token["special"]]
        self._added_ids = {token["id"] for token in spec["added_tokens"]}
        # The chat template, with a fixed time so that all prompts of a run have the same date.
        arguments = dict(template_arguments or {})
        templates = _list_templates(hf_tokenizer)
        _check_template_arguments(arguments, "\n".join(templates))
        self.now = now or datetime.now()
        self.reads_clock = any(map(reads_clock, templates))
        self.template_arguments: Mapping[str, Any] = arguments
        self.image_id, self.video_id = image_id, video_id
        self._template = self._make_template(())
        self._templates = {"[]": self._template}
        self.response_prefix = self._template.response_prefix
        # Ids that message contents must never produce: the chat's control tokens, and image and
        # video tokens.
        self._chat_ids = {*special, *self.eos_ids, *self.encode(self._template.template_text)}
        self._chat_ids |= {image_id, video_id}
        for template in templates[1:]:
            self._chat_ids |= {*self.encode(self._make_template((), template).template_text)}
        reserved = [self.decode([id]) for id in self._added_ids & self._chat_ids]
        by_length = sorted(reserved, key=len, reverse=True)
        self._chat_tokens = re.compile("|".join(map(re.escape, by_length)) or "(?!)")

    @classmethod
    def from_folder(
        cls,
        path: str | os.PathLike[str],
        *,
        eos_tokens: Iterable[str] = (),
        template_arguments: Mapping[str, Any] | None = None,
        now: datetime | None = None,
    ) -> "Tokenizer":
        """Load a tokenizer from a local folder, without network access.

        `eos_ids` includes those in `generation_config.json` if it exists.
        """
        folder = Path(path)
        if not (folder / "tokenizer.json").is_file():
            raise FileNotFoundError(
                f"{os.fspath(path)!r} is not a folder with a tokenizer.json; expected a local "
                "folder as `save_pretrained` writes it (names on a model hub are not looked up). "
                "Set `model.path`."
            )
        for file in folder.glob("*.json"):
            file.open("rb").close()  # raises PermissionError with the file's name
        with quiet_transformers(), _wrap_load_errors(folder):
            from transformers import AutoTokenizer

            # Never contact the hub, not even for model names in the files of the folder.
            hf_tokenizer = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        # If there are several named templates, one must be called default.
        template = hf_tokenizer.chat_template
        named = template if isinstance(template, dict) else {"default": template}
        if not template or not all(isinstance(named.get(n), str) for n in ("default", *named)):
            raise ValueError(
                f"the tokenizer in {folder} has no chat template, or none called default; expected "
                "`chat_template` in tokenizer_config.json or a file chat_template.jinja. Add one, "
                "or set `model.path` to an instruction-tuned model."
            )
        with _wrap_load_errors(folder, ValueError):
            return cls(
                hf_tokenizer,
                eos_ids=_read_generation_eos_ids(folder),
                eos_tokens=eos_tokens,
                template_arguments=template_arguments,
                now=now,
                **_read_image_token_ids(folder),
            )

    def get_response_prefix(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """Return the `response_prefix` of chats with these tools."""
        return self._get_template(tools).response_prefix

    def encode(self, text: str) -> list[int]:
        """Encode text, parsing special tokens in it. No BOS or EOS token is added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_plain(self, text: str) -> list[int]:
        """Encode untrusted text, without parsing added tokens such as `<|im_end|>`."""
        return self._plain.encode(text, add_special_tokens=False).ids

    def encode_prefix(self, text: str, max_tokens: int) -> list[int]:
        """Return the first `max_tokens` ids of `encode_plain(text)` without encoding all of it.

        Only the last ids of a prefix depend on the text after it, because BPE merges within short
        pieces of text. Therefore, `_SLACK_TOKENS` more tokens are encoded and then dropped. With a
        tokenizer that normalizes text, the result may differ if a letter has thousands of combining
        marks.
        """
        num_characters = self._longest_token * (max_tokens + _SLACK_TOKENS)
        return self.encode_plain(text[:num_characters])[:max_tokens]

    def render_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        image_tokens: Sequence[int] = (),
        num_skipped: int = 0,
        has_default_system: bool = False,
    ) -> list[int]:
        """Render and encode a chat up to the start of the model's next message.

        Messages cannot inject control tokens: special tokens, and tokens that the template itself
        writes, are encoded as plain text in contents and other fields. Other added tokens are
        parsed, so `<think>` in an example is the token that a model generates.

        Args:
            messages: Chat messages. The template also renders fields other than role and content.
            tools: JSON schemas of the tools that the template describes.
            image_tokens: Number of tokens of each image, one per `<image>` placeholder, and
                `VideoTokens` of each video, one per `<video>` placeholder, in order. Without
                images, or without videos, their placeholders are plain text.
            num_skipped: Number of leading messages to omit. None of them may be blank.
            has_default_system: True to keep the template's default system message.

        Raises:
            ValueError: The template rejects the chat, drops a message or a field, or does not
                support tools or images.
        """
        pieces = self._get_template(tools).render(
            messages,
            tags=sorted({*map(_get_placeholder, image_tokens)}),
            has_default_system=has_default_system,
        )
        if num_skipped:
            ends = [end for end, piece in enumerate(pieces, start=1) if piece.is_content][
                :num_skipped
            ]
            if [pieces[end - 1].text for end in ends] != [
                m["content"] for m in messages[:num_skipped]
            ]:
                raise ValueError("the chat template does not write the first messages in order.")
            pieces = pieces[ends[-1] :]
        return self._expand_image_tokens(self._encode_chat(pieces, self._chat_ids), image_tokens)

    def render_turn(self, message: Message, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Render an assistant message as text; see `ChatTemplate.render_turn`."""
        return self._get_template(tools).render_turn(message)

    def render_image(self, num_tokens: int) -> tuple[list[int], str]:
        """Return the placeholders of an image or video of `num_tokens` tokens, as ids and text."""
        is_video = isinstance(num_tokens, VideoTokens)
        text = self._template.video if is_video else self._template.image
        return self._expand_image_tokens(self.encode(text), [num_tokens]), text

    def render_results(
        self,
        results: Sequence[str],
        tools: Sequence[Mapping[str, Any]] = (),
        image_tokens: Sequence[Sequence[int]] = (),
    ) -> tuple[list[int], str]:
        """Render tool results with the chat template; return their ids and text.

        The rendering starts after the EOS id of the model's message and ends at the start of its
        next message. Added tokens inside results are not parsed.

        Raises:
            ValueError: The template does not support tool results, or ends messages with a token
                that is not in `eos_ids`.
        """
        image_counts = image_tokens or [()] * len(results)
        first, *others = self._get_template(tools).render_tool_turn(
            [[*map(_get_placeholder, counts)] for counts in image_counts]
        )
        end = self.decode(self.encode(first)[:1])
        if self.encode(first)[0] not in self.eos_ids:
            raise ValueError(
                f"the chat template ends the model's messages with {end!r}, which is not an "
                "end-of-sequence token; add it to config.model.eos_tokens."
            )
        pieces = [ChatPiece(first.removeprefix(end), False)]
        for result, text in zip(results, others, strict=True):
            pieces += [ChatPiece(result, True), ChatPiece(text, False)]
        ids = self._encode_chat(pieces, self._added_ids)
        counts = [count for result_counts in image_counts for count in result_counts]
        return self._expand_image_tokens(ids, counts), "".join(piece.text for piece in pieces)

    def _expand_image_tokens(self, ids: list[int], image_tokens: Sequence[int]) -> list[int]:
        """Expand each placeholder of an image or video to one placeholder per token."""
        written = [id for id in ids if id in (self.image_id, self.video_id)]
        expected = [
            self.video_id if isinstance(count, VideoTokens) else self.image_id
            for count in image_tokens
        ]
        if written != expected:
            raise ValueError(
                f"the chat template writes the image or video tokens {written} for "
                f"{len(image_tokens)} images and videos; expected {expected}, from the template of "
                "a model that supports them (image_token_id and video_token_id in its config.json)."
            )
        if not written:
            return ids
        counts = iter(image_tokens)
        return [
            new_id
            for id in ids
            for new_id in (self._repeat_token(id, next(counts)) if id in expected else (id,))
        ]

    def _repeat_token(self, id: int, count: int) -> list[int]:
        """Repeat a placeholder. If `count` has timestamps (Qwen3-VL), insert one per frame."""
        times = count.times if isinstance(count, VideoTokens) else ()
        if not times:
            return [id] * count
        # Each frame is between the same tokens as the complete video.
        start, end = (self.encode(text) for text in self._template.video.split(self.decode([id])))
        return [
            new_id
            for time in times
            for new_id in (
                *self.encode_plain(f"<{time:.1f} seconds>"),
                *start,
                *[id] * (count // len(times)),
                *end,
            )
        ]

    def _make_template(
        self, tools: Sequence[Mapping[str, Any]], template: str | None = None
    ) -> ChatTemplate:
        """Create the `ChatTemplate` for these tools from `template`, by default the model's."""
        tool_arguments = {"tools": [dict(tool) for tool in tools]} if tools else {}
        if template is None and self._hf_tokenizer.chat_template:
            template = self._hf_tokenizer.get_chat_template(tools=[*tools] or None)
        if template is not None:
            template = freeze_clock(template, self.now)
        return ChatTemplate(
            lambda messages, add_generation_prompt: self._hf_tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                chat_template=template,
                **{**self.template_arguments, **tool_arguments},
            ),
            bos=self._hf_tokenizer.bos_token or "",
            mark_tokens=self._mark_tokens,
        )

    def _mark_tokens(self, text: str) -> str:
        """Put markers around the control tokens in a text; see `chat_template.mark_token`."""
        return self._chat_tokens.sub(lambda token: mark_token(token[0]), text)

    def _get_template(self, tools: Sequence[Mapping[str, Any]]) -> ChatTemplate:
        key = json.dumps([dict(tool) for tool in tools], ensure_ascii=False)
        if key not in self._templates:
            forged = [id for id in self.encode(key) if id in self._added_ids]
            if forged:
                raise ValueError(
                    f"the description of a tool contains {self.decode(forged[:1])!r}, which is an "
                    "added token; expected plain text. Change the tool's description."
                )
            if not re.search(r"\btools\b", self._hf_tokenizer.get_chat_template(tools=[*tools])):
                raise ValueError(
                    "the tokenizer's chat template does not describe tools; expected one that "
                    "reads `tools`. Set config.env.search.protocol to one with tags, or "
                    "config.model.path to a model that was trained to call tools."
                )
            if len(self._templates) > _MAX_TEMPLATES:  # clients of a server may define tools
                # Evict the oldest template that has tools, unless another thread just did.
                self._templates.pop(list(self._templates)[1], None)
            self._templates[key] = self._make_template(tools)
        return self._templates[key]

    def _encode_chat(self, pieces: Sequence[ChatPiece], reserved: Container[int]) -> list[int]:
        """Encode a rendered chat. Reserved tokens in message contents are encoded as plain text."""
        text = "".join(piece.text for piece in pieces)
        is_content = [piece.is_content for piece in pieces for _ in piece.text]
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        added = [
            (id, start, end)
            for id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)
            if id in self._added_ids
        ]
        parsed = [
            (id, start, end)
            for id, start, end in added
            if id not in reserved or not any(is_content[start:end])
        ]
        if len(parsed) == len(added):
            return encoding.ids
        # Encode the text between real added tokens as plain text, including forged tokens.
        ids, begin = [], 0
        for id, start, end in parsed:
            ids += [*self.encode_plain(text[begin:start]), id]
            begin = end
        return [*ids, *self.encode_plain(text[begin:])]

    @property
    def dropped_system_message(self) -> str:
        """Default system message that was removed from a prompt; "" if none was removed."""
        messages = (chat.dropped_system_message for chat in self._templates.values())
        return next(filter(None, messages), "")

    @property
    def unlisted_end_token(self) -> str:
        """Added token after messages in the template that is not in `eos_ids`; "" if none."""
        ids = self.encode(self._template.message_end.strip())[:1]
        is_unlisted = bool(ids) and ids[0] in self._added_ids and ids[0] not in self.eos_ids
        return self.decode(ids) if is_unlisted else ""

    def decode(self, ids: Iterable[int]) -> str:
        """Decode `ids`, including special tokens. Invalid UTF-8 becomes U+FFFD."""
        return b"".join(self.vocab_bytes[id] for id in ids).decode("utf-8", errors="replace")


def _get_placeholder(num_tokens: int) -> str:
    return VIDEO_TAG if isinstance(num_tokens, VideoTokens) else IMAGE_TAG


def _list_templates(hf_tokenizer: Any) -> list[str]:
    """Return the default chat template, and the template for chats with tools if it differs."""
    if not hf_tokenizer.chat_template:
        return []
    default, for_tools = hf_tokenizer.get_chat_template(), hf_tokenizer.get_chat_template(tools=[])
    return [default] if for_tools == default else [default, for_tools]


_RESERVED_ARGUMENTS = (
    "messages",
    "conversation",
    "tokenize",
    "add_generation_prompt",
    "chat_template",
)
"""Arguments that the tokenizer sets, so `prompt.chat_template_kwargs` must not."""


def _check_template_arguments(arguments: Mapping[str, Any], template: str) -> None:
    """Raise a ValueError if an argument is reserved or the chat template does not read it."""
    for name in arguments:
        is_read = re.search(rf"\b{re.escape(name)}\b", template)
        if name in _RESERVED_ARGUMENTS or not is_read:
            raise ValueError(
                f"config.prompt.chat_template_kwargs names {name!r}, which the model's chat "
                "template does not read; its arguments are in the template's text (chat_template "
                "in tokenizer_config.json, or chat_template.jinja)."
            )


@contextlib.contextmanager
def _wrap_load_errors(folder: Path, *passthrough: type[Exception]) -> Iterator[None]:
    """Convert library errors, except `passthrough`, to one-line ValueErrors."""
    try:
        yield
    except (KeyboardInterrupt, *passthrough):
        raise
    except BaseException as error:  # a panic in tokenizers is not an Exception
        reason = " ".join(escape_control_chars(format_error(error)).split())
        raise ValueError(
            f"the tokenizer in {folder} cannot be loaded (tokenizer.json, tokenizer_config.json, "
            f"config.json): {reason[:500]}"
        ) from error


def _read_image_token_ids(folder: Path) -> dict[str, int]:
    """Read the ids of the image and video tokens from `config.json`; {} if it has none."""
    try:
        fields = read_object(folder / "config.json")
    except (OSError, ValueError):
        return {}  # reported when the model is loaded
    ids = {f"{kind}_id": fields.get(f"{kind}_token_id") for kind in ("image", "video")}
    return {name: id for name, id in ids.items() if isinstance(id, int)}


def _read_generation_eos_ids(folder: Path) -> list[int]:
    """Read the EOS ids from `generation_config.json`; [] if the file or the field is missing."""
    file = folder / "generation_config.json"
    if not file.is_file():
        return []
    value = read_object(file).get("eos_token_id")
    return value if isinstance(value, list) else [] if value is None else [value]


def decode_vocab(spec: dict[str, Any]) -> list[bytes]:
    """Return the bytes that each id decodes to, given the contents of a `tokenizer.json`.

    Raises:
        ValueError: The tokenizer is not byte-level BPE.
    """
    model, steps = spec["model"], json.dumps([spec["normalizer"], spec["pre_tokenizer"]])
    added = {token["id"]: token["content"].encode() for token in spec["added_tokens"]}
    char_to_byte = {char: byte for byte, char in enumerate(_list_byte_characters())}
    if model["type"] != "BPE" or '"ByteLevel"' not in steps:
        raise ValueError(
            f"the tokenizer is {model['type']} with the pre-tokenizer {steps[:200]}; expected "
            "byte-level BPE as in GPT-2 or Llama 3. Set `model.path` to such a model."
        )
    known = {
        id: bytes(char_to_byte[char] for char in token)
        for token, id in model["vocab"].items()
        if id not in added
    } | added
    return [known.get(id, b"") for id in range(max(known) + 1)]


def _list_byte_characters() -> list[str]:
    """Return the character that represents each byte in byte-level BPE, as in GPT-2.

    Printable Latin-1 characters represent themselves; U+0100 and up represent the other bytes.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]
