"""Anthropic's Messages API: blocks, tool calls, counts, events, errors; with its client."""

from typing import ClassVar

import anthropic
import pytest

from tests.extras.serve.served import TOKENIZER
from tests.extras.serve.writing import CLIENT_TOOL, MESSAGES, TOOL

pytestmark = pytest.mark.usefixtures("quick_compilation")

BODY = {
    "model": "claude",
    "messages": MESSAGES,
    "tools": [CLIENT_TOOL],
    "temperature": 0,
    "max_tokens": 80,
    "return_token_ids": True,
}


def post(client, body):
    status, value = client.post("/v1/messages", body)
    assert status == 200, value
    return value


def test_stop_reasons(client):
    body = {**BODY, "tools": [], "system": "Be kind.", "max_tokens": 3, "logprobs": True}
    answer = post(client, body)
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("max_tokens", None)
    assert len(answer["logprobs"]) == 3
    text = TOKENIZER.decode(answer["token_ids"])
    assert answer["content"] == [{"type": "text", "text": text}]
    messages = [{"role": "system", "content": "Be kind."}, *MESSAGES]
    assert answer["prompt_token_ids"] == TOKENIZER.render_prompt(messages)
    answer = post(client, {**BODY, "stop_sequences": ["nowhere", "ook"]})
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "ook")
    assert answer["content"] == [{"type": "text", "text": "I l"}]


class TestAnthropic:
    """Anthropic's client library, which parses and checks responses."""

    ASK: ClassVar = {
        **{"model": "claude", "messages": MESSAGES, "tools": [CLIENT_TOOL], "max_tokens": 80},
        # The library has no arguments for these.
        "extra_body": {"temperature": 0, "return_token_ids": True},
    }

    @pytest.fixture
    def library(self, port):
        address = f"http://127.0.0.1:{port}/r/library"
        with anthropic.Anthropic(base_url=address, api_key="none", max_retries=0) as library:
            yield library

    def test_a_call_and_its_result(self, library):
        first = library.messages.create(**self.ASK)
        prompt = TOKENIZER.render_prompt(MESSAGES, [TOOL])
        assert first.prompt_token_ids == prompt
        assert (first.role, first.stop_reason) == ("assistant", "tool_use")
        text, call = first.content
        assert (text.text, call.name, call.input) == ("I look.", "search", {"query": "Ada Kerr"})
        assert first.usage.input_tokens == len(prompt)
        assert first.usage.cache_read_input_tokens == 0
        assert first.usage.output_tokens == len(first.token_ids)
        counted = library.messages.count_tokens(
            **{name: self.ASK[name] for name in ("model", "messages", "tools")}
        )
        assert counted.input_tokens == len(prompt)

        result = {"type": "tool_result", "tool_use_id": call.id, "content": "She designs."}
        messages = [
            *MESSAGES,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result, {"type": "text", "text": "Go on."}]},
        ]
        second = library.messages.create(**{**self.ASK, "messages": messages, "max_tokens": 1})
        stored = prompt + first.token_ids
        assert second.prompt_token_ids[: len(stored)] == stored
        assert TOKENIZER.decode(second.prompt_token_ids[len(stored) :]) == (
            "\n<|im_start|>user\n<tool_response>\nShe designs.\n</tool_response><|im_end|>\n"
            "<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
        )
        assert second.usage.cache_read_input_tokens == len(stored) - 1
        assert second.usage.input_tokens == len(second.prompt_token_ids) - len(stored) + 1
        assert second.stop_reason == "max_tokens"

    def test_a_stream_carries_the_same_answer(self, library):
        answer = library.messages.create(**self.ASK)
        with library.messages.stream(**self.ASK) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_message()
        assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
        assert final.token_ids == answer.token_ids
        assert [block.type for block in final.content] == ["text", "tool_use"]
        assert final.content[0].text == "I look."
        assert final.content[1].input == {"query": "Ada Kerr"}
        assert final.stop_reason == "tool_use"
        assert final.usage.output_tokens == answer.usage.output_tokens

    def test_errors(self, library):
        long = {**self.ASK, "messages": [{"role": "user", "content": "x y " * 600}]}
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            library.messages.create(**long)
        with pytest.raises(anthropic.BadRequestError, match="top_k") as refused:
            library.messages.create(**{**self.ASK, "extra_body": {"top_k": 3}})
        assert refused.value.body["error"]["type"] == "invalid_request_error"
