"""Token ids of Qwen's tool calls: ours, the chat template's and those of the package renderers."""

import json
import random

import pytest

from jaxrl.data.tokenizer import Tokenizer
from jaxrl.envs.protocol import ParsedCall, qwen
from jaxrl.sampling.demonstrations import encode_demonstration
from tests.qwen import MARKERS, SPECIAL, TEMPLATE_3_5, oracle, oracle_3_5, qwen3
from tests.toys import ROOMY

HF = qwen3()
TOKENIZERS = {
    is_on: Tokenizer(HF, template_arguments={"enable_thinking": is_on}) for is_on in (True, False)
}
RENDERERS = {is_on: oracle(HF, is_thinking=is_on) for is_on in (True, False)}
WORDS = [
    *("Ada", " Kerr", "bridge", "é", "日本", "😀", ".", ",", "\n", "\n\n", " ", "  ", "\t", '"'),
    *("1871", "<", ">", "</", "{", "}", "\\n", "user", "assistant", "I'm", "search", "\r\n", "."),
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name}, é.",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string"}, "n": {"type": "integer"}},
                "required": ["query"],
            },
        },
    }
    for name in ("search", "add", "look-up")
]


def text(rng, most=12, least=0):
    return "".join(rng.choices(WORDS, k=rng.randint(least, most)))


def conversation(rng, is_thinking):
    """Tools, messages that open it, and rounds of an assistant's message with its results."""
    tools = rng.sample(TOOLS, rng.randint(1, 3))
    opening = [{"role": "user", "content": text(rng, least=1).strip() or "Who?"}]
    if rng.random() < 0.5:
        opening.insert(0, {"role": "system", "content": text(rng, least=1).strip() or "Answer."})
    rounds = []
    for _ in range(rng.randint(1, 4)):
        message = {"role": "assistant", "content": text(rng).strip()}
        if is_thinking and rng.random() < 0.5:
            message["reasoning_content"] = text(rng, least=1).strip() or "hm"
        message["tool_calls"] = [
            {
                "type": "function",
                "function": {
                    "name": rng.choice(tools)["function"]["name"],
                    "arguments": {"query": text(rng), "n": rng.randint(0, 99)},
                },
            }
            for _ in range(rng.randint(1, 3))
        ]
        results = [{"role": "tool", "content": text(rng)} for _ in message["tool_calls"]]
        rounds.append((message, results))
    return tools, opening, rounds


def written(message):
    """What a model samples to write a message, without the token that ends it."""
    thought = message.get("reasoning_content")
    begin = f"<think>\n{thought}\n</think>\n\n" if thought else ""
    calls = [call["function"] for call in message["tool_calls"]]
    blocks = [f"<tool_call>\n{json.dumps(c, ensure_ascii=False)}\n</tool_call>" for c in calls]
    return begin + "\n".join([*([message["content"]] if message["content"] else []), *blocks])


def build_trajectory_ids(tokenizer, tools, opening, rounds):
    """A trajectory as the rollout has it: the prompt, what is sampled, the turns of results."""
    ids = tokenizer.render_prompt(opening, tools)
    for message, results in rounds:
        ids = [*ids, *tokenizer.encode(written(message)), tokenizer.eos_ids[0]]
        ids += tokenizer.render_results([result["content"] for result in results], tools)[0]
    return ids


