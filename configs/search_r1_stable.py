"""configs/search_r1.py with protection against collapse.

python -m jaxrl.launch --config=configs/search_r1_stable.py --workdir=runs/search_r1_stable

Needs the same files as configs/search_r1.py. The sentinel checks every step (docs/watch.md). If the
policy deteriorates, the run rolls back to the last healthy checkpoint, with other samples and half
the learning rate. If ids, keys, rewards or results are wrong, the run stops, because a rollback
would not help.

configs/collapse_stable.py uses the same protection in a setup that collapses on a laptop. Of
seventeen remedies, only this one learned as fast as plain GRPO and ended above its best score
(docs/research/results.md), so the others are off. It is untested at this size.
"""

from ml_collections import ConfigDict

from configs import search_r1

NOT_THE_POLICY = (
    *("prompts_differ", "keys_repeat", "advantages_uneven", "ids_differ", "sampler_differs"),
    *("rewards_constant", "suddenly_right", "judge_says_yes", "search_changed"),
)
"""Signs of faults that rolling back cannot fix."""


def set_stability(config: ConfigDict) -> None:
    """Set the sentinel to roll back, or to stop if a rollback would not help."""
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
