"""Anthropic's dialect: blocks, calls of tools, counts, events, errors; with its own client."""

import json

import anthropic
import pytest

from tests.extras.serve.served import TOKENIZER
from tests.extras.serve.writing import ASKED, CLIENT_TOOL, TOOL

pytestmark = pytest.mark.usefixtures("quick_compilation")

PATH = "/v1/messages"
BODY = {
    "model": "claude",
    "messages": ASKED,
    "tools": [CLIENT_TOOL],
    "temperature": 0,
    "max_tokens": 80,
    "return_token_ids": True,
}


def ask(client, body, path=PATH):
    status, value = client.post(path, body)
    assert status == 200, value
    return value


def test_a_call_and_its_result(client):
    client.prefix = "/r/one"
    first = ask(client, BODY)
    prompt = TOKENIZER.render_prompt(ASKED, [TOOL])
    assert first["prompt_token_ids"] == prompt
    assert [first[name] for name in ("type", "role", "stop_reason")] == [
        *("message", "assistant", "tool_use")
    ]
    text, call = first["content"]
    assert text == {"type": "text", "text": "I look."}
    assert {**call, "id": ""} == {
        "type": "tool_use", "id": "", "name": "search", "input": {"query": "Ada Kerr"},
    }  # fmt: skip
    assert first["usage"] == {
        "input_tokens": len(prompt),
        "cache_read_input_tokens": 0,
        "cache_creation_input_tokens": 0,
        "output_tokens": len(first["token_ids"]),
    }
    stored = prompt + first["token_ids"]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "She designs."}
    messages = [
        *ASKED,
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [result, {"type": "text", "text": "Go on."}]},
    ]
    second = ask(client, {**BODY, "messages": messages, "max_tokens": 1})
    assert second["prompt_token_ids"][: len(stored)] == stored
    assert TOKENIZER.decode(second["prompt_token_ids"][len(stored) :]) == (
        "\n<|im_start|>user\n<tool_response>\nShe designs.\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert second["usage"]["cache_read_input_tokens"] == len(stored) - 1
    assert second["usage"]["input_tokens"] == len(second["prompt_token_ids"]) - len(stored) + 1
    assert second["stop_reason"] == "max_tokens"


def test_the_dialects_share_turns(client):
    """A chat that began in one goes on in the other, from the same ids."""
    client.prefix = "/r/two"
    # The template describes the same tool, whichever dialect it came in.
    chat = client.chat(**{**BODY, "tools": [TOOL]})
    stored = chat["prompt_token_ids"] + chat["choices"][0]["token_ids"]
    call = {"type": "tool_use", "id": "any", "name": "search", "input": {"query": "Ada Kerr"}}
    messages = [
        *ASKED,
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, call]},
        {"role": "user", "content": "?"},
    ]
    found = ask(client, {**BODY, "messages": messages, "max_tokens": 1})
    assert found["prompt_token_ids"][: len(stored)] == stored


def test_events_carry_the_same_answer(client):
    whole = ask(client, BODY)
    events = client.stream(PATH, {**BODY, "stream": True})
    values = [json.loads(data) for _, data in events]
    assert [name for name, _ in events] == [one["type"] for one in values]
    assert [one["type"] for one in values] == [
        "message_start",
        *["content_block_start", "content_block_delta", "content_block_stop"] * 2,
        "message_delta",
        "message_stop",
    ]
    start = values[0]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["token_ids"] == whole["token_ids"]
    assert values[2]["delta"] == {"type": "text_delta", "text": "I look."}
    assert values[4]["content_block"]["input"] == {}
    assert json.loads(values[5]["delta"]["partial_json"]) == {"query": "Ada Kerr"}
    assert values[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert values[-2]["usage"] == {"output_tokens": len(whole["token_ids"])}


def test_reasons_to_stop(client):
    body = {**BODY, "tools": [], "system": "Be kind.", "max_tokens": 3, "logprobs": True}
    found = ask(client, body)
    assert (found["stop_reason"], found["stop_sequence"]) == ("max_tokens", None)
    assert len(found["logprobs"]) == 3
    text = TOKENIZER.decode(found["token_ids"])
    assert found["content"] == [{"type": "text", "text": text}]
    asked = [{"role": "system", "content": "Be kind."}, *ASKED]
    assert found["prompt_token_ids"] == TOKENIZER.render_prompt(asked)
    # With the tool it looks, until the text of the call begins.
    found = ask(client, {**BODY, "stop_sequences": ["nowhere", "ook"]})
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "ook")
    assert found["content"] == [{"type": "text", "text": "I l"}]


ASK = {"model": "claude", "messages": ASKED, "tools": [CLIENT_TOOL]}


class TestAnthropic:
    """The client library of Anthropic, which parses and checks what it is sent."""

    @pytest.fixture
    def library(self, port):
        address = f"http://127.0.0.1:{port}/r/library"
        with anthropic.Anthropic(base_url=address, api_key="none", max_retries=0) as library:
            yield library

    def test_a_chat_with_tools(self, library):
        # The library has no arguments for these.
        extra = {"extra_body": {"temperature": 0, "return_token_ids": True, "logprobs": True}}
        first = library.messages.create(**ASK, max_tokens=80, **extra)
        assert first.stop_reason == "tool_use"
        text, call = first.content
        assert (text.text, call.name, call.input) == ("I look.", "search", {"query": "Ada Kerr"})
        assert len(first.logprobs) == len(first.token_ids) == first.usage.output_tokens
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "1"}
        messages = [
            *ASKED,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result]},
        ]
        second = library.messages.create(**{**ASK, "messages": messages}, max_tokens=80, **extra)
        stored = first.prompt_token_ids + first.token_ids
        assert second.prompt_token_ids[: len(stored)] == stored
        counted = library.messages.count_tokens(**ASK)
        assert counted.input_tokens == len(first.prompt_token_ids)

    def test_its_stream(self, library):
        extra = {"extra_body": {"temperature": 0}}
        with library.messages.stream(**ASK, max_tokens=80, **extra) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_message()
        assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
        assert [block.type for block in final.content] == ["text", "tool_use"]
        assert final.content[1].input == {"query": "Ada Kerr"}

    def test_its_errors(self, library):
        long = {**ASK, "messages": [{"role": "user", "content": "x y " * 600}]}
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            library.messages.create(**long, max_tokens=80)
        with pytest.raises(anthropic.BadRequestError, match="top_k") as refused:
            library.messages.create(**ASK, max_tokens=80, extra_body={"top_k": 3})
        assert refused.value.body["error"]["type"] == "invalid_request_error"
