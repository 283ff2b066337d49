"""Defaults of transformers for fields that a `config.json` leaves out."""

from __future__ import annotations

import json
from collections.abc import Collection
from functools import cache
from typing import Any

from jaxrl.utils.quiet_transformers import quiet_transformers

SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "depth", "num_heads", "out_hidden_size"),
)
"""Sizes of models and their towers."""


def completed(
    fields: dict[str, Any], model_type: str, part: str = "", derived: Collection[str] = ()
) -> dict[str, Any]:
    """The fields and, for those that are missing or null, the defaults of transformers' class.

    A size that every model has its own of (`SIZES`) stays missing, as the file is then no model's.
    The base of RoPE is `rope_theta` in the result, unless `fields` name it. Keys without a number
    (`"num_key_value_heads": null`) are as many as queries: null stays.

    Args:
        fields: of a `config.json`, or of a part of it.
        model_type: whose configuration class it is.
        part: the name of the part; "" for all.
        derived: fields that the class makes of others; in a fresh configuration they are of its own
            sizes, so they stay missing.
    """
    known = {name: value for name, value in fields.items() if value is not None}
    defaults = {k: v for k, v in _defaults(model_type, part).items() if k not in derived}
    if "num_key_value_heads" in fields:
        defaults["num_key_value_heads"] = None
    rope = defaults.pop("rope_parameters", {})
    given = known.get("rope_scaling") or known.get("rope_parameters") or {}
    has_theta = isinstance(given, dict) and given.get("rope_theta") is not None
    if not has_theta and "rope_theta" in rope:
        defaults["rope_theta"] = rope["rope_theta"]
    return defaults | known


@cache
def _defaults(model_type: str, part: str) -> dict[str, Any]:
    """All fields of a fresh configuration as JSON has them, but those that are null."""
    with quiet_transformers():
        from transformers import CONFIG_MAPPING

    fields = json.loads(json.dumps(CONFIG_MAPPING[model_type]().to_dict(), default=str))
    if part:
        fields = fields[part]
    return {name: v for name, v in fields.items() if v is not None and name not in SIZES}
