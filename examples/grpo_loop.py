"""Group-relative policy optimization, step by step.

    python -m examples.quickstart_world --out=data/debug --num_people=40 --num_held_out=8 \
        --num_demonstrations=400
    python -m examples.grpo_loop --config=configs/debug_tiny.py --workdir=runs/loop

With the same seed, the metrics and weights equal those of `jaxrl train` with `stages=("train",)`.
To train with several processes, start the script in each one with `--coordinator`,
`--num_processes` and `--process_id`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from jaxrl.api import Trainer
from jaxrl.config.loading import load_config_file, parse_overrides


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", required=True, help="FILE.py or FILE.py:ARGUMENT")
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--coordinator", help="host:port of process 0")
    parser.add_argument("--num_processes", type=int)
    parser.add_argument("--process_id", type=int)
    args, overrides = parser.parse_known_args(argv)
    config = load_config_file(args.config)
    config.update_from_flattened_dict(parse_overrides(overrides))
    job = {name: getattr(args, name) for name in ("coordinator", "num_processes", "process_id")}
    with Trainer(config, args.workdir, **job) as trainer:
        while not trainer.is_done:
            groups = trainer.rollout(trainer.next_tasks())
            groups = trainer.compute_advantages(groups)
            metrics = trainer.update(groups)
            print(f"reward {metrics['reward']:.3f}, loss {metrics['loss']:.4f}")
            trainer.finish_step()  # evaluate, log and save when due
        trainer.export(args.workdir)


if __name__ == "__main__":
    main()
