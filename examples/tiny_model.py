"""A small Qwen3 with random weights, and a tokenizer whose merges are those of your own texts.

    python -m examples.tiny_model --texts=corpus.jsonl,questions.jsonl --out=models/tiny

Of a JSONL file every text in every record is read, of any other file every line. The folder is in
Hugging Face's format, for tests of a data set, an environment or a reward before a real model is
there. Its chat template describes tools, as Qwen's does, and its sequences may be as long as
Qwen3's. No torch is needed.
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
"""Length of the longest sequence, as of Qwen3."""


def texts_of(value: Any) -> Iterator[str]:
    """All texts in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from texts_of(inner)


def read_texts(path: Path) -> Iterator[str]:
    """The texts of a file, see the module."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if path.suffix != ".jsonl":
            yield line
        elif line.strip():
            try:
                yield from texts_of(json.loads(line))
            except ValueError as error:
                raise ValueError(f"{path}:{number} is not valid JSON: {error}") from error


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="jaxrl tiny-model")
    parser.add_argument("--texts", required=True, help="files, with commas between them")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--seed", type=int, default=0, help="of the weights")
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
    print(f"wrote {options.out}: {tokenizer.get_vocab_size()} tokens of {len(texts)} texts")


if __name__ == "__main__":
    main()
