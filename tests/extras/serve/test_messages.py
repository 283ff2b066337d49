"""Anthropic's dialect: blocks, calls of tools, counts, events, errors."""

import json

import anthropic
import pytest

from tests.extras.serve.served import MAX_TOTAL, TOKENIZER
from tests.extras.serve.writing import ASKED, TOOL

pytestmark = pytest.mark.usefixtures("quick_compilation")

PATH = "/v1/messages"
OWN_TOOL = {
    "name": "search",
    "description": "Finds.",
    "input_schema": TOOL["function"]["parameters"],
}
BODY = {
    "model": "claude",
    "messages": ASKED,
    "tools": [OWN_TOOL],
    "temperature": 0,
    "max_tokens": 80,
    "return_token_ids": True,
}


def ask(client, body, path=PATH, **headers):
    status, value = client.post(path, body, **headers)
    assert status == 200, value
    return value


def refusal(client, body, path=PATH):
    status, value = client.post(path, body)
    assert value.keys() == {"type", "error"}
    assert value["type"] == "error"
    assert value["error"].keys() == {"type", "message"}
    return status, value["error"]


def test_a_call_and_its_result(client):
    client.prefix = "/r/one"
    first = ask(client, BODY)
    prompt = TOKENIZER.render_prompt(ASKED, [TOOL])
    assert first["prompt_token_ids"] == prompt
    assert (first["type"], first["role"], first["stop_reason"]) == (
        "message",
        "assistant",
        "tool_use",
    )
    text, call = first["content"]
    assert text == {"type": "text", "text": "I look."}
    assert (call["type"], call["name"], call["input"]) == (
        "tool_use",
        "search",
        {"query": "Ada Kerr"},
    )
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
    body = {**BODY, "messages": messages, "max_tokens": 1}
    counted = ask(
        client, {n: x for n, x in body.items() if n != "max_tokens"}, f"{PATH}/count_tokens"
    )
    second = ask(client, body)
    assert counted == {"input_tokens": len(second["prompt_token_ids"])}
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
    fields = {"tools": [TOOL], "temperature": 0, "max_tokens": 80, "return_token_ids": True}
    # The template describes the same tool, whichever dialect it came in.
    chat = client.chat(ASKED, **fields)
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
    body = {name: value for name, value in BODY.items() if name != "tools"} | {"system": "Be kind."}
    found = ask(client, {**body, "max_tokens": 3, "logprobs": True})
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


def test_a_prompt_that_is_too_long(client):
    long = [{"role": "user", "content": "x y " * 600}]
    status, error = refusal(client, {**BODY, "messages": long})
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert error["message"].startswith("prompt is too long: ")
    assert error["message"].endswith(f" tokens > {MAX_TOTAL - 1} maximum")


CALL = {"type": "tool_use", "id": "1", "name": "f", "input": {}}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking is "),
        ({"top_k": 5}, "top_k is 5"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type is 'any'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type is "),
        ({"messages": []}, "messages is []"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0] is "),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0] ",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "alt": 1}]}]},
            "messages[0].content[0].alt is 1",
        ),
        (
            {"messages": [{"role": "assistant", "content": [CALL, {"type": "text", "text": "x"}]}]},
            "messages[0] is ",
        ),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content is []"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is missing"),
        ({"system": 3}, "system is 3"),
    ],
)
def test_what_is_refused(client, change, told):
    status, error = refusal(client, {**BODY, **change})
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert error["message"].startswith(told)


WRONG = (True, -1, 1.5, 10**400, "text", [], {}, [[]], [{}], [None], "\ud800", float("nan"))


def test_wrong_types_are_never_a_fault(client):
    sound = {"model": "m", "messages": ASKED, "max_tokens": 1}
    names = ("model", "system", "messages", "tools", "tool_choice", "max_tokens", "temperature")
    names += ("top_p", "stop_sequences", "stream", "thinking", "logprobs", "return_token_ids")
    cases = [{name: value} for name in names for value in WRONG]
    blocks = [{"type": value} for value in WRONG] + [{"type": "text", "text": v} for v in WRONG]
    blocks += [{"type": "tool_use", "name": v, "input": {}} for v in WRONG]
    blocks += [{"type": "tool_use", "name": "f", "input": v} for v in WRONG]
    blocks += [{"type": "tool_result", "tool_use_id": v} for v in WRONG]
    blocks += [{"type": "tool_result", "tool_use_id": "x", "content": v} for v in WRONG]
    cases += [
        {"messages": [*ASKED, {"role": role, "content": [block]}]}
        for role in ("user", "assistant")
        for block in blocks
    ]
    cases += [{"tools": [{"name": "f", "input_schema": value}]} for value in WRONG]
    refused = 0
    for change in cases:
        status, _, data = client.raw("POST", PATH, json.dumps({**sound, **change}).encode())
        assert status in (200, 400), (change, data)
        refused += status == 400
    assert len(cases) * 0.6 < refused < len(cases)


ASK = {"model": "claude", "tools": [OWN_TOOL], "max_tokens": 80}
GREEDY = {"extra_body": {"temperature": 0}}  # which the library has no argument for


class TestAnthropic:
    """The client library of Anthropic, which parses and checks what it is sent."""

    @pytest.fixture
    def library(self, port):
        address = f"http://127.0.0.1:{port}/r/library"
        with anthropic.Anthropic(base_url=address, api_key="none", max_retries=0) as library:
            yield library

    def test_a_chat_with_tools(self, library):
        extra = {"extra_body": {"temperature": 0, "return_token_ids": True, "logprobs": True}}
        first = library.messages.create(messages=ASKED, **ASK, **extra)
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
        second = library.messages.create(messages=messages, **ASK, **extra)
        stored = first.prompt_token_ids + first.token_ids
        assert second.prompt_token_ids[: len(stored)] == stored
        counted = library.messages.count_tokens(model="claude", messages=ASKED, tools=[OWN_TOOL])
        assert counted.input_tokens == len(first.prompt_token_ids)

    def test_its_stream(self, library):
        with library.messages.stream(messages=ASKED, **ASK, **GREEDY) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_message()
        assert kinds[0] == "message_start"
        assert kinds[-1] == "message_stop"
        assert [block.type for block in final.content] == ["text", "tool_use"]
        assert final.content[1].input == {"query": "Ada Kerr"}

    def test_its_stops(self, library):
        found = library.messages.create(messages=ASKED, **ASK, **GREEDY, stop_sequences=["ook"])
        assert found.content[0].text == "I l"
        assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", "ook")

    def test_its_errors(self, library):
        long = [{"role": "user", "content": "x y " * 600}]
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            library.messages.create(messages=long, **ASK)
        with pytest.raises(anthropic.BadRequestError, match="top_k"):
            library.messages.create(messages=ASKED, **ASK, extra_body={"top_k": 3})


def test_fields_that_no_message_has_are_refused(client):
    body = {**BODY, "messages": [{**ASKED[0], "name": "ada"}]}
    status, error = refusal(client, body)
    assert status == 400
    assert error["message"].startswith("messages[0].name is 'ada'")