def compare(count, seed):
    """Compare random conversations with the template, the package renderers and the parser."""
    rng = random.Random(seed)
    for number in range(count):
        is_thinking = number % 2 == 0
        tokenizer, renderer = TOKENIZERS[is_thinking], RENDERERS[is_thinking]
        tools, opening, rounds = conversation(rng, is_thinking)
        chat = [*opening, *(m for message, results in rounds for m in (message, *results))]
        ours = build_trajectory_ids(tokenizer, tools, opening, rounds)
        expected = renderer.render_ids(chat, tools=tools, add_generation_prompt=True)
        assert ours == expected, (tokenizer.decode(ours), tokenizer.decode(expected))
        by_template = HF.apply_chat_template(
            chat,
            tools=tools,
            add_generation_prompt=True,
            enable_thinking=is_thinking,
            return_dict=False,
        )
        if is_thinking:
            assert ours == by_template
        else:  # it leaves out of a history what it wrote itself, which a trajectory keeps
            empty = HF.encode("<think>\n\n</think>\n\n", add_special_tokens=False)
            assert without(ours, empty) == without(by_template, empty)
        for message, _ in rounds:  # and each call is parsed as it was meant
            calls = [call["function"] for call in message["tool_calls"]]
            parsed = [ParsedCall(tool=c["name"], arguments=c["arguments"]) for c in calls]
            assert qwen().read(written(message), ()).calls == tuple(parsed)


def without(ids, run):
    """Return the ids without each occurrence of a run of ids."""
    rest, start = [], 0
    while start < len(ids):
        if ids[start : start + len(run)] == run:
            start += len(run)
        else:
            rest.append(ids[start])
            start += 1
    return rest


def test_conversations_are_rendered_as_the_template_and_renderers_do():
    compare(50, seed=0)


@pytest.mark.slow(
    instead="test_qwen_rendering.py"
    "::test_conversations_are_rendered_as_the_template_and_renderers_do"
)
def test_two_thousand_conversations_are_rendered_as_the_template_and_renderers_do():
    compare(2_000, seed=1)


@pytest.mark.parametrize("is_thinking", [True, False])
def test_sampled_ids_stay_whatever_they_are(is_thinking):
    """Ids that no text is encoded to: the next prompt begins with them, as `renderers` has it."""
    rng = random.Random(2)
    tokenizer, renderer = TOKENIZERS[is_thinking], RENDERERS[is_thinking]
    plain = [id for id in range(tokenizer.num_tokens) if id not in tokenizer._added_ids]
    for _ in range(25):
        tools, opening, rounds = conversation(rng, is_thinking)
        prompt = tokenizer.render_prompt(opening, tools)
        sampled = [*rng.choices(plain, k=rng.randint(1, 20)), *rng.sample(tokenizer.eos_ids, 1)]
        results = rounds[0][1]
        bridged = renderer.bridge_to_next_turn(prompt, sampled, results, tools=tools)
        inserted, _ = tokenizer.render_results([result["content"] for result in results], tools)
        assert bridged.token_ids == [*prompt, *sampled, *inserted]


def test_a_result_cannot_forge_a_token():
    tokenizer = TOKENIZERS[True]
    forgery = "".join([*SPECIAL, *MARKERS])
    ids, shown = tokenizer.render_results([forgery, "b"], TOOLS)
    added = [tokenizer.decode([id]) for id in ids if id in tokenizer._added_ids]
    start, end = "<|im_start|>", "<|im_end|>"
    response = ["<tool_response>", "</tool_response>"]
    assert added == [start, *response, *response, end, start]
    assert tokenizer.decode(ids) == shown
    assert forgery in shown


def test_a_description_with_a_token_of_the_model_is_refused():
    tools = [{"type": "function", "function": {"name": "x", "description": "<|im_end|>"}}]
    with pytest.raises(
        ValueError, match=r"of a tool contains '<\|im_end\|>', which is an added token"
    ):
        TOKENIZERS[True].render_prompt([{"role": "user", "content": "?"}], tools)


# Qwen3.5, whose calls are functions and whose prompts open a thought.

HF_3_5 = qwen3(TEMPLATE_3_5)
THINKS_3_5 = [pytest.param(True, id="thinking"), pytest.param(False, id="not thinking")]


def tokenizer_3_5(is_thinking):
    return Tokenizer(HF_3_5, template_arguments={"enable_thinking": is_thinking})


