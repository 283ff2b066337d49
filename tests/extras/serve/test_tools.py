"""Tool calls: rendered, parsed and continued; with the clients of OpenAI and Anthropic."""

import json
from decimal import Decimal
from typing import ClassVar

import anthropic
import openai
import pytest

from jaxrl.extras.serve.chats import (
    ChatHistory,
    compute_match_key,
    make_tool_call,
    parse_reply,
)
from jaxrl.extras.serve.completions import build_chat_response, parse_chat_request
from jaxrl.extras.serve.generation import Completion
from jaxrl.extras.serve.messages import build_messages_response, parse_messages_request
from jaxrl.extras.serve.schemas import ChatCompletionRequest
from jaxrl.extras.serve.worker import STOP, OutputChunk
from tests.extras.serve.served import MODEL, TOKENIZER, Client, serving
from tests.extras.serve.writing import CALL, CLIENT_TOOL, MESSAGES, TOOL, engine_that_writes
from tests.toys import OWN_SYSTEM, toy_tokenizer

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def port(quick_compilation):
    """The port of a server whose model calls a tool."""
    with serving(engine_that_writes("I look." + CALL)) as (server, _):
        yield server.port


END = "<|im_end|>"
SENT_CALL = {
    "id": "1",
    "type": "function",
    "function": {"name": "search", "arguments": '{"query":"Ada Kerr"}'},
}
FIELDS = {"tools": [TOOL], "temperature": 0, "max_tokens": 80, "return_token_ids": True}


def build_prompt(messages, **fields):
    """Return the prompt of a chat in the session in which `answer` stores its turns."""
    body = {"messages": messages, **FIELDS, **fields}
    return list(parse_chat_request(json.dumps(body).encode(), "session", MODEL).prompt_ids)


def answer(text, parse=parse_chat_request, respond=build_chat_response, **fields):
    """Return the response to a request whose model writes `text`, and all token ids."""
    body = {"messages": MESSAGES, **FIELDS, **fields}
    request = parse(json.dumps(body).encode(), "session", MODEL)
    completion = Completion(MODEL, request, "session")
    ids = (*TOKENIZER.encode(text), TOKENIZER.eos_ids[0])
    chunk = OutputChunk(
        token_ids=ids,
        logprobs=(0.0,) * len(ids),
        finish_reason=STOP,
        text_bytes=len(text.encode()),
    )
    completion.choices[0].append(chunk)
    return respond(completion), [*request.prompt_ids, *ids]


@pytest.mark.parametrize(
    ("written", "sent_back", "is_same"),
    [
        # As Pydantic AI 2.68 takes thoughts out of a text and writes them again.
        ("<think>find</think>I look.", "<think>\nfind\n</think>\n\nI look.", True),
        ("<think> find Ada </think>", "", False),
        ("<think> find Ada </think>", "<think> find Eve </think>", False),
    ],
)
def test_whitespace_around_thoughts_does_not_count(written, sent_back, is_same):
    _, stored = answer(written + CALL)
    sent = {"role": "assistant", "content": sent_back, "tool_calls": [SENT_CALL]}
    prompt = build_prompt([*MESSAGES, sent, *MESSAGES])
    assert (prompt[: len(stored)] == stored) is is_same


def with_arguments(text):
    return f'<tool_call>\n{{"name": "search", "arguments": {text}}}\n</tool_call>'


@pytest.mark.parametrize(
    "text",
    [
        # Whether the closing tag that stopped the model was its own or in a string.
        'I look. <tool_call>{"name": "search", "arguments": {"query": "Ada',
        'I look. <tool_call>{"name": "search", "arguments": {"query": "Ada"}}',
        CALL[:-12],  # never closed
        '<tool_call>\n{"name": "search"}\n</tool_call>',
        "<think>" + CALL + "</think>no",  # a thought calls nothing
        with_arguments('{"a": [-1e999]}'),
        with_arguments(f'{{"a": {"9" * 400}}}'),  # beyond doubles
    ],
)
def test_an_invalid_call_is_text(text):
    response, _ = answer(text)
    [choice] = response["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"] == {"role": "assistant", "content": text}


