"""Makes the quickstart's world for a model that calls its search as Qwen's models call functions.

    python -m examples.calls_world --out=data/calls --seed=0

People, questions and the mixed quality of the demonstrations are those of
`examples/quickstart_world.py`, with the same seed the same. A query stands in a `<tool_call>` as
JSON, and the chat template describes the tool behind the system message, so that an agent of any
framework that calls functions over an endpoint can play this world
(`examples/framework_agent.py`).

The template is short: name, parameters and description of a tool are a line, where Qwen's own
writes the whole JSON schema. A model of two layers reads it in every prompt.
"""

import argparse
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from examples import quickstart_world as quickstart
from jaxrl.envs.protocol import qwen
from jaxrl.envs.search.base import SearchEngine

SYSTEM = "Search, then give the answer alone as <answer> answer </answer>."
CALLS = qwen(("search",))
CHAT_TEMPLATE = r"""
{%- set start, end = '<|im_start|>', '<|im_end|>\n' -%}
{%- if tools -%}
{{- start + 'system\n' -}}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\n' }}{% endif -%}
{{- 'Tools:\n' -}}
{%- for tool in tools -%}
{%- set tool = tool.function or tool -%}
{{- tool.name + '(' + tool.parameters.properties | join(', ') + '): ' + tool.description + '\n' -}}
{%- endfor -%}
{{- 'A call is <tool_call>\n{"name": name, "arguments": object}\n</tool_call>' + end -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ start + 'user' }}{% endif -%}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ end }}{% endif -%}
{%- elif not (tools and loop.first and message.role == 'system') -%}
{{- start + message.role + '\n' + message.content + end -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ start + 'assistant\n' }}{% endif -%}
""".strip()
TOOLS = (
    "Tools:\nsearch(query): " + SearchEngine.description + "\nA call is ",
    '\n{"name": name, "arguments": object}\n',
)
"""Texts that the template writes of the tool, for the tokenizer to learn."""


def call(query: str) -> str:
    """A call of the search.

    A blank begins the query: with it a name is the token that it is in a document.
    """
    asked = {"name": "search", "arguments": {"query": f" {query}"}}
    return f"<tool_call>\n{json.dumps(asked)}\n</tool_call>"


def with_calls(demonstration: Mapping[str, Any]) -> dict[str, Any]:
    """A demonstration of the quickstart's whose searches are calls, behind the system message."""
    messages = [{"role": "system", "content": SYSTEM}]
    for message in demonstration["messages"]:
        content = re.sub(
            r"<search> (.*) </search>$", lambda match: "\n" + call(match[1]), message["content"]
        )
        messages.append({**message, "content": content})
    return {**demonstration, "messages": messages}


def training_texts(chats: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Texts that merges are learnt from: what the template writes, words and messages."""
    markers = quickstart.SPECIAL_TOKENS + quickstart.tag_tokens(CALLS)
    between = "|".join(map(re.escape, markers))
    yield from (f" {word}" for word in sorted(quickstart.POOL))
    yield from (*TOOLS, "system\n", "user\n", "assistant\n") * 100
    for chat in chats:
        for message in chat["messages"]:
            yield from re.split(between, message["content"])


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_people", type=int, default=1200)
    parser.add_argument("--num_held_out", type=int, default=200, help="of them, for evaluation")
    parser.add_argument("--num_demonstrations", type=int, default=20_000)
    parser.add_argument("--num_worlds", type=int, default=20, help="that demonstrations come from")
    args = parser.parse_args(argv)
    quickstart.check_sizes(parser, args)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    # The quickstart's own world; a model and chats of other words take the place of its.
    quickstart.main([f"--{name}={value}" for name, value in vars(args).items()])
    chats = {}
    for name in ("demonstrations", "demonstrations_perfect"):
        path = args.out / f"{name}.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines()
        chats[name] = [with_calls(json.loads(line)) for line in lines]
        quickstart.write_jsonl(path, chats[name])
    tokenizer = quickstart.train_tokenizer(training_texts(chats["demonstrations"]), CALLS)
    shown = chats["demonstrations"][: quickstart.SAMPLE]
    texts = [message["content"] for chat in shown for message in chat["messages"]]
    quickstart.check_words_are_whole(tokenizer, texts)
    model = args.out / "model"
    quickstart.write_model(model, tokenizer, seed=args.seed, chat_template=CHAT_TEMPLATE)


if __name__ == "__main__":
    main()
