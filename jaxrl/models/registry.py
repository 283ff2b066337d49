"""Resolve a model folder's `config.json` to an architecture."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from jaxrl.config.keys import import_optional
from jaxrl.config.registry import resolve
from jaxrl.models.architecture import Architecture
from jaxrl.utils.callables import format_failure, is_user_code
from jaxrl.utils.json_io import read_object
from jaxrl.utils.paths import suggest_path


def read_architecture(path: str | Path, architecture: str = "") -> Architecture:
    """Build the architecture of an HF folder, reading only its `config.json`.

    Args:
        path: HF model folder.
        architecture: Name in `ARCHITECTURES` or dotted path; "" selects by the `model_type` in
            `config.json`.

    Raises:
        FileNotFoundError: The folder or its `config.json` does not exist.
        ValueError: The path is a GGUF file, or the architecture or one of its features is not
            supported.
    """
    fields, source = read_hf_config(path)
    architecture_class = resolve_architecture(fields, architecture, source)
    try:
        model = architecture_class.from_dict(fields, source=source)
    except Exception as error:
        if not is_user_code(architecture_class):
            raise  # built-in architectures raise errors that explain the problem
        raise ValueError(
            f"config.model.architecture is {architecture!r}, which could not be built from "
            f"{source}: {format_failure(error)}."
        ) from error
    if not isinstance(model, Architecture):
        raise ValueError(
            f"config.model.architecture is {architecture!r}, whose from_dict returned "
            f"{type(model).__name__}; expected an {Architecture.__name__}."
        )
    return model


def read_hf_config(path: str | Path) -> tuple[dict[str, Any], str]:
    """Return the parsed `config.json` of an HF folder, and its file name for error messages."""
    file = Path(path) / "config.json"
    if Path(path).suffix.lower() == ".gguf" and not Path(path).is_dir():
        raise ValueError(
            f"config.model.path is {str(path)!r}, a GGUF file; expected a folder in Hugging Face "
            "format. Convert the file: python -m examples.convert_gguf --file=FILE --out=FOLDER."
        )
    if not Path(path).is_dir():
        raise FileNotFoundError(
            f"model folder {str(path)!r} does not exist; set config.model.path to a "
            "folder in Hugging Face format (config.json, *.safetensors, tokenizer.json)."
            f"{suggest_model(path)}"
        )
    if not file.is_file():
        raise FileNotFoundError(
            f"{str(path)!r} holds no config.json; config.model.path must be a folder in "
            "Hugging Face format."
        )
    return read_object(file), str(file)


def suggest_model(path: str | Path) -> str:
    """Return a hint for a model folder that does not exist, or "".

    For a path that could be a Hugging Face Hub name, suggest the `hf://` prefix.
    """
    name = os.path.relpath(path)
    is_name = re.fullmatch(r"\w[\w.-]*/[\w.-]+", name) and not Path(name).parent.exists()
    if is_name:
        return f" For a model on the Hugging Face Hub, write 'hf://{name}'."
    return suggest_path(path)


def resolve_architecture(fields: dict[str, Any], name: str, source: str) -> type[Architecture]:
    """Resolve `name` to an architecture class; if empty, use the `model_type` in `fields`."""
    if not name:
        name = str(fields.get("model_type"))
        if name not in ARCHITECTURES:
            raise ValueError(
                f"{source}: model_type {fields.get('model_type')!r:.80} is not supported; expected "
                f"{' or '.join(map(repr, ARCHITECTURES))}, or a custom architecture in "
                "config.model.architecture."
            )
    architecture_class = resolve(
        "model.architecture", name, ARCHITECTURES, example="my_architecture.Pocket"
    )
    if not (isinstance(architecture_class, type) and issubclass(architecture_class, Architecture)):
        raise ValueError(
            f"config.model.architecture is {name!r}, which is not a subclass of "
            f"{Architecture.__module__}.{Architecture.__name__}."
        )
    if name in TOWERS and (add_tower := import_optional(TOWERS[name])):
        return add_tower(architecture_class, name)
    return architecture_class


ARCHITECTURES = {
    "qwen2": "jaxrl.models.qwen.QwenConfig",
    "qwen3": "jaxrl.models.qwen.QwenConfig",
    "llama": "jaxrl.models.llama.LlamaConfig",
    "mistral": "jaxrl.models.llama.LlamaConfig",
    "qwen2_vl": "jaxrl.extras.vision.qwen2_vl.Qwen2VLConfig",
    "qwen2_5_vl": "jaxrl.extras.vision.qwen_vl.QwenVLConfig",
    "qwen3_vl": "jaxrl.extras.vision.qwen3_vl.Qwen3VLConfig",
    "qwen3_5": "jaxrl.extras.delta_net.qwen3_5.Qwen35Config",
    "qwen3_5_text": "jaxrl.extras.delta_net.qwen3_5.Qwen35Config",
    "qwen3_moe": "jaxrl.extras.experts.qwen_moe.QwenMoeConfig",
    "qwen3_5_moe": "jaxrl.extras.hybrid_moe.qwen3_5_moe.Qwen35MoeConfig",
    "qwen3_5_moe_text": "jaxrl.extras.hybrid_moe.qwen3_5_moe.Qwen35MoeConfig",
    "qwen3_next": "jaxrl.extras.hybrid_moe.qwen3_next.Qwen3NextConfig",
}
"""Dotted path of the class for each `model_type` in `config.json`.

Classes are imported when needed.
"""

TOWERS = dict.fromkeys(("qwen3_5", "qwen3_5_moe"), "jaxrl.extras.vision.qwen3_5:add_tower")
"""Function that adds a vision tower to the class of a `model_type`.

If the function's folder is missing, the model is its text part.
"""
