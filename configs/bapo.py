"""BAPO (https://arxiv.org/abs/2601.11037): Qwen2.5-7B-Instruct searches, one host of 8 devices.

python -m jaxrl.launch --config=configs/bapo.py --workdir=runs/bapo

Needs models/Qwen2.5-7B-Instruct, models/e5-base-v2, 5,000 multi-hop questions as
data/bapo/train.jsonl, validation questions (HotpotQA, 2WikiMultiHopQA, MuSiQue, Bamboogle) as
data/bapo/eval.jsonl, and Wikipedia 2018 in passages of 100 words as data/wiki18/corpus.jsonl
(docs/data.md). E5 finds five passages, as published. The Python tool is an extra:
pip install -e '.[python-tool]'. configs/bapo_small.py trains the same method on a laptop.

Hyper-parameters are published, except the rate of abstentions that closes the early stage: 0.1,
where paper and code have 0.05. Other differences:

- Groups are resampled twice, as the paper counts. The code's loop ends one earlier.
- Evaluations below the best are counted over the run, as in the code. The best starts at minus
  infinity, not 0.
- The sample gate's "more than 3 of 8" distinct answers is at least n/2, for any n.
- Groups are formed by task, not by eight consecutive places.
- The code ends a response without calls left with an end-of-turn id and trains on it; here it ends.
- Python runs in a sandbox without packages and with a fixed clock.
- A failed search does not count as a score.
- The tokens of a search result, the prompt's wording and the sampler's sizes are ours.
"""

from ml_collections import ConfigDict

from configs.search_r1 import set_retriever
from jaxrl.config import default_config

SYSTEM = """\
You answer questions with the help of a search engine. Think inside <think> and </think> first, \
and again after every result. To search, write <search> your query </search>; the result follows \
inside <result> and </result>. To calculate, write <python> print(...) </python>; what it prints \
follows in the same way. When you are done, write your final answer inside <answer> and \
</answer>, the answer itself in a box: <answer> The answer is \\boxed{answer} </answer>. If, after \
an honest search, you cannot find out what is asked, say so: \
<answer> \\boxed{I DON'T KNOW} </answer>."""


def set_environment(config: ConfigDict) -> None:
    """Set BAPO's tags, its two tools and its reward."""
    config.env.search.protocol = "bapo"
    config.env.search.tools = ("python",)
    config.reward.weights = {"bapo": 1.0}  # F1, or -1 for a malformed response
    config.reward.correct = "bapo"


def set_method(config: ConfigDict) -> None:
    """Reward abstentions if no sample of a group is right, once accuracy stops rising."""
    config.shaping.boundary_aware = True
    config.shaping.stage_level = True
    config.shaping.sample_level = True
    config.shaping.abstention_bonus = 0.5
    config.shaping.abstention_rate = 0.1
    config.shaping.stage_tolerance = 5
    config.filter.resample_attempts = 2
    config.rollout.temperature = 1.0
    config.advantage.name = "grpo"
    config.loss.clip_low = 0.1
    config.loss.clip_high = 0.1
    config.kl.coef = 0.001
    config.kl.estimator = "k3"
    config.kl.anchor = "ref"
    config.eval.every_steps = 1  # a low accuracy counts toward the late stage
    config.eval.suites = ("greedy",)
    config.eval.best_metric = "val-core/all/exact_match/greedy"


def get_config() -> ConfigDict:
    config = default_config().lock()
    set_environment(config)
    set_method(config)
    config.num_steps = 156  # two epochs
    config.model.path = "models/Qwen2.5-7B-Instruct"
    config.model.dtype = "bfloat16"
    config.mesh.data = 1
    config.mesh.fsdp = 8
    config.tasks.train.source = "data/bapo/train.jsonl"
    config.tasks.eval.source = "data/bapo/eval.jsonl"
    config.prompt.system = SYSTEM
    set_retriever(config)
    config.search.dense.topk = 5
    config.rollout.max_observation_tokens = 2048

    config.rollout.tasks_per_step = 64
    config.rollout.group_size = 8
    config.rollout.max_turns = 3
    config.rollout.max_prompt_tokens = 1536
    config.rollout.max_response_tokens = 8192
    config.rollout.max_total_tokens = 1536 + 8192  # search results count as response
    config.rollout.max_num_seqs = 64

    config.optimizer.lr = 1e-6
    config.optimizer.num_minibatches = 4
    config.optimizer.micro_rows = 0
    config.checkpoint.every_steps = 10
    return config
