"""Compare the parsers of model output with slow ones that work another way."""

import json
import random
import re
import time

import pydantic_core
import pytest

from jaxrl.envs.protocol import (
    BAPO,
    SEARCH_R1,
    ParsedCall,
    ParsedTurn,
    extract_last_answer,
    extract_last_query,
    follows_qwen_format,
    parse_call,
    parse_tags,
    parse_tool_calls,
    qwen,
)
from jaxrl.envs.rewards.math_answers import extract_math_answer
from jaxrl.envs.rewards.rules import (
    extract_last_boxed,
    follows_bapo_format,
    is_abstention,
)
from jaxrl.envs.rewards.search_r1 import follows_search_r1_format

TOOLS = ("search", "python")
QWEN = qwen(TOOLS)
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "Ada"}}\n</tool_call>'
TAGGED = json.dumps({"name": "a", "arguments": {"b": "</think></tool_call><answer><tool_call>{"}})
FUNCTION = "<function=search>\n<parameter=query>\nAda\n</parameter>\n</function>"
MARKUP = "<function=a><parameter=b></think></answer><tool_response><</parameter></function>"
RESULT = "\n<tool_response>\nx\n</tool_response>"
SEEDS = (
    f"<think>a</think>{CALL}{CALL}{RESULT}{RESULT}<think>b</think>\n\n<answer>x</answer>",
    f"{CALL}{RESULT}<answer>I don't know</answer><|im_end|>",
    "<think>a</think><search> Ada </search>\n\n<information>b</information>\n\n<answer>c</answer>",
    r"<think>a</think><python>1</python> <result>b</result><answer>\boxed{c}</answer>",
    '<tool_call>{"name": "a", "arguments": {"b": [1, null, -2.5e3, "\\u00e9"]}}</tool_call>',
    f"<think>a</think><tool_call>{TAGGED}</tool_call>{RESULT}<answer>x</answer>",
    f"<think>a</think><tool_call>\n{FUNCTION}\n</tool_call>{RESULT}<answer>x</answer>",
    f"<think>a</think><tool_call>{MARKUP}</tool_call>{CALL}{RESULT}{RESULT}<answer>x</answer>",
)
PIECES = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<answer>", "</answer>", "<search>", "</search>", "<python>", "</python>", "<result>"),
    *("</result>", "<information>", "</information>", "<|im_end|>", "</s>", "\\boxed{", "}", "{"),
    *("<", ">", "/", " ", "\n", "\t", "a", "é", "\ud800", "\0", '"', ":", ",", "[", "]", "\\"),
    *('{"name": "search", "arguments": {}}', TAGGED, CALL, RESULT, "1e999", "NaN", "null"),
    *("< /answer >", "<Answer>", FUNCTION, MARKUP, "<function=a>", "</function>"),
    *("<parameter=b>", "</parameter>", "<function=", "<parameter="),
)


def random_text(rng):
    """Return random pieces, or a response with random edits."""
    if rng.random() < 0.4:
        return "".join(rng.choices(PIECES, k=rng.randint(0, 30)))
    text = rng.choice(SEEDS)
    for _ in range(rng.randint(1, 5)):
        start, end = sorted(rng.choices(range(len(text) + 1), k=2))
        end = min(end, start + 20)
        inserted = rng.choice((*PIECES, "", text[start:end] * 2))
        text = text[:start] + inserted + text[end:]
    return text


# Slow parsers, which work character by character or remove one tag at a time.


def tags_of(text, names):
    """Return all tags of these names with their positions."""
    tags = [tag for name in names for tag in (f"<{name}>", f"</{name}>")]
    return [
        (index, tag)
        for index in range(len(text))
        if text[index] == "<"
        for tag in tags
        if text[index : index + len(tag)] == tag
    ]


def slow_mask(text):
    """Defuse tags inside the JSON of calls, the shortest prefix of each that is an object.

    The same for the values of functions that are all of a call.
    """
    done, rest = "", text
    while "<tool_call>" in rest:
        before, tag, rest = rest.partition("<tool_call>")
        done += before + tag
        blanks = len(rest) - len(rest.lstrip())
        ends = [i + 1 for i, letter in enumerate(rest) if letter == "}"]
        end = next((end for end in ends if is_object(rest[blanks:end])), 0)
        done, rest = done + rest[:end].replace("<", "‹"), rest[end:]
        block, close, after = rest.partition("</tool_call>")
        if close and slow_function(block) is not None:
            done, rest = done + mask_values(block), close + after
    return done + rest


