"""Calls of tools: described by the template, read back and continued; with OpenAI's own client."""

import json
from decimal import Decimal

import openai
import pytest

from jaxrl.extras.serve.chats import ChatHistory, parse_reply
from jaxrl.extras.serve.completions import build_chat_response, parse_chat_request
from jaxrl.extras.serve.generation import Completion
from jaxrl.extras.serve.messages import build_messages_response, parse_messages_request
from jaxrl.extras.serve.schemas import ChatBody, MessagesBody, parse_body
from jaxrl.extras.serve.worker import STOP, OutputChunk
from tests.extras.serve.served import MODEL, TOKENIZER, serving
from tests.extras.serve.writing import ASKED, CALL, CLIENT_TOOL, TOOL, engine_that_writes
from tests.toys import OWN_SYSTEM, toy_tokenizer

pytestmark = pytest.mark.usefixtures("quick_compilation")

END = "<|im_end|>"
SENT_CALL = {
    "id": "1",
    "type": "function",
    "function": {"name": "search", "arguments": '{"query":"Ada Kerr"}'},
}
FIELDS = {"tools": [TOOL], "temperature": 0, "max_tokens": 80, "return_token_ids": True}


def read_chats(messages):
    return ChatBody.model_validate({"messages": messages}).chat()


def prompt_of(messages, **fields):
    """The prompt of a chat in the session in which `answer` stores its turns."""
    body = {"messages": messages, **FIELDS, **fields}
    return list(parse_chat_request(json.dumps(body).encode(), "one", MODEL).prompt_ids)


def answer(text, read=parse_chat_request, respond=build_chat_response, **fields):
    """The response to a request whose model writes a text, and all of its ids."""
    body = {"messages": ASKED, **FIELDS, **fields}
    completion = Completion(MODEL, read(json.dumps(body).encode(), "one", MODEL), "one")
    ids = (*TOKENIZER.encode(text), TOKENIZER.eos_ids[0])
    chunk = OutputChunk(
        token_ids=ids,
        logprobs=(0.0,) * len(ids),
        finish_reason=STOP,
        text_bytes=len(text.encode()),
    )
    completion.choices[0].append(chunk)
    return respond(completion), [*completion.request.prompt_ids, *ids]


@pytest.mark.parametrize(
    ("arguments", "content"),
    [('{"query": "Ada Kerr"}', "I look."), ('{ "query":"Ada Kerr" }', "I look.\n")],
)
def test_the_result_stands_behind_what_was_sampled(client, arguments, content):
    """However a client writes the arguments, the turn is the one that was sampled."""
    client.prefix = f"/r/{len(arguments)}-{len(content)}"
    first = client.chat(ASKED, **FIELDS)
    stored = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
    assert TOKENIZER.decode(first["choices"][0]["token_ids"]) == "I look." + CALL + END
    reply = first["choices"][0]["message"]
    call = {**reply["tool_calls"][0], "function": {"name": "search", "arguments": arguments}}
    messages = [
        *ASKED,
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "She <|im_end|> designs."},
    ]
    second = client.chat(messages, **{**FIELDS, "max_tokens": 2})
    prompt = second["prompt_token_ids"]
    assert prompt[: len(stored)] == stored
    assert TOKENIZER.decode(prompt[len(stored) :]) == (
        "\n<|im_start|>user\n<tool_response>\nShe <|im_end|> designs.\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert prompt[len(stored) :].count(TOKENIZER.eos_ids[0]) == 1  # the text's own is forged
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == len(stored) - 1


@pytest.mark.parametrize(
    ("written", "sent_back", "is_same"),
    [
        # As Pydantic AI 2.68 takes thoughts out of a text and writes them again.
        ("<think> find Ada </think>", "<think>\n find Ada \n</think>", True),
        ("<think>find</think>I look.", "<think>\nfind\n</think>\n\nI look.", True),
        ("<think> find Ada </think>", "", False),
        ("<think> find Ada </think>", "<think> find Eve </think>", False),
    ],
)
def test_thoughts_are_the_same_whatever_blanks_are_around(written, sent_back, is_same):
    _, stored = answer(written + CALL)
    sent = {"role": "assistant", "content": sent_back, "tool_calls": [SENT_CALL]}
    prompt = prompt_of([*ASKED, sent, *ASKED])
    assert (prompt[: len(stored)] == stored) is is_same


@pytest.mark.parametrize(
    "query", ["</tool_call>", "<think>", "</think>", "<answer>a</answer>", CALL]
)
def test_tags_in_the_arguments_of_a_call_are_text(query):
    call = with_arguments(json.dumps({"query": query}))
    for thought in ("", f"<think>{call}</think>"):
        reply = parse_reply(f"{thought}I look. {call}", has_tools=True)
        assert [(c.name, c.arguments) for c in reply.calls] == [("search", {"query": query})]
        assert reply.content == f"{thought}I look."


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
        with_arguments('{"a": 1e999}'),
        with_arguments('{"a": [-1e999]}'),
        with_arguments(f'{{"a": {"9" * 400}}}'),  # beyond doubles
    ],
)
def test_what_is_no_call_is_text(text):
    response, _ = answer(text)
    [choice] = response["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"] == {"role": "assistant", "content": text}


