"""Checkpoints: everything a restart needs, through Orbax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxrl.types import Params, TrainState


class Checkpointer:
    """Saves and restores `TrainState`, frozen reference parameters and the run's position.

    The position is a small JSON object: stage, steps done, items taken from the stream, records
    in `metrics.jsonl`. It is read first, since it tells which optimizer's state to expect.
    """

    def __init__(self, folder: Path, *, keep: int):
        """Opens a folder of checkpoints, of which the newest `keep` stay."""
        options = ocp.CheckpointManagerOptions(
            preservation_policy=ocp.checkpoint_managers.LatestN(n=keep),
            cleanup_tmp_directories=True,
            enable_async_checkpointing=False,
        )
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def save(
        self, step: int, state: TrainState, position: dict[str, Any], ref_params: Params | None
    ) -> None:
        """Saves the state after global step `step`, unless that was done already."""
        items = {
            "params": ocp.args.StandardSave(state.params),
            "optimizer": ocp.args.StandardSave(_optimizer_items(state)),
            "position": ocp.args.JsonSave(position),
        }
        if ref_params is not None:
            items["ref_params"] = ocp.args.StandardSave(ref_params)
        self._manager.save(step, args=ocp.args.Composite(**items), force=True)
        self._manager.wait_until_finished()

    def latest_position(self) -> dict[str, Any] | None:
        """Where the newest checkpoint stands; None when there is none."""
        step = self._manager.latest_step()
        if step is None:
            return None
        restored = self._manager.restore(
            step, args=ocp.args.Composite(position=ocp.args.JsonRestore())
        )
        return dict(restored["position"])

    def restore(self, state: TrainState) -> TrainState:
        """The newest state, in the shapes and shardings of the given abstract one."""
        restored = self._restore(
            params=ocp.args.StandardRestore(state.params),
            optimizer=ocp.args.StandardRestore(_optimizer_items(state)),
        )
        return TrainState(params=restored["params"], **restored["optimizer"])

    def restore_params(self, params: Params) -> Params:
        """Only the parameters of the newest state."""
        return self._restore(params=ocp.args.StandardRestore(params))["params"]

    def restore_ref_params(self, params: Params) -> Params:
        """The newest checkpoint's frozen reference parameters."""
        return self._restore(ref_params=ocp.args.StandardRestore(params))["ref_params"]

    def _restore(self, **items: Any) -> Any:
        return self._manager.restore(self._manager.latest_step(), args=ocp.args.Composite(**items))

    def close(self) -> None:
        """Waits for what is under way."""
        self._manager.close()


def _optimizer_items(state: TrainState) -> dict[str, Any]:
    return {
        "opt_state": state.opt_state,
        "num_updates": state.num_updates,
        "num_skipped": state.num_skipped,
    }


def abstract(tree: Any, shardings: Any) -> Any:
    """Shapes, dtypes and shardings to restore into."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
        shardings,
    )
