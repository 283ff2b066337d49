"""The configuration: every key, how values are read, and how names are resolved."""

from jaxrl.config.schema import default_config

__all__ = ["default_config"]
