"""Custom loss, passed to each update: REINFORCE with a leave-one-out baseline.

python -m examples.custom_loss --config=configs/debug_tiny.py --workdir=runs/custom_loss
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxrl.api import Trainer, set_advantages
from jaxrl.config.loading import load_config_file, parse_overrides
from jaxrl.objectives.losses import PolicyLoss
from jaxrl.types import Group


def reinforce(logprobs: jax.Array, advantages: jax.Array, loss_mask: jax.Array) -> PolicyLoss:
    """Return the policy gradient loss without ratios or clipping."""
    is_positive = jnp.where(loss_mask & (advantages > 0), 1.0, 0.0)
    return PolicyLoss(
        jnp.where(loss_mask, -advantages * logprobs, 0.0), {"positive_share": is_positive}
    )


def compute_leave_one_out(groups: Sequence[Group]) -> list[float]:
    """Return each reward minus the mean reward of the others in its group."""
    advantages = []
    for group in groups:
        rewards = [t.reward for t in group.scored_trajectories]
        for trajectory in group.trajectories:
            others = (sum(rewards) - trajectory.reward) / max(len(rewards) - 1, 1)
            is_compared = trajectory.is_scored and len(rewards) > 1
            advantages.append(trajectory.reward - others if is_compared else 0.0)
    return advantages


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", required=True, help="FILE.py or FILE.py:ARGUMENT")
    parser.add_argument("--workdir", required=True)
    args, overrides = parser.parse_known_args(argv)
    config = load_config_file(args.config)
    config.update_from_flattened_dict(parse_overrides(overrides))
    with Trainer(config, args.workdir) as trainer:
        while not trainer.is_done:
            # Two rollouts, one optimizer step: memory holds the gradient, not both batches.
            for _ in range(2):
                groups = trainer.rollout(trainer.next_tasks())
                groups = set_advantages(groups, compute_leave_one_out(groups))
                trainer.accumulate_gradients(groups, loss=reinforce)
            metrics = trainer.apply_gradients()
            print(f"reward {metrics['reward']:.3f}, {metrics['actor/positive_share']:.0%} positive")
            trainer.finish_step()
        trainer.export(args.workdir)


if __name__ == "__main__":
    main()
