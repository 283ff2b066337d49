"""A corpus and a small random encoder, for tests of dense retrieval."""

import json
from pathlib import Path

from jaxrl.extras.dense.engine import DenseSearch

ENCODER = Path(__file__).parents[2] / "golden" / "encoder_e5"
PREFIXES = {"query_prefix": "query: ", "passage_prefix": "passage: "}
NAMES = ("avington", "bread", "mill", "river", "tom hale", "ada kerr", "1871", "bridge")


def documents(count):
    """Return `count` different documents."""
    return [
        {
            "id": f"d{i}",
            "title": NAMES[i % 8],
            "text": f"{NAMES[i // 8 % 8]} by {i * 37 % 101} " * 2,
        }
        for i in range(count)
    ]


def write_corpus(path, count):
    lines = [json.dumps(document) for document in documents(count)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def dense(corpus, **settings):
    given = {"encoder": str(ENCODER), **PREFIXES, "batch_tokens": 256, **settings}
    return DenseSearch(corpus=str(corpus), **given)
