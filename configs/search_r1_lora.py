r"""Search-R1 with a LoRA adapter: Qwen3-4B on a 24 GiB GPU (https://arxiv.org/abs/2503.09516).

    python -m examples.prepare_data nq_hotpotqa --out=data/nq_hotpotqa
    python -m examples.prepare_data wiki18 --out=data/wiki18
    python -m jaxrl.launch --config=configs/search_r1_lora.py --workdir=runs/search_r1_lora

Method and prompt are those of search_r1.py. Differences: an adapter of rank 32 on all linear
layers, on bfloat16 weights, with a higher learning rate; one mini-batch of 32 questions with 8
trajectories each, since there is only one device; three searches instead of two, which share 2,000
tokens with the answer; 500 steps; BM25 instead of E5, whose vectors do not fit.

    jaxrl plan --config=configs/search_r1_lora.py --plan_devices=1 --plan_memory_gib=24 \
      --config.model.path=configs/models/qwen3-4b
"""

from ml_collections import ConfigDict

from configs.search_r1 import TEMPLATE, set_method
from jaxrl.config import default_config


def set_adapter(config: ConfigDict) -> None:
    """Set a LoRA adapter on all linear layers, with a matching learning rate."""
    config.model.lora.rank = 32
    config.model.lora.alpha = 64.0
    config.model.lora.base_dtype = config.model.dtype
    config.optimizer.lr = 2e-5
    config.optimizer.weight_decay = 0.0


def get_config() -> ConfigDict:
    config = default_config().lock()
    set_method(config)
    config.num_steps = 500
    config.model.path = "models/Qwen3-4B"
    config.model.dtype = "bfloat16"
    config.model.logits_chunk_tokens = 1024
    set_adapter(config)
    config.tasks.train.source = "data/nq_hotpotqa/train.jsonl"
    config.tasks.eval.source = "data/nq_hotpotqa/test.jsonl"
    config.prompt.template = TEMPLATE
    config.search.local.corpus = "data/wiki18/corpus.jsonl"
    config.search.local.topk = 3
    config.rollout.max_observation_tokens = 500

    config.rollout.tasks_per_step = 32
    config.rollout.group_size = 8
    config.rollout.max_turns = 3
    config.rollout.max_prompt_tokens = 1024
    config.rollout.max_response_tokens = 4 * 500  # three turns that search and one that answers
    config.rollout.max_total_tokens = 4096
    config.rollout.max_num_seqs = 32

    config.optimizer.warmup_steps = 10
    config.optimizer.micro_rows = 1

    config.eval.every_steps = 50
    config.checkpoint.every_steps = 25
    return config
