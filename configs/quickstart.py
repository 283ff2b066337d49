"""Train a small Qwen3 to search, on a laptop CPU: `make quickstart`.

python -m examples.quickstart_world --out=data/quickstart
python -m jaxrl.launch --config=configs/quickstart.py --workdir=runs/quickstart

To use another data folder, append it: --config=configs/quickstart.py:data/other
"""

from ml_collections import ConfigDict

from jaxrl.config import default_config


def get_config(world: str = "data/quickstart") -> ConfigDict:
    config = default_config().lock()
    config.stages = ("sft", "train", "evaluate")
    config.num_steps = 60
    config.model.path = f"{world}/model"
    config.tasks.train.source = f"{world}/questions_train.jsonl"
    config.tasks.eval.source = f"{world}/questions_eval.jsonl"
    config.search.local.corpus = f"{world}/corpus.jsonl"
    config.rollout.max_observation_tokens = 72

    config.sft.source = f"{world}/demonstrations.jsonl"
    config.sft.num_steps = 900
    config.sft.batch_size = 32
    config.sft.optimizer.lr = 5e-3
    config.sft.optimizer.warmup_steps = 20
    config.sft.optimizer.schedule = "cosine"
    config.sft.optimizer.final_lr_fraction = 0.1
    config.sft.optimizer.beta2 = 0.98
    config.sft.optimizer.micro_rows = 4

    config.rollout.tasks_per_step = 16
    config.rollout.group_size = 8
    config.rollout.max_prompt_tokens = 32
    config.rollout.max_response_tokens = 64
    config.rollout.max_total_tokens = 192
    config.rollout.max_turns = 2
    config.rollout.max_num_seqs = 128
    config.rollout.chunk_tokens = 8
    config.rollout.observation_lag_chunks = 1  # no overlap: host and device share the cores

    config.advantage.grpo.normalize_std = False
    config.loss.clip_high = 0.28
    config.optimizer.lr = 1e-3
    config.optimizer.warmup_steps = 2
    config.optimizer.beta2 = 0.98
    config.optimizer.micro_rows = 4
    config.optimizer.skip_signal_free = False  # slightly slower, but one program less to compile

    config.checkpoint.every_steps = 300
    return config