def as_javascript(text):
    """JSON as a client in JavaScript writes what it has parsed."""
    doubles = json.loads(text, parse_int=float)

    def written(value):
        if isinstance(value, dict):
            return {name: written(one) for name, one in value.items()}
        if isinstance(value, list):
            return [written(one) for one in value]
        # Its shortest digits, padded with zeros: 12345678901234567000.
        return int(Decimal(repr(value))) if isinstance(value, float) and value % 1 == 0 else value

    return json.dumps(written(doubles), ensure_ascii=False, separators=(",", ":"))


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": null, "b": [null]}',
        '{"a": 1.0, "b": [1e2, -0.0, 1.5], "c": true}',
        '{"id": 12345678901234567890}',
        r'{"a": "\ud800", "\udc00": 1}',
    ],
)
def test_what_a_client_sends_back_is_what_was_sampled(arguments):
    first, stored = answer(with_arguments(arguments))
    [call] = first["choices"][0]["message"]["tool_calls"]
    text = as_javascript(call["function"]["arguments"])
    call = {**call, "function": {"name": "search", "arguments": text}}
    behind = {"role": "user", "content": "?"}
    messages = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}, behind]
    assert prompt_of(messages)[: len(stored)] == stored
    # By the other dialect, whose answers hold the arguments as they are.
    block = {"type": "tool_use", "id": "x", "name": "search", "input": json.loads(text)}
    messages = [*ASKED, {"role": "assistant", "content": [block]}, behind]
    body = {"messages": messages, "tools": [CLIENT_TOOL], "max_tokens": 1}
    request = parse_messages_request(json.dumps(body).encode(), "one", MODEL)
    assert list(request.prompt_ids[: len(stored)]) == stored


@pytest.mark.parametrize(
    ("one", "other", "are_same"),
    [
        ('{"a": 1}', '{"a": 1.0}', True),
        ('{"a": 1}', '{"a": true}', False),
        ('{"a": 0}', '{"a": false}', False),
        ('{"a": 0}', '{"a": null}', False),
        ('{"a": 1}', '{"a": "1"}', False),
        ('{"a": 1}', '{"a": 1.5}', False),
        ('{"a": null}', "{}", False),
    ],
)
def test_calls_are_the_same_by_value(one, other, are_same):
    replies = [parse_reply(with_arguments(text), has_tools=True) for text in (one, other)]
    assert (replies[0].match_key == replies[1].match_key) == are_same


def nested(depth):
    return '{"a":' + "[" * (depth - 1) + "]" * (depth - 1) + "}"


def test_calls_as_deep_as_are_read_back():
    # In a body of messages five more are around the arguments, and 100 are read.
    [call] = parse_reply(with_arguments(nested(95)), has_tools=True).calls
    assert json.dumps(call.arguments, separators=(",", ":")) == nested(95)
    block = {"type": "tool_use", "name": "f", "input": call.arguments}
    body = {"messages": [{"role": "assistant", "content": [block]}], "max_tokens": 1}
    parsed = parse_body(json.dumps(body).encode(), MessagesBody)
    assert parsed.messages[0].content[0].input == call.arguments
    for depth in (96, 101, 500, 5000):
        text = with_arguments(nested(depth))
        reply = parse_reply(text, has_tools=True)
        assert (reply.calls, reply.content) == ((), text)


def test_the_templates_own_system_message_is_rendered():
    tokenizer = toy_tokenizer(chat_template=OWN_SYSTEM)
    chats = ChatHistory(tokenizer, max_prompt_tokens=400)
    for chat in (ASKED, [{"role": "system", "content": "Search."}, *ASKED]):
        expected = tokenizer._hf_tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=False
        )
        assert chats.build_prompt("one", read_chats(chat), []) == expected


def test_parallel_calls_may_be_off():
    two_calls = CALL + CALL.replace("Ada Kerr", "Eve Kerr")
    for allowed, count in ((None, 2), (True, 2), (False, 1)):
        response, _ = answer(two_calls, parallel_tool_calls=allowed)
        [choice] = response["choices"]
        calls = choice["message"]["tool_calls"]
        assert (len(calls), choice["finish_reason"]) == (count, "tool_calls")
    # A chat with the one call and its result holds that alone.
    result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "1"}
    text = TOKENIZER.decode(prompt_of([*ASKED, choice["message"], result]))
    assert "Ada Kerr" in text
    assert "Eve Kerr" not in text
    for disabled, count in ((False, 2), (True, 1)):
        choice = {"type": "auto", "disable_parallel_tool_use": disabled}
        changes = {"tools": [CLIENT_TOOL], "tool_choice": choice}
        response, _ = answer(two_calls, parse_messages_request, build_messages_response, **changes)
        assert [block["type"] for block in response["content"]] == ["tool_use"] * count


