"""Multi-turn search with a mixture of experts: Qwen3-30B-A3B on two hosts with 8 devices each.

python -m examples.prepare_data nq_hotpotqa --out=data/nq_hotpotqa
python -m examples.prepare_data wiki18 --out=data/wiki18
python -m jaxrl.launch --config=configs/search_moe.py --workdir=runs/search_moe

Needs models/Qwen3-30B-A3B. It does not
reproduce a publication. It combines Search-R1 with GSPO (https://arxiv.org/abs/2507.18071), that
is, sequence ratios, a narrow clip range, no KL term and no entropy bonus, and with router replay
(R3, https://arxiv.org/abs/2510.11370). Search is BM25. The settings are a starting point and have
not been run at this size. configs/search_moe_small.py trains the same method on a laptop.
"""

from ml_collections import ConfigDict

from configs import search_r1
from jaxrl.config import default_config


def set_method(config: ConfigDict) -> None:
    """Set Search-R1 with GSPO and router replay. A KL reference would double weight memory."""
    search_r1.set_method(config)
    config.kl.coef = 0.0
    config.loss.name = "gspo"
    config.loss.clip_low, config.loss.clip_high = 3e-4, 4e-4
    config.loss.entropy_coef = 0.0
    config.loss.aggregation = "seq-mean-token-mean"
    config.model.replay = True


def get_config() -> ConfigDict:
    config = default_config().lock()
    set_method(config)
    config.num_steps = 500
    config.model.path = "models/Qwen3-30B-A3B"
    config.model.dtype = "bfloat16"
    config.mesh.data, config.mesh.fsdp, config.mesh.expert = 1, 2, 8
    config.tasks.train.source = "data/nq_hotpotqa/train.jsonl"
    config.tasks.eval.source = "data/nq_hotpotqa/test.jsonl"
    config.prompt.template = search_r1.TEMPLATE
    config.search.local.corpus = "data/wiki18/corpus.jsonl"
    config.search.local.topk = 3
    config.rollout.max_observation_tokens = 500

    config.rollout.tasks_per_step = 256
    config.rollout.group_size = 8
    config.rollout.max_turns = 4
    config.rollout.max_prompt_tokens = 1024
    config.rollout.max_response_tokens = 4096
    config.rollout.max_total_tokens = 8192
    config.rollout.max_num_seqs = 256

    config.optimizer.lr = 1e-6
    config.optimizer.num_minibatches = 4
    config.optimizer.warmup_steps = 10
    config.optimizer.micro_rows = 0

    config.eval.every_steps = 50
    config.checkpoint.every_steps = 50
    return config
