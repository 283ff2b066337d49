"""Load a saved run's configuration and trained weights for inference."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
from ml_collections import ConfigDict

from jaxrl.builders.components import RunComponents, build
from jaxrl.builders.hub import download_files
from jaxrl.builders.resolved import (
    ResolvedConfig,
    count_training_steps,
    get_adapter_key,
    resolve_names,
)
from jaxrl.builders.validation import check_rules, check_values
from jaxrl.config.environments import split_config
from jaxrl.config.loading import load_values
from jaxrl.config.schema import KEYS, LOCAL_MODEL, default_config
from jaxrl.logs.display import Display
from jaxrl.models.hf_weights import load_hf
from jaxrl.models.initial_weights import load_frozen_params
from jaxrl.models.policy import Model
from jaxrl.runtime.checkpoint import read_latest_position, restore_params
from jaxrl.runtime.compilation_cache import use_compilation_cache
from jaxrl.runtime.host_memory import enable_memory_trimming
from jaxrl.runtime.resume import add_code_folders, check_checkpoint_exists, read_prompt_time
from jaxrl.runtime.sharding import compute_mesh_sizes, make_param_shardings, make_restore_target
from jaxrl.sampling.weights import donate
from jaxrl.training.run_state import Progress
from jaxrl.types import Params
from jaxrl.utils.callables import is_dotted_path
from jaxrl.utils.files import format_os_error
from jaxrl.utils.json_io import read_object
from jaxrl.utils.text import escape_control_chars


def format_error_line(error: Exception) -> str:
    """Format an exception as a single-line error message."""
    message = format_os_error(error) if isinstance(error, OSError) else None
    return escape_control_chars(f"error: {' '.join((message or str(error)).split())}")


def load_saved_run(
    run: Path,
    model: Path | None,
    display: Display,
    *,
    step: int | None = None,
    overrides: Mapping[str, Any] = MappingProxyType({}),
    for_chat: bool = False,
    environment: str = "",
) -> tuple[RunComponents, ResolvedConfig]:
    """Build the components of a saved run and load its weights, for inference.

    Args:
        run: Workdir of the run.
        model: Model folder whose weights replace the trained weights.
        display: Progress display.
        step: Step of the checkpoint to load; by default the latest weights.
        overrides: Values that replace those in the run's configuration, by dotted key.
        for_chat: True for multi-turn chat, where the prompt may use the entire context except the
            tokens reserved for the answer.
        environment: Name of the environment, if the run has several.

    Raises:
        FileNotFoundError, ValueError: The run, model or step does not exist, or the run has no
            trained weights yet.
    """
    # Adapt the run's configuration.
    config = select_environment(read_config(run), environment)
    if overrides:
        config.update_from_flattened_dict(overrides)
    model = resolve_weights_folder(config, run, model, step)
    if model is not None:
        config.model.path = str(model)
        disable_adapter(config)  # exports have it merged
    config.policy.name = LOCAL_MODEL
    if for_chat:
        rollout = config.rollout
        reserved_tokens, prompt_tokens = 1, rollout.max_total_tokens
        if rollout.context.name != "none":
            reserved_tokens, prompt_tokens = rollout.context.turn_tokens, rollout.context.max_tokens
        prompt_tokens -= max(min(rollout.max_response_tokens, 64), reserved_tokens)
        rollout.max_prompt_tokens = max(rollout.max_prompt_tokens, prompt_tokens)
    resolved = resolve_for_inference(config, has_overrides=bool(overrides))
    config.search.replay = "off"  # do not add new questions to the run's recording
    # Build for this host's devices, then load the weights.
    fit_config_to_host(config)
    use_compilation_cache(config.compilation_cache, display.log)
    enable_memory_trimming()
    components = build(resolved, display.show_activity, now=read_prompt_time(run))
    for note in components.notes:
        display.log(note)
    params, weights = load_weights(components.model, config, run, model, display, step=step)
    display.log(f"weights: {weights}")
    components.engine.set_weights(donate(components.model.merge(params)))
    return components, resolved


def resolve_weights_folder(
    config: ConfigDict, run: Path, model: Path | None, step: int | None
) -> Path | None:
    """Return the folder of the weights to load; None if they are in a checkpoint.

    Args:
        config: Configuration of the run.
        run: Workdir of the run.
        model: Model folder whose weights replace the trained weights.
        step: Step of the checkpoint to load; by default the latest weights.

    Raises:
        FileNotFoundError: The step does not exist, or the run has no trained weights yet.
    """
    if step is not None:
        check_checkpoint_exists(run / "checkpoints", step)
    _, saved = read_latest_position(run / "checkpoints")
    # The other fields of `Progress` may depend on user code, which may be missing on this host.
    names = ("stage", "stage_step", "stopped_early", "record")
    position = Progress(**{name: saved[name] for name in names if name in (saved or ())})
    is_training = position.is_mid_stage(count_training_steps(config))
    export = run / "export"
    if model is None and step is None and not is_training and (export / "config.json").is_file():
        model = export
    if model is None and not saved:
        raise FileNotFoundError(
            f"{run} contains neither export/ nor a checkpoint, so it has no trained weights yet. "
            "Name a model with --model=DIR."
        )
    return model


def read_config(run: Path) -> ConfigDict:
    """Load a run's configuration, and make its user modules importable.

    Raises:
        FileNotFoundError, ValueError: The folder is not a run, or its config has unknown keys.
    """
    file = run / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{run} has no config.json; expected the workdir of a run.")
    if "architectures" in read_object(file):
        raise ValueError(f"{run} is a model; name a run's workdir, and set --model={run}.")
    add_code_folders(run)
    config = default_config()
    load_values(config, str(file), skip_missing=True)
    return config


def select_environment(config: ConfigDict, name: str) -> ConfigDict:
    """Return the configuration of an environment; its name is "" if the run has only one.

    Raises:
        ValueError: There is no such environment.
    """
    environments = {"": config}
    if config.environments:
        environments = {key: value for key, (_, value) in split_config(config).items()}
    if name not in environments:
        names = ", ".join(map(repr, environments))
        raise ValueError(f"--environment is {name!r}; expected one of {names}.")
    return environments[name]


def resolve_for_inference(config: ConfigDict, *, has_overrides: bool) -> ResolvedConfig:
    """Resolve the names that inference needs, and download the model if it is on the Hub.

    Names for training, data and rewards are not resolved.

    Args:
        config: Configuration of the run; changed in place.
        has_overrides: True if values were overridden and must be validated again.
    """
    if has_overrides:
        check_values(config)
    config.stages = ()  # no data is read
    config.environments = {}  # `config` is already that of one environment
    judges, prices = config.reward.judges, config.ledger.prices
    config.ledger.prices = {name: prices[name] for name in prices if name not in judges}
    config.ledger.max_cost = 0.0  # the budget applies to the run only
    config.reward.settings, config.reward.judges, config.reward.weights = {}, {}, {}
    reset_training_code(config)
    resolved = resolve_names(config, needs_data=False)
    if has_overrides:
        check_rules(resolved, needs_data=False)
    config.reward.correct = resolved.correctness_part
    resolved = download_files(resolved)
    # Scoring an episode requires a reward part, although inference ignores the reward.
    return dataclasses.replace(resolved, reward_weights={resolved.environment_parts[0]: 1.0})


def disable_adapter(config: ConfigDict) -> None:
    """Disable the adapter in the config of a model that already contains the merged adapter."""
    section = get_adapter_key(config).rpartition(".")[0]
    defaults = {key: entry.default for key, entry in KEYS.items() if key.startswith(f"{section}.")}
    config.update_from_flattened_dict(defaults if section else {})


def reset_training_code(config: ConfigDict) -> None:
    """Replace user code for training with the defaults, since its files may be missing."""
    for key, entry in KEYS.items():
        section, _, last = key.rpartition(".")
        if (
            section.split(".")[0] in METHOD_SECTIONS
            and entry.names_code
            and is_dotted_path(config[key])
        ):
            config[section][last] = entry.default
            if last == "name":
                config[section].settings = {}
            if section == "advantage":
                config.advantage.name = "reinforce_plus_plus"  # accepts groups of one
    config.log.trackers = ()


METHOD_SECTIONS = ("advantage", "loss", "kl", "filter", "optimizer", "sft", "watch")
"""Config sections that only training uses."""


def fit_config_to_host(config: ConfigDict) -> int:
    """Adjust the mesh and batch sizes in `config` to this host's devices; set the group size to 1.

    Returns:
        Number of shards of a training batch.
    """
    num_devices = jax.device_count()
    config.mesh.rollout_devices = 0
    try:
        sizes = compute_mesh_sizes(num_devices, **config.mesh)
    except ValueError:
        config.mesh.update(data=1, fsdp=-1, context=1, expert=1, tensor=1)
        sizes = compute_mesh_sizes(num_devices, **config.mesh)
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
    """Load the weights from the folder `model`, or from a checkpoint if `model` is None.

    Returns:
        Parameters, and a description of their source.
    """
    architecture = config.model.architecture
    if model is not None:
        progress = display.make_progress_callback("loading weights, MiB")
        params = load_hf(
            model,
            policy.mesh,
            architecture=architecture,
            progress=progress,
            is_lazy=True,
            log=display.log,
        )
        return params, str(model)
    policy.base = load_frozen_params(
        policy, config.model.path, architecture, lambda done, total: None
    )
    shardings = make_param_shardings(policy.mesh, policy.trained)
    target = make_restore_target(policy.trained.make_abstract_params(), shardings)
    loaded_step, params = restore_params(run / "checkpoints", target, step)
    return params, f"checkpoint of step {loaded_step}"
