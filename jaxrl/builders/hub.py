"""Downloads of the models and data that a configuration names on the Hugging Face Hub."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxrl.builders.resolved import ResolvedConfig
from jaxrl.config.environments import add_environment_to_errors
from jaxrl.config.keys import MODEL
from jaxrl.config.schema import KEYS, LOCAL_MODEL, flatten_config
from jaxrl.data.tasks import resolve_sources
from jaxrl.utils.hub import (
    MODEL_FILES,
    WEIGHT_FILES,
    download_hub_files,
    format_hub_name,
    is_hub_name,
    parse_hub_name,
)

_PINNED_NAME = re.compile(r'hf://[^"]+@[0-9a-f]{40}[^"]*')


def download_files(
    c: ResolvedConfig,
    recorded: Mapping[str, Any] | None = None,
    *,
    for_plan: bool = False,
) -> ResolvedConfig:
    """Download a run's models and data from the Hub, and replace their names with local paths.

    A name without a revision refers to the commit that the run recorded, or else to the newest
    commit.

    Args:
        c: Resolved configuration; its values are changed in place.
        recorded: Values that the run has used so far, by dotted key; None for a new run.
        for_plan: True to download only `config.json` of each model.

    Returns:
        The configuration. Its `hub_names`, and those of its environments, contain the names with
        their commits.

    Raises:
        ValueError, OSError: A name is malformed, or a download failed.
    """
    uris = [
        parse_hub_name(name, "config.json")
        for name in _PINNED_NAME.findall(json.dumps(recorded or {}))
    ]
    commits = {(uri.type, uri.id): uri.revision for uri in uris}

    def download_from_hub(key: str, name: str, files: tuple[str, ...] = ()) -> tuple[str, str]:
        """Download `name`; return its local path, and the name with its commit."""
        if not is_hub_name(name):
            return name, name
        uri = parse_hub_name(name, f"config.{key}")
        if (uri.type == "model") != bool(files):
            kind = "a model: hf://org/name" if files else "a file: hf://datasets/org/name/path"
            raise ValueError(f"config.{key} is {name!r}; expected {kind}.")
        revision = uri.revision or commits.get((uri.type, uri.id))
        path, pinned = download_hub_files(replace(uri, revision=revision), f"config.{key}", files)
        return str(path), format_hub_name(pinned)

    # Models: the policy, and the encoder if the run searches with it.
    values: dict[str, tuple[Any, Any]] = {}
    for key, entry in KEYS.items():
        if entry.holds == MODEL and key.startswith(("model.", f"search.{c.corpus_section}.")):
            has_weights = key != "model.path" or c.policy.name == LOCAL_MODEL
            files = MODEL_FILES + WEIGHT_FILES * has_weights
            values[key] = download_from_hub(key, c[key], ("config.json",) if for_plan else files)
    # Data of the configured stages.
    if "sft" in c.stages and not for_plan and not c.members:
        values["sft.source"] = download_from_hub("sft.source", c.sft.source)
    for kind in c.task_sources:
        key = f"tasks.{kind}.source"
        values[key] = download_from_hub(key, c[key])
        entries = [
            (entry, download_from_hub(f"{key}s", str(entry.get("source", ""))))
            for entry in c[f"{key}s"]
        ]
        local, pinned = (
            tuple({**entry, "source": names[i]} if names[i] else entry for entry, names in entries)
            for i in (0, 1)
        )
        values[f"{key}s"] = local, pinned
    c.config.update_from_flattened_dict({key: local for key, (local, _) in values.items()})
    hub_names = {key: pinned for key, (local, pinned) in values.items() if local != pinned}
    # Environments: each is a configuration of its own. The run records the names that they set.
    members = {}
    for name, member in c.members.items():
        with add_environment_to_errors(name):
            members[name] = download_files(member, recorded, for_plan=for_plan)
    if any(member.hub_names for member in members.values()):
        hub_names["environments"] = {
            name: {k: members[name].hub_names.get(k, v) for k, v in flatten_config(entries).items()}
            for name, entries in c.config.environments.items()
        }
    task_sources = {
        kind: resolve_sources(c.config, kind, sources[0].environment)
        for kind, sources in c.task_sources.items()
    }
    return replace(c, task_sources=task_sources, hub_names=hub_names, members=members)