def slow_function(block):
    """Return name and texts of a function, from the left; None if it is not one."""
    rest = block.strip()
    if not rest.startswith("<function="):
        return None
    name, _, rest = rest.removeprefix("<function=").partition(">")
    arguments = {}
    while rest.lstrip().startswith("<parameter="):
        key, _, rest = rest.lstrip().removeprefix("<parameter=").partition(">")
        value, close, rest = rest.partition("</parameter>")
        if not is_name(key) or not close or "<tool_call>" in value:
            return None
        start, end = value.startswith("\n"), value.endswith("\n") and len(value) > 1
        arguments[key] = value[start : len(value) - end]
    return (name, arguments) if is_name(name) and rest.strip() == "</function>" else None


def is_name(text):
    return text != "" and not {*"<\n"} & {*text}


def mask_values(block):
    done, rest = "", block
    while "<parameter=" in rest:
        before, tag, rest = rest.partition("<parameter=")
        key, tag_end, rest = rest.partition(">")
        value, close, rest = rest.partition("</parameter>")
        done += before + tag + key + tag_end + value.replace("<", "‹") + close
    return done + rest


def is_object(text):
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def slow_message(text):
    """Return the text after the last closed thought, up to an open one."""
    message = text
    for index, tag in tags_of(text, ["think"]):
        if tag == "</think>":
            message = text[index + len(tag) :]
    opened = [index for index, tag in tags_of(message, ["think"]) if tag == "<think>"]
    return message[: opened[0]] if opened else message


def slow_calls(text):
    """Return the texts between the tags of calls; None for one that is not closed."""
    calls, begin = [], None
    for index, tag in tags_of(text, ["tool_call"]):
        if begin is None and tag == "<tool_call>":
            begin = index + len(tag)
        elif begin is not None and tag == "</tool_call>":
            calls.append(text[begin:index])
            begin = None
    return [*calls, None] if begin is not None else calls


def slow_parse_call(block):
    """Return name and arguments by another JSON parser; None if it is not a call."""
    if block.lstrip().startswith("<function="):
        return slow_function(block)
    try:
        call = pydantic_core.from_json(block, allow_inf_nan=False)
    except ValueError:
        return None
    fits = isinstance(call, dict) and isinstance(call.get("name"), str)
    fits = fits and isinstance(call.get("arguments"), dict)
    return (call["name"], call["arguments"]) if fits else None


def json_parsers_differ(block):
    """Lone surrogates and numbers beyond any float, on which JSON parsers disagree."""
    if block.lstrip().startswith("<function="):
        return False
    return "\\u" in block or re.search(r"[eE]|\d{300}", block) or "\ud800" in block


def is_call(block):
    if block is None or json_parsers_differ(block):
        return block is not None and isinstance(parse_call(block), ParsedCall)
    return slow_parse_call(block) is not None


def check_calls(turn):
    parsed = parse_tool_calls(turn)
    message = slow_message(slow_mask(turn))
    blocks = [block and block.replace("‹", "<") for block in slow_calls(message)]
    assert len(parsed.calls) == len(blocks)
    for call, block in zip(parsed.calls, blocks, strict=True):
        if block is None:
            assert not isinstance(call, ParsedCall)
        elif not json_parsers_differ(block):
            expected = slow_parse_call(block)
            assert (expected is None) == (not isinstance(call, ParsedCall)), block
            assert expected is None or expected == (call.tool, call.arguments)
    tags = [tag for _, tag in tags_of(message, ["answer"])]
    has_answer = "<answer>" in tags and "</answer>" in tags[tags.index("<answer>") :]
    assert parsed.is_answer == (not blocks and has_answer)
    assert parsed.is_malformed == (not blocks and not has_answer)


