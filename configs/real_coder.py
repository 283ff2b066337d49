r"""Evaluate Qwen2.5-Coder-1.5B-Instruct on SQuAD questions, without training.

python -m examples.real_world --out=data/real --with_coder
python -m jaxrl.launch --config=configs/real_coder.py:qwen --workdir=runs/coder_qwen_local
python -m jaxrl.launch --config=configs/real_coder.py:search_r1 --workdir=runs/coder_tags_dense \
    --config.search.engine=dense

The argument is the protocol: `qwen` (tool calls of the chat template, which this model never makes)
or `search_r1` (tags, explained in the prompt), optionally followed by a comma and the world's
folder. `config.search.engine` is `local` (BM25), `dense` (all-MiniLM-L6-v2) or `hybrid`. The 50
questions are sampled from all 1,000, including those whose answer BM25 does not find.
"""

from ml_collections import ConfigDict

from configs.search_r1 import TEMPLATE
from examples.real_world import CODER_FOLDER
from jaxrl.config import default_config

WORLD = "data/real"
SYSTEM = (
    "Answer the question. Call search for what you do not know. When you know, give the answer "
    "alone, in a few words and without explanation, as <answer> answer </answer>."
)


def get_config(arguments: str = "qwen") -> ConfigDict:
    protocol, _, world = arguments.partition(",")
    world = world or WORLD
    config = default_config().lock()
    config.stages = ("evaluate",)
    config.model.path = f"{world}/{CODER_FOLDER}"
    config.tasks.eval.source = f"{world}/questions_all.jsonl"
    config.env.search.protocol = protocol
    if protocol == "qwen":
        config.prompt.system = SYSTEM
    else:
        config.prompt.template = TEMPLATE
    # Both engines search the same documents.
    config.search.local.corpus = f"{world}/corpus.jsonl"
    config.search.local.topk = 3
    config.search.dense.corpus = f"{world}/corpus.jsonl"
    config.search.dense.encoder = f"{world}/all-MiniLM-L6-v2/model"
    config.search.dense.query_prefix = ""
    config.search.dense.passage_prefix = ""
    config.search.dense.topk = 3
    config.rollout.max_observation_tokens = 300

    config.rollout.max_prompt_tokens = 320
    config.rollout.max_response_tokens = 300
    config.rollout.max_total_tokens = 1024
    config.rollout.max_turns = 3
    config.rollout.max_num_seqs = 16
    config.rollout.observation_lag_chunks = 1

    config.eval.max_tasks = 50
    config.eval.final_suites = ("greedy",)
    return config
