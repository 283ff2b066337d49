"""Search-R1 as in configs/search_r1.py, with what keeps training from collapsing.

python -m jaxrl.launch --config=configs/search_r1_stable.py --workdir=runs/search_r1_stable

Brings what configs/search_r1.py asks for. What differs from it:

- The sentinel judges every step (docs/sentinel.md). Where the policy goes wrong, the run goes back
  to the last sound checkpoint, with other draws and half the learning rate; where rewards, ids,
  keys or results are wrong, it stops, since training on would be for nothing.
- LLDS keeps up the likelihood of what is rewarded: two updates a batch give it something to do.

configs/collapse_stable.py is the same for a world that collapses on a laptop; the measurements by
which these were chosen are in docs/results.md. At this size they are untried.
"""

from ml_collections import ConfigDict

from configs import search_r1

POLICY = (
    *("update_too_large", "reward_fell", "entropy_rose", "entropy_collapsed", "likelihood_fell"),
    *("gradient_exploded", "responses_cut", "responses_malformed", "responses_loop", "turns_void"),
)
"""Signs that the policy goes wrong, which it may not do again from an earlier checkpoint."""

OTHERS = (
    *("prompts_differ", "keys_repeat", "advantages_uneven", "ids_differ", "sampler_differs"),
    *("rewards_constant", "suddenly_right", "judge_says_yes", "search_changed"),
)
"""Signs that something else is wrong, for which no earlier checkpoint helps."""


def set_stability(config: ConfigDict) -> None:
    """The sentinel, acting, and LLDS."""
    config.loss.term.name = "llds"
    config.watch.name = "sentinel"
    config.watch.actions = {**dict.fromkeys(POLICY, "roll_back"), **dict.fromkeys(OTHERS, "stop")}
    config.watch.max_roll_backs = 10


def get_config() -> ConfigDict:
    config = search_r1.get_config()
    set_stability(config)
    config.checkpoint.every_steps = 20
    config.checkpoint.keep = 3
    return config
