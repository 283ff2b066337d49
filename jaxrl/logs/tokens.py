"""Per-token arrays of an update for the trajectory files (`log.tokens`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxrl.runtime.sharding import make_replicated_sharding
from jaxrl.training.controllers import Controllers
from jaxrl.training.method import Method, has_kl_loss
from jaxrl.training.minibatches import (
    compute_token_kl_weights,
    divide_into_minibatches,
    select_trained_tokens,
)
from jaxrl.training.packing import BatchShape, PackedBatch
from jaxrl.training.reference_kl import map_packed
from jaxrl.training.update import ScoreStep
from jaxrl.types import Batch, Group, Params, Trajectory, flatten_groups

FinishTokenLog = Callable[[Params], list[dict[str, np.ndarray]]]
TokenLogger = Callable[..., FinishTokenLog]
"""See `make_token_logger`."""


def make_token_logger(
    num_trajectories: int, score: ScoreStep, shape: BatchShape, method: Method
) -> TokenLogger:
    """Return `token_logger(groups, controllers, params, ref_params)`.

    Call `token_logger` before the updates, with groups that have advantages. It returns a function
    `finish`. After the updates, `finish(params)` returns each trajectory's per-token arrays by
    name, float32 [L], 0 outside the loss mask; {} for a trajectory excluded from the loss. The same
    program computes the logprobs before and after the update in the same rows, so only the
    parameters differ.

    Args:
        num_trajectories: Number of trajectories per step to score; -1 for all.
        score: Function that computes logprobs.
        shape: Shape of a mini-batch.
        method: Training method.
    """
    # Logging neither adds sizes nor changes those that updates use.
    shape = dataclasses.replace(shape, sizes=None)
    gather = jax.jit(
        lambda values: values, out_shardings=make_replicated_sharding(score.model.mesh)
    )

    def token_logger(
        groups: Sequence[Group], controllers: Controllers, params: Params, ref_params: Params | None
    ) -> FinishTokenLog:
        # Weights and advantages, as the loss of each mini-batch uses them.
        token_arrays: list[dict[str, np.ndarray]] = [{} for _ in flatten_groups(groups)]
        trained: dict[int, Trajectory] = {}
        offset = 0  # index of the mini-batch's first trajectory
        for part in divide_into_minibatches(groups, method.optimizer.num_minibatches):
            minibatch, fields = select_trained_tokens(part, controllers, method)
            trajectories = [*minibatch.values()]
            arrays = {
                "token_weights": fields["token_weights"],
                "token_advantages": [t.token_advantages for t in trajectories],
            }
            if has_kl_loss(method.kl):
                arrays["kl_weights"] = compute_token_kl_weights(
                    trajectories, controllers, method.kl
                )
            for row, (index_in_part, trajectory) in enumerate(minibatch.items()):
                index = offset + index_in_part
                if num_trajectories < 0 or index < num_trajectories:
                    trained[index], mask = trajectory, trajectory.loss_mask
                    token_arrays[index] = {
                        n: np.where(mask, x[row], 0.0) for n, x in arrays.items()
                    }
            offset += len(flatten_groups(part))

        def add_logprobs(name: str, policy: Params, *, is_reference: bool = False) -> None:
            def score_batch(batch: Batch, packed: PackedBatch) -> list[jax.Array]:
                if is_reference:  # the reference routes experts itself, ignoring recorded routes
                    batch = score.model.without_recorded_arrays(batch)
                return [gather(score(policy, batch, packed))]

            scores = map_packed([*trained.values()], score.model.mesh, shape, score_batch)
            for index, (logprobs,) in zip(trained, scores, strict=True):
                token_arrays[index][name] = logprobs

        def finish(params: Params) -> list[dict[str, np.ndarray]]:
            add_logprobs("new_logprobs", params)
            return token_arrays

        add_logprobs("old_logprobs", params)
        if ref_params is not None:
            add_logprobs("ref_logprobs", ref_params, is_reference=True)
        return finish

    return token_logger
