"""Search-R1 (https://arxiv.org/abs/2503.09516): Qwen2.5-7B on NQ and HotpotQA, with 8 devices.

python -m examples.prepare_data nq_hotpotqa --out=data/nq_hotpotqa
python -m examples.prepare_data wiki18 --out=data/wiki18
python -m jaxrl.launch --config=configs/search_r1.py --workdir=runs/search_r1

Needs models/Qwen2.5-7B and models/e5-base-v2 (intfloat/e5-base-v2). As published, E5 retrieves
three passages; the first run builds the index (docs/search.md). It is stored in int8 on the
devices, which gives the same results. configs/search_r1_small.py trains the method on a laptop.

Hyperparameters are those of the published script, train_grpo.sh. Differences:

- GRPO only: there is no critic for the paper's PPO.
- Three turns share 1,500 sampled tokens, where the script allows 500 per turn.
- A turn with neither query nor answer ends the episode. The code inserts a retry hint.
- Advantages are divided by the population standard deviation, with an epsilon of 1e-8.
- Documents cannot forge tags.
- Trajectories with a failed search are excluded; they do not get a reward of 0.
- Evaluations run every 100 steps instead of 50.
- The prompt's wording and the sampler's sizes are ours.
"""

from ml_collections import ConfigDict

from jaxrl.config import default_config

TEMPLATE = """\
Answer the question below. Think inside <think> and </think> whenever there is something new to \
think about. Where you lack knowledge, ask the search engine with <search> your query </search>; \
what it finds is given to you between <information> and </information>. Search as often as you \
need. Once you know enough, give nothing but the answer inside <answer> and </answer>, as in \
<answer> Beijing </answer>.
Question: {question}"""


def set_method(config: ConfigDict) -> None:
    """Set GRPO with a KL term against the initial policy."""
    config.reward.weights = {"exact_match": 1.0}
    config.rollout.temperature = 1.0
    config.advantage.name = "grpo"
    config.advantage.grpo.ddof = 0
    config.advantage.grpo.epsilon = 1e-8
    config.loss.clip_low = 0.2
    config.loss.clip_high = 0.2
    config.loss.entropy_coef = 0.001
    config.loss.aggregation = "token-mean"
    config.kl.coef = 0.001
    config.kl.estimator = "k3"
    config.kl.anchor = "ref"


def set_retriever(config: ConfigDict) -> None:
    """Set dense search of Wikipedia 2018 with E5 and int8 passages, sharded over the devices."""
    config.search.engine = "dense"
    config.search.dense.corpus = "data/wiki18/corpus.jsonl"
    config.search.dense.encoder = "models/e5-base-v2"
    config.search.dense.query_prefix = "query: "
    config.search.dense.passage_prefix = "passage: "
    config.search.dense.dtype = "int8"


def get_config() -> ConfigDict:
    config = default_config().lock()
    set_method(config)
    config.num_steps = 1005
    config.model.path = "models/Qwen2.5-7B"
    config.model.dtype = "bfloat16"
    config.mesh.data = 1
    config.mesh.fsdp = 8
    config.tasks.train.source = "data/nq_hotpotqa/train.jsonl"
    config.tasks.eval.source = "data/nq_hotpotqa/test.jsonl"
    config.prompt.template = TEMPLATE
    set_retriever(config)
    config.search.dense.topk = 3
    config.rollout.max_observation_tokens = 500

    config.rollout.tasks_per_step = 512
    config.rollout.group_size = 5
    config.rollout.max_turns = 2
    config.rollout.max_prompt_tokens = 2048
    config.rollout.max_response_tokens = 3 * 500  # two turns that search and one that answers
    config.rollout.max_total_tokens = 4096
    config.rollout.max_num_seqs = 192

    config.optimizer.lr = 1e-6
    config.optimizer.num_minibatches = 2
    config.optimizer.warmup_steps = 573  # 0.285 of all optimizer steps
    config.optimizer.micro_rows = 0

    config.eval.every_steps = 100
    config.checkpoint.every_steps = 100
    return config
