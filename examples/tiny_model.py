"""Create a small Qwen3 with random weights and a tokenizer trained on your texts.

    python -m examples.tiny_model --texts=corpus.jsonl,questions.jsonl --out=models/tiny

The texts are all strings in JSONL files and all lines of other files. The folder is in Hugging Face
format. Use it to test a dataset, an environment or a reward before you have a real model. Its chat
template describes tools like Qwen's, and its context length is that of Qwen3. torch is not needed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from examples.calls_world import CHAT_TEMPLATE, TOOLS
from examples.quickstart_world import train_tokenizer, write_model

MAX_TOKENS = 40_960
"""Maximum sequence length, as in Qwen3."""


def iter_strings(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON value, except keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from iter_strings(inner)


def read_texts(path: Path) -> Iterator[str]:
    """Yield the strings in a JSONL file, or the lines of any other file."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if path.suffix != ".jsonl":
            yield line
        elif line.strip():
            try:
                yield from iter_strings(json.loads(line))
            except ValueError as error:
                raise ValueError(f"{path}:{number} is not valid JSON: {error}") from error


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="jaxrl tiny-model")
    parser.add_argument("--texts", required=True, help="files, separated by commas")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the weights")
    options = parser.parse_args(argv)
    try:
        texts = [text for name in options.texts.split(",") for text in read_texts(Path(name))]
    except (OSError, ValueError) as error:
        raise SystemExit(f"{parser.prog}: {error}") from error
    tokenizer = train_tokenizer([*texts, *TOOLS])
    write_model(
        options.out,
        tokenizer,
        seed=options.seed,
        chat_template=CHAT_TEMPLATE,
        max_tokens=MAX_TOKENS,
    )
    num_tokens = tokenizer.get_vocab_size()
    print(f"wrote {options.out}: a vocabulary of {num_tokens} tokens from {len(texts)} texts")


if __name__ == "__main__":
    main()