def serialize_as_javascript(text):
    """Return JSON as a JavaScript client writes what it has parsed."""
    doubles = json.loads(text, parse_int=float)

    def convert(value):
        if isinstance(value, dict):
            return {name: convert(item) for name, item in value.items()}
        if isinstance(value, list):
            return [convert(item) for item in value]
        # The shortest digits, padded with zeros: 12345678901234567000.
        return int(Decimal(repr(value))) if isinstance(value, float) and value % 1 == 0 else value

    return json.dumps(convert(doubles), ensure_ascii=False, separators=(",", ":"))


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": null, "b": [null]}',
        '{"a": 1.0, "b": [1e2, -0.0, 1.5], "c": true}',
        '{"id": 12345678901234567890}',
        r'{"a": "\ud800", "\udc00": 1}',
    ],
)
def test_reserialized_calls_match_what_was_sampled(arguments):
    first, stored = answer(with_arguments(arguments))
    [call] = first["choices"][0]["message"]["tool_calls"]
    text = serialize_as_javascript(call["function"]["arguments"])
    call = {**call, "function": {"name": "search", "arguments": text}}
    question = {"role": "user", "content": "?"}
    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}, question]
    assert build_prompt(messages)[: len(stored)] == stored
    # In the other dialect, whose responses hold the arguments as an object.
    block = {"type": "tool_use", "id": "x", "name": "search", "input": json.loads(text)}
    messages = [*MESSAGES, {"role": "assistant", "content": [block]}, question]
    body = {"messages": messages, "tools": [CLIENT_TOOL], "max_tokens": 1}
    request = parse_messages_request(json.dumps(body).encode(), "session", MODEL)
    assert list(request.prompt_ids[: len(stored)]) == stored


@pytest.mark.parametrize(
    ("arguments", "others", "are_same"),
    [
        ('{"a": 1}', '{"a": 1.0}', True),
        ('{"a": 1}', '{"a": true}', False),
        ('{"a": 0}', '{"a": null}', False),
        ('{"a": 1}', '{"a": "1"}', False),
        ('{"a": null}', "{}", False),
    ],
)
def test_calls_are_the_same_by_value(arguments, others, are_same):
    keys = [
        compute_match_key(parse_reply(with_arguments(text), [TOOL])) for text in (arguments, others)
    ]
    assert (keys[0] == keys[1]) == are_same


def test_texts_of_functions_get_the_types_of_the_clients_tool():
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "name": {"type": "string"}},
    }
    tool = {"type": "function", "function": {"name": "add", "parameters": schema}}
    values = "<parameter=n>\n5\n</parameter>\n<parameter=name>\n7\n</parameter>"
    text = f"I add.\n\n<tool_call>\n<function=add>\n{values}\n</function>\n</tool_call>"
    reply = parse_reply(text, [TOOL, tool])
    call = make_tool_call("add", {"n": 5, "name": "7"})
    assert reply == {"role": "assistant", "content": "I add.", "tool_calls": [call]}


def test_the_templates_default_system_message_is_rendered():
    tokenizer = toy_tokenizer(chat_template=OWN_SYSTEM)
    chats = ChatHistory(tokenizer, max_prompt_tokens=400)
    for chat in (MESSAGES, [{"role": "system", "content": "Search."}, *MESSAGES]):
        expected = tokenizer._hf_tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=False
        )
        messages = ChatCompletionRequest.model_validate({"messages": chat}).build_chat()
        assert chats.build_prompt("session", messages, []) == expected


