"""Calls of tools: described by the template, read back, gone on from; with OpenAI's own client."""

import json
from decimal import Decimal

import openai
import pytest

from jaxrl.extras.serve.chats import ChatHistory, parse_reply
from jaxrl.extras.serve.schemas import ChatBody, MessagesBody, parse_body
from tests.extras.serve.served import TOKENIZER, serving
from tests.extras.serve.writing import ASKED, CALL, TOOL, engine_that_writes
from tests.toys import OWN_SYSTEM, toy_tokenizer

pytestmark = pytest.mark.usefixtures("quick_compilation")


END = "<|im_end|>"


def read_messages(messages):
    return ChatBody.model_validate({"messages": messages}).chat()


SENT_CALL = {
    "id": "1",
    "type": "function",
    "function": {"name": "search", "arguments": '{"query":"Ada Kerr"}'},
}
FIELDS = {"tools": [TOOL], "temperature": 0, "max_tokens": 80, "return_token_ids": True}


def test_a_call_is_read_back(client):
    found = client.chat(ASKED, **FIELDS)
    [choice] = found["choices"]
    assert found["prompt_token_ids"] == TOKENIZER.render_prompt(ASKED, [TOOL])
    assert TOKENIZER.decode(choice["token_ids"]) == "I look." + CALL + "<|im_end|>"
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I look."
    [call] = choice["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["function"]["name"] == "search"
    assert json.loads(call["function"]["arguments"]) == {"query": "Ada Kerr"}


def test_a_stream_has_the_same_call(client):
    whole = client.chat(ASKED, **FIELDS)["choices"][0]
    body = {"messages": ASKED, "stream": True, **FIELDS}
    chunks = [json.loads(data) for _, data in client.stream("/v1/chat/completions", body)[:-1]]
    deltas = [one["choices"][0]["delta"] for one in chunks]
    assert "".join(one.get("content", "") for one in deltas) == "I look."
    [call] = [call for one in deltas for call in one.get("tool_calls", [])]
    assert call["index"] == 0
    assert call["function"] == whole["message"]["tool_calls"][0]["function"]
    ids = [id for one in chunks for id in one["choices"][0].get("token_ids", [])]
    assert ids == whole["token_ids"]


@pytest.mark.parametrize("arguments", ['{"query": "Ada Kerr"}', '{ "query":"Ada Kerr" }'])
@pytest.mark.parametrize("content", ["I look.", "I look.\n"])
def test_the_result_stands_behind_what_was_sampled(client, arguments, content):
    """However a client writes the arguments, the turn is the one that was sampled."""
    client.prefix = f"/r/{len(arguments)}-{len(content)}"
    first = client.chat(ASKED, **FIELDS)
    stored = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
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
    chats = ChatHistory(TOKENIZER, max_prompt_tokens=400)
    asked = read_messages(ASKED)
    reply = parse_reply(written + CALL, has_tools=True)
    sampled = [*chats.build_prompt("one", asked, [TOOL]), *TOKENIZER.encode(written + CALL + END)]
    chats.store("one", [*asked, reply], [TOOL], sampled)
    sent = {"role": "assistant", "content": sent_back, "tool_calls": [SENT_CALL]}
    prompt = chats.build_prompt("one", read_messages([*ASKED, sent, *ASKED]), [TOOL])
    assert (prompt[: len(sampled)] == sampled) is is_same


@pytest.mark.parametrize(
    "query", ["</tool_call>", "<think>", "</think>", "<answer>a</answer>", CALL]
)
def test_tags_in_the_arguments_of_a_call_are_text(query):
    call = with_arguments(json.dumps({"query": query}))
    for thought in ("", f"<think>{call}</think>"):
        reply = parse_reply(f"{thought}I look. {call}", has_tools=True)
        assert [(c.name, c.arguments) for c in reply.calls] == [("search", {"query": query})]
        assert reply.content == f"{thought}I look."


def test_a_call_that_a_stop_string_cuts_is_text():
    """Whether the closing tag that stopped the model was its own or in a string."""
    for query in ('"Ada', '"Ada"}}'):
        text = f'I look. <tool_call>{{"name": "search", "arguments": {{"query": {query}'
        reply = parse_reply(text, has_tools=True)
        assert (reply.content, reply.calls) == (text, ())


def with_arguments(text):
    return f'<tool_call>\n{{"name": "search", "arguments": {text}}}\n</tool_call>'


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


SENT_BACK = [
    '{"a": null, "b": [null]}',
    '{"a": 1.0, "b": [1e2, -0.0, 1.5], "c": true}',
    '{"id": 12345678901234567890}',
    r'{"a": "\ud800", "\udc00": 1}',
]


@pytest.mark.parametrize("arguments", SENT_BACK)
def test_what_a_client_sends_back_is_what_was_sampled(arguments):
    with serving(engine_that_writes(with_arguments(arguments))) as (_, client):
        first = client.chat(ASKED, **FIELDS)
        stored = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
        assert with_arguments(arguments) in TOKENIZER.decode(stored)
        [call] = first["choices"][0]["message"]["tool_calls"]
        text = as_javascript(call["function"]["arguments"])
        call = {**call, "function": {"name": "search", "arguments": text}}
        behind = {"role": "user", "content": "?"}
        messages = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}, behind]
        second = client.chat(messages, **{**FIELDS, "max_tokens": 1})
        assert second["prompt_token_ids"][: len(stored)] == stored
        # By the other dialect, whose answers hold the arguments as they are.
        block = {"type": "tool_use", "id": "x", "name": "search", "input": json.loads(text)}
        body = {
            "messages": [*ASKED, {"role": "assistant", "content": [block]}, behind],
            "tools": [{"name": "search", "description": "Finds.",
                       "input_schema": TOOL["function"]["parameters"]}],
            "max_tokens": 1, "return_token_ids": True,
        }  # fmt: skip
        status, value = client.post("/v1/messages", body)
        assert (status, value.get("prompt_token_ids", value)[: len(stored)]) == (200, stored)


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


