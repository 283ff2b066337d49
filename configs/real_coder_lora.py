"""Train a LoRA adapter for search on an int8 Qwen2.5-Coder-1.5B-Instruct, on a CPU.

python -m examples.real_world --out=data/real --with_coder
python -m jaxrl.launch --config=configs/real_coder_lora.py --workdir=runs/coder_lora

There is no warm start: the model follows the prompt's tags. Observations are short and a step has
16 trajectories, because a step takes minutes on two cores.
"""

from ml_collections import ConfigDict

from configs import real_coder
from configs.search_r1_lora import set_adapter


def get_config(world: str = real_coder.WORLD) -> ConfigDict:
    config = real_coder.get_config(f"search_r1,{world}")
    config.stages = ("train", "evaluate")
    config.num_steps = 24
    set_adapter(config)
    config.model.lora.rank = 16
    config.model.lora.alpha = 32.0
    config.model.lora.base_dtype = "int8"
    config.tasks.train.source = f"{world}/questions_train.jsonl"
    config.tasks.eval.source = f"{world}/questions_eval.jsonl"

    config.search.local.topk = 1
    config.rollout.max_observation_tokens = 104
    config.rollout.tasks_per_step = 4
    config.rollout.group_size = 4
    config.rollout.max_prompt_tokens = 160
    config.rollout.max_response_tokens = 128
    config.rollout.max_total_tokens = 400
    config.rollout.max_turns = 2

    config.advantage.grpo.normalize_std = False
    config.loss.clip_high = 0.28
    config.optimizer.lr = 2e-4
    config.optimizer.warmup_steps = 2
    config.optimizer.micro_rows = 4

    config.eval.max_tasks = 50
    config.eval.suites = ("sampled",)
    config.eval.every_steps = 12
    config.eval.final_suites = ("greedy", "empty_search")
    config.checkpoint.every_steps = 1
    return config
