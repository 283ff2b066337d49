"""Generate the quickstart world with search as a function call in Qwen's format.

    python -m examples.calls_world --out=data/calls --seed=0

People, questions and the quality of demonstrations are those of `examples/quickstart_world.py` with
the same seed. A query is JSON in a `<tool_call>`, and the chat template describes the tool after
the system message, so this world works with any agent framework that calls functions over an
endpoint (`examples/framework_agent.py`).

The template is in every prompt of a two-layer model, so it is short: it writes a tool's name,
parameters and description on one line instead of Qwen's JSON schema.
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
"""Texts that the template writes for the tool, for training the tokenizer."""


def format_call(query: str) -> str:
    """Format a search call.

    The query starts with a space, so that names are the same tokens as in documents.
    """
    arguments_object = {"name": "search", "arguments": {"query": f" {query}"}}
    return f"<tool_call>\n{json.dumps(arguments_object)}\n</tool_call>"


def convert_to_calls(demonstration: Mapping[str, Any]) -> dict[str, Any]:
    """Add a system message to a quickstart demonstration and convert searches to calls."""
    messages = [{"role": "system", "content": SYSTEM}]
    for message in demonstration["messages"]:
        content = re.sub(
            r"<search> (.*) </search>$",
            lambda match: "\n" + format_call(match[1]),
            message["content"],
        )
        messages.append({**message, "content": content})
    return {**demonstration, "messages": messages}


def iter_training_texts(chats: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield texts to train the tokenizer on: words, template texts and messages."""
    markers = quickstart.SPECIAL_TOKENS + quickstart.list_tags(CALLS)
    separator = "|".join(map(re.escape, markers))
    yield from (f" {word}" for word in sorted(quickstart.POOL))
    yield from (*TOOLS, "system\n", "user\n", "assistant\n") * 100
    for chat in chats:
        for message in chat["messages"]:
            yield from re.split(separator, message["content"])


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_people", type=int, default=1200)
    parser.add_argument(
        "--num_held_out", type=int, default=200, help="people held out for evaluation"
    )
    parser.add_argument("--num_demonstrations", type=int, default=20_000)
    parser.add_argument("--num_worlds", type=int, default=20, help="worlds for demonstrations")
    args = parser.parse_args(argv)
    quickstart.check_sizes(parser, args)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    # Write the quickstart world, then replace its model and demonstrations.
    quickstart.main([f"--{name}={value}" for name, value in vars(args).items()])
    chats = {}
    for name in ("demonstrations", "demonstrations_perfect"):
        path = args.out / f"{name}.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines()
        chats[name] = [convert_to_calls(json.loads(line)) for line in lines]
        quickstart.write_jsonl(path, chats[name])
    tokenizer = quickstart.train_tokenizer(iter_training_texts(chats["demonstrations"]), CALLS)
    sample = chats["demonstrations"][: quickstart.SAMPLE]
    texts = [message["content"] for chat in sample for message in chat["messages"]]
    quickstart.check_words_are_whole(tokenizer, texts)
    model = args.out / "model"
    quickstart.write_model(model, tokenizer, seed=args.seed, chat_template=CHAT_TEMPLATE)


if __name__ == "__main__":
    main()