def test_calls_that_nobody_sampled_are_rendered(client):
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "x", "content": "1"},
    ]
    found = client.chat(messages, **{**FIELDS, "max_tokens": 1})
    text = TOKENIZER.decode(found["prompt_token_ids"])
    written = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{written}<|im_end|>" in text


def test_the_templates_own_system_message_is_rendered():
    tokenizer = toy_tokenizer(chat_template=OWN_SYSTEM)
    chats = ChatHistory(tokenizer, max_prompt_tokens=400)
    for chat in (ASKED, [{"role": "system", "content": "Search."}, *ASKED]):
        expected = tokenizer._hf_tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=False
        )
        assert chats.build_prompt("one", read_messages(chat), []) == expected


TWO_CALLS = CALL + CALL.replace("Ada Kerr", "Eve Kerr")


def test_parallel_calls_may_be_off():
    with serving(engine_that_writes(TWO_CALLS)) as (_, client):
        fields = {**FIELDS, "max_tokens": 120}
        for allowed, count in ((None, 2), (True, 2), (False, 1)):
            [choice] = client.chat(ASKED, **fields, parallel_tool_calls=allowed)["choices"]
            assert TOKENIZER.decode(choice["token_ids"]) == TWO_CALLS + END
            calls = choice["message"]["tool_calls"]
            assert (len(calls), choice["finish_reason"]) == (count, "tool_calls")
        # A chat with the one call and its result holds that alone.
        chat = [
            *ASKED,
            choice["message"],
            {"role": "tool", "tool_call_id": calls[0]["id"], "content": "1"},
        ]
        body = {**fields, "max_tokens": 1, "parallel_tool_calls": False}
        text = TOKENIZER.decode(client.chat(chat, **body)["prompt_token_ids"])
        assert "Ada Kerr" in text
        assert "Eve Kerr" not in text
        tool = {"name": "search", "description": "Finds.",
                "input_schema": TOOL["function"]["parameters"]}  # fmt: skip
        for disabled, count in ((False, 2), (True, 1)):
            choice = {"type": "auto", "disable_parallel_tool_use": disabled}
            body = {"messages": ASKED, "tools": [tool], "tool_choice": choice}
            body |= {"temperature": 0, "max_tokens": 120}
            status, value = client.post("/v1/messages", body)
            kinds = [block["type"] for block in value["content"]]
            assert (status, kinds.count("tool_use")) == (200, count)


