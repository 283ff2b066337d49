"""Search-R1 as in configs/search_r1.py, with protection against collapse.

python -m jaxrl.launch --config=configs/search_r1_stable.py --workdir=runs/search_r1_stable

Needs what configs/search_r1.py needs. The sentinel checks every step (docs/watch.md). If the policy
goes wrong, the run rolls back to the last good checkpoint, with other samples and half the learning
rate. If ids, keys, rewards or results are wrong, it stops, since no rollback helps.

configs/collapse_stable.py does the same in a world that collapses on a laptop. There, of seventeen
changes, this one alone learned as fast as without and ended above plain GRPO's best
(docs/research/results.md), so the others are off. It is untested at this size.
"""

from ml_collections import ConfigDict

from configs import search_r1

NOT_THE_POLICY = (
    *("prompts_differ", "keys_repeat", "advantages_uneven", "ids_differ", "sampler_differs"),
    *("rewards_constant", "suddenly_right", "judge_says_yes", "search_changed"),
)
"""Signs of faults that no earlier checkpoint repairs."""


def set_stability(config: ConfigDict) -> None:
    """Let the sentinel roll back, or stop if that would not help."""
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
