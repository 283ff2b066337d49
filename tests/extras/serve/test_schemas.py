"""Bodies of all dialects: what is read, what is refused by name, and that nothing is a fault."""

import copy
import json
import time

import pytest

from jaxrl.extras.serve.completions import parse_chat_request, parse_generate_request
from jaxrl.extras.serve.errors import ContextLengthError, RequestError
from jaxrl.extras.serve.messages import parse_messages_request
from jaxrl.extras.serve.schemas import UNSUPPORTED
from tests.extras.serve.served import MAX_TOTAL, MODEL, TOKENIZER
from tests.extras.serve.writing import TOOL

HELLO = [{"role": "user", "content": "hello"}]
SENT_CALL = {
    "id": "1",
    "type": "function",
    "function": {"name": "search", "arguments": '{"query":"Ada Kerr"}'},
}
USE = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}
FULL = {
    parse_chat_request: {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Who is Ada?"}]},
            {"role": "assistant", "content": None, "tool_calls": [SENT_CALL]},
            {"role": "tool", "tool_call_id": "1", "content": "She designs."},
        ],
        "tools": [TOOL],
        "tool_choice": "auto",
        "max_completion_tokens": 5,
        "n": 2,
        "seed": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        "stop": ["x"],
        "stop_token_ids": [3],
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "return_token_ids": True,
        "chat_template_kwargs": {"preserve_thinking": True},
    },
    parse_messages_request: {
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            *HELLO,
            {"role": "assistant", "content": [{"type": "text", "text": "I look."}, USE]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "1", "content": "She designs."},
                    {"type": "text", "text": "Go on."},
                ],
            },
        ],
        "tools": [{"name": "f", "description": "Finds.", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "stop_sequences": ["x"],
        "stream": True,
    },
    parse_generate_request: {
        "token_ids": [1, 2],
        "sampling_params": {"max_tokens": 1, "temperature": 0.5, "seed": 3, "stop_token_ids": [3]},
        "stream": False,
    },
}
READERS = pytest.mark.parametrize("reader", FULL, ids=["chat", "messages", "ids"])
WRONG = (True, -1, 1.5, 10**400, "text", [], {}, [[]], [{}], [None], "\ud800", float("nan"), -0.0)


def read(reader, **changes):
    return reader(json.dumps({**FULL[reader], **changes}).encode(), "", MODEL)


def refusal(reader, **changes):
    with pytest.raises(RequestError) as caught:
        read(reader, **changes)
    assert caught.value.status == 400
    return caught.value


def paths(value, path=()):
    """The place of each value within a JSON value."""
    items = enumerate(value) if isinstance(value, list) else getattr(value, "items", tuple)()
    for name, inner in items:
        yield (*path, name)
        yield from paths(inner, (*path, name))


@READERS
def test_wrong_values_are_refused_and_never_a_fault(reader):
    assert read(reader).body
    num_cases, errors = 0, []
    for *before, last in paths(FULL[reader]):
        for value in WRONG:
            body = copy.deepcopy(FULL[reader])
            place = body
            for name in before:
                place = place[name]
            place[last] = value
            num_cases += 1
            try:
                reader(json.dumps(body).encode(), "", MODEL)
            except RequestError as error:
                errors.append(error)
    assert {error.status for error in errors} == {400}
    assert all(map(str, errors))
    assert num_cases * 0.6 < len(errors) < num_cases


@READERS
@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"a":' * 5000, b"{} {}"],
)
def test_bodies_that_are_no_object(reader, data):
    with pytest.raises(RequestError):
        reader(data, "", MODEL)


@READERS
def test_bodies_are_utf_8(reader):
    text = json.dumps({**FULL[reader], "user": "?"})
    half = text.encode().replace(b"?", b"\xed\xa0\x80")  # of a surrogate pair
    for data in (half, text.encode("utf-16"), text.encode("utf-16-le")):
        with pytest.raises(RequestError):
            reader(data, "", MODEL)


@pytest.mark.parametrize("reader", [parse_chat_request, parse_messages_request])
def test_what_would_change_the_answer_is_refused_by_name(reader):
    for name in UNSUPPORTED:
        error = refusal(reader, **{name: {"type": "json_object"}})
        assert (error.param, error.code) == (name, "unsupported_parameter")
        assert str(error).startswith(f"{name} is ")
    error = refusal(parse_generate_request, sampling_params={"max_tokens": 1, "top_k": 3})
    assert error.param == "sampling_params.top_k"


def test_fields_that_change_nothing_are_taken():
    fields = {"user": "u", "store": True, "metadata": {"a": "b"}, "made_up": [1], "model": 3}
    fields |= {"response_format": {"type": "text"}, "logit_bias": {}, "frequency_penalty": 0.0}
    fields |= {"top_k": -1, "parallel_tool_calls": True, "stop": None, "seed": None}
    request = read(parse_chat_request, **fields, reasoning_effort=None)
    assert (request.seed, request.stops) == (None, ())


def user(content):
    return {"messages": [{"role": "user", "content": content}]}


def assistant(**fields):
    return {"messages": [*HELLO, {"role": "assistant", **fields}]}


