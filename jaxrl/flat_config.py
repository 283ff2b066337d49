"""A configuration as pairs of keys and values, whatever keys there are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxrl.envs.json_text import read_object

STAGES = ("sft", "train", "evaluate")

MAPPINGS = {
    "prompt.chat_template_kwargs": False,
    **{f"tasks.{kind}.settings": 1 for kind in ("train", "eval")},
    **{f"tasks.{kind}.columns": "question" for kind in ("train", "eval")},
    "policy.openai.options": "low",
    "env.settings": 1,
    "search.settings": 1,
    "reward.weights": 1.0,
    "reward.settings": {},
    "reward.judges": {},
    "filter.settings": 1,
    "advantage.settings": 1,
    "loss.settings": 1,
    "ledger.prices": 0.001,
}
"""Keys whose values are mappings with names that are not ours, and a value as an example."""


def flat_pairs(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Keys with their sections, joined by dots, and their values, in the order of a mapping."""
    flat: list[tuple[str, Any]] = []
    for key, value in values.items():
        if isinstance(value, dict) and f"{prefix}{key}" not in MAPPINGS:
            flat += flat_pairs(value, f"{prefix}{key}.")
        else:
            flat.append((f"{prefix}{key}", _with_tuples(value)))
    return flat


def _with_tuples(value: Any) -> Any:
    """Lists, also those inside of others, as the tuples they are in a configuration."""
    if not isinstance(value, list | tuple):
        return value
    inner = [
        {key: _with_tuples(inside) for key, inside in one.items()} if isinstance(one, dict) else one
        for one in value
    ]
    return tuple(map(_with_tuples, inner))


def flat_json(path: Path) -> dict[str, Any]:
    """The keys of a workdir's `config.json`, with their sections, joined by dots."""
    return dict(flat_pairs(read_object(path)))


def to_json(config: ConfigDict) -> str:
    """The configuration as JSON, for `config.json` of the workdir."""
    return json.dumps(config.to_dict(), indent=2, ensure_ascii=False) + "\n"


def flatten(config: ConfigDict) -> dict[str, Any]:
    """Every key with its sections, joined by dots."""
    return dict(flat_pairs(config.to_dict()))
