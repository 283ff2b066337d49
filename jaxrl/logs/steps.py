"""Metrics of a training step: timing, updates, and entropy by difficulty."""

from __future__ import annotations

import dataclasses
import math
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxrl.objectives.metrics import REDUCTIONS, Metric, mean_or_nan
from jaxrl.objectives.shaping import BUCKETS
from jaxrl.runtime import distributed
from jaxrl.sampling.interfaces import WAIT_REASONS, EngineCounts
from jaxrl.training.controllers import Controllers, compute_mean_divergences
from jaxrl.training.method import KLSettings
from jaxrl.training.packing import PackedBatch
from jaxrl.types import Group, Trajectory, flatten_groups

if TYPE_CHECKING:
    from jaxrl.sampling.engine import Engine

DISPLAYED_METRICS = {
    "reward": ("critic/rewards/mean",),
    "held-out": ("held_out",),
    "KL": ("actor/kl_measured", "actor/kl_loss", "actor/ppo_kl"),
    "entropy": ("actor/entropy",),
    "grad norm": ("actor/grad_norm",),
    "lr": ("actor/lr",),
    "tokens/s": ("perf/throughput",),
    "spent": ("perf/ledger/total/cost",),
}
"""Metrics that the display shows after a training step, by label. The first one present is shown.

`held_out` is the score of the last evaluation; see `logs.eval_summary.get_held_out_score`.
"""