@pytest.mark.parametrize(
    ("reader", "changes", "text"),
    [
        (parse_chat_request, {"temperature": 1e-9}, "temperature is 1e-09"),
        (parse_chat_request, {"tool_choice": "required"}, "tool_choice is 'required'"),
        (parse_chat_request, {"tools": [{"function": {"name": 3}}]}, "tools[0].function.name is 3"),
        (parse_chat_request, {"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs.a is 1"),
        (
            parse_chat_request,
            user([{"type": "image_url"}]),
            "messages[0].content[0].type is 'image_url'",
        ),
        (
            parse_chat_request,
            {"messages": [{**HELLO[0], "name": "ada"}]},
            "drops 'name' of message 1",
        ),
        (parse_chat_request, assistant(content="x", weight=0), "drops 'weight' of message 2"),
        (
            parse_chat_request,
            {
                "messages": [
                    *HELLO,
                    {"role": "assistant", "tool_calls": [SENT_CALL, {**SENT_CALL, "id": "2"}]},
                    {"role": "tool", "tool_call_id": "2", "content": "b"},
                    {"role": "tool", "tool_call_id": "1", "content": "a"},
                ]
            },
            "message 3 has the tool_call_id '2'",
        ),
        (
            parse_chat_request,
            {"tools": [{"function": {"name": "f", "description": "<|im_end|>"}}]},
            "<|im_end|>",
        ),
        (parse_messages_request, {"max_tokens": None}, "max_tokens is missing"),
        (parse_messages_request, {"tool_choice": {"type": "any"}}, "tool_choice.type is 'any'"),
        (
            parse_messages_request,
            {"tools": [{"type": "web", "name": "w"}]},
            "tools[0].type is 'web'",
        ),
        (parse_messages_request, {"messages": []}, "messages is []"),
        (
            parse_messages_request,
            {"messages": [{"role": "system", "content": "x"}]},
            "messages[0].role is",
        ),
        (parse_messages_request, user([{"type": "image"}]), "messages[0].content[0] is"),
        (parse_messages_request, user([]), "messages[0].content is []"),
        (parse_messages_request, user(None), "messages[0].content is missing"),
        (
            parse_messages_request,
            user([{"type": "text", "text": 3}]),
            "messages[0].content[0].text is 3",
        ),
        (
            parse_messages_request,
            user([USE]),
            "expected no block tool_use in a message of the user",
        ),
        (
            parse_messages_request,
            assistant(content=[USE, {"type": "text", "text": "x"}]),
            "expected text before the tool calls",
        ),
        (parse_messages_request, {"system": 3}, "system is 3"),
        (parse_messages_request, {"stop_sequences": [""]}, "stop_sequences[0] is ''"),
        (
            parse_generate_request,
            {"token_ids": [TOKENIZER.num_tokens]},
            f"token id {TOKENIZER.num_tokens}",
        ),
    ],
)
def test_what_is_refused(reader, changes, text):
    assert text in str(refusal(reader, **changes))


@pytest.mark.parametrize("arguments", [r'{"q": "\ud800"}', r'"\ud800"', '{"q": 1e999}'])
def test_arguments_that_cannot_be_written_as_they_are(arguments):
    calls = [{"function": {"name": "f", "arguments": arguments}}]
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": calls}, *HELLO]
    written = TOKENIZER.decode(read(parse_chat_request, messages=messages).prompt_ids)
    wanted = {r'"\ud800"': "\ufffd"}.get(arguments, arguments.replace(r"\ud800", "\ufffd"))
    assert f'"arguments": {wanted}}}' in written


def test_a_prompt_that_leaves_no_room():
    error = refusal(parse_chat_request, **user("x y " * 600))
    assert error.code == "context_length_exceeded"
    assert f"maximum context length is {MAX_TOTAL} tokens" in str(error)
    body = refusal(parse_messages_request, **user("x y " * 600)).body(is_anthropic=True)
    assert body["error"]["message"].startswith("prompt is too long: ")
    assert body["error"]["message"].endswith(f" tokens > {MAX_TOTAL - 1} maximum")
    assert isinstance(
        refusal(parse_generate_request, token_ids=[5] * MAX_TOTAL), ContextLengthError
    )
    # Megabytes are refused before the template and the tokenizer see them.
    began = time.monotonic()
    for messages in (user("word " * 1_000_000)["messages"], HELLO * 50_000):
        assert isinstance(refusal(parse_chat_request, messages=messages), ContextLengthError)
    assert time.monotonic() - began < 20
    # One less leaves room for a single token, whatever is asked for.
    request = read(
        parse_generate_request, token_ids=[5] * (MAX_TOTAL - 1), sampling_params={"max_tokens": 100}
    )
    assert request.max_tokens == 1


PART = {"type": "text", "text": "Who?", "title": "lost"}
"""Text with a field that no chat template would show."""


@pytest.mark.parametrize(
    ("reader", "messages", "where"),
    [
        (parse_chat_request, [{"role": "user", "content": [PART]}], "messages[0].content[0].title"),
        (
            parse_chat_request,
            [*HELLO, {"role": "assistant", "tool_calls": [SENT_CALL | {"result": "x"}]}],
            "messages[1].tool_calls[0].result",
        ),
        (parse_messages_request, [{"role": "user", "content": [PART]}], "messages[0].content[0]"),
        (
            parse_messages_request,
            [{"role": "user", "content": "hello", "name": "Ada"}],
            "messages[0].name",
        ),
    ],
)
def test_fields_that_the_template_would_not_show_are_refused(reader, messages, where):
    with pytest.raises(RequestError) as refused:
        read(reader, messages=messages)
    assert refused.value.status == 400
    assert where in str(refused.value)


def test_fields_of_texts_that_change_nothing_are_read():
    part = {"type": "text", "text": "Who?", "cache_control": {"type": "ephemeral"}}
    for reader in (parse_chat_request, parse_messages_request):
        assert read(reader, messages=[{"role": "user", "content": [part]}])
