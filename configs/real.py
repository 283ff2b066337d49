"""Train SmolLM2-135M-Instruct to search real documents, on two CPU cores: `make real`.

python -m examples.real_world --out=data/real
python -m jaxrl.launch --config=configs/real.py --workdir=runs/real

docs/research/real.md has the results and sources. Prompts have up to 91 tokens, demonstration turns
up to 40, and 99% of the documents up to 108.

To use another data folder, append it: --config=configs/real.py:data/other
"""

from ml_collections import ConfigDict

from examples.real_world import MODEL_FOLDER, SYSTEM
from jaxrl.config import default_config


def get_config(world: str = "data/real") -> ConfigDict:
    config = default_config().lock()
    config.stages = ("sft", "train", "evaluate")
    config.num_steps = 16
    config.model.path = f"{world}/{MODEL_FOLDER}"
    config.model.remat = "names"
    config.tasks.train.source = f"{world}/questions_train.jsonl"
    config.tasks.eval.source = f"{world}/questions_eval.jsonl"
    config.prompt.system = SYSTEM
    config.search.local.corpus = f"{world}/corpus.jsonl"
    config.search.local.topk = 1
    config.rollout.max_observation_tokens = 104

    config.sft.source = f"{world}/demonstrations.jsonl"
    config.sft.num_steps = 60
    config.sft.batch_size = 8
    config.sft.optimizer.lr = 2e-4
    config.sft.optimizer.warmup_steps = 2
    config.sft.optimizer.micro_rows = 2

    config.rollout.tasks_per_step = 8
    config.rollout.group_size = 4
    config.rollout.max_prompt_tokens = 96
    config.rollout.max_response_tokens = 64
    config.rollout.max_total_tokens = 288
    config.rollout.max_turns = 2
    config.rollout.max_num_seqs = 32
    config.rollout.observation_lag_chunks = 1

    config.advantage.grpo.normalize_std = False
    config.loss.clip_high = 0.28
    config.optimizer.lr = 5e-5
    config.optimizer.warmup_steps = 2
    config.optimizer.micro_rows = 2

    config.eval.final_suites = ("empty_search", "random_search")
    config.checkpoint.every_steps = 4
    return config
