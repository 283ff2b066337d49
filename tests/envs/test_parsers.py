"""What a model may write, read by the parsers and by slow ones that work another way."""

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
    follows_search_r1_format,
    is_abstention,
)

TOOLS = ("search", "python")
QWEN = qwen(TOOLS)
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "Ada"}}\n</tool_call>'
TAGGED = json.dumps({"name": "a", "arguments": {"b": "</think></tool_call><answer><tool_call>{"}})
RESULT = "\n<tool_response>\nx\n</tool_response>"
SEEDS = (
    f"<think>a</think>{CALL}{CALL}{RESULT}{RESULT}<think>b</think>\n\n<answer>x</answer>",
    f"{CALL}{RESULT}<answer>I don't know</answer><|im_end|>",
    "<think>a</think><search> Ada </search>\n\n<information>b</information>\n\n<answer>c</answer>",
    r"<think>a</think><python>1</python> <result>b</result><answer>\boxed{c}</answer>",
    '<tool_call>{"name": "a", "arguments": {"b": [1, null, -2.5e3, "\\u00e9"]}}</tool_call>',
    f"<think>a</think><tool_call>{TAGGED}</tool_call>{RESULT}<answer>x</answer>",
)
PIECES = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<answer>", "</answer>", "<search>", "</search>", "<python>", "</python>", "<result>"),
    *("</result>", "<information>", "</information>", "<|im_end|>", "</s>", "\\boxed{", "}", "{"),
    *("<", ">", "/", " ", "\n", "\t", "a", "é", "\ud800", "\0", '"', ":", ",", "[", "]", "\\"),
    *('{"name": "search", "arguments": {}}', TAGGED, CALL, RESULT, "1e999", "NaN", "null"),
    *("< /answer >", "<Answer>"),
)


def written(rng):
    """A random text, or a response in which something was changed."""
    if rng.random() < 0.4:
        return "".join(rng.choices(PIECES, k=rng.randint(0, 30)))
    text = rng.choice(SEEDS)
    for _ in range(rng.randint(1, 5)):
        start, end = sorted(rng.choices(range(len(text) + 1), k=2))
        end = min(end, start + 20)
        inserted = rng.choice((*PIECES, "", text[start:end] * 2))
        text = text[:start] + inserted + text[end:]
    return text


# The slow parsers: character by character, or by what is left after a tag is taken off.


def tags_of(text, names):
    """All tags of these names, with their places, found by trying each place."""
    wanted = [tag for name in names for tag in (f"<{name}>", f"</{name}>")]
    return [
        (place, tag)
        for place in range(len(text))
        if text[place] == "<"
        for tag in wanted
        if text[place : place + len(tag)] == tag
    ]


def slow_masked(text):
    """Tags in the JSON of calls made no tags: of each, the shortest beginning that is an object."""
    done, rest = "", text
    while "<tool_call>" in rest:
        before, tag, rest = rest.partition("<tool_call>")
        done += before + tag
        blanks = len(rest) - len(rest.lstrip())
        ends = [i + 1 for i, letter in enumerate(rest) if letter == "}"]
        end = next((end for end in ends if is_object(rest[blanks:end])), 0)
        done, rest = done + rest[:end].replace("<", "‹"), rest[end:]
    return done + rest


def is_object(text):
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def slow_said(text):
    """What follows the last thought that is closed, up to one that is not."""
    kept = text
    for place, tag in tags_of(text, ["think"]):
        if tag == "</think>":
            kept = text[place + len(tag) :]
    opened = [place for place, tag in tags_of(kept, ["think"]) if tag == "<think>"]
    return kept[: opened[0]] if opened else kept


def slow_calls(text):
    """Texts between the tags of calls; None for one that is not closed."""
    found, begin = [], None
    for place, tag in tags_of(text, ["tool_call"]):
        if begin is None and tag == "<tool_call>":
            begin = place + len(tag)
        elif begin is not None and tag == "</tool_call>":
            found.append(text[begin:place])
            begin = None
    return [*found, None] if begin is not None else found


def slow_asked(block):
    """Name and arguments by another reader of JSON; None where it is no call."""
    try:
        call = pydantic_core.from_json(block, allow_inf_nan=False)
    except ValueError:
        return None
    fits = isinstance(call, dict) and isinstance(call.get("name"), str)
    fits = fits and isinstance(call.get("arguments"), dict)
    return (call["name"], call["arguments"]) if fits else None


def readers_differ(block):
    """Where readers of JSON disagree: lone halves of characters, numbers beyond any float."""
    return "\\u" in block or re.search(r"[eE]|\d{300}", block) or "\ud800" in block


def is_call(block):
    if block is None or readers_differ(block):
        return block is not None and isinstance(parse_call(block), ParsedCall)
    return slow_asked(block) is not None


def check_calls(turn):
    reading = parse_tool_calls(turn)
    said = slow_said(slow_masked(turn))
    # The masked strings hold what the calls hold, but for the letter in place of `<`.
    blocks = [block and block.replace("‹", "<") for block in slow_calls(said)]
    assert len(reading.calls) == len(blocks)
    for one, block in zip(reading.calls, blocks, strict=True):
        if block is None:
            assert not isinstance(one, ParsedCall)
        elif not readers_differ(block):
            expected = slow_asked(block)
            assert (expected is None) == (not isinstance(one, ParsedCall)), block
            assert expected is None or expected == (one.tool, one.arguments)
    order = [tag for _, tag in tags_of(said, ["answer"])]
    opened = "<answer>" in order and "</answer>" in order[order.index("<answer>") :]
    assert reading.is_answer == (not blocks and opened)
    assert reading.is_malformed == (not blocks and not opened)


