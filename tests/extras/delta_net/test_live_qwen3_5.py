"""Qwen3.5 compared with `transformers` on torch, for random small models."""

import numpy as np
import pytest

from jaxrl.extras.delta_net.qwen3_5 import Qwen35Config
from tests.extras.delta_net.parity import check_agreement, random_sizes

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("seed", range(20))
def test_exported_models_agree_with_transformers(tmp_path, seed):
    config = Qwen35Config(**random_sizes(np.random.default_rng(seed)))
    check_agreement(config, seed, tmp_path / "hf")
