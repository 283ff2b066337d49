r"""Measure training speed: one optimizer step on a packed batch, with the trainer's code.

    python -m benchmarks.update --preset=cpu|h200 [--model=qwen3-4b] [--vocab_size=151936]
        [--spread=0 --row_tokens=... --num_layers=...]
    python -m benchmarks.update --draws=1000

The sequences of a group share a prompt. Lengths follow a log-normal distribution; with `--spread=0`
they are equal. Policy loss and optimizer (AdamW) are those of the default configuration. The first
repetitions compile and are not counted. For figures that are comparable between machines, use one
thread on an otherwise idle core:

    JAX_PLATFORMS=cpu XLA_FLAGS=--xla_cpu_multi_thread_eigen=false taskset -c 0 \
      python -m benchmarks.update --repetitions=15

The `floor` figure is the rate at which the device could do the arithmetic of the forward and
backward pass without recomputation (see `common.count_train_flops_per_token`), and `mfu` is the
fraction of the data sheet's FLOP/s that this arithmetic reaches. `mfu_computed` counts only the
FLOPs actually computed: the output layer for trained tokens, and the layers of a shared prompt once
per row. Token counts include prompts and samples, shared or not, but no padding.

With `--draws`, only mini-batches are packed: for equal, log-normal and long-tailed lengths, it
reports the padding with rows of maximum and of fitted length, and how many sizes of micro-batches
would be compiled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchmarks import common
from jaxrl.builders.method import build_method
from jaxrl.builders.resolved import resolve_names
from jaxrl.config import default_config
from jaxrl.models.policy import Model
from jaxrl.objectives.aggregation import token_mean, token_weights
from jaxrl.runtime.sharding import count_batch_shards
from jaxrl.sampling.demonstrations import Demonstration
from jaxrl.training.optimizer import make_optimizer
from jaxrl.training.packing import (
    BatchShape,
    PackedBatch,
    SequenceSize,
    fit_rows,
    omit_shared_prompts,
    pack_sequences,
)
from jaxrl.training.policy_loss import make_policy_loss
from jaxrl.training.update import UpdateStep, init_state, shard_batch
from jaxrl.types import TrainState


@dataclass(frozen=True, kw_only=True)
class Work:
    """Sizes of the batch and of the update; every field is a flag."""

    num_groups: int
    group_size: int  # sequences that share a prompt
    prompt_tokens: int
    new_tokens: int  # median number of trained tokens in a sequence
    spread: float  # standard deviation of the logarithm of that number
    row_tokens: int  # maximum length of a sequence
    micro_rows: int  # rows per micro-batch
    logits_chunk_tokens: int  # tokens with logits in memory at a time
    remat: str  # what the backward pass recomputes in a layer
    scan_layers: bool  # compile one layer and scan over layers
    shares_prompts: bool  # True if a row stores a shared prompt once
    draws: int = 0  # mini-batches to pack in a simulation; 0 to measure updates


WORK = {
    "cpu": Work(
        num_groups=8, group_size=4, prompt_tokens=64, new_tokens=96, spread=0.6, row_tokens=384,
        micro_rows=2, logits_chunk_tokens=2048, remat="none", scan_layers=False,
        shares_prompts=True,
    ),
    "h200": Work(
        num_groups=8, group_size=8, prompt_tokens=512, new_tokens=1024, spread=0.6,
        row_tokens=4096, micro_rows=2, logits_chunk_tokens=2048, remat="names", scan_layers=True,
        shares_prompts=True,
    ),
}  # fmt: skip


SPREADS = {"equal": 0.0, "log-normal": 0.6, "long-tailed": 1.2}
"""Standard deviations of the logarithm of lengths in the simulation."""


def draw_lengths(rng: np.random.Generator, work: Work) -> np.ndarray:
    """Draw the number of tokens of each sequence."""
    count, longest = work.num_groups * work.group_size, work.row_tokens - work.prompt_tokens
    sampled_lengths = rng.lognormal(np.log(work.new_tokens), work.spread, count).round()
    return work.prompt_tokens + np.clip(sampled_lengths.astype(int), 1, longest)


def simulate_padding(work: Work, num_shards: int = 1) -> dict[str, float]:
    """Return the mean padding over `work.draws` mini-batches of a run.

    Equal lengths differ between mini-batches, and each mini-batch is the first of a run.
    """
    rng, longest = np.random.default_rng(0), work.row_tokens - work.prompt_tokens
    num_sequences = work.num_groups * work.group_size
    num_shared = (work.prompt_tokens - 1) * work.shares_prompts

    def make_shape() -> BatchShape:
        return BatchShape.for_sequences(
            num_sequences,
            micro_rows=work.micro_rows,
            row_tokens=work.row_tokens,
            num_prompt_shards=num_shards * work.shares_prompts,
        )

    shape, paddings, counts = make_shape(), [], []
    for _ in range(work.draws):
        if not work.spread:
            shape = make_shape()
            work = dataclasses.replace(work, new_tokens=int(rng.integers(longest // 8, longest)))
        items = [
            SequenceSize(length=length, prompt=index // work.group_size, num_shared=num_shared)
            for index, length in enumerate(draw_lengths(rng, work).tolist())
        ]
        for variant in (dataclasses.replace(shape, sizes=None), shape):
            fitted, rows = fit_rows(items, variant, num_shards)
            num_micro = -(-len(rows) // fitted.micro_rows)
            num_computed = sum(
                items[index].length - num_omitted
                for row in rows
                for index, num_omitted in omit_shared_prompts(items, row)
            )
            num_slots = num_micro * fitted.micro_rows * fitted.row_tokens
            paddings.append(1 - num_computed / num_slots)
        counts.append(len(shape.sizes.sizes) if shape.sizes else 1)
    return {
        "longest": float(np.mean(paddings[::2])),
        "fitted": float(np.mean(paddings[1::2])),
        "fitted_p95": float(np.quantile(paddings[1::2], 0.95)),
        "sizes": max(counts),
    }


def make_sequences(model: common.ModelSizes, work: Work) -> list[Demonstration]:
    """Generate random sequences, in consecutive groups that share a prompt."""
    rng = np.random.default_rng(0)
    lengths = draw_lengths(rng, work)
    prompts = rng.integers(model.vocab_size, size=(work.num_groups, work.prompt_tokens))
    sequences = []
    for index, length in enumerate(lengths):
        token_ids = rng.integers(model.vocab_size, size=length, dtype=np.int32)
        token_ids[: work.prompt_tokens] = prompts[index // work.group_size]
        is_sampled = np.arange(length) >= work.prompt_tokens
        logprobs = np.where(is_sampled, -np.log(model.vocab_size), 0).astype(np.float32)
        item = Demonstration(token_ids=token_ids, loss_mask=is_sampled, rollout_logprobs=logprobs)
        sequences.append(item)
    return sequences


def make_batch(sequences: Sequence[Demonstration], work: Work, num_shards: int = 1) -> PackedBatch:
    """Pack the sequences, with random advantages of both signs."""
    shape = BatchShape.for_sequences(
        len(sequences),
        micro_rows=work.micro_rows,
        row_tokens=work.row_tokens,
        num_prompt_shards=num_shards if work.shares_prompts else 0,
    )
    advantages = np.random.default_rng(1).normal(size=len(sequences)).astype(np.float32)
    weights = token_weights([item.loss_mask for item in sequences], token_mean)
    return pack_sequences(
        sequences,
        advantages,
        shape,
        token_fields={"token_weights": weights},
        num_shards=num_shards,
    )


def make_model(model: common.ModelSizes, work: Any, mesh: Mesh) -> Model:
    """Build the policy for an update, with the platform's kernels."""
    return Model(
        model.architecture,
        mesh,
        num_tokens=model.vocab_size,
        dtype=jnp.dtype(model.dtype),
        attention=common.select_default_kernels(model, mesh),
        remat=work.remat,
        scan_layers=work.scan_layers,
        logits_chunk_tokens=work.logits_chunk_tokens,
    )


