"""Configuration keys, loading of values, and resolution of names."""

from jaxrl.config.schema import default_config

__all__ = ["default_config"]