def test_a_server_has_stop_strings_by_default():
    with serving(engine_that_writes("I look up Ada."), stops=("up", "Ada")) as (_, client):
        texts = []
        for fields in ({}, {"stop": None}, {"stop": "Ada"}, {"stop": []}):
            [choice] = client.chat(ASKED, **FIELDS, **fields)["choices"]
            texts.append(choice["message"]["content"])
        assert texts == ["I look ", "I look ", "I look up ", "I look up Ada."]
        prompt = TOKENIZER.render_prompt(ASKED, [TOOL])
        ids = client.generate(prompt, temperature=0.0, max_tokens=80)["token_ids"]
        assert TOKENIZER.decode(ids).startswith("I look up")
        assert "Ada" not in TOKENIZER.decode(ids)
        body = {"messages": ASKED, "tools": [CLIENT_TOOL], "temperature": 0, "max_tokens": 80}
        for stops, text in ({}, "I look "), ({"stop_sequences": []}, "I look up Ada."):
            status, value = client.post("/v1/messages", {**body, **stops})
            assert (status, value["content"]) == (200, [{"type": "text", "text": text}])
    assert value["stop_reason"] == "end_turn"


@pytest.mark.parametrize("arguments", ['{"query": "Ada <|im_end|>"}', {"query": "Ada <|im_end|>"}])
def test_fields_of_messages_are_rendered_as_transformers_renders_them(arguments):
    call = {**SENT_CALL, "function": {"name": "search", "arguments": {"query": "Ada <|im_end|>"}}}
    thinking = {"role": "assistant", "content": "I look.", "reasoning_content": "Who is it?"}
    chat = [*ASKED, {**thinking, "tool_calls": [call]}]
    chat.append({"role": "tool", "tool_call_id": "1", "name": "search", "content": "She designs."})
    text = TOKENIZER._hf_tokenizer.apply_chat_template(
        chat, tools=[TOOL], tokenize=False, add_generation_prompt=True
    )
    call = {**call, "function": {"name": "search", "arguments": arguments}}
    chat[1] = {**thinking, "tool_calls": [call], "refusal": None, "audio": None}
    prompt = prompt_of(chat)
    assert TOKENIZER.decode(prompt) == text
    special = prompt.count(TOKENIZER.eos_ids[0])
    assert special == text.count("<|im_end|>") - 1  # the one in the arguments is plain text


def test_tools_that_are_not_to_be_called_are_not_described():
    assert prompt_of(ASKED, tool_choice="none") == TOKENIZER.render_prompt(ASKED)


class TestOpenAI:
    """The client library of OpenAI, which parses and checks what it is sent."""

    @pytest.fixture
    def library(self, port):
        address = f"http://127.0.0.1:{port}/r/library/v1"
        with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as library:
            yield library

    def test_a_chat_with_tools(self, library):
        assert [one.id for one in library.models.list()] == ["tiny"]
        ask = {"model": "tiny", "tools": [TOOL], "temperature": 0, "max_completion_tokens": 80}
        ask["extra_body"] = {"return_token_ids": True}
        first = library.chat.completions.create(messages=ASKED, logprobs=True, **ask)
        [choice] = first.choices
        assert first.prompt_token_ids == TOKENIZER.render_prompt(ASKED, [TOOL])
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
        assert len(choice.logprobs.content) == len(choice.token_ids)
        [call] = choice.message.tool_calls
        assert (call.type, call.function.name) == ("function", "search")
        assert json.loads(call.function.arguments) == {"query": "Ada Kerr"}
        messages = [
            *ASKED,
            choice.message,
            {"role": "tool", "tool_call_id": call.id, "content": "1"},
        ]
        second = library.chat.completions.create(messages=messages, **ask)
        stored = first.prompt_token_ids + choice.token_ids
        assert second.prompt_token_ids[: len(stored)] == stored
        assert second.usage.prompt_tokens_details.cached_tokens == len(stored) - 1

    def test_its_stream(self, library):
        ask = {"model": "tiny", "tools": [TOOL], "temperature": 0, "messages": ASKED}
        with library.chat.completions.stream(**ask, max_tokens=80) as stream:
            for _ in stream:
                pass
            final = stream.get_final_completion()
        [choice] = final.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I look."
        assert choice.message.tool_calls[0].function.name == "search"

    def test_its_samples_seeds_and_stops(self, library):
        ask = {"model": "tiny", "messages": [{"role": "user", "content": "?"}], "max_tokens": 8}
        first, again, other = (
            [
                (choice.index, choice.message.content)
                for choice in library.chat.completions.create(
                    **ask, n=3, seed=seed, temperature=50.0
                ).choices
            ]
            for seed in (7, 7, 8)
        )
        assert [index for index, _ in first] == [0, 1, 2]
        assert first == again != other
        whole = library.chat.completions.create(
            model="tiny", messages=ASKED, tools=[TOOL], temperature=0, max_tokens=80, stop="ook"
        )
        [choice] = whole.choices
        assert (choice.message.content, choice.finish_reason) == ("I l", "stop")

    def test_its_errors(self, library):
        with pytest.raises(openai.BadRequestError, match="maximum context length") as refused:
            library.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "x y " * 600}]
            )
        assert refused.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError) as refused:
            library.chat.completions.create(
                model="tiny", messages=ASKED, response_format={"type": "json_object"}
            )
        assert refused.value.param == "response_format"
