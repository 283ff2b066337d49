r"""Warm start, RL and evaluation in about a minute, to check that everything works.

python -m examples.quickstart_world --out=data/debug --num_people=40 --num_held_out=8 \
    --num_demonstrations=400
python -m jaxrl.launch --config=configs/debug_tiny.py --workdir=runs/debug

The warm start's loss falls from 7.3 to about 1.3, and rewards are around 0.2. Few answers are
correct, because training is too short.

To use another data folder, append it: --config=configs/debug_tiny.py:data/other
"""

from ml_collections import ConfigDict

from jaxrl.config import default_config


def get_config(world: str = "data/debug") -> ConfigDict:
    config = default_config().lock()
    config.stages = ("sft", "train", "evaluate")
    config.num_steps = 4
    config.model.path = f"{world}/model"
    config.tasks.train.source = f"{world}/questions_train.jsonl"
    config.tasks.eval.source = f"{world}/questions_eval.jsonl"
    config.search.local.corpus = f"{world}/corpus.jsonl"
    config.rollout.max_observation_tokens = 72
    # The format is rewarded too, so that there is a signal from the start.
    config.reward.weights = {"exact_match": 1.0, "format": 0.5}

    config.sft.source = f"{world}/demonstrations.jsonl"
    config.sft.num_steps = 60
    config.sft.batch_size = 8
    config.sft.optimizer.lr = 1e-2
    config.sft.optimizer.beta2 = 0.98
    config.sft.optimizer.micro_rows = 4

    config.rollout.tasks_per_step = 4
    config.rollout.group_size = 4
    config.rollout.max_prompt_tokens = 32
    config.rollout.max_response_tokens = 64
    config.rollout.max_total_tokens = 192
    config.rollout.max_turns = 2
    config.rollout.max_num_seqs = 16
    config.rollout.chunk_tokens = 8

    config.advantage.grpo.normalize_std = False
    config.optimizer.lr = 1e-3
    config.optimizer.micro_rows = 4

    config.checkpoint.every_steps = 2
    return config
