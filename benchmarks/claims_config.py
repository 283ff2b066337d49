"""The settings that all runs of a world share: plain GRPO with observations masked.

python -m jaxrl.launch --config=benchmarks/claims_config.py:data/claims/hops --workdir=runs/hops

`benchmarks/claims.py` makes the worlds, sets what an algorithm changes, and starts the runs. The
folder's name says which world it is.
"""

from pathlib import Path

from ml_collections import ConfigDict

from jaxrl.config import default_config


def get_config(world: str = "data/claims/hops") -> ConfigDict:
    config = default_config().lock()
    config.stages = ("train",)
    config.num_steps = 60
    config.model.path = f"{world}/model"
    config.tasks.train.source = f"{world}/questions_train.jsonl"
    config.tasks.eval.source = f"{world}/questions_eval.jsonl"
    config.search.local.corpus = f"{world}/corpus.jsonl"

    config.sft.source = f"{world}/demonstrations.jsonl"
    config.sft.num_steps = 1000
    config.sft.batch_size = 32
    config.sft.optimizer.lr = 5e-3
    config.sft.optimizer.warmup_steps = 20
    config.sft.optimizer.schedule = "cosine"
    config.sft.optimizer.final_lr_fraction = 0.1
    config.sft.optimizer.beta2 = 0.98
    config.sft.optimizer.micro_rows = 4

    config.rollout.tasks_per_step = 8
    config.rollout.group_size = 8
    config.rollout.max_prompt_tokens = 32
    config.rollout.num_rows = 64
    config.rollout.chunk_tokens = 8
    config.rollout.observation_lag_chunks = 1

    config.optimizer.lr = 3e-4
    config.optimizer.warmup_steps = 4
    config.optimizer.beta2 = 0.98
    config.optimizer.num_minibatches = 4  # with one, ratios would be 1 and nothing clipped
    config.optimizer.micro_rows = 4
    config.optimizer.skip_signal_free = False  # so that the entropy is that of every token

    config.eval.suites = ("sampled",)
    config.eval.every_steps = 10
    config.checkpoint.every_steps = 20
    config.checkpoint.keep = 1
    config.log.trajectories = 0
    for key, value in WORLDS.get(Path(world).name, WORLDS["hops"]).items():
        config.update_from_flattened_dict({key: value})
    return config


WORLDS = {
    "hops": {
        "rollout.max_response_tokens": 200,
        "rollout.max_total_tokens": 240,
        "rollout.max_turns": 4,
        "search.local.topk": 1,
        "rollout.max_observation_tokens": 24,
    },
    "math": {
        "env.name": "math",
        "search.local.corpus": "",
        "reward.weights": {"math": 1.0},
        "reward.correct": "math",
        "rollout.max_prompt_tokens": 56,
        "rollout.max_response_tokens": 72,
        "rollout.max_total_tokens": 168,
    },
    "ambiguous": {
        "rollout.max_response_tokens": 48,
        "rollout.max_total_tokens": 128,
        "rollout.max_turns": 1,
        "search.local.topk": 3,
        "rollout.max_observation_tokens": 72,
    },
    "unanswerable": {
        "rollout.max_response_tokens": 64,
        "rollout.max_total_tokens": 160,
        "rollout.max_turns": 2,
        "search.local.topk": 2,
        "rollout.max_observation_tokens": 48,
    },
}
"""Settings that each world needs: room for its search results and its hops, or for its lines."""
