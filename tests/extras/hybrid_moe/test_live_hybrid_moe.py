"""Hybrids with experts compared with `transformers` on torch, for random small models."""

import numpy as np
import pytest

from jaxrl.extras.hybrid_moe.qwen3_5_moe import Qwen35MoeConfig
from jaxrl.extras.hybrid_moe.qwen3_next import Qwen3NextConfig
from tests.extras.delta_net.parity import check_agreement, random_sizes
from tests.extras.hybrid_moe.models import random_experts

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("seed", range(10))
def test_exported_qwen3_5_models_agree_with_transformers(tmp_path, seed):
    rng = np.random.default_rng(seed)
    sizes = random_sizes(rng)
    sizes |= random_experts(rng, sizes["num_layers"])
    config = Qwen35MoeConfig(**sizes | {"mlp_width": sizes["shared_width"]})
    check_agreement(config, seed, tmp_path / "hf", num_generated=70)


@pytest.mark.parametrize("seed", range(10))
def test_exported_qwen3_next_models_agree_with_transformers(tmp_path, seed):
    """Some layers are dense, and weights of experts need not sum to 1."""
    rng = np.random.default_rng(100 + seed)
    sizes = random_sizes(rng)
    num_layers = sizes["num_layers"]
    sizes |= random_experts(rng, num_layers)
    # The renormalized weight of a single expert is 1, so the router's gradient is only rounding.
    sizes["renormalize"] = bool(rng.integers(2)) and sizes["top_k"] > 1
    num_experts = int(rng.integers(1, num_layers + 1))
    layers = sorted(rng.permutation(num_layers)[:num_experts].tolist())
    config = Qwen3NextConfig(**sizes | {"expert_layers": tuple(layers)})
    check_agreement(config, seed, tmp_path / "hf", num_generated=70)