def remove_think_blocks(text):
    """Remove thoughts from the left, each from the last `<think>` before its end."""
    rest = ""
    while (end := text.find("</think>")) >= 0:
        start = text.rfind("<think>", 0, end)
        rest += text[: end + len("</think>")] if start < 0 else text[:start]
        text = text[end + len("</think>") :]
    return rest + text


def slow_format(text):
    """Accept rounds of calls and as many results, then an answer, tag by tag."""
    ends = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<end_of_turn>", "<eos>", "</s>")
    text = text.rstrip()
    while text.endswith(ends):
        text = text[: -len(next(end for end in ends if text.endswith(end)))].rstrip()
    text = remove_think_blocks(slow_mask(text))
    tags = [tag for _, tag in tags_of(text, ["think", "tool_call", "tool_response", "answer"])]
    while tags and tags[0] == "<tool_call>":
        count = 0
        for name in ("tool_call", "tool_response"):
            pair, number = [f"<{name}>", f"</{name}>"], 0
            while tags[:2] == pair:
                tags, number = tags[2:], number + 1
            if number == 0 or (name == "tool_response" and number != count):
                return False
            count = number
    calls_are_read = all(map(is_call, slow_calls(text)))
    return tags == ["<answer>", "</answer>"] and text.endswith("</answer>") and calls_are_read


def slow_query(turn, tag):
    if turn[-len(tag) - 3 :] != f"</{tag}>":
        return None
    inside = turn[: -len(tag) - 3]
    for index in range(len(inside), -1, -1):
        if inside[index : index + len(tag) + 2] == f"<{tag}>":
            return inside[index + len(tag) + 2 :].strip()
    return None


def check_tags(turn):
    parsed = parse_tags(turn, TOOLS)
    queries = [slow_query(turn, tool) for tool in TOOLS]
    closes = [turn.endswith(f"</{tool}>") for tool in TOOLS]
    if turn.endswith("</answer>"):
        assert parsed == ParsedTurn(is_answer=True)
    elif not any(closes):
        assert parsed == ParsedTurn(is_malformed=True)
    else:
        [(tool, query)] = [(t, q) for t, q, c in zip(TOOLS, queries, closes, strict=True) if c]
        assert (query is None) == (not parsed.calls)
        if query is not None:
            [call] = parsed.calls
            # Common indentation of further lines is removed.
            assert (call.tool, "".join(call.arguments.split())) == (tool, "".join(query.split()))
    assert extract_last_answer(turn) == "" or "<answer>" in turn


def check_sanitized(text):
    for protocol in (SEARCH_R1, BAPO, QWEN):
        clean = protocol.sanitize(text)
        insides = [part.partition(">") for part in clean.split("<")[1:]]
        inner = [inside.strip().removeprefix("/") for inside, end, _ in insides if end]
        names = [inside.strip().removesuffix("/").strip().lower() for inside in inner]
        assert not {*names} & {*protocol.tags}
        assert len(clean) == len(text)
        assert clean.encode().decode() == clean


def check_parsers(count, seed):
    rng = random.Random(seed)
    for _ in range(count):
        text = random_text(rng)
        check_calls(text)
        check_tags(text)
        check_sanitized(text)
        assert follows_qwen_format(text) == slow_format(text), text
        for protocol in (SEARCH_R1, BAPO, QWEN):
            protocol.final_answer(text)
            protocol.is_well_formed(text)
            protocol.format_reward(text)
            protocol.is_abstention(text)
            protocol.correctness(text, ["Ada"])


def test_parsers_agree_with_slow_ones():
    check_parsers(1_250, seed=0)


@pytest.mark.slow(instead="envs/test_parsers.py::test_parsers_agree_with_slow_ones")
def test_parsers_agree_with_slow_ones_on_many():
    check_parsers(100_000, seed=1)


SIZE = 100_000
"""Characters; quadratic time takes far longer than the limit below."""

