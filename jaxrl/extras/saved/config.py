"""Config file of a saved run: `--config=jaxrl/extras/saved/config.py:RUN`."""

from pathlib import Path

from ml_collections import ConfigDict

from jaxrl.builders.saved_run import read_config


def get_config(run: str) -> ConfigDict:
    """Return the config with which a run was started."""
    return read_config(Path(run))
