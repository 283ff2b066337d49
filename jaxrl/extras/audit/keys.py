"""Config key for the audit at startup."""

from __future__ import annotations

from typing import Any

from jaxrl.config.keys import Key, Rule


def _is_missing_corpus(config: Any) -> bool:
    drops = config.filter.unanswerable == "drop"
    return drops and "train" in config.stages and not config.corpus_section


# Manually formatted table, as in `config/schema.py`.
# fmt: off
KEYS = {
    "filter.unanswerable": Key("keep", "Training tasks whose accepted answers occur in no "
        "document: `keep` or `drop`.", one_of=("keep", "drop")),
}
# fmt: on

RULES = (
    Rule(
        "filter.unanswerable",
        _is_missing_corpus,
        "'keep' unless the engine is 'local', 'dense' or 'hybrid', whose corpus can be read",
    ),
)
"""Invalid combinations of keys."""
