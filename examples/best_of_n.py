"""Best-of-n distillation: sample, select each question's best answer, and imitate it.

    python -m examples.best_of_n --config=configs/quickstart.py --workdir=runs/best_of_n \
        --model=runs/quickstart/export

The update skips questions without a correct answer.
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


def supervised_loss(logprobs: jax.Array, loss_mask: jax.Array) -> PolicyLoss:
    """Return the cross-entropy of the sampled tokens."""
    return PolicyLoss(jnp.where(loss_mask, -logprobs, 0.0), {})


def select_best(groups: Sequence[Group]) -> list[Group]:
    """Return the shortest correct answer of each question as a group; skip unsolved questions."""
    best = []
    for group in groups:
        correct = [t for t in group.scored_trajectories if t.is_correct]
        if correct:
            best.append(Group(trajectories=(min(correct, key=lambda t: t.response_length),)))
    return best


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", required=True, help="FILE.py or FILE.py:ARGUMENT")
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--model", help="model folder; default: that of the configuration")
    args, overrides = parser.parse_known_args(argv)
    config = load_config_file(args.config)
    config.update_from_flattened_dict(parse_overrides(overrides))
    if args.model:
        config.model.path = args.model
    with Trainer(config, args.workdir) as trainer:
        while not trainer.is_done:
            groups = trainer.rollout(trainer.next_tasks())
            best = select_best(groups)
            if not best:
                continue  # the next call takes other tasks
            metrics = trainer.update(set_advantages(best, [1.0] * len(best)), loss=supervised_loss)
            print(f"{len(best)} of {len(groups)} questions, loss {metrics['loss']:.4f}")
            trainer.finish_step()
        trainer.export(args.workdir)


if __name__ == "__main__":
    main()
