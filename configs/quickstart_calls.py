"""The quickstart with Qwen tool calls, on a laptop CPU.

python -m examples.calls_world --out=data/calls
python -m jaxrl.launch --config=configs/quickstart_calls.py --workdir=runs/calls

To use another data folder, append it: --config=configs/quickstart_calls.py:data/other
"""

from ml_collections import ConfigDict

from configs import quickstart

SYSTEM = "Search, then give the answer alone as <answer> answer </answer>."


def get_config(world: str = "data/calls") -> ConfigDict:
    config = quickstart.get_config(world)
    config.env.search.protocol = "qwen"
    config.prompt.system = SYSTEM
    config.rollout.max_observation_tokens = 96
    config.rollout.max_prompt_tokens = 96
    config.rollout.max_response_tokens = 96
    config.rollout.max_total_tokens = 352
    return config
