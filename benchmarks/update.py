r"""Training speed: one optimizer step over a packed batch, through the trainer's own update.

    python -m benchmarks.update --preset=cpu|qwen3-0.6b|qwen3-4b [--num_layers=... --width=...]

The loss is the default configuration's policy loss, the optimizer its AdamW. The first
repetitions compile and are not counted. For figures that can be compared between machines, one
thread on a core that has nothing else to do:

    JAX_PLATFORMS=cpu XLA_FLAGS=--xla_cpu_multi_thread_eigen=false taskset -c 0 \
      python -m benchmarks.update --repetitions=15

The `floor` figure is the rate at which the device's arithmetic could do what forward and backward
need, nothing recomputed (see `common.train_flops_per_token`). Tokens are those of prompts and
samples; padding counts for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import common
from jaxrl.config import default_config
from jaxrl.demonstrations import Demonstration
from jaxrl.models.policy import Model
from jaxrl.objectives.aggregation import token_mean, token_weights
from jaxrl.training.optimizer import make_optimizer
from jaxrl.training.packing import BatchShape, Packed, pack
from jaxrl.training.policy_loss import make_policy_loss
from jaxrl.training.update import UpdateStep, init_state, put_batch


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is trained on; every field is a flag."""

    num_sequences: int
    prompt_tokens: int
    new_tokens: int  # of each sequence; those that count in the loss
    row_tokens: int  # length of a packed row
    micro_rows: int  # rows of a micro-batch
    logits_chunk_tokens: int  # tokens whose logits are in memory at a time
    remat: str  # what of a layer the backward pass computes again
    scan_layers: bool  # compile one layer for all


WORK = {
    "cpu": Work(
        num_sequences=32, prompt_tokens=64, new_tokens=128, row_tokens=192, micro_rows=2,
        logits_chunk_tokens=2048, remat="none", scan_layers=False,
    ),
    "qwen3-0.6b": Work(
        num_sequences=128, prompt_tokens=512, new_tokens=1024, row_tokens=3072, micro_rows=4,
        logits_chunk_tokens=2048, remat="names", scan_layers=True,
    ),
    "qwen3-4b": Work(
        num_sequences=64, prompt_tokens=512, new_tokens=1024, row_tokens=3072, micro_rows=2,
        logits_chunk_tokens=2048, remat="names", scan_layers=True,
    ),
}  # fmt: skip


def make_batch(model: common.ModelSizes, work: Work) -> Packed:
    """Random sequences of one length, packed; the advantages are of both signs."""
    rng = np.random.default_rng(0)
    length = work.prompt_tokens + work.new_tokens
    is_sampled = np.arange(length) >= work.prompt_tokens
    sequences = [
        Demonstration(
            token_ids=rng.integers(model.vocab_size, size=length, dtype=np.int32),
            loss_mask=is_sampled,
            rollout_logprobs=np.where(is_sampled, -np.log(model.vocab_size), 0).astype(np.float32),
        )
        for _ in range(work.num_sequences)
    ]
    shape = BatchShape.for_sequences(
        work.num_sequences, micro_rows=work.micro_rows, row_tokens=work.row_tokens
    )
    advantages = rng.normal(size=work.num_sequences).astype(np.float32)
    weights = token_weights([one.loss_mask for one in sequences], token_mean)
    return pack(sequences, advantages, shape, token_fields={"token_weights": weights})


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs the benchmark; the record that it writes."""
    flags, model, work, hardware = common.read_flags(__doc__ or "", WORK, argv)
    mesh, config = common.one_device(), default_config()
    policy = Model(
        model.config,
        mesh,
        num_tokens=model.vocab_size,
        dtype=jnp.dtype(model.dtype),
        remat=work.remat,
        scan_layers=work.scan_layers,
        logits_chunk_tokens=work.logits_chunk_tokens,
    )
    optimizer = make_optimizer(config.optimizer, flags.warm_up + flags.repetitions)
    update = UpdateStep(policy, make_policy_loss(config), optimizer)
    state = init_state(common.random_params(model), mesh, model.config, optimizer)
    packed = make_batch(model, work)
    batch = put_batch(mesh, packed.batch)

    def run(_: int) -> None:
        nonlocal state
        state, metrics = update(state, batch, packed)
        jax.block_until_ready((state, metrics))

    timing = common.repeat(run, warm_up=flags.warm_up, repetitions=flags.repetitions)
    assert int(state.num_skipped) == 0, "a gradient was not finite"
    context = work.prompt_tokens + work.new_tokens
    flops = packed.num_tokens * common.train_flops_per_token(model, context)
    figures = {
        **timing.figures(packed.num_tokens),
        "floor_tokens_per_s": common.train_floor_tokens_per_s(model, hardware, context=context),
        "ms_per_update": common.spread([1e3 * seconds for seconds in timing.seconds]),
        "flops_per_s": common.spread([flops / seconds for seconds in timing.seconds]),
        "padding": packed.padding,
    }
    return common.finish("update", flags, model, work, hardware, figures)


if __name__ == "__main__":
    main()
