"""Reinforcement learning for language models that search, in JAX and Flax."""

__version__ = "0.1.0"