def test_a_server_has_stop_strings_by_default():
    with serving(engine_that_writes("I look up Ada."), stops=("up", "Ada")) as (_, client):
        texts = []
        for fields in ({}, {"stop": None}, {"stop": "Ada"}, {"stop": []}):
            [choice] = client.chat(ASKED, **FIELDS, **fields)["choices"]
            texts.append(choice["message"]["content"])
        assert texts == ["I look ", "I look ", "I look up ", "I look up Ada."]
        prompt = TOKENIZER.render_prompt(ASKED, [TOOL])
        answer = client.generate(prompt, temperature=0.0, max_tokens=80)
        assert TOKENIZER.decode(answer["token_ids"]).startswith("I look up")
        assert "Ada" not in TOKENIZER.decode(answer["token_ids"])
        tool = {"name": "search", "description": "Finds.",
                "input_schema": TOOL["function"]["parameters"]}  # fmt: skip
        body = {"messages": ASKED, "tools": [tool], "temperature": 0, "max_tokens": 80}
        for stops, text in ({}, "I look "), ({"stop_sequences": []}, "I look up Ada."):
            status, value = client.post("/v1/messages", {**body, **stops})
            assert (status, value["content"]) == (200, [{"type": "text", "text": text}])
    assert value["stop_reason"] == "end_turn"


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        ([{**ASKED[0], "name": "ada"}], "drops 'name' of message 1"),
        ([*ASKED, {"role": "assistant", "content": "x", "weight": 0}], "drops 'weight' of message"),
        (
            [*ASKED, {"role": "assistant", "content": "x", "reasoning_content": "hm"}, *ASKED],
            "drops 'reasoning_content' of message 2",
        ),
        (
            [*ASKED, {"role": "assistant", "tool_calls": [{**SENT_CALL, "extra": 1}]}],
            "messages[1].tool_calls[0].extra is 1",
        ),
        (
            [{"role": "user", "content": [{"text": "x", "image_url": {"url": "u"}}]}],
            "messages[0].content[0].image_url is",
        ),
        (
            [
                *ASKED,
                {"role": "assistant", "tool_calls": [SENT_CALL, {**SENT_CALL, "id": "2"}]},
                {"role": "tool", "tool_call_id": "2", "content": "b"},
                {"role": "tool", "tool_call_id": "1", "content": "a"},
            ],
            "message 3 has the tool_call_id '2'",
        ),
    ],
)
def test_what_the_template_drops_of_a_message_is_refused(client, messages, what):
    status, value = client.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    assert status == 400
    assert what in value["error"]["message"]


@pytest.mark.parametrize("arguments", ['{"query": "Ada Kerr"}', {"query": "Ada Kerr"}])
def test_arguments_may_be_text_or_an_object(client, arguments):
    call = {**SENT_CALL, "function": {"name": "search", "arguments": arguments}}
    chat = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}]
    found = client.chat(chat, **{**FIELDS, "max_tokens": 1})
    assert f"{CALL}<|im_end|>" in TOKENIZER.decode(found["prompt_token_ids"])


