"""Settings shared by the small versions of the methods: two-layer models on a laptop CPU.

Settings of a method are in the config of its paper. This file has sizes, learning rates and paths.
"""

from ml_collections import ConfigDict

from jaxrl.config import default_config


def small_world(world: str) -> ConfigDict:
    """Return a config with a short warm start and 20 RL steps, on data like the quickstart's."""
    config = default_config().lock()
    config.stages = ("sft", "train", "evaluate")
    config.num_steps = 20
    config.model.path = f"{world}/model"
    config.tasks.train.source = f"{world}/questions_train.jsonl"
    config.tasks.eval.source = f"{world}/questions_eval.jsonl"
    config.search.local.corpus = f"{world}/corpus.jsonl"
    config.rollout.max_observation_tokens = 72

    config.sft.source = f"{world}/demonstrations.jsonl"
    config.sft.num_steps = 300
    config.sft.batch_size = 32
    config.sft.optimizer.lr = 5e-3
    config.sft.optimizer.warmup_steps = 20
    config.sft.optimizer.schedule = "cosine"
    config.sft.optimizer.beta2 = 0.98
    config.sft.optimizer.micro_rows = 4

    config.rollout.tasks_per_step = 8
    config.rollout.group_size = 8
    config.rollout.max_prompt_tokens = 32
    config.rollout.max_response_tokens = 64
    config.rollout.max_total_tokens = 192
    config.rollout.max_turns = 2
    config.rollout.max_num_seqs = 64
    config.rollout.chunk_tokens = 8
    config.rollout.observation_lag_chunks = 1

    config.optimizer.lr = 1e-3
    config.optimizer.beta2 = 0.98
    config.optimizer.micro_rows = 4
    config.checkpoint.every_steps = 100
    return config


def small_math(world: str) -> ConfigDict:
    """Return a config with 900 warm-start and 60 RL steps, on data of `examples/math_world.py`."""
    config = small_world(world)
    config.num_steps = 60
    config.env.name = "math"
    config.search.local.corpus = ""
    config.sft.num_steps = 900
    config.sft.optimizer.final_lr_fraction = 0.1

    config.rollout.tasks_per_step = 16
    config.rollout.max_num_seqs = 128
    config.rollout.max_prompt_tokens = 56
    config.rollout.max_response_tokens = 96
    config.rollout.max_total_tokens = 168  # length of the longest demonstrations

    config.optimizer.lr = 3e-4
    config.eval.final_suites = ("sampled", "greedy")
    config.checkpoint.every_steps = 300
    return config
