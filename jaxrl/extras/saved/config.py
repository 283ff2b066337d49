"""Config file that loads a saved run's config: `--config=jaxrl/extras/saved/config.py:RUN`."""

from pathlib import Path

from ml_collections import ConfigDict

from jaxrl.builders.saved_run import read_config


def get_config(run: str) -> ConfigDict:
    """Return the config that a run was started with."""
    return read_config(Path(run))
