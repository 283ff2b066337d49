"""The data of configs/real.py, with sizes for one host with eight 80 GB accelerators.

JAX_PLATFORMS=cuda make real MODEL=models/Qwen2.5-7B-Instruct PRESET=real_8x80gb

Planned, not run: see docs/research/real.md.
"""

from ml_collections import ConfigDict

from configs import real_24gb


def get_config(world: str = "data/real") -> ConfigDict:
    config = real_24gb.get_config(world)
    config.mesh.data = 1
    config.mesh.fsdp = 8
    config.rollout.group_size = 16
    config.rollout.max_num_seqs = 128
    config.optimizer.lr = 1e-6
    return config
