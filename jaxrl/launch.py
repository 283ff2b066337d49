"""The command: `python -m jaxrl.launch --config=configs/X.py --workdir=runs/X [--config.a.b=v]`.

Runs the stages that the configuration names, in order. Run again on the same workdir, it goes on
from the newest checkpoint.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags
from ml_collections import config_flags

_CONFIG = config_flags.DEFINE_config_file("config", None, "Configuration file.", lock_config=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run; it is made.")
_VALUES = flags.DEFINE_string("values", None, "YAML or JSON file of keys to set.")
_TRACEBACK = flags.DEFINE_bool("traceback", False, "Show where an error of the input was found.")

INPUT_ERRORS = (ValueError, KeyError, AttributeError, TypeError, OSError, flags.Error)


def main(argv: Sequence[str]) -> None:
    """Checks everything, then runs."""
    try:
        config, workdir = _read(argv)
        from jaxrl import config as configuration

        configuration.validate(config)
        logging.getLogger("absl").setLevel(logging.WARNING)
        # Imported late: a mistake in the configuration is told at once, without loading JAX.
        from jaxrl.assemble import assemble
        from jaxrl.metrics import Display

        parts = assemble(config)
        workdir.mkdir(parents=True, exist_ok=True)
        (workdir / "config.json").write_text(configuration.to_json(config), encoding="utf-8")
    except INPUT_ERRORS as error:
        if _TRACEBACK.value:
            raise
        sys.exit(f"error: {_message(error)}")
    from jaxrl.train import run

    run(config, workdir, parts, Display())


def _read(argv: Sequence[str]):  # type: ignore[no-untyped-def]
    """The configuration with `--values` applied, and the workdir."""
    if len(argv) > 1:
        raise ValueError(f"unexpected arguments {list(argv[1:])}; settings are --config.key=value.")
    if _CONFIG.value is None or _WORKDIR.value is None:
        raise ValueError("--config=configs/X.py and --workdir=runs/X are both needed.")
    config = _CONFIG.value
    if _VALUES.value is not None:
        from jaxrl.config import load_values

        load_values(config, _VALUES.value)
    return config, Path(_WORKDIR.value)


def _message(error: Exception) -> str:
    """An error's text; a KeyError would quote it."""
    return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)


def _parse(argv: Sequence[str]) -> list[str]:
    """Flags, a mistake in them told in one line."""
    try:
        return flags.FLAGS(list(argv))
    except INPUT_ERRORS as error:
        if "--traceback" in argv:
            raise
        sys.exit(f"error: {_message(error)}")


if __name__ == "__main__":
    app.run(main, flags_parser=_parse)