def test_fields_of_messages_are_rendered_as_transformers_renders_them(client):
    call = {**SENT_CALL, "function": {"name": "search", "arguments": {"query": "Ada <|im_end|>"}}}
    thinking = {"role": "assistant", "content": "I look.", "reasoning_content": "Who is it?"}
    chat = [*ASKED, {**thinking, "tool_calls": [call]}]
    chat.append({"role": "tool", "tool_call_id": "1", "name": "search", "content": "She designs."})
    text = TOKENIZER._hf_tokenizer.apply_chat_template(
        chat, tools=[TOOL], tokenize=False, add_generation_prompt=True
    )
    arguments = json.dumps(call["function"]["arguments"])
    call = {**call, "function": {"name": "search", "arguments": arguments}}
    chat[1] = {**thinking, "tool_calls": [call], "refusal": None, "audio": None}
    found = client.chat(chat, **{**FIELDS, "max_tokens": 1})
    assert TOKENIZER.decode(found["prompt_token_ids"]) == text
    special = found["prompt_token_ids"].count(TOKENIZER.eos_ids[0])
    assert special == text.count("<|im_end|>") - 1  # the one in the arguments is plain text


@pytest.mark.parametrize(
    "text",
    [
        CALL[:-12],  # never closed
        '<tool_call>\n{"name": "search"}\n</tool_call>',
        "<think>" + CALL + "</think>no",  # a thought calls nothing
        with_arguments('{"a": 1e999}'),
        with_arguments('{"a": [-1e999]}'),
    ],
)
def test_what_is_no_call_is_text(text):
    with serving(engine_that_writes(text)) as (_, client):
        [choice] = client.chat(ASKED, **FIELDS)["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"] == {"role": "assistant", "content": text}


def test_numbers_beyond_doubles_are_no_call():
    text = with_arguments(f'{{"a": {"9" * 400}}}')
    assert parse_reply(text, has_tools=True).content == text


def test_tools_that_are_not_to_be_called_are_not_described(client):
    found = client.chat(ASKED, **{**FIELDS, "max_tokens": 1}, tool_choice="none")
    assert found["prompt_token_ids"] == TOKENIZER.render_prompt(ASKED)
    for choice in ("required", {"type": "function", "function": {"name": "search"}}):
        body = {"messages": ASKED, "tools": [TOOL], "tool_choice": choice}
        status, value = client.post("/v1/chat/completions", body)
        assert (status, value["error"]["param"]) == (400, "tool_choice")


def test_a_description_cannot_forge_tokens(client):
    tool = {"type": "function", "function": {"name": "f", "description": "<|im_end|>"}}
    status, value = client.post("/v1/chat/completions", {"messages": ASKED, "tools": [tool]})
    assert status == 400
    assert "<|im_end|>" in value["error"]["message"]


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
        assert choice.finish_reason == "tool_calls"
        assert len(choice.logprobs.content) == len(choice.token_ids)
        [call] = choice.message.tool_calls
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
        first = library.chat.completions.create(**ask, n=3, seed=7, temperature=50.0)
        texts = [choice.message.content for choice in first.choices]
        assert [choice.index for choice in first.choices] == [0, 1, 2]
        again = library.chat.completions.create(**ask, n=3, seed=7, temperature=50.0)
        assert [choice.message.content for choice in again.choices] == texts
        other = library.chat.completions.create(**ask, n=3, seed=8, temperature=50.0)
        assert [choice.message.content for choice in other.choices] != texts
        whole = library.chat.completions.create(
            model="tiny", messages=ASKED, tools=[TOOL], temperature=0, max_tokens=80, stop="ook"
        )
        [choice] = whole.choices
        assert (choice.message.content, choice.finish_reason) == ("I l", "stop")

    def test_its_errors(self, library):
        with pytest.raises(openai.BadRequestError) as refused:
            library.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "x y " * 600}]
            )
        assert refused.value.code == "context_length_exceeded"
        assert "maximum context length" in str(refused.value)
        with pytest.raises(openai.BadRequestError) as refused:
            library.chat.completions.create(
                model="tiny", messages=ASKED, response_format={"type": "json_object"}
            )
        assert refused.value.param == "response_format"
