"""Recording of a run's searches, as its configuration asks for it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxrl.builders.fingerprints import search_fingerprints
from jaxrl.builders.resolved import ResolvedConfig
from jaxrl.config.schema import KEYS
from jaxrl.envs.search.recording import Recording, recorded_engines
from jaxrl.utils.callables import is_dotted


def open_recording(
    config: ResolvedConfig, workdir: Path | None, log: Callable[[str], None]
) -> Recording:
    """Opens the recording of the searches of a run.

    Args:
        config: checked; says whether it is written, or alone answers.
        workdir: of the run, beside which it is kept where no folder is named; None without a run.
        log: told of what is damaged.

    Raises:
        ValueError: there is no folder for it.
        FileNotFoundError: it alone is to answer, and there is none of this engine.
    """
    settings = config.search
    if not (settings.replay_folder or workdir):
        raise ValueError(
            f"config.search.replay is {settings.replay!r} without a run; name the folder of a "
            "recording by config.search.replay_folder."
        )
    folder = Path(settings.replay_folder or Path(workdir or "") / "searches")
    asked = {"engine": settings.engine, "settings": _asked_settings(config)}
    if settings.replay == "only":
        asked["settings"] = _as_recorded(asked, folder)
    recording = Recording(folder, asked, process=jax.process_index(), log=log)
    if settings.replay == "only" and not recording:
        there = "; ".join(map(json.dumps, recorded_engines(folder))) or "nothing"
        raise FileNotFoundError(
            f"config.search.replay is 'only', but {folder} has no searches of {json.dumps(asked)}; "
            f"there is: {there}. Name the folder by config.search.replay_folder, or set the engine "
            "and its settings as they were."
        )
    return recording


_NOT_IN_RESULTS = {
    *("url", "timeout_s", "connections", "batch_size", "max_response_mib", "key_env", "auth"),
    *("local.index", "dense.index", "dense.query_rows", "dense.batch_tokens"),
    "dense.query_batch_tokens",
}
"""Settings of our engines on which no result depends, or that say where the same server is."""


def _asked_settings(config: ResolvedConfig) -> dict[str, Any]:
    """Settings of the engine on which results depend; a file is what it holds, None if missing."""
    engine = config.search.engine
    if is_dotted(engine):
        return dict(config.search.settings)
    parts = ("local", "dense") if engine == "hybrid" else ()
    settings = {
        f"{name}.{key}": value
        for name in (*parts, engine)
        for key, value in config.search.get(name, {}).items()
        if not {key, f"{name}.{key}"} & _NOT_IN_RESULTS
    }
    if engine == "hybrid":
        del settings["local.corpus"]  # it is that of dense
    digests = search_fingerprints(config)
    for key in filter(_is_file, settings):
        held = {
            name: one for name, one in digests.items() if f"{name}/".startswith(f"search.{key}/")
        }
        digest = hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()
        settings[key] = settings[key] and (digest if held else None)
    return settings


def _is_file(setting: str) -> bool:
    """True for a setting that names a file: a recording goes by its content, not its path."""
    return f"search.{setting}" in KEYS and bool(KEYS[f"search.{setting}"].holds)


def _as_recorded(asked: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The settings; of files that are missing here, as the only recording that fits has them.

    Raises:
        FileNotFoundError: several recordings fit.
    """
    settings: dict[str, Any] = asked["settings"]
    missing = [key for key, value in settings.items() if value is None and _is_file(key)]
    fitting = []
    for there in recorded_engines(folder) if missing else []:
        held = dict.fromkeys(missing)
        if {**there, "settings": {**there.get("settings", {}), **held}} == asked:
            fitting.append(there["settings"])
    if len(fitting) > 1:
        raise FileNotFoundError(
            f"config.search.{missing[0]} is not here, and {folder} has searches of {len(fitting)} "
            "such files; put the one that is meant where the key says."
        )
    return fitting[0] if fitting else settings
