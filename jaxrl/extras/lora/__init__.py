"""LoRA: an adapter is trained beside a model whose weights stay as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxrl.extras.lora.adapter import Adapter, find_targets
from jaxrl.models.architecture import Architecture


def around(keys: Mapping[str, Any], model: Architecture, dtype: str) -> Adapter:
    """The model with the adapter that the section `model.lora` asks for.

    Args:
        keys: of the section.
        model: that has none.
        dtype: `model.dtype`.

    Raises:
        ValueError: `model.lora.targets` names no layer of the model.
    """
    return Adapter(
        model=model,
        rank=keys["rank"],
        alpha=keys["alpha"],
        targets=find_targets(model, keys["targets"]),
        is_rank_stabilised=keys["rslora"],
        base_dtype=keys["base_dtype"],
        other_dtype=dtype,
        is_merged=keys["sampler"] == "merged",
        path=keys["path"],
    )
