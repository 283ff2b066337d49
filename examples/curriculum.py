"""Curriculum by solve rate: prefer questions that the policy solves about half of the time.

    python -m examples.curriculum --config=configs/quickstart.py --workdir=runs/curriculum \
        --model=runs/quickstart_sft/export

Each question has a moving average of its solve rate p. Questions are drawn with a probability
proportional to p * (1 - p), the variance of the reward; unseen questions have p = 0.5.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from jaxrl.api import Trainer
from jaxrl.config.loading import load_config_file, parse_overrides

DECAY = 0.5
FLOOR = 0.02  # so that always and never solved questions are still drawn


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
        index_by_id = {task.id: index for index, task in enumerate(trainer.tasks)}
        solve_rates = np.full(len(index_by_id), 0.5)
        while not trainer.is_done:
            weights = solve_rates * (1 - solve_rates) + FLOOR
            generator = np.random.default_rng((config.seed, trainer.num_steps_done))
            chosen = generator.choice(
                len(weights),
                size=min(config.rollout.tasks_per_step, len(weights)),
                replace=False,
                p=weights / weights.sum(),
            )
            groups = trainer.rollout([trainer.tasks[int(index)] for index in chosen])
            for group in groups:
                if scored := group.scored_trajectories:
                    index, rate = index_by_id[group.task_id], group.num_correct / len(scored)
                    solve_rates[index] = DECAY * solve_rates[index] + (1 - DECAY) * rate
            metrics = trainer.update(trainer.compute_advantages(groups))
            print(f"reward {metrics['reward']:.3f}, mean solve rate {solve_rates.mean():.3f}")
            trainer.finish_step()
        trainer.export(args.workdir)


if __name__ == "__main__":
    main()
