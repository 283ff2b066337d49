"""Opening of the on-disk recording of a run's search results."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxrl.builders.fingerprints import compute_search_fingerprints
from jaxrl.builders.resolved import ResolvedConfig
from jaxrl.config.schema import KEYS
from jaxrl.envs.search.recording import Recording, list_recorded_engines
from jaxrl.utils.callables import is_dotted_path


def open_recording(
    config: ResolvedConfig, workdir: Path | None, log: Callable[[str], None]
) -> Recording:
    """Open the recording of a run's search results.

    Args:
        config: Resolved configuration.
        workdir: Folder of the run, which contains the recording unless `search.replay_folder` is
            set; None if there is no run.
        log: Function that logs a message about each damaged record.

    Raises:
        ValueError: Neither a recording folder nor a workdir is set.
        FileNotFoundError: `search.replay` is "only", but there is no recording for this engine.
    """
    search = config.search
    if not (search.replay_folder or workdir):
        raise ValueError(
            f"config.search.replay is {search.replay!r} without a run; set "
            "config.search.replay_folder to the folder of a recording."
        )
    folder = Path(search.replay_folder or Path(workdir or "") / "searches")
    engine = {"engine": search.engine, "settings": _collect_engine_settings(config)}
    if search.replay == "only":
        engine["settings"] = _fill_missing_hashes(engine, folder)
    recording = Recording(folder, engine, process=jax.process_index(), log=log)
    if search.replay == "only" and not recording:
        known = "; ".join(map(json.dumps, list_recorded_engines(folder))) or "nothing"
        raise FileNotFoundError(
            f"config.search.replay is 'only', but {folder} has no searches of "
            f"{json.dumps(engine)}; it has: {known}. Set config.search.replay_folder to another "
            "folder, or restore the recorded engine and its settings."
        )
    return recording


_NEUTRAL_SETTINGS = {
    *("url", "timeout_s", "connections", "batch_size", "max_response_mib", "key_env", "auth"),
    *("local.index", "dense.index", "dense.query_rows", "dense.batch_tokens"),
    "dense.query_batch_tokens",
}
"""Settings of built-in engines that do not affect results, such as a server's URL."""


def _collect_engine_settings(config: ResolvedConfig) -> dict[str, Any]:
    """Return the engine's settings that affect results.

    Files are replaced by hashes of their content, missing files by None.
    """
    engine = config.search.engine
    if is_dotted_path(engine):
        return dict(config.search.settings)
    parts = ("local", "dense") if engine == "hybrid" else ()
    settings = {
        f"{name}.{key}": value
        for name in (*parts, engine)
        for key, value in config.search.get(name, {}).items()
        if not {key, f"{name}.{key}"} & _NEUTRAL_SETTINGS
    }
    if engine == "hybrid":
        del settings["local.corpus"]  # dense.corpus names the same file
    fingerprints = compute_search_fingerprints(config)
    for key in filter(_is_file_setting, settings):
        files = {
            name: digest
            for name, digest in fingerprints.items()
            if f"{name}/".startswith(f"search.{key}/")
        }
        digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
        settings[key] = settings[key] and (digest if files else None)
    return settings


def _is_file_setting(setting: str) -> bool:
    """Return True if the setting is a file path. Such settings are compared by content hash."""
    return f"search.{setting}" in KEYS and bool(KEYS[f"search.{setting}"].holds)


def _fill_missing_hashes(engine: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the engine's settings, with missing files' hashes taken from its recording.

    Raises:
        FileNotFoundError: A file is missing, and several recorded engines match the rest.
    """
    settings: dict[str, Any] = engine["settings"]
    missing = [key for key, value in settings.items() if value is None and _is_file_setting(key)]
    matches = []
    for recorded in list_recorded_engines(folder) if missing else []:
        without_files = {**recorded.get("settings", {}), **dict.fromkeys(missing)}
        if {**recorded, "settings": without_files} == engine:
            matches.append(recorded["settings"])
    if len(matches) > 1:
        raise FileNotFoundError(
            f"the file of config.search.{missing[0]} is missing, and {folder} has searches of "
            f"{len(matches)} such files; restore one of them at the configured path."
        )
    return matches[0] if matches else settings
