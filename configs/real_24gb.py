"""The data of configs/real.py on one 24 GB accelerator, with a larger model and longer responses.

JAX_PLATFORMS=cuda make real MODEL=models/Qwen2.5-0.5B-Instruct PRESET=real_24gb

Planned, not run: see docs/research/real.md.
"""

from ml_collections import ConfigDict

from configs import real


def get_config(world: str = "data/real") -> ConfigDict:
    config = real.get_config(world)
    set_sizes(config)
    return config


def set_sizes(config: ConfigDict) -> None:
    """Set lengths, batch sizes and learning rates for one 24 GB accelerator."""
    config.model.dtype = "bfloat16"
    config.model.remat = "full"
    config.search.local.topk = 3
    config.rollout.max_observation_tokens = 320
    config.rollout.max_response_tokens = 256
    config.rollout.max_total_tokens = 1024
    config.rollout.group_size = 8
    config.rollout.max_num_seqs = 64
    config.optimizer.micro_rows = 0
    config.sft.optimizer.micro_rows = 0
    config.optimizer.lr = 2e-6
    config.sft.optimizer.lr = 1e-5