def conversation_3_5(rng, is_thinking):
    """As `conversation`; all messages think, and results have no blanks around them."""
    tools, opening, rounds = conversation(rng, is_thinking)
    for message, results in rounds:
        if is_thinking:
            message["reasoning_content"] = text(rng, least=1).strip() or "hm"
        for result in results:
            result["content"] = result["content"].strip()
    return tools, opening, rounds


def written_3_5(message):
    """What a model samples after the prompt, without the token that ends it."""
    thought = message.get("reasoning_content")
    begin = f"{thought}\n</think>\n\n" if thought else ""
    blocks = [
        f"<tool_call>\n<function={call['function']['name']}>\n"
        + "".join(
            f"<parameter={name}>\n{value}\n</parameter>\n"
            for name, value in call["function"]["arguments"].items()
        )
        + "</function>\n</tool_call>"
        for call in message["tool_calls"]
    ]
    content = [message["content"]] if message["content"] else []
    return begin + "\n\n".join([*content, "\n".join(blocks)])


@pytest.mark.parametrize("is_thinking", THINKS_3_5)
def test_functions_are_rendered_as_the_template_does_and_parsed(is_thinking):
    """A rollout's ids and a demonstration's are those of the template."""
    rng, tokenizer = random.Random(3), tokenizer_3_5(is_thinking)
    renderer = oracle_3_5(HF_3_5, is_thinking=is_thinking)
    for _ in range(25):
        tools, opening, rounds = conversation_3_5(rng, is_thinking)
        chat = [*opening, *(m for message, results in rounds for m in (message, *results))]
        ours = tokenizer.render_prompt(opening, tools)
        for message, results in rounds:
            sampled = written_3_5(message)
            ours += [*tokenizer.encode(sampled), tokenizer.eos_ids[0]]
            ours += tokenizer.render_results([result["content"] for result in results], tools)[0]
            schema = tools[0]["function"]["parameters"]
            calls = qwen().read(sampled, ()).calls
            assert [(call.tool, call.parse_arguments(schema)) for call in calls] == [
                (call["function"]["name"], call["function"]["arguments"])
                for call in message["tool_calls"]
            ]
        by_template = HF_3_5.apply_chat_template(
            chat,
            tools=tools,
            add_generation_prompt=True,
            enable_thinking=is_thinking,
            return_dict=False,
        )
        assert ours == by_template
        expected = renderer.render_ids(chat, tools=tools, add_generation_prompt=True)
        assert tokenizer.decode(ours) == tokenizer.decode(expected)
        answer = "hm\n</think>\n\n<answer>a</answer>" if is_thinking else "<answer>a</answer>"
        opener = "<think>\n" if is_thinking else ""
        last = {"role": "assistant", "content": opener + answer}
        shown = encode_demonstration(
            [*chat, last], tokenizer, ROOMY, protocol=qwen(), chat_tools=tools
        )
        expected = [*by_template, *tokenizer.encode(answer), tokenizer.eos_ids[0]]
        assert shown.token_ids.tolist() == expected


@pytest.mark.parametrize("is_thinking", THINKS_3_5)
def test_sampled_ids_stay_after_a_thought(is_thinking):
    rng, tokenizer = random.Random(4), tokenizer_3_5(is_thinking)
    renderer = oracle_3_5(HF_3_5, is_thinking=is_thinking)
    plain = [id for id in range(tokenizer.num_tokens) if id not in tokenizer._added_ids]
    think_end = tokenizer.encode("</think>") if is_thinking else []
    for _ in range(25):
        tools, opening, rounds = conversation_3_5(rng, is_thinking)
        prompt, results = tokenizer.render_prompt(opening, tools), rounds[0][1]
        sampled = [*rng.choices(plain, k=9), *think_end, *rng.choices(plain, k=9)]
        sampled += tokenizer.eos_ids[:1]
        bridged = renderer.bridge_to_next_turn(prompt, sampled, results, tools=tools)
        inserted, _ = tokenizer.render_results([result["content"] for result in results], tools)
        assert bridged.token_ids == [*prompt, *sampled, *inserted]
