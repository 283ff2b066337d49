"""Downloads from the Hugging Face Hub.

A model is `hf://org/name`. A data file is `hf://datasets/org/name/path`, where the path may contain
`*`. Both accept a revision: `hf://org/name@v1`, `hf://datasets/org/name@v1/path`. The cache, token
and endpoint are those of `huggingface_hub` (`HF_HOME`, `HF_TOKEN`, `HF_ENDPOINT`,
`HF_HUB_OFFLINE`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from huggingface_hub.utils import HfUri

PREFIX = "hf://"

WEIGHT_FILES = ("model*.safetensors",)
MODEL_FILES = ("*.json", "*.jinja", "tokenizer*", "vocab.*", "merges.txt", "LICENSE*")
"""Patterns of the files that describe a model, without its weights."""


def is_hub_name(name: str) -> bool:
    """Return True if `name` refers to the Hub rather than to a local path."""
    return name.startswith(PREFIX)


def parse_hub_name(name: str, key: str) -> HfUri:
    """Parse the name of a model or a data file.

    Args:
        name: Hub name that starts with `hf://`.
        key: Flag or config key that holds the name, for errors.

    Raises:
        ValueError: The name is malformed.
    """
    from huggingface_hub.errors import HfUriError
    from huggingface_hub.utils import parse_hf_uri

    try:
        uri = parse_hf_uri(name)
    except HfUriError:
        uri = None
    if uri is None or (uri.type, bool(uri.path_in_repo)) not in (
        ("model", False),
        ("dataset", True),
    ):
        raise ValueError(
            f"{key} is {name!r}; expected hf://org/name or hf://org/name@revision for a model, "
            "hf://datasets/org/name/path/to/file.parquet for data."
        )
    return uri


def format_hub_name(uri: HfUri) -> str:
    """Return the `hf://` name of a model or a data file."""
    return uri.to_uri().replace(f"{PREFIX}models/", PREFIX)


def download_hub_files(
    uri: HfUri, key: str, files: tuple[str, ...] = (), *, local_only: bool = False
) -> tuple[Path, HfUri]:
    """Return the cached files of a repository, after downloading those that are missing.

    Args:
        uri: Parsed name.
        key: Flag or config key that holds the name, for errors.
        files: Patterns of the files of a model.
        local_only: True to use only the cache.

    Returns:
        Local folder of the model or local path of the data, and the name with its commit.

    Raises:
        OSError: The repository, revision or file does not exist or is not accessible, or the Hub
            cannot be reached and the cache lacks a file.
    """
    import httpx2
    from huggingface_hub import constants, errors, snapshot_download

    path, name = uri.path_in_repo, f"{key} is {format_hub_name(uri)!r}"
    try:
        folder = Path(
            snapshot_download(
                uri.id,
                repo_type=uri.type,
                revision=uri.revision,
                allow_patterns=[path] if path else list(files),
                local_files_only=local_only,
            )
        )
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, httpx2.HTTPError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConnectionError(
            f"{name}, which cannot be downloaded from {constants.ENDPOINT}: {reason} Check the "
            "name and the network, and set HF_TOKEN if the repository is gated or private."
        ) from error
    if path and "*" not in path and not (folder / path).is_file():
        raise FileNotFoundError(f"{name}, but the repository has no file {path!r}.")
    return folder / path, replace(uri, revision=folder.name)


def download_model(
    name: str | Path,
    key: str,
    files: tuple[str, ...] = (*MODEL_FILES, *WEIGHT_FILES),
    *,
    local_only: bool = False,
) -> Path:
    """Return the local folder of a model. Download it if `name` starts with `hf://`.

    For the arguments, see `download_hub_files`.

    Raises:
        ValueError, OSError: The name is malformed, or the download failed.
    """
    if not is_hub_name(str(name)):
        return Path(name)
    return download_hub_files(parse_hub_name(str(name), key), key, files, local_only=local_only)[0]
