"""Load the model of a run or a folder into a serving engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxrl.builders.components import (
    build_engine,
    build_model,
    collect_template_notes,
    read_model_and_tokenizer,
)
from jaxrl.builders.method import build_policy_architecture
from jaxrl.builders.saved_run import (
    disable_adapter,
    fit_config_to_host,
    load_weights,
    read_config,
    resolve_for_inference,
    resolve_weights_folder,
    select_environment,
)
from jaxrl.config.schema import LOCAL_MODEL, default_config
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.extras.serve.engine import ServedEngine
from jaxrl.logs.display import Display
from jaxrl.models.policy import Model
from jaxrl.models.registry import read_architecture
from jaxrl.models.wrapper import WrappedArchitecture
from jaxrl.runtime.compilation_cache import use_compilation_cache
from jaxrl.runtime.host_memory import enable_memory_trimming
from jaxrl.runtime.resume import read_prompt_time
from jaxrl.runtime.sharding import make_mesh
from jaxrl.sampling.stop_strings import StopAutomaton
from jaxrl.sampling.weights import donate
from jaxrl.utils.json_io import read_object


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """Model that is ready to be served.

    Attributes:
        name: Model name in requests and responses.
        model: Policy model.
        tokenizer: Tokenizer with the chat template.
        engine: Engine with the weights loaded.
        stops: Default stop strings: those that end a turn in the run.
    """

    name: str
    model: Model
    tokenizer: Tokenizer
    engine: ServedEngine
    stops: tuple[str, ...] = ()


def load_model(
    path: Path,
    display: Display,
    *,
    model: Path | None = None,
    step: int | None = None,
    num_rows: int = 16,
    name: str = "",
    environment: str = "",
    keys: Mapping[str, Any] = MappingProxyType({}),
) -> LoadedModel:
    """Load the weights of a run or a model folder into an engine.

    Args:
        path: Workdir of a run, or a model folder as in `config.model.path`.
        display: Progress display.
        model: Folder of a model to serve instead of the run's checkpoint.
        step: Step of the run's checkpoint; the latest by default.
        num_rows: Number of completions to decode concurrently.
        name: Model name in requests and responses; the last part of `path` by default.
        environment: Name of the environment that defines the stop strings, if the run has several.
        keys: Config keys to override, with their values.

    Raises:
        FileNotFoundError, ValueError: The run, model, step or key does not exist.
    """
    # A run has a configuration; a model folder gets the default one.
    if is_run(path):
        config = select_environment(read_config(path), environment)
        config.update_from_flattened_dict(dict(keys))
        model = resolve_weights_folder(config, path, model, step)
    elif model is None and step is None:
        config, model = default_config(), path
        config.update_from_flattened_dict(dict(keys))
    else:
        raise ValueError(f"{path} is not a run; --model and --step need one.")
    if model is not None:
        config.model.path = str(model)
        disable_adapter(config)  # a run's export includes it
    config.policy.name = LOCAL_MODEL
    # A prompt may fill the context window except for one token.
    rollout = config.rollout
    rollout.max_prompt_tokens = max(rollout.max_total_tokens - 1, 1)
    rollout.max_response_tokens = min(rollout.max_response_tokens, rollout.max_prompt_tokens)
    resolved = resolve_for_inference(config, has_overrides=bool(keys))
    if "rollout.max_total_tokens" not in keys:
        max_positions = read_architecture(
            config.model.path, config.model.architecture
        ).max_positions
        rollout.max_total_tokens = min(rollout.max_total_tokens, max_positions)
    fit_config_to_host(config)
    config.model.replay = False
    rollout.max_prompt_tokens = rollout.max_total_tokens - 1
    rollout.max_num_seqs *= -(-num_rows // rollout.max_num_seqs)  # a multiple of the mesh's minimum
    use_compilation_cache(config.compilation_cache, display.log)
    enable_memory_trimming()
    mesh = make_mesh(**config.mesh)
    now = read_prompt_time(path) if is_run(path) else None
    architecture, tokenizer = read_model_and_tokenizer(
        resolved, mesh, is_local=True, now=now, log=display.log
    )
    policy = build_policy_architecture(resolved, architecture)
    if isinstance(policy, WrappedArchitecture):
        policy.check_files_and_settings()
    # The host matches stop strings, which differ between requests, without the automaton.
    automaton = StopAutomaton(tokenizer.vocab_bytes, ())
    engine = build_engine(resolved, policy, mesh, automaton, tokenizer, engine_class=ServedEngine)
    assert isinstance(engine, ServedEngine)
    loaded = LoadedModel(
        name=name or path.absolute().name,
        model=build_model(resolved, mesh, policy, tokenizer),
        tokenizer=tokenizer,
        engine=engine,
        stops=resolved.stop_strings if is_run(path) else (),
    )
    if loaded.stops:
        display.log(f"default stop strings, from the run: {', '.join(loaded.stops)}")
    params, weights = load_weights(loaded.model, config, path, model, display, step=step)
    for note in collect_template_notes(tokenizer):
        display.log(note)
    display.log(f"weights: {weights}")
    engine.set_weights(donate(loaded.model.merge(params)))
    return loaded


def is_run(path: Path) -> bool:
    """Return True if the folder's `config.json` belongs to a run."""
    file = path / "config.json"
    return file.is_file() and "rollout" in read_object(file)
