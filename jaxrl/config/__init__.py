"""Configuration keys, value loading and name resolution."""

from jaxrl.config.schema import default_config

__all__ = ["default_config"]
