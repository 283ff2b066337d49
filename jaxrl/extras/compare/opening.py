"""A run, a step of it and a second configuration made into two objectives on one batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from jaxrl.components import make_model, make_stages, model_and_tokenizer, trigger_ids
from jaxrl.config import flatten
from jaxrl.config_checks import validate
from jaxrl.envs.json_text import read_object
from jaxrl.extras.compare.objective import Objective
from jaxrl.extras.compare.records import read_groups
from jaxrl.installed import name_installed
from jaxrl.method import method_of, policy_of
from jaxrl.models.around import Around
from jaxrl.models.folder import model_folder
from jaxrl.models.policy import Model
from jaxrl.models.starting import load_base
from jaxrl.opening import fit_mesh, leave_out_scores, read_config
from jaxrl.runtime.checkpoint import optimizer_items, restore_items, steps_in
from jaxrl.runtime.program_cache import keep_programs
from jaxrl.runtime.sharding import abstract, make_mesh, param_shardings
from jaxrl.session import Progress
from jaxrl.training.controllers import Controllers
from jaxrl.training.update import init_state, state_shardings
from jaxrl.types import Group, Params, TrainState
from jaxrl.values import load_values

SECTIONS = ("advantage.", "loss.", "kl.")
KEYS = ("filter.trajectories", "optimizer.num_minibatches", "model.balance_coef")
"""Sections an objective is made of; all else was decided before the batch was recorded."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Two objectives, the batch, and the weights at which they are compared.

    Attributes:
        checkpoint: the step whose weights these are.
        groups: as they were recorded.
        changed: by key, what the run has and what the other objective has.
        objectives: the run's own, and the other.
        params: of the checkpoint.
        ref_params: the reference; None where no objective has one.
        start_state: makes the run's optimizer around `params`, which are donated where it begins.
        step: steps of all stages before the one that recorded the batch.
        stage_step: likewise, of the stage.
        lr_scale: factor of the learning rate that a watch has left; 1 without one.
        notes: what a reader must know.
    """

    checkpoint: int
    groups: list[Group]
    changed: dict[str, tuple[Any, Any]]
    objectives: tuple[Objective, Objective]
    params: Params
    ref_params: Params | None
    start_state: Callable[[Params], TrainState]
    step: int
    stage_step: int
    lr_scale: float
    notes: tuple[str, ...]

    @property
    def model(self) -> Model:
        """The policy."""
        return self.objectives[0].model


def open_case(
    run: Path,
    step: int,
    *,
    keys: Mapping[str, Any],
    values: str | None = None,
    checkpoint: int | None = None,
    has_updates: bool = False,
    log: Callable[[str], None] = lambda _: None,
) -> Case:
    """Reads all that two objectives are compared by; nothing of the run is changed.

    Args:
        run: its workdir.
        step: over all stages, whose trajectories were recorded.
        keys: of the other objective, where they differ from the run's.
        values: YAML or JSON file of such keys, which `keys` override.
        checkpoint: step of the weights; see `choose_checkpoint`.
        has_updates: the run's optimizer is wanted too.
        log: told what is loaded.

    Raises:
        FileNotFoundError, ValueError: no such run, step, checkpoint or key, or a model or a batch
            that cannot be compared; says what is expected.
    """
    own, other = _configurations(run, keys, values)
    changed = _changes(own, other)
    groups = read_groups(run, step, own.rollout.group_size)
    folder = run / "checkpoints"
    chosen = choose_checkpoint(folder, step, checkpoint)
    position = read_object(folder / str(chosen) / "position" / "metadata")
    keep_programs(own.compilation_cache, log)
    model, is_trigger = _make_model(own, log)
    kl_is_paid = own.kl.coef != 0 and own.kl.place == "reward"
    objectives = []
    for index, config in enumerate((own, other)):
        method = method_of(config)
        objectives.append(
            Objective(
                method=method,
                model=model,
                stage=make_stages(config, model, method)["train"],
                controllers=Controllers.from_json(position.get("controllers", {}), method),
                is_trigger=is_trigger,
                charges_kl=index == 1 and not kl_is_paid,
            )
        )
    first, second = objectives
    progress = Progress.from_json(position, first.method)
    is_under_way = progress.stage == "train" and progress.stage_step > 0
    trained, mesh, optimizer = model.trained, model.mesh, first.stage.optimizer
    shapes = trained.abstract_params()
    target = abstract(shapes, param_shardings(mesh, trained))
    targets: dict[str, Any] = {"params": target}
    if is_under_way and first.method.has_reference:
        targets["ref_params"] = target
    if is_under_way and has_updates:
        fresh = jax.eval_shape(lambda params: init_state(params, mesh, trained, optimizer), shapes)
        state = abstract(fresh, state_shardings(mesh, trained, optimizer))
        targets["optimizer"] = optimizer_items(state)
    _, items = restore_items(folder, targets, chosen)
    params, ref_params = items["params"], items.get("ref_params")
    if ref_params is None and (first.method.has_reference or second.method.has_reference):
        if is_under_way:
            raise ValueError(
                f"config.kl.coef={other.kl.coef} needs the policy as it was at the start of the "
                f"stage, of which checkpoint {chosen} has no copy, since the run has no such term; "
                "expected --with.kl.anchor=old, or the stage's first step."
            )
        ref_params = jax.tree.map(jnp.copy, params)

    def start_state(params: Params) -> TrainState:
        if "optimizer" in items:
            return TrainState(params=params, **items["optimizer"])
        return init_state(params, mesh, trained, optimizer)

    notes = []
    if chosen != step - 1:
        when = "has been updated by it" if chosen >= step else "is older"
        notes.append(
            f"the batch of step {step} was sampled after step {step - 1}; checkpoint {chosen} "
            f"{when}, so a step's own numbers differ from these"
        )
    if len(groups) != own.rollout.tasks_per_step:
        notes.append(
            f"{len(groups)} of the step's {own.rollout.tasks_per_step} groups are recorded; "
            "statistics and weights are of these alone"
        )
    if not changed:
        notes.append("both objectives are the run's own: no key was changed by --with")
    begun = progress.step - (progress.stage_step if progress.stage == "train" else 0)
    return Case(
        checkpoint=chosen,
        groups=groups,
        changed=changed,
        objectives=(first, second),
        params=params,
        ref_params=ref_params,
        start_state=start_state,
        step=step - 1,
        stage_step=max(step - 1 - begun, 0),
        lr_scale=progress.watched.lr_scale,
        notes=tuple(notes),
    )


def choose_checkpoint(folder: Path, step: int, wanted: int | None = None) -> int:
    """The checkpoint at which a step's batch is compared.

    It is the one of the step before, whose weights sampled the batch and were updated by it;
    without it the newest at or before the step.

    Args:
        folder: of all checkpoints.
        step: that recorded the batch.
        wanted: rather this one.

    Raises:
        ValueError: there is none such; names those that there are.
    """
    steps = steps_in(folder)
    held = ", ".join(map(str, steps)) or "none"
    if wanted is not None:
        if wanted not in steps:
            raise ValueError(
                f"--checkpoint={wanted}: {folder} has no such checkpoint; it holds {held}."
            )
        return wanted
    if step - 1 in steps:
        return step - 1
    earlier = [one for one in steps if one <= step]
    if not earlier:
        raise ValueError(
            f"--step={step}: {folder} has no checkpoint of this step or before; it holds {held}. "
            "Name one by --checkpoint, or raise config.checkpoint.keep in a run that is to be "
            "compared."
        )
    return max(earlier)


def _configurations(
    run: Path, keys: Mapping[str, Any], values: str | None
) -> tuple[ConfigDict, ConfigDict]:
    """The run's configuration and the other, checked, with the mesh of this host."""
    own = read_config(run)
    other = own.copy_and_resolve_references()
    if values is not None:
        load_values(other, values)
    other.update_from_flattened_dict(dict(keys))
    _check_changes(own, other)
    for config in (own, other):
        config.stages = ("train",)
        config.search.replay, config.optimizer.offload = "off", False
        leave_out_scores(config)  # rewards are as they were paid
        name_installed(config)
        validate(config, needs_data=False)
        # The mesh of this host may have other shards than the run's: whole rows on each.
        shards, rows = fit_mesh(config), config.optimizer.micro_rows
        config.optimizer.micro_rows = -(-max(rows, 1) // shards) * shards
    return own, other


def _changes(own: ConfigDict, other: ConfigDict) -> dict[str, tuple[Any, Any]]:
    before, after = flatten(own), flatten(other)
    return {key: (before[key], after[key]) for key in before if before[key] != after[key]}


def _check_changes(own: ConfigDict, other: ConfigDict) -> None:
    """Refuses another value of what was decided before the batch was recorded."""
    changed = _changes(own, other)
    for key, (before, after) in changed.items():
        if not (key.startswith(SECTIONS) or key in KEYS):
            may = ", ".join([*(f"{section}*" for section in SECTIONS), *KEYS])
            raise ValueError(
                f"config.{key} is {after!r}, and the run has {before!r}; trajectories and rewards "
                f"are compared as they were recorded, so expected no other changes than of {may}."
            )
    if own.kl.coef != 0 and own.kl.place == "reward":
        for key in changed:
            if key.startswith("kl."):
                raise ValueError(
                    f"config.{key} is {changed[key][1]!r}, and the run has {changed[key][0]!r}; "
                    "its recorded rewards hold its KL term (kl.place='reward'), so expected kl.* "
                    "as the run has it."
                )


def _make_model(config: ConfigDict, log: Callable[[str], None]) -> tuple[Model, Any]:
    """The policy, with what is not trained of it, and which ids may count as wavering.

    Raises:
        ValueError: it reads images, or its sampler's choice of experts is replayed.
    """
    mesh = make_mesh(**config.mesh)
    architecture, tokenizer = model_and_tokenizer(config, mesh, is_played=True)
    if architecture.tower is not None:
        raise ValueError(
            f"config.model.path={config.model.path!r} is a model that reads images "
            f"({type(architecture).__name__}), of which records of trajectories hold the names "
            "alone; expected a model of text."
        )
    if config.model.replay:
        raise ValueError(
            "config.model.replay is True, and records of trajectories do not hold the "
            "experts that the sampler chose; expected a run without it."
        )
    policy = policy_of(config, architecture)
    if isinstance(policy, Around):
        policy.check()
    model = make_model(config, mesh, policy, tokenizer)
    folder = model_folder(config.model.path, log)
    model.base = load_base(model, folder, config.model.architecture, lambda done, total: None)
    return model, trigger_ids(tokenizer, config.shaping.trigger_words)
