"""Configurations of the several environments in `config.environments`.

Each environment has a weight and overrides keys of the run's configuration. Its configuration is
complete, like that of a run with one environment.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

from jaxrl.config.keys import is_finite, reject_value
from jaxrl.config.loading import parse_values
from jaxrl.config.schema import flatten_config

SECTIONS = ("tasks", "prompt", "env", "search", "reward")
"""Sections that an environment may override."""

OTHER_KEYS = ("rollout.max_turns", "rollout.max_calls", "rollout.max_cost", "sft.source")
"""Keys of other sections that an environment may override."""

SHARED_KEYS = ("prompt.chat_template_kwargs", "env.step_deadline_s")
"""Keys of `SECTIONS` that apply to the entire run."""

RESERVED_NAMES = ("all", "mean")
"""Names of evaluation summaries, which no environment may have."""


def is_environment_key(key: str) -> bool:
    """Return True if environments may override the key."""
    return (key.split(".")[0] in SECTIONS or key in OTHER_KEYS) and key not in SHARED_KEYS


def split_config(config: ConfigDict) -> dict[str, tuple[float, ConfigDict]]:
    """Return the weight and complete configuration of each environment, keyed by name.

    Raises:
        ValueError: A name, a weight, a key or a value is invalid.
    """
    environments = {}
    for name, values in config.environments.items():
        section = f"environments.{name}"
        if not re.fullmatch(r"[a-z]\w*", name, re.ASCII) or name in RESERVED_NAMES:
            reject_value(
                "environments", sorted(config.environments), "names such as 'search' or 'math'"
            )
        if not isinstance(values, Mapping):
            reject_value(section, values, "a mapping of keys, such as {'weight': 0.5}")
        with add_environment_to_errors(name):
            flat = flatten_config(values)
            weight = flat.pop("weight", 1.0)
            flat = parse_values(flat)
        if not (is_finite(weight) and weight > 0):
            reject_value(f"{section}.weight", weight, "a number above 0")
        shared = [key for key in flat if not is_environment_key(key)]
        if shared:
            raise ValueError(
                f"config.{section} sets {shared[0]}, which applies to the entire run; set "
                f"config.{shared[0]}."
            )
        environment = config.copy_and_resolve_references()
        environment.environments = {}
        environment.update_from_flattened_dict(flat)
        environments[name] = (float(weight), environment)
    return environments


def expand_environments(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Replace `environments` in a flat configuration with keys `environments.<name>.<key>`."""
    expanded = {key: value for key, value in flat.items() if key != "environments"}
    for name, values in (flat.get("environments") or {}).items():
        overrides = flatten_config(values) if isinstance(values, Mapping) else {}
        expanded |= {f"environments.{name}.{key}": value for key, value in overrides.items()}
    return expanded


def split_environment_key(key: str) -> tuple[str, str]:
    """Split a key from `expand_environments` into an environment name ("" if none) and a key."""
    match = re.match(r"environments\.(\w+)\.(.*)", key, re.DOTALL)
    return (match[1], match[2]) if match else ("", key)


@contextlib.contextmanager
def add_environment_to_errors(name: str) -> Iterator[None]:
    """Add the environment's name to errors raised in the block; no effect if the name is ""."""
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        section = f"config.environments.{name}"
        if not name or section in str(error) or len(error.args) != 1:
            raise
        raise type(error)(f"{section}: {error}") from error