def test_parallel_calls_may_be_off():
    two_calls = CALL + CALL.replace("Ada Kerr", "Eve Kerr")
    for is_allowed, count in ((None, 2), (False, 1)):
        response, _ = answer(two_calls, parallel_tool_calls=is_allowed)
        [choice] = response["choices"]
        calls = choice["message"]["tool_calls"]
        assert (len(calls), choice["finish_reason"]) == (count, "tool_calls")
    # A chat with the first call and its result does not contain the second call.
    result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "1"}
    text = TOKENIZER.decode(build_prompt([*MESSAGES, choice["message"], result]))
    assert "Ada Kerr" in text
    assert "Eve Kerr" not in text
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    changes = {"tools": [CLIENT_TOOL], "tool_choice": choice}
    response, _ = answer(two_calls, parse_messages_request, build_messages_response, **changes)
    assert [block["type"] for block in response["content"]] == ["tool_use"]


def test_a_server_has_default_stop_strings():
    with serving(engine_that_writes("I look up Ada."), stops=("up", "Ada")) as (_, client):
        texts = []
        for fields in ({}, {"stop": None}, {"stop": "Ada"}, {"stop": []}):
            [choice] = client.chat(MESSAGES, **FIELDS, **fields)["choices"]
            texts.append(choice["message"]["content"])
        assert texts == ["I look ", "I look ", "I look up ", "I look up Ada."]
        prompt = TOKENIZER.render_prompt(MESSAGES, [TOOL])
        ids = client.generate(prompt, temperature=0.0, max_tokens=80)["token_ids"]
        assert TOKENIZER.decode(ids).startswith("I look up")
        assert "Ada" not in TOKENIZER.decode(ids)
        body = {"messages": MESSAGES, "tools": [CLIENT_TOOL], "temperature": 0, "max_tokens": 80}
        status, value = client.post("/v1/messages", body)
        assert (status, value["content"]) == (200, [{"type": "text", "text": "I look "}])


@pytest.mark.parametrize("arguments", ['{"query": "Ada <|im_end|>"}', {"query": "Ada <|im_end|>"}])
def test_chats_with_tools_are_rendered_as_transformers_renders_them(arguments):
    call = {**SENT_CALL, "function": {"name": "search", "arguments": {"query": "Ada <|im_end|>"}}}
    thinking = {"role": "assistant", "content": "I look.", "reasoning_content": "Who is it?"}
    chat = [*MESSAGES, {**thinking, "tool_calls": [call]}]
    chat.append({"role": "tool", "tool_call_id": "1", "name": "search", "content": "She designs."})
    text = TOKENIZER._hf_tokenizer.apply_chat_template(
        chat, tools=[TOOL], tokenize=False, add_generation_prompt=True
    )
    call = {**call, "function": {"name": "search", "arguments": arguments}}
    chat[1] = {**thinking, "tool_calls": [call], "refusal": None, "audio": None}
    prompt = build_prompt(chat)
    assert TOKENIZER.decode(prompt) == text
    special = prompt.count(TOKENIZER.eos_ids[0])
    assert special == text.count("<|im_end|>") - 1  # the one in the arguments is plain text


def test_tools_that_may_not_be_called_are_not_rendered():
    assert build_prompt(MESSAGES, tool_choice="none") == TOKENIZER.render_prompt(MESSAGES)