HOSTILE = [
    *(piece * (SIZE // len(piece)) for piece in PIECES if len(piece) > 1 or piece in "<{ "),
    "<" + " " * SIZE + ">",
    "<tool_call>" + " " * SIZE + "</tool_call>",
    *(pair * (SIZE // len(pair)) for pair in ("<think></think", "<answer>a")),
    "<tool_call>" * (SIZE // 11) + "</tool_call>",
    "<think>" * (SIZE // 7) + "<search>" * (SIZE // 8) + "</search>",
    "<python>" * (SIZE // 16) + "</python>" * (SIZE // 16) + "<result>" * (SIZE // 16),
    "<search>" + " \n\t" * (SIZE // 3) + "</search>",
    "<answer>" + "\\boxed{" * (SIZE // 7) + "}" * (SIZE // 7) + "</answer>",
    "<tool_call>" + json.dumps({"name": "a", "arguments": {"b": "c" * SIZE}}) + "</tool_call>",
    "<tool_call>" + '{"a":' * (SIZE // 5) + "</tool_call>",
    "<tool_call>" + "1" * SIZE + "</tool_call>",
    *(piece * (SIZE // len(piece)) for piece in ('<tool_call>{"":', '<tool_call>{"', CALL[:-13])),
    '<tool_call>{"<tool_call>{":"<tool_call>{",' * (SIZE // 42),
    '<tool_call>{"a":"</tool_call>' * (SIZE // 29),
    "Answer: " * (SIZE // 8),
    "<tool_call><function=a>" + "<parameter=b></parameter>" * (SIZE // 25),
    "<tool_call><function=a><parameter=b>" + "<" * SIZE,
    *(piece * (SIZE // len(piece)) for piece in ("<tool_call><function=a><parameter=b>\n",)),
    "<tool_call><function=a>" * (SIZE // 23) + "\n" * SIZE,
]

PARSERS = {
    "tags": lambda text: parse_tags(text, TOOLS),
    "last_query": extract_last_query,
    "last_answer": extract_last_answer,
    "tool_calls": parse_tool_calls,
    "qwen_format": follows_qwen_format,
    "qwen_abstention": QWEN.is_abstention,
    "search_r1_format": follows_search_r1_format,
    "bapo_format": follows_bapo_format,
    "is_abstention": is_abstention,
    "last_boxed": extract_last_boxed,
    "math_answer": extract_math_answer,
    "sanitize": QWEN.sanitize,
}


@pytest.mark.parametrize("name", PARSERS)
def test_hostile_text_takes_linear_time(name):
    """Measured in processor time, which other processes do not change."""
    for text in HOSTILE:
        begin = time.process_time()
        PARSERS[name](text)
        elapsed_s = time.process_time() - begin
        assert elapsed_s < 1.5, (elapsed_s, text[:60])


SCHEMA = {
    "properties": {
        "query": {"type": "string"},
        "count": {"type": "integer"},
        "is_exact": {"type": "boolean"},
        "tags": {"type": "array"},
        "page": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "several": {"type": ["string", "null"]},
    }
}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("query", "1871", "1871"),
        ("query", "  a\n</think> <b>\n", "  a\n</think> <b>\n"),
        ("count", "1871", 1871),
        ("count", "many", "many"),
        ("count", "NaN", "NaN"),
        ("is_exact", "True", True),
        ("is_exact", "false", False),
        ("tags", '["a", 1]', ["a", 1]),
        ("page", "None", None),
        ("page", "2", 2),
        ("either", "2", "2"),
        ("several", "null", "null"),
        ("unknown", "{", "{"),
    ],
)
def test_texts_of_functions_become_values_of_the_schema(name, text, value):
    block = f"<function=look-up>\n<parameter={name}>\n{text}\n</parameter>\n</function>"
    turn = f"Thinking.\n</think>\n\n<tool_call>\n{block}\n</tool_call>"
    [call] = parse_tool_calls(turn).calls
    assert (call.tool, call.parse_arguments(SCHEMA)) == ("look-up", {name: value})


@pytest.mark.parametrize(
    "block",
    [
        "<function=a>",
        "<function=a><parameter=b>1</function>",
        "<function=a><parameter=b>1</parameter> text</function>",
        "<function=>\n</function>",
        "<function=a></function><function=a></function>",
    ],
)
def test_functions_that_are_not_calls(block):
    [call] = parse_tool_calls(f"<tool_call>{block}</tool_call>").calls
    assert "<parameter=NAME>" in call.reason