@dataclass(kw_only=True)
class StepTimer:
    """Timer for the phases of a training step."""

    started: float = field(default_factory=time.perf_counter)
    sampling_s: float = 0.0
    updated_at: float = math.nan

    @contextmanager
    def time_sampling(self) -> Iterator[None]:
        """Add the block's duration to the sampling time."""
        start = time.perf_counter()
        yield
        self.sampling_s += time.perf_counter() - start

    def mark_updated(self) -> None:
        """Record the end of the update, after which the sampler has the new weights."""
        self.updated_at = time.perf_counter()

    def compute_metrics(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Return durations in seconds, and tokens per second."""
        step_s = self.updated_at - self.started
        return {
            "timing_s/gen": self.sampling_s,
            "timing_s/update_actor": step_s - self.sampling_s,
            "timing_s/step": step_s,
            "perf/throughput": sum(len(t.token_ids) for t in trajectories) / step_s,
        }


def compute_engine_metrics(engine: Engine, before: EngineCounts) -> dict[str, float]:
    """Summarize the work of all processes' samplers since the counters in `before`."""
    now, previous = dataclasses.asdict(engine.counts), dataclasses.asdict(before)
    deltas = {name: now[name] - previous[name] for name in now}
    cache_use = engine.peak_pages / engine.num_pages
    by_process = distributed.gather({**deltas, "cache_use": cache_use})
    totals = {name: sum(counts[name] for counts in by_process) for name in now}
    return {
        "rollout/row_occupancy": totals["sampled"] / max(totals["row_steps"], 1),
        "rollout/prefilled_prompt_tokens": totals["prefilled_prompt"],
        "rollout/prefilled_resume_tokens": totals["prefilled_resume"],
        "rollout/sampled_tokens": totals["sampled"],
        "rollout/preemptions": totals["preemptions"],
        "rollout/swapped_tokens": totals["swapped"],
        "rollout/cache_use": max(counts["cache_use"] for counts in by_process),
    }


def compute_wait_metrics(engine: Engine) -> dict[str, float]:
    """Return the seconds spent waiting for environments, by reason (maximum over processes)."""
    by_process = distributed.gather({name: engine.wait_s[name] for name in WAIT_REASONS})
    return {
        f"timing_s/wait_{name}": max(waits[name] for waits in by_process) for name in WAIT_REASONS
    }


def compute_lag_metrics(
    trajectories: Sequence[Trajectory], policy_version: int
) -> dict[str, float]:
    """Return the mean number of updates since the tokens were sampled."""
    versions = np.concatenate([t.policy_versions[t.loss_mask] for t in trajectories])
    return {"rollout/lag": mean_or_nan((policy_version - versions).tolist())}


def compute_memory_metrics() -> dict[str, float]:
    """Return this process's peak device memory in GiB (maximum over devices).

    On a CPU, this is the peak resident memory of the process, including programs and mapped files.
    """
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [
        device_stats["peak_bytes_in_use"]
        for device_stats in stats
        if "peak_bytes_in_use" in device_stats
    ]
    if not peaks and jax.default_backend() == "cpu":
        # Linux reports KiB, macOS bytes.
        unit = 1 if sys.platform == "darwin" else 1024
        peaks = [unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]
    return {"perf/max_memory_gib": max(peaks) / 2**30} if peaks else {}


def merge_update_metrics(update_metrics: Sequence[Mapping[str, Metric]]) -> dict[str, float]:
    """Merge the metrics of a step's updates, using the reduction of each metric.

    Returns {} if there were no updates. NaN values of individual updates are ignored.
    """
    if not update_metrics:
        return {}
    merged = {}
    for name, metric in update_metrics[0].items():
        values = [float(metrics[name].value) for metrics in update_metrics]
        values = [value for value in values if not math.isnan(value)] or [math.nan]
        reduced = float(REDUCTIONS[metric.reduction].merge(values))
        merged[name if "/" in name else f"actor/{name}"] = reduced
    if "rollout_corr/weight_mean" in merged:
        square = merged["rollout_corr/weight_square_mean"]
        merged["rollout_corr/effective_sample_share"] = (
            merged["rollout_corr/weight_mean"] ** 2 / square if square else math.nan
        )
    return merged


def compute_packing_metrics(minibatches: Sequence[PackedBatch]) -> dict[str, float]:
    """Compute the padding, load imbalance, and fraction of tokens saved by shared prompts.

    Trajectories without a gradient count too; empty mini-batches do not.
    """
    batches = [*minibatches, *(packed.rest for packed in minibatches if packed.rest is not None)]
    num_tokens = max(sum(packed.num_tokens for packed in batches), 1)
    num_shared = sum(packed.num_shared for packed in batches)
    num_slots = sum(packed.num_micro * packed.batch.token_ids[0].size for packed in batches)
    imbalance = sum(packed.num_tokens * packed.imbalance for packed in batches)
    return {
        "rollout/shared_tokens": num_shared / num_tokens,
        "rollout/padding": 1 - (num_tokens - num_shared) / num_slots if num_slots else 0.0,
        "rollout/imbalance": imbalance / num_tokens,
    }


def compute_kl_metrics(
    groups: Sequence[Group], controllers: Controllers, kl: KLSettings
) -> dict[str, float]:
    """Return the KL coefficient and the measured KL divergence, in nats per token."""
    return {
        "actor/kl_coef": controllers.get_kl_coef(kl),
        "actor/kl_measured": mean_or_nan([value for _, value in compute_mean_divergences(groups)]),
    }


def compute_entropy_window_metrics(
    groups: Sequence[Group], controllers: Controllers
) -> dict[str, float]:
    """Compute high-entropy token counts and response lengths, overall and by difficulty.

    Includes only the metrics of the controllers in use.
    """
    metrics: dict[str, float] = {}
    scored = [t for t in flatten_groups(groups) if t.is_scored]
    if controllers.threshold is not None:
        metrics["entropy/high_window_tokens"] = mean_or_nan(_count_window_tokens(scored))
    if controllers.coefficients is not None:
        # Fraction of mixed groups in which a wrong answer has at least the reward of a correct one.
        inverted = []
        for group in groups:
            right = [t.reward for t in group.scored_trajectories if t.is_correct]
            wrong = [t.reward for t in group.scored_trajectories if not t.is_correct]
            if right and wrong:
                inverted.append(max(wrong) >= min(right))
        metrics["entropy/inversions"] = mean_or_nan(inverted)
    if controllers.buckets is None:
        return metrics
    for name in BUCKETS:
        in_bucket = [t for t in scored if controllers.get_bucket(t.task_id) == name]
        metrics[f"difficulty/{name}/share"] = len(in_bucket) / max(len(scored), 1)
        metrics[f"difficulty/{name}/response_length"] = mean_or_nan(
            [t.num_sampled for t in in_bucket]
        )
        if controllers.threshold is not None:
            metrics[f"difficulty/{name}/high_window_tokens"] = mean_or_nan(
                _count_window_tokens(in_bucket)
            )
    return metrics


def _count_window_tokens(trajectories: Sequence[Trajectory]) -> list[int]:
    return [t.windows.num_high_entropy_windows for t in trajectories if t.windows is not None]


def collect_sample_fields(
    groups: Sequence[Group], controllers: Controllers
) -> list[dict[str, Any]]:
    """Return each trajectory's additional fields for the step's trajectory file."""
    fields: list[dict[str, Any]] = []
    for group_id, group in enumerate(groups):
        for trajectory in group.trajectories:
            sample: dict[str, Any] = {
                "group_id": group_id,
                "uid": trajectory.task_id,
                "global_id": f"{trajectory.task_id}/{trajectory.sample_index}",
                "ground_truth": list(trajectory.task.answers),
                "accuracy": float(trajectory.is_correct) if trajectory.is_scored else None,
            }
            if (windows := trajectory.windows) is not None:
                has_level = not np.isnan(windows.percentile)
                sample["high_entropy_token_num"] = windows.num_high_entropy_windows
                sample["entropy_percentile_thresholds"] = windows.percentile if has_level else None
                sample["high_entropy_threshold"] = controllers.entropy_threshold
            if controllers.buckets is not None:
                sample["difficulty"] = controllers.get_bucket(trajectory.task_id)
            if controllers.coefficients is not None:
                name = sample["difficulty"]
                targets, alphas = controllers.coefficients.targets, controllers.coefficients.alphas
                sample["target_high_entropy_token_num"] = targets.get(name)
                sample["alpha_entropy"] = alphas[name]
            fields.append(sample)
    return fields