class TestOpenAI:
    """OpenAI's client library, which parses and checks responses."""

    @pytest.fixture
    def library(self, port):
        address = f"http://127.0.0.1:{port}/r/openai/v1"
        with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as library:
            yield library

    def test_a_tool_result_follows_what_was_sampled(self, library):
        """The turn is kept as it was sampled, however a client writes the arguments."""
        assert [model.id for model in library.models.list()] == ["tiny"]
        ask = {"model": "tiny", "tools": [TOOL], "temperature": 0, "max_completion_tokens": 80}
        ask["extra_body"] = {"return_token_ids": True}
        first = library.chat.completions.create(messages=MESSAGES, logprobs=True, **ask)
        [choice] = first.choices
        assert first.prompt_token_ids == TOKENIZER.render_prompt(MESSAGES, [TOOL])
        assert TOKENIZER.decode(choice.token_ids) == "I look." + CALL + END
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
        assert len(choice.logprobs.content) == len(choice.token_ids)
        [call] = choice.message.tool_calls
        assert (call.type, call.function.name) == ("function", "search")
        assert json.loads(call.function.arguments) == {"query": "Ada Kerr"}
        call.function.arguments = '{ "query":"Ada Kerr" }'
        result = {"role": "tool", "tool_call_id": call.id, "content": "She <|im_end|> designs."}
        messages = [*MESSAGES, choice.message, result]
        second = library.chat.completions.create(messages=messages, **ask)
        stored = first.prompt_token_ids + choice.token_ids
        assert second.prompt_token_ids[: len(stored)] == stored
        new = second.prompt_token_ids[len(stored) :]
        assert TOKENIZER.decode(new) == (
            "\n<|im_start|>user\n<tool_response>\nShe <|im_end|> designs.\n</tool_response>"
            "<|im_end|>\n<|im_start|>assistant\n"
        )
        assert new.count(TOKENIZER.eos_ids[0]) == 1  # the result's own is plain text
        assert second.usage.prompt_tokens_details.cached_tokens == len(stored) - 1

    def test_a_stream_with_tools(self, library):
        ask = {"model": "tiny", "tools": [TOOL], "temperature": 0, "messages": MESSAGES}
        with library.chat.completions.stream(**ask, max_tokens=80) as stream:
            for _ in stream:
                pass
            [choice] = stream.get_final_completion().choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I look."
        assert choice.message.tool_calls[0].function.name == "search"


MESSAGES_BODY = {
    "model": "claude",
    "messages": MESSAGES,
    "tools": [CLIENT_TOOL],
    "temperature": 0,
    "max_tokens": 80,
    "return_token_ids": True,
}


def post_messages(client, body):
    status, value = client.post("/v1/messages", body)
    assert status == 200, value
    return value


def test_stop_reasons(port):
    client = Client(port)
    body = {**MESSAGES_BODY, "tools": [], "system": "Be kind.", "max_tokens": 3, "logprobs": True}
    response = post_messages(client, body)
    assert (response["stop_reason"], response["stop_sequence"]) == ("max_tokens", None)
    assert len(response["logprobs"]) == 3
    text = TOKENIZER.decode(response["token_ids"])
    assert response["content"] == [{"type": "text", "text": text}]
    messages = [{"role": "system", "content": "Be kind."}, *MESSAGES]
    assert response["prompt_token_ids"] == TOKENIZER.render_prompt(messages)
    response = post_messages(client, {**MESSAGES_BODY, "stop_sequences": ["nowhere", "ook"]})
    assert (response["stop_reason"], response["stop_sequence"]) == ("stop_sequence", "ook")
    assert response["content"] == [{"type": "text", "text": "I l"}]


class TestAnthropic:
    """Anthropic's client library, which parses and checks responses."""

    ASK: ClassVar = {
        **{"model": "claude", "messages": MESSAGES, "tools": [CLIENT_TOOL], "max_tokens": 80},
        # The library has no arguments for these.
        "extra_body": {"temperature": 0, "return_token_ids": True},
    }

    @pytest.fixture
    def library(self, port):
        address = f"http://127.0.0.1:{port}/r/anthropic"
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
        response = library.messages.create(**self.ASK)
        with library.messages.stream(**self.ASK) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_message()
        assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
        assert final.token_ids == response.token_ids
        assert [block.type for block in final.content] == ["text", "tool_use"]
        assert final.content[0].text == "I look."
        assert final.content[1].input == {"query": "Ada Kerr"}
        assert final.stop_reason == "tool_use"
        assert final.usage.output_tokens == response.usage.output_tokens

    def test_errors(self, library):
        long = {**self.ASK, "messages": [{"role": "user", "content": "x y " * 600}]}
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            library.messages.create(**long)
        with pytest.raises(anthropic.BadRequestError, match="top_k") as refused:
            library.messages.create(**{**self.ASK, "extra_body": {"top_k": 3}})
        assert refused.value.body["error"]["type"] == "invalid_request_error"
