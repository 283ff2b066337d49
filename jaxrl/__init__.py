"""Reinforcement learning for language models that search, in JAX and Flax."""

import os

# Local folders are the only source of weights and tokenizers unless the user says otherwise;
# without this, a mistyped path becomes a network look-up that takes most of a minute to fail.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

__version__ = "0.1.0"
