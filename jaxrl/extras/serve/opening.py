"""A run or a model folder made into an engine that answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxrl.builders.components import (
    build_engine,
    build_model,
    read_model_and_tokenizer,
    template_notes,
)
from jaxrl.builders.method import policy_architecture
from jaxrl.builders.saved_run import (
    chosen_model,
    fit_mesh,
    leave_out_adapter,
    load_weights,
    read_config,
    resolve_saved,
)
from jaxrl.config.schema import OWN_MODEL, default_config
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.extras.serve.engine import ServedEngine
from jaxrl.logs.display import Display
from jaxrl.models.policy import Model
from jaxrl.models.registry import read_model
from jaxrl.models.wrapper import Around
from jaxrl.runtime.compilation_cache import use_compilation_cache
from jaxrl.runtime.host_memory import give_back_after_compiling
from jaxrl.runtime.resume import prompt_time
from jaxrl.runtime.sharding import make_mesh
from jaxrl.sampling.stop_strings import StopAutomaton
from jaxrl.sampling.weights import given_up
from jaxrl.utils.json_io import read_object

LENGTH = "rollout.max_total_tokens"


@dataclass(frozen=True, kw_only=True)
class Served:
    """A model that answers.

    Attributes:
        name: by which clients call it.
        mesh: of its devices.
        model: the policy.
        tokenizer: with its chat template.
        template_arguments: of the chat template.
        engine: has the weights.
        stops: strings that end an answer by default: of a run, those that end its turns.
    """

    name: str
    mesh: Mesh
    model: Model
    tokenizer: Tokenizer
    template_arguments: Mapping[str, Any]
    engine: ServedEngine
    stops: tuple[str, ...] = ()


def open_served(
    place: Path,
    display: Display,
    *,
    model: Path | None = None,
    step: int | None = None,
    rows: int = 16,
    name: str = "",
    keys: Mapping[str, Any] = MappingProxyType({}),
) -> Served:
    """Makes an engine with the weights of a run, or of a model of its own.

    Args:
        place: a run's workdir, or a model as `config.model.path`.
        display: progress.
        model: answers in place of what a run has trained.
        step: whose checkpoint answers; by default what the run has come to.
        rows: answers that are written side by side.
        name: by which clients call it; by default the last part of `place`.
        keys: of the configuration, that are set to other values than the run's or the default.

    Raises:
        FileNotFoundError, ValueError: there is no such run, model, step or key.
    """
    if is_run(place):
        config = read_config(place)
    elif model is None and step is None:
        config, model = default_config(), place
    else:
        raise ValueError(f"{place} is no run, so that --model and --step name nothing in it.")
    config.update_from_flattened_dict(dict(keys))
    if is_run(place):
        model = chosen_model(config, place, model, step)
    if model is not None:
        config.model.path = str(model)
        leave_out_adapter(config)  # it is merged into what a run exports
    config.policy.name = OWN_MODEL
    rollout = config.rollout
    rollout.max_prompt_tokens = max(rollout.max_total_tokens - 1, 1)
    rollout.max_response_tokens = min(rollout.max_response_tokens, rollout.max_prompt_tokens)
    resolved = resolve_saved(config, is_changed=bool(keys))
    if LENGTH not in keys:
        longest = read_model(config.model.path, config.model.architecture).max_positions
        config.rollout.max_total_tokens = min(config.rollout.max_total_tokens, longest)
    _fit(config, rows)
    use_compilation_cache(config.compilation_cache, display.log)
    give_back_after_compiling()
    mesh = make_mesh(**config.mesh)
    now = prompt_time(place) if is_run(place) else None
    architecture, tokenizer = read_model_and_tokenizer(
        resolved, mesh, is_local=True, now=now, log=display.log
    )
    policy = policy_architecture(resolved, architecture)
    if isinstance(policy, Around):
        policy.check()
    # Stop strings are those of each request, and are looked for on the host.
    automaton = StopAutomaton(tokenizer.vocab_bytes, ())
    engine = build_engine(resolved, policy, mesh, automaton, tokenizer, kind=ServedEngine)
    assert isinstance(engine, ServedEngine)
    served = Served(
        name=name or place.absolute().name,
        mesh=mesh,
        model=build_model(resolved, mesh, policy, tokenizer),
        tokenizer=tokenizer,
        template_arguments=dict(config.prompt.chat_template_kwargs),
        engine=engine,
        stops=resolved.stop_strings if is_run(place) else (),
    )
    if served.stops:
        ends = ", ".join(served.stops)
        display.log(f"answers end at {ends}, as turns in the run, unless a request names a stop")
    params, weights = load_weights(served.model, config, place, model, display, step=step)
    for note in template_notes(tokenizer):
        display.log(note)
    display.log(f"weights: {weights}")
    engine.set_weights(given_up(served.model.whole(params)))
    return served


def is_run(place: Path) -> bool:
    """Returns True of a run's workdir, whose `config.json` is a configuration and no model's."""
    file = place / "config.json"
    return file.is_file() and "rollout" in read_object(file)


def _fit(config: ConfigDict, rows: int) -> None:
    """Changes mesh, rows and the length of prompts to those of an endpoint on this host."""
    shards = fit_mesh(config)
    config.rollout.group_size = 1
    config.optimizer.micro_rows = config.sft.optimizer.micro_rows = shards
    least = config.rollout.num_rows
    config.rollout.num_rows = -(-rows // least) * least
    config.rollout.max_prompt_tokens = config.rollout.max_total_tokens - 1
    config.model.replay = False
