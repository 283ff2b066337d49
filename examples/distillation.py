"""On-policy distillation: a student samples, and a larger teacher scores every token.

    python -m examples.distillation --config=configs/quickstart.py --workdir=runs/student \
        --model=runs/student_sft/export --teacher=runs/quickstart/export

The advantage of a token is the teacher's log-probability minus the student's, so the policy
gradient is that of the reverse KL divergence from student to teacher, one token at a time. Both
models need the same tokenizer. Answers are not needed; rewards are only logged.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from jaxrl.api import Trainer, set_advantages
from jaxrl.config.loading import load_config_file, parse_overrides
from jaxrl.types import flatten_groups


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", required=True, help="FILE.py or FILE.py:ARGUMENT")
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--teacher", required=True, help="model folder of the teacher")
    parser.add_argument("--model", help="model folder of the student; default: the config's")
    args, overrides = parser.parse_known_args(argv)
    config = load_config_file(args.config)
    config.update_from_flattened_dict(parse_overrides(overrides))
    if args.model:
        config.model.path = args.model
    with Trainer(config, args.workdir) as trainer:
        teacher = trainer.load_scorer(args.teacher)
        while not trainer.is_done:
            groups = trainer.rollout(trainer.next_tasks())
            trajectories = flatten_groups(groups)
            advantages = [
                np.where(t.loss_mask, teacher_logprobs - t.rollout_logprobs, 0.0)
                for t, teacher_logprobs in zip(
                    trajectories, teacher.compute_logprobs(groups), strict=True
                )
            ]
            num_tokens = sum(t.num_sampled for t in trajectories)
            divergence = -sum(float(a.sum()) for a in advantages) / max(num_tokens, 1)
            metrics = trainer.update(set_advantages(groups, advantages))
            print(f"reverse KL {divergence:.4f} nats per token, reward {metrics['reward']:.3f}")
            trainer.finish_step()
        trainer.export(args.workdir)


if __name__ == "__main__":
    main()
