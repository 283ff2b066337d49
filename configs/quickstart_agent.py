r"""The quickstart, with episodes run by a Pydantic AI agent over HTTP.

python3 -m venv agent && agent/bin/pip install "pydantic-ai-slim[openai]"
python -m examples.calls_world --out=data/calls
python -m jaxrl.launch --config=configs/quickstart_calls.py --workdir=runs/calls \
    --config.stages="('sft','evaluate')"
python -m jaxrl.launch --config=configs/quickstart_agent.py --workdir=runs/agent

The warm start is that of configs/quickstart_calls.py. After it, examples/framework_agent.py runs
all episodes, including held-out ones.

To use another data folder, append it: --config=configs/quickstart_agent.py:data/other
"""

from ml_collections import ConfigDict

from configs import quickstart_calls


def get_config(world: str = "data/calls") -> ConfigDict:
    config = quickstart_calls.get_config(world)
    config.stages = ("train", "evaluate")
    config.model.path = "runs/calls/export"
    config.env.name = "agents"
    config.env.agents.function = "examples/framework_agent.py:play"
    config.env.agents.python = "agent/bin/python"
    config.env.agents.settings = {"corpus": f"{world}/corpus.jsonl"}
    config.reward.weights = {"reward": 1.0}
    config.rollout.max_turns = 4  # the agent itself stops after three
    config.eval.final_suites = ("sampled", "greedy")
    return config
