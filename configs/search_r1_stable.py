"""Search-R1 as in configs/search_r1.py, with what keeps training from collapsing.

python -m jaxrl.launch --config=configs/search_r1_stable.py --workdir=runs/search_r1_stable

Brings what configs/search_r1.py asks for. What differs from it:

- The sentinel judges every step (docs/sentinel.md). Where the policy goes wrong, the run goes back
  to the last sound checkpoint, with other draws and half the learning rate; where ids, keys,
  rewards or results are wrong, it stops, since training on would be for nothing.

configs/collapse_stable.py is the same for a world that collapses on a laptop. There it was the
one of seventeen changes that learned as quickly as without and ended above the best that plain
GRPO reached (docs/results.md), so the others are left off. At this size it is untried.
"""

from ml_collections import ConfigDict

from configs import search_r1

NOT_THE_POLICY = (
    *("prompts_differ", "keys_repeat", "advantages_uneven", "ids_differ", "sampler_differs"),
    *("rewards_constant", "suddenly_right", "judge_says_yes", "search_changed"),
)
"""Signs of something for which no earlier checkpoint helps."""


def set_stability(config: ConfigDict) -> None:
    """The sentinel goes back, or stops where that would not help."""
    config.watch.name = "sentinel"
    config.watch.action = "roll_back"
    config.watch.actions = dict.fromkeys(NOT_THE_POLICY, "stop")
    config.watch.max_roll_backs = 10


def get_config() -> ConfigDict:
    config = search_r1.get_config()
    set_stability(config)
    config.checkpoint.every_steps = 20
    config.checkpoint.keep = 3
    return config