def remove_think_blocks(text):
    """Thoughts taken out one by one, from the left: each from the last `<think>` before its end."""
    kept = ""
    while (end := text.find("</think>")) >= 0:
        start = text.rfind("<think>", 0, end)
        kept += text[: end + len("</think>")] if start < 0 else text[:start]
        text = text[end + len("</think>") :]
    return kept + text


def slow_format(text):
    """Rounds of calls and as many results, then an answer, walked through tag by tag."""
    ends = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<end_of_turn>", "<eos>", "</s>")
    text = text.rstrip()
    while text.endswith(ends):
        text = text[: -len(next(end for end in ends if text.endswith(end)))].rstrip()
    text = remove_think_blocks(slow_masked(text))
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
    for place in range(len(inside), -1, -1):
        if inside[place : place + len(tag) + 2] == f"<{tag}>":
            return inside[place + len(tag) + 2 :].strip()
    return None


def check_tags(turn):
    reading = parse_tags(turn, TOOLS)
    queries = [slow_query(turn, tool) for tool in TOOLS]
    closes = [turn.endswith(f"</{tool}>") for tool in TOOLS]
    if turn.endswith("</answer>"):
        assert reading == ParsedTurn(is_answer=True)
    elif not any(closes):
        assert reading == ParsedTurn(is_malformed=True)
    else:
        [(tool, query)] = [(t, q) for t, q, c in zip(TOOLS, queries, closes, strict=True) if c]
        assert (query is None) == (not reading.calls)
        if query is not None:
            [one] = reading.calls
            # Further lines may lose what all of them begin with.
            assert (one.tool, "".join(one.arguments.split())) == (tool, "".join(query.split()))
    answers = [place for place, tag in tags_of(turn, ["answer"]) if tag == "<answer>"]
    assert (extract_last_answer(turn) == "") or bool(answers)


def check_sanitized(text):
    for protocol in (SEARCH_R1, BAPO, QWEN):
        clean = protocol.sanitize(text)
        insides = [part.partition(">") for part in clean.split("<")[1:]]
        inner = [inside.strip().removeprefix("/") for inside, end, _ in insides if end]
        names = [inside.strip().removesuffix("/").strip().lower() for inside in inner]
        assert not {*names} & {*protocol.tags}
        assert len(clean) == len(text)
        assert clean.encode().decode() == clean


def check(count, seed):
    rng = random.Random(seed)
    for _ in range(count):
        text = written(rng)
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
    check(5_000, seed=0)


@pytest.mark.slow(instead="envs/test_parsers.py::test_parsers_agree_with_slow_ones")
def test_parsers_agree_with_slow_ones_on_many():
    check(100_000, seed=1)


SIZE = 200_000
"""Characters; of what takes quadratic time, minutes."""

HOSTILE = [
    *(piece * (SIZE // len(piece)) for piece in PIECES if piece != "\ud800"),
    *(
        a + " " * SIZE + b
        for a, b in (("<", ">"), ("<think", ">"), ("<tool_call>", "</tool_call>"))
    ),
    *(f"{a}{b}" * (SIZE // len(a + b)) for a, b in [("<think>", "</think"), ("<answer>", "a")]),
    "<tool_call>" * (SIZE // 11) + "</tool_call>",
    "<think>" * (SIZE // 7) + "<search>" * (SIZE // 8) + "</search>",
    "<python>" * (SIZE // 16) + "</python>" * (SIZE // 16) + "<result>" * (SIZE // 16),
    "<search>" + " \n\t" * (SIZE // 3) + "</search>",
    "<answer>" + "\\boxed{" * (SIZE // 7) + "}" * (SIZE // 7) + "</answer>",
    "<tool_call>" + json.dumps({"name": "a", "arguments": {"b": "c" * SIZE}}) + "</tool_call>",
    "<tool_call>" + '{"a":' * (SIZE // 5) + "</tool_call>",
    "<tool_call>" + "1" * SIZE + "</tool_call>",
    *(piece * (SIZE // len(piece)) for piece in ("<tool_call>{", '<tool_call>{"', CALL[:-13])),
    '<tool_call>{"":' * (SIZE // 15),
    '<tool_call>{"<tool_call>{":"<tool_call>{",' * (SIZE // 42),
    '<tool_call>{"a":"</tool_call>' * (SIZE // 29),
    "Answer: " * (SIZE // 8),
]

READERS = {
    "read_tags": lambda text: parse_tags(text, TOOLS),
    "last_query": extract_last_query,
    "last_answer": extract_last_answer,
    "read_tool_calls": parse_tool_calls,
    "qwen_format": follows_qwen_format,
    "qwen_abstention": QWEN.is_abstention,
    "search_r1_format": follows_search_r1_format,
    "bapo_format": follows_bapo_format,
    "is_abstention": is_abstention,
    "last_boxed": extract_last_boxed,
    "math_answer": extract_math_answer,
    "sanitize": QWEN.sanitize,
}


@pytest.mark.parametrize("name", READERS)
def test_nothing_takes_longer_than_linear_time(name):
    """Of this processor's time, so that it does not matter who else works here."""
    for text in HOSTILE:
        begin = time.process_time()
        READERS[name](text)
        took = time.process_time() - begin
        assert took < 1.5, (took, text[:60])