def start(
    model: common.ModelSizes, work: Work, mesh: Mesh, num_updates: int
) -> tuple[PackedBatch, TrainState, Callable[[TrainState], TrainState]]:
    """Return the batch, the initial state, and a function that runs an update and waits for it."""
    config, policy = default_config(), make_model(model, work, mesh)
    config.num_steps = num_updates
    method = build_method(resolve_names(config, needs_data=False))
    optimizer = make_optimizer(method.optimizer)
    update = UpdateStep(policy, make_policy_loss(method), optimizer)
    state = init_state(common.init_random_params(model, mesh), mesh, model.architecture, optimizer)
    packed = make_batch(make_sequences(model, work), work, count_batch_shards(mesh))
    batch = shard_batch(mesh, packed.batch)

    def run(state: TrainState) -> TrainState:
        state, metrics = update(state, batch, packed)
        jax.block_until_ready((state, metrics))
        return state

    return packed, state, run


def count_flops(
    model: common.ModelSizes, sequences: Sequence[Demonstration], num_shared: int
) -> tuple[float, float]:
    """Return the FLOPs of an update for complete sequences, and those actually computed.

    The latter exclude the output layer for tokens without loss, and the layers, except attention,
    for `num_shared` tokens of shared prompts.
    """
    lengths = [len(item.token_ids) for item in sequences]
    total_flops = sum(n * common.count_train_flops_per_token(model, n) for n in lengths)
    without_loss = sum(lengths) - sum(int(item.loss_mask.sum()) for item in sequences)
    head = model.vocab_size * model.width
    return total_flops, total_flops - 6.0 * (
        without_loss * head + num_shared * (model.product_params - head)
    )


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; return its record."""
    flags, model, work, hardware = common.parse_flags(__doc__ or "", WORK, argv)
    if work.draws:
        cases = {}
        for name, spread in SPREADS.items():
            for count in (8, 32, 128, 512):
                groups = {"num_groups": count // work.group_size, "spread": spread}
                case = dataclasses.replace(work, **groups)
                cases[f"{name}, {count} sequences"] = simulate_padding(case)
        return common.report_figures("padding", flags, model, work, hardware, cases)
    num_updates = flags.warm_up + flags.repetitions
    packed, state, update = start(model, work, common.make_single_device_mesh(), num_updates)

    def run(_: int) -> None:
        nonlocal state
        state = update(state)

    timing = common.repeat(run, warm_up=flags.warm_up, repetitions=flags.repetitions)
    assert int(state.num_skipped) == 0, "a gradient was not finite"
    needed, computed = count_flops(model, make_sequences(model, work), packed.num_shared)
    seconds = common.summarize(timing.seconds)
    flops = hardware.flops
    figures = {
        **timing.figures(packed.num_tokens),
        "floor_tokens_per_s": flops * packed.num_tokens / needed if flops else None,
        "ms_per_update": {name: 1e3 * value for name, value in seconds.items()},
        "flops_per_s": common.summarize([needed / item for item in timing.seconds]),
        "mfu": common.compute_mfu(needed, seconds["median"], hardware),
        "mfu_computed": common.compute_mfu(computed, seconds["median"], hardware),
        "attention": common.select_default_kernels(model, common.make_single_device_mesh()).name,
        "padding": packed.padding,
        "shared_tokens": packed.num_shared / packed.num_tokens,
    }
    return common.report_figures("update", flags, model, work, hardware, figures)


if __name__ == "__main__":
    main()
