"""Validate a `config.json` and fill in its defaults with the transformers config classes."""

from __future__ import annotations

import json
from collections.abc import Collection
from functools import cache
from typing import Any

from jaxrl.utils.quiet_transformers import quiet_transformers

SIZE_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "depth", "num_heads", "embed_dim", "out_hidden_size"),
)
"""Size fields of models and vision towers, which get no default."""

COUNT_FIELDS = ("num_hidden_layers", "depth", "num_experts", "num_local_experts")
"""Fields that determine the number of tensors."""

MAX_COUNT = 4096
"""Maximum of each of `COUNT_FIELDS`; lists of more layers or experts could fill the memory."""


def fill_hf_defaults(
    fields: dict[str, Any],
    model_type: str,
    part: str = "",
    derived: Collection[str] = (),
    *,
    source: str,
) -> dict[str, Any]:
    """Fill in missing and null fields with the defaults of the transformers config class.

    Sizes that every model sets (`SIZE_FIELDS`) get no default. The RoPE base is returned as
    `rope_theta` unless the RoPE settings in `fields` contain it. A null `num_key_value_heads` stays
    null, which means one KV head per query head.

    Args:
        fields: Fields of a `config.json`, or of one section of it.
        model_type: Model type of the config class.
        part: Name of the section, such as `vision_config`; "" for the complete file.
        derived: Fields that the class derives from others; they get no default.
        source: File name for error messages.

    Raises:
        ValueError: A count is too large, or transformers rejects a field.
    """
    for section in (fields, *(value for value in fields.values() if isinstance(value, dict))):
        for name in COUNT_FIELDS:
            count = section.get(name)
            if isinstance(count, int) and count > MAX_COUNT:
                raise ValueError(f"{source}: {name!r} is {count}; expected at most {MAX_COUNT}.")
    non_null = {name: value for name, value in fields.items() if value is not None}
    with quiet_transformers():
        from transformers import CONFIG_MAPPING

        try:
            CONFIG_MAPPING[model_type].from_dict({part: non_null} if part else dict(non_null))
        except Exception as error:
            text = " ".join(str(error).split())[:300]
            raise ValueError(f"{source} is not a {model_type} configuration: {text}") from error
    defaults = {k: v for k, v in _load_defaults(model_type, part).items() if k not in derived}
    if "num_key_value_heads" in fields:
        defaults["num_key_value_heads"] = None
    rope = defaults.pop("rope_parameters", {})
    rope_fields = non_null.get("rope_scaling") or non_null.get("rope_parameters") or {}
    has_theta = isinstance(rope_fields, dict) and rope_fields.get("rope_theta") is not None
    if not has_theta and "rope_theta" in rope:
        defaults["rope_theta"] = rope["rope_theta"]
    return defaults | non_null


@cache
def _load_defaults(model_type: str, part: str) -> dict[str, Any]:
    """Return the non-null defaults of a transformers config class, as JSON types."""
    with quiet_transformers():
        from transformers import CONFIG_MAPPING

    fields = json.loads(json.dumps(CONFIG_MAPPING[model_type]().to_dict(), default=str))
    if part:
        fields = fields[part]
    fields.pop("layer_types", None)  # has the default number of layers
    return {name: v for name, v in fields.items() if v is not None and name not in SIZE_FIELDS}
