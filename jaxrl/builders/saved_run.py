"""Load a saved run: its configuration, and the weights that it has trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
from ml_collections import ConfigDict

from jaxrl.builders.components import RunComponents, build
from jaxrl.builders.resolved import ResolvedConfig, adapter_key, resolve_names, training_steps
from jaxrl.builders.validation import check_rules, check_values
from jaxrl.config.loading import load_values
from jaxrl.config.schema import KEYS, OWN_MODEL, default_config
from jaxrl.logs.display import Display
from jaxrl.models.hf_weights import load_hf
from jaxrl.models.initial_weights import load_base
from jaxrl.models.policy import Model
from jaxrl.runtime.checkpoint import read_newest_position, restore_params
from jaxrl.runtime.compilation_cache import use_compilation_cache
from jaxrl.runtime.host_memory import give_back_after_compiling
from jaxrl.runtime.resume import add_code_folders, check_step, prompt_time
from jaxrl.runtime.sharding import abstract, mesh_sizes, param_shardings
from jaxrl.sampling.weights import donate
from jaxrl.training.run_state import Progress
from jaxrl.types import Params
from jaxrl.utils.callables import is_dotted
from jaxrl.utils.files import system_message
from jaxrl.utils.json_io import read_object
from jaxrl.utils.text import printable


def line(error: Exception) -> str:
    """Return the line that reports an error to a user."""
    known = system_message(error) if isinstance(error, OSError) else None
    return printable(f"error: {' '.join((known or str(error)).split())}")


def load_saved_run(
    run: Path,
    model: Path | None,
    display: Display,
    *,
    step: int | None = None,
    keys: Mapping[str, Any] = MappingProxyType({}),
    is_talk: bool = False,
) -> tuple[RunComponents, ResolvedConfig]:
    """Build the components that play a run's episodes, with weights, and resolve its names.

    Args:
        run: Workdir of the run.
        model: Model folder to use instead of what the run has trained.
        display: Progress.
        step: Step whose checkpoint is loaded; the end of the run by default.
        keys: Values that replace those of the run.
        is_talk: Prompts hold a conversation, and may take all but the tokens of an answer.

    Raises:
        FileNotFoundError, ValueError: There is no such run, model or step, or nothing is trained
            yet.
    """
    config = read_config(run)
    if keys:
        config.update_from_flattened_dict(keys)
    model = chosen_model(config, run, model, step)
    if model is not None:
        config.model.path = str(model)
        leave_out_adapter(config)  # it is merged into what a run exports
    config.policy.name = OWN_MODEL
    if is_talk:
        rollout = config.rollout
        answer, longest = 1, rollout.max_total_tokens
        if rollout.context.name != "none":
            answer, longest = rollout.context.turn_tokens, rollout.context.max_tokens
        longest -= max(min(rollout.max_response_tokens, 64), answer)
        rollout.max_prompt_tokens = max(rollout.max_prompt_tokens, longest)
    resolved = resolve_saved(config, is_changed=bool(keys))
    config.search.replay = "off"  # no recording holds a new question, and the run stays as it is
    fit_mesh(config)
    use_compilation_cache(config.compilation_cache, display.log)
    give_back_after_compiling()
    components = build(resolved, display.activity, now=prompt_time(run))
    for note in components.notes:
        display.log(note)
    params, weights = load_weights(components.model, config, run, model, display, step=step)
    display.log(f"weights: {weights}")
    components.engine.set_weights(donate(components.model.whole(params)))
    return components, resolved


def chosen_model(
    config: ConfigDict, run: Path, model: Path | None, step: int | None
) -> Path | None:
    """Return the folder of the weights to load; None if they are in a checkpoint.

    Args:
        config: Configuration of the run.
        run: Workdir of the run.
        model: Model folder to use instead of what the run has trained.
        step: Step whose checkpoint is loaded.

    Raises:
        FileNotFoundError: There is no such step, or nothing is trained yet.
    """
    if step is not None:
        check_step(run / "checkpoints", step)
    _, saved = read_newest_position(run / "checkpoints")
    # The rest of the progress belongs to a method whose functions may be missing here.
    names = ("stage", "stage_step", "stopped_early", "record")
    position = Progress(**{name: saved[name] for name in names if name in (saved or ())})
    is_training = position.is_under_way(training_steps(config))
    export = run / "export"
    if model is None and step is None and not is_training and (export / "config.json").is_file():
        model = export
    if model is None and not saved:
        raise FileNotFoundError(
            f"{run} holds neither export/ nor a checkpoint: no weights are trained yet. Name a "
            "model with --model=DIR."
        )
    return model


def read_config(run: Path) -> ConfigDict:
    """Return the configuration that a run began with, and make its modules importable.

    Raises:
        FileNotFoundError, ValueError: There is none, or it has unknown keys.
    """
    file = run / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{run} is no run: it holds no config.json. Name a run's workdir.")
    if "architectures" in read_object(file):
        raise ValueError(f"{run} is a model, no run; name the run's workdir, and --model={run}.")
    add_code_folders(run)
    config = default_config()
    load_values(config, str(file), drops_missing=True)
    return config


def resolve_saved(config: ConfigDict, *, is_changed: bool) -> ResolvedConfig:
    """Resolve the names that answering needs; training, data and rewards are left out.

    Args:
        config: The run's configuration, which is changed.
        is_changed: Check the rules between keys, because some differ from the run's.
    """
    if is_changed:
        check_values(config)
    config.stages = ()  # no data are read
    judges, prices = config.reward.judges, config.ledger.prices
    config.ledger.prices = {name: prices[name] for name in prices if name not in judges}
    config.ledger.max_cost = 0.0  # the budget of the run
    config.reward.settings, config.reward.judges, config.reward.weights = {}, {}, {}
    leave_out_method(config)
    resolved = resolve_names(config, needs_data=False)
    if is_changed:
        check_rules(resolved, needs_data=False)
    config.reward.correct = resolved.correct_by
    # Nothing scores the answers, but an episode ends with a reward.
    return dataclasses.replace(resolved, reward_weights={resolved.environment_parts[0]: 1.0})


def leave_out_adapter(config: ConfigDict) -> None:
    """Set the keys of an adapter to their defaults, as for a model that it is merged into."""
    section = adapter_key(config).rpartition(".")[0]
    defaults = {key: entry.default for key, entry in KEYS.items() if key.startswith(f"{section}.")}
    config.update_from_flattened_dict(defaults if section else {})


def leave_out_method(config: ConfigDict) -> None:
    """Replace user code that only training calls by the defaults: it may be missing here."""
    for key, entry in KEYS.items():
        section, _, last = key.rpartition(".")
        if section.split(".")[0] in METHOD and entry.names_code and is_dotted(config[key]):
            config[section][last] = entry.default
            if last == "name":
                config[section].settings = {}
            if section == "advantage":
                config.advantage.name = "reinforce_plus_plus"  # groups of one are valid


METHOD = ("advantage", "loss", "kl", "filter", "optimizer", "sft", "watch")
"""Sections of the training method."""


def fit_mesh(config: ConfigDict) -> int:
    """Fit the mesh and the rows to this host's devices, for groups of one trajectory.

    Returns:
        Number of devices over which rows of training are split.
    """
    num_devices = jax.device_count()
    config.mesh.rollout_devices = 0
    try:
        sizes = mesh_sizes(num_devices, **config.mesh)
    except ValueError:
        config.mesh.update(data=1, fsdp=-1, context=1, expert=1, tensor=1)
        sizes = mesh_sizes(num_devices, **config.mesh)
    shards = sizes["data"] * sizes["fsdp"] * sizes["expert"]
    config.rollout.max_num_seqs = shards * sizes["context"]
    config.rollout.group_size = 1
    config.optimizer.micro_rows = config.sft.optimizer.micro_rows = shards
    return shards


def load_weights(
    policy: Model,
    config: ConfigDict,
    run: Path,
    model: Path | None,
    display: Display,
    *,
    step: int | None = None,
) -> tuple[Params, str]:
    """Load the weights of the folder `model`, or of a checkpoint of the run: `step` or the newest.

    Returns:
        Parameters, and where they come from.
    """
    architecture = config.model.architecture
    if model is not None:
        progress = display.counter("loading weights, MiB")
        params = load_hf(
            model,
            policy.mesh,
            architecture=architecture,
            progress=progress,
            is_late=True,
            log=display.log,
        )
        return params, str(model)
    policy.base = load_base(policy, config.model.path, architecture, lambda done, total: None)
    shardings = param_shardings(policy.mesh, policy.trained)
    target = abstract(policy.trained.abstract_params(), shardings)
    at, params = restore_params(run / "checkpoints", target, step)
    return params, f"checkpoint of step {at}" + ", in the middle of its stage" * (step is None)
