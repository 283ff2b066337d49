"""Per-token numbers of an update for the trajectory files (`log.tokens`)."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from jaxrl.runtime.sharding import replicated
from jaxrl.training.controllers import Controllers
from jaxrl.training.interfaces import Notes, TakeNotes
from jaxrl.training.method import Method, has_kl_loss
from jaxrl.training.minibatches import split_minibatches, token_kl_weights
from jaxrl.training.packing import BatchShape, Packed
from jaxrl.training.reference_kl import by_token
from jaxrl.training.update import ScoreStep
from jaxrl.types import Batch, Group, Params, Trajectory, members


def make_notes(count: int, score: ScoreStep, shape: BatchShape, method: Method) -> TakeNotes:
    """Return `take_notes(groups, controllers, params, ref_params)`, called before a step's updates.

    The groups must have advantages. It returns `end`. After the updates, `end(params)` returns
    per-token arrays of each trajectory: by name float32 [L], 0 outside the loss mask; {} for a
    trajectory without a loss. Logprobs before and after the update are computed by the same
    program in the same rows, so they differ by the parameters alone.

    Args:
        count: Number of trajectories per step to score; -1 for all.
        score: Function that computes logprobs.
        shape: Shape of a mini-batch.
        method: Training method.
    """
    gather = jax.jit(lambda values: values, out_shardings=replicated(score.model.mesh))

    def take_notes(
        groups: Sequence[Group], controllers: Controllers, params: Params, ref_params: Params | None
    ) -> Notes:
        # Weights and advantages, as the loss of each mini-batch uses them.
        notes: list[dict[str, np.ndarray]] = [{} for _ in members(groups)]
        trained: dict[int, Trajectory] = {}
        for kept, fields in split_minibatches(groups, controllers, method):
            some = [*kept.values()]
            known = {
                "token_weights": fields["token_weights"],
                "token_advantages": [t.token_advantages for t in some],
            }
            if has_kl_loss(method.kl):
                known["kl_weights"] = token_kl_weights(some, controllers, method.kl)
            for place, (index, trajectory) in enumerate(kept.items()):
                if count < 0 or index < count:
                    trained[index], mask = trajectory, trajectory.loss_mask
                    notes[index] = {n: np.where(mask, x[place], 0.0) for n, x in known.items()}

        def add(name: str, policy: Params, *, is_reference: bool = False) -> None:
            def score_batch(batch: Batch, packed: Packed) -> list[jax.Array]:
                if is_reference:  # the reference routes experts itself, ignoring recorded routes
                    batch = score.model.without_recorded(batch)
                return [gather(score(policy, batch, packed))]

            scores = by_token([*trained.values()], score.model.mesh, shape, score_batch)
            for index, (logprobs,) in zip(trained, scores, strict=True):
                notes[index][name] = logprobs

        def end(params: Params) -> list[dict[str, np.ndarray]]:
            add("new_logprobs", params)
            return notes

        add("old_logprobs", params)
        if ref_params is not None:
            add("ref_logprobs", ref_params, is_reference=True)
        return end

    return take_notes
